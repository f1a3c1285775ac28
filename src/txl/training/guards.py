"""What a run is guarded against: numbers that are not finite, and losses that leap."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_RECENT = 100
"""Updates over which the mean and the deviation of the loss are taken, and before which no loss is called a spike."""


@dataclass
class LossWatch:
    """Running mean and variance of the loss of the recent updates, by which a spike is told from noise."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    in_spike: bool = False

    def limit(self, threshold: float) -> float:
        """The loss above which it is a spike: `threshold` standard deviations above the mean."""
        return math.inf if self.count < _RECENT else self.mean + threshold * math.sqrt(self.variance)

    def sees(self, loss: float, threshold: float) -> bool:
        """Take in a finite loss, in nats; whether a spike begins with it.

        What lies above the limit counts as the limit: a spike does not hide the next one, and a loss that stays high
        becomes the new mean in time.
        """
        limit = self.limit(threshold)
        begins = loss > limit and not self.in_spike
        self.in_spike = loss > limit
        value = min(loss, limit)
        self.count += 1
        weight = max(1 / self.count, 1 / _RECENT)
        distance = value - self.mean
        self.mean += weight * distance
        self.variance = (1 - weight) * (self.variance + weight * distance**2)
        return begins


def uselessness(loss: float | None, first_loss: float | None, vocab_size: int) -> str | None:
    """Why a model with this mean loss, in nats, is of no use; None if it may be of some.

    Guessing evenly costs log V nats a token, and a model that has learnt nothing about that (with an adaptive softmax
    up to twice as much). More than twice as much, and more than at its first update, it costs only one that diverged.
    """
    if loss is None:
        return None
    if not math.isfinite(loss):
        return f"{loss} nats"
    limit = 2 * math.log(vocab_size)
    if loss <= limit or (first_loss is not None and loss <= first_loss):
        return None
    return f"{loss:.3f} nats, where guessing evenly costs {math.log(vocab_size):.3f}"


def is_finite(state: Any) -> bool:
    """Whether a model's state holds nothing but finite numbers."""
    return all(bool(tensor.isfinite().all()) for tensor in state.to_tensors().values() if tensor.is_floating_point())
