"""Run the experiment of a table: train every model with every seed in its own run directory, and measure it.

Finished parts, one row with one seed each, are not repeated (`txl_lab.paper.folder` stores them), and an interrupted
run resumes from its latest checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from txl.config import DataConfig, RunConfig, with_unset_data
from txl.data.corpora import Corpus, open_corpus
from txl.data.lanes import LaneStream, shuffled
from txl.errors import CommandFailed, ProcessLost, RunInterrupted, TrainingDiverged, UserError
from txl.evaluation.perplexity import evaluate_with
from txl.evaluation.stream import Settings
from txl.evaluation.tuning import tune_cache_with
from txl.files import JsonObject, write_whole
from txl.reporting.wording import short_name
from txl.runs.directory import RunDirectory
from txl.runs.environment import describe_hardware, describe_software
from txl.training.loop import check_validation_split
from txl.training.trainer import Trainer
from txl.units import quality
from txl_lab.paper.configuring import NotTrained, configure
from txl_lab.paper.converging import Tried, at_rate, stored_json, tune, whole_run, write_json
from txl_lab.paper.folder import Folder
from txl_lab.paper.measurements import ModelMeasurement, Speed, Trained, is_finite
from txl_lab.paper.scales import Scale
from txl_lab.paper.schema import Definition, Row, RowResult
from txl_lab.speed.budget import longest_segment, peak_bytes
from txl_lab.speed.workloads import measure_cost

# Line ends, and white space after a full stop that is a token; a closing quotation mark stays with its sentence.
_TOKEN_ENDS = re.compile(r"(?<=\s[.!?])[^\S\n]+(?![\"')])|\n")
_WORD_ENDS = re.compile(r"(?<=[.!?])\s+|\n")
SEED = 1  # of the order of sentences


@dataclass
class Experiment:
    """A table or figure at a scale, in a folder that is created if missing, and continued if it holds the same one."""

    definition: Definition
    scale: Scale
    data: DataConfig
    out: Path
    seeds: int  # runs of each model, with seeds 1, 2, ...
    device: str
    data_dir: str | None = None
    quiet: bool = False
    so_far: bool = False  # train and measure nothing, only load the results that are finished
    # Differences of the corpus from the published one; known once `run` has opened it
    changed_text: tuple[str, ...] = field(default=(), init=False)

    def run(self) -> list[RowResult]:
        """Train and measure all rows that have no results yet; a failed row is reported, and the other rows still run.

        Raises:
            UserError: if the folder holds another experiment, or the corpus cannot be opened.
            RunInterrupted: after Ctrl-C or SIGTERM, once the current run is saved.
        """
        name, stored = self.definition.name, self.folder.about.get("data")
        if self.scale.is_published and not any(row.preset for row in self.definition.rows):
            but = f"{name} has no published presets"
            raise UserError(field="scale", value=self.scale.name, but=but, expected="tiny or small")
        # Fields that the user left unset, for the preparation of text, have the folder's values.
        if isinstance(stored, dict):
            self.data = with_unset_data(RunConfig(data=self.data), RunConfig.from_dict({"data": stored})).data
        data = RunConfig(data=self.data).to_dict()["data"]
        about = {"experiment": self.definition.experiment_name, "scale": self.scale.to_dict(), "data": data}
        self.folder.check(about)
        if self.so_far and not self.folder.is_begun:
            raise UserError(f"{self.out} holds no reproduction", field="so_far", remedy="leave it out to start one")
        measurement = self.definition.measurement
        if isinstance(measurement, Speed):
            hardware = describe_hardware(self.device)
            hardware.pop("memory_bytes")  # times do not depend on it
            self.folder.begin(about | {"hardware": hardware})
            rows = [RowResult(row, "done") for row in self.definition.rows]
            return self._over_seeds(rows, lambda result, _: measurement.time(result.row, self.scale, self.device))
        assert isinstance(measurement, ModelMeasurement)
        corpus = open_corpus(self.data.corpus, config=self.data, data_dir=self.data_dir, quiet=self.quiet)
        self.changed_text = tuple(corpus.info().get("differences", ()))
        # After opening the corpus: if that fails, no folder has been created.
        self.folder.begin(about | {"text": corpus.info()["identity"]})
        data = self.data
        if self.definition.separate_sentences and corpus.tokens("train").sentences is None:
            folder = shuffled_sentences(corpus, self.out.resolve() / "corpus")
            data = dataclasses.replace(data, corpus=str(folder), source=None, like_original=False)
            corpus = open_corpus(data.corpus, config=data, data_dir=self.data_dir, quiet=self.quiet)
        rows = [self._configured(row, data, corpus) for row in self.definition.rows]
        # What would fail is refused before anything has trained for hours.
        configured = [(result, result.config) for result in rows if result.config is not None]
        failed = [result for result in rows if result.status == "failed"]
        if failed and not configured:
            raise UserError(f"no row of {self.definition.name} can be trained; {failed[0].row.key}: {failed[0].reason}")
        for result, config in configured:
            for split, least in measurement.least_tokens(RunConfig.from_dict(config), self.scale).items():
                if (n_token := len(corpus.tokens(split))) < least:
                    has = f"the {split} split of {corpus.name} has {n_token:,} tokens"
                    raise UserError(f"{has}, but {self.definition.name} reads {least:,} or more at this scale")
            for seed in range(1, self.seeds + 1):
                self.folder.check_result(result.row, seed, config)
        model = RowModels(self, measurement, corpus, rows)
        return self._over_seeds(rows, model)

    @property
    def folder(self) -> Folder:
        """Folder with the results."""
        return Folder(self.out, self.definition)

    def say(self, text: str) -> None:
        """Print what begins."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def _configured(self, row: Row, data: DataConfig, corpus: Corpus) -> RowResult:
        """Return a row with its configuration, or with the reason why it is not trained."""
        try:
            run = configure(self.definition, row, self.scale, data, len(corpus.vocabulary), self._measured_segment)
            LaneStream(corpus.tokens("train"), run.train.batch_size, run.train.segment)  # long enough?
            check_validation_split(run, corpus)
        except NotTrained as why:
            return RowResult(row, why.status, str(why))
        except UserError as error:
            return RowResult(row, "failed", str(error))
        return RowResult(row, "done", config=run.to_dict())

    def _measured_segment(self, run: RunConfig, other: RunConfig, vocab_size: int) -> int:
        """Return the longest segment that trains in another configuration's memory, measured once for all seeds."""
        path = self.out / "memory" / f"{run.name}.json"
        stored = stored_json(path)
        if stored is None:
            self.say(f"{run.name}: seeking the longest segment that trains in the memory of {other.name}")
            budget = peak_bytes(other, vocab_size, self.device)
            stored = longest_segment(run, budget, vocab_size, self.device).to_dict() | {"device": self.device}
            write_json(path, stored)
        segment = stored.get("segment")
        if type(segment) is not int or segment < 1:
            raise UserError(f"{path}: damaged (no length of a segment); delete it to measure anew")
        return segment

    def _over_seeds(self, rows: list[RowResult], measured: Callable[[RowResult, int], JsonObject]) -> list[RowResult]:
        """Run every model with the first seed, then with the next: the table of each seed is complete in turn."""
        to_do = [result for result in rows if result.status == "done"]
        for seed in range(1, self.seeds + 1):
            for result in to_do:
                stored = self.folder.load(result.row, seed)
                if stored is None and result.status == "done" and not self.so_far:  # it may have failed with a seed
                    self.say(f"{result.row.key}, seed {seed} of {self.seeds}")
                    stored = self._measure(result, seed, measured)
                if stored is not None:
                    result.by_seed[seed] = stored
                    result.parameters = stored.get("parameters")
        for result in to_do:
            if result.status == "done" and not result.by_seed:
                result.status = "not finished"
        return rows

    def _measure(
        self, result: RowResult, seed: int, measured: Callable[[RowResult, int], JsonObject]
    ) -> JsonObject | None:
        """Measure a row with a seed and store the result; if this fails, set the reason in the row."""
        try:
            found = measured(result, seed)
            if not is_finite(found):
                raise UserError("its losses are not finite numbers")
        except (RunInterrupted, KeyboardInterrupt):
            raise
        except Exception as error:
            if not isinstance(error, (UserError, CommandFailed, ProcessLost, OSError, RuntimeError, MemoryError)):
                traceback.print_exc()  # a defect of this program, of which the page shows only the last line
            result.status = "failed"
            result.reason = " ".join(f"seed {seed}: {error or type(error).__name__}".split())
            self.say(f"{result.row.key} failed: {result.reason}")
            return None
        self.folder.save(result.row, seed, found)
        return self.folder.load(result.row, seed)


