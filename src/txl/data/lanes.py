"""Contiguous lanes of a token stream, read segment by segment; epoch and offset determine each segment.

Shapes: B lanes, T tokens of a segment.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from txl.data.prepared import Tokens
from txl.errors import UserError
from txl.files import JsonObject

_SCAN = 1 << 24  # tokens searched for boundaries at a time


@dataclass(frozen=True)
class StreamPosition:
    """Position at which a segment begins: the epoch (pass over the text), and the offset in every lane."""

    epoch: int = 0
    offset: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the position as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: JsonObject) -> StreamPosition:
        """Build a position from the result of `to_dict`."""
        return cls(epoch=int(values["epoch"]), offset=int(values["offset"]))


@dataclass(frozen=True)
class Segment:
    """Tokens of one step: one segment, or several consecutive segments."""

    tokens: Tensor  # int64 [B,T]
    targets: Tensor  # int64 [B,T]: the token that follows each of `tokens`
    next: StreamPosition  # of the following segment
    position: StreamPosition  # at which the segment begins
    starts_epoch: bool  # the first segment of an epoch must be read with empty memory
    lengths: tuple[int, ...]  # tokens of each of the consecutive segments; usually there is only one


class LaneStream:
    """A token stream cut into B contiguous lanes of equal length, the remainder dropped.

    A lane's first token is never a target. The last segment of an epoch may be short. A corpus of separate sentences
    (`Tokens.sentences`) is shuffled for every epoch before it is cut; sentences follow one another without a gap, so
    that memory carries over from each to the next. Order and random lengths depend on seed, epoch and offset alone, so
    that a saved position is enough to continue.

    Args:
        tokens: one-dimensional array of token ids.
        batch_size: number of lanes B.
        segment: number of tokens T of a segment.
        random_segments: True to draw each segment's length from a normal distribution around T (with probability 0.05
            around T/2) with standard deviation 5, at least 5, as AWD-LSTM does (Merity et al. 2017, Section 5).
        seed: seed of the random segment lengths and of the order of sentences.
        shift: number of tokens by which each epoch begins later than the epoch before, modulo T. If only the recent
            positions of a segment have a loss, use the number of these positions: each epoch then counts other targets.
            A multiple of T has no effect, as every token then has the same place in a segment in every epoch.

    Raises:
        UserError: if a lane has fewer than T + 1 tokens (a segment and its last target).
    """

    def __init__(
        self,
        tokens: Tokens | np.ndarray,
        batch_size: int,
        segment: int,
        *,
        random_segments: bool = False,
        seed: int = 0,
        shift: int = 0,
    ):
        self._tokens, self.shift = tokens, shift
        self.batch_size, self.segment = batch_size, segment
        self.random_segments, self.seed = random_segments, seed
        self._sentences = tokens.sentences if isinstance(tokens, Tokens) else None
        self._shuffled: tuple[int, _Rearranged] | None = None  # the epoch read last
        self.lane_length = len(tokens) // batch_size
        if self.lane_length < segment + 1:
            name = tokens.split if isinstance(tokens, Tokens) else "token stream"
            raise UserError(
                f"the {name} split has {len(tokens):,} tokens: {batch_size} lanes of {self.lane_length}, but a segment "
                f"of {segment} needs lanes of {segment + 1}; use more text, a smaller batch or a shorter segment"
            )

    def start(self) -> StreamPosition:
        """Return the beginning of the first epoch."""
        return StreamPosition()

    def read(self, position: StreamPosition) -> Segment:
        """Read the segment at a position."""
        first, epoch, width = position.offset, position.epoch, self.segment
        if self.random_segments:
            generator = np.random.default_rng((self.seed, epoch, first))
            mean = self.segment if generator.random() < 0.95 else self.segment / 2
            width = max(5, int(generator.normal(mean, 5)))
        end = min(first + width, self.lane_length - 1)
        tokens: np.ndarray | _Rearranged
        if self._sentences is None:
            tokens = np.asarray(self._tokens)  # a view, whose file is checked once for all lanes
        else:
            if self._shuffled is None or self._shuffled[0] != epoch:
                order = shuffled(len(self._edges) - 1, self.seed, epoch)
                self._shuffled = (epoch, _Rearranged(self._tokens, self._edges, order))
            tokens = self._shuffled[1]
        edges = range(0, self.batch_size * self.lane_length, self.lane_length)
        block = torch.from_numpy(np.stack([tokens[edge + first : edge + end + 1] for edge in edges]).astype(np.int64))
        following = StreamPosition(epoch, end)
        if end >= self.lane_length - 1:
            following = StreamPosition(epoch + 1, self._begin(epoch + 1))
        starts_epoch = first == self._begin(epoch)
        return Segment(block[:, :-1], block[:, 1:], following, position, starts_epoch, (end - first,))

    def read_several(self, position: StreamPosition, count: int) -> Segment:
        """Read up to `count` consecutive segments of one epoch as one; the next epoch begins with empty memory."""
        parts = [self.read(position)]
        while len(parts) < count and parts[-1].next.epoch == position.epoch:
            parts.append(self.read(parts[-1].next))
        if len(parts) == 1:
            return parts[0]
        tokens, targets = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("tokens", "targets"))
        lengths = tuple(length for part in parts for length in part.lengths)
        return Segment(tokens, targets, parts[-1].next, position, parts[0].starts_epoch, lengths)

    def _begin(self, epoch: int) -> int:
        """Return the offset, in every lane, at which the first segment of an epoch begins."""
        return epoch * self.shift % self.segment

    @functools.cached_property
    def _edges(self) -> np.ndarray:
        """Beginning of each sentence, and the end of the last one: int64 [sentences + 1].

        A single boundary token between two sentences belongs to the second sentence, and the last boundary token of the
        stream belongs to no sentence. With two boundary tokens between sentences, each sentence has one at both ends.
        """
        assert self._sentences is not None
        places = []
        for start in range(0, len(self._tokens), _SCAN):
            part = np.asarray(self._tokens[start : start + _SCAN])
            places.append(np.flatnonzero(part == self._sentences.boundary_id) + start)
        edges = np.concatenate(places)
        return np.append(edges[0::2], len(self._tokens)) if self._sentences.boundary == "both" else edges


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return a random permutation of the numbers below `count`, determined by seed and epoch: int32 [count].

    The numbers are sorted by a hash (SplitMix64) instead of drawn by a library's random generator. The order is then
    the same with every library version, so that a run can be continued on any machine.
    """
    keys = np.arange(count, dtype=np.uint64)
    for salt in (seed, epoch):
        keys = splitmix64(keys ^ splitmix64(np.array([salt], dtype=np.uint64)))
    return np.argsort(keys, kind="stable").astype(np.int32)


def splitmix64(values: np.ndarray) -> np.ndarray:
    """Return the next SplitMix64 number for each state in `values` (Steele, Lea and Flood 2014): uint64, same shape."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class _Rearranged:
    """Tokens of a stream with its sentences in another order; tokens after the last sentence keep their place."""

    def __init__(self, tokens: Tokens | np.ndarray, edges: np.ndarray, order: np.ndarray):
        self._tokens, self._edges, self._order = tokens, edges, order
        self._ends = np.cumsum(edges[order + 1] - edges[order])

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, key: slice) -> np.ndarray:
        first, end, _ = key.indices(len(self))
        last = int(self._ends[-1]) if len(self._ends) else 0
        number = int(np.searchsorted(self._ends, first, side="right"))
        tokens, pieces = np.asarray(self._tokens), []
        while first < min(end, last):
            begin = int(self._edges[self._order[number]])
            length = int(self._edges[self._order[number] + 1]) - begin
            skip = first - (int(self._ends[number]) - length)
            count = min(length - skip, end - first)
            pieces.append(tokens[begin + skip : begin + skip + count])
            first, number = first + count, number + 1
        if first < end:
            pieces.append(tokens[first:end])
        return np.concatenate(pieces) if pieces else tokens[:0]
