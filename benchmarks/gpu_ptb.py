"""Train on Penn Treebank on a GPU: time a captured step, project the whole recipe, and train as much of it as fits.

    python -m benchmarks.gpu_ptb --source FOLDER --work runs/gpu-ptb --minutes 25
    python -m benchmarks.gpu_ptb --rehearse

The preset `ptb` is trained with captured steps. A separate short run times a step, with segments of all lengths and
averaged weights, and an evaluation. The projected time of all 238,350 steps and their evaluations is printed. If this
time fits into the minutes, the recipe is trained in full. Otherwise its schedule is scaled to fit (steps, warm-up, and
the step from which weights are averaged, all by one factor), and the result records the factor. The test split is then
scored with the settings of the preset. `--minutes 0` only measures and projects.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu import device_name
from benchmarks.gpu_rows import imitate_recording

import txl
from txl.config import RunConfig, TransformerXLConfig, with_options
from txl.data.corpora import open_corpus
from txl.runs.directory import RunDirectory
from txl.training.trainer import Trainer
from txl_lab.records import write

PAPER = 54.52  # test perplexity of the paper, Table 5
# Share of the minutes that training is planned for; the rest is for recording graphs, the test, and delays
_MARGIN = 0.9


def recipe(given: argparse.Namespace) -> RunConfig:
    """Return the preset with captured steps; in the rehearsal, a tiny configuration with the same recipe."""
    run = txl.preset("ptb")
    run.train.capture = True
    if given.attention:
        run.model = dataclasses.replace(run.model, attention=given.attention)
    run = with_options(run, dict(each.split("=", 1) for each in given.set))
    if given.source:
        run.data.source = str(given.source)
    if given.rehearse:
        assert isinstance(run.model, TransformerXLConfig)
        run.model = dataclasses.replace(run.model, n_layer=1, d_model=16, n_head=2, d_head=8, d_inner=24)
        run.data = txl.config.DataConfig(corpus="stdlib", unit="byte")
        run.train = dataclasses.replace(run.train, steps=40, average_from=25, warmup_steps=4, eval_every=20)
        run.train.eval_tokens, run.eval.mem_len = 3000, 20
    return run


def scaled(run: RunConfig, factor: float) -> RunConfig:
    """Return the recipe with a shortened schedule, with unchanged shares of warm-up and of averaged weights."""
    train = run.train
    assert train.average_from is not None
    changed = {name: max(1, round(factor * getattr(train, name))) for name in ("steps", "average_from", "warmup_steps")}
    every = min(train.eval_every, max(1, changed["steps"] // 20))
    return dataclasses.replace(run, train=dataclasses.replace(train, **changed, eval_every=every))


def probe(run: RunConfig, folder: Path, device: str, data_dir: Path | None, steps: int) -> tuple[float, float]:
    """Return the seconds of a step and of an evaluation, from a run whose first half is an untimed warm-up."""
    short = dataclasses.replace(run.train, steps=2 * steps, average_from=steps // 2, warmup_steps=1, log_every=steps)
    short = dataclasses.replace(short, eval_every=2 * steps, checkpoint_every=0)
    Trainer(dataclasses.replace(run, train=short), folder, device=device, data_dir=data_dir, quiet=True).fit()
    events = RunDirectory(folder).events()
    before, last = (each for each in events if each["event"] == "train")
    valid = next(each for each in events if each["event"] == "valid")
    tokens = (last["tokens_read"] - before["tokens_read"]) / (last["step"] - before["step"])
    return tokens / last["tokens_per_second"], valid["seconds"]


def measure(given: argparse.Namespace, device: str, work: Path) -> dict[str, Any]:
    began, run = time.monotonic(), recipe(given)
    with tempfile.TemporaryDirectory() as passing:
        step, valid = probe(run, Path(passing) / "probe", device, given.data_dir, 10 if given.rehearse else 400)

    def projected(config: RunConfig) -> float:
        return config.train.steps * step + config.train.steps / config.train.eval_every * valid

    whole = projected(run)
    print(f"a captured step takes {1000 * step:.2f} ms, an evaluation {valid:.1f} s")
    print(f"the whole recipe of {run.train.steps:,} steps would take {whole / 60:.1f} minutes", flush=True)
    result: dict[str, Any] = {"step_seconds": step, "evaluation_seconds": valid, "projected_seconds": whole}
    room = _MARGIN * 60 * given.minutes - (time.monotonic() - began)
    if room <= 0:
        return result | {"trained": "nothing: no minutes were left for it"}
    factor = 0.5 if given.rehearse else 1.0
    while projected(plan := scaled(run, factor) if factor < 1 else run) > room and factor > 0.001:
        factor *= 0.98
    label = "in full" if factor == 1 else f"with its schedule scaled to {factor:.3f} of {run.train.steps:,} steps"
    print(f"trained {label}: {plan.train.steps:,} steps", flush=True)
    Trainer(plan, work / "run", device=device, data_dir=given.data_dir, quiet=given.rehearse).fit()
    model, vocabulary = txl.load(work / "run", device=device)
    settings, data = plan.eval, plan.data
    corpus = open_corpus(data.corpus, config=data, data_dir=given.data_dir, vocabulary=vocabulary, quiet=True)
    scored = txl.evaluate(
        model,
        corpus.tokens("test"),
        segment=settings.segment,
        batch_size=settings.batch_size,
        temperature=settings.temperature,
        max_tokens=500 if given.rehearse else None,
        **settings.lengths.options(),
    )
    valids = [each for each in RunDirectory(work / "run").events() if each["event"] == "valid"]
    curve = [{"step": each["step"], "nll": each["nll"]} for each in valids]
    print(f"test perplexity {scored.ppl:.2f}, trained {label}; the paper's {PAPER}")
    result |= {"trained": label, "steps": plan.train.steps, "seconds": time.monotonic() - began}
    return result | {"test_perplexity": scored.ppl, "paper": PAPER, "validation": curve, "config": plan.to_dict()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Penn Treebank on a GPU, in full or as far as the minutes go.")
    parser.add_argument("--minutes", type=float, default=25.0, help="for everything (default: 25)")
    parser.add_argument("--source", type=Path, help="folder or archive of Penn Treebank (`txl data prepare ptb`)")
    parser.add_argument("--data-dir", type=Path, help="where prepared corpora live")
    parser.add_argument("--attention", help="backend of the attention (default: the preset's)")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of the configuration")
    parser.add_argument("--work", type=Path, default=Path("runs/gpu-ptb"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the record")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on a CPU; nothing is kept")
    given = parser.parse_args()
    if not given.rehearse:
        if not torch.cuda.is_available():
            print("there is no NVIDIA GPU here; --rehearse needs none", file=sys.stderr)
            return 2
        result = measure(given, "cuda", given.work)
        path = given.out / f"gpu-ptb-{device_name('cuda')}.json"
        write(path, f"python -m benchmarks.gpu_ptb {' '.join(sys.argv[1:])}", result, "cuda")
        print(f"written: {path}")
        return 0
    imitate_recording()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(given, "cpu", Path(folder))
    return 0 if result["test_perplexity"] > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
