"""What of a segment training counts."""

from __future__ import annotations

from dataclasses import dataclass

from txl.config import LossName


@dataclass(frozen=True)
class Objective:
    """Which positions of a segment have a loss, and how far training is: passed to a model in every step."""

    loss: LossName = "full"
    """full: every position's; half: that of the recent half (Section 4.2, Table 6); last: the last one's alone."""
    progress: float = 0.0
    """Fraction of all updates that are made, 0 to 1: what schedules of auxiliary losses go by."""

    def counted(self, n_position: int) -> int:
        """How many of a segment's positions count, the most recent ones; of an odd number the larger half."""
        return {"full": n_position, "half": n_position - n_position // 2, "last": 1}[self.loss]


EVERY_TARGET = Objective()
"""The full loss, at the beginning of training."""
