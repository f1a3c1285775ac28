"""How far a run is: the numbers that a checkpoint carries, beside the tensors.

What a run is guarded against: numbers that are not finite, and losses that leap.

How fast a run goes, by the clock.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field
from typing import Any

from txl.errors import UserError

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


@dataclass
class Progress:
    """Counts since the beginning, over all stretches."""

    step: int = 0
    tokens: int = 0
    """Targets trained on, those that count alone."""
    tokens_read: int = 0
    """Tokens of all segments; more than `tokens` where not every position has a loss."""
    seconds: float = 0.0
    best_nll: float | None = None
    best_step: int | None = None
    loss_sum: float = 0.0
    """Sum of the nats of all targets since the last line of the log, and their number."""
    loss_count: int = 0
    validation_losses: list[float] = field(default_factory=list)
    """Of all evaluations so far, oldest first."""
    validation_due: bool = False
    """Whether the run was stopped in the middle of this step's evaluation."""
    skipped: int = 0
    """Updates that were skipped, because the loss or the gradient was not finite."""
    skipped_in_a_row: int = 0
    scheduled_step: int | None = None
    """Step of the last checkpoint that was due; those of an interruption do not count."""
    scheduled_best: int | None = None
    """The best step when that checkpoint was due: a run that goes back to it has that best again."""
    rollbacks: int = 0
    """Times that the run went back to a checkpoint because of a spike of the loss."""
    watch: LossWatch = field(default_factory=LossWatch)
    first_loss: float | None = None
    """Nats a target of the first update, and of the last one, that was not skipped."""
    last_loss: float | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        """The inverse of `dataclasses.asdict`.

        Raises:
            UserError: for fields that are not known, or values that are no numbers.
        """
        try:
            fields: dict[str, Any] = values | {"watch": LossWatch(**values["watch"])}
            progress = cls(**fields)
        except (TypeError, KeyError) as error:
            raise UserError(f"training state: damaged ({error})") from None
        for item in dataclasses.fields(progress):
            value, default = getattr(progress, item.name), getattr(cls(), item.name)
            if default is not None and not isinstance(value, (int, float) if type(default) is float else type(default)):
                raise UserError(f"training state: damaged ({item.name} is {value!r})")
        return progress


class Pace:
    """Takes the time of steps; what lies between them (evaluating, saving) counts for what is left alone.

    Args:
        tokens_read: of the run so far.
    """

    def __init__(self, tokens_read: int):
        self._began = self._ticked = self._step_began = time.perf_counter()
        self._steps = 0
        self.new_line(tokens_read)

    def tick(self) -> float:
        """Seconds since it was asked last."""
        before, self._ticked = self._ticked, time.perf_counter()
        return self._ticked - before

    def begin_step(self) -> None:
        """A step begins."""
        self._step_began = time.perf_counter()

    def end_step(self) -> None:
        """The step is done."""
        self._line_seconds += time.perf_counter() - self._step_began
        self._steps += 1

    def new_line(self, tokens_read: int) -> None:
        """A line of the log is written: the next one's speed begins here."""
        self._line_seconds, self._line_tokens = 0.0, tokens_read

    def tokens_per_second(self, tokens_read: int) -> float:
        """In the steps since the last line; 0 where the run went back behind it."""
        return max(0, tokens_read - self._line_tokens) / self._line_seconds

    def seconds_left(self, steps: int) -> float:
        """For so many more steps, with all that lies between them."""
        return steps * (time.perf_counter() - self._began) / self._steps
