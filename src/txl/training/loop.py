"""The training loop: steps that change an explicit state (`state`), all of which a checkpoint stores (`snapshot`)."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from txl.config import TrainConfig
from txl.data.streams import Segment
from txl.devices import sent
from txl.errors import RunInterrupted
from txl.runs.events import EventName
from txl.training.averaging import WeightAverage
from txl.training.compilation import CapturedStep
from txl.training.display import Pace, Reading
from txl.training.optimisers import set_learning_rate
from txl.training.recovery import check_end, report_spike, skip_update
from txl.training.saver import CheckpointSaver, point_at_best
from txl.training.schedule import average_begins, has_converged, learning_rate
from txl.training.signals import StopRequest, stop_requests
from txl.training.snapshot import restore
from txl.training.state import TrainingSetup, TrainingState
from txl.training.step import StepAbandoned, StepInputs, StepResult, skips_on_device, training_step
from txl.training.validation import ValidationStopped, evaluate_in_training
from txl.units import duration_text

_EARLY, _LATE, _PACE_SHOWS = 0.9, 1.1, 0.05
"""Factors of `train.planned_minutes` beyond which a run is early or late; share of the steps before the pace is
reliable."""


@dataclass(frozen=True)
class _Launched:
    """An update that was launched on the device."""

    result: StepResult
    segment: Segment
    random: tuple[Tensor, Tensor | None]
    """States of the random generators before the update: CPU, and GPU if there is one."""
    averaged: bool
    """True: the average of the weights counts the update."""
    device: str

    def forget(self, state: TrainingState) -> None:
        """Restore the random generators and the average's count, because the device has skipped the update."""
        _set_random(self.random, self.device)
        self.forget_average(state)

    def forget_average(self, state: TrainingState) -> None:
        """Remove the update from the average's count; the averaged weights are unchanged."""
        if self.averaged and state.average is not None:
            state.average.count -= 1


def _emptied(train: TrainConfig, step: int) -> Tensor:
    """Draw the lanes, of all processes, whose memory is emptied before a step: bool [B].

    The result depends only on seed and step, so that a resumed run empties the same lanes.
    """
    draws = np.random.default_rng((train.seed, step, 0, 1)).random(train.batch_size)
    return torch.from_numpy(draws < train.reset_memory)


def _set_random(random: tuple[Tensor, Tensor | None], device: str) -> None:
    torch.set_rng_state(random[0])
    if random[1] is not None:
        torch.cuda.set_rng_state(random[1], device)


def looks_later(setup: TrainingSetup, state: TrainingState) -> bool:
    """Return whether an update's loss and norm are read only after the next update was launched.

    This is so on a GPU, because reading them waits for the device. Exceptions are runs where the host decides whether
    an update is skipped, or where a spike of the loss leads back to a checkpoint.
    """
    return setup.device != "cpu" and skips_on_device(state.optimizer) and setup.run.train.on_spike == "report"


