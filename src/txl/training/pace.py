"""The pace of training: the figures of a step, the speed, and the time left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class StepFigures:
    """Figures of a run after a step."""

    step: int
    loss: float  # mean nats per target since the last log line
    tokens_per_second: float
    learning_rate: float
    grad_norm: float
    seconds_left: float
    tokens: int  # number of targets trained on since the run began
    tokens_read: int  # number of tokens read since the run began
    elapsed: float  # seconds spent on the run since it began


class Pace:
    """Timer of the steps. Work between steps (evaluation, saving) counts only in the estimate of the time left.

    Args:
        tokens_read: number of tokens that the run has read so far.
    """

    def __init__(self, tokens_read: int):
        self._began = self._ticked = time.perf_counter()
        self.steps = 0  # number of steps that this process has made
        self.new_line(tokens_read)

    def tick(self) -> float:
        """Return the seconds since the last call."""
        before, self._ticked = self._ticked, time.perf_counter()
        return self._ticked - before

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a step."""
        began = time.perf_counter()
        yield
        self._line_seconds += time.perf_counter() - began
        self.steps += 1

    def new_line(self, tokens_read: int) -> None:
        """Restart the measurement of the speed, as a log line has been written."""
        self._line_seconds, self._line_tokens = 0.0, tokens_read

    def tokens_per_second(self, tokens_read: int) -> float:
        """Return the speed of the steps since the last log line; 0 if the run went back to a step before that line."""
        return max(0, tokens_read - self._line_tokens) / self._line_seconds

    def seconds_left(self, steps: int) -> float:
        """Estimate the seconds that `steps` more steps will take, including the work between them."""
        return steps * (time.perf_counter() - self._began) / self.steps
