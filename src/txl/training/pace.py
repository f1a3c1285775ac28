"""Time in training: the speed, the time left, and the end of a run that was planned for a number of minutes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from txl.runs.events import EventName
from txl.training.saver import CheckpointSaver
from txl.training.state import TrainingSetup, TrainingState

# Factors of `train.planned_minutes` beyond which a run is early or late.
_EARLY, _LATE = 0.9, 1.1


class Pace:
    """Timer of the steps. Work between steps (evaluation, saving) counts only in the estimate of the time left."""

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


class PlannedEnd:
    """The time at which a planned run is to end (`train.planned_minutes`).

    A run that was chosen for a number of minutes changes its number of steps to end in time, where nothing but the
    learning rate depends on that number.
    """

    def __init__(self, setup: TrainingSetup, saver: CheckpointSaver):
        train = setup.run.train
        self._setup, self._saver = setup, saver
        self._planned = None if train.planned_minutes is None else 60 * train.planned_minutes
        is_free = train.checkpoint_every > 0 and not train.averages and train.patience is None
        self._is_adjusted = setup.run.is_planned and is_free
        self._timed_from: tuple[int, float] | None = None

    def adjust(self, state: TrainingState) -> None:
        """Change the number of steps, after a scheduled checkpoint, if the run would end a tenth too late or too early.

        It never gets more steps than it began with. The checkpoint is complete before config.json has the new number,
        so that a resumed run makes each step with the same number as before.
        """
        setup, train, processes = self._setup, self._setup.run.train, self._setup.trained.processes
        planned, step, seconds = self._planned, state.counters.step, state.counters.seconds
        if planned is None or not self._is_adjusted:
            return
        # The pace is measured from this process's first scheduled checkpoint on, because its first steps are slow.
        if self._timed_from is None or step <= self._timed_from[0]:
            self._timed_from = step, seconds
            return
        before = steps = train.steps
        seconds_per_step = (seconds - self._timed_from[1]) / (step - self._timed_from[0])
        if not _EARLY * planned < seconds + seconds_per_step * (before - step) < _LATE * planned:
            started = setup.directory.log().started
            most = before if started is None else max(before, started["config"]["train"]["steps"])
            steps = min(most, step + max(1, int((planned - seconds) / seconds_per_step)))
        steps = processes.most(steps)  # clocks differ, and all processes must make the same number
        if steps == before:
            return
        self._saver.save(state)
        self._saver.finish(state)
        if processes.any(self._saver.saved_step != step):  # `train.on_save_error` let the run go on
            return
        train.steps = steps
        if processes.is_first:
            setup.directory.write_config(setup.run)
        setup.log.record(EventName.EXTEND, step, from_steps=before, to_steps=steps, changes=["to end in time"])
        setup.display.steps = steps
        setup.display.message(f"note: training ends after {steps:,} steps instead of {before:,}, to end in time")
