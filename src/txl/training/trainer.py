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

from txl.config import ModelConfig, RunConfig, validate, with_unset_data
from txl.data.corpora import Corpus, absolute_path, open_corpus, with_absolute_paths
from txl.data.lanes import training_stream
from txl.devices import check_device, chosen_device, float32_products, seed_generators
from txl.errors import Field, UserError
from txl.files import JsonObject, absolute
from txl.models.loss import Objective
from txl.native.build import why_not
from txl.processes import Processes, processes_of
from txl.runs.checkpoints import VerifiedCheckpoint, remove_partial, weights_identity
from txl.runs.directory import RunDirectory
from txl.runs.environment import describe_hardware, describe_software
from txl.runs.events import EventName
from txl.training.building import check_trainable, model_to_train
from txl.training.compilation import compile_layers
from txl.training.display import Display
from txl.training.estimate import parameters_by_part, softmax_hint
from txl.training.loop import TrainingLoop
from txl.training.optimisers import build_optimizer
from txl.training.parallel import TrainedModel
from txl.training.run_log import LogWriter
from txl.training.saver import newest_good
from txl.training.schedule import learning_rate
from txl.training.snapshot import seed_first
from txl.training.starting import (
    begins_here,
    changed_fields,
    characters_seen,
    check_same_model,
    extension_changes,
    is_ours,
    load_initial_weights,
    make_directory,
    refuse_foreign,
    remove_begun,
    remove_empty,
)
from txl.training.state import TrainingSetup
from txl.training.validation import check_validation_split


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
        self._log = self.directory.log()
        goes_on = self.directory.newest() is not None
        begun = self._model_begun_with() if goes_on else self.run.model
        # Other backends round differently, so that the run would not go on bit for bit.
        is_compiled = getattr(begun, "attention", None) == "compiled" and self.device == "cpu"
        if goes_on and is_compiled and (lacks := why_not()):
            raise UserError(f"{out} was trained with compiled attention, which needs a C++ compiler: {lacks}")
        check_trainable(dataclasses.replace(self.run, model=begun), self.device)  # before any text is fetched
        check_device(self.device)
        self._compiled = False
        self._init_note: str | None = None
        self.processes = Processes()

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
        with processes_of(self.device) as (self.processes, self.device):
            self.quiet = self.quiet or not self.processes.is_first
            _check_processes(self.run, self.processes)
            if not self.processes.is_first:
                return self._fit(self.processes.first_does("directory", lambda: False))
            return self._fit_first()

    def _fit_first(self) -> JsonObject:
        """Run `fit` in process 0, which writes the files."""
        made = make_directory(self.directory.path)
        was_ours = is_ours(self.directory)
        refuse_foreign(self.directory, was_ours)  # before a lock file makes the directory ours
        is_new = False
        try:
            with self.directory.locked():
                try:
                    is_new = self.processes.first_does(
                        "directory",
                        lambda: begins_here(self.directory, self.run, self.extend, self.init_from),
                    )
                    return self._fit(is_new)
                finally:
                    if not self.directory.config_path.exists():
                        if is_new:
                            remove_begun(self.directory.path)
                        if not was_ours:  # while it is locked, so that it is not another process's
                            with suppress(OSError):
                                (self.directory.path / ".lock").unlink(missing_ok=True)
        finally:
            if not self.directory.config_path.exists():
                remove_empty(made)

    def would_go_on(self) -> bool:
        """Return whether the directory holds a run of this configuration and text, which `fit` would resume."""
        stored = self.directory.config()
        self.run = with_unset_data(self.run, stored)
        if changed_fields(stored, self.run):
            return False
        newest = self.directory.newest()
        identity = self._corpus(False, None).info()["identity"]
        return newest is None or VerifiedCheckpoint(newest).state().get("corpus") == identity

    def _fit(self, is_new: bool) -> JsonObject:
        source = None
        self._log = self.directory.log()  # since it was locked
        self._run_id = self._log.run_id or uuid.uuid4().hex
        if not is_new:
            self.run = with_unset_data(self.run, self.directory.config())
        if is_new and self.init_from is not None:
            source = RunDirectory(self.init_from)
            check_same_model(source, self.run)
        opened: list[Corpus] = []
        # Process 0 prepares the corpus; the others then open the prepared files.
        self.processes.first_does("corpus", lambda: opened.append(self._corpus(is_new, source)))
        corpus = opened[0] if opened else self._corpus(is_new, source)
        # Preserve the states of the caller's random generators.
        devices = [self.device] if self.device.startswith("cuda") else []
        precision = float32_products(self.run.train.tf32) if devices else nullcontext()
        with torch.random.fork_rng(devices=devices), precision, self._display(corpus.unit) as display:
            loop = self._loop(corpus, source, display, is_new)
            if is_new:
                self._begin(loop, source)
            else:
                self._go_on(loop)
            loop.train()
        where, step, train = self.directory.path, loop.state.counters.step, self.run.train
        reason = "" if step == train.steps else f" (no new best in evaluations: train.patience is {train.patience})"
        following = f"txl eval {shlex.quote(str(where))}"
        display.message(f"done: step {step} of {train.steps}{reason} in {where}; next: {following}")
        outcome = {"directory": str(where), **asdict(loop.state.counters)}
        return {key: outcome[key] for key in ("directory", "step", "tokens", "seconds", "best_nll", "best_step")}

    def _display(self, unit: str) -> Display:
        return Display(self.run.name, unit, self.run.train.steps, self.quiet)

    def _corpus(self, is_new: bool, source: RunDirectory | None) -> Corpus:
        """Open the corpus with the vocabulary that the run has, or inherits from `source`."""
        data = self.run.data
        vocabulary = inherited = None
        if source is not None:
            vocabulary = inherited = source.vocabulary()
            if vocabulary is not None and vocabulary.kind != data.unit:
                but = f"the model of {source.path} reads {vocabulary.kind} tokens"
                remedy = ("use ", Field("data.unit", vocabulary.kind))
                raise UserError(field="data.unit", value=data.unit, but=but, remedy=remedy)
        elif not is_new:
            vocabulary = self.directory.vocabulary()
            started = self._log.started
            inherited = vocabulary if started is not None and started["init_from"] else None

        # The byte vocabulary is always the same; preparing the corpus again yields a run's own vocabulary again.
        if vocabulary is None or vocabulary.kind == "byte" or inherited is None:
            corpus = open_corpus(data.corpus, config=data, data_dir=self.data_dir, quiet=self.quiet)
            if vocabulary is None or corpus.vocabulary == vocabulary:
                return corpus
        return open_corpus(data.corpus, config=data, data_dir=self.data_dir, vocabulary=vocabulary, quiet=self.quiet)

    def _model_begun_with(self) -> ModelConfig:
        """Return the model with the attention backend in the run's log, because another would round differently."""
        return self.run.model.with_attention(None if self._log.started is None else self._log.started["attention"])

    def _loop(self, corpus: Corpus, source: RunDirectory | None, display: Display, is_new: bool) -> TrainingLoop:
        train = self.run.train
        seed_generators(train.seed, self.device)
        shape = self.run.model if is_new else self._model_begun_with()
        model = model_to_train(shape, corpus.vocabulary, self.device, train)
        self._init_note = None if source is None else load_initial_weights(source, model, corpus)
        if train.compile:
            reason = compile_layers(model, self.device)
            self._compiled = reason is None
            if reason:
                display.message(f"train.compile: no working compiler here ({reason}); the layers run eagerly")
        trained = TrainedModel(model, self.processes, train.parallel)
        if not self.processes.is_first:  # each process draws its own dropout
            seed_first(train.seed, self.processes.rank)
        stream = training_stream(
            corpus.tokens("train"),
            train.batch_size,
            train.segment,
            random_segments=train.random_segments,
            seed=train.seed,
            # With the full loss the first number is the segment's length, which shifts nothing.
            shift=Objective(train.loss).counted(train.segment) + train.epoch_shift,
        )
        check_validation_split(self.run, corpus)
        log = LogWriter(
            self.directory,
            writes=self.processes.is_first,
            needed=train.on_save_error == "stop",
            tensorboard=train.tensorboard,
            say=display.message,
        )
        setup = TrainingSetup(self.run, self.directory, corpus, self.device, trained, stream, display, log)
        return TrainingLoop(setup, setup.first_state(build_optimizer(model, train)))

    def _begin(self, loop: TrainingLoop, source: RunDirectory | None) -> None:
        """Write the files that make the directory a run; config.json is written last."""
        if self.processes.is_first:
            vocabulary = loop.setup.corpus.vocabulary
            vocabulary.seen = characters_seen(loop.setup.corpus, source)
            self.directory.write_vocabulary(vocabulary)
        self._announce(loop, EventName.START)
        self._note_what_belongs(loop)
        if source is not None:
            # With its own checkpoint the run does not depend on the source of its weights.
            loop.saver.save(loop.state)
            loop.saver.wait()
        if self.processes.is_first:
            self.directory.write_config(self.run)

    def _go_on(self, loop: TrainingLoop) -> None:
        verified: list[VerifiedCheckpoint] = []  # by process 0, which hashes the files only once
        name = self.processes.first_does("checkpoint", lambda: self._newest_good(loop.setup.display, verified))
        if name is None:
            self._announce(loop, EventName.START)  # the run was killed before its first checkpoint
        else:
            loop.resume(verified[0] if verified else VerifiedCheckpoint(self.directory.checkpoints / name))
            before = self.processes.first_does("configuration", lambda: self.directory.config().to_dict())
            self._note_changes(loop, RunConfig.from_dict(before))
            if self.processes.is_first and self.device == "cpu":
                self._note_threads(loop.setup.display)
            self._announce(loop, EventName.RESUME)
        self._note_what_belongs(loop)
        if self.processes.is_first and self.directory.config() != self.run:
            self.directory.write_config(self.run)

    def _note_changes(self, loop: TrainingLoop, before: RunConfig) -> None:
        """Report changes of the configuration: another path of the text, another number of steps."""
        display, step = loop.setup.display, loop.state.counters.step
        old, new = absolute_path(before.data.corpus), self.run.data.corpus
        if old != new:
            display.message(f"note: {new} is the text that this run was trained on as {old}")
        steps = before.train.steps, self.run.train.steps
        if steps[0] != steps[1]:
            if self.run.train.planned_minutes == before.train.planned_minutes:
                self.run.train.planned_minutes = None  # it was planned for fewer steps
            changes = extension_changes(before, self.run, loop.state)
            loop.setup.log.record(EventName.EXTEND, step, from_steps=steps[0], to_steps=steps[1], changes=changes)
            effect = "; ".join(changes) or "as if it had been configured so from the start"
            display.message(f"train.steps {steps[0]} -> {steps[1]}, from step {step} on: {effect}")

    def _note_threads(self, display: Display) -> None:
        """Report another number of threads, with which the CPU's sums are rounded differently."""
        if self._log.resumed is None:
            return
        old, new = self._log.resumed["hardware"]["threads"], torch.get_num_threads()
        if old != new:
            display.message(
                f"note: the run was computed in {old} threads, now in {new}, which round differently; set "
                f"OMP_NUM_THREADS={old} to go on bit for bit"
            )

    def _newest_good(self, display: Display, verified: list[VerifiedCheckpoint]) -> str | None:
        """Return the name of the checkpoint to resume from, or None, and report newer ones that cannot be used."""
        remove_partial(self.directory.checkpoints)
        checkpoint, refused = newest_good(self.directory, self._log.run_id)
        for reason in refused:
            display.message(f"note: {reason}")
            self.directory.append(EventName.REFUSED, 0, reason=reason)
        if checkpoint is None:
            return None
        verified.append(checkpoint)
        return checkpoint.path.name

    def _note_what_belongs(self, loop: TrainingLoop) -> None:
        vocabulary = self.directory.path / "vocabulary.json"
        loop.saver.belongs = weights_identity(asdict(self.run.model), vocabulary, self._run_id)

    def _announce(self, loop: TrainingLoop, event: EventName) -> None:
        """Show and log the model, the corpus and the device, if this is the process that writes."""
        if not self.processes.is_first:
            return
        setup, model, step = loop.setup, loop.state.model, loop.state.counters.step
        run, corpus, display = self.run, setup.corpus, setup.display
        parameters = parameters_by_part(model)
        total = sum(parameters.values())
        init_from = None if self.init_from is None else absolute(str(self.init_from))
        if event == EventName.RESUME and self._log.started is not None:
            init_from = self._log.started["init_from"]
        self.directory.append(
            event,
            step,
            config=run.to_dict(),
            corpus=corpus.info(),
            parameters=parameters,
            total_parameters=total,
            attention=model.attention_name,
            compiled=self._compiled,
            hardware=describe_hardware(self.device),
            software=describe_software(),
            command=sys.argv,
            init_from=init_from,
            init_note=self._init_note,
            processes=self.processes.count,
            run=self._run_id,
        )
        if event == EventName.RESUME:
            start = f", going on from step {step}"
        else:
            note = "" if self._init_note is None else f" ({self._init_note})"
            start = "" if init_from is None else f", starting from {init_from}{note}"
        if run.train.warmup_steps >= run.train.steps:
            display.message(f"note: the warm-up of {run.train.warmup_steps} steps is not over when training ends")
        begin = run.train.average_from
        if begin is not None and learning_rate(begin, run.train) == 0:
            display.message(
                f"note: the learning rate is 0 from step {begin} on, where the average begins, so the weights stay as "
                f"they are; set train.min_learning_rate, or train.schedule constant"
            )
        if model.attention_note is not None:
            display.message(f"note: {model.attention_note}")
        attention = model.attention_name + (" attention, compiled layers" if self._compiled else " attention")
        count, engine = self.processes.count, run.train.parallel.upper()
        together = f" in {count} processes ({engine})" if count > 1 else ""
        display.message(
            f"{run.name}: {total:,} parameters, {corpus.name} in {corpus.unit} tokens, "
            f"{attention} on {self.device}{together}{start}"
        )
        if event == EventName.RESUME:
            return
        for note in corpus.notes("test", corpus.unknown_share("train")) if "test" in corpus.splits else ():
            display.message(f"note: {note}")
        hint = softmax_hint(run, len(corpus.vocabulary), parameters, self.device)
        if hint is not None:
            display.message(f"note: {hint}")


