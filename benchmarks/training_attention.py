"""Compare compiled attention in training with products of whole matrices (`shifted`) by time.

    python -m benchmarks.training_attention results/training-attention.json

Attention forward and backward, and whole training steps of stdlib-tiny's shape, are run alternately in one process on
one thread. The result is the least processor time of each, because other programs on the machine lengthen it little.
`benchmarks.training_memory` compares their memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import txl
from txl.attention import BACKENDS, KeyScope, Operands
from txl.config import AttentionName, with_options
from txl.minutes.timing import training_workload
from txl_lab.records import measure_and_record

# Lanes, heads, width of a head, T = M, and number of timed runs
SHAPES = {
    "stdlib-tiny": (16, 4, 32, 128, 20),
    "enwik8-12L": (4, 8, 64, 512, 4),
    "enwik8-12L, long": (2, 8, 64, 1024, 3),
}
WAYS: tuple[AttentionName, ...] = ("shifted", "compiled")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STEPS, VOCABULARY = 12, 256


def least(ways: dict[str, Callable[[], Any]], times: int) -> dict[str, float]:
    """Return the least processor seconds of each way; the ways are run alternately."""
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(times):
        for name, run in ways.items():
            start = time.process_time()
            run()
            seconds[name] = min(seconds[name], time.process_time() - start)
    return seconds


def attention(shape: tuple[int, int, int, int, int]) -> dict[str, float]:
    """Time forward and backward of one layer's attention, without dropout."""
    lanes, heads, width, length, times = shape
    ways: dict[str, Callable[[], Any]] = {}
    for dtype_name, dtype in DTYPES.items():
        torch.manual_seed(0)
        new, all_keys = (lanes, length, heads, width), (lanes, 2 * length, heads, width)
        numbers = [torch.randn(size).to(dtype) for size in (new, all_keys, all_keys, all_keys[1:])]
        leaves = [each.requires_grad_() for each in (*numbers, torch.randn(heads, width), torch.randn(heads, width))]
        above = torch.randn(new).to(dtype)
        for way in WAYS:
            attend = BACKENDS[way].train

            def both(attend=attend, leaves=leaves, above=above) -> None:
                torch.autograd.grad(attend(Operands(*leaves), scope=KeyScope(length)), leaves, above)

            ways[f"{way} {dtype_name}"] = both
    return least(ways, times)


def steps() -> dict[str, float]:
    """Time training steps of stdlib-tiny's shape."""
    run = txl.preset("stdlib-tiny")
    ways: dict[str, Callable[[], Any]] = {}
    for dtype in DTYPES:
        for way in WAYS:
            options = {"model.attention": way, "train.dtype": dtype}
            ways[f"{way} {dtype}"] = training_workload(with_options(run, options), VOCABULARY, "cpu")[1]
    return least(ways, STEPS)


def measure() -> dict[str, Any]:
    """Measure everything."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = [
        {
            "what": f"attention, {name}: B {lanes}, H {heads}, D {width}, T = M = {length}",
            "seconds": attention((lanes, heads, width, length, times)),
        }
        for name, (lanes, heads, width, length, times) in SHAPES.items()
    ]
    rows.append({"what": "training step, stdlib-tiny", "seconds": steps()})
    for row in rows:
        base = row["seconds"]["shifted float32"]
        row["times_shifted_float32"] = {way: base / seconds for way, seconds in row["seconds"].items()}
    return {"rows": rows}


if __name__ == "__main__":
    measure_and_record("training_attention", measure)
