"""Find copies of the training text in other texts: the longest copied span from each position, in one pass.

The n-grams of the texts are kept as sorted hashes, one table for each n. The training tokens are read block by block.
At every training position the 1-gram is looked up, then, if it was found, the 2-gram, and so on. Few positions survive
the first lengths, so that a pass costs a few look-ups per training token. The search holds one block, and 12 T**2 bytes
for a text of T tokens that is copied as a whole.

Shapes: T tokens of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from txl.data.lanes import splitmix64
from txl.data.prepared import Tokens

BLOCK = 1 << 20  # number of training tokens read at a time
_SIEVE_BITS = 20
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Copies:
    """Spans of one text that also occur in the training text, token by token."""

    # int64 [T]: length in tokens of the longest span from each position on that also occurs in the training text, and
    # the position there of one occurrence of this span; -1 if nothing is copied.
    lengths: np.ndarray
    sources: np.ndarray

    @property
    def longest(self) -> tuple[int, int]:
        """Position and length in tokens of the first longest copied span; (0, 0) if nothing is copied."""
        position = int(self.lengths.argmax()) if len(self.lengths) else 0
        return position, int(self.lengths[position]) if len(self.lengths) else 0

    def novel_ngrams(self, n: int) -> tuple[int, int]:
        """Return the number of n-grams of the text that the training text lacks, and the number of all n-grams."""
        starts = max(len(self.lengths) - n + 1, 0)
        return int((self.lengths[:starts] < n).sum()), starts


def copies(
    texts: Sequence[Sequence[int]], training: Tokens | np.ndarray, progress: Callable[[int, int], None] | None = None
) -> list[Copies]:
    """Return the spans of each text that also occur in the training text, which may be a memory map.

    Hashes have 64 bits: with 10^8 training tokens and 10^4 tokens of texts, the probability that two different n-grams
    are taken for equal is about 10^-7 for each n.
    """
    table = _Ngrams([np.asarray(text, dtype=np.int64) for text in texts])
    total, reach = len(training), max((len(text) for text in texts), default=0)
    for start in range(0, total, BLOCK):
        symbols = _numbers_of(np.asarray(training[start : start + BLOCK + reach]))
        table.search(symbols, min(BLOCK, total - start), start)
        if progress is not None:
            progress(min(start + BLOCK, total), total)
    edges = np.cumsum([0, *(len(text) for text in texts)])
    return [Copies(table.lengths[first:end], table.sources[first:end]) for first, end in pairwise(edges)]


class _Ngrams:
    """The n-grams of the texts, for every n, and the longest span found so far from each position."""

    def __init__(self, texts: list[np.ndarray]):
        self._symbols = _numbers_of(np.concatenate([np.zeros(0, dtype=np.int64), *texts]))
        rooms = (np.arange(len(text), 0, -1) for text in texts)  # tokens from each position to the end of its text
        self._room = np.concatenate([np.zeros(0, dtype=np.int64), *rooms])
        self._levels: list[_Level] = []
        self.lengths = np.zeros(len(self._symbols), dtype=np.int64)
        self.sources = np.full(len(self._symbols), -1, dtype=np.int64)

    def search(self, symbols: np.ndarray, starts: int, offset: int) -> None:
        """Search for the n-grams that begin at the first `starts` symbols; the first symbol has position `offset`."""
        places, hashes, n = np.arange(starts), np.zeros(starts, dtype=np.uint64), 0
        while True:
            fits = places + n < len(symbols)
            if not fits.all():
                places, hashes = places[fits], hashes[fits]
            if n == len(self._levels):
                self._add_level()
            level = self._levels[n]
            if not len(places) or not len(level.positions):
                return
            hashes = hashes * _FACTOR + symbols[places + n]
            kept, ranks = level.find(hashes)
            places, hashes = places[kept], hashes[kept]
            n += 1
            # The first position of each n-gram that no earlier block contained.
            source = np.full(len(level.hashes), -1, dtype=np.int64)
            source[ranks[::-1]] = places[::-1] + offset
            source = source[level.rank_of]
            new = (source >= 0) & (self.lengths[level.positions] < n)
            self.lengths[level.positions[new]] = n
            self.sources[level.positions[new]] = source[new]

    def _add_level(self) -> None:
        n = len(self._levels)
        positions = np.flatnonzero(self._room > n)
        hashes = np.zeros(len(positions), dtype=np.uint64)
        if self._levels:
            before = self._levels[-1]
            hashes = before.hashes[before.rank_of][np.searchsorted(before.positions, positions)]
        self._levels.append(_Level(positions, hashes * _FACTOR + self._symbols[positions + n]))


class _Level:
    """The n-grams of one length: where they begin, their sorted distinct hashes, each position's index in these."""

    def __init__(self, positions: np.ndarray, hashes: np.ndarray):
        self.positions = positions
        self.hashes, self.rank_of = np.unique(hashes, return_inverse=True)
        self._sieve: np.ndarray | None = None

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices, in `hashes` and in `self.hashes`, of the hashes that both have: int64 [found] twice."""
        kept = np.arange(len(hashes))
        if len(hashes) > 1 << _SIEVE_BITS >> 2:
            # A look-up in a table of bits excludes most positions from the slower search.
            if self._sieve is None:
                self._sieve = np.zeros(1 << _SIEVE_BITS, dtype=bool)
                self._sieve[self.hashes >> np.uint64(64 - _SIEVE_BITS)] = True
            kept = np.flatnonzero(self._sieve[hashes >> np.uint64(64 - _SIEVE_BITS)])
            hashes = hashes[kept]
        ranks = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        same = self.hashes[ranks] == hashes
        return kept[same], ranks[same]


def _numbers_of(ids: np.ndarray) -> np.ndarray:
    """Return a 64-bit number for each token id, equal for equal ids: uint64 of the shape of `ids`."""
    return splitmix64(ids.astype(np.uint64) * _FACTOR)
