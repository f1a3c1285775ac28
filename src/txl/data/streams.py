"""Contiguous lanes of a token stream, read segment by segment; the position in them is arithmetic.

Shapes: B lanes, T tokens of a segment.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from txl.data.prepared import Sentences, Tokens
from txl.errors import UserError
from txl.files import JsonObject


@dataclass(frozen=True)
class StreamPosition:
    """Beginning of the next segment: the pass over the text, and the offset in every lane."""

    epoch: int = 0
    offset: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: JsonObject) -> StreamPosition:
        """Build a position from `to_dict` of it."""
        return cls(epoch=int(values["epoch"]), offset=int(values["offset"]))


@dataclass(frozen=True)
class Segment:
    """One step's tokens: a segment, or consecutive ones."""

    tokens: Tensor
    """int64 [B,T]."""
    targets: Tensor
    """int64 [B,T]: the token after each."""
    next: StreamPosition
    position: StreamPosition
    """Its beginning."""
    starts_epoch: bool
    """True where the lanes begin anew: what was in memory belongs to the text's end."""
    lengths: tuple[int, ...]
    """Tokens of each of the consecutive segments that it consists of; most often one."""


class LaneStream:
    """A token stream cut into B contiguous lanes of equal length, the remainder dropped.

    A lane's first token is never a target. The last segment of an epoch may be short.

    Args:
        tokens: one-dimensional array of token ids.
        batch_size: lanes B.
        segment: tokens T of a segment.
        random_segments: draw each segment's length: normal around T (with probability 0.05 around T/2) with standard
            deviation 5, at least 5, as AWD-LSTM does (Merity et al. 2017, Section 5). It is a function of seed, epoch
            and offset alone, so a position is all that need be saved.
        seed: of these lengths.
        shift: each epoch begins this many tokens later than the one before, modulo T. Where only the recent positions
            of a segment have a loss, their number: other targets then count in every epoch. A multiple of T is no
            shift: every token then stands at the same place of a segment in every epoch.

    Raises:
        UserError: if a lane is shorter than one segment and its last target.
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
        width = min(self._width(position), self.lane_length - 1 - position.offset)
        first = position.offset
        tokens = self._tokens_of(position.epoch)
        lanes = [
            np.asarray(tokens[lane * self.lane_length + first : lane * self.lane_length + first + width + 1])
            for lane in range(self.batch_size)
        ]
        block = torch.from_numpy(np.stack(lanes).astype(np.int64))
        end = first + width
        if end >= self.lane_length - 1:
            following = StreamPosition(position.epoch + 1, self._begin(position.epoch + 1))
        else:
            following = StreamPosition(position.epoch, end)
        starts_epoch = first == self._begin(position.epoch)
        return Segment(block[:, :-1], block[:, 1:], following, position, starts_epoch, (width,))

    def read_several(self, position: StreamPosition, count: int) -> Segment:
        """Read `count` consecutive segments as one, fewer where the epoch ends: the next one begins without memory."""
        parts = [self.read(position)]
        while len(parts) < count and parts[-1].next.epoch == position.epoch:
            parts.append(self.read(parts[-1].next))
        if len(parts) == 1:
            return parts[0]
        tokens, targets = (torch.cat(each, dim=1) for each in zip(*((s.tokens, s.targets) for s in parts), strict=True))
        lengths = tuple(each.tokens.shape[1] for each in parts)
        return Segment(tokens, targets, parts[-1].next, position, parts[0].starts_epoch, lengths)

    def _begin(self, epoch: int) -> int:
        """Return the offset at which an epoch's first segment begins in every lane."""
        return epoch * self.shift % self.segment

    def _tokens_of(self, epoch: int) -> Tokens | np.ndarray | _Rearranged:
        """Return the token stream of an epoch."""
        return self._tokens

    def _width(self, position: StreamPosition) -> int:
        if not self.random_segments:
            return self.segment
        generator = np.random.default_rng((self.seed, position.epoch, position.offset))
        mean = self.segment if generator.random() < 0.95 else self.segment / 2
        return max(5, int(generator.normal(mean, 5)))


