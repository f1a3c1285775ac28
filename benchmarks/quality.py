"""Measure validation loss against seconds and tokens: for the authors' recipe, for tuned Adam and for the new recipe.

    python -m benchmarks.quality results/quality.json --work runs/quality --enwik8 enwik8.head --ptb ptb

Each text has one small shape. The authors' recipe is Adam in float32 with a cosine to 0, and gets all of `--minutes`.
Its steps count with the time of the authors' code (`--peer-ratio`), which gives equal losses. The other recipes are
trained in whole runs of growing shares of this time, each with a schedule fixed beforehand, until a run reaches the
best loss of the authors' curve. Learning rates are tuned on the validation split over five values, and over further
values if the best one is at an end: for the authors' recipe in runs of a quarter of the time, for our recipes in runs
of a tenth.

The seconds of a curve are its steps times the seconds of a step, measured once on an idle machine; evaluations do not
count. Runs and seconds are kept in `--work`, so that the same command resumes after an interruption. Losses do not
depend on the machine's load: after the seconds have been measured (`--time-only`), texts may run in parallel
(`--only`).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import txl
from txl.config import RunConfig, with_options
from txl.data.corpora import open_corpus
from txl.devices import keep_freed_memory
from txl.errors import TrainingDiverged
from txl.minutes.measured import measured_speed
from txl.native.build import compiled_code
from txl.runs.directory import RunDirectory
from txl.runs.environment import multiplies_bfloat16
from txl.training.trainer import Trainer
from txl_lab.records import write

Options = dict[str, str]
SHARES = (0.025, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 1.0)  # shares of the minutes for the successive runs of our recipes
TIMED = 7  # number of measurements of a step's seconds, each of a second or more; the median is used.
_FALLING = {"train.schedule": "linear", "train.beta2": "0.95", "train.clip": "1.0", "model.attention": "fastest"}


@dataclass(frozen=True)
class Recipe:
    """Optimiser and schedule of a curve."""

    name: str
    options: Options
    rates: tuple[float, ...]  # learning rates to try; a single rate is used without tuning.
    warmup: float  # warm-up as a share of the steps
    # Share of the minutes for a run that tunes the rate: about the share that the recipe needs in the end
    tuning: float
    is_authors: bool = False


def recipes() -> list[Recipe]:
    fast = _FALLING | ({"train.dtype": "bfloat16"} if multiplies_bfloat16("cpu") else {})
    norms = ("model.pre_norm", "model.qk_norm")
    plain = dict.fromkeys(norms, "false") | {"train.reset_memory": "0"}
    authors = {"train.optimizer": "adam", "train.schedule": "cosine", "train.clip": "0.25", "train.dtype": "float32"}
    authors |= {"train.beta2": "0.999", "model.attention": "shifted"} | plain
    adam = {"train.optimizer": "adam"} | plain  # the authors' recipe except arithmetic and schedule
    muon = {"train.optimizer": "muon", "train.reset_memory": "0.05"} | dict.fromkeys(norms, "true")
    return [
        Recipe("authors", authors, (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3), 0.0, 0.25, is_authors=True),
        Recipe("adam", fast | adam, (1e-3, 2e-3, 3e-3, 4e-3, 6e-3), 0.04, 0.1),
        Recipe("muon", fast | muon, (4e-3,), 0.04, 0.0),
    ]


def tasks(arguments: argparse.Namespace) -> Iterator[tuple[str, RunConfig]]:
    """Yield the texts given on the command line, each with its small shape."""
    if arguments.only in (None, "stdlib"):
        yield "stdlib", txl.preset("stdlib-bpe")
    if arguments.enwik8 and arguments.only in (None, "enwik8"):
        yield "enwik8", with_options(txl.preset("stdlib-tiny"), {"data.corpus": arguments.enwik8})
    if arguments.ptb and arguments.only in (None, "ptb"):
        # Random segment lengths and averaged weights are off: both belong to a recipe that is not compared here.
        ptb = {"data.source": arguments.ptb, "train.random_segments": "false", "train.average_from": "none"}
        yield "ptb", with_options(txl.preset("ptb-small"), ptb)


class Measurement:
    """The runs over one text."""

    def __init__(self, name: str, base: RunConfig, arguments: argparse.Namespace):
        self.name, self.base, self.given = name, base, arguments
        self.work = Path(arguments.work) / name
        self.corpus = open_corpus(base.data.corpus, config=base.data, data_dir=arguments.data_dir)
        self.timed = self.work / "step-seconds.json"
        self.step_seconds: dict[str, float] = json.loads(self.timed.read_text()) if self.timed.exists() else {}

    def configured(self, recipe: Recipe, rate: float, steps: int) -> RunConfig:
        options = {
            "train.steps": str(steps),
            "train.learning_rate": str(rate),
            "train.min_learning_rate": "0",
            "train.warmup_steps": str(round(recipe.warmup * steps)),
            "train.eval_every": str(max(1, steps // 20)),
            "train.eval_tokens": str(self.given.eval_tokens),
            "train.checkpoint_every": str(max(1, steps // 4)),
            "train.seed": str(self.given.seed),
        }
        return with_options(self.base, recipe.options | options)

    def seconds_of_step(self, recipe: Recipe) -> float:
        """Return the seconds of a recipe's step; the authors' code needs `peer_ratio` times as long as ours."""
        return self.step_seconds[recipe.name] * (self.given.peer_ratio if recipe.is_authors else 1.0)

    def time_steps(self) -> None:
        """Measure the step of every recipe, once for all runs.

        Recipes are measured alternately, so that other load on the machine affects all of them equally.
        """
        if self.step_seconds.keys() == {recipe.name for recipe in recipes()}:
            return
        seconds: dict[str, list[float]] = {}
        for _ in range(TIMED):
            for recipe in recipes():
                run = self.configured(recipe, recipe.rates[0], 100)
                with compiled_code(not recipe.is_authors):  # `peer_ratio` is over PyTorch alone
                    speed = measured_speed(run, self.corpus, "cpu", math.inf)
                seconds.setdefault(recipe.name, []).append(speed.step)
        self.step_seconds = {name: median(each) for name, each in seconds.items()}
        self.work.mkdir(parents=True, exist_ok=True)
        self.timed.write_text(json.dumps(self.step_seconds))

    def curve(self, recipe: Recipe, rate: float, share: float) -> dict[str, Any]:
        """Train for a share of the minutes, or resume the run that did, and return its curve."""
        second = self.seconds_of_step(recipe)
        out = RunDirectory(self.work / f"{recipe.name}-{rate:g}-{share:g}")
        steps = max(20, round(60 * self.given.minutes * share / second))
        run = self.configured(recipe, rate, steps)
        Trainer(run, out.path, device="cpu", data_dir=self.given.data_dir, quiet=True).fit()
        per_step = run.train.batch_size * run.train.segment
        points = {event["step"]: event["nll"] for event in out.events() if event["event"] == "valid"}
        rows = [
            {"step": step, "tokens": step * per_step, "seconds": step * second, "nll": nll}
            for step, nll in sorted(points.items())
        ]
        best = min(rows, key=lambda row: row["nll"])
        print(f"{self.name}, {recipe.name} at {rate:g}: {best['nll']:.4f} nats after {steps:,} steps", flush=True)
        about = {"recipe": recipe.name, "rate": rate, "steps": steps, "step_seconds": second}
        return about | {"best_nll": best["nll"], "points": rows}

    def tuned(self, recipe: Recipe) -> tuple[float, list[dict[str, Any]]]:
        """Return the best of the recipe's learning rates, and the short runs from which it was chosen."""
        best = recipe.rates[0]
        if len(recipe.rates) == 1:
            return best, []
        waiting, runs = list(recipe.rates), []
        while waiting:
            rate = waiting.pop(0)
            try:
                runs.append(self.curve(recipe, rate, recipe.tuning))
            except TrainingDiverged:
                runs.append({"recipe": recipe.name, "rate": rate, "best_nll": None})
            if not waiting:
                best = min((run["best_nll"], run["rate"]) for run in runs if run["best_nll"] is not None)[1]
                tried = [run["rate"] for run in runs]
                further = {min(tried): best / 2, max(tried): best * 2}
                waiting = [further[best]] if best in further else []
        return best, runs

    def whole(self, recipe: Recipe, tuning: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Train for all of the minutes, at the best rate first, and return the runs; the last one returned counts.

        A learning rate can work in a short run and fail in a long one, where it falls later. If the loss of a whole run
        is above that of the short run, the next best rate is tried.
        """
        short = sorted((run for run in tuning if run["best_nll"] is not None), key=lambda run: run["best_nll"])
        runs = []
        for run in short:
            try:
                runs.append(self.curve(recipe, run["rate"], 1.0))
            except TrainingDiverged:
                continue
            if runs[-1]["best_nll"] < run["best_nll"]:
                break
        if not runs:
            raise SystemExit(f"{self.name}: {recipe.name} diverges at every rate that was tried")
        return sorted(runs, key=lambda run: -run["best_nll"])

    def all(self) -> dict[str, Any]:
        authors, *ours = recipes()
        _, tuning = self.tuned(authors)
        *failed, first = self.whole(authors, tuning)
        tuning += failed
        end = min(first["points"], key=lambda point: point["nll"])
        target = end["nll"]
        found: dict[str, Any] = {"text": self.name, "target_nll": target, "curves": [first], "tuning": tuning}
        for recipe in (each for each in ours if self.given.recipe in (None, each.name)):
            rate, tuning = self.tuned(recipe)
            found["tuning"] += tuning
            for share in SHARES:
                found["curves"].append(self.curve(recipe, rate, share))
                if found["curves"][-1]["best_nll"] <= target:
                    ours_end = found["curves"][-1]["points"][-1]
                    needed = {name: ours_end[name] / end[name] for name in ("seconds", "tokens")}
                    found[f"{recipe.name}_of_authors"] = needed
                    told = f"{needed['seconds']:.3f} of the seconds and {needed['tokens']:.3f} of the tokens"
                    print(f"{self.name}: {recipe.name} comes to the authors' {target:.4f} nats in {told}", flush=True)
                    break
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="?", help="where the record goes, results/quality.json")
    parser.add_argument("--work", required=True, help="folder of the runs")
    parser.add_argument("--enwik8", help="a file with the beginning of enwik8, read in bytes")
    parser.add_argument("--ptb", help="folder or archive of Penn Treebank, read in words")
    parser.add_argument("--minutes", type=float, default=20.0, help="training time of the authors' recipe")
    parser.add_argument("--peer-ratio", type=float, default=1.5, help="time of a step of the authors' code over ours")
    parser.add_argument("--eval-tokens", type=int, default=100_000, help="validation tokens in each evaluation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="one of the texts: stdlib, enwik8 or ptb")
    parser.add_argument("--recipe", choices=("adam", "muon"), help="one of ours alone; the record then lacks the other")
    parser.add_argument("--time-only", action="store_true", help="measure the seconds of a step and end")
    parser.add_argument("--data-dir", help="where prepared corpora live")
    arguments = parser.parse_args()
    keep_freed_memory()
    texts = [Measurement(name, base, arguments) for name, base in tasks(arguments)]
    for text in texts:  # before training keeps the machine busy
        text.time_steps()
    if arguments.time_only:
        return
    for text in texts:
        measured = text.all()
        if arguments.record:
            keep(Path(arguments.record), measured, arguments)


def keep(record: Path, measured: dict[str, Any], arguments: argparse.Namespace) -> None:
    before = json.loads(record.read_text()) if record.exists() else {"output": {"texts": []}}
    # Each text keeps the place and time of its measurement; the record's own fields are those of the last text.
    others = [
        {name: before[name] for name in ("commit", "date", "hardware", "software")} | text
        for text in before["output"]["texts"]
        if text["text"] != measured["text"]
    ]
    shown = ("minutes", "peer_ratio", "eval_tokens", "seed")
    settings = {name: getattr(arguments, name) for name in shown}
    if any(text["settings"] != settings for text in others):
        raise SystemExit(f"{record} holds texts measured with other settings; name another file")
    write(record, f"python -m benchmarks.quality {record}", {"texts": [*others, {**measured, "settings": settings}]})


if __name__ == "__main__":
    main()
