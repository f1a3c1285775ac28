"""Run the experiment of a table: train every model with every seed in its own run directory, and measure it.

    experiment.json              experiment, scale and corpus of this folder; others are refused
    memory/ROW.json              longest segment of equal memory, measured once (Table 10)
    rates/                       learning rates that were tried (`--until-converged`)
    runs/ROW-seedN/              run directories, as `txl train` writes them
    results/ROW-seedN.json       measurements of each run; results/PRODUCT/ROW-seedN.json for a product
    made/                        files made with the models (Figures 5 to 7, samples)
    locks/                       locks on the parts that processes work on
    NAME.html  NAME.json         the page, and its contents as JSON

Finished parts are not repeated, and an interrupted run resumes from its latest checkpoint. Several processes of the
same command share the work: each takes the next part that no other process works on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from txl.config import DataConfig, RunConfig, with_unset_data
from txl.data.corpora import Corpus, open_corpus
from txl.data.streams import training_stream
from txl.errors import CommandFailed, ProcessLost, RunInterrupted, UserError
from txl.files import JsonObject, write_whole
from txl.reporting.wording import short_name
from txl.runs.directory import of_today
from txl.runs.environment import describe_hardware, describe_software
from txl.training.budget import longest_segment, peak_bytes
from txl.training.validation import check_validation_split
from txl_lab.paper.checking import check_groups, check_measured, check_stored
from txl_lab.paper.configuring import NotTrained, configure
from txl_lab.paper.folder import Busy, Folder, stored_json
from txl_lab.paper.measuring import (
    is_finite,
    least_tokens,
    measure_speed,
)
from txl_lab.paper.one_row import RowMaker, begins
from txl_lab.paper.products import least_tokens_of
from txl_lab.paper.recorded import recorded_results, result_path, take
from txl_lab.paper.reusing import check_source
from txl_lab.paper.scales import Scale
from txl_lab.paper.schema import Definition, Row
from txl_lab.paper.sentences import shuffled_sentences

_REMEDY = "give another --out, or delete it to measure its model again (and its run, to train anew)"
"""Advice on a stored result that does not fit."""
_WAIT = 2.0
"""Seconds to wait before trying again to take parts that other processes work on."""


@dataclass
class RowResult:
    """Status of a row and its measurements."""

    row: Row
    status: Literal["done", "failed", "not finished", "published only", "not at this scale"]
    reason: str = ""
    config: JsonObject | None = None
    parameters: int | None = None
    by_seed: dict[int, JsonObject] = field(default_factory=dict)
    """Measurements by seed."""


@dataclass
class Experiment:
    """A table or figure at a scale, in a folder.

    Args:
        definition: definition of the table.
        scale: model, budget and amount of evaluation.
        data: configuration of the corpus.
        out: folder of the experiment; created if missing, continued if it holds the same experiment.
        seeds: number of runs of each model, with seeds 1, 2, ...
        device: device that trains and measures.
        data_dir: directory of prepared corpora.
        quiet: True to print no progress on standard error.
        reuse: folders of other tables, from which equal models and learning rates are copied instead of trained, and
            records of this table, whose results are taken as they are.
        so_far: True to train and measure nothing, and only load the results that are finished.
    """

    definition: Definition
    scale: Scale
    data: DataConfig
    out: Path
    seeds: int
    device: str
    data_dir: str | None = None
    quiet: bool = False
    reuse: tuple[Path, ...] = ()
    so_far: bool = False
    changed_text: tuple[str, ...] = field(default=(), init=False)
    """Differences of the corpus from the published one; known once `run` has opened it."""

    def run(self) -> list[RowResult]:
        """Train and measure all rows that have no results yet; a failed row is reported, and the other rows still run.

        Raises:
            UserError: if the folder holds another experiment, or the corpus cannot be opened.
            RunInterrupted: after Ctrl-C or SIGTERM, once the current run is saved.
        """
        if self.scale.is_published and not any(row.preset for row in self.definition.rows):
            raise UserError(
                f"scale {self.scale.name} trains published presets, and {self.definition.name} has none; use tiny or "
                f"small"
            )
        self.data = self._as_stored()
        self._folder.check()
        if self.so_far and not self._folder.is_begun:
            raise UserError(f"--so-far: {self.out} holds no reproduction; leave --so-far out to start one")
        if self.definition.kind == "speed":
            if self.reuse:
                raise UserError(f"--reuse: {self.definition.name} trains no models")
            with self._in_turn("begin"):
                self._folder.claim({"hardware": _comparable_hardware(self.device)})
            rows = [RowResult(row, "done") for row in self.definition.rows]
            return self._over_seeds(rows, self._time)
        corpus = open_corpus(self.data.corpus, config=self.data, data_dir=self.data_dir, quiet=self.quiet)
        identity, self.changed_text = corpus.info()["identity"], tuple(corpus.info().get("differences", ()))
        folders, records = self._sources()
        for folder in folders:
            check_source(folder, self.scale, identity, self.definition.separate_sentences)
        found = [
            each
            for path in records
            for each in recorded_results(
                path, self.definition, self.scale, self.data.corpus, identity, self.definition.measures
            )
        ]
        # After opening the corpus: if that fails, no folder has been created.
        with self._in_turn("begin"):
            self._folder.claim({"text": identity})
            data, corpus = self._trained_on(corpus)
            rows = [self._configured(row, data, corpus) for row in self.definition.rows]
            by_key = {result.row.key: result for result in rows}
            for each in found:
                name, config = f"--reuse {each.record}", by_key[each.row].config
                check_measured(each.result, name, "leave it out", config, each.seed, corpus, self.scale)
            take(found, self.out, self.definition)
        self._refuse_what_cannot_be(rows, corpus)
        peer = next((each.config for each in rows if each.row.key == self.definition.cost_beside), None)
        make = RowMaker(
            self.definition,
            self.scale,
            self._folder,
            corpus,
            peer=peer,
            sources=folders,
            seeds=self.seeds,
            device=self.device,
            data_dir=self.data_dir,
            quiet=self.quiet,
            say=self._say,
        )
        return self._over_seeds(rows, lambda result, seed: make(result.row, result.config, seed))

    def _sources(self) -> tuple[list[Path], list[Path]]:
        """Return the paths of `reuse`: folders to copy models from, and records to take results from."""
        for path in self.reuse:
            if not path.exists():
                raise UserError(f"--reuse {path}: no such file or folder")
            if self.definition.product is not None and not path.is_dir():
                raise UserError(f"--reuse {path}: a record has no models to make {self.definition.name} with")
        return [path for path in self.reuse if path.is_dir()], [path for path in self.reuse if not path.is_dir()]

    def _refuse_what_cannot_be(self, rows: list[RowResult], corpus: Corpus) -> None:
        """Refuse an experiment whose measurements would fail, before it has trained for hours."""
        failed = [result for result in rows if result.status == "failed"]
        if failed and not any(result.status == "done" for result in rows):
            raise UserError(f"no row of {self.definition.name} can be trained; {failed[0].row.key}: {failed[0].reason}")
        needed = least_tokens(self.definition.kind, self.scale)
        for result in rows:
            if self.definition.product is not None and result.config is not None:
                run = RunConfig.from_dict(result.config)
                needed = least_tokens_of(self.definition.product, run, self.scale)
        for split, least in needed.items():
            if len(corpus.tokens(split)) < least:
                raise UserError(
                    f"the {split} split of {corpus.name} has {len(corpus.tokens(split)):,} tokens, but at scale "
                    f"{self.scale.name} {self.definition.name} reads {least:,} or more; expected a larger corpus"
                )
        for result in rows:
            for seed in range(1, self.seeds + 1):
                if (stored := self._stored(result, seed)) is not None:
                    path = str(self._result_path(result.row.key, seed))
                    check_measured(stored, path, _REMEDY, result.config, seed, corpus, self.scale)
        if self.definition.kind == "context":
            for seed in range(1, self.seeds + 1):
                check_groups(self.out, self.definition, seed)

    def _result_path(self, key: str, seed: int) -> Path:
        return result_path(self.out, self.definition.stored_as(key), seed)

    def _stored(self, result: RowResult, seed: int) -> JsonObject | None:
        """Return the stored result of a row; None if there is none, or if files that it names are gone."""
        path = self._result_path(result.row.key, seed)
        stored = stored_json(path)
        if stored is None:
            return None
        check_stored(stored, path, self.definition.measures)
        return stored if all((self.out / name).exists() for name in stored.get("files", ())) else None

    def _over_seeds(self, results: list[RowResult], one: Callable[[RowResult, int], JsonObject]) -> list[RowResult]:
        """Run every model with the first seed, then every model with the next: each seed's table is complete in turn.

        Parts that another process works on are tried again at the end. If that process has stored a result, the result
        is loaded; otherwise the part is done here.
        """
        by_key = {result.row.key: result for result in results if result.status == "done"}
        if self.so_far:
            for result in by_key.values():
                self._load(result)
            return results
        waiting = [(result, seed) for seed in range(1, self.seeds + 1) for result in by_key.values()]
        told = False
        while waiting:
            busy = []
            for result, seed in waiting:
                base = by_key.get(result.row.cache_over or "")
                try:
                    if base is not None and base.status == "done" and seed not in base.by_seed:
                        raise Busy  # the model for the cache is not trained yet
                    if result.status == "done":  # the row may have failed with another seed
                        self._once(result, seed, one)
                except Busy:
                    busy.append((result, seed))
            if len(busy) == len(waiting):
                if not told:
                    names = ", ".join(dict.fromkeys(result.row.key for result, _ in busy))
                    self._say(f"waiting for other processes, which work on {names}")
                told = True
                time.sleep(_WAIT)
            waiting = busy
        for result in by_key.values():
            if result.status == "failed":
                self._take_over(result)
        return results

    def _load(self, result: RowResult) -> None:
        """Load the stored results of a row; a row without any is marked as not finished."""
        for seed in range(1, self.seeds + 1):
            if (stored := self._stored(result, seed)) is not None:
                self._take(result, seed, stored)
        if not result.by_seed:
            result.status = "not finished"

    def _take_over(self, result: RowResult) -> None:
        """Load all results of a row that failed here, if another process has stored them."""
        for seed in range(1, self.seeds + 1):
            with self._in_turn(self._part(result, seed)):
                stored = self._stored(result, seed)
            if stored is None:
                return
            self._take(result, seed, stored)
        result.status, result.reason = "done", ""

    def _once(self, result: RowResult, seed: int, one: Callable[[RowResult, int], JsonObject]) -> None:
        stored = self._stored(result, seed)
        if stored is None:
            with self._folder.working_on(self._part(result, seed)):
                stored = self._stored(result, seed)  # another process may have finished just now
                if stored is None:
                    self._do(result, seed, one)
                    stored = self._stored(result, seed) if result.status == "done" else None
        if stored is not None:
            self._take(result, seed, stored)

    def _take(self, result: RowResult, seed: int, stored: JsonObject) -> None:
        result.by_seed[seed] = stored
        result.parameters = stored.get("parameters")

    def _part(self, result: RowResult, seed: int) -> str:
        """Return the name of the part that one process does at a time: a row with a seed, or the timing of all rows."""
        return "timing" if self.definition.kind == "speed" else f"{result.row.key}-seed{seed}"

    @contextmanager
    def _in_turn(self, part: str) -> Iterator[None]:
        """Lock a part within the block, after waiting for any other process that works on the part."""
        told = False
        with contextlib.ExitStack() as held:
            while True:
                try:
                    held.enter_context(self._folder.working_on(part))
                    break
                except Busy:
                    if not told:
                        self._say(f"waiting for another process, which works on {part}")
                    told = True
                    time.sleep(_WAIT)
            yield

    def _do(self, result: RowResult, seed: int, one: Callable[[RowResult, int], JsonObject]) -> None:
        """Measure a row with a seed and store the result; if this fails, set the reason in the row."""
        try:
            measured = one(result, seed)
            if not is_finite(measured):
                raise UserError("its losses are not finite numbers")
        except (Busy, RunInterrupted, KeyboardInterrupt):
            raise
        except Exception as error:
            if not isinstance(error, (UserError, CommandFailed, ProcessLost, OSError, RuntimeError, MemoryError)):
                traceback.print_exc()  # a defect of this program, of which the page shows only the last line
            result.status = "failed"
            result.reason = " ".join(f"seed {seed}: {error or type(error).__name__}".split())
            self._say(f"{result.row.key} failed: {result.reason}")
            return
        path = self._result_path(result.row.key, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(measured) + "\n")

    def _time(self, result: RowResult, seed: int) -> JsonObject:
        self._say(begins(result.row, seed, self.seeds))
        return measure_speed(result.row, self.scale, self.device)

    def _configured(self, row: Row, data: DataConfig, corpus: Corpus) -> RowResult:
        """Return a row with its configuration, or with the reason why it is not trained."""
        try:
            run = configure(self.definition, row, self.scale, data, len(corpus.vocabulary), self._measured_segment)
            _check_training(run, corpus)
        except NotTrained as why:
            return RowResult(row, why.status, str(why))
        except UserError as error:
            return RowResult(row, "failed", str(error))
        return RowResult(row, "done", config=run.to_dict())

    def _measured_segment(self, run: RunConfig, other: RunConfig, vocab_size: int) -> int:
        """Return the longest segment that trains in another configuration's memory, measured once and then stored.

        All seeds use the stored length. A folder that is continued on another device also does, although a measurement
        there would give another length.
        """
        path = self.out / "memory" / f"{run.name}.json"
        stored = stored_json(path)
        if stored is None:
            self._say(f"{run.name}: seeking the longest segment that trains in the memory of {other.name}")
            budget = peak_bytes(other, vocab_size, self.device)
            stored = longest_segment(run, budget, vocab_size, self.device).to_dict() | {"device": self.device}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(stored) + "\n")
        segment = stored.get("segment")
        if type(segment) is not int or segment < 1:
            raise UserError(f"{path}: damaged (no length of a segment); delete it to measure anew")
        return segment

    def _trained_on(self, corpus: Corpus) -> tuple[DataConfig, Corpus]:
        """Return the corpus to train on: the given one, or its sentences in random order if the table needs this."""
        if not self.definition.separate_sentences or corpus.tokens("train").sentences is not None:
            return self.data, corpus
        folder = shuffled_sentences(corpus, self.out.resolve() / "corpus")
        data = dataclasses.replace(self.data, corpus=str(folder), source=None, like_original=False)
        return data, open_corpus(data.corpus, config=data, data_dir=self.data_dir, quiet=self.quiet)

    def _as_stored(self) -> DataConfig:
        """Return the corpus; fields for the preparation of text that the user left unset have the folder's values."""
        stored = stored_json(self.out / "experiment.json")
        if not isinstance(stored, dict) or not isinstance(stored.get("data"), dict):
            return self.data
        before = RunConfig.from_dict(of_today({"data": stored["data"]}))
        return with_unset_data(RunConfig(data=self.data), before).data

    @property
    def _folder(self) -> Folder:
        data = RunConfig(data=self.data).to_dict()["data"]
        about = {"experiment": self.definition.experiment_name, "scale": self.scale.to_dict(), "data": data}
        return Folder(self.out, about)

    def _say(self, text: str) -> None:
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