class SentenceStream(LaneStream):
    """A corpus of separate sentences, whose order is drawn anew for every epoch; then cut into lanes like any text.

    The order is a function of seed and epoch alone, so a `StreamPosition` is exact here too. Sentences follow one
    another without a gap, so memory carries over from each to the next.

    Args:
        tokens: token ids with `sentences` set (`txl.data.prepared.Tokens`).
        batch_size: lanes B.
        segment: tokens T of a segment.
        random_segments: as for `LaneStream`.
        seed: of the orders, and of these lengths.
        shift: as for `LaneStream`.
    """

    def __init__(
        self,
        tokens: Tokens,
        batch_size: int,
        segment: int,
        *,
        random_segments: bool = False,
        seed: int = 0,
        shift: int = 0,
    ):
        assert tokens.sentences is not None
        super().__init__(tokens, batch_size, segment, random_segments=random_segments, seed=seed, shift=shift)
        self._edges = sentence_edges(tokens, tokens.sentences)
        self._shuffled: tuple[int, _Rearranged] | None = None  # of the epoch that was read last

    def _tokens_of(self, epoch: int) -> Tokens | np.ndarray | _Rearranged:
        if self._shuffled is None or self._shuffled[0] != epoch:
            order = shuffled(len(self._edges) - 1, self.seed, epoch)
            self._shuffled = (epoch, _Rearranged(self._tokens, self._edges, order))
        return self._shuffled[1]


def training_stream(
    tokens: Tokens | np.ndarray,
    batch_size: int,
    segment: int,
    *,
    random_segments: bool = False,
    seed: int = 0,
    shift: int = 0,
) -> LaneStream:
    """Return the stream that a training split is read in: sentences shuffled where a corpus has them, else as it is."""
    if isinstance(tokens, Tokens) and tokens.sentences is not None:
        return SentenceStream(tokens, batch_size, segment, random_segments=random_segments, seed=seed, shift=shift)
    return LaneStream(tokens, batch_size, segment, random_segments=random_segments, seed=seed, shift=shift)


def sentence_edges(tokens: Tokens | np.ndarray, sentences: Sentences) -> np.ndarray:
    """Return the beginning of each sentence, and the end of the last one: int64 [sentences + 1].

    With one boundary between two sentences it belongs to the one that follows it, and the stream's last boundary to
    none; with two, each sentence has one at either end.
    """
    places = []
    for start in range(0, len(tokens), _SCAN):
        places.append(np.flatnonzero(np.asarray(tokens[start : start + _SCAN]) == sentences.boundary_id) + start)
    boundaries = np.concatenate(places) if places else np.zeros(0, dtype=np.int64)
    if sentences.boundary == "both":
        return np.append(boundaries[0::2], len(tokens))
    return boundaries


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the numbers below `count` in an order drawn from seed and epoch: int32 [count].

    They are sorted by a hash (SplitMix64), not drawn by a library's generator, so that every version of every library
    gives the same order, and a run can be continued anywhere.
    """
    keys = np.arange(count, dtype=np.uint64)
    for salt in (seed, epoch):
        keys = splitmix64(keys ^ splitmix64(np.array([salt], dtype=np.uint64)))
    return np.argsort(keys, kind="stable").astype(np.int32)


def splitmix64(values: np.ndarray) -> np.ndarray:
    """Return SplitMix64's next number for each state (Steele, Lea and Flood 2014): uint64 like `values`."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


_SCAN = 1 << 24
"""Tokens looked through at a time."""


class _Rearranged:
    """The tokens of a stream with its sentences in another order; whatever follows the last sentence stays there."""

    def __init__(self, tokens: Tokens | np.ndarray, edges: np.ndarray, order: np.ndarray):
        self._tokens, self._edges, self._order = tokens, edges, order
        self._ends = np.cumsum(edges[order + 1] - edges[order])

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, key: slice) -> np.ndarray:
        first, end, _ = key.indices(len(self))
        last = int(self._ends[-1]) if len(self._ends) else 0
        number = int(np.searchsorted(self._ends, first, side="right"))
        pieces = []
        while first < min(end, last):
            begin = int(self._edges[self._order[number]])
            length = int(self._edges[self._order[number] + 1]) - begin
            skip = first - (int(self._ends[number]) - length)
            count = min(length - skip, end - first)
            pieces.append(np.asarray(self._tokens[begin + skip : begin + skip + count]))
            first, number = first + count, number + 1
        if first < end:
            pieces.append(np.asarray(self._tokens[first:end]))
        return np.concatenate(pieces) if pieces else np.asarray(self._tokens[:0])
