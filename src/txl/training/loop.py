"""The training loop: steps on an explicit state (`state`), which a checkpoint holds whole (`snapshot`)."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import NoReturn

import torch

from txl.errors import RunInterrupted
from txl.runs.events import EventName
from txl.training.display import Pace, Reading
from txl.training.optimisers import WeightAverage, average_begins, learning_rate, set_learning_rate
from txl.training.recovery import check_end, report_spike, skip_update
from txl.training.saver import CheckpointSaver, point_at_best
from txl.training.signals import StopRequest, stop_requests
from txl.training.snapshot import restore
from txl.training.state import TrainingSetup, TrainingState
from txl.training.step import StepAbandoned, training_step
from txl.training.validation import ValidationStopped, evaluate_in_training
from txl.units import duration_text

_LATE, _PACE_SHOWS = 1.1, 0.05
"""Factor of `train.planned_minutes` above which a run is late; share of the steps before which nobody can tell."""


class TrainingLoop:
    """Steps, evaluations and checkpoints until the configured number of steps is made.

    Args:
        setup: what the run trains with.
        state: what the steps change; at the beginning, or restored by `resume`.
    """

    def __init__(self, setup: TrainingSetup, state: TrainingState):
        self.setup, self.state = setup, state
        self.saver = CheckpointSaver(setup)
        self.stop = StopRequest()
        self._told_late = False

    def train(self) -> None:
        """Make all steps that are left.

        Raises:
            RunInterrupted: after Ctrl-C or SIGTERM, once everything is saved.
            TrainingDiverged: if numbers are no longer finite, or the model that came of it is of no use.
            UserError: if the directory cannot be written.
        """
        notice = None if self.setup.display.quiet else "stopping after this step; once more to stop without saving"
        with stop_requests(notice) as self.stop:
            if self.state.counters.validation_due:
                self._validate_again()
            self._train()
            self.saver.wait()
        check_end(self.state, self.setup)
        self.setup.log.record(EventName.END, self.state.counters.step, elapsed=self.state.counters.seconds)
        self.setup.log.close()

    def _train(self) -> None:
        train, pace = self.setup.run.train, Pace(self.state.counters.tokens_read)
        while self.state.counters.step < train.steps:
            self._begin_average()
            rate = learning_rate(self.state.counters.step, train)
            rate *= train.average_lr_factor if self.state.average else 1.0
            pace.begin_step()
            grad_norm = self._step(rate)
            pace.end_step()
            counters = self.state.counters
            counters.seconds += pace.tick()
            step, is_last = counters.step, counters.step == train.steps
            reading = self._reading(rate, grad_norm, pace)
            self.setup.display.show(reading)
            if step % train.log_every == 0 or is_last:
                self._log(reading)
                self._report_late(reading)
                pace.new_line(counters.tokens_read)
            self._evaluate_and_save(step, is_last)
            if not is_last and (received := self._asked_to_stop()):
                self._interrupt(received)
        self.state.counters.seconds += pace.tick()

    def _reading(self, rate: float, grad_norm: float, pace: Pace) -> Reading:
        counters = self.state.counters
        return Reading(
            step=counters.step,
            loss=counters.loss_sum / counters.loss_count if counters.loss_count else math.nan,
            tokens_per_second=pace.tokens_per_second(counters.tokens_read),
            learning_rate=rate,
            grad_norm=grad_norm,
            seconds_left=pace.seconds_left(self.setup.run.train.steps - counters.step),
            tokens=counters.tokens,
            tokens_read=counters.tokens_read,
            elapsed=counters.seconds,
        )

    def _report_late(self, reading: Reading) -> None:
        """Say once when training will end, if that is later than planned."""
        train = self.setup.run.train
        if train.planned_minutes is None or self._told_late or reading.step < _PACE_SHOWS * train.steps:
            return
        planned, end = 60 * train.planned_minutes, reading.elapsed + reading.seconds_left
        if end > _LATE * planned:
            self._told_late = True
            self.setup.display.message(
                f"note: this machine is slower than when the run was planned: training will take {duration_text(end)} "
                f"instead of {duration_text(planned)}"
            )

    def _evaluate_and_save(self, step: int, is_last: bool) -> None:
        """Do what is due after a step."""
        train, counters = self.setup.run.train, self.state.counters
        is_due = (train.checkpoint_every > 0 and step % train.checkpoint_every == 0) or is_last
        if is_due:
            counters.scheduled_step = step
            counters.scheduled_best = counters.best_step
        if train.eval_every and (step % train.eval_every == 0 or is_last):
            self._validate()
        if is_due:
            self.saver.save(self.state, required=is_last)
        self.saver.check(self.state)

    def _asked_to_stop(self) -> int:
        """Return the signal that any process has received; 0 for none."""
        return self.setup.trained.processes.most(self.stop.received or 0)

    def _begin_average(self) -> None:
        """Average the weights of every step from here on, if it is time."""
        state, train = self.state, self.setup.run.train
        step = state.counters.step
        if state.average is None and average_begins(step, state.counters.validation_losses, train):
            state.average = WeightAverage(state.model, train.average_mu)
            self.setup.log.record(EventName.AVERAGE, step)
            self.setup.display.message(f"step {step}: from here on the weights are averaged")

    def _step(self, rate: float) -> float:
        """Make one update and return the norm of its gradient.

        With segments of random length the learning rate is in proportion to the length, as AWD-LSTM has it: short
        segments would otherwise weigh more, a token, than long ones.
        """
        state, setup, train = self.state, self.setup, self.setup.run.train
        counters, device = state.counters, setup.device
        segment = setup.stream.read(state.position)
        if segment.starts_epoch:
            state.memory = setup.empty_memory()
        if train.random_segments:
            rate *= segment.tokens.shape[1] / train.segment
        set_learning_rate(state.optimizer, rate)
        lanes = setup.trained.processes.share(train.batch_size)
        tokens, targets = (each[lanes.start : lanes.stop].to(device) for each in (segment.tokens, segment.targets))
        random = torch.get_rng_state(), torch.cuda.get_rng_state(device) if "cuda" in device else None
        done, abandon = counters.step / train.steps, lambda: self._asked_to_stop() > 0
        try:
            result = training_step(setup.trained, state.optimizer, tokens, targets, state.memory, train, done, abandon)
        except StepAbandoned:
            # As if it had not begun: only random numbers had been drawn for it.
            torch.set_rng_state(random[0])
            if random[1] is not None:
                torch.cuda.set_rng_state(random[1], device)
            self._interrupt(self._asked_to_stop())
        if state.average is not None and result.updated:
            state.average.update(state.model)
        state.memory, state.position = result.states, segment.next
        counters.step += 1
        counters.tokens += result.targets
        counters.tokens_read += segment.tokens.numel()
        if not result.updated:
            skip_update(state, setup, self.saver, result, segment)
            return result.grad_norm
        counters.skipped_in_a_row = 0
        counters.last_loss = result.loss
        if counters.first_loss is None:
            counters.first_loss = result.loss
        counters.loss_sum += result.loss * result.targets
        counters.loss_count += result.targets
        if train.spike is not None and counters.watch.sees(result.loss, train.spike):
            report_spike(state, setup, self.saver, result)
        return result.grad_norm

    def _log(self, reading: Reading) -> None:
        counters = self.state.counters
        if not counters.loss_count:
            return  # every update since the last line was skipped
        self.setup.log.training(reading)
        counters.loss_sum, counters.loss_count = 0.0, 0
        self.setup.display.line(reading)

    def _validate(self) -> None:
        """Evaluate on the validation split, and keep the checkpoint if it is the best so far."""
        setup, state, counters = self.setup, self.state, self.state.counters
        try:
            result = evaluate_in_training(
                state.best_model, setup.run, setup.corpus, setup.trained, lambda: self._asked_to_stop() > 0
            )
        except ValidationStopped:
            counters.validation_due = True
            self._interrupt(self._asked_to_stop() or signal.SIGINT)
        setup.log.validation(counters.step, result, None if state.average is None else state.average.count)
        counters.validation_losses.append(result.nll)
        best = counters.best_nll
        is_best = math.isfinite(result.nll) and (best is None or result.nll < best)
        setup.display.valid(counters.step, result.nll, result.tokens, is_best)
        if is_best:
            counters.best_nll, counters.best_step = result.nll, counters.step
            if counters.scheduled_step == counters.step:
                counters.scheduled_best = counters.step
            self.saver.save(state)

    def _validate_again(self) -> None:
        """Make up the evaluation that a stop cut short, and write the checkpoint as it would have been after it."""
        self.state.counters.validation_due = False
        self._validate()
        self.saver.save(self.state, required=self.state.counters.step == self.setup.run.train.steps)

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint."""
        restore(self.state, self.setup, checkpoint)
        train, counters = self.setup.run.train, self.state.counters
        if train.average_patience is not None and counters.step < train.steps:
            # The evaluation at the end of a run that was extended is none of those that decide when to average.
            del counters.validation_losses[counters.step // train.eval_every :]
            counters.validation_due &= counters.step % train.eval_every == 0
        if not counters.validation_due:  # else it is saved once more, after its evaluation
            self.saver.saved_step = counters.step
        if self.setup.trained.processes.is_first:
            point_at_best(self.setup.directory, counters.best_step)  # a crash may have come between the two pointers

    def _interrupt(self, received: int) -> NoReturn:
        """Save and stop."""
        step = self.state.counters.step
        self.saver.save(self.state, required=True)
        name = signal.Signals(received).name
        self.setup.log.record(EventName.STOP, step, reason=name)
        raise RunInterrupted(
            f"stopped by {name} at step {step} of {self.setup.run.train.steps}; everything is saved in "
            f"{self.setup.directory.path}: run the same command to go on",
            exit_code=128 + received,
        )
