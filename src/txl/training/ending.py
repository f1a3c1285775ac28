"""The end of training: in the time that was planned, and with a model that is of use."""

from __future__ import annotations

import math

from txl.errors import Field, TrainingDiverged
from txl.runs.events import EventName
from txl.training.pace import Pace, StepFigures
from txl.training.saver import REMEDY, CheckpointSaver
from txl.training.state import TrainingSetup, TrainingState
from txl.units import duration_text

# Factors of `train.planned_minutes` beyond which a run is early or late.
_EARLY, _LATE = 0.9, 1.1
_RELIABLE = 0.05  # share of the steps before the pace is reliable


class PlannedEnd:
    """The time at which a planned run is to end (`train.planned_minutes`).

    A run that was chosen for a number of minutes changes its number of steps to end in time, where nothing but the
    learning rate depends on that number; others report once that they will be late.
    """

    def __init__(self, setup: TrainingSetup, saver: CheckpointSaver):
        self._setup, self._saver = setup, saver
        self._is_reported = False
        self._timed_from: tuple[int, float] | None = None

    @property
    def _planned_seconds(self) -> float | None:
        minutes = self._setup.run.train.planned_minutes
        return None if minutes is None else 60 * minutes

    @property
    def _is_adjusted(self) -> bool:
        train = self._setup.run.train
        return (
            self._setup.run.is_planned and train.checkpoint_every > 0 and not train.averages and train.patience is None
        )

    def report_late(self, figures: StepFigures, pace: Pace) -> None:
        """Report once how long training will take, if it will take longer than planned and its steps are fixed."""
        planned, end = self._planned_seconds, figures.elapsed + figures.seconds_left
        if planned is None or self._is_adjusted or self._is_reported:
            return
        if end > _LATE * planned and pace.steps >= _RELIABLE * self._setup.run.train.steps:
            self._is_reported = True
            self._setup.display.message(
                f"note: this machine is slower than when the run was planned: training will take {duration_text(end)} "
                f"instead of {duration_text(planned)}"
            )

    def adjust(self, state: TrainingState) -> None:
        """Change the number of steps, after a scheduled checkpoint, if the run would end a tenth too late or too early.

        It never gets more steps than it began with. The checkpoint is complete before config.json has the new number,
        so that a resumed run makes each step with the same number as before.
        """
        setup, train, processes = self._setup, self._setup.run.train, self._setup.trained.processes
        planned, step, seconds = self._planned_seconds, state.counters.step, state.counters.seconds
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
        setup.display.set_steps(steps)
        setup.display.message(
            f"note: this machine is {'slower' if steps < before else 'faster'} than planned: training ends after "
            f"{steps:,} steps instead of {before:,}, to end in time"
        )


def check_end(state: TrainingState, setup: TrainingSetup) -> None:
    """Refuse a trained model that is useless; its last checkpoint is already written.

    Raises:
        TrainingDiverged: if the last loss shows that the model is useless (`uselessness`).
    """
    counters = state.counters
    if setup.run.train.eval_every and counters.validation_losses:
        name, loss = "validation loss", counters.validation_losses[-1]
    else:
        is_lost = counters.last_loss is None and counters.skipped_in_a_row > 0
        name, loss = "loss", math.nan if is_lost else counters.last_loss
    reason = uselessness(loss, counters.first_loss, state.model.vocab_size)
    if reason is None:
        return
    reason = f"the last {name} is {reason}"
    setup.log.record(EventName.END, counters.step, elapsed=counters.seconds, diverged=reason)
    skipped = f" (updates skipped: {counters.skipped:,})" if counters.skipped else ""
    raise TrainingDiverged(
        f"step {counters.step} of {setup.run.train.steps}: training diverged, the model in {setup.directory.path} is "
        f"of no use: {reason}{skipped}",
        remedy=("start anew with another ", Field("out"), ", and ", *REMEDY),
    )


def uselessness(loss: float | None, first_loss: float | None, vocab_size: int) -> str | None:
    """Return why a model with this mean loss (nats per token) is useless, or None if it may be usable.

    Uniform guessing costs log V nats per token, and a model that has learnt nothing costs about as much (with an
    adaptive softmax up to twice as much). A loss above twice log V that is also above the loss of the first update
    means divergence.
    """
    if loss is None:
        return None
    if not math.isfinite(loss):
        return f"{loss} nats"
    limit = 2 * math.log(vocab_size)
    if loss <= limit or (first_loss is not None and loss <= first_loss):
        return None
    return f"{loss:.3f} nats, where guessing evenly costs {math.log(vocab_size):.3f}"
