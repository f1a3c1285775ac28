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


def is_finite(state: Any) -> bool:
    """Whether a model's state holds nothing but finite numbers."""
    return all(bool(tensor.isfinite().all()) for tensor in state.to_tensors().values() if tensor.is_floating_point())
