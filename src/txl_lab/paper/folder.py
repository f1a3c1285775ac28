"""Folder of a reproduction: the record of its experiment, and a result for every row and seed that is finished.

    experiment.json              experiment, scale and corpus of this folder; others are refused
    memory/ROW.json              longest segment of equal memory, measured once (Table 10)
    rates/                       learning rates that were tried (`--until-converged`)
    runs/ROW-seedN/              run directories, as `txl train` writes them
    results/ROW-seedN.json       measurements of each run; results/KIND/ROW-seedN.json where files are made
    made/                        files made with the models (Figures 5 to 7, samples)
    NAME.html  NAME.json         the page, and its contents as JSON: the record of the table

A table goes on from its record too, on any machine: a folder that has nothing but NAME.json (copied from another folder
or from the project's `results/`) begins with the results and learning rates of that record. The models stay where they
were trained.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from txl.config import RunConfig
from txl.errors import Field, UserError, cause
from txl.files import JsonObject, read_json
from txl_lab.paper.converging import at_rate, recipe_of, stored_json, write_json
from txl_lab.paper.schema import Definition, Row

_REMEDY = ("give another ", Field("out"), ", or delete it to measure its model again (and its run, to train anew)")


@dataclass(frozen=True)
class Folder:
    """Folder of a reproduction of a table; it may be missing."""

    path: Path
    definition: Definition

    @property
    def is_begun(self) -> bool:
        """True if the folder has the record of an experiment."""
        return self._about.is_file()

    @property
    def about(self) -> JsonObject:
        """Experiment of the folder; empty if it is not begun."""
        return stored_json(self._about) or {}

    @property
    def rates(self) -> Path:
        """Folder of the learning rates that were tried."""
        return self.path / "rates"

    @property
    def _about(self) -> Path:
        return self.path / "experiment.json"

    @property
    def _record(self) -> Path:
        return self.path / f"{self.definition.name}.json"

    def run(self, row: Row, seed: int) -> Path:
        """Return the run directory of a row."""
        return self.path / "runs" / f"{row.key}-seed{seed}"

    def _result(self, row: Row, seed: int) -> Path:
        return self.path / "results" / self.definition.measurement.results / f"{row.key}-seed{seed}.json"

    def check(self, about: JsonObject) -> None:
        """Refuse a folder with other files, or with results of another experiment than `about`."""
        there = self.about
        changed = _changes({name: there.get(name) for name in about}, about) if there else []
        if changed and any((self.path / name).exists() for name in ("rates", "runs", "results")):
            why = f"holds another reproduction: {', '.join(changed)}"
            raise UserError(why, field="out", value=self.path, remedy="give another directory")
        begins = ("experiment.json", self._record.name)  # what a reproduction writes first or begins with
        is_file = self.path.exists() and not self.path.is_dir()
        files = self.path.iterdir() if self.path.is_dir() else ()
        if is_file or (not there and any(not path.name.startswith(begins) for path in files)):
            why = "not empty and not a reproduction"
            raise UserError(why, field="out", value=self.path, remedy="give another directory")

    def begin(self, about: JsonObject) -> None:
        """Create the folder with its record, or check that it holds the same experiment.

        `about` is the experiment, scale, corpus, and identity of the text, or hardware whose times are stored.
        """
        self.check(about)
        if self.about == about:
            return
        for leftover in ("corpus", "memory"):  # left by an experiment without results
            shutil.rmtree(self.path / leftover, ignore_errors=True)
        if not self.is_begun and self._record.exists():
            self._take_record(about)
        write_json(self._about, about, indent=1)

    def load(self, row: Row, seed: int) -> JsonObject | None:
        """Return the stored result of a row; None if there is none, or if files that it names are gone."""
        path = self._result(row, seed)
        stored = stored_json(path)
        if stored is None:
            return None
        for name in self.definition.measures:
            if not isinstance(stored.get(name), (int, float)) or not math.isfinite(stored[name]):
                raise UserError(f"{path}: damaged (no number in {name}); delete it to measure anew")
        return stored if all((self.path / name).exists() for name in stored.get("files", ())) else None

    def save(self, row: Row, seed: int, result: JsonObject) -> None:
        """Store the result of a row."""
        write_json(self._result(row, seed), result)

    def check_result(self, row: Row, seed: int, config: JsonObject) -> None:
        """Refuse a stored result of another configuration than a row's, which has the learning rate of its recipe."""
        result = self.load(row, seed)
        if result is None:
            return
        path, configured = self._result(row, seed), RunConfig.from_dict(config)
        configured.train.seed, before = seed, RunConfig.from_dict(result.get("config"))
        if "rates" in result:  # the row has the rate of its recipe, the stored run the tuned rate
            if result["rates"]["recipe"] != recipe_of(configured):
                tuned = f"{result['rates']['recipe']}, but {recipe_of(configured)} is tuned apart now"
                raise UserError(f"has the learning rate of {tuned}", value=path, remedy=_REMEDY)
            configured = at_rate(configured, result["rates"]["factor"])
        before.data.corpus = configured.data.corpus  # the text is compared by identity; its path may have changed
        if "recorded" in result:  # measured on another machine, where other arithmetic may be fast
            before.train.dtype, before.data.source = configured.train.dtype, configured.data.source
        if changed := _changes(before.to_dict(), configured.to_dict()):
            raise UserError(f"of another configuration: {', '.join(changed)}", value=path, remedy=_REMEDY)

    def _take_record(self, about: JsonObject) -> None:
        """Write the results and learning rates of the record in the folder, as if they had been measured here."""
        whole = read_json(self._record, "give another record")
        record = whole.get("output", whole) if isinstance(whole, dict) else None
        if not isinstance(record, dict) or record.get("what") != self.definition.name:
            raise UserError(f"{self._record}: not a record of {self.definition.name}; delete it")
        try:
            there = {"scale": dict(record["scale"]), "text": record.get("text")}
            wanted = {"scale": json.loads(json.dumps(about["scale"])), "text": about["text"]}
            for compared in (there, wanted):
                compared["scale"].pop("dtype", None)  # another machine may be fast in other arithmetic
            if changed := _changes(there, wanted):
                raise UserError(f"{self._record} is of another reproduction: {', '.join(changed)}; delete it")
            origin = {name: whole[name] for name in ("commit", "date") if name in whole}
            origin |= {name: record[name] for name in ("command", "hardware")} | {"dtype": record["scale"].get("dtype")}
            results = list(self._recorded(record, origin))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self._record}: damaged{cause(error)}; give another record") from None
        for row, seed, result in results:
            self.save(row, seed, result)
            if "rates" in result:  # further seeds train at the same rate
                write_json(self.rates / f"{result['rates']['recipe']}.json", result["rates"], indent=1)

    def _recorded(self, record: JsonObject, origin: JsonObject) -> Iterator[tuple[Row, int, JsonObject]]:
        """Yield the row, seed and result of every measurement that can be taken from a record.

        A model that a row's continuous cache needs is taken only if the result of the cache is there too, and a model
        of a group whose losses are compared only if the group's other models of the same seed are.
        """
        rows = {row["row"]: row for row in record["rows"]}
        compared = self.definition.measurement.compares_losses
        for row in self.definition.rows:
            together = [row, *(other for other in self.definition.rows if other.cache_over == row.key)]
            if compared:
                together += [other for other in self.definition.rows if other.group == row.group and other.trained]
            seeds = set.intersection(*(set(rows.get(other.key, {"seeds": ()})["seeds"]) for other in together))
            for place, seed in enumerate(sorted(map(int, seeds))):
                recorded = rows[row.key]
                result = dict(recorded["seeds"][str(seed)])
                run = RunConfig.from_dict(recorded["config"])
                if "rates" in result:
                    run = at_rate(run, result["rates"]["factor"])
                run.train.seed = seed
                result |= {"config": run.to_dict(), "recorded": result.get("recorded", origin)}
                if compared:  # a record of Table 8 has these instead of losses of single targets
                    own = (row.group, seed, row.key)
                    [gains] = [
                        gains["gains"]
                        for gains in record["gains"]
                        if (gains["group"], gains["seed"], gains["row"]) == own
                    ]
                    result["effective context"] = {
                        "values": {name: values[place] for name, values in recorded["values"].items()},
                        "curve": {length: losses[place] for length, losses in recorded["loss_by_length"].items()},
                        "gains": gains,
                    }
                yield row, seed, result


def _changes(old: JsonObject, new: JsonObject, prefix: str = "") -> list[str]:
    """Return the differences between two records, each as in "data.corpus stdlib -> ptb"."""
    changed = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            changed += _changes(before, after, f"{prefix}{name}.")
        elif before != after:
            changed.append(f"{prefix}{name} {before} -> {after}")
    return changed
