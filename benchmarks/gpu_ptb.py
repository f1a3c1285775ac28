"""Train on Penn Treebank on a GPU within given minutes, and test as the paper's authors do.

    python -m benchmarks.gpu_ptb --source FOLDER --minutes 8.5 --lanes 20 --rate-factor 1.4 --out results
    python -m benchmarks.gpu_ptb --rehearse

The preset `ptb` is trained with captured steps in bfloat16. `--lanes` changes the number of lanes: a step then reads as
many times more tokens, and all numbers of steps become as many times smaller, so that the passes over the text are
those of the preset. While it trains, the time of a step and of an evaluation is measured, from step 800 on; if the rest
would end too late, the schedule is shortened to fit, the share of averaged weights unchanged. The warm-up does not
depend on this number. Once the weights are averaged, at a constant rate, only the end moves.

The last `--reserve` seconds are for the test: in one lane, whole split, at temperature 1.0 and at the preset's, then
the validation split at both and at others, then dynamic evaluation (`--dynamic`, tuned on validation). The record
`gpu-ptb-NAME.json` is written anew after each evaluation, so that nothing is lost when the time is cut.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu import device_name
from benchmarks.gpu_rows import Figures, WatchedLoop, imitate_recording, watched

import txl
from txl.config import RunConfig, TransformerXLConfig, with_options
from txl.data.corpora import open_corpus
from txl.evaluation.dynamic import Adaptation, evaluate_dynamically, gradient_statistics
from txl.runs.directory import RunDirectory
from txl.training.trainer import Trainer
from txl_lab.records import header

PAPER = 54.52  # test perplexity of the paper, Table 5
# Steps before the first measurement, steps that are measured (evaluations apart), and the steps between two decisions.
_FIRST, _WINDOW, _EVERY = 800, 400, 100
# Time of a step with averaged weights, relative to one without, before any was measured. Safe, not exact.
_AVERAGED = 1.1
_TOLERANCE = 0.005  # share of all steps by which a new plan must differ to be followed
OTHER_TEMPERATURES = (1.04, 1.12)
DYNAMIC_RATES, DYNAMIC_DECAY, DYNAMIC_TOKENS = (2e-5, 5e-5, 1e-4), 0.01, 7000


def began() -> float:
    """Return the time (of `monotonic`) at which this process was started; imports take seconds."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        before = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        before = 0.0
    return time.monotonic() - min(60.0, max(0.0, before))


BEGAN = began()


def recipe(given: argparse.Namespace) -> RunConfig:
    """Return the preset with captured steps and the given lanes; in the rehearsal, of a tiny model."""
    run = txl.preset(given.preset)
    run.train.capture, run.train.dtype = True, "bfloat16"
    run.model = dataclasses.replace(run.model, attention="triton")  # pyright: ignore[reportCallIssue] (has backends)
    train = run.train
    per_pass, lanes = train.eval_every, train.batch_size
    share = lanes / given.lanes if given.lanes else 1.0
    for name in ("steps", "average_from", "warmup_steps"):
        setattr(train, name, round(share * getattr(train, name)))
    train.batch_size = given.lanes or lanes
    train.eval_every = max(1, round(share * per_pass * given.eval_passes))
    train.learning_rate *= given.rate_factor
    train.min_learning_rate *= given.rate_factor
    train.checkpoint_every = 0
    if given.source:
        run.data.source = str(given.source)
    if given.rehearse:
        assert isinstance(run.model, TransformerXLConfig)
        tiny = {"n_layer": 1, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "attention": "shifted"}
        run.model = dataclasses.replace(run.model, **tiny)
        if not given.source:
            run.data = txl.config.DataConfig(corpus="stdlib", unit="byte")
        run.train = dataclasses.replace(train, steps=40, average_from=25, warmup_steps=4, eval_every=20, log_every=10)
        run.train.eval_tokens = 3000
    return with_options(run, dict(each.split("=", 1) for each in given.set))


class Report:
    """The record, written anew whenever it has something new."""

    def __init__(self, path: Path, given: argparse.Namespace, device: str):
        command = f"python -m benchmarks.gpu_ptb {' '.join(sys.argv[1:])}"
        self.path, self.values = path, header(command, device)
        self.values["output"] = self.output = {"minutes": given.minutes, "paper": PAPER} | Figures()
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, **values: Any) -> None:
        self.output |= values | {"seconds": round(time.monotonic() - BEGAN, 1)}
        self.values["output"] = self.output
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self.path)


