"""Encode blocks of text as payloads and decode them, with a predictor that works identically on both sides.

A block's symbols are cut into B lanes of equal length (the last column may be short) and coded column by column. The
symbols of one column depend only on earlier columns, so that all lanes are predicted at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from txl.compression.coder import Frequencies, Literals, RangeDecoder, RangeEncoder
from txl.compression.container import Block, digest
from txl.compression.predictors import Predictor
from txl.data.vocabulary import Vocabulary
from txl.errors import UserError

_AT_ONCE = 1 << 14  # symbols that are decoded at once
_INVALID = re.compile("([\udc80-\udcff]+)")  # bytes that are not valid UTF-8, as "surrogateescape" decodes them


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of PyTorch's threads within the block, on which the order of additions in its products depends.

    Values that must be equal in encoder and decoder are therefore computed with one thread.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Symbols:
    """The tokens of a vocabulary, and an escape, for bytes that no token covers; nothing is normalised."""

    def __init__(self, vocabulary: Vocabulary):
        if vocabulary.pieces is None:
            raise UserError(
                f"this model reads {vocabulary.kind} tokens, without the white space between them; use a model of "
                f"bytes, characters or BPE tokens"
            )
        self._vocabulary, self._pieces, unknown = vocabulary, vocabulary.pieces, vocabulary.unk_id
        of_byte = {piece[0]: token for token, piece in enumerate(self._pieces) if len(piece) == 1}
        # Symbol that is followed by a literal byte; None: every byte is a token.
        self.escape = None if len(of_byte) == 256 else len(self._pieces) if unknown is None else unknown
        # Token that is read before the first symbol, and in place of an escape that is no token: a line end.
        self.start = of_byte.get(ord("\n"), 0)
        self._token_of = {piece: token for token, piece in enumerate(self._pieces) if token != unknown}
        self._byte_symbols = np.full(256, -1 if self.escape is None else self.escape, dtype=np.int32)
        self._byte_symbols[list(of_byte)] = list(of_byte.values())

    def encode(self, data: bytes) -> tuple[np.ndarray, bytes]:
        """Return symbols, int32 [N], and the literal bytes, one for each escape among the symbols."""
        if self._vocabulary.kind == "byte":
            return self._as_bytes(data)
        text = data.decode("utf-8", errors="surrogateescape")
        if self._vocabulary.kind == "char":
            symbols, literals = list[int](), bytearray()
            for character in text:
                spelled = character.encode("utf-8", errors="surrogateescape")
                known = self._token_of.get(spelled)
                if known is None:
                    assert self.escape is not None  # a character vocabulary always needs an escape
                    symbols += [self.escape] * len(spelled)
                    literals += spelled
                else:
                    symbols.append(known)
            return np.array(symbols, dtype=np.int32), bytes(literals)
        parts = [self._as_pairs(part.encode("utf-8", errors="surrogateescape")) for part in _INVALID.split(text)]
        return np.concatenate([symbols for symbols, _ in parts]), b"".join(literals for _, literals in parts)

    def decode(self, symbols: np.ndarray, literals: bytes) -> bytes:
        """Return the bytes that `encode` encoded as symbols and literal bytes."""
        behind, text = iter(literals), bytearray()
        for at in range(0, len(symbols), _AT_ONCE):  # a Python list takes many times the memory of its array
            some = symbols[at : at + _AT_ONCE].tolist()
            spelled = [bytes([next(behind)]) if symbol == self.escape else self._pieces[symbol] for symbol in some]
            text += b"".join(spelled)
        return bytes(text)

    def read(self, symbols: np.ndarray) -> np.ndarray:
        """Return the tokens that a model reads for symbols; an escape that is no token is read as a line end."""
        return np.where(symbols == len(self._pieces), self.start, symbols)

    def _as_bytes(self, data: bytes) -> tuple[np.ndarray, bytes]:
        values = np.frombuffer(data, dtype=np.uint8)
        symbols = self._byte_symbols[values]
        return symbols, values[symbols == (-1 if self.escape is None else self.escape)].tobytes()

    def _as_pairs(self, data: bytes) -> tuple[np.ndarray, bytes]:
        try:
            symbols = self._vocabulary.encode_block(data.decode("utf-8")).astype(np.int32)
        except UnicodeDecodeError:
            return self._as_bytes(data)
        if b"".join([self._pieces[symbol] for symbol in symbols.tolist()]) == data:
            return symbols, b""
        return self._as_bytes(data)  # the tokenizer normalises its input


class BlockCodec:
    """Encoder or decoder of one file, block after block, with a new predictor of its own.

    `n_threads` threads are used if the predictor's results do not depend on their number, otherwise one.
    """

    def __init__(self, predictor: Predictor, symbols: Symbols, lanes: int, n_threads: int):
        self._predictor, self._symbols, self._lanes = predictor, symbols, lanes
        self._threads = n_threads if predictor.any_threads else 1
        self._frequencies, self._literals = Frequencies(symbols.escape), Literals()

    def encode(self, text: bytes) -> tuple[int, bytes]:
        """Return the number of symbols, and the payload: the code, or the text itself if the code is not shorter."""
        symbols, literals = self._symbols.encode(text)
        behind = np.zeros(len(symbols), dtype=np.uint8)
        behind[symbols == self._symbols.escape] = np.frombuffer(literals, dtype=np.uint8)
        encoder = RangeEncoder()
        with threads(self._threads):
            for places in self._columns(len(symbols)):
                cumulative = self._frequencies.cumulative(self._predictor.predict())
                coded, lanes = symbols[places], np.arange(len(places))
                starts, ends = cumulative[lanes, coded].tolist(), cumulative[lanes, coded + 1].tolist()
                totals, chosen = cumulative[lanes, -1].tolist(), coded.tolist()
                for lane, symbol in enumerate(chosen):
                    encoder.encode(starts[lane], ends[lane] - starts[lane], totals[lane])
                    if symbol == self._symbols.escape:
                        self._literals.encode(encoder, int(behind[places[lane]]))
                self._go_on(chosen)
            self._predictor.end_block()
        payload = encoder.finish()
        return len(symbols), payload if len(payload) < len(text) else text

    def decode(self, block: Block, name: str) -> bytes:
        """Return the block's text (UserError if it is not what was encoded; this codec cannot be used after that)."""
        if block.stored:
            text = block.payload
            self.encode(text)  # the predictor and the frequencies must read the text here as they did in the encoder
        else:
            text = self._decoded(block)
        if len(text) != block.n_bytes or digest(text) != block.digest:
            raise UserError(f"{name} was decoded to a different text: the arithmetic here differs from its writer's")
        return text

    def _decoded(self, block: Block) -> bytes:
        decoder = RangeDecoder(block.payload)
        symbols, literals = np.zeros(block.n_symbols, dtype=np.int32), np.zeros(block.n_symbols, dtype=np.uint8)
        with threads(self._threads):
            for places in self._columns(block.n_symbols):
                cumulative = self._frequencies.cumulative(self._predictor.predict())
                chosen = []
                for place, row in zip(places, cumulative, strict=False):
                    symbol = int(row.searchsorted(decoder.find(int(row[-1])), side="right")) - 1
                    decoder.take(int(row[symbol]), int(row[symbol + 1] - row[symbol]))
                    chosen.append(symbol)
                    if symbol == self._symbols.escape:
                        literals[place] = self._literals.decode(decoder)
                symbols[places] = chosen
                self._go_on(chosen)
            self._predictor.end_block()
        return self._symbols.decode(symbols, literals[symbols == self._symbols.escape].tobytes())

    def _columns(self, n_symbols: int) -> Iterator[np.ndarray]:
        """Yield for every column the places of its symbols; the first lanes are one longer if B does not divide N."""
        full, rest = divmod(n_symbols, self._lanes)
        lanes = np.arange(self._lanes)
        starts = lanes * full + np.minimum(lanes, rest)
        for column in range(full + (rest > 0)):
            yield starts[: self._lanes if column < full else rest] + column

    def _go_on(self, chosen: list[int]) -> None:
        """Update the frequencies and the predictor with the symbols of a column."""
        self._frequencies.count(chosen)
        padded = np.full(self._lanes, self._symbols.start, dtype=np.int64)
        padded[: len(chosen)] = self._symbols.read(np.array(chosen, dtype=np.int64))
        self._predictor.read(torch.from_numpy(padded), len(chosen) == self._lanes)
