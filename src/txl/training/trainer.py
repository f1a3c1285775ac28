"""Training a configuration into a run directory: the same call starts a run and goes on with it, exactly.

Started by torchrun, it trains with several processes; process 0 alone writes and talks.

What a run is made of, said to the user and recorded in its log before the first step.

`torch.compile` as an option of training.
"""

from __future__ import annotations

import random
import sys
import uuid
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from txl.config import RunConfig, validate, with_unset_data
from txl.data.corpora import Corpus, absolute_path, open_corpus, with_absolute_paths
from txl.data.streams import training_stream
from txl.errors import UserError
from txl.models import FAMILIES, build_model
from txl.models.decoder import Decoder
from txl.models.language_model import Objective
from txl.processes import Processes, processes_of
from txl.runs.checkpoints import belongs_to, read_state, remove_partial
from txl.runs.directory import RunDirectory
from txl.runs.environment import describe_hardware, describe_software
from txl.training.display import Display
from txl.training.estimate import parameters_by_part, softmax_hint
from txl.training.loop import TrainingLoop
from txl.training.optimisers import build_optimizer
from txl.training.parallel import TrainedModel
from txl.training.saver import newest_good
from txl.training.snapshot import seed_of_process
from txl.training.starting import (
    begins_here,
    changed_fields,
    check_same_model,
    extension_changes,
    load_initial_weights,
    make_directory,
    remove_begun,
)
from txl.training.validation import check_validation_split


class Trainer:
    """Trains a configuration into a run directory.

    Args:
        run: the configuration.
        out: the run directory; made if it is missing, continued if it holds a run of the same configuration.
        device: "cpu", "cuda" ...; None: a GPU if there is one.
        data_dir: where prepared corpora live.
        init_from: another run directory whose weights and vocabulary a new run starts from.
        extend: go on with a run beyond its end, to a larger `train.steps`.
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
        extend: bool = False,
        quiet: bool = False,
    ):
        validate(run)
        self.run = RunConfig.from_dict(run.to_dict())
        self.run.data = with_absolute_paths(self.run.data)
        self.extend = extend
        self.directory = RunDirectory(out)
        self.device = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.data_dir, self.init_from, self.quiet = data_dir, init_from, quiet
        FAMILIES[type(run.model)].check_device(run.model, self.device)  # before any text is fetched
        self._compiled = False
        self._init_note: str | None = None
        self.processes = Processes()

    def fit(self) -> dict[str, Any]:
        """Train to the last step, or go on to it.

        Returns:
            directory, step, tokens, seconds, best_nll and best_step (None without validation).

        Raises:
            UserError: if the directory, the corpus or a checkpoint cannot be used. A directory that held no run before
                is then as it was.
            RunInterrupted: after Ctrl-C or SIGTERM, once everything is saved.
            TrainingDiverged: if numbers are no longer finite, or the model that came of it is of no use.
        """
        with processes_of(self.device) as (self.processes, self.device):
            self.quiet = self.quiet or not self.processes.is_first
            _check_lanes(self.run, self.processes)
            if not self.processes.is_first:
                return self._fit(self.processes.first_does("directory", lambda: None))
            return self._fit_first()

    def _fit_first(self) -> dict[str, Any]:
        """`fit` for the process that writes."""
        made = make_directory(self.directory.path)
        # Without this sign that a trainer has been here, nothing in the directory is ours to remove.
        was_ours = (self.directory.path / ".lock").exists()
        try:
            with self.directory.locked():
                is_new = self.processes.first_does(
                    "directory", lambda: begins_here(self.directory, self.run, was_ours, self.extend)
                )
                try:
                    return self._fit(is_new)
                finally:
                    if is_new and not self.directory.config_path.exists():
                        remove_begun(self.directory.path)
        finally:
            if not self.directory.config_path.exists():
                for each in made:
                    with suppress(OSError):
                        (each / ".lock").unlink(missing_ok=True)
                        each.rmdir()

    def would_go_on(self) -> bool:
        """Whether the directory holds a run of this configuration and text.

        Raises:
            UserError: if the directory or the corpus cannot be read.
        """
        stored = self.directory.config()
        self.run = with_unset_data(self.run, stored)
        if changed_fields(stored, self.run):
            return False
        newest = self.directory.newest()
        return newest is None or read_state(newest).get("corpus") == self._corpus(False, None).info()["identity"]

    def _fit(self, is_new: bool) -> dict[str, Any]:
        source = None
        if not is_new:
            self.run = with_unset_data(self.run, self.directory.config())
        if is_new and self.init_from is not None:
            source = RunDirectory(self.init_from)
            check_same_model(source, self.run)
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
        self._init_note = None if source is None else load_initial_weights(source, model, corpus)
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
            # A whole segment is no shift: with the full loss it is `epoch_shift` alone that moves them.
            shift=Objective(train.loss).counted(train.segment) + train.epoch_shift,
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
        check_validation_split(self.run, corpus)
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
            before = self.processes.first_does("configuration", lambda: self.directory.config().to_dict())
            self._note_changes(loop, RunConfig.from_dict(before))
            self._announce(loop, "resume")
        self._note_what_belongs(loop)
        if self.processes.is_first and self.directory.config() != self.run:
            self.directory.write_config(self.run)

    def _note_changes(self, loop: TrainingLoop, before: RunConfig) -> None:
        """Say what of the configuration is another than before: the text's name, the number of steps."""
        old, new = absolute_path(before.data.corpus), self.run.data.corpus
        if old != new:
            loop.display.message(f"note: {new} is the text that this run was trained on as {old}")
        steps = before.train.steps, self.run.train.steps
        if steps[0] != steps[1]:
            changes = extension_changes(before, self.run, loop.progress.step)
            loop.record("extend", from_steps=steps[0], to_steps=steps[1], changes=changes)
            told = "; ".join(changes) or "as if it had been configured so from the start"
            loop.display.message(f"train.steps {steps[0]} -> {steps[1]}, from step {loop.progress.step} on: {told}")

    def _newest_good(self, loop: TrainingLoop) -> str | None:
        """The name of the checkpoint to go on from, if there is one; those that cannot be used are named."""
        remove_partial(self.directory.checkpoints)
        found, refused = newest_good(self.directory)
        for reason in refused:
            loop.display.message(f"note: {reason}")
            self.directory.append("refused", 0, reason=reason)
        return None if found is None else found.name

    def _announce(self, loop: TrainingLoop, event: str) -> None:
        source = None if self.init_from is None else str(self.init_from)
        announce(loop, event, compiled=self._compiled, init_from=source, init_note=self._init_note)

    def _note_what_belongs(self, loop: TrainingLoop) -> None:
        vocabulary = self.directory.path / "vocabulary.json"
        loop.belongs = belongs_to(asdict(self.run.model), vocabulary, self.directory.run_id())


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


