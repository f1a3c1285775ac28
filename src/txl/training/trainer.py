"""Training a configuration into a run directory: the same call starts a run and goes on with it, exactly.

Started by torchrun, it trains with several processes; process 0 alone writes and talks.
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from txl.attention import attention_backend
from txl.config import RunConfig, differences, has_absolute_positions, validate
from txl.data.corpora import Corpus, open_corpus
from txl.data.streams import training_stream
from txl.errors import UserError
from txl.models import build_model
from txl.models.objective import Objective
from txl.processes import Processes, processes_of
from txl.run_directory import RunDirectory, load_weights
from txl.training.checkpoints import (
    MODEL_FILE,
    belongs_to,
    checkpoint_name,
    read_state,
    read_tensors,
    remove_partial,
)
from txl.training.compilation import compile_layers
from txl.training.display import Display
from txl.training.environment import describe_hardware, describe_software
from txl.training.estimate import parameters_by_part
from txl.training.loop import TrainingLoop
from txl.training.optimisers import build_optimizer
from txl.training.parallel import TrainedModel
from txl.training.saver import newest_good
from txl.training.snapshot import seed_of_process

MAY_DIFFER = frozenset(
    {"name", "train.log_every", "train.eval_every", "train.checkpoint_every", "train.keep_checkpoints"}
    | {"train.parallel", "train.async_checkpoints", "train.on_save_error", "train.max_skipped", "train.tensorboard"}
)
"""Fields that a continued run may change, because they do not change what it computes."""
WEIGHTS_DEPEND_ON = (
    "encoding",
    "n_layer",
    "d_model",
    "n_head",
    "d_head",
    "d_inner",
    "d_embed",
    "pre_norm",
    "layer_norm_eps",
    "untie_r",
    "cutoffs",
    "div_val",
    "tie_projections",
    "tie_embeddings",
    "kind",
    "d_hidden",
    "d_last",
    "kernel_sizes",
    "n_softmax",
)
"""Fields of the model without which weights mean something else; lengths and dropout may change."""
_BEGUN = frozenset({"vocabulary.json", "log.jsonl", "checkpoints", "latest"})
"""What a start that failed before its config.json was written may leave behind."""


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
        self.device = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.data_dir, self.init_from, self.quiet = data_dir, init_from, quiet
        if run.model.kind == "transformer" and not has_absolute_positions(run.model):
            attention_backend(run.model, self.device)  # refuses what cannot train here before any text is fetched
        self._compiled = False
        self.processes = Processes()

    def fit(self) -> dict[str, Any]:
        """Train to the last step, or go on to it.

        Returns:
            directory, step, tokens, seconds, best_nll and best_step (None without validation).

        Raises:
            UserError: if the directory, the corpus or a checkpoint cannot be used. A directory that held no run before
                is then as it was.
            RunInterrupted: after Ctrl-C or SIGTERM, once everything is saved.
        """
        with processes_of(self.device) as (self.processes, self.device):
            self.quiet = self.quiet or not self.processes.is_first
            _check_lanes(self.run, self.processes)
            if not self.processes.is_first:
                return self._fit(self.processes.first_does("directory", lambda: None))
            return self._fit_first()

    def _fit_first(self) -> dict[str, Any]:
        """`fit` for the process that writes."""
        made = _make_directory(self.directory.path)
        # Without this sign that a trainer has been here, nothing in the directory is ours to remove.
        was_ours = (self.directory.path / ".lock").exists()
        try:
            with self.directory.locked():
                is_new = self.processes.first_does("directory", lambda: self._is_new(was_ours))
                try:
                    return self._fit(is_new)
                finally:
                    if is_new and not self.directory.config_path.exists():
                        _remove_begun(self.directory.path)
        finally:
            if not self.directory.config_path.exists():
                for each in made:
                    with suppress(OSError):
                        (each / ".lock").unlink(missing_ok=True)
                        each.rmdir()

    def _is_new(self, was_ours: bool) -> bool:
        """Whether a run begins here, rather than goes on.

        Args:
            was_ours: whether a trainer has been in this directory before.

        Raises:
            UserError: if the directory holds something else.
        """
        path = self.directory.path
        if not self.directory.config_path.exists():
            there = [each for each in sorted(path.iterdir()) if each.name != ".lock"]
            foreign = [each.name for each in there if not (was_ours and _is_of_a_begun_run(each))]
            if foreign:
                raise UserError(
                    f"--out {path}: not empty and not a run ({foreign[0]} is there); give another directory"
                )
            _remove_begun(path)
            return True
        changed = differences(self.directory.config(), self.run, ignore=_may_differ(self.run))
        folder = self.directory.checkpoints
        if changed and not (folder.is_dir() and any(not each.name.startswith(".") for each in folder.iterdir())):
            # A run that came to nothing (its first steps failed, say) does not stand in the way of a better one.
            self.directory.config_path.unlink()
            _remove_begun(path)
            return True
        if changed:
            raise UserError(
                f"--out {path} holds a different run: {', '.join(changed)}; give another --out, with "
                f"--init-from {path} to start from its weights, or --fork to do so beside it"
            )
        return False

    def would_go_on(self) -> bool:
        """Whether the directory holds a run of this configuration and text.

        Raises:
            UserError: if the directory or the corpus cannot be read.
        """
        if differences(self.directory.config(), self.run, ignore=_may_differ(self.run)):
            return False
        newest = self.directory.newest()
        return newest is None or read_state(newest).get("corpus") == self._corpus(False, None).info()["identity"]

    def _fit(self, is_new: bool) -> dict[str, Any]:
        source = None
        if is_new and self.init_from is not None:
            source = RunDirectory(self.init_from)
            _check_same_model(source, self.run)
        opened: list[Corpus] = []

        def open_and_verify() -> None:
            opened.append(self._corpus(is_new, source))
            opened[0].verify()  # the text's identity is that of its source; here are the tokens that are trained on

        self.processes.first_does("corpus", open_and_verify)
        corpus = opened[0] if opened else self._corpus(is_new, source)
        # The caller's random numbers stay as they were.
        devices = [self.device] if self.device.startswith("cuda") else []
        with torch.random.fork_rng(devices=devices), self._display(corpus.unit) as display:
            loop = self._loop(corpus, source, display)
            if is_new:
                self._begin(loop, keep_weights=source is not None)
            else:
                self._go_on(loop)
            loop.train()
        where, step = self.directory.path, loop.progress.step
        display.message(f"done: step {step} of {self.run.train.steps} in {where}; next: txl eval {where}")
        outcome = {"directory": str(where), **asdict(loop.progress)}
        return {key: outcome[key] for key in ("directory", "step", "tokens", "seconds", "best_nll", "best_step")}

    def _display(self, unit: str) -> Display:
        return Display(self.run.name, unit, self.run.train.steps, self.quiet)

    def _corpus(self, is_new: bool, source: RunDirectory | None) -> Corpus:
        """The corpus, in the vocabulary that the run has or inherits.

        Raises:
            UserError: if it cannot be read in that vocabulary.
        """
        data = self.run.data
        vocabulary = inherited = None
        if source is not None:
            vocabulary = inherited = source.vocabulary()
            if vocabulary is not None and vocabulary.kind != data.unit:
                raise UserError(
                    f"data.unit is {data.unit}, but the model of {source.path} reads {vocabulary.kind} tokens; "
                    f"use --data.unit {vocabulary.kind}"
                )
        elif not is_new:
            vocabulary = self.directory.vocabulary()
            starts = [event for event in self.directory.events() if event["event"] == "start"]
            inherited = vocabulary if starts and starts[-1].get("init_from") else None

        # Bytes are the same everywhere; a run's own vocabulary is found again by preparing the corpus anew.
        if vocabulary is None or vocabulary.kind == "byte" or inherited is None:
            corpus = open_corpus(data.corpus, config=data, data_dir=self.data_dir, quiet=self.quiet)
            if vocabulary is None or corpus.vocabulary == vocabulary:
                return corpus
        return open_corpus(data.corpus, config=data, data_dir=self.data_dir, vocabulary=vocabulary, quiet=self.quiet)

    def _loop(self, corpus: Corpus, source: RunDirectory | None, display: Display) -> TrainingLoop:
        train = self.run.train
        torch.manual_seed(train.seed)
        model = build_model(self.run.model, corpus.vocabulary, self.device).to(self.device).train()
        if train.dtype == "float64":
            model.double()
        if source is not None:
            _load_from(source, model, corpus)
        if train.compile:
            reason = compile_layers(model, self.device)
            self._compiled = reason is None
            if reason:
                display.message(f"train.compile: no working compiler here ({reason}); the layers run eagerly")
        trained = TrainedModel(model, self.processes, train.parallel)
        if not self.processes.is_first:  # other lanes, other dropout
            seed_of_process(train.seed, self.processes.rank, 0)
        stream = training_stream(
            corpus.tokens("train"),
            train.batch_size,
            train.segment,
            random_segments=train.random_segments,
            seed=train.seed,
            shift=Objective(train.loss).counted(train.segment),
        )
        loop = TrainingLoop(
            run=self.run,
            directory=self.directory,
            corpus=corpus,
            device=self.device,
            trained=trained,
            optimizer=build_optimizer(model, train),
            stream=stream,
            display=display,
        )
        loop.check_validation_split()
        return loop

    def _begin(self, loop: TrainingLoop, keep_weights: bool) -> None:
        """Write what makes the directory a run; config.json comes last."""
        if self.processes.is_first:
            self.directory.write_vocabulary(loop.corpus.vocabulary)
        self._announce(loop, "start")
        self._note_what_belongs(loop)
        if keep_weights:
            # The run no longer depends on where its weights came from.
            loop.save()
            loop.saver.wait()
        if self.processes.is_first:
            self.directory.write_config(self.run)

    def _go_on(self, loop: TrainingLoop) -> None:
        found = self.processes.first_does("checkpoint", lambda: self._newest_good(loop))
        if found is None:
            self._announce(loop, "start")  # it was stopped, the hard way, before its first checkpoint
        else:
            loop.resume(self.directory.checkpoints / found)
            self._announce(loop, "resume")
        self._note_what_belongs(loop)
        if self.processes.is_first and self.directory.config() != self.run:
            self.directory.write_config(self.run)

    def _newest_good(self, loop: TrainingLoop) -> str | None:
        """The name of the checkpoint to go on from, if there is one; those that cannot be used are named."""
        remove_partial(self.directory.checkpoints)
        found, refused = newest_good(self.directory)
        for reason in refused:
            loop.display.message(f"note: {reason}")
            self.directory.append("refused", 0, reason=reason)
        return None if found is None else found.name

    def _note_what_belongs(self, loop: TrainingLoop) -> None:
        vocabulary = self.directory.path / "vocabulary.json"
        loop.belongs = belongs_to(asdict(self.run.model), vocabulary, self.directory.run_id())

    def _announce(self, loop: TrainingLoop, event: str) -> None:
        """Say and record what runs here."""
        if not self.processes.is_first:
            return
        parameters = parameters_by_part(loop.model)
        total = sum(parameters.values())
        self.directory.append(
            event,
            loop.progress.step,
            config=self.run.to_dict(),
            corpus=loop.corpus.info(),
            parameters=parameters,
            total_parameters=total,
            attention=loop.model.attention_name,
            compiled=self._compiled,
            hardware=describe_hardware(self.device),
            software=describe_software(),
            command=sys.argv,
            init_from=None if self.init_from is None else str(self.init_from),
            processes=self.processes.count,
            run=self.directory.run_id() or uuid.uuid4().hex,
        )
        if event == "resume":
            start = f", going on from step {loop.progress.step}"
        else:
            start = "" if self.init_from is None else f", starting from {self.init_from}"
        attention = loop.model.attention_name + (" attention, compiled layers" if self._compiled else " attention")
        count, engine = self.processes.count, self.run.train.parallel.upper()
        together = f" in {count} processes ({engine})" if count > 1 else ""
        loop.display.message(
            f"{self.run.name}: {total:,} parameters, {loop.corpus.name} in {loop.corpus.unit} tokens, "
            f"{attention} on {self.device}{together}{start}"
        )


def _may_differ(run: RunConfig) -> frozenset[str]:
    """The fields that a continued run may change."""
    fixed = set()
    if run.train.average_patience is not None:  # evaluations decide when the average begins
        fixed |= {"train.eval_every"}
    if run.train.on_spike == "rollback":  # checkpoints decide where the run goes back to
        fixed |= {"train.checkpoint_every"}
    return MAY_DIFFER - fixed


def _check_same_model(source: RunDirectory, run: RunConfig) -> None:
    """Refuse weights that would mean something else in this configuration.

    Raises:
        UserError: naming the fields that differ.
    """
    theirs, ours = source.config().model, run.model
    changed = [
        f"model.{name} {_value(theirs, name)} -> {_value(ours, name)}"
        for name in WEIGHTS_DEPEND_ON
        if _value(theirs, name) != _value(ours, name)
    ]
    if changed:
        raise UserError(
            f"--init-from {source.path}: its weights are of another model: {', '.join(changed)}; "
            f"set these fields to the weights' values"
        )


def _value(model: Any, name: str) -> Any:
    return model.d_embed or model.d_model if name == "d_embed" else getattr(model, name)


def _load_from(source: RunDirectory, model: Any, corpus: Corpus) -> None:
    """Start from another run's best checkpoint, else its latest.

    Raises:
        UserError: if there is none, it is damaged, or its vocabulary has another size than the corpus's.
    """
    weights = read_tensors(source.checkpoint(), MODEL_FILE)
    size = len(weights.get("softmax.bias", ()))
    if size != model.vocab_size:
        raise UserError(
            f"--init-from {source.path}: its model has {size} tokens, {corpus.name} in {corpus.unit} "
            f"tokens has {model.vocab_size}; expected the same"
        )
    load_weights(model, weights, str(source.path))


def _check_lanes(run: RunConfig, processes: Processes) -> None:
    """The lanes can be divided over processes and parts, and what is configured works with several processes.

    Raises:
        UserError: if not.
    """
    train, count = run.train, processes.count
    if train.batch_size % (count * train.micro_batches):
        raise UserError(
            f"train.batch_size is {train.batch_size}; {count} processes with {train.micro_batches} parts each need a "
            f"multiple of {count * train.micro_batches}"
        )
    if count > 1 and train.parallel == "fsdp" and not (train.average_from is None and train.average_patience is None):
        raise UserError(
            "train.parallel fsdp shards the weights, and their average (train.average_from, train.average_patience) is "
            "not sharded; use --train.parallel ddp or no average"
        )


def _make_directory(path: Path) -> list[Path]:
    """Make a directory; returns those that were not there, innermost first.

    Raises:
        UserError: if it cannot be made or written.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        for each in missing:
            with suppress(OSError):
                each.rmdir()
        raise UserError(f"--out {path}: {error.strerror}; give a directory that can be written") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"--out {path}: not writable; give a directory that can be written")
    return missing


def _is_of_a_begun_run(path: Path) -> bool:
    """Whether a file may have been left by a start that failed before the run had a config.json."""
    if path.name == "checkpoints":
        return {each.name for each in path.iterdir() if not each.name.startswith(".")} <= {checkpoint_name(0)}
    return path.name in _BEGUN or path.name == ".lock" or path.suffix == ".partial"


def _remove_begun(path: Path) -> None:
    """Remove what a start that failed has left, but for the lock."""
    for each in path.iterdir():
        if each.name != ".lock" and _is_of_a_begun_run(each):
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)
            else:
                each.unlink(missing_ok=True)