def _check_training(run: RunConfig, corpus: Corpus) -> None:
    """Refuse training and validation splits that are too short for a configuration."""
    training_stream(corpus.tokens("train"), run.train.batch_size, run.train.segment)
    check_validation_split(run, corpus)


def _comparable_hardware(device: str) -> JsonObject:
    """Return the description of the hardware without its memory size, on which times do not depend."""
    return {name: value for name, value in describe_hardware(device).items() if name != "memory_bytes"}


def default_folder(definition: Definition, scale: Scale, data: DataConfig) -> Path:
    """Return the default folder: runs/reproduce/EXPERIMENT-SCALE-CORPUS, with changes of the scale before CORPUS."""
    name = short_name(data.corpus)
    corpus = "".join(each if each.isalnum() or each in "-_." else "_" for each in name) or "text"
    changed = [str(each) for each in (scale.steps, scale.dtype) if each is not None]
    changed += ["until-converged"] if scale.until_converged is not None else []
    return Path("runs/reproduce") / "-".join([definition.experiment_name, scale.name, *changed, corpus])


def circumstances(out: Path, device: str) -> JsonObject:
    """Return descriptions of the hardware and software of an experiment, and the identity of its text if it has one."""
    text = {name: value for name, value in (stored_json(out / "experiment.json") or {}).items() if name == "text"}
    return {"hardware": describe_hardware(device), "software": describe_software()} | text
