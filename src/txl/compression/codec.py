"""Encode blocks of text as payloads and decode them, with a predictor that works identically on both sides.

A block's symbols are cut into B lanes of equal length (the last column may be short) and coded column by column. The
symbols of one column depend only on earlier columns, so that all lanes are predicted at once.

Shapes: B lanes, C columns, V symbols.
"""

from __future__ import annotations

import numpy as np
import torch

from txl.compression.arithmetic import threads
from txl.compression.coder import Frequencies, Literals, RangeDecoder, RangeEncoder
from txl.compression.container import Block, digest
from txl.compression.predictors import Predictor
from txl.compression.symbols import Symbols
from txl.errors import UserError


class BlockCodec:
    """Encoder or decoder of one file, block after block.

    Args:
        predictor: new predictor for the exclusive use of this codec.
        symbols: symbols of the predictor's vocabulary.
        lanes: number of lanes of the predictor.
        n_threads: number of threads, if the predictor's results do not depend on it; otherwise one thread is used.
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
        table, spelled = self._in_lanes(symbols), self._in_lanes(behind)
        encoder = RangeEncoder()
        with threads(self._threads):
            for column, some in enumerate(self._active(len(symbols))):
                cumulative = self._frequencies.cumulative(self._predictor.predict())
                coded = table[:some, column]
                lanes = np.arange(some)
                starts = cumulative[lanes, coded].tolist()
                ends = cumulative[lanes, coded + 1].tolist()
                totals = cumulative[:some, -1].tolist()
                chosen = coded.tolist()
                for lane in range(some):
                    encoder.encode(starts[lane], ends[lane] - starts[lane], totals[lane])
                    if chosen[lane] == self._symbols.escape:
                        self._literals.encode(encoder, int(spelled[lane, column]))
                self._go_on(chosen)
            self._predictor.end_block()
        payload = encoder.finish()
        return len(symbols), payload if len(payload) < len(text) else text

    def decode(self, block: Block, name: str) -> bytes:
        """Return the block's text.

        Raises:
            UserError: if the result is not the text that was encoded; this codec cannot be used after that.
        """
        if block.stored:
            text = block.payload
            self.encode(text)  # the predictor and the frequencies must read the text here as they did in the encoder
        else:
            text = self._decoded(block)
        if len(text) != block.n_bytes or digest(text) != block.digest:
            raise UserError(
                f"{name} was decoded to a different text: the arithmetic here differs from that of the "
                f"machine that wrote it"
            )
        return text

    def _decoded(self, block: Block) -> bytes:
        """Return the text of a block that was coded."""
        decoder = RangeDecoder(block.payload)
        table, spelled = (self._in_lanes(np.zeros(block.n_symbols, dtype=kind)) for kind in (np.int32, np.uint8))
        with threads(self._threads):
            for column, some in enumerate(self._active(block.n_symbols)):
                cumulative = self._frequencies.cumulative(self._predictor.predict())
                chosen = []
                for lane in range(some):
                    row = cumulative[lane]
                    at = decoder.find(int(row[-1]))
                    symbol = int(row.searchsorted(at, side="right")) - 1
                    start = int(row[symbol])
                    decoder.take(start, int(row[symbol + 1]) - start)
                    chosen.append(symbol)
                    if symbol == self._symbols.escape:
                        spelled[lane, column] = self._literals.decode(decoder)
                table[:some, column] = chosen
                self._go_on(chosen)
            self._predictor.end_block()
        symbols, behind = (self._in_a_row(values, block.n_symbols) for values in (table, spelled))
        return self._symbols.decode(symbols, behind[symbols == self._symbols.escape].tobytes())

    def _go_on(self, chosen: list[int]) -> None:
        """Update the frequencies and the predictor with the symbols of a column."""
        self._frequencies.count(chosen)
        padded = np.full(self._lanes, self._symbols.start, dtype=np.int64)
        padded[: len(chosen)] = self._symbols.read(np.array(chosen, dtype=np.int64))
        self._predictor.read(torch.from_numpy(padded), len(chosen) == self._lanes)

    def _active(self, n_symbols: int) -> list[int]:
        """Return, for every column, the number of lanes that have a symbol."""
        full, rest = divmod(n_symbols, self._lanes)
        return [self._lanes] * full + [rest] * (rest > 0)

    def _in_lanes(self, values: np.ndarray) -> np.ndarray:
        """Return values [N] as a table [B,C]; the first lanes are one value longer if N is no multiple of B."""
        full, rest = divmod(len(values), self._lanes)
        table = np.zeros((self._lanes, full + (rest > 0)), dtype=values.dtype)
        cut = rest * (full + 1)
        table[:rest, :] = values[:cut].reshape(rest, full + 1) if rest else table[:0]
        table[rest:, :full] = values[cut:].reshape(self._lanes - rest, full)
        return table

    def _in_a_row(self, table: np.ndarray, count: int) -> np.ndarray:
        """Undo `_in_lanes`: return a table [B,C] as values [N]."""
        full, rest = divmod(count, self._lanes)
        return np.concatenate([table[:rest].reshape(-1), table[rest:, :full].reshape(-1)])
