"""Measure what the learning rate of fine-tuning trades: the loss on a new text against that on the old one.

    python -m benchmarks.fine_tuning results/fine-tuning.json OLD.txt NEW.txt FOLDER SEED ...

A small model is trained on the old text, then tuned on the new one at several rates. Every model is measured on the
test splits of both. Runs in FOLDER that are finished are not trained again.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from txl.cli import main as txl
from txl_lab.records import write

# About what `txl train --minutes 2` chooses for a novel
BASE = shlex.split("--steps 1500 --model.dropout 0.1 --model.init induction --train.dtype bfloat16")
# Options of tuning; its peak rates, the first that of the base run
TUNING, RATES = shlex.split("--steps 500 --batch-size 8"), (3.2e-3, 1e-3, 3.2e-4)
# Fields of an evaluation that are recorded
FIGURES = [
    "checkpoint",
    "sha256_text",
    "tokens",
    "nll",
    "ppl",
    "bits_per_byte",
    "segment",
    "mem_len",
    "window",
    "dtype",
]


def command(*words: object) -> str:
    """Run `txl` with these words, and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = txl([str(word) for word in words])
    if code:
        raise SystemExit(code)
    return printed.getvalue()


def measured(run: Path, old: str, new: str) -> dict[str, Any]:
    results = {}
    for name, text in (("old", old), ("new", new)):
        result = json.loads(command("eval", run, "--corpus", text, "--json"))
        results[name] = {figure: result[figure] for figure in FIGURES}
    return results


def main(out: str, old: str, new: str, folder: str, *seeds: str) -> None:
    rows = []
    for seed in seeds:
        base = Path(folder) / f"base-{seed}"
        seeded = ("--train.seed", seed)
        command("train", "stdlib-bpe", "--out", base, "--corpus", old, *BASE, *seeded)
        rows.append({"seed": int(seed), "learning_rate": None, **measured(base, old, new)})
        for rate in RATES:
            tuned = Path(folder) / f"tuned-{seed}-{rate:g}"
            options = ("--corpus", new, *TUNING, "--learning-rate", rate, *seeded)
            command("train", base, "--out", tuned, "--init-from", base, *options)
            rows.append({"seed": int(seed), "learning_rate": rate, **measured(tuned, old, new)})
    names = [Path(text).name for text in (old, new)]
    settings = {"base": BASE, "tuning": TUNING, "old": names[0], "new": names[1]}
    write(
        Path(out),
        f"python -m benchmarks.fine_tuning {out} {' '.join(names)} FOLDER {' '.join(seeds)}",
        settings | {"rows": rows},
    )


if __name__ == "__main__":
    if len(sys.argv) < 6:
        sys.exit("usage: python -m benchmarks.fine_tuning FILE OLD NEW FOLDER SEED ...")
    main(*sys.argv[1:])