class RowModels:
    """Everything that an experiment does for one row with one seed: tune the learning rate, train, and measure."""

    def __init__(self, experiment: Experiment, measurement: ModelMeasurement, corpus: Corpus, rows: list[RowResult]):
        self.experiment, self.measurement, self.corpus = experiment, measurement, corpus
        beside = experiment.definition.cost_beside
        # Configuration of the row beside which time and memory are measured, if the table has one
        self.peer = next((result.config for result in rows if result.row.key == beside), None)

    def __call__(self, result: RowResult, seed: int) -> JsonObject:
        """Return the measurements of a row with a seed; a finished run is not trained again."""
        row, folder = result.row, self.experiment.folder
        if row.cache_over is not None:
            return self._with_cache(row, seed)
        assert result.config is not None
        run, found = RunConfig.from_dict(result.config), JsonObject()
        directory = folder.run(row, seed)
        if (rules := self.experiment.scale.until_converged) is not None:
            run.train.seed, rates = 1, folder.rates
            tuned = tune(self.experiment.definition.name, row.key, run, rules, rates, self._try_rate)
            found["rates"], run = dict(tuned), at_rate(run, tuned["factor"])
            whole = whole_run(rates, tuned["recipe"], row.key, run)
            if seed == 1 and whole.exists() and not directory.exists():  # the run to the end at the chosen rate
                directory.parent.mkdir(parents=True, exist_ok=True)
                os.replace(whole, directory)
        run.train.seed = seed
        outcome = self.fit(run, directory)
        found |= {"config": run.to_dict(), "tokens": outcome["tokens"], "training_seconds": outcome["seconds"]}
        found["steps"] = outcome["step"]
        trained = RunDirectory(directory)
        model, vocabulary = trained.load(device=self.experiment.device)
        assert vocabulary is not None  # every run that is trained here has a vocabulary
        found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        began = time.perf_counter()
        made = folder.path / "made" / self.measurement.results / f"seed{seed}"
        it = Trained(model, vocabulary, run, self.corpus, directory, trained.checkpoint().name, made)
        measured = self.measurement.measure(it, self.experiment.scale, self.experiment.say)
        if "files" in measured:
            measured["files"] = sorted(str(path.relative_to(folder.path)) for path in measured["files"])
        if self.peer is not None:
            self.experiment.say(f"time and memory, beside {self.experiment.definition.cost_beside}")
            pairs, peer = 3 * self.experiment.scale.speed_steps, RunConfig.from_dict(self.peer)
            measured |= measure_cost(run, peer, len(self.corpus.vocabulary), pairs, self.experiment.device)
        return found | measured | {"measuring_seconds": time.perf_counter() - began}

    def fit(self, run: RunConfig, directory: Path) -> JsonObject:
        """Train a run, or resume it, and return its outcome."""
        it = self.experiment
        return Trainer(run, directory, device=it.device, data_dir=it.data_dir, quiet=it.quiet).fit()

    def _try_rate(self, run: RunConfig, directory: Path) -> Tried:
        """Train a run that tries a learning rate, and return its loss (None if training diverged) and cost."""
        self.experiment.say(f"{run.name}: {run.train.steps:,} steps at learning rate {run.train.learning_rate:g}")
        tried = Tried(factor=1.0, learning_rate=run.train.learning_rate, nll=None, tokens=0, seconds=0.0)
        try:
            outcome = self.fit(run, directory)
        except TrainingDiverged:
            return tried
        tried.update(nll=outcome["best_nll"], tokens=outcome["tokens"], seconds=outcome["seconds"])
        return tried

    def _with_cache(self, row: Row, seed: int) -> JsonObject:
        """Measure a continuous cache around another row's model, tuned on the validation split."""
        definition, folder = self.experiment.definition, self.experiment.folder
        assert row.cache_over is not None
        base = definition.row(row.cache_over)
        stored = folder.load(base, seed)
        if stored is None:  # a failed run has checkpoints but no result
            raise UserError(f"{base.key} has no finished model of this seed, which the cache needs")
        directory = RunDirectory(folder.run(base, seed))
        model, run = directory.load(device=self.experiment.device)[0], directory.config()
        self.experiment.say(f"tuning a continuous cache over {base.key}")
        settings = Settings(
            segment=run.eval.segment,
            temperature=run.eval.temperature,
            **run.eval.lengths.options(),
            batch_size=1,  # the cache of a lane holds no tokens of other lanes
            max_tokens=self.experiment.scale.eval_tokens,
        )
        tuned, test = tune_cache_with(model, self.corpus.tokens("valid"), settings), self.corpus.tokens("test")
        without, with_cache = (evaluate_with(reader, test, settings) for reader in (model, tuned.around(model)))
        run.name = f"{definition.experiment_name}-{row.key}"  # the name in this row's own configuration
        return {name: stored[name] for name in ("rates", "steps") if name in stored} | {
            "quality": quality(with_cache.nll, self.corpus.unit),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "config": run.to_dict(),
            "cache": {
                "tuning": dataclasses.asdict(tuned) | {"split": "valid", "at_edge": tuned.at_edge},
                "without": without.to_dict(),
                "with": with_cache.to_dict(),
            },
        }


