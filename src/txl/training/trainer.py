"""Training of a configuration in a run directory: the same call starts a run or resumes it exactly.

Under torchrun several processes train together; only process 0 writes files and prints.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import uuid
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

import torch

from txl.config import RunConfig, validate, with_unset_data
from txl.data.corpora import Corpus, absolute_path, open_corpus, with_absolute_paths
from txl.data.lanes import LaneStream
from txl.devices import check_device, chosen_device, float32_products, seed_generators
from txl.errors import Field, UserError
from txl.files import JsonObject, absolute
from txl.models.loss import Objective
from txl.native.build import why_not
from txl.processes import Processes, processes_of
from txl.runs.checkpoints import VerifiedCheckpoint, remove_partial, weights_identity
from txl.runs.directory import RunDirectory
from txl.runs.environment import describe_hardware, describe_software
from txl.runs.events import EventName, RunLog
from txl.training.compilation import check_trainable, compile_layers, model_to_train
from txl.training.display import Display, LogWriter
from txl.training.estimate import parameters_by_part
from txl.training.loop import TrainingLoop, check_validation_split
from txl.training.optimisers import build_optimizer
from txl.training.parallel import TrainedModel
from txl.training.saver import newest_good
from txl.training.starting import (
    begins_here,
    changed_fields,
    check_same_model,
    extension_changes,
    load_initial_weights,
    make_directory,
    refuse_foreign,
    remove_begun,
    remove_empty,
)
from txl.training.state import TrainingSetup, TrainingState


class Trainer:
    """Training of one configuration in one run directory.

    Args:
        run: configuration to train.
        out: run directory; created if missing, continued if it holds a run of the same configuration.
        device: device to train on: "cpu", "cuda" ...; None: a GPU if there is one, else the CPU.
        data_dir: directory of the prepared corpora.
        init_from: run directory whose weights and vocabulary a new run starts with.
        extend: True: continue a run beyond its end, to a larger `train.steps`.
        quiet: True: write nothing to standard error.
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
        self.run = RunConfig.from_dict(run.to_dict())  # checks the types; the caller may change its own object
        validate(self.run)
        self.run.data = with_absolute_paths(self.run.data)
        self.extend = extend
        self.directory = RunDirectory(out)
        self.device = chosen_device(device)
        self.data_dir, self.init_from, self.quiet = data_dir, init_from, quiet
        self.processes = Processes()
        model, goes_on = self.run.model, self.directory.newest() is not None
        if goes_on:
            model = model.with_attention(_logged_attention(self.directory.log()))
        # Other backends round differently, so that the run would not go on bit for bit.
        is_compiled = getattr(model, "attention", None) == "compiled" and self.device == "cpu"
        if goes_on and is_compiled and (lacks := why_not()):
            raise UserError(f"{out} was trained with compiled attention, which needs a C++ compiler: {lacks}")
        check_trainable(dataclasses.replace(self.run, model=model), self.device)  # before any text is fetched
        check_device(self.device)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def fit(self) -> JsonObject:
        """Train up to the last step; resume first if the directory holds a run.

        Gradients are computed even where the caller has disabled them.

        Returns:
            Values of directory, step, tokens, seconds, best_nll and best_step (the last two None without validation).

        Raises:
            UserError: if the directory, the corpus or a checkpoint cannot be used. A directory that held no run before
            is then left unchanged.
            RunInterrupted: after Ctrl-C, SIGTERM or another of `STOP_SIGNALS`, once everything is saved.
            KeyboardInterrupt: after a second Ctrl-C, without saving.
            TrainingDiverged: if losses are not finite, or the model is worse than guessing at the end.
        """
        directory, is_new = self.directory, False
        with processes_of(self.device) as (self.processes, self.device):
            self.quiet = self.quiet or not self.processes.is_first
            _check_processes(self.run, self.processes)
            if not self.processes.is_first:
                return self._fit(self.processes.first_does("directory", lambda: False))
            made = make_directory(directory.path)
            was_ours = refuse_foreign(directory)  # before a lock file makes the directory ours
            try:
                with directory.locked():
                    try:
                        is_new = self.processes.first_does(
                            "directory", lambda: begins_here(directory, self.run, self.extend, self.init_from)
                        )
                        return self._fit(is_new)
                    finally:
                        if is_new and not directory.config_path.exists():
                            remove_begun(directory.path)
                        if not (was_ours or directory.config_path.exists()):
                            # While it is locked, so that it is not another process's.
                            with suppress(OSError):
                                (directory.path / ".lock").unlink(missing_ok=True)
            finally:
                if not directory.config_path.exists():
                    remove_empty(made)

    def would_go_on(self) -> bool:
        """Return whether the directory holds a run of this configuration and text, which `fit` would resume."""
        stored, newest = self.directory.config(), self.directory.newest()
        run = with_unset_data(self.run, stored)
        if changed_fields(stored, run):
            return False
        identity = self._corpus(run, self.directory.log()).info()["identity"]
        return newest is None or VerifiedCheckpoint(newest).state().get("corpus") == identity

    def _fit(self, is_new: bool) -> JsonObject:
        run, directory, processes = self.run, self.directory, self.processes
        log, before, source = directory.log(), None, None
        if not is_new:
            before = RunConfig.from_dict(processes.first_does("configuration", lambda: directory.config().to_dict()))
            run = with_unset_data(run, before)
            if before.train.steps != run.train.steps and before.train.planned_minutes == run.train.planned_minutes:
                # It was planned for another number of steps.
                run = dataclasses.replace(run, train=dataclasses.replace(run.train, planned_minutes=None))
        elif self.init_from is not None:
            source = RunDirectory(self.init_from)
            check_same_model(source, run)
        # Process 0 prepares the corpus; the others then open the prepared files.
        opened: list[Corpus] = []
        processes.first_does("corpus", lambda: opened.append(self._corpus(run, None if is_new else log, source)))
        corpus = opened[0] if opened else self._corpus(run, None if is_new else log, source)
        # Preserve the states of the caller's random generators.
        devices = [self.device] if self.device.startswith("cuda") else []
        precision = float32_products(run.train.tf32) if devices else nullcontext()
        display = Display(corpus.unit, run.train.steps, self.quiet)
        with torch.random.fork_rng(devices=devices), precision:
            loop = self._start(run, before, corpus, log, source, display)
            loop.train()
        where, counters, train = directory.path, loop.state.counters, run.train
        reason = "" if counters.step == train.steps else f" (no new best in {train.patience} evaluations)"
        following = f"txl eval {shlex.quote(str(where))}"
        display.message(f"done: step {counters.step} of {train.steps}{reason} in {where}; next: {following}")
        names = ("step", "tokens", "seconds", "best_nll", "best_step")
        return {"directory": str(where), **{name: getattr(counters, name) for name in names}}

    def _corpus(self, run: RunConfig, log: RunLog | None, source: RunDirectory | None = None) -> Corpus:
        """Open the corpus with the vocabulary that the run has, or inherits from `source`; `log` is None at first."""
        data, vocabulary, is_inherited = run.data, None, False
        if source is not None:
            vocabulary, is_inherited = source.vocabulary(), True
            if vocabulary is not None and vocabulary.kind != data.unit:
                but = f"the model of {source.path} reads {vocabulary.kind} tokens"
                remedy = ("use ", Field("data.unit", vocabulary.kind))
                raise UserError(field="data.unit", value=data.unit, but=but, remedy=remedy)
        elif log is not None:
            vocabulary = self.directory.vocabulary()
            is_inherited = log.started is not None and log.started["init_from"] is not None
        # The byte vocabulary is always the same; preparing the corpus again yields a run's own vocabulary again.
        if vocabulary is None or vocabulary.kind == "byte" or not is_inherited:
            corpus = open_corpus(data.corpus, config=data, data_dir=self.data_dir, quiet=self.quiet)
            if vocabulary is None or corpus.vocabulary == vocabulary:
                return corpus
        return open_corpus(data.corpus, config=data, data_dir=self.data_dir, vocabulary=vocabulary, quiet=self.quiet)

    def _start(
        self,
        run: RunConfig,
        before: RunConfig | None,
        corpus: Corpus,
        log: RunLog,
        source: RunDirectory | None,
        display: Display,
    ) -> TrainingLoop:
        """Build model and loop, resume from the newest checkpoint if there is one, and write what makes a run.

        `before` is the configuration of the run that goes on, None in a new run, which may take weights from `source`.
        """
        directory, processes, train = self.directory, self.processes, run.train
        seed_generators(train.seed, self.device)
        shape = run.model if before is None else run.model.with_attention(_logged_attention(log))
        model = model_to_train(shape, corpus.vocabulary, self.device, train)
        facts: JsonObject = {"compiled": False, "run": log.run_id or uuid.uuid4().hex}
        facts["init_note"] = None if source is None else load_initial_weights(source, model, corpus)
        facts["init_from"] = None if self.init_from is None else absolute(str(self.init_from))
        if train.compile:
            reason = compile_layers(model, self.device)
            facts["compiled"] = reason is None
            if reason:
                display.message(f"train.compile: no working compiler here ({reason}); the layers run eagerly")
        trained = TrainedModel(model, processes, train.parallel)
        if not processes.is_first:
            # Each process draws its own dropout. The tuple's hash, not a seed sequence: its numbers are those of all
            # runs of several processes so far.
            torch.manual_seed(hash((train.seed, processes.rank, 0)) % 2**63)
        stream = LaneStream(
            corpus.tokens("train"),
            train.batch_size,
            train.segment,
            random_segments=train.random_segments,
            seed=train.seed,
            # With the full loss the first number is the segment's length, which shifts nothing.
            shift=Objective(train.loss).counted(train.segment) + train.epoch_shift,
        )
        check_validation_split(run, corpus)
        needed, belongs = train.on_save_error == "stop", {}
        writer = LogWriter(directory, display, writes=processes.is_first, needed=needed, tensorboard=train.tensorboard)
        if processes.is_first:
            if before is None:
                vocabulary = corpus.vocabulary
                if corpus.unit in ("byte", "bpe"):  # the characters that the run is trained on, with the source's
                    inherited = frozenset() if source is None else getattr(source.vocabulary(), "seen", None)
                    vocabulary.seen = None if inherited is None else inherited | set(corpus.symbols("train"))
                vocabulary.save(directory.path / "vocabulary.json")
            belongs = weights_identity(asdict(run.model), directory.path / "vocabulary.json", facts["run"])
        setup = TrainingSetup(run, directory, corpus, self.device, trained, stream, display, writer, belongs)
        state = TrainingState(model, build_optimizer(model, train), setup.empty_memory(), stream.start())
        loop = TrainingLoop(setup, state)

        verified: list[VerifiedCheckpoint] = []  # by process 0, which hashes the files only once
        newest = before and processes.first_does("checkpoint", lambda: self._newest_good(log, display, verified))
        if newest is None:  # a new run, or one that was killed before its first checkpoint
            self._announce(loop, EventName.START, facts)
            if source is not None:
                # With its own checkpoint the run does not depend on the source of its weights.
                loop.saver.save(state)
                loop.saver.wait()
        else:
            assert before is not None
            loop.resume(verified[0] if verified else VerifiedCheckpoint(directory.checkpoints / newest))
            self._note_changes(loop, before, log)
            if log.started is not None:
                facts["init_from"] = log.started["init_from"]
            self._announce(loop, EventName.RESUME, facts)
        # This file makes the directory a run, so it is written last.
        if processes.is_first and before != run:
            directory.write_config(run)
        return loop

    def _newest_good(self, log: RunLog, display: Display, verified: list[VerifiedCheckpoint]) -> str | None:
        """Return the name of the checkpoint to resume from, or None, and report newer ones that cannot be used."""
        remove_partial(self.directory.checkpoints)
        checkpoint, refused = newest_good(self.directory, log.run_id)
        for reason in refused:
            display.message(f"note: {reason}")
            self.directory.append(EventName.REFUSED, 0, reason=reason)
        if checkpoint is None:
            return None
        verified.append(checkpoint)
        return checkpoint.path.name

    def _note_changes(self, loop: TrainingLoop, before: RunConfig, log: RunLog) -> None:
        """Report what changes where a run goes on: the path of its text, its number of steps, the CPU's threads."""
        run, display, step = loop.setup.run, loop.setup.display, loop.state.counters.step
        old, new = absolute_path(before.data.corpus), run.data.corpus
        if old != new:
            display.message(f"note: {new} is the text that this run was trained on as {old}")
        steps = before.train.steps, run.train.steps
        if steps[0] != steps[1]:
            changes = extension_changes(before, run, loop.state)
            loop.setup.log.record(EventName.EXTEND, step, from_steps=steps[0], to_steps=steps[1], changes=changes)
            effect = "; ".join(changes) or "as if it had been configured so from the start"
            display.message(f"train.steps {steps[0]} -> {steps[1]}, from step {step} on: {effect}")
        threads = None if log.resumed is None else log.resumed["hardware"]["threads"]
        if self.device == "cpu" and threads not in (None, torch.get_num_threads()):
            display.message(
                f"note: the run was computed in {threads} threads, now in {torch.get_num_threads()}, which round "
                f"differently; set OMP_NUM_THREADS={threads} to go on bit for bit"
            )

    def _announce(self, loop: TrainingLoop, event: EventName, facts: JsonObject) -> None:
        """Show and log the model, the corpus and the device, if this is the process that writes."""
        if not self.processes.is_first:
            return
        run, corpus, display = loop.setup.run, loop.setup.corpus, loop.setup.display
        model, step, train = loop.state.model, loop.state.counters.step, run.train
        parameters = parameters_by_part(model)
        total = sum(parameters.values())
        self.directory.append(
            event,
            step,
            config=run.to_dict(),
            corpus=corpus.info(),
            parameters=parameters,
            total_parameters=total,
            attention=model.attention_name,
            hardware=describe_hardware(self.device),
            software=describe_software(),
            command=sys.argv,
            processes=self.processes.count,
            **facts,
        )
        if event == EventName.RESUME:
            start = f", going on from step {step}"
        else:
            note = f" ({facts['init_note']})" if facts["init_note"] else ""
            start = f", starting from {facts['init_from']}{note}" if facts["init_from"] else ""
        notes = [model.attention_note]
        if train.warmup_steps >= train.steps:
            notes.append(f"the warm-up of {train.warmup_steps} steps is not over when training ends")
        if event == EventName.START and "test" in corpus.splits:
            notes += corpus.notes("test", corpus.unknown_share("train"))
        for note in filter(None, notes):
            display.message(f"note: {note}")
        compiled = ", compiled layers" if facts["compiled"] else ""
        count = self.processes.count
        together = f" in {count} processes ({train.parallel.upper()})" if count > 1 else ""
        display.message(
            f"{run.name}: {total:,} parameters, {corpus.name} in {corpus.unit} tokens, "
            f"{model.attention_name} attention{compiled} on {self.device}{together}{start}"
        )


