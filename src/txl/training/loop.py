"""The training loop. Its state is all in a checkpoint (`snapshot`): to go on from one is to have never stopped."""

from __future__ import annotations

import functools
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from txl.config import RunConfig
from txl.data.corpora import Corpus
from txl.data.streams import LaneStream, Segment, SentenceStream, StreamPosition
from txl.errors import RunInterrupted, UserError
from txl.evaluation.perplexity import EvaluationResult, Lanes, evaluate
from txl.run_directory import RunDirectory, write_whole
from txl.training.averaging import WeightAverage, average_begins
from txl.training.checkpoints import checkpoint_name, remove_later, verify_checkpoint
from txl.training.display import Display, Reading
from txl.training.guards import is_finite
from txl.training.optimisers import set_learning_rate
from txl.training.parallel import TrainedModel
from txl.training.progress import Progress
from txl.training.saver import CheckpointSaver, point_at_best
from txl.training.schedules import learning_rate
from txl.training.signals import StopRequest, stop_requests
from txl.training.snapshot import capture, restore
from txl.training.step import StepAbandoned, StepResult, training_step
from txl.training.tensorboard import Scalars


class _ValidationStopped(Exception):
    """A stop was asked for in the middle of an evaluation."""


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
        self.states: list[Any] = self._empty_memory()
        self.average: WeightAverage | None = None
        self.saved_step = -1
        self._log_is_full = False
        self.stop = StopRequest()
        train, processes = self.run.train, self.trained.processes
        self.saver = CheckpointSaver(
            self.directory,
            keep=train.keep_checkpoints,
            in_background=train.async_checkpoints,
            writes=processes.is_first,
            say=self.display.message,
            record=self._record,
        )
        self.scalars = Scalars(self.directory.path if train.tensorboard and processes.is_first else None)

    def _empty_memory(self) -> list[Any]:
        train = self.run.train
        lanes = len(self.trained.processes.share(train.batch_size)) // train.micro_batches
        return [self.model.init_state(lanes) for _ in range(train.micro_batches)]

    def check_validation_split(self) -> None:
        """Refuse a validation split that cannot be evaluated now rather than after thousands of steps.

        Raises:
            UserError: if it is too short.
        """
        if self.run.train.eval_every:
            tokens = self.corpus.tokens("valid")
            limit = self.run.train.eval_tokens
            try:
                Lanes.cut(len(tokens) if limit is None else min(limit, len(tokens)), self._eval_lanes)
            except UserError as error:
                raise UserError(f"validation split: {error} (--eval.batch-size, --train.eval-every 0)") from None

    @property
    def _eval_lanes(self) -> int:
        return self.run.train.eval_batch_size or self.run.eval.batch_size

    def train(self) -> None:
        """All steps that are left.

        Raises:
            RunInterrupted: after Ctrl-C or SIGTERM, once everything is saved.
            UserError: if the loss is no longer finite, or the directory cannot be written.
        """
        notice = None if self.display.quiet else "stopping after this step; once more to stop without saving"
        with stop_requests(notice) as self.stop:
            if self.progress.validation_due:
                self._validate_again()
            self._train()
            self.saver.wait()
        self._record("end", elapsed=self.progress.seconds)
        self.scalars.close()

    def _train(self) -> None:
        train, began, steps_made = self.run.train, time.perf_counter(), 0
        line_seconds, line_tokens, ticked = 0.0, self.progress.tokens_read, began
        while self.progress.step < train.steps:
            self._begin_average()
            rate = learning_rate(self.progress.step, train) * (train.average_lr_factor if self.average else 1.0)
            step_began = time.perf_counter()
            grad_norm = self._step(rate)
            now = time.perf_counter()
            line_seconds += now - step_began  # evaluating and saving are not training
            steps_made += 1
            self.progress.seconds, ticked = self.progress.seconds + now - ticked, now
            progress = self.progress
            step, is_last = progress.step, progress.step == train.steps
            reading = Reading(
                step=step,
                loss=progress.loss_sum / progress.loss_count if progress.loss_count else math.nan,
                tokens_per_second=max(0, progress.tokens_read - line_tokens) / line_seconds,
                learning_rate=rate,
                grad_norm=grad_norm,
                seconds_left=(train.steps - step) * (now - began) / steps_made,
            )
            self.display.show(reading)
            if step % train.log_every == 0 or is_last:
                self._log(reading)
                line_seconds, line_tokens = 0.0, progress.tokens_read
            is_due = (train.checkpoint_every > 0 and step % train.checkpoint_every == 0) or is_last
            if is_due:
                progress.scheduled_step = step
                progress.scheduled_best = progress.best_step
            if train.eval_every and (step % train.eval_every == 0 or is_last):
                self._validate()
            if is_due:
                self.save(required=is_last)
            self._guarded(self.saver.check)
            if not is_last and (received := self._asked_to_stop()):
                self._interrupt(received)
        self.progress.seconds += time.perf_counter() - ticked

    def _asked_to_stop(self) -> int:
        """The signal that any process has received; 0 for none."""
        return self.trained.processes.most(self.stop.received or 0)

    def _begin_average(self) -> None:
        """From here on the weights of every step are averaged, if it is time."""
        progress = self.progress
        if self.average is None and average_begins(progress.step, progress.validation_losses, self.run.train):
            self.average = WeightAverage(self.model, self.run.train.average_mu)
            self._record("average")
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
            self.states = self._empty_memory()
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
            self._skipped(result, segment)
            return result.grad_norm
        progress.skipped_in_a_row = 0
        progress.loss_sum += result.loss * result.targets
        progress.loss_count += result.targets
        if train.spike is not None and progress.watch.sees(result.loss, train.spike):
            self._spiked(result)
        return result.grad_norm

    def _skipped(self, result: StepResult, segment: Segment) -> None:
        """The loss or the gradient was not finite: the weights are as they were; go on, or stop if it happens again.

        Memory that the segment has filled with what is not finite is emptied, in all lanes and processes alike.
        """
        progress, train = self.progress, self.run.train
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        if self.trained.processes.any(not all(is_finite(state) for state in self.states)):
            self.states = self._empty_memory()
        fields = {
            "loss": str(result.loss),
            "grad_norm": str(result.grad_norm),
            "epoch": segment.position.epoch,
            "offset": segment.position.offset,
            "tokens": list(segment.tokens.shape),
        }
        self._record("skipped", in_a_row=progress.skipped_in_a_row, **fields)
        what = f"the loss ({result.loss}) or the gradient's norm ({result.grad_norm}) is not finite"
        # Weights that are not finite themselves will never be so again, and must not get into a checkpoint.
        is_lost = self.trained.processes.any(not all(bool(each.isfinite().all()) for each in self._local_weights()))
        if progress.skipped_in_a_row <= train.max_skipped and not is_lost:
            self.display.message(f"step {progress.step}: {what}; the update is skipped")
            return
        self._guarded(self.saver.wait)
        self._record("stop", reason="not finite")
        path = self.directory.path / "not-finite.json"
        if self.trained.processes.is_first:
            details = fields | {"step": progress.step, "batch": segment.tokens.tolist()}
            write_whole(path, json.dumps(details) + "\n")
        last = self.directory.newest()
        weights = "are not finite themselves" if is_lost else "were not updated"
        raise UserError(
            f"step {progress.step}: {what}, for {progress.skipped_in_a_row} steps in a row; the weights {weights}, the "
            f"batch and its position are in {path.name} and the last checkpoint is {last.name if last else 'none'}; "
            f"try a lower --train.learning-rate or a longer --train.warmup-steps"
        )

    def _local_weights(self) -> Iterator[torch.Tensor]:
        for parameter in self.model.parameters():
            weight = parameter.detach()
            yield weight.to_local() if hasattr(weight, "to_local") else weight

    def _spiked(self, result: StepResult) -> None:
        """Report a leap of the loss, and go back to the last checkpoint that was due, if that is wanted."""
        progress, train = self.progress, self.run.train
        self._record("spike", loss=result.loss, grad_norm=result.grad_norm, recent_mean=progress.watch.mean)
        goes_back = (
            train.on_spike == "rollback"
            and progress.scheduled_step is not None
            and progress.rollbacks < train.max_rollbacks
        )
        self.display.message(
            f"step {progress.step}: the loss leaps to {result.loss:.3f}, from a recent mean of "
            f"{progress.watch.mean:.3f}" + (f"; back to step {progress.scheduled_step}" if goes_back else "")
        )
        if goes_back and not self._roll_back():
            self.display.message(f"note: the checkpoint of step {progress.scheduled_step} is damaged; training goes on")

    def _roll_back(self) -> bool:
        """Weights, optimiser and random numbers of the last checkpoint that was due; the text goes on behind the spike.

        Going through the same text again would lead to the same spike. False: the checkpoint cannot be used.
        """
        was, position = self.progress, self.position
        target = was.scheduled_step
        assert target is not None
        self._guarded(self.saver.wait)
        checkpoint = self.directory.checkpoints / checkpoint_name(target)
        # Process 0 has waited for its disk and looks; the exchange makes the others wait for it.
        if self.trained.processes.any(self.trained.processes.is_first and not _is_good(checkpoint)):
            return False
        restore(self, checkpoint)
        self.position, self.states = position, self._empty_memory()
        self.progress.rollbacks = was.rollbacks + 1
        self.progress.skipped, self.progress.seconds = was.skipped, was.seconds
        self._record("rollback", from_step=was.step)
        if self.trained.processes.is_first:
            point_at_best(self.directory, self.progress.best_step)
            remove_later(self.directory.checkpoints, target)
        self.saved_step = -1
        self.save()
        return True

    def _log(self, reading: Reading) -> None:
        if not self.progress.loss_count:
            return  # every update since the last line was skipped
        self._record(
            "train",
            loss=reading.loss,
            learning_rate=reading.learning_rate,
            grad_norm=reading.grad_norm,
            tokens=self.progress.tokens,
            tokens_read=self.progress.tokens_read,
            tokens_per_second=reading.tokens_per_second,
            elapsed=self.progress.seconds,
        )
        self.scalars.add(
            reading.step,
            {"train/loss": reading.loss, "train/learning_rate": reading.learning_rate}
            | {"train/grad_norm": reading.grad_norm, "train/tokens_per_second": reading.tokens_per_second},
        )
        self.progress.loss_sum, self.progress.loss_count = 0.0, 0
        self.display.line(reading)

    def _validate(self) -> None:
        """Evaluate on the validation split, and keep the checkpoint if it is the best so far."""
        step = self.progress.step
        try:
            result = self._evaluate().to_dict()
        except _ValidationStopped:
            self.progress.validation_due = True
            self._interrupt(self._asked_to_stop() or signal.SIGINT)
        averaged = None if self.average is None else self.average.count
        self._record("valid", averaged=averaged, **result)
        self.scalars.add(step, {"valid/nll": result["nll"], "valid/bpc": result["bpc"], "valid/ppl": result["ppl"]})
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

    def _evaluate(self) -> EvaluationResult:
        """With memory that makes the attention as long as in training: memory and segment have the same sum.

        Nothing in it draws random numbers or touches the lanes' memory, so it does not change what comes after.
        """
        train, model = self.run.train, self.run.model
        segment = min(self.run.eval.segment, train.segment) if model.mem_len else train.segment

        def progress(done: int, total: int) -> None:
            if self._asked_to_stop():
                raise _ValidationStopped

        with self.trained.whole():
            return evaluate(
                self.best_model,
                self.corpus.tokens("valid"),
                segment=segment,
                mem_len=model.mem_len + train.segment - segment,
                window=model.window or "none",
                batch_size=self._eval_lanes,
                max_tokens=train.eval_tokens,
                dtype="bfloat16" if train.dtype == "bfloat16" else "float32",
                progress=progress,
                processes=self.trained.processes,
            )

    def save(self, required: bool = False) -> None:
        """Write a checkpoint, unless this step has one.

        Args:
            required: without it the run's work would be lost, so that it has to be there before this returns.

        Raises:
            UserError: if it cannot be written, unless the run goes on without it.
        """
        step = self.progress.step
        self._guarded(self.saver.wait)
        # All processes or none: what one process could not write, the others believe to be there.
        if self.trained.processes.any(self.saved_step != step):
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
                self._guarded(write)
        if required:
            self.saver.wait()

    def _guarded(self, action: Callable[[], None]) -> None:
        """Do what a full disk may prevent; the run stops for it or goes on, as it is configured."""
        try:
            action()
        except UserError as error:
            self.saved_step = -1
            if self.run.train.on_save_error == "stop":
                raise
            self.display.message(f"note: {error}; training goes on")
            self._record("save failed", reason=str(error))

    def _record(self, event: str, step: int | None = None, **fields: Any) -> None:
        """Add to the log, which process 0 alone writes. Where a full disk does not stop the run, nor does this."""
        if not self.trained.processes.is_first:
            return
        try:
            self.directory.append(event, self.progress.step if step is None else step, **fields)
            self._log_is_full = False
        except UserError as error:
            if self.run.train.on_save_error == "stop":
                raise
            if not self._log_is_full:
                self.display.message(f"note: {error}; training goes on without it")
            self._log_is_full = True

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            UserError: if it is damaged, or the text is not the one the run was trained on.
        """
        restore(self, checkpoint)
        if not self.progress.validation_due:  # else it is saved once more, after its evaluation
            self.saved_step = self.progress.step
        if self.trained.processes.is_first:
            point_at_best(self.directory, self.progress.best_step)  # a crash may have come between the two pointers

    def _interrupt(self, received: int) -> NoReturn:
        """Save and stop."""
        self.save(required=True)
        name = signal.Signals(received).name
        self._record("stop", reason=name)
        raise RunInterrupted(
            f"stopped by {name} at step {self.progress.step} of {self.run.train.steps}; everything is saved in "
            f"{self.directory.path}: run the same command to go on",
            exit_code=128 + received,
        )


def _is_good(checkpoint: Path) -> bool:
    try:
        verify_checkpoint(checkpoint)
    except UserError:
        return False
    return True
