"""Measure the loss curves for the rule of `txl train --minutes`, by steps, shapes, units and rates; fit and check it.

    python -m benchmarks.dial curves results/dial.json --texts DIR --work runs/dial
    python -m benchmarks.dial fit results/dial.json
    python -m benchmarks.dial vocabulary results/dial-vocabulary-2.json --work runs/dial --minutes 2 --texts FILE FILE
    python -m benchmarks.dial check results/dial-check-2.json --work runs/dial --minutes 2 --texts FILE FILE
    python -m benchmarks.dial exponent results/dial.json --work runs/dial --checks results/dial-check-*.json --texts ...
    python -m benchmarks.dial dropout results/dial-dropout.json --texts DIR --work runs/dial

Every point is a whole run of the recipe of stdlib-bpe (Muon, a linearly falling learning rate) on the first bytes of a
text. Losses do not depend on the machine's load, so that other work may run at the same time. Runs are kept in
`--work`, and the same command resumes after an interruption. `vocabulary` trains one shape with vocabularies of several
sizes for the same time. `check` takes texts that were not used for the fit. For each text it trains the choice of
`--minutes` and eight hand-made configurations for the same time. `exponent` shows what the rule's shapes would cost in
such checks with other values of BETA. `dropout` trains on short texts, many passes over each, with several rates.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import txl
from txl.config import RunConfig, TransformerXLConfig, with_options
from txl.data.corpora import open_corpus
from txl.data.user_text import stdlib_files
from txl.devices import keep_freed_memory
from txl.evaluation.perplexity import evaluate
from txl.minutes import rule
from txl.minutes.measured import measured_speed, run_in_minutes
from txl.runs.checkpoints import checkpoint_step
from txl.runs.directory import RunDirectory
from txl.runs.environment import multiplies_bfloat16
from txl.training.compilation import can_capture
from txl.training.trainer import Trainer
from txl_lab.records import write

MB, KB = 1_000_000, 1_000
RATE, LANES_HERE = 4e-3, 16  # learning rate and number of lanes of the recipe
EXPONENTS = (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6)  # values of BETA that `exponent` compares
ROUNDS = 5  # measurements of each configuration's step; the median counts
Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """Settings of one run: the first `size` bytes of a text, and a shape of layers x width (heads have width 32)."""

    text: str
    size: int
    shape: str
    steps: int
    vocab_size: int = 2048  # number of byte pairs; 256: the unit is the byte
    dropout: float = 0.0
    rate: float = RATE
    batch_size: int = LANES_HERE

    @property
    def name(self) -> str:
        return "-".join(f"{value:g}" if isinstance(value, float) else str(value) for value in asdict(self).values())


def points() -> list[Point]:
    """Return all runs of `curves`, the most informative ones first."""
    wiki, stdlib, quixote = ("wikitext-2", 10 * MB), ("stdlib", 10 * MB), ("quixote", 2 * MB)
    shakespeare = ("shakespeare", 200 * KB)
    return [
        Point(*stdlib, "4x128", 1200),
        Point(*wiki, "4x128", 400),
        Point(*wiki, "6x192", 400),
        Point(*shakespeare, "4x128", 400, 512, 0.1),
        Point(*shakespeare, "4x128", 1200, 512, 0.2),
        Point(*wiki, "4x128", 1200),
        Point(*shakespeare, "4x128", 400, 512),
        Point(*shakespeare, "4x128", 400, 1024, 0.1),
        Point(*wiki, "4x128", 400, rate=8e-3),
        Point(*wiki, "6x256", 400),
        Point(*shakespeare, "4x128", 800, 256, 0.1),
        Point(*quixote, "4x128", 1200),
        Point(*quixote, "4x128", 1200, dropout=0.1),
        Point(*shakespeare, "4x128", 1200, 512),
        Point(*wiki, "4x128", 1200, rate=8e-3),
        Point(*wiki, "6x192", 1200),
        Point(*wiki, "3x96", 1200),
        Point(*wiki, "4x128", 3600),
        Point(*shakespeare, "6x192", 1200, 512, 0.2),
        Point(*wiki, "4x128", 600, batch_size=32),
        Point(*quixote, "4x128", 1200, 1024),
        Point(*shakespeare, "4x128", 3600, 512, 0.2),
        Point(*shakespeare, "4x128", 1200, 1024, 0.2),
        Point(*quixote, "4x128", 1200, 4096),
        Point(*wiki, "6x256", 400, rate=8e-3),
    ]


def dropout_points() -> list[Point]:
    """Return the runs that compare shapes and dropout rates on texts of a megabyte, and of 200 kB."""
    novel = 1_115_394
    many: list[tuple[str, int, int, str, int, tuple[float, ...]]] = [
        ("shakespeare", novel, 2048, "4x128", 1661, (0.0, 0.1, 0.2)),
        ("shakespeare", novel, 2048, "4x128", 4440, (0.1, 0.2)),
        ("shakespeare", novel, 2048, "6x192", 1800, (0.1, 0.2, 0.3)),
        ("quixote", novel, 2048, "4x128", 1661, (0.1,)),
        ("quixote", novel, 2048, "6x192", 1800, (0.2,)),
        ("shakespeare", 200 * KB, 1024, "3x96", 2036, (0.2,)),
        ("shakespeare", 200 * KB, 1024, "4x128", 2036, (0.2,)),
    ]
    return [
        Point(text, size, shape, steps, vocab_size, dropout, rule.rate_of(steps))
        for text, size, vocab_size, shape, steps, rates in many
        for dropout in rates
    ]


def configured(point: Point, texts: Path, work: Path) -> RunConfig:
    path = work / "texts" / f"{point.text}-{point.size}.txt"
    if not path.exists():
        files = stdlib_files() if point.text == "stdlib" else [texts / f"{point.text}.txt"]
        raw = b"".join(file.read_bytes() for file in files)
        if len(raw) < point.size:
            raise SystemExit(f"{point.text} has {len(raw):,} bytes; expected {point.size:,} or more")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw[: point.size].decode("utf-8", "ignore").encode())
    run = txl.preset("stdlib-bpe")
    layers, width = map(int, point.shape.split("x"))
    shape = {"n_layer": layers, "d_model": width, "n_head": width // 32, "d_inner": 3 * width}
    run.model = replace(run.model, **shape, dropout=point.dropout)
    quarter = max(1, point.steps // 4)
    run.data = replace(run.data, corpus=str(path), unit="byte" if point.vocab_size == 256 else "bpe")
    run.data.vocab_size = point.vocab_size
    run.train = replace(run.train, steps=point.steps, batch_size=point.batch_size, learning_rate=point.rate)
    run.train = replace(run.train, eval_every=quarter, checkpoint_every=quarter, eval_tokens=50_000)
    run.train.warmup_steps = max(10, round(0.05 * point.steps))
    run.train.dtype = "bfloat16" if multiplies_bfloat16("cpu") else "float32"
    run.eval.batch_size = 4
    return run


def measured(point: Point, texts: Path, work: Path) -> Row:
    """Train the run of a point, or resume it, and return its evaluations."""
    out, run = RunDirectory(work / point.name), configured(point, texts, work)
    Trainer(run, out.path, device="cpu", data_dir=work / "data", quiet=True).fit()
    events = out.events()
    began = next(event for event in events if event["event"] == "start")
    kept = ("step", "nll", "bits_per_byte", "tokens")
    evaluations = {event["step"]: {name: event[name] for name in kept} for event in events if event["event"] == "valid"}
    tokens = began["corpus"]["splits"]["train"]["tokens"]
    best = min(evaluations.values(), key=lambda found: found["nll"])
    row = asdict(point) | {
        "parameters": began["total_parameters"],
        "train_tokens": tokens,
        "epochs": point.steps * run.train.batch_size * run.train.segment / tokens,
        "bits_per_byte": evaluations[point.steps]["bits_per_byte"],
        "best_bits_per_byte": best["bits_per_byte"],
    }
    print(json.dumps(row), flush=True)
    return row | {"evaluations": list(evaluations.values())}


def scored(point: Point, texts: Path, work: Path) -> Row:
    """Train the run of a point, or resume it, and score its best checkpoint with a memory of 256 on both splits."""
    run = configured(point, texts, work)
    run.train.eval_every = run.train.checkpoint_every = math.ceil(point.steps / 8)
    run.train.eval_tokens, run.eval.batch_size = None, txl.preset("stdlib-bpe").eval.batch_size
    out = RunDirectory(work / point.name)
    Trainer(run, out.path, device="cpu", data_dir=work / "data", quiet=True).fit()
    model, _ = txl.load(out.path)
    corpus = open_corpus(run.data.corpus, config=run.data, data_dir=work / "data", quiet=True)
    n_token = len(corpus.tokens("train"))
    row = asdict(point) | {"train_tokens": n_token, "passes": point.steps * run.train.tokens_per_step / n_token}
    row["best_step"] = checkpoint_step(out.checkpoint().name)
    for split in ("valid", "test"):
        found = evaluate(model, corpus.tokens(split), segment=128, batch_size=4, mem_len=256, window=256)
        row[f"{split}_bits_per_byte"] = found.bits_per_byte
    print(json.dumps(row), flush=True)
    return row


def fit(curves: list[Row], beta: float = rule.BETA) -> dict[str, float]:
    """Fit A, ALPHA, B and PASSES of `txl.minutes.rule` to the runs, in nats per token, with a given BETA.

    The runs without repeated text, at the recipe's rate and batch, are fitted by E + A / N**ALPHA + B / D**BETA. Each
    text has its own E, which is not used further. BETA is not fitted: these runs have two lengths, which any BETA fits
    equally well. PASSES is fitted to the decrease of loss in the small text's runs, each with its better dropout.
    """
    usual = [row for row in curves if (row["rate"], row["batch_size"]) == (RATE, LANES_HERE)]
    plain = [row for row in usual if row["size"] == 10 * MB]
    texts = sorted({row["text"] for row in plain})
    nats = torch.tensor([row["evaluations"][-1]["nll"] for row in plain]).double()
    sizes = torch.tensor([layer_weights(row["shape"]) for row in plain]).double()
    tokens = torch.tensor([row["steps"] * row["batch_size"] * 128 for row in plain]).double()
    own = torch.stack([torch.tensor([float(row["text"] == text) for row in plain]) for text in texts], 1).double()
    found: dict[str, float] = {"error": math.inf}
    for alpha in (hundredths / 100 for hundredths in range(5, 100)):
        terms = torch.cat([own, sizes[:, None] ** -alpha, tokens[:, None] ** -beta], 1)
        solution = torch.linalg.lstsq(terms, nats[:, None], driver="gelsd").solution
        error = (terms @ solution - nats[:, None]).square().mean().sqrt().item()
        *floors, a, b = solution[:, 0].tolist()
        if error < found["error"] and min(a, b, *floors) > 0:
            found = {"error": error, "A": a, "ALPHA": alpha, "B": b}

    small = [row for row in usual if (row["text"], row["shape"], row["vocab_size"]) == ("shakespeare", "4x128", 512)]
    by_steps: dict[int, float] = {}
    for row in small:
        best = min(evaluation["nll"] for evaluation in row["evaluations"])
        by_steps[row["steps"]] = min(best, by_steps.get(row["steps"], math.inf))
    first, *later = sorted(by_steps)

    def misses(passes: float) -> float:
        own = small[0]["train_tokens"]
        worth = {steps: rule.counted_tokens(steps * LANES_HERE * 128, own, passes) for steps in by_steps}
        expected = {steps: found["B"] * worth[steps] ** -beta for steps in by_steps}
        return sum((by_steps[first] - by_steps[steps] - expected[first] + expected[steps]) ** 2 for steps in later)

    found["PASSES"] = min((halves / 2 for halves in range(2, 200)), key=misses)
    return found


def costs(given: argparse.Namespace) -> list[str]:
    """Return a line for each BETA: the constants fitted with it, and what the rule's shape costs in each check.

    In each check, the rule chooses among three hand-made shapes with 2,048 byte pairs, by the steps that they made; the
    middle one has dropout where the rule gives it dropout. The cost is the chosen shape's bits per byte beside the
    lowest of the three.
    """
    curves = json.loads(given.record.read_text())["output"]["curves"]
    texts = {Path(text).name: text for text in given.texts}
    checks = []
    for path in given.checks:
        for name, found in json.loads(path.read_text())["output"]["texts"].items():
            if name not in texts:
                raise SystemExit(f"{path} has a check on {name}; give its text in --texts")
            run = with_options(txl.preset("stdlib-bpe"), {"data.corpus": str(Path(texts[name]).absolute())})
            corpus = open_corpus(run.data.corpus, config=run.data, data_dir=given.work / "data", quiet=True)
            own, rows, middle = len(corpus.tokens("train")), found["runs"], "stdlib-bpe"
            if rule.with_dropout(run, rows[middle]["steps"] * run.train.tokens_per_step / own).model.dropout:
                middle += ", dropout 0.1"
            checks.append((f"{path.stem} {name}", own, [rows[key] for key in ("narrow", middle, "6x192")]))
    lines = ["checks: " + ", ".join(name for name, *_ in checks)]
    for beta in EXPONENTS:
        law, beside = fit(curves, beta), []
        for _, own, rows in checks:
            expected = []
            for row in rows:
                worth = rule.counted_tokens(row["steps"] * LANES_HERE * 128, own, law["PASSES"])
                size = layer_weights(f"{row['model']['n_layer']}x{row['model']['d_model']}")
                expected.append(law["A"] / size ** law["ALPHA"] + law["B"] / worth**beta)
            bits = [row["bits_per_byte"] for row in rows]
            beside.append(bits[expected.index(min(expected))] / min(bits) - 1)
        constants = ", ".join(f"{name} {law[name]:.3g}" for name in ("A", "ALPHA", "B", "PASSES"))
        lines.append(f"BETA {beta:g} ({constants}): " + ", ".join(f"{cost:.2%}" for cost in beside))
    return lines


def layer_weights(shape: str) -> int:
    """Return N, the number of parameters in a shape's layers."""
    layers, width = map(int, shape.split("x"))
    model = TransformerXLConfig(n_layer=layers, d_model=width, n_head=width // 32, d_head=32, d_inner=3 * width)
    return model.parameter_count(0)


def _of_size(layers: int, width: int, **more: str) -> dict[str, str]:
    sizes = {"n_layer": layers, "d_model": width, "n_head": width // 32, "d_inner": 3 * width}
    return {f"model.{name}": str(size) for name, size in sizes.items()} | more


# Options of the configurations, all with the recipe of stdlib-bpe, with which `--minutes` is compared on a CPU; on a
# GPU larger models and more lanes cost less.
HAND_MADE = {
    "stdlib-bpe": {},
    "stdlib-bpe, dropout 0.1": {"model.dropout": "0.1"},
    "narrow": _of_size(3, 96),
    "6x192": _of_size(6, 192),
    "6x256, dropout 0.1": _of_size(6, 256) | {"model.dropout": "0.1"},
    "bytes": {"data.unit": "byte"},
    "4096 byte pairs": {"data.vocab_size": "4096"},
    "32 lanes": {"train.batch_size": "32"},
}
_SIZES_ON_GPU = (6, 192, 16), (6, 256, 64), (8, 384, 16), (8, 384, 64), (12, 512, 16), (12, 512, 64), (16, 768, 32)
HAND_MADE_ON_GPU = {
    f"{layers}x{width}, {lanes} lanes": _of_size(layers, width)
    | {"data.vocab_size": "4096", "train.batch_size": str(lanes)}
    for layers, width, lanes in (*_SIZES_ON_GPU, (6, 256, 128))
}


def compare(given: argparse.Namespace, configurations: dict[str, dict[str, str]], command: str) -> None:
    """Train configurations, and for `check` the choice of `--minutes`, for the same time; score the test split.

    The choice and the seconds of a step are measured first, which requires an idle machine. The runs that follow do not
    depend on the machine's load. The record is written after each of them; `chosen_over_best` is there after the last.
    """
    options = "".join(f"-{option}" for option in given.set)  # tells runs with different options apart
    results: dict[str, Row] = {}
    planned = {text: plans(given, text, configurations, options) for text in given.texts}
    for text, runs in planned.items():
        rows: dict[str, Row] = {}
        results[Path(text).name] = {"runs": rows}
        for name, run in runs.items():
            folder = f"{given.what}-{given.minutes:g}-{Path(text).stem}-{name}{options}".replace(" ", "-")
            out = RunDirectory(given.work / folder)
            Trainer(run, out.path, device=given.device, data_dir=given.work / "data", quiet=True).fit()
            model, _ = txl.load(out.path, device=given.device)
            corpus = open_corpus(run.data.corpus, config=run.data, data_dir=given.work / "data")
            lengths = run.eval.lengths.options()
            found = evaluate(model, corpus.tokens("test"), segment=128, batch_size=4, **lengths)
            rows[name] = {"bits_per_byte": found.bits_per_byte, "steps": run.train.steps, "model": asdict(run.model)}
            print(f"{text}, {given.minutes:g} minutes, {name}: {found.bits_per_byte:.4f} bits a byte", flush=True)
            if "chosen" in rows and len(rows) == len(runs):
                best = min(row["bits_per_byte"] for name, row in rows.items() if name != "chosen")
                results[Path(text).name]["chosen_over_best"] = rows["chosen"]["bits_per_byte"] / best
            write(given.record, command, {"minutes": given.minutes, "texts": results}, given.device)


def plans(
    given: argparse.Namespace, text: str, configurations: dict[str, dict[str, str]], suffix: str
) -> dict[str, RunConfig]:
    """Return the configurations for a text, each with the steps that fit into the minutes; they are made once and kept.

    For `check`, one of them is the choice of `--minutes`. The steps of all are computed from speeds measured in turns.
    """
    kept = given.work / f"{given.what}-plans-{given.minutes:g}-{Path(text).stem}{suffix}.json"
    asked = {"text": str(Path(text).absolute()), "device": given.device, "configurations": configurations}
    if kept.exists():
        stored = json.loads(kept.read_text())
        if stored.get("asked") != asked:
            raise SystemExit(f"{kept} holds plans of other settings; give another --work, or delete it")
        return {name: RunConfig.from_dict(run) for name, run in stored["runs"].items()}
    options = {"data.corpus": str(Path(text).absolute())}
    began, data = time.perf_counter(), given.work / "data"
    runs, seconds, corpora = {}, {}, {}
    if given.what == "check":
        chosen = run_in_minutes(given.minutes, options, given.device, data, began=began, quiet=True)
        print("\n".join(chosen.lines), flush=True)
        runs["chosen"] = chosen.run
    for name, changes in configurations.items():
        runs[name] = with_options(txl.preset("stdlib-bpe"), options | changes)
        runs[name].train.dtype = "bfloat16" if multiplies_bfloat16(given.device) else "float32"
        runs[name].train.capture = can_capture(runs[name], given.device)
    for name, run in runs.items():
        began = time.perf_counter()
        corpora[name] = open_corpus(run.data.corpus, config=run.data, data_dir=data, quiet=True)
        seconds[name] = rule.AIM * 60 * given.minutes - (time.perf_counter() - began)
    if "chosen" in runs:
        seconds["chosen"] = 60 * (runs["chosen"].train.planned_minutes or given.minutes)  # less preparation and tries
    speeds: dict[str, list[rule.StepTimes]] = {name: [] for name in runs}
    for _ in range(ROUNDS):  # alternately, so that other load on the machine affects all equally
        for name, run in runs.items():
            speeds[name].append(measured_speed(run, corpora[name], given.device, math.inf))
    for name, run in runs.items():
        step = median(speed.step for speed in speeds[name])
        evaluated_token = median(speed.evaluated_token for speed in speeds[name])
        run.train.eval_tokens = min(len(corpora[name].tokens("valid")), 30_000)
        run.train.steps = int((seconds[name] - 8 * run.train.eval_tokens * evaluated_token) / step)
        run.train.warmup_steps = max(1, round(0.05 * run.train.steps))
        run.train.eval_every = run.train.checkpoint_every = math.ceil(run.train.steps / 8)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({"asked": asked, "runs": {name: run.to_dict() for name, run in runs.items()}}))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("curves", "fit", "vocabulary", "check", "exponent", "dropout"))
    parser.add_argument("record", type=Path)
    parser.add_argument("--texts", nargs="+", default=[], help="curves: folder of wikitext-2.txt ...; else: files")
    parser.add_argument("--work", type=Path, help="folder of the runs")
    parser.add_argument("--minutes", type=float, default=2.0, help="training time of each configuration")
    parser.add_argument("--device", default="cpu", help="check, vocabulary: cpu or cuda")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="check: these hand-made configurations")
    options = "check: options of the hand-made configurations, which keep those of their own"
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help=options)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1024, 2048, 4096, 8192], help="vocabulary: byte pairs")
    parser.add_argument("--checks", nargs="+", type=Path, default=[], help="exponent: records of checks")
    given = parser.parse_args()
    keep_freed_memory()
    command = f"python -m benchmarks.dial {given.what} results/{given.record.name}"
    if given.what == "fit":
        print(json.dumps(fit(json.loads(given.record.read_text())["output"]["curves"]), indent=1))
    elif given.what == "exponent":
        print("\n".join(costs(given)))
    elif given.what in ("vocabulary", "check"):
        command += f" --minutes {given.minutes:g}" + (f" --device {given.device}" if given.device != "cpu" else "")
        configurations = HAND_MADE if given.device == "cpu" else HAND_MADE_ON_GPU
        if given.only:
            command += f" --only {' '.join(map(repr, given.only))}"
            configurations = {name: configurations[name] for name in given.only}
        if given.set and given.what == "check":
            command += f" --set {' '.join(given.set)}"
            common = dict(pair.split("=", 1) for pair in given.set)
            configurations = {name: common | own for name, own in configurations.items()}
        if given.what == "vocabulary":
            command += f" --sizes {' '.join(map(str, given.sizes))}"
            narrow = HAND_MADE["narrow"]
            configurations = {f"{size:,} byte pairs": narrow | {"data.vocab_size": str(size)} for size in given.sizes}
        compare(given, configurations, command)
    else:
        torch.set_num_threads(1)
        found = []
        make, todo = (scored, dropout_points()) if given.what == "dropout" else (measured, points())
        for point in todo:
            found.append(make(point, Path(given.texts[0]), given.work))
            write(given.record, command, {"curves": found})


if __name__ == "__main__":
    main()