def announce(
    loop: TrainingLoop, event: str, *, compiled: bool, init_from: str | None, init_note: str | None = None
) -> None:
    """Say and record what runs here, if this is the process that talks.

    Args:
        loop: about to train.
        event: "start" or "resume".
        compiled: whether its layers are.
        init_from: the directory that the weights came from, if they did.
        init_note: what of the two models' weights was not taken over, if anything.

    Raises:
        UserError: if the log cannot be written.
    """
    processes, directory, run = loop.trained.processes, loop.directory, loop.run
    if not processes.is_first:
        return
    parameters = parameters_by_part(loop.model)
    total = sum(parameters.values())
    directory.append(
        event,
        loop.progress.step,
        config=run.to_dict(),
        corpus=loop.corpus.info(),
        parameters=parameters,
        total_parameters=total,
        attention=loop.model.attention_name,
        compiled=compiled,
        hardware=describe_hardware(loop.device),
        software=describe_software(),
        command=sys.argv,
        init_from=init_from,
        init_note=init_note,
        processes=processes.count,
        run=directory.run_id() or uuid.uuid4().hex,
    )
    if event == "resume":
        start = f", going on from step {loop.progress.step}"
    else:
        note = "" if init_note is None else f" ({init_note})"
        start = "" if init_from is None else f", starting from {init_from}{note}"
    if run.train.warmup_steps >= run.train.steps:
        loop.display.message(f"note: the warm-up of {run.train.warmup_steps} steps is not over when training ends")
    attention = loop.model.attention_name + (" attention, compiled layers" if compiled else " attention")
    count, engine = processes.count, run.train.parallel.upper()
    together = f" in {count} processes ({engine})" if count > 1 else ""
    loop.display.message(
        f"{run.name}: {total:,} parameters, {loop.corpus.name} in {loop.corpus.unit} tokens, "
        f"{attention} on {loop.device}{together}{start}"
    )
    if loop.model.attention_note is not None:
        loop.display.message(f"note: {loop.model.attention_note}")
    for note in loop.corpus.notes("test") if event == "start" and "test" in loop.corpus.splits else ():
        loop.display.message(f"note: {note}")
    hint = softmax_hint(run, len(loop.corpus.vocabulary), parameters, loop.device) if event == "start" else None
    if hint is not None:
        loop.display.message(f"note: {hint}")


def compile_layers(model: Decoder[Any], device: str) -> str | None:
    """Compile a model's layers where gradients are taken; everything else, and the names of its weights, stay.

    All layers run one compiled graph, so that compiling takes a layer's time and not the model's. A QRNN's graphs, one
    for each shape of a layer's weights, are for segments of any length from the first; its recurrence is not part of
    them (`models.scan`). Evaluation reads a view of the model, whose layers run eagerly.

    Returns:
        Why nothing was compiled, in one line: this machine has no working compiler. None if all is well.
    """
    reason = _compiler_missing(device)
    if reason is None:
        for layer in model.get_submodule("layers").children():
            layer.compile(dynamic=model.compiles_any_length)
    return reason


def _compiler_missing(device: str) -> str | None:
    """Compile something small; the first line of the error if that fails."""
    factor = random.Random().random()  # no earlier attempt has left this one in a cache; torch's generator stays

    def small(values: Tensor) -> Tensor:
        return (values * factor).relu() + 1

    try:
        torch.compile(small)(torch.ones(8, device=device))
    except Exception as error:  # whatever it is, it is the compiler's
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return lines[0].strip()
    return None