class Ending:
    """A watcher of the training loop that shortens the schedule, so that training ends by a time (of `monotonic`)."""

    def __init__(self, run: RunConfig, end: float, report: Report, folder: Path):
        assert run.train.average_from is not None
        self.end, self.report, self.folder = end, report, folder
        self.most, self.share = run.train.steps, run.train.average_from / run.train.steps
        self.decisions = list[Figures]()
        self._times, self._evaluations = deque[float](maxlen=_WINDOW), list[float]()
        self._last, self._averages = time.monotonic(), False

    def __call__(self, loop: WatchedLoop, step: int) -> None:
        now, train = time.monotonic(), loop.setup.run.train
        taken, self._last = now - self._last, now
        evaluated = bool(train.eval_every) and step % train.eval_every == 0
        (self._evaluations if evaluated else self._times).append(taken)
        if loop.state.average is not None and not self._averages:
            self._averages = True
            self._times.clear()
        late = now > self.end and step + 1 < train.steps
        if late or (step >= _FIRST and step % _EVERY == 0 and len(self._times) >= _EVERY):
            self._decide(loop, step, now)
        if evaluated:
            self.report.add(**curves(self.folder), decisions=self.decisions)

    def _decide(self, loop: WatchedLoop, step: int, now: float) -> None:
        train, left = loop.setup.run.train, max(0.0, self.end - now)
        assert train.average_from is not None
        # The mean, not the median: recording a graph takes time too.
        second = statistics.fmean(self._times)
        if train.eval_every:
            # Recorded evaluations are longest at first; before the first one nothing is known.
            second += (statistics.median(self._evaluations) if self._evaluations else 0.0) / train.eval_every
        if self._averages:
            steps, begins = min(self.most, step + int(left / second)), train.average_from
        else:
            # n more steps, of which the averaged ones take longer
            longer = 1 + (1 - self.share) * (_AVERAGED - 1)
            steps = min(self.most, int(step + left / second / longer))
            begins = max(step + 1, round(self.share * steps))
        steps = max(step + 1, steps)
        if abs(steps - train.steps) > _TOLERANCE * train.steps or steps == step + 1:
            train.steps, train.average_from = steps, min(begins, steps)
            loop.setup.display.steps = steps
            loop.setup.directory.write_config(loop.setup.run)
            self.decisions.append(
                {"step": step, "steps": steps, "average_from": train.average_from, "step_seconds": second}
            )
            print(f"step {step}: {1000 * second:.2f} ms a step, so {steps:,} of {self.most:,} steps", flush=True)


