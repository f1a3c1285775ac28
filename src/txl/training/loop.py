"""The training loop. Its state is all in a checkpoint (`snapshot`): to go on from one is to have never stopped."""

from __future__ import annotations

import functools
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from txl.config import RunConfig
from txl.data.corpora import Corpus
from txl.data.streams import LaneStream, SentenceStream, StreamPosition
from txl.errors import RunInterrupted, UserError
from txl.runs.directory import RunDirectory
from txl.training.display import Display, Reading
from txl.training.optimisers import WeightAverage, average_begins, learning_rate, set_learning_rate
from txl.training.parallel import TrainedModel
from txl.training.progress import Pace, Progress
from txl.training.recovery import check_end, check_weights, report_spike, skip_update
from txl.training.run_log import RunLog
from txl.training.saver import CheckpointSaver, point_at_best
from txl.training.signals import StopRequest, stop_requests
from txl.training.snapshot import capture, restore
from txl.training.step import StepAbandoned, training_step
from txl.training.validation import ValidationStopped, evaluate_in_training


@dataclass
class TrainingLoop:
    """What a run works with while it trains."""

    run: RunConfig
    directory: RunDirectory
    corpus: Corpus
    device: str
    trained: TrainedModel
    optimizer: torch.optim.Optimizer
    stream: LaneStream | SentenceStream
    display: Display
    belongs: dict[str, Any] = field(default_factory=dict)
    """What the checkpoints' weights mean something with (`checkpoints.belongs_to`)."""

    def __post_init__(self) -> None:
        self.model: Any = self.trained.model
        self.progress = Progress()
        self.position: StreamPosition = self.stream.start()
        self.states: list[Any] = self.empty_memory()
        self.average: WeightAverage | None = None
        self.saved_step = -1
        self.stop = StopRequest()
        train, processes = self.run.train, self.trained.processes
        self.log = RunLog(
            self.directory,
            writes=processes.is_first,
            needed=train.on_save_error == "stop",
            tensorboard=train.tensorboard,
            say=self.display.message,
        )
        self.saver = CheckpointSaver(
            self.directory,
            keep=train.keep_checkpoints,
            in_background=train.async_checkpoints,
            writes=processes.is_first,
            say=self.display.message,
            record=self.log.record,
        )

    def empty_memory(self) -> list[Any]:
        """The state of each part of the lanes at the beginning of a text."""
        train = self.run.train
        lanes = len(self.trained.processes.share(train.batch_size)) // train.micro_batches
        return [self.model.init_state(lanes) for _ in range(train.micro_batches)]

    def train(self) -> None:
        """All steps that are left.

        Raises:
            RunInterrupted: after Ctrl-C or SIGTERM, once everything is saved.
            TrainingDiverged: if numbers are no longer finite, or the model that came of it is of no use.
            UserError: if the directory cannot be written.
        """
        notice = None if self.display.quiet else "stopping after this step; once more to stop without saving"
        with stop_requests(notice) as self.stop:
            if self.progress.validation_due:
                self._validate_again()
            self._train()
            self.saver.wait()
        check_end(self)
        self.record("end", elapsed=self.progress.seconds)
        self.log.close()

    def _train(self) -> None:
        train, pace = self.run.train, Pace(self.progress.tokens_read)
        while self.progress.step < train.steps:
            self._begin_average()
            rate = learning_rate(self.progress.step, train) * (train.average_lr_factor if self.average else 1.0)
            pace.begin_step()
            grad_norm = self._step(rate)
            pace.end_step()
            self.progress.seconds += pace.tick()
            step, is_last = self.progress.step, self.progress.step == train.steps
            reading = self._reading(rate, grad_norm, pace)
            self.display.show(reading)
            if step % train.log_every == 0 or is_last:
                self._log(reading)
                pace.new_line(self.progress.tokens_read)
            self._evaluate_and_save(step, is_last)
            if not is_last and (received := self._asked_to_stop()):
                self._interrupt(received)
        self.progress.seconds += pace.tick()

    def _reading(self, rate: float, grad_norm: float, pace: Pace) -> Reading:
        progress = self.progress
        return Reading(
            step=progress.step,
            loss=progress.loss_sum / progress.loss_count if progress.loss_count else math.nan,
            tokens_per_second=pace.tokens_per_second(progress.tokens_read),
            learning_rate=rate,
            grad_norm=grad_norm,
            seconds_left=pace.seconds_left(self.run.train.steps - progress.step),
        )

    def _evaluate_and_save(self, step: int, is_last: bool) -> None:
        """What is due after a step."""
        train, progress = self.run.train, self.progress
        is_due = (train.checkpoint_every > 0 and step % train.checkpoint_every == 0) or is_last
        if is_due:
            progress.scheduled_step = step
            progress.scheduled_best = progress.best_step
        if train.eval_every and (step % train.eval_every == 0 or is_last):
            self._validate()
        if is_due:
            self.save(required=is_last)
        self.guarded(self.saver.check)

    def _asked_to_stop(self) -> int:
        """The signal that any process has received; 0 for none."""
        return self.trained.processes.most(self.stop.received or 0)

    def _begin_average(self) -> None:
        """From here on the weights of every step are averaged, if it is time."""
        progress = self.progress
        if self.average is None and average_begins(progress.step, progress.validation_losses, self.run.train):
            self.average = WeightAverage(self.model, self.run.train.average_mu)
            self.record("average")
            self.display.message(f"step {progress.step}: from here on the weights are averaged")

    @property
    def best_model(self) -> Any:
        """The model to evaluate and to save: that of the averaged weights, if there is one."""
        return self.model if self.average is None else self.average.model

    def _step(self, rate: float) -> float:
        """One update; returns the norm of its gradient.

        With segments of random length the learning rate is in proportion to the length, as AWD-LSTM has it: short
        segments would otherwise weigh more, a token, than long ones.
        """
        train, progress = self.run.train, self.progress
        segment = self.stream.read(self.position)
        if segment.starts_epoch:
            self.states = self.empty_memory()
        if train.random_segments:
            rate *= segment.tokens.shape[1] / train.segment
        set_learning_rate(self.optimizer, rate)
        lanes = self.trained.processes.share(train.batch_size)
        tokens, targets = (each[lanes.start : lanes.stop].to(self.device) for each in (segment.tokens, segment.targets))
        random = torch.get_rng_state(), torch.cuda.get_rng_state(self.device) if "cuda" in self.device else None
        done, abandon = progress.step / train.steps, lambda: self._asked_to_stop() > 0
        try:
            result = training_step(self.trained, self.optimizer, tokens, targets, self.states, train, done, abandon)
        except StepAbandoned:
            # As if it had not begun: only random numbers had been drawn for it.
            torch.set_rng_state(random[0])
            if random[1] is not None:
                torch.cuda.set_rng_state(random[1], self.device)
            self._interrupt(self._asked_to_stop())
        if self.average is not None and result.updated:
            self.average.update(self.model)
        self.states, self.position = result.states, segment.next
        progress.step += 1
        progress.tokens += result.targets
        progress.tokens_read += segment.tokens.numel()
        if not result.updated:
            skip_update(self, result, segment)
            return result.grad_norm
        progress.skipped_in_a_row = 0
        progress.last_loss = result.loss
        if progress.first_loss is None:
            progress.first_loss = result.loss
        progress.loss_sum += result.loss * result.targets
        progress.loss_count += result.targets
        if train.spike is not None and progress.watch.sees(result.loss, train.spike):
            report_spike(self, result)
        return result.grad_norm

    def _log(self, reading: Reading) -> None:
        if not self.progress.loss_count:
            return  # every update since the last line was skipped
        self.log.training(reading, self.progress)
        self.progress.loss_sum, self.progress.loss_count = 0.0, 0
        self.display.line(reading)

    def _validate(self) -> None:
        """Evaluate on the validation split, and keep the checkpoint if it is the best so far."""
        step = self.progress.step
        try:
            result = evaluate_in_training(
                self.best_model, self.run, self.corpus, self.trained, lambda: self._asked_to_stop() > 0
            ).to_dict()
        except ValidationStopped:
            self.progress.validation_due = True
            self._interrupt(self._asked_to_stop() or signal.SIGINT)
        self.log.validation(step, result, None if self.average is None else self.average.count)
        self.progress.validation_losses.append(result["nll"])
        best = self.progress.best_nll
        is_best = math.isfinite(result["nll"]) and (best is None or result["nll"] < best)
        self.display.valid(step, result, is_best)
        if is_best:
            self.progress.best_nll, self.progress.best_step = result["nll"], step
            if self.progress.scheduled_step == step:
                self.progress.scheduled_best = step
            self.save()

    def _validate_again(self) -> None:
        """The evaluation that a stop cut short, and the checkpoint as it would have been after it."""
        self.progress.validation_due = False
        self._validate()
        self.save(required=self.progress.step == self.run.train.steps)

    def save(self, required: bool = False) -> None:
        """Write a checkpoint, unless this step has one.

        Args:
            required: without it the run's work would be lost, so that it has to be there before this returns.

        Raises:
            TrainingDiverged: if the weights are not finite.
            UserError: if it cannot be written, unless the run goes on without it.
        """
        step = self.progress.step
        self.guarded(self.saver.wait)
        # All processes or none: what one process could not write, the others believe to be there.
        if self.trained.processes.any(self.saved_step != step):
            check_weights(self)
            began = time.perf_counter()
            contents = capture(self)
            copy_seconds = time.perf_counter() - began
            contents.belongs = self.belongs
            best = self.progress.best_step
            named = (best, self.progress.scheduled_step, self.progress.scheduled_best)
            protected = {each for each in named if each is not None}
            self.saved_step = step
            write = functools.partial(self.saver.save, step, contents, best, protected, copy_seconds)
            if required:
                write()
            else:
                self.guarded(write)
        if required:
            self.saver.wait()

    def guarded(self, action: Callable[[], None]) -> None:
        """Do what a full disk may prevent; the run stops for it or goes on, as it is configured."""
        try:
            action()
        except UserError as error:
            self.saved_step = -1
            if self.run.train.on_save_error == "stop":
                raise
            self.display.message(f"note: {error}; training goes on")
            self.record("save failed", reason=str(error))

    def record(self, event: str, **fields: Any) -> None:
        """Add an event of this step to the log."""
        self.log.record(event, self.progress.step, **fields)

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            UserError: if it is damaged, or the text is not the one the run was trained on.
        """
        restore(self, checkpoint)
        train, progress = self.run.train, self.progress
        if train.average_patience is not None and progress.step < train.steps:
            # The evaluation at the end of a run that was extended is none of those that decide when to average.
            del progress.validation_losses[progress.step // train.eval_every :]
            progress.validation_due &= progress.step % train.eval_every == 0
        if not self.progress.validation_due:  # else it is saved once more, after its evaluation
            self.saved_step = self.progress.step
        if self.trained.processes.is_first:
            point_at_best(self.directory, self.progress.best_step)  # a crash may have come between the two pointers

    def _interrupt(self, received: int) -> NoReturn:
        """Save and stop."""
        self.save(required=True)
        name = signal.Signals(received).name
        self.record("stop", reason=name)
        raise RunInterrupted(
            f"stopped by {name} at step {self.progress.step} of {self.run.train.steps}; everything is saved in "
            f"{self.directory.path}: run the same command to go on",
            exit_code=128 + received,
        )
