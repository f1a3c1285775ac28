"""Curves that the rule of `txl train --minutes` is made from: validation loss against steps, shapes, units and rates.

    python -m benchmarks.dial curves results/dial.json --texts DIR --work runs/dial

Every point is a whole run of the recipe of stdlib-bpe (Muon, a rate that falls along a line), on the first bytes of a
text. Loss against steps does not depend on the machine's load, so the runs may go on beside other work; they are kept
in `--work`, and the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.record import write

import txl
from txl.allocator import keep_freed_memory
from txl.config import RunConfig, TransformerXLConfig, with_options
from txl.data.sources import stdlib_files
from txl.runs.directory import RunDirectory
from txl.runs.environment import multiplies_bfloat16
from txl.training.trainer import Trainer

MB, KB = 1_000_000, 1_000


@dataclass(frozen=True)
class Point:
    """One run."""

    text: str
    size: int
    """Bytes from the beginning of the text."""
    shape: str
    """Layers x width; heads are of width 32, the feed-forward three times as wide as the model."""
    steps: int
    vocab_size: int = 2048
    """Byte pairs; 256: bytes."""
    dropout: float = 0.0
    rate: float = 4e-3
    batch_size: int = 16

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return "-".join(f"{value:g}" if isinstance(value, float) else str(value) for value in asdict(self).values())


def points() -> list[Point]:
    """Return all runs, those that tell most first."""
    wiki, stdlib, quixote = ("wikitext-2", 10 * MB), ("stdlib", 10 * MB), ("quixote", 2 * MB)
    enwik8, shakespeare, code = ("enwik8", 4 * MB), ("shakespeare", 200 * KB), ("stdlib", 200 * KB)
    return [
        Point(*stdlib, "4x128", 1200),
        Point(*wiki, "4x128", 400),
        Point(*wiki, "6x192", 400),
        Point(*shakespeare, "4x128", 400, 512, 0.1),
        Point(*shakespeare, "4x128", 1200, 512, 0.2),
        Point(*wiki, "4x128", 1200),
        Point(*wiki, "6x256", 400),
        Point(*shakespeare, "4x128", 400, 512),
        Point(*shakespeare, "4x128", 400, 1024, 0.1),
        Point(*shakespeare, "4x128", 800, 256, 0.1),
        Point(*quixote, "4x128", 1200, 2048, 0.0),
        Point(*quixote, "4x128", 1200, 2048, 0.1),
        Point(*wiki, "6x192", 1200),
        Point(*wiki, "4x128", 400, rate=8e-3),
        Point(*wiki, "6x256", 400, rate=2e-3),
        Point(*wiki, "4x128", 800, batch_size=8),
        Point(*wiki, "4x128", 600, batch_size=32),
        Point(*quixote, "4x128", 1200, 1024, 0.0),
        Point(*quixote, "4x128", 1200, 4096, 0.0),
        Point(*code, "4x128", 400, 512, 0.1),
        Point(*code, "4x128", 1200, 512, 0.2),
        Point(*shakespeare, "3x96", 1200, 512, 0.1),
        Point(*shakespeare, "4x128", 1200, 512, 0.4),
        Point(*wiki, "4x128", 3600),
        Point(*wiki, "6x256", 1200),
        Point(*enwik8, "6x192", 1200),
    ]


def text_of(point: Point, texts: Path, work: Path) -> Path:
    """Return the file with the first bytes of a text, made where it is missing."""
    path = work / "texts" / f"{point.text}-{point.size}.txt"
    if not path.exists():
        if point.text == "stdlib":
            raw = b"".join(each.read_bytes() for each in stdlib_files())
        else:
            raw = (texts / f"{point.text}.txt").read_bytes()
        if len(raw) < point.size:
            raise SystemExit(f"{point.text} has {len(raw):,} bytes; expected {point.size:,} or more")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw[: point.size].decode("utf-8", "ignore").encode())
    return path


def configured(point: Point, text: Path) -> RunConfig:
    """Return the configuration of a run, which is evaluated four times on the way and at its end."""
    run = txl.preset("stdlib-bpe")
    layers, width = map(int, point.shape.split("x"))
    run.model = TransformerXLConfig(
        n_layer=layers, d_model=width, n_head=width // 32, d_head=32, d_inner=3 * width, mem_len=128,
        dropout=point.dropout, attention="fastest",
    )  # fmt: skip
    options = {
        "data.corpus": str(text),
        "data.unit": "byte" if point.vocab_size == 256 else "bpe",
        "data.vocab-size": str(point.vocab_size),
        "train.steps": str(point.steps),
        "train.batch-size": str(point.batch_size),
        "train.learning-rate": str(point.rate),
        "train.warmup-steps": str(max(10, round(0.05 * point.steps))),
        "train.eval-every": str(max(1, point.steps // 4)),
        "train.eval-tokens": "50000",
        "train.checkpoint-every": str(max(1, point.steps // 4)),
        "train.dtype": "bfloat16" if multiplies_bfloat16("cpu") else "float32",
        "eval.batch-size": "4",
    }
    return with_options(run, {name.replace("-", "_"): value for name, value in options.items()})


def measured(point: Point, texts: Path, work: Path) -> dict[str, Any]:
    """Train a point, or go on with its run, and return its evaluations."""
    out = RunDirectory(work / point.name)
    run = configured(point, text_of(point, texts, work))
    Trainer(run, out.path, device="cpu", data_dir=work / "data", quiet=True).fit()
    events = out.events()
    began = next(event for event in events if event["event"] == "start")
    kept = ("step", "nll", "bits_per_byte", "tokens")
    evaluations = {event["step"]: [event[name] for name in kept] for event in events if event["event"] == "valid"}
    tokens = began["corpus"]["splits"]["train"]["tokens"]
    last, best = evaluations[point.steps], min(evaluations.values(), key=lambda each: each[1])
    epochs = point.steps * run.train.batch_size * run.train.segment / tokens
    print(f"{point.name}: {last[2]:.4f} bits a byte at the end, {best[2]:.4f} at best, {epochs:.1f} epochs", flush=True)
    return asdict(point) | {
        "parameters": began["total_parameters"],
        "train_tokens": tokens,
        "epochs": epochs,
        "bits_per_byte": last[2],
        "best_bits_per_byte": best[2],
        "evaluations": [dict(zip(kept, each, strict=True)) for each in evaluations.values()],
    }


def main() -> None:
    """Measure all points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("curves",))
    parser.add_argument("record", nargs="?")
    parser.add_argument("--texts", required=True, type=Path)
    parser.add_argument("--work", required=True, type=Path)
    given = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    found = []
    for point in points():
        found.append(measured(point, given.texts, given.work))
        if given.record:
            Path(given.record).parent.mkdir(exist_ok=True, parents=True)
    if given.record:
        write(Path(given.record), f"python -m benchmarks.dial curves {given.record}", {"curves": found})
    else:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
