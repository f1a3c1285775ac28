"""The training loop: steps that change an explicit state (`state`), all of which a checkpoint stores (`snapshot`).

`TrainingLoop._train` is the loop: prepare, step, log, evaluate and save; the methods below it are in this order.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from txl.config import RunConfig, TrainConfig
from txl.data.corpora import Corpus
from txl.devices import sent
from txl.errors import Field, RunInterrupted, UserError
from txl.evaluation.perplexity import evaluate_with
from txl.evaluation.recorded import Recordings
from txl.evaluation.stream import EvaluationResult, Lanes, Settings
from txl.models.language_model import LanguageModel
from txl.runs.checkpoints import VerifiedCheckpoint
from txl.runs.events import EventName
from txl.training.compilation import CapturedStep
from txl.training.display import StepFigures
from txl.training.pace import Pace, PlannedEnd
from txl.training.parallel import TrainedModel
from txl.training.recovery import check_end, check_memory, report_spike, skip_update
from txl.training.saver import CheckpointSaver, point_at_best
from txl.training.schedule import average_begins, has_converged, learning_rate
from txl.training.signals import StopRequest, stop_requests
from txl.training.snapshot import generator_states, restore, set_generators
from txl.training.state import TrainingSetup, TrainingState, WeightAverage
from txl.training.step import PendingUpdate, StepAbandoned, StepInputs, training_step


class ValidationStopped(Exception):
    """Exception for a stop that was requested during an evaluation."""


def reads_later(setup: TrainingSetup, state: TrainingState) -> bool:
    """Return whether an update's loss and norm are read only after the next update was launched (`PendingUpdate`).

    This is so on a GPU. Exceptions are runs where the host decides whether an update is skipped, or where a spike of
    the loss leads back to a checkpoint: the next update must not have been made then.
    """
    return setup.device != "cpu" and state.optimizer.skips_on_device and setup.run.train.on_spike == "report"


class TrainingLoop:
    """Steps, evaluations and checkpoints, from a state on, until the configured number of steps is made."""

    def __init__(self, setup: TrainingSetup, state: TrainingState):
        self.setup, self.state = setup, state
        self.saver = CheckpointSaver(setup)
        self.stop = StopRequest()
        self._reads_later = reads_later(setup, state)
        captures = setup.run.train.capture
        self._make_step = CapturedStep() if captures else training_step
        # Kept only beside recorded training steps, which hold their memory too: eager steps may need all there is.
        self._recordings = Recordings() if captures else None
        self._pending: PendingUpdate | None = None
        self._planned_end = PlannedEnd(setup, self.saver)

    def resume(self, checkpoint: VerifiedCheckpoint) -> None:
        """Load a checkpoint, so that training continues from it."""
        restore(self.state, self.setup, checkpoint)
        counters = self.state.counters
        if not counters.validation_due:  # else this step is saved again, after its evaluation
            self.saver.saved_step = counters.step
        if self.setup.trained.processes.is_first:
            point_at_best(self.setup.directory, counters.best_step)  # a crash may have left `best` behind `latest`

    def train(self) -> None:
        """Make all remaining steps; the exceptions are those of `Trainer.fit`."""
        counters, train = self.state.counters, self.setup.run.train
        try:
            with stop_requests(self.setup.display.quiet) as self.stop:
                if counters.validation_due:
                    # The evaluation that a stop interrupted, and the checkpoint that would have followed it.
                    counters.validation_due = False
                    self._validate()
                    self.saver.save(self.state, required=counters.step == train.steps)
                self._train()
                self.saver.wait()
            check_end(self.state, self.setup)
            counters = self.state.counters
            converged = {"converged": True} if self._has_converged() else {}
            self.setup.log.record(EventName.END, counters.step, elapsed=counters.seconds, **converged)
        except KeyboardInterrupt:  # the caller may go on in this directory
            self.saver.join()
            raise
        finally:
            self.setup.log.close()

    def _train(self) -> None:
        train, pace = self.setup.run.train, Pace(self.state.counters.tokens_read)
        while self.state.counters.step < train.steps and not self._has_converged():
            # Prepare.
            counters, state = self.state.counters, self.state
            step, losses, rollbacks = counters.step, counters.validation_losses, counters.rollbacks
            if state.average is None and average_begins(step, losses, train):
                state.average = WeightAverage(state.model, train.average_mu)
                self.setup.log.record(EventName.AVERAGE, step)
                self.setup.display.message(f"step {step}: from here on the weights are averaged")
            rate = learning_rate(step, train, losses) * (train.average_lr_factor if state.average else 1.0)

            # Step.
            with pace.step():
                self._step(rate)
            counters = state.counters  # new ones, if the run went back to a checkpoint
            counters.seconds += pace.tick()
            if counters.rollbacks > rollbacks:
                continue  # the work due after the step that the run went back to has been done

            # Log.
            step, is_last = counters.step, counters.step == train.steps
            if step % train.log_every == 0 or is_last:
                self._log(rate, pace)

            # Evaluate and save.
            self._evaluate_and_save(step, is_last)
            if counters.scheduled_step == step and not is_last:
                counters.seconds += pace.tick()
                self._planned_end.adjust(state)

            # Stop.
            if self._has_converged():
                self._log(rate, pace)
                self.saver.save(state, required=True)
            elif not is_last and (received := self._stop_signal()):
                self._settle()
                self._interrupt(received)
        self.state.counters.seconds += pace.tick()

    def _step(self, rate: float) -> None:
        """Make one update.

        The device computes the update while the host continues: the result of update 5 is read after update 6 was
        launched. If the device has skipped update 5, it skips update 6 too, which was prepared as if update 5 had been
        made, and the host launches update 6 again. So the results do not depend on when update 5 is read.
        """
        update = self._launch(rate)
        state, counters, train = self.state, self.state.counters, self.setup.run.train
        if not self._settle():
            # Only its random numbers were drawn; `_settle` has set back the average's count.
            set_generators(update.generators, self.setup.device)
            return
        state.memory, state.position = update.output.states, update.segment.next
        counters.step += 1
        counters.tokens += update.output.n_target
        counters.tokens_read += update.segment.tokens.numel()
        self._pending = update
        # A log line, an evaluation or a checkpoint after this step needs this update's loss, so it is read now.
        intervals = (train.log_every, train.eval_every, train.checkpoint_every)
        is_due = counters.step == train.steps or any(every and counters.step % every == 0 for every in intervals)
        if not self._reads_later or is_due:
            self._settle()

    def _launch(self, rate: float) -> PendingUpdate:
        """Launch the next update, which changes weights, optimiser, averages and random generators.

        With `train.capture`, it also overwrites the memory that the update before has returned (`CapturedStep`).
        """
        state, setup, train = self.state, self.setup, self.setup.run.train
        segment = setup.stream.read_several(state.position, train.backprop_segments)
        if train.random_segments:
            # As in AWD-LSTM. Otherwise a token of a short segment would have more weight than one of a long segment.
            rate *= segment.tokens.shape[1] / (train.segment * train.backprop_segments)
        state.optimizer.set_rate(rate)

        # The inputs of this process's lanes.
        memory = setup.empty_memory() if segment.starts_epoch else state.memory
        share = setup.trained.processes.share(train.batch_size)
        lanes = slice(share.start, share.stop)
        if train.reset_memory:
            # A first prompt is often short: tokens after empty memory must be seen more often than once a pass.
            emptied = emptied_lanes(train, state.counters.step)[lanes].chunk(len(memory))
            memory = [part.reset(mask) if mask.any() else part for part, mask in zip(memory, emptied, strict=True)]
        tokens, targets = segment.tokens[lanes], segment.targets[lanes]
        lengths = segment.lengths if len(segment.lengths) > 1 else None
        rows = None
        if setup.device != "cpu" and lengths is None:
            # Counted on the host, because a shape that depended on the targets would make it wait for the device.
            rows = [state.model.tail_rows(part, train.loss) for part in targets.chunk(len(memory))]
        inputs = StepInputs(
            tokens=sent(tokens, setup.device),
            targets=sent(targets, setup.device),
            states=memory,
            progress=state.counters.step / train.steps,
            void=None if self._pending is None else self._pending.output.skipped,
            tail_rows=rows,
            lengths=lengths,
            average=state.average,
        )

        generators = generator_states(setup.device)
        averaged = None if state.average is None else state.average.count
        if state.average is not None:
            state.average.prepare()
        try:
            output = self._make_step(setup.trained, state.optimizer, inputs, train, self._stop_signal)
        except Exception as error:
            # The terminal sends Ctrl-C to the compiler too, if torch.compile runs it at that moment.
            is_compiling = type(error).__module__.startswith(("torch._inductor", "torch._dynamo"))
            if not isinstance(error, StepAbandoned) and not (is_compiling and self._stop_signal()):
                raise
            # Restore the state before the step: random numbers have been drawn, and the step was counted.
            set_generators(generators, setup.device)
            if state.average is not None:
                state.average.count = averaged or 0
            self._settle()
            self._interrupt(self._stop_signal())
        return PendingUpdate(output, segment, generators, averaged)

    def _settle(self) -> bool:
        """Read the loss and norm of the last update that was made, and return False if the device has skipped it."""
        update, self._pending = self._pending, None
        if update is None:
            return True
        state, counters, train = self.state, self.state.counters, self.setup.run.train
        result = update.result()
        if not result.updated:
            if state.average is not None:
                state.average.count = update.averaged or 0
            if result.overflowed:
                check_memory(state, self.setup)
                return False
            skip_update(state, self.setup, self.saver, result, update.segment)
            return False
        counters.last_norm, counters.last_loss, counters.skipped_in_a_row = result.grad_norm, result.loss, 0
        if counters.first_loss is None:
            counters.first_loss = result.loss  # what a useless model is compared with at the end (`uselessness`)
        counters.loss_sum += result.loss * update.output.n_target
        counters.loss_count += update.output.n_target
        if train.spike is not None and counters.watch.sees(result.loss, train.spike):
            report_spike(state, self.setup, self.saver, result)
        return True

    def _log(self, rate: float, pace: Pace) -> None:
        counters = self.state.counters
        if counters.loss_count:  # else every update since the last line was skipped
            figures = StepFigures(
                step=counters.step,
                loss=counters.loss_sum / counters.loss_count,
                tokens_per_second=pace.tokens_per_second(counters.tokens_read),
                learning_rate=rate,
                grad_norm=math.nan if counters.last_norm is None else counters.last_norm,
                seconds_left=pace.seconds_left(self.setup.run.train.steps - counters.step),
                tokens=counters.tokens,
                tokens_read=counters.tokens_read,
                elapsed=counters.seconds,
            )
            self.setup.log.training(figures)
            self.setup.display.line(figures)
            counters.loss_sum, counters.loss_count = 0.0, 0
        pace.new_line(counters.tokens_read)

    def _evaluate_and_save(self, step: int, is_last: bool) -> None:
        """Evaluate and save after a step, if due."""
        train, counters = self.setup.run.train, self.state.counters
        is_due = (train.checkpoint_every > 0 and step % train.checkpoint_every == 0) or is_last
        if is_due:
            counters.scheduled_step, counters.scheduled_best = step, counters.best_step
        if train.eval_every and (step % train.eval_every == 0 or is_last):
            self._validate()
        if is_due:
            self.saver.save(self.state, required=is_last)
        self.saver.check(self.state)

    def _validate(self) -> None:
        """Evaluate on the validation split, and save a checkpoint if the result is the best so far."""
        setup, state, counters = self.setup, self.state, self.state.counters
        try:
            result = evaluate_in_training(
                state.best_model, setup.run, setup.corpus, setup.trained, self._stop_signal, self._recordings
            )
        except ValidationStopped:
            counters.validation_due = True
            self._interrupt(self._stop_signal() or signal.SIGINT)
        setup.log.validation(counters.step, result, None if state.average is None else state.average.count)
        counters.validation_losses.append(result.nll)
        is_best = math.isfinite(result.nll) and (counters.best_nll is None or result.nll < counters.best_nll)
        setup.display.valid(counters.step, result.nll, result.tokens, is_best)
        if is_best:
            counters.best_nll, counters.best_step = result.nll, counters.step
            if counters.scheduled_step == counters.step:
                counters.scheduled_best = counters.step
            self.saver.save(state)

    def _has_converged(self) -> bool:
        return has_converged(self.state.counters.validation_losses, self.setup.run.train)

    def _stop_signal(self) -> int:
        """Return the number of the signal that a process has received; 0 if none has."""
        return self.setup.trained.processes.most(self.stop.received or 0)

    def _interrupt(self, received: int) -> NoReturn:
        """Save the state and stop the run."""
        step, name = self.state.counters.step, signal.Signals(received).name
        self.saver.save(self.state, required=True)
        self.setup.log.record(EventName.STOP, step, reason=name)
        raise RunInterrupted(
            f"stopped by {name} at step {step} of {self.setup.run.train.steps}; everything is saved in "
            f"{self.setup.directory.path}: run the same command to go on",
            exit_code=128 + received,
        )


def emptied_lanes(train: TrainConfig, step: int) -> Tensor:
    """Draw the lanes whose memory is emptied before a step, bool [B]; seed and step alone decide."""
    draws = np.random.default_rng((train.seed, step, 0, 1)).random(train.batch_size)
    return torch.from_numpy(draws < train.reset_memory)


def check_validation_split(run: RunConfig, corpus: Corpus) -> None:
    """Refuse a validation split that cannot be evaluated, at the start rather than after thousands of steps."""
    if run.train.eval_every:
        tokens = corpus.tokens("valid")
        limit = run.train.eval_tokens
        try:
            Lanes.cut(len(tokens) if limit is None else min(limit, len(tokens)), run.validation_lanes)
        except UserError as error:
            lanes = Field("eval.batch_size" if run.train.eval_batch_size is None else "train.eval_batch_size")
            without = (" (", lanes, "), or leave these evaluations out with ", Field("train.eval_every", 0))
            raise UserError(("validation split: ", error, *without)) from None


def evaluate_in_training(
    model: LanguageModel,
    run: RunConfig,
    corpus: Corpus,
    trained: TrainedModel,
    stop: Callable[[], object],
    recordings: Recordings | None = None,
) -> EvaluationResult:
    """Evaluate on the validation split with attention as long as in training: memory and segment have the same sum.

    The evaluation draws no random numbers and does not touch the lanes' memory, so later steps do not depend on it. The
    model is `trained` or its average; ValidationStopped is raised as soon as `stop` returns something true.
    `recordings` are kept from one evaluation to the next.
    """
    train = run.train
    segment = min(run.eval.segment, train.segment) if run.model.mem_len else train.segment

    def progress(done: int, total: int) -> None:
        if stop():
            raise ValidationStopped

    settings = Settings(
        segment=segment,
        mem_len=run.model.mem_len + train.segment - segment,  # the last token of a segment sees as far as in training
        window=run.model.window or "none",
        batch_size=run.validation_lanes,
        max_tokens=train.eval_tokens,
        dtype="bfloat16" if train.dtype == "bfloat16" else "float32",
    )
    with trained.whole():
        return evaluate_with(model, corpus.tokens("valid"), settings, progress, trained.processes, recordings)
