"""Compare the compiled loss with PyTorch's: forward and backward of the loss alone, and whole training steps.

    python -m benchmarks.loss results/loss.json

Both losses are timed alternately in one process. The steps are those of presets with a plain softmax.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.record import write_if_asked

import txl
from txl.allocator import keep_freed_memory
from txl.config import with_options
from txl.minutes.timing import training_workload
from txl.native.operations import compiled_cross_entropy
from txl_lab.speed.workloads import timed_in_pairs

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LOGITS = ((1400, 10_000), (2048, 2048), (64, 267_735), (2048, 204))
"""Numbers of rows and classes."""
STEPS = (("ptb-small", 10_000), ("stdlib-bpe", 2048))
"""Presets and sizes of their vocabularies."""
PAIRS = 15


def of_logits(rows: int, classes: int, dtype: str) -> dict[str, Any]:
    """Time the loss alone."""
    torch.manual_seed(0)
    logits = torch.randn(rows, classes).to(DTYPES[dtype]).requires_grad_()
    targets = torch.randint(classes, (rows,))

    def ours() -> None:
        losses = compiled_cross_entropy(logits, targets)
        assert losses is not None
        torch.autograd.grad(losses.mean(), logits)

    def theirs() -> None:
        torch.autograd.grad(F.cross_entropy(logits.float(), targets, reduction="none").mean(), logits)

    ratio = timed_in_pairs(ours, theirs, PAIRS, "cpu").ratio
    return {"rows": rows, "classes": classes, "dtype": dtype, "over_pytorch": ratio}


def of_step(preset: str, vocab_size: int, dtype: str) -> dict[str, Any]:
    """Time a training step."""
    options = {"train.dtype": dtype, "train.random_segments": "false", "model.attention": "compiled"}
    run = with_options(txl.preset(preset), options)
    run.model.cutoffs = ()
    model, step = training_workload(run, vocab_size, "cpu")

    def one(compiled: bool) -> None:
        model.softmax.compiled = compiled
        step()

    ratio = timed_in_pairs(lambda: one(True), lambda: one(False), PAIRS, "cpu").ratio
    return {"step": preset, "classes": vocab_size, "dtype": dtype, "over_pytorch": ratio}


def main() -> None:
    """Time the loss at all shapes, and the steps of all presets."""
    keep_freed_memory()
    rows = [of_logits(*each, dtype) for each in LOGITS for dtype in DTYPES]
    rows += [of_step(*each, dtype) for each in STEPS for dtype in DTYPES]
    for row in rows:
        what = f"a step of {row['step']}" if "step" in row else f"{row['rows']:,} rows"
        print(f"{what}, {row['classes']:,} classes, {row['dtype']}: {row['over_pytorch']:.2f} of PyTorch's time")
    write_if_asked("loss", {"rows": rows})


if __name__ == "__main__":
    main()