def curves(folder: Path) -> Figures:
    """Return the losses of training and validation so far, from the log."""
    events = RunDirectory(folder).events()
    names = ("step", "loss", "tokens_per_second", "elapsed", "learning_rate", "grad_norm")
    lines = [{name: each[name] for name in names if name in each} for each in events if each["event"] == "train"]
    valid = [
        {"step": each["step"], "nll": each["nll"], "ppl": each["ppl"], "seconds": each["seconds"]}
        for each in events
        if each["event"] == "valid"
    ]
    return {"train": lines[:: max(1, len(lines) // 200)], "validation": valid}


def test(run: RunConfig, folder: Path, given: argparse.Namespace, device: str, report: Report) -> None:
    """Score test and validation split, as long as time is left; the record has each result at once."""
    model, vocabulary = txl.load(folder, device=device)
    data, settings, end = run.data, run.eval, BEGAN + 60 * given.minutes - 3
    corpus = open_corpus(data.corpus, config=data, data_dir=given.data_dir, vocabulary=vocabulary, quiet=True)
    most = 500 if given.rehearse else None
    size = min(len(corpus.tokens("test")), most or 10**9)
    common = {"segment": settings.segment, **settings.lengths.options()}
    # Two lengths, because recording the steps takes as long as thousands of tokens.
    few, more = (min(size, count) for count in (2000, 6000))
    seconds = [
        txl.evaluate(model, corpus.tokens("test"), batch_size=1, max_tokens=count, **common).seconds
        for count in (few, few, more)
    ]
    guess = seconds[2] + (size - more) * max(0.0, seconds[2] - seconds[1]) / max(1, more - few)
    results: Figures = {}

    def score(split: str, temperature: float) -> None:
        nonlocal guess
        # As the authors test; with too little time for it, in more lanes, which begin with empty memory.
        left, lanes = end - time.monotonic(), settings.batch_size
        if guess > left:
            lanes = 20
        if guess / lanes > left:
            return
        scored = txl.evaluate(
            model, corpus.tokens(split), batch_size=lanes, temperature=temperature, max_tokens=most, **common
        )
        guess = max(scored.seconds, guess / 4) if lanes == settings.batch_size else guess
        results[f"{split} {temperature:g}"] = scored.to_dict()
        print(f"{split}, temperature {temperature:g}: perplexity {scored.ppl:.3f} ({scored.seconds:.1f} s, B {lanes})")
        sys.stdout.flush()
        report.add(results=results)

    for split in ("test", "valid"):
        for temperature in dict.fromkeys([1.0, settings.temperature]):
            score(split, temperature)
    for temperature in OTHER_TEMPERATURES:
        score("valid", temperature)
    on_valid = {name: each["nll"] for name, each in results.items() if name.startswith("valid")}
    if on_valid:
        chosen = float(min(on_valid, key=lambda name: on_valid[name]).split()[1])
        if f"test {chosen:g}" not in results:
            score("test", chosen)
        report.add(temperature_chosen_on_validation=chosen)
    if given.dynamic and time.monotonic() < end - 20:
        dynamic(model, corpus, run, most, end, report)


def dynamic(model: Any, corpus: Any, run: RunConfig, most: int | None, end: float, report: Report) -> None:
    """Adapt to the test split as it is read, in segments of training; the rate is the best of a few on validation."""
    lengths = {"segment": run.train.segment, "mem_len": run.model.mem_len, "window": "none", "batch_size": 1}
    sums = gradient_statistics(model, corpus.tokens("train"), segments=20 if most else 300, **lengths)
    tried: dict[float, float] = {}
    for rate in DYNAMIC_RATES:
        if time.monotonic() < end - 15:
            how = Adaptation("rms", rate, DYNAMIC_DECAY)
            tokens = corpus.tokens("valid")
            found = evaluate_dynamically(model, tokens, how, sums, max_tokens=most or DYNAMIC_TOKENS, **lengths)
            tried[rate] = found.nll
            report.add(dynamic_tried=tried)
    if not tried:
        report.add(dynamic="left out: the statistics took the time that was left")
        return
    began = time.monotonic()
    best = Adaptation("rms", min(tried, key=lambda rate: tried[rate]), DYNAMIC_DECAY)
    few = evaluate_dynamically(model, corpus.tokens("test"), best, sums, max_tokens=most or 3000, **lengths)
    seconds = (time.monotonic() - began) * len(corpus.tokens("test")) / (few.tokens + 1)
    if most is None and time.monotonic() + seconds > end:
        report.add(dynamic=f"left out: it would take {seconds:.0f} s")
        return
    scored = evaluate_dynamically(model, corpus.tokens("test"), best, sums, max_tokens=most, **lengths)
    print(f"test, dynamic evaluation: perplexity {scored.ppl:.3f} ({scored.seconds:.1f} s)", flush=True)
    report.add(dynamic=scored.to_dict())


def measure(given: argparse.Namespace, device: str, work: Path, report: Report) -> None:
    run, folder = recipe(given), work / "run"
    ending = Ending(run, BEGAN + 60 * given.minutes - given.reserve, report, folder)
    report.add(config=run.to_dict(), schedule=f"{given.preset}, {run.train.batch_size} lanes")
    with watched(ending):
        trainer = Trainer(run, folder, device=device, data_dir=given.data_dir, quiet=given.rehearse)
        done = trainer.fit()
    trained = RunDirectory(folder).config()
    share = trained.train.steps / ending.most
    label = "in full" if share == 1 else f"with its schedule scaled to {share:.3f} of {ending.most:,} steps"
    print(f"trained {label}: {trained.train.steps:,} steps in {done['seconds']:.1f} s", flush=True)
    report.add(trained=label, config=trained.to_dict(), training=done, decisions=ending.decisions, **curves(folder))
    test(trained, folder, given, device, report)


def main() -> int:
    parser = argparse.ArgumentParser(description="Penn Treebank on a GPU, in full or as far as the minutes go.")
    parser.add_argument("--preset", default="ptb", help="a configuration with averaged weights (default: ptb)")
    parser.add_argument("--minutes", type=float, default=8.5, help="for everything (default: 8.5)")
    parser.add_argument("--reserve", type=float, default=45.0, help="seconds of them for the test (default: 45)")
    parser.add_argument("--lanes", type=int, help="of training (default: the preset's)")
    parser.add_argument("--rate-factor", type=float, default=1.0, help="of the learning rates (default: 1)")
    parser.add_argument("--eval-passes", type=float, default=7.0, help="passes between two evaluations (default: 7)")
    parser.add_argument("--source", type=Path, help="folder or archive of Penn Treebank (`txl data prepare ptb`)")
    parser.add_argument("--data-dir", type=Path, help="where prepared corpora live")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of the configuration")
    parser.add_argument("--dynamic", action="store_true", help="dynamic evaluation too, if time is left")
    parser.add_argument("--work", type=Path, help="folder of the run (default: one that goes)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the record")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on a CPU; nothing is kept")
    given = parser.parse_args()
    if not given.rehearse and not torch.cuda.is_available():
        print("there is no NVIDIA GPU here; --rehearse needs none", file=sys.stderr)
        return 2
    device = "cpu" if given.rehearse else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        work = given.work or Path(folder)
        if given.rehearse:
            imitate_recording()
            given.out, given.dynamic = given.out if given.work else Path(folder), True
        report = Report(given.out / f"gpu-ptb-{device_name(device)}.json", given, device)
        measure(given, device, work, report)
        print(f"{report.output['seconds']:.0f} s in all; written: {report.path}")
        return 0 if report.output.get("results") else 1


if __name__ == "__main__":
    sys.exit(main())