class TrainingLoop:
    """Steps, evaluations and checkpoints until the configured number of steps is made.

    Args:
        setup: everything that the run trains with and that no step changes.
        state: training state at the first step; `resume` loads a checkpoint into this state.
    """

    def __init__(self, setup: TrainingSetup, state: TrainingState):
        self.setup, self.state = setup, state
        self.saver = CheckpointSaver(setup)
        self.stop = StopRequest()
        self._looks_later = looks_later(setup, state)
        self._captured = CapturedStep() if setup.run.train.capture else None
        self._unsettled: _Launched | None = None
        self._told_late = False
        self._timed_from: tuple[int, float] | None = None

    def train(self) -> None:
        """Make all remaining steps.

        Raises:
            RunInterrupted: after Ctrl-C, SIGTERM or another of `STOP_SIGNALS`, once everything is saved.
            KeyboardInterrupt: after a second Ctrl-C.
            TrainingDiverged: if losses or weights are not finite, or the trained model is useless (`check_end`).
            UserError: if the run directory cannot be written.
        """
        try:
            with stop_requests(self.setup.display.quiet) as self.stop:
                if self.state.counters.validation_due:
                    self._validate_again()
                self._train()
                self.saver.wait()
            check_end(self.state, self.setup)
            converged = {"converged": True} if self._converged() else {}
            counters = self.state.counters
            self.setup.log.record(EventName.END, counters.step, elapsed=counters.seconds, **converged)
        except KeyboardInterrupt:  # the caller may go on in this directory
            self.saver.join()
            raise
        finally:
            self.setup.log.close()

    def _train(self) -> None:
        train, pace = self.setup.run.train, Pace(self.state.counters.tokens_read)
        while self.state.counters.step < train.steps and not self._converged():
            self._begin_average()
            rate = learning_rate(self.state.counters.step, train, self.state.counters.validation_losses)
            rate *= train.average_lr_factor if self.state.average else 1.0
            rollbacks = self.state.counters.rollbacks
            pace.begin_step()
            self._step(rate)
            pace.end_step()
            counters = self.state.counters
            counters.seconds += pace.tick()
            if counters.rollbacks > rollbacks:
                continue  # the work due after the step that the run went back to has been done
            step, is_last = counters.step, counters.step == train.steps
            reading = self._reading(rate, pace)
            self.setup.display.show(reading)
            if step % train.log_every == 0 or is_last:
                self._log(reading)
                self._report_late(reading, pace)
                pace.new_line(counters.tokens_read)
            self._evaluate_and_save(step, is_last)
            if counters.scheduled_step == step and not is_last:
                counters.seconds += pace.tick()
                self._end_in_time()
            if self._converged():
                self._log(reading)
                self.saver.save(self.state, required=True)
            elif not is_last and (received := self._asked_to_stop()):
                self._settle()
                self._interrupt(received)
        self.state.counters.seconds += pace.tick()

    def _converged(self) -> bool:
        return has_converged(self.state.counters.validation_losses, self.setup.run.train)

    def _reading(self, rate: float, pace: Pace) -> Reading:
        counters = self.state.counters
        return Reading(
            step=counters.step,
            loss=counters.loss_sum / counters.loss_count if counters.loss_count else math.nan,
            tokens_per_second=pace.tokens_per_second(counters.tokens_read),
            learning_rate=rate,
            grad_norm=math.nan if counters.last_norm is None else counters.last_norm,
            seconds_left=pace.seconds_left(self.setup.run.train.steps - counters.step),
            tokens=counters.tokens,
            tokens_read=counters.tokens_read,
            elapsed=counters.seconds,
        )

    def _report_late(self, reading: Reading, pace: Pace) -> None:
        """Report once how long training will take, if it will take longer than planned."""
        train = self.setup.run.train
        if train.planned_minutes is None or self._told_late or pace.steps < _PACE_SHOWS * train.steps:
            return
        if self._can_end_in_time:
            return
        planned, end = 60 * train.planned_minutes, reading.elapsed + reading.seconds_left
        if end > _LATE * planned:
            self._told_late = True
            self.setup.display.message(
                f"note: this machine is slower than when the run was planned: training will take {duration_text(end)} "
                f"instead of {duration_text(planned)}"
            )

    @property
    def _can_end_in_time(self) -> bool:
        """True if `--minutes` chose the run, and nothing but the learning rate depends on its number of steps."""
        train = self.setup.run.train
        is_planned = self.setup.run.is_planned and train.planned_minutes is not None
        return is_planned and train.checkpoint_every > 0 and not train.averages and train.patience is None

    def _end_in_time(self) -> None:
        """Change the number of steps, after a scheduled checkpoint, if the run would end a tenth too late or too early.

        It never gets more steps than it began with. The checkpoint is complete before config.json has the new number,
        so that a resumed run makes each step with the same number as before. A process measures its pace from its first
        scheduled checkpoint on, because its first steps are slow.
        """
        setup, counters, train = self.setup, self.state.counters, self.setup.run.train
        if train.planned_minutes is None or not self._can_end_in_time:
            return
        step, seconds, before = counters.step, counters.seconds, train.steps
        if self._timed_from is None or step <= self._timed_from[0]:
            self._timed_from = step, seconds
            return
        planned, started, steps = 60 * train.planned_minutes, setup.directory.started(), before
        each = (seconds - self._timed_from[1]) / (step - self._timed_from[0])
        if not _EARLY * planned < seconds + each * (before - step) < _LATE * planned:
            most = before if started is None else max(before, started["config"]["train"]["steps"])
            steps = min(most, step + max(1, int((planned - seconds) / each)))
        steps = setup.trained.processes.most(steps)
        if steps == before:
            return
        self.saver.save(self.state)
        self.saver.finish(self.state)
        if setup.trained.processes.any(self.saver.saved_step != step):  # `train.on_save_error` let the run go on
            return
        train.steps = steps
        if setup.trained.processes.is_first:
            setup.directory.write_config(setup.run)
        setup.log.record(EventName.EXTEND, step, from_steps=before, to_steps=steps, changes=["to end in time"])
        setup.display.set_steps(steps)
        setup.display.message(
            f"note: this machine is {'slower' if steps < before else 'faster'} than planned: training ends after "
            f"{steps:,} steps instead of {before:,}, to end in time"
        )

    def _evaluate_and_save(self, step: int, is_last: bool) -> None:
        """Evaluate and save after a step, if due."""
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
        """Return the number of the signal that a process has received; 0 if none has."""
        return self.setup.trained.processes.most(self.stop.received or 0)

    def _is_to_stop(self) -> bool:
        return self._asked_to_stop() > 0

    def _begin_average(self) -> None:
        """Begin the average of the weights if it begins after this step (`average_begins`)."""
        state, train = self.state, self.setup.run.train
        step = state.counters.step
        if state.average is None and average_begins(step, state.counters.validation_losses, train):
            state.average = WeightAverage(state.model, train.average_mu)
            self.setup.log.record(EventName.AVERAGE, step)
            self.setup.display.message(f"step {step}: from here on the weights are averaged")

    def _step(self, rate: float) -> None:
        """Make one update.

        The device computes the update while the host continues: the result of update 5 is read after update 6 was
        launched (`_settle`). If the device has skipped update 5, it skips update 6 too, and the host launches update 6
        again. The results are the same as if update 5 had been read before update 6 was launched.
        """
        launched = self._launch(rate)
        if not self._settle():
            launched.forget(self.state)
            return
        self._commit(launched)
        if not self._looks_later or self._is_due(self.state.counters.step):
            self._settle()

    def _launch(self, rate: float) -> _Launched:
        """Launch the next update, which changes weights, optimiser, averages and random generators.

        With `train.capture`, it also overwrites the memory that the update before has returned (`CapturedStep`).
        With segments of random length the learning rate is proportional to the length, as in AWD-LSTM. Otherwise a
        token of a short segment would have more weight than a token of a long one.
        """
        state, setup, train = self.state, self.setup, self.setup.run.train
        device, count = setup.device, state.counters.step
        segment = setup.stream.read_several(state.position, train.backprop_segments)
        memory = setup.empty_memory() if segment.starts_epoch else state.memory
        lanes = setup.trained.processes.share(train.batch_size)
        if train.reset_memory:
            emptied = _emptied(train, count)[lanes.start : lanes.stop].chunk(len(memory))
            memory = [each.reset(mask) for each, mask in zip(memory, emptied, strict=True)]
        if train.random_segments:
            rate *= segment.tokens.shape[1] / (train.segment * train.backprop_segments)
        set_learning_rate(state.optimizer, rate)
        tokens, targets = (each[lanes.start : lanes.stop] for each in (segment.tokens, segment.targets))
        rows = None
        several = segment.lengths if len(segment.lengths) > 1 else None
        if device != "cpu" and several is None:
            rows = [state.model.tail_rows(part, train.loss) for part in targets.chunk(len(memory))]
        random = torch.get_rng_state(), torch.cuda.get_rng_state(device) if "cuda" in device else None
        void = None if self._unsettled is None else self._unsettled.result.skipped
        step = self._captured or training_step
        inputs = StepInputs(
            tokens=sent(tokens, device),
            targets=sent(targets, device),
            states=memory,
            progress=count / train.steps,
            void=void,
            tail_rows=rows,
            lengths=several,
        )
        try:
            result = step(setup.trained, state.optimizer, inputs, train, self._is_to_stop)
        except Exception as error:
            # The terminal sends Ctrl-C to the compiler too, if torch.compile runs it at that moment.
            compiling = type(error).__module__.startswith(("torch._inductor", "torch._dynamo"))
            if not isinstance(error, StepAbandoned) and not (compiling and self._asked_to_stop()):
                raise
            # Restore the state before the step: only random numbers have been drawn.
            _set_random(random, device)
            self._settle()
            self._interrupt(self._asked_to_stop())
        result.send()
        averaged = state.average is not None and (self._looks_later or result.updated)
        if state.average is not None and averaged:
            state.average.update(state.model, result.skipped if self._looks_later else None)
        return _Launched(result, segment, random, averaged, device)

    def _commit(self, launched: _Launched) -> None:
        """Advance memory, position and counters past an update; `_settle` does what depends on its loss and norm."""
        state = self.state
        state.memory, state.position = launched.result.states, launched.segment.next
        state.counters.step += 1
        state.counters.tokens += launched.result.targets
        state.counters.tokens_read += launched.segment.tokens.numel()
        self._unsettled = launched

    def _settle(self) -> bool:
        """Read the loss and norm of the last committed update, and return False if the update was skipped.

        An update that was launched after a skipped one has to be undone (`_Launched.forget`).
        """
        launched, self._unsettled = self._unsettled, None
        if launched is None:
            return True
        state, result, counters, train = self.state, launched.result, self.state.counters, self.setup.run.train
        if not result.updated:
            launched.forget_average(state)
            skip_update(state, self.setup, self.saver, result, launched.segment)
            return False
        counters.last_norm = result.grad_norm
        counters.skipped_in_a_row = 0
        counters.last_loss = result.loss
        if counters.first_loss is None:
            counters.first_loss = result.loss
        counters.loss_sum += result.loss * result.targets
        counters.loss_count += result.targets
        if train.spike is not None and counters.watch.sees(result.loss, train.spike):
            report_spike(state, self.setup, self.saver, result)
        return True

    def _is_due(self, step: int) -> bool:
        """Return whether a log line, evaluation or checkpoint after this step needs the loss and norm of its update."""
        train = self.setup.run.train
        every = (train.log_every, train.eval_every, train.checkpoint_every)
        return step == train.steps or any(each and step % each == 0 for each in every)

    def _log(self, reading: Reading) -> None:
        counters = self.state.counters
        if not counters.loss_count:
            return  # every update since the last line was skipped
        self.setup.log.training(reading)
        counters.loss_sum, counters.loss_count = 0.0, 0
        self.setup.display.line(reading)

    def _validate(self) -> None:
        """Evaluate on the validation split, and save a checkpoint if the result is the best so far."""
        setup, state, counters = self.setup, self.state, self.state.counters
        try:
            result = evaluate_in_training(state.best_model, setup.run, setup.corpus, setup.trained, self._is_to_stop)
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
        """Make the evaluation that a stop interrupted, and write the checkpoint that would have followed it."""
        self.state.counters.validation_due = False
        self._validate()
        self.saver.save(self.state, required=self.state.counters.step == self.setup.run.train.steps)

    def resume(self, checkpoint: Path) -> None:
        """Load a checkpoint, so that training continues from it."""
        restore(self.state, self.setup, checkpoint)
        counters = self.state.counters
        if not counters.validation_due:  # else this step is saved again, after its evaluation
            self.saver.saved_step = counters.step
        if self.setup.trained.processes.is_first:
            point_at_best(self.setup.directory, counters.best_step)  # a crash may have left `best` behind `latest`

    def _interrupt(self, received: int) -> NoReturn:
        """Save the state and stop the run."""
        step = self.state.counters.step
        self.saver.save(self.state, required=True)
        name = signal.Signals(received).name
        self.setup.log.record(EventName.STOP, step, reason=name)
        raise RunInterrupted(
            f"stopped by {name} at step {step} of {self.setup.run.train.steps}; everything is saved in "
            f"{self.setup.directory.path}: run the same command to go on",
            exit_code=128 + received,
        )
