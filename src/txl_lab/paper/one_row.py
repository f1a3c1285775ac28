"""Everything that an experiment does for one row with one seed: tune the learning rate, train, and measure."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from txl.config import RunConfig
from txl.data.corpora import Corpus
from txl.errors import TrainingDiverged, UserError
from txl.evaluation.cache_tuning import measure_cache
from txl.files import JsonObject
from txl.runs.directory import RunDirectory
from txl.training.trainer import Trainer
from txl.units import quality
from txl_lab.paper.converging import Tried, Tuned, UntilConverged, at_rate, recipe_of, tune, whole_run
from txl_lab.paper.folder import Folder, stored_json
from txl_lab.paper.measuring import measure, measure_cost
from txl_lab.paper.products import make_product
from txl_lab.paper.recorded import result_path
from txl_lab.paper.reusing import take_rate, take_run
from txl_lab.paper.scales import Scale
from txl_lab.paper.schema import Definition, Row


@dataclass(frozen=True)
class RowMaker:
    """The model and the measurements of a row, for all rows and seeds of an experiment.

    Args:
        definition: definition of the table.
        scale: model, budget and amount of evaluation.
        folder: folder of the experiment, in which processes take parts.
        corpus: corpus that all rows are trained on.
        peer: configuration of the row beside which time and memory are measured, if the table has one.
        sources: folders of other tables, from which equal models and learning rates are copied instead of trained.
        seeds: number of runs of each model.
        device: device that trains and measures.
        data_dir: directory of prepared corpora.
        quiet: True to print no progress of training.
        say: function that prints what begins.
    """

    definition: Definition
    scale: Scale
    folder: Folder
    corpus: Corpus
    peer: JsonObject | None
    sources: Sequence[Path]
    seeds: int
    device: str
    data_dir: str | None
    quiet: bool
    say: Callable[[str], None]

    def __call__(self, row: Row, config: JsonObject | None, seed: int) -> JsonObject:
        """Return the measurements of a row with a seed; a finished run is not trained again.

        Args:
            row: row of the table.
            config: configuration of its model; None for a row that adds a cache to another row's model.
            seed: seed of the run.
        """
        if row.cache_over is not None:
            return self._with_cache(row, seed)
        assert config is not None
        run = RunConfig.from_dict(config)
        found: JsonObject = {}
        whole: Path | None = None
        if (rules := self.scale.until_converged) is not None:
            run.train.seed = 1
            tuned = self._tuned(row, run, rules)
            run, found["rates"] = at_rate(run, tuned["factor"]), tuned
            whole = whole_run(self.folder.path / "rates", tuned["recipe"], row.key, run)
        run.train.seed = seed
        self.say(begins(row, seed, self.seeds))
        directory = self.folder.path / "runs" / f"{row.key}-seed{seed}"
        if whole is not None and seed == 1 and whole.exists() and not directory.exists():
            directory.parent.mkdir(parents=True, exist_ok=True)
            os.replace(whole, directory)
        self._reuse(row, run, directory)
        outcome = self.fit(run, directory)
        found |= {"config": run.to_dict(), "tokens": outcome["tokens"], "training_seconds": outcome["seconds"]}
        found["steps"] = outcome["step"]
        model, vocabulary = RunDirectory(directory).load(device=self.device)
        found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        if self.definition.product is not None:
            assert vocabulary is not None  # every run that is trained here has a vocabulary
            self.say(f"making {self.definition.product}")
            paths = make_product(
                self.definition.product,
                model,
                vocabulary,
                run,
                self.corpus,
                self.scale,
                directory,
                RunDirectory(directory).checkpoint().name,
                self.folder.path / "made" / self.definition.product / f"seed{seed}",
            )
            return found | {"files": sorted(str(path.relative_to(self.folder.path)) for path in paths)}
        began = time.perf_counter()
        measured = measure(self.definition.kind, model, run, self.corpus, self.scale, self.say)
        if self.peer is not None:
            self.say(f"time and memory, beside {self.definition.cost_beside}")
            size = len(self.corpus.vocabulary)
            measured |= measure_cost(run, RunConfig.from_dict(self.peer), size, 3 * self.scale.speed_steps, self.device)
        return found | measured | {"measuring_seconds": time.perf_counter() - began}

    def _tuned(self, row: Row, run: RunConfig, rules: UntilConverged) -> Tuned:
        """Return the learning rate of a row's recipe: of this folder, of another table's folder, or tuned now."""

        def try_rate(run: RunConfig, directory: Path) -> Tried:
            self._reuse(row, run, directory)
            return self._try_rate(run, directory)

        with self.folder.working_on(f"rates-{recipe_of(run)}"):
            for folder in self.sources:
                take_rate(folder, recipe_of(run), self.folder.path / "rates", self.scale)
            return tune(self.definition.name, row.key, run, rules, self.folder.path / "rates", try_rate)

    def _reuse(self, row: Row, run: RunConfig, directory: Path) -> None:
        """Copy a finished run of this configuration from another table's folder, if one has it."""
        for folder in self.sources:
            taken = take_run(folder, run, self.corpus.info()["identity"], directory)
            if taken is not None:
                self.say(f"{row.key}: the same model is in {taken}")

    def fit(self, run: RunConfig, directory: Path) -> JsonObject:
        """Train a run, or resume it, and return its outcome."""
        return Trainer(run, directory, device=self.device, data_dir=self.data_dir, quiet=self.quiet).fit()

    def _try_rate(self, run: RunConfig, directory: Path) -> Tried:
        """Train a run that tries a learning rate, and return its loss (None if training diverged) and cost."""
        self.say(f"{run.name}: {run.train.steps:,} steps at learning rate {run.train.learning_rate:g}")
        tried = Tried(factor=1.0, learning_rate=run.train.learning_rate, nll=None, tokens=0, seconds=0.0)
        try:
            outcome = self.fit(run, directory)
        except TrainingDiverged:
            return tried
        tried.update(nll=outcome["best_nll"], tokens=outcome["tokens"], seconds=outcome["seconds"])
        return tried

    def _with_cache(self, row: Row, seed: int) -> JsonObject:
        """Measure a continuous cache around another row's model, tuned on the validation split."""
        assert row.cache_over is not None
        base = self.definition.row(row.cache_over)
        directory = self.folder.path / "runs" / f"{base.key}-seed{seed}"
        stored = result_path(self.folder.path, self.definition.stored_as(base.key), seed)
        if not stored.exists():  # a failed run has checkpoints but no result
            raise UserError(f"{base.key} has no finished model of this seed, which the cache needs")
        self.say(begins(row, seed, self.seeds))
        model, _ = RunDirectory(directory).load(device=self.device)
        run = RunDirectory(directory).config()
        self.say(f"tuning a continuous cache over {base.key}")
        found = measure_cache(
            model,
            self.corpus.tokens("valid"),
            self.corpus.tokens("test"),
            segment=run.eval.segment,
            temperature=run.eval.temperature,
            **run.eval.lengths.options(),
            batch_size=1,  # the cache of a lane holds no tokens of other lanes
            max_tokens=self.scale.eval_tokens,
        )
        run.name = f"{self.definition.experiment_name}-{row.key}"  # the name in this row's own configuration
        trained = stored_json(stored)
        return {name: trained[name] for name in ("rates", "steps") if name in trained} | {
            "quality": quality(found.with_cache.nll, self.corpus.unit),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "config": run.to_dict(),
            "cache": {
                "tuning": dataclasses.asdict(found.tuning) | {"split": "valid", "at_edge": found.tuning.at_edge},
                "without": found.without.to_dict(),
                "with": found.with_cache.to_dict(),
            },
        }


def begins(row: Row, seed: int, seeds: int) -> str:
    """Return the line that says which row and seed begin."""
    return f"{row.key}, seed {seed} of {seeds}"
