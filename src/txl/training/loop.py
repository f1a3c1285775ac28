"""The training loop and its state, all of which is in a checkpoint: to go on from one is to have never stopped.

What determines the next step: weights, optimiser, random state, the lanes' memory, the position in the text, and the
numbers in `Progress`.
"""

from __future__ import annotations

import math
import signal
import time
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from txl.config import RunConfig
from txl.data.corpora import Corpus
from txl.data.streams import LaneStream, SentenceStream, StreamPosition
from txl.errors import RunInterrupted, UserError
from txl.evaluation.perplexity import EvaluationResult, Lanes, evaluate
from txl.run_directory import RunDirectory, load_weights
from txl.training.averaging import WeightAverage, average_begins
from txl.training.checkpoints import (
    MODEL_FILE,
    STATE_TENSORS_FILE,
    checkpoint_name,
    prune,
    read_state,
    read_tensors,
    write_checkpoint,
)
from txl.training.display import Display, Reading
from txl.training.optimisers import load_optimizer_tensors, optimizer_tensors, set_learning_rate
from txl.training.schedules import learning_rate
from txl.training.signals import StopRequest, stop_requests
from txl.training.step import training_step


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0
    tokens: int = 0
    """Targets trained on, those that count alone."""
    tokens_read: int = 0
    """Tokens of all segments; more than `tokens` where not every position has a loss."""
    seconds: float = 0.0
    """Time spent, over all stretches."""
    best_nll: float | None = None
    best_step: int | None = None
    loss_sum: float = 0.0
    """Sum of the nats of all targets since the last line of the log, and their number."""
    loss_count: int = 0
    validation_losses: list[float] = field(default_factory=list)
    """Of all evaluations so far, oldest first."""
    validation_due: bool = False
    """Whether the run was stopped in the middle of this step's evaluation."""


class _ValidationStopped(Exception):
    """A stop was asked for in the middle of an evaluation."""


