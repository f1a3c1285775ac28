"""Encode blocks of text as payloads and back, by a predictor that both sides drive alike.

A block's symbols are cut into B lanes of equal length (the last column may be short), and column after column is coded:
the symbols of one column depend on the columns before it alone, so that all lanes are predicted at once.

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
        predictor: new, and used by nobody else.
        symbols: of the predictor's vocabulary.
        lanes: as many as the predictor has.
        n_threads: for a predictor whose numbers do not depend on them; others run with one.
    """

    def __init__(self, predictor: Predictor, symbols: Symbols, lanes: int, n_threads: int):
        self._predictor, self._symbols, self._lanes = predictor, symbols, lanes
        self._threads = n_threads if predictor.any_threads else 1
        self._frequencies, self._literals = Frequencies(symbols.escape), Literals()

    def encode(self, text: bytes) -> tuple[int, bytes]:
        """Return the number of symbols, and the payload: the text itself where its code is not shorter."""
        symbols, literals = self._symbols.encode(text)
        behind = np.zeros(len(symbols), dtype=np.uint8)
        behind[symbols == self._symbols.escape] = np.frombuffer(literals, dtype=np.uint8)
        table, spelled = (self._in_lanes(each) for each in (symbols, behind))
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
            UserError: if it is not the text that was encoded; then this side of the file is of no more use.
        """
        if block.stored:
            text = block.payload
            self.encode(text)  # the predictor and the frequencies read it as they did on the other side
        else:
            text = self._decoded(block)
        if len(text) != block.n_bytes or digest(text) != block.digest:
            raise UserError(
                f"{name} was decoded to something else than was encoded: the arithmetic here is not that of the "
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
        symbols, behind = (self._in_a_row(each, block.n_symbols) for each in (table, spelled))
        return self._symbols.decode(symbols, behind[symbols == self._symbols.escape].tobytes())

    def _go_on(self, chosen: list[int]) -> None:
        """Let frequencies and predictor read a column."""
        self._frequencies.count(chosen)
        padded = np.full(self._lanes, self._symbols.start, dtype=np.int64)
        padded[: len(chosen)] = self._symbols.read(np.array(chosen, dtype=np.int64))
        self._predictor.read(torch.from_numpy(padded), len(chosen) == self._lanes)

    def _active(self, n_symbols: int) -> list[int]:
        """Return the number of lanes that have a symbol, for every column."""
        full, rest = divmod(n_symbols, self._lanes)
        return [self._lanes] * full + [rest] * (rest > 0)

    def _in_lanes(self, values: np.ndarray) -> np.ndarray:
        """Return [N] as [B,C]: the first lanes are one longer where N is no multiple of B."""
        full, rest = divmod(len(values), self._lanes)
        table = np.zeros((self._lanes, full + (rest > 0)), dtype=values.dtype)
        cut = rest * (full + 1)
        table[:rest, :] = values[:cut].reshape(rest, full + 1) if rest else table[:0]
        table[rest:, :full] = values[cut:].reshape(self._lanes - rest, full)
        return table

    def _in_a_row(self, table: np.ndarray, count: int) -> np.ndarray:
        """Undo `_in_lanes`."""
        full, rest = divmod(count, self._lanes)
        return np.concatenate([table[:rest].reshape(-1), table[rest:, :full].reshape(-1)])