def default_folder(definition: Definition, scale: Scale, data: DataConfig) -> Path:
    """Return runs/reproduce/EXPERIMENT-SCALE-CORPUS, with changes of the scale before CORPUS."""
    name = short_name(data.corpus)
    corpus = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name) or "text"
    changed = [str(change) for change in (scale.steps, scale.dtype) if change is not None]
    changed += ["until-converged"] if scale.until_converged is not None else []
    return Path("runs/reproduce") / "-".join([definition.experiment_name, scale.name, *changed, corpus])


def circumstances(out: Path, device: str) -> JsonObject:
    """Return descriptions of the hardware and software of an experiment, and the identity of its text if it has one."""
    text = {name: value for name, value in (stored_json(out / "experiment.json") or {}).items() if name == "text"}
    return {"hardware": describe_hardware(device), "software": describe_software()} | text


def shuffled_sentences(corpus: Corpus, folder: Path) -> Path:
    """Write each split of a corpus as a text file of its sentences in random order, one per line; return the folder.

    This makes a corpus without long-term dependency, in the form of One Billion Word (Tables 4 and 7), from any other.
    Words that its vocabulary lacks are written as <unk>; files that exist are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        path = folder / f"{split}.txt"
        if path.exists():
            continue
        text = corpus.vocabulary.decode(corpus.tokens(split)[:].tolist())
        # In tokenised text an abbreviation's full stop is part of its word. Penn Treebank has one sentence a line.
        ends = _TOKEN_ENDS if re.search(r"\s[.!?]\s", text) else _WORD_ENDS
        parts = text.split("\n") if corpus.name == "ptb" else ends.split(text)
        sentences = [sentence for part in parts if (sentence := part.strip())]
        if not sentences:
            raise UserError(f"the {split} split of {corpus.name} has no sentence to put in order")
        order = shuffled(len(sentences), SEED, 0).tolist()
        write_whole(path, "".join(f"{sentences[place]}\n" for place in order))
    return folder
