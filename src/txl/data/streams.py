"""Contiguous lanes of a token stream, read segment by segment; the position in them is arithmetic.

Shapes: B lanes, T tokens of a segment.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from txl.errors import UserError


@dataclass(frozen=True)
class StreamPosition:
    """Where the next segment begins: the pass over the text, and the offset in every lane."""

    epoch: int = 0
    offset: int = 0

    def to_dict(self) -> dict[str, int]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StreamPosition:
        """The inverse of `to_dict`."""
        return cls(epoch=int(values["epoch"]), offset=int(values["offset"]))


@dataclass(frozen=True)
class Segment:
    """One step's tokens."""

    tokens: Tensor
    """int64 [B,T]."""
    targets: Tensor
    """int64 [B,T]: the token after each."""
    next: StreamPosition
    starts_epoch: bool
    """True where the lanes begin anew: what was in memory belongs to the text's end."""


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

    Raises:
        UserError: if a lane is shorter than one segment and its last target.
    """

    def __init__(self, tokens: Any, batch_size: int, segment: int, *, random_segments: bool = False, seed: int = 0):
        self._tokens = tokens
        self.batch_size, self.segment = batch_size, segment
        self.random_segments, self.seed = random_segments, seed
        self.lane_length = len(tokens) // batch_size
        if self.lane_length < segment + 1:
            name = getattr(tokens, "split", "token stream")
            raise UserError(
                f"the {name} split has {len(tokens)} tokens: {batch_size} lanes of {self.lane_length}, but a segment "
                f"of {segment} needs lanes of {segment + 1}; use more text, a smaller batch or a shorter segment"
            )

    def start(self) -> StreamPosition:
        """The beginning of the first epoch."""
        return StreamPosition()

    def read(self, position: StreamPosition) -> Segment:
        """The segment at a position."""
        width = min(self._width(position), self.lane_length - 1 - position.offset)
        first = position.offset
        lanes = [
            np.asarray(self._tokens[lane * self.lane_length + first : lane * self.lane_length + first + width + 1])
            for lane in range(self.batch_size)
        ]
        block = torch.from_numpy(np.stack(lanes).astype(np.int64))
        end = first + width
        if end >= self.lane_length - 1:
            following = StreamPosition(position.epoch + 1, 0)
        else:
            following = StreamPosition(position.epoch, end)
        return Segment(block[:, :-1], block[:, 1:], following, starts_epoch=first == 0)

    def _width(self, position: StreamPosition) -> int:
        if not self.random_segments:
            return self.segment
        generator = np.random.default_rng((self.seed, position.epoch, position.offset))
        mean = self.segment if generator.random() < 0.95 else self.segment / 2
        return max(5, int(generator.normal(mean, 5)))
