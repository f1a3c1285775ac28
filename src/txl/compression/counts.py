"""Predictions of the next byte by counts and by matches with earlier text, which need no learned weights.

Every context of 0 to 5 bytes has a row of counts of the bytes that followed it (contexts of more than two bytes are
hashed to rows). The distributions are interpolated from the shortest context to the longest by Witten and Bell's rule
(method C of PPM: a context with n successors, d of them different, leaves d of n + d to the shorter context). One more
distribution predicts the byte that followed the last occurrence of the newest `MATCH` bytes, with the share of hits of
earlier matches of equal length. All numbers are exact integers, or float32 computed element by element.

Shapes: B lanes, K distributions.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

ORDERS = 6  # context lengths: 0, 1, ... bytes
DISTRIBUTIONS = ORDERS + 1
MATCH = 6  # equal bytes with which a match begins
_BITS = (0, 8, 16, 17, 18, 18)  # of a row number, by context length; every context of up to two bytes has its own row
_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 by the golden ratio: its products spread over the high bits (Knuth's hash)
_MATCH_BITS, _HISTORY = 20, 1 << 22
_LONGEST = 31


class Counts:
    """Counts of the encoder or the decoder of one file; all lanes share the rows."""

    def __init__(self, lanes: int):
        sizes = [1 << bits for bits in _BITS]
        self._table = np.zeros((sum(sizes), 256), dtype=np.uint8)  # untouched pages take no memory
        self._offsets = np.cumsum([0, *sizes[:-1]])
        self._masks = np.array([(1 << 8 * order) - 1 for order in range(ORDERS)], dtype=np.uint64)
        self._factors = np.array([1 if order <= 2 else _MULTIPLIER for order in range(ORDERS)], dtype=np.uint64)
        self._shifts = np.array([0 if order <= 2 else 64 - _BITS[order] for order in range(ORDERS)], dtype=np.uint64)
        self._context = np.zeros(lanes, dtype=np.uint64)
        self._rows = self._row_numbers()
        self._matches = _Matches(lanes)

    def predict(self) -> tuple[np.ndarray, np.ndarray]:
        """Return probabilities of the next byte by contexts of increasing length and by the match: float32 [B,K,256].

        The second result is the number of contexts that occurred before, int64 [B]: 0 to K - 1, plus K for a match.
        """
        counts = self._table[self._rows]
        totals = counts.sum(axis=2, dtype=np.int64)
        kinds = np.count_nonzero(counts, axis=2)
        rest = (kinds + (totals == 0)).astype(np.float32)
        divisor = (totals + kinds + (totals == 0)).astype(np.float32)
        out = np.empty((len(counts), DISTRIBUTIONS, 256), dtype=np.float32)
        below = np.full((len(counts), 256), 1 / 256, dtype=np.float32)
        for order in range(ORDERS):
            here = out[:, order]
            np.multiply(below, rest[:, order, None], out=here)
            here += counts[:, order]
            here /= divisor[:, order, None]
            below = here
        met = np.count_nonzero(totals, axis=1)
        out[:, ORDERS] = 1 / 256
        for lane, symbol, share in self._matches.predict():
            out[lane, ORDERS] = (1 - share) / 255
            out[lane, ORDERS, symbol] = share
            met[lane] += DISTRIBUTIONS
        return out, met

    def read(self, symbols: np.ndarray) -> None:
        """Read each lane's next byte, int64 [B]."""
        columns = symbols[:, None]
        raised = self._table[self._rows, columns]
        full = raised == 255
        if full.any():
            self._table[self._rows[full]] >>= 1
            raised = self._table[self._rows, columns]
        self._table[self._rows, columns] = raised + 1
        self._context = (self._context << np.uint64(8)) | symbols.astype(np.uint64)
        self._rows = self._row_numbers()
        self._matches.read(symbols.tolist())

    def rotate(self) -> None:
        """Move the context of each lane to the next lane; the text of the last lane continues in the first lane."""
        self._context = np.roll(self._context, 1)
        self._rows = self._row_numbers()
        self._matches.rotate()

    def _row_numbers(self) -> np.ndarray:
        hashed = ((self._context[:, None] & self._masks) * self._factors) >> self._shifts
        return hashed.astype(np.int64) + self._offsets


class _Matches:
    """Matches of each lane's newest bytes with earlier text: place of the byte that follows there, and match length."""

    def __init__(self, lanes: int):
        self._size = _HISTORY // lanes
        self._history = bytearray(lanes * self._size)
        self._last_seen = np.zeros(1 << _MATCH_BITS, dtype=np.int32)
        self._hits = [[2, 3] for _ in range(_LONGEST + 1)]  # hits and trials, by match length
        # Of each lane: its region of the history, bytes read there, newest bytes, place (-1: no match) and length.
        self._regions, self._read, self._newest = list(range(lanes)), [0] * lanes, [0] * lanes
        self._place, self._length = [-1] * lanes, [0] * lanes

    def predict(self) -> Iterator[tuple[int, int, float]]:
        """Yield for each lane with a match: lane, byte that the match predicts, and share of hits at its length."""
        for lane, place in enumerate(self._place):
            if place >= 0:
                hits, trials = self._hits[self._length[lane]]
                yield lane, self._history[place], hits / trials

    def read(self, symbols: list[int]) -> None:
        """Read each lane's next byte."""
        for lane, symbol in enumerate(symbols):
            start, place = self._regions[lane] * self._size, self._place[lane]
            if place >= 0:
                counted, hit = self._hits[self._length[lane]], self._history[place] == symbol
                counted[0] += hit
                counted[1] += 1
                if counted[1] > 1024:
                    counted[0], counted[1] = (counted[0] + 1) // 2, (counted[1] + 1) // 2 + 1
                base = place - place % self._size
                self._place[lane] = base + (place - base + 1) % self._size if hit else -1
                self._length[lane] = min(self._length[lane] + 1, _LONGEST) if hit else 0
            self._history[start + self._read[lane] % self._size] = symbol
            self._read[lane] += 1
            newest = self._newest[lane] = (self._newest[lane] << 8 | symbol) & ((1 << 8 * MATCH) - 1)
            if self._read[lane] >= MATCH:
                slot = (newest * _MULTIPLIER & (1 << 64) - 1) >> (64 - _MATCH_BITS)
                if self._place[lane] < 0:
                    self._place[lane], self._length[lane] = int(self._last_seen[slot]) - 1, 0
                self._last_seen[slot] = start + self._read[lane] % self._size + 1

    def rotate(self) -> None:
        """Move the match of each lane to the next lane, as in `Counts.rotate`."""
        for values in (self._regions, self._read, self._newest, self._place, self._length):
            values.insert(0, values.pop())
