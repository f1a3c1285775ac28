"""Compare the compiled library with PyTorch alone on this processor: training, evaluation, decoding, operations.

    python -m benchmarks.compiled results/compiled-PROCESSOR.json

Both are timed alternately in one process, in float32 and on all threads. Models are small, or one or two layers of
enwik8-12L's widths; tokens and weights are random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import txl
from txl.config import RunConfig, with_options
from txl.native.build import compiled_code
from txl.native.operations import compiled_cross_entropy, compiled_dropout, compiled_rms_norm
from txl.training.timing import training_workload
from txl_lab.records import measure_and_record
from txl_lab.speed.workloads import reading_workload, timed_in_pairs

PAIRS = 9
VOCABULARY = 2048
TRAINING = {
    "stdlib-bpe": {},
    "stdlib-bpe, dropout 0.1": {"model.dropout": "0.1", "model.dropatt": "0.1"},
    "ptb-small": {},
    "enwik8-12L, 2 layers, B 4, T = M = 512": {
        "model.n_layer": "2", "train.batch_size": "4", "train.segment": "512", "model.dropout": "0"
    },
}  # fmt: skip
READING = {
    "stdlib-bpe, T 128": {"eval.segment": "128", "eval.batch_size": "1"},
    "stdlib-bpe, one token": {"eval.segment": "1", "eval.batch_size": "1"},
    "stdlib-bpe, one token, 8 lanes": {"eval.segment": "1", "eval.batch_size": "8"},
    "enwik8-12L, 2 layers, T 256, M 2,100": {
        "model.n_layer": "2", "eval.segment": "256", "eval.mem_len": "2100", "eval.window": "2100"
    },
    "enwik8-12L, 2 layers, one token, M 2,100": {
        "model.n_layer": "2", "eval.segment": "1", "eval.mem_len": "2100", "eval.window": "2100"
    },
}  # fmt: skip


def run_of(name: str, options: dict[str, str]) -> RunConfig:
    """Return a preset with options; the preset's name is the part of `name` before the first comma."""
    run = with_options(txl.preset(name.split(",")[0]), options)
    run.model.cutoffs = ()
    return run


def training(name: str, options: dict[str, str]) -> float:
    """Return the speed of a training step with everything compiled, relative to PyTorch alone."""
    steps: list[Callable[[], None]] = []
    for attention in ("compiled", "shifted"):
        fixed = {"model.attention": attention, "train.dtype": "float32", "train.random_segments": "false"}
        steps.append(training_workload(run_of(name, options | fixed), VOCABULARY, "cpu")[1])

    def without() -> None:
        with compiled_code(False):
            steps[1]()

    return 1 / timed_in_pairs(steps[0], without, PAIRS, "cpu").ratio


def reading(name: str, options: dict[str, str]) -> float:
    """Return the speed of reading a segment without gradients, relative to PyTorch alone."""
    ours, theirs = (reading_workload(run_of(name, options), VOCABULARY, "cpu")[2] for _ in range(2))

    def without() -> None:
        with compiled_code(False):
            theirs()

    with torch.no_grad():
        return 1 / timed_in_pairs(ours, without, 3 * PAIRS, "cpu").ratio


def operation(ours: Callable[..., Any], theirs: Callable[..., Any], leaf: torch.Tensor) -> float:
    """Return the speed of an operation, forward and backward, relative to PyTorch's."""

    def both(of: Callable[..., Any]) -> None:
        torch.autograd.grad(of(leaf).sum(), leaf)

    return 1 / timed_in_pairs(lambda: both(ours), lambda: both(theirs), 3 * PAIRS, "cpu").ratio


def operations() -> dict[str, float]:
    """Return the speed of the operations that have no attention, relative to PyTorch's."""
    torch.manual_seed(0)
    values, gain = torch.randn(2048, 512, requires_grad=True), torch.ones(32)
    heads, logits = torch.randn(2048, 16, 32, requires_grad=True), torch.randn(1400, 10_000, requires_grad=True)
    targets = torch.randint(10_000, (1400,))

    def theirs_lost(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, targets, reduction="none")

    def theirs_normalised(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (32,), gain, 1e-5)

    return {
        "dropout": operation(lambda x: compiled_dropout(x, 0.1), lambda x: F.dropout(x, 0.1), values),
        "RMSNorm": operation(lambda x: compiled_rms_norm(x, gain, 1e-5), theirs_normalised, heads),
        "loss of 10,000 words": operation(lambda x: compiled_cross_entropy(x, targets), theirs_lost, logits),
    }


def measure() -> dict[str, Any]:
    rows = []
    for what, ratios in (
        ("training step", {name: training(name, options) for name, options in TRAINING.items()}),
        ("reading", {name: reading(name, options) for name, options in READING.items()}),
        ("operation", operations()),
    ):
        for name, times in ratios.items():
            rows.append({"work": what, "of": name, "times_pytorch": times})
            print(f"{what}, {name}: {times:.2f} times as fast as PyTorch", flush=True)
    return {"rows": rows}


if __name__ == "__main__":
    measure_and_record("compiled", measure)