def _check_processes(run: RunConfig, processes: Processes) -> None:
    """Refuse a configuration that these processes cannot train.

    The batch size must be a multiple of processes times parts. Several processes cannot capture steps, or average
    weights or use Muon when weights are sharded.
    """
    train, count = run.train, processes.count
    needed = count * train.micro_batches
    if count > 1 and train.capture:
        remedy = ("set ", Field("train.capture", False))
        raise UserError(field="train.capture", value=True, but=f"these are {count} processes", remedy=remedy)
    if train.batch_size % needed:
        expected = f"a multiple of {needed}: {count} processes with {train.micro_batches} parts each"
        raise UserError(field="train.batch_size", value=train.batch_size, expected=expected)
    if count == 1 or train.parallel != "fsdp":
        return
    if train.averages:
        but = "the average of the weights (train.average_from, train.average_patience) is not sharded"
        remedy = ("use ", Field("train.parallel", "ddp"), " or no average")
        raise UserError(field="train.parallel", value="fsdp", but=but, remedy=remedy)
    if train.optimizer == "muon":
        but = "train.optimizer muon orthogonalises whole matrices, which are sharded then"
        remedy = ("use ", Field("train.parallel", "ddp"), " or ", Field("train.optimizer", "adamw"))
        raise UserError(field="train.parallel", value="fsdp", but=but, remedy=remedy)


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
