"""How fast a run goes, by the clock."""

from __future__ import annotations

import time


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
