"""The training loop: the same command starts a run and goes on with it, exactly.

Everything that determines what comes next is in a checkpoint: weights, optimiser, random state, the lanes' memory, the
position in the text, and the numbers in `Progress`.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from txl.config import RunConfig, differences, validate
from txl.data.corpora import Corpus, open_corpus
from txl.data.streams import LaneStream, StreamPosition
from txl.errors import RunInterrupted, UserError
from txl.evaluation.perplexity import Lanes, evaluate
from txl.models import build_model
from txl.run_directory import RunDirectory, load_weights
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
from txl.training.environment import describe_hardware, describe_software
from txl.training.estimate import parameters_by_part
from txl.training.optimisers import build_optimizer, load_optimizer_tensors, optimizer_tensors
from txl.training.schedules import learning_rate
from txl.training.step import StepResult, training_step

MAY_DIFFER = frozenset(
    {"name", "train.log_every", "train.eval_every", "train.checkpoint_every", "train.keep_checkpoints"}
)
"""Fields that a continued run may change, because they do not change what it computes."""


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0
    tokens: int = 0
    """Targets trained on."""
    seconds: float = 0.0
    """Time spent, over all stretches."""
    best_nll: float | None = None
    best_step: int | None = None
    loss_sum: float = 0.0
    """Sum of the losses since the last line of the log, and their number."""
    loss_count: int = 0


class Trainer:
    """Trains a configuration into a run directory.

    Args:
        run: the configuration.
        out: the run directory; made if it is missing, continued if it holds a run of the same configuration.
        device: "cpu", "cuda" ...; None: a GPU if there is one.
        data_dir: where prepared corpora live.
        init_from: another run directory whose weights and vocabulary a new run starts from.
        quiet: nothing on standard error.

    Raises:
        UserError: for a configuration that breaks a rule.
    """

    def __init__(
        self,
        run: RunConfig,
        out: str | Path,
        *,
        device: str | None = None,
        data_dir: str | Path | None = None,
        init_from: str | Path | None = None,
        quiet: bool = False,
    ):
        validate(run)
        self.run = RunConfig.from_dict(run.to_dict())
        self.directory = RunDirectory(out)
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.data_dir, self.init_from, self.quiet = data_dir, init_from, quiet

    def fit(self) -> dict[str, Any]:
        """Train to the last step, or go on to it.

        Returns:
            directory, step, tokens, seconds, best_nll and best_step (None without validation).

        Raises:
            UserError: if the directory, the corpus or a checkpoint cannot be used.
            RunInterrupted: after Ctrl-C or SIGTERM, once everything is saved.
        """
        is_new = self._claim()
        with self.directory.locked():
            corpus = self._corpus(is_new)
            # The caller's random numbers stay as they were.
            devices = [self.device] if self.device.startswith("cuda") else []
            with torch.random.fork_rng(devices=devices):
                return self._fit(corpus, is_new)

    def _claim(self) -> bool:
        """Make the directory, or see whether it holds this run; true if it is new."""
        path = self.directory.path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {path}: {error.strerror}; give a directory that can be written") from None
        if not os.access(path, os.W_OK | os.X_OK):
            raise UserError(f"--out {path}: not writable; give a directory that can be written")
        if not self.directory.config_path.exists():
            foreign = sorted(each.name for each in path.iterdir() if each.name != ".lock")
            if foreign and not _only_a_begun_run(foreign):
                raise UserError(
                    f"--out {path}: not empty and not a run ({foreign[0]} is there); give another directory"
                )
            return True
        changed = differences(self.directory.config(), self.run, ignore=MAY_DIFFER)
        if changed:
            raise UserError(
                f"--out {path} holds a different run: {', '.join(changed)}; give another --out, and --init-from {path} "
                f"to start from its weights"
            )
        return False

    def _corpus(self, is_new: bool) -> Corpus:
        """The corpus, in the vocabulary that the run has or inherits."""
        data = self.run.data
        vocabulary = None
        if self.init_from is not None and is_new:
            vocabulary = RunDirectory(self.init_from).vocabulary()
            if vocabulary is not None and vocabulary.kind != data.unit:
                raise UserError(
                    f"data.unit is {data.unit}, but {self.init_from} reads {vocabulary.kind} tokens; "
                    f"use --data.unit {vocabulary.kind}"
                )
        elif not is_new:
            vocabulary = self.directory.vocabulary()
        corpus = open_corpus(data.corpus, config=data, data_dir=self.data_dir, quiet=self.quiet)
        if vocabulary is not None and corpus.vocabulary != vocabulary:
            corpus = open_corpus(
                data.corpus, config=data, data_dir=self.data_dir, vocabulary=vocabulary, quiet=self.quiet
            )
        return corpus

    def _fit(self, corpus: Corpus, is_new: bool) -> dict[str, Any]:
        run, train = self.run, self.run.train
        torch.manual_seed(train.seed)
        model = build_model(run.model, corpus.vocabulary)
        if self.init_from is not None and is_new:
            source = RunDirectory(self.init_from)
            load_weights(model, read_tensors(source.checkpoint(), MODEL_FILE), str(self.init_from))
        model = model.to(self.device).train()
        loop = _Loop(
            run=run,
            directory=self.directory,
            corpus=corpus,
            device=self.device,
            model=model,
            optimizer=build_optimizer(model, train),
            stream=LaneStream(
                corpus.tokens("train"),
                train.batch_size,
                train.segment,
                random_segments=train.random_segments,
                seed=train.seed,
            ),
        )
        loop.check_validation_split()
        if is_new:
            corpus.vocabulary.save(self.directory.path / "vocabulary.json")
            self.directory.write_config(run)
        with Display(run.name, corpus.unit, train.steps, self.quiet) as display:
            loop.display = display
            resumed = loop.resume()
            self._announce(loop, resumed)
            loop.train()
        outcome = {"directory": str(self.directory.path), **asdict(loop.progress)}
        return {key: value for key, value in outcome.items() if not key.startswith("loss_")}

    def _announce(self, loop: _Loop, resumed: bool) -> None:
        """Say and record what runs here."""
        parameters = parameters_by_part(loop.model)
        total = sum(parameters.values())
        loop.directory.append(
            "resume" if resumed else "start",
            loop.progress.step,
            config=self.run.to_dict(),
            corpus=loop.corpus.info(),
            parameters=parameters,
            total_parameters=total,
            attention=loop.model.attention_name,
            hardware=describe_hardware(self.device),
            software=describe_software(),
            command=sys.argv,
        )
        step = f", going on from step {loop.progress.step}" if resumed else ""
        loop.display.message(
            f"{self.run.name}: {total:,} parameters, {loop.corpus.name} in {loop.corpus.unit} tokens, "
            f"{loop.model.attention_name} attention on {self.device}{step}"
        )


def _only_a_begun_run(names: list[str]) -> bool:
    """Whether a directory holds nothing but what a start that failed early leaves behind."""
    return set(names) <= {"vocabulary.json", "log.jsonl", "config.json.partial", "vocabulary.json.partial"}


@dataclass
class _Loop:
    """What a run works with while it trains."""

    run: RunConfig
    directory: RunDirectory
    corpus: Corpus
    device: str
    model: Any
    optimizer: torch.optim.Optimizer
    stream: LaneStream

    def __post_init__(self) -> None:
        self.display: Display
        self.progress = Progress()
        self.position: StreamPosition = self.stream.start()
        self.states: list[Any] = self._empty_memory()
        self.saved_step = -1

    def _empty_memory(self) -> list[Any]:
        parts = self.run.train.micro_batches
        return [self.model.init_state(self.run.train.batch_size // parts) for _ in range(parts)]

    def check_validation_split(self) -> None:
        """Refuse a validation split that cannot be evaluated now rather than after thousands of steps."""
        if self.run.train.eval_every:
            tokens = self.corpus.tokens("valid")
            limit = self.run.train.eval_tokens
            try:
                Lanes.cut(len(tokens) if limit is None else min(limit, len(tokens)), self.run.eval.batch_size)
            except UserError as error:
                raise UserError(f"validation split: {error} (--eval.batch-size, --train.eval-every 0)") from None

    def train(self) -> None:
        """All steps that are left."""
        train = self.run.train
        began, seconds_before, first_step = time.perf_counter(), self.progress.seconds, self.progress.step
        line_seconds, line_tokens = 0.0, self.progress.tokens
        with _stop_signals() as stop:
            while self.progress.step < train.steps:
                rate = learning_rate(self.progress.step, train)
                step_began = time.perf_counter()
                result = self._step(rate)
                now = time.perf_counter()
                line_seconds += now - step_began  # evaluating and saving are not training
                self.progress.seconds = seconds_before + now - began
                step, is_last = self.progress.step, self.progress.step == train.steps
                if step % train.log_every == 0 or is_last:
                    speed = (self.progress.tokens - line_tokens) / line_seconds
                    left = (train.steps - step) * (now - began) / (step - first_step)
                    self._log_line(result, rate, speed, left)
                    line_seconds, line_tokens = 0.0, self.progress.tokens
                if train.eval_every and (step % train.eval_every == 0 or is_last):
                    self._validate()
                if (train.checkpoint_every and step % train.checkpoint_every == 0) or is_last:
                    self._save()
                if stop.received is not None and not is_last:
                    self._interrupt(stop.received)
        if self.saved_step >= 0:
            self.directory.append("end", self.progress.step, elapsed=self.progress.seconds)
        where = self.directory.path
        self.display.message(
            f"done: step {self.progress.step} of {train.steps} in {where}; next: txl eval {where}, txl report {where}"
        )

    def _step(self, rate: float) -> StepResult:
        segment = self.stream.read(self.position)
        if segment.starts_epoch:
            self.states = self._empty_memory()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tokens, targets = segment.tokens.to(self.device), segment.targets.to(self.device)
        result = training_step(self.model, self.optimizer, tokens, targets, self.states, self.run.train)
        if not result.updated:
            last = self.directory.pointer("latest")
            raise UserError(
                f"step {self.progress.step + 1}: the loss ({result.loss}) or the gradient ({result.grad_norm}) is not "
                f"finite; the weights were not updated and the last checkpoint is "
                f"{last.name if last else 'none'}; try a lower --train.learning-rate or a longer --train.warmup-steps"
            )
        self.states, self.position = result.states, segment.next
        progress = self.progress
        progress.step += 1
        progress.tokens += segment.tokens.numel()
        progress.loss_sum += result.loss
        progress.loss_count += 1
        return result

    def _log_line(self, result: StepResult, rate: float, speed: float, left: float) -> None:
        progress = self.progress
        loss = progress.loss_sum / progress.loss_count
        progress.loss_sum, progress.loss_count = 0.0, 0
        self.directory.append(
            "train",
            progress.step,
            loss=loss,
            learning_rate=rate,
            grad_norm=result.grad_norm,
            tokens=progress.tokens,
            tokens_per_second=speed,
            elapsed=progress.seconds,
        )
        self.display.train(Reading(progress.step, loss, speed, rate, result.grad_norm, left))

    def _validate(self) -> None:
        """Evaluate on the validation split, with memory that makes the attention as long as in training."""
        train, model = self.run.train, self.run.model
        segment = min(self.run.eval.segment, train.segment)
        mem_len = model.mem_len + train.segment - segment if model.mem_len else 0
        result = evaluate(
            self.model,
            self.corpus.tokens("valid"),
            segment=segment if model.mem_len else train.segment,
            mem_len=mem_len,
            window=model.window or "none",
            batch_size=self.run.eval.batch_size,
            max_tokens=train.eval_tokens,
            dtype=train.dtype,
        ).to_dict()
        self.directory.append("valid", self.progress.step, **result)
        best = self.progress.best_nll
        is_best = math.isfinite(result["nll"]) and (best is None or result["nll"] < best)
        self.display.valid(self.progress.step, result, is_best)
        if is_best:
            self.progress.best_nll, self.progress.best_step = result["nll"], self.progress.step
            self._save()

    def _save(self) -> None:
        """Write a checkpoint, unless this step has one."""
        step = self.progress.step
        if self.saved_step == step:
            return
        tensors: dict[str, Tensor] = {"random.cpu": torch.get_rng_state()}
        if self.device.startswith("cuda"):
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
        for name, tensor in optimizer_tensors(self.optimizer).items():
            tensors[f"optimizer.{name}"] = tensor
        for part, state in enumerate(self.states):
            for name, tensor in state.to_tensors().items():
                tensors[f"memory.{part}.{name}"] = tensor
        numbers = {"progress": asdict(self.progress), "position": self.position.to_dict()}
        numbers["corpus"] = self.corpus.info()["identity"]
        folder = self.directory.checkpoints
        written = write_checkpoint(folder, step, self.model.state_dict(), tensors, numbers)
        # The pointers move before anything that they named is deleted.
        self.directory.set_pointer("latest", written.name)
        best_step = self.progress.best_step
        if best_step == step:
            self.directory.set_pointer("best", written.name)
        self.directory.append("checkpoint", step, directory=written.name, best=best_step == step)
        self.saved_step = step
        best = set() if best_step is None else {checkpoint_name(best_step)}
        prune(folder, self.run.train.keep_checkpoints, best | {written.name})

    def resume(self) -> bool:
        """Go back to the latest checkpoint, if there is one.

        Raises:
            UserError: if it is damaged, or the text is not the one the run was trained on.
        """
        checkpoint = self.directory.pointer("latest")
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
        load_optimizer_tensors(self.optimizer, _under("optimizer.", tensors))
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
        self.progress = Progress(**numbers["progress"])
        return True

    def _interrupt(self, received: int) -> None:
        """Save and stop."""
        self._save()
        name = signal.Signals(received).name
        self.directory.append("stop", self.progress.step, reason=name)
        raise RunInterrupted(
            f"stopped by {name} at step {self.progress.step} of {self.run.train.steps}; everything is saved in "
            f"{self.directory.path}: run the same command to go on",
            exit_code=128 + received,
        )


@dataclass
class _Stop:
    """The signal that asked for a stop, if one has."""

    received: int | None = None


@contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """Note Ctrl-C and SIGTERM instead of dying of them; a second one acts at once."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread can have handlers
        return

    def note(received: int, frame: Any) -> None:
        if stop.received is not None:
            raise KeyboardInterrupt
        stop.received = received

    previous = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