@dataclass
class TrainingLoop:
    """What a run works with while it trains."""

    run: RunConfig
    directory: RunDirectory
    corpus: Corpus
    device: str
    model: Any
    optimizer: torch.optim.Optimizer
    stream: LaneStream | SentenceStream
    display: Display

    def __post_init__(self) -> None:
        self.progress = Progress()
        self.position: StreamPosition = self.stream.start()
        self.states: list[Any] = self._empty_memory()
        self.average: WeightAverage | None = None
        self.saved_step = -1
        self.stop = StopRequest()

    def _empty_memory(self) -> list[Any]:
        parts = self.run.train.micro_batches
        return [self.model.init_state(self.run.train.batch_size // parts) for _ in range(parts)]

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
        self.directory.append("end", self.progress.step, elapsed=self.progress.seconds)

    def _train(self) -> None:
        train, progress = self.run.train, self.progress
        began, seconds_before, first_step = time.perf_counter(), progress.seconds, progress.step
        line_seconds, line_tokens = 0.0, progress.tokens_read
        while progress.step < train.steps:
            self._begin_average()
            rate = learning_rate(progress.step, train) * (train.average_lr_factor if self.average else 1.0)
            step_began = time.perf_counter()
            grad_norm = self._step(rate)
            now = time.perf_counter()
            line_seconds += now - step_began  # evaluating and saving are not training
            progress.seconds = seconds_before + now - began
            step, is_last = progress.step, progress.step == train.steps
            reading = Reading(
                step=step,
                loss=progress.loss_sum / progress.loss_count,
                tokens_per_second=(progress.tokens_read - line_tokens) / line_seconds,
                learning_rate=rate,
                grad_norm=grad_norm,
                seconds_left=(train.steps - step) * (now - began) / (step - first_step),
            )
            self.display.show(reading)
            if step % train.log_every == 0 or is_last:
                self._log(reading)
                line_seconds, line_tokens = 0.0, progress.tokens_read
            if train.eval_every and (step % train.eval_every == 0 or is_last):
                self._validate()
            if (train.checkpoint_every and step % train.checkpoint_every == 0) or is_last:
                self.save()
            if self.stop.received is not None and not is_last:
                self._interrupt(self.stop.received)
        progress.seconds = seconds_before + time.perf_counter() - began

    def _begin_average(self) -> None:
        """From here on the weights of every step are averaged, if it is time."""
        progress = self.progress
        if self.average is None and average_begins(progress.step, progress.validation_losses, self.run.train):
            self.average = WeightAverage(self.model, self.run.train.average_mu)
            self.directory.append("average", progress.step)
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
        tokens, targets = segment.tokens.to(self.device), segment.targets.to(self.device)
        done = progress.step / train.steps
        result = training_step(self.model, self.optimizer, tokens, targets, self.states, train, done)
        if not result.updated:
            last = self.directory.newest()
            self.directory.append("stop", progress.step, reason="not finite")
            raise UserError(
                f"step {progress.step + 1}: the loss ({result.loss}) or the gradient's norm ({result.grad_norm}) is "
                f"not finite; the weights were not updated and the last checkpoint is "
                f"{last.name if last else 'none'}; try a lower --train.learning-rate or a longer --train.warmup-steps"
            )
        if self.average is not None:
            self.average.update(self.model)
        self.states, self.position = result.states, segment.next
        progress.step += 1
        progress.tokens += result.targets
        progress.tokens_read += segment.tokens.numel()
        progress.loss_sum += result.loss * result.targets
        progress.loss_count += result.targets
        return result.grad_norm

    def _log(self, reading: Reading) -> None:
        self.directory.append(
            "train",
            reading.step,
            loss=reading.loss,
            learning_rate=reading.learning_rate,
            grad_norm=reading.grad_norm,
            tokens=self.progress.tokens,
            tokens_read=self.progress.tokens_read,
            tokens_per_second=reading.tokens_per_second,
            elapsed=self.progress.seconds,
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
            self._interrupt(self.stop.received or signal.SIGINT)
        averaged = None if self.average is None else self.average.count
        self.directory.append("valid", step, averaged=averaged, **result)
        self.progress.validation_losses.append(result["nll"])
        best = self.progress.best_nll
        is_best = math.isfinite(result["nll"]) and (best is None or result["nll"] < best)
        self.display.valid(step, result, is_best)
        if is_best:
            self.progress.best_nll, self.progress.best_step = result["nll"], step
            self.save()

    def _validate_again(self) -> None:
        """The evaluation that a stop cut short, and the checkpoint as it would have been after it."""
        self.progress.validation_due = False
        self._validate()
        self.save()

    def _evaluate(self) -> EvaluationResult:
        """With memory that makes the attention as long as in training: memory and segment have the same sum.

        Nothing in it draws random numbers or touches the lanes' memory, so it does not change what comes after.
        """
        train, model = self.run.train, self.run.model
        segment = min(self.run.eval.segment, train.segment) if model.mem_len else train.segment

        def progress(done: int, total: int) -> None:
            if self.stop.received is not None:
                raise _ValidationStopped

        return evaluate(
            self.best_model,
            self.corpus.tokens("valid"),
            segment=segment,
            mem_len=model.mem_len + train.segment - segment,
            window=model.window or "none",
            batch_size=self._eval_lanes,
            max_tokens=train.eval_tokens,
            dtype=train.dtype,
            progress=progress,
        )

    def save(self) -> None:
        """Write a checkpoint, unless this step has one."""
        step, best_step = self.progress.step, self.progress.best_step
        if self.saved_step == step:
            return
        tensors: dict[str, Tensor] = {"random.cpu": torch.get_rng_state()}
        if self.device.startswith("cuda"):
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
        for name, tensor in optimizer_tensors(self.optimizer, self.model).items():
            tensors[f"optimizer.{name}"] = tensor
        for part, state in enumerate(self.states):
            for name, tensor in state.to_tensors().items():
                tensors[f"memory.{part}.{name}"] = tensor
        numbers: dict[str, Any] = {"progress": asdict(self.progress), "position": self.position.to_dict()}
        numbers["corpus"] = self.corpus.info()["identity"]
        if self.average is not None:  # the weights that train, beside those that are used
            numbers["averaged"] = self.average.count
            tensors |= {f"weights.{name}": tensor for name, tensor in self.model.state_dict().items()}
        folder = self.directory.checkpoints
        written = write_checkpoint(folder, step, self.best_model.state_dict(), tensors, numbers)
        # The pointers move before anything that they named is deleted.
        self.directory.set_pointer("latest", written.name)
        self._point_at_best()
        self.directory.append("checkpoint", step, directory=written.name, best=best_step == step)
        self.saved_step = step
        best = set() if best_step is None else {checkpoint_name(best_step)}
        prune(folder, self.run.train.keep_checkpoints, best | {written.name})

    def _point_at_best(self) -> None:
        if self.progress.best_step is None:
            return
        name, named = checkpoint_name(self.progress.best_step), self.directory.pointer("best")
        if (named is None or named.name != name) and (self.directory.checkpoints / name).is_dir():
            self.directory.set_pointer("best", name)

    def resume(self) -> bool:
        """Go back to the newest checkpoint, if there is one.

        Raises:
            UserError: if it is damaged, or the text is not the one the run was trained on.
        """
        checkpoint = self.directory.newest()
        if checkpoint is None:
            return False
        numbers = read_state(checkpoint)
        if numbers["corpus"] != self.corpus.info()["identity"]:
            raise UserError(
                f"{self.corpus.name} is not the text that {self.directory.path} was trained on; give another --out, "
                f"and --init-from {self.directory.path} to start from its weights"
            )
        load_weights(self.model, read_tensors(checkpoint, MODEL_FILE), str(checkpoint))
        tensors = read_tensors(checkpoint, STATE_TENSORS_FILE)
        if "averaged" in numbers:
            self.average = WeightAverage(self.model, self.run.train.average_mu)
            self.average.count = numbers["averaged"]
            load_weights(self.model, _under("weights.", tensors), str(checkpoint))
        load_optimizer_tensors(self.optimizer, self.model, _under("optimizer.", tensors))
        self.states = [
            self.model.state_from_tensors(
                {name: tensor.to(self.device) for name, tensor in _under(f"memory.{part}.", tensors).items()}
            )
            for part in range(self.run.train.micro_batches)
        ]
        torch.set_rng_state(tensors["random.cpu"])
        if "random.cuda" in tensors and self.device.startswith("cuda"):
            torch.cuda.set_rng_state(tensors["random.cuda"], self.device)
        self.position = StreamPosition.from_dict(numbers["position"])
        saved = numbers["progress"]
        self.progress = Progress(**{"tokens_read": saved["tokens"]} | saved)  # what older runs did not tell apart
        if not self.progress.validation_due:  # else it is saved once more, after its evaluation
            self.saved_step = self.progress.step
        self._point_at_best()  # a crash may have come between the two pointers
        return True

    def _interrupt(self, received: int) -> NoReturn:
        """Save and stop."""
        self.save()
        name = signal.Signals(received).name
        self.directory.append("stop", self.progress.step, reason=name)
        raise RunInterrupted(
            f"stopped by {name} at step {self.progress.step} of {self.run.train.steps}; everything is saved in "
            f"{self.directory.path}: run the same command to go on",
            exit_code=128 + received,
        )


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