def _logged_attention(log: RunLog) -> str | None:
    """Return the attention backend that a run began with, because another would round differently."""
    return None if log.started is None else log.started["attention"]


def _check_processes(run: RunConfig, processes: Processes) -> None:
    """Refuse a configuration that these processes cannot train."""
    train, count = run.train, processes.count
    needed = count * train.micro_batches
    if count > 1 and train.capture:
        remedy = ("set ", Field("train.capture", False))
        raise UserError(field="train.capture", value=True, but=f"these are {count} processes", remedy=remedy)
    if train.batch_size % needed:
        expected = f"a multiple of {needed}: {count} processes with {train.micro_batches} parts each"
        raise UserError(field="train.batch_size", value=train.batch_size, expected=expected)
    if count > 1 and train.parallel == "fsdp" and (train.averages or train.optimizer == "muon"):
        but = "neither an average of the weights nor train.optimizer muon can be sharded"
        raise UserError(field="train.parallel", value="fsdp", but=but, remedy=("use ", Field("train.parallel", "ddp")))
    if count > 1 and train.parallel == "fsdp" and train.dtype == "float16":
        but = "in float16 the weights cannot be sharded"
        raise UserError(field="train.parallel", value="fsdp", but=but, remedy=("use ", Field("train.parallel", "ddp")))


def fork_of(
    config: RunConfig, out: Path, device: str | None = None, data_dir: str | Path | None = None
) -> tuple[Path, Path | None]:
    """Return the directory of a fork that starts from another run's weights, and the directory of these weights.

    The fork's directory is OUT, OUT-fork-1, OUT-fork-2 ...: the first that is free or has this configuration and text.

    Args:
        config: configuration of the fork.
        out: directory that holds a run.
        device: device that the fork trains on.
        data_dir: directory of the prepared corpora.

    Returns:
        Both directories; the second is None if the first is `out`, whose run then continues.
    """
    candidate, number = out, 0
    beside = out if out.name not in ("", "..") else Path(os.path.abspath(out))
    while RunDirectory(candidate).config_path.exists():
        if Trainer(config, candidate, device=device, data_dir=data_dir, quiet=True).would_go_on():
            return candidate, None if candidate == out else out
        number += 1
        candidate = beside.with_name(f"{beside.name}-fork-{number}")
    check_same_model(RunDirectory(out), config, fork=True)
    return candidate, out
