"""Compare compiled attention in training with products of whole matrices (`shifted`) by time.

    python -m benchmarks.training_attention results/training-attention.json

Attention forward and backward, and whole training steps of stdlib-tiny's shape, are run alternately in one process on
one thread. The result is the least processor time of each, because other programs on the machine lengthen it little.
`benchmarks.training_memory` compares their memory.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.record import write

import txl
from txl.allocator import keep_freed_memory
from txl.attention import BACKENDS, KeyScope
from txl.config import AttentionName
from txl.models import build_model
from txl.training.optimisers import build_optimizer
from txl.training.step import StepInputs, training_step

SHAPES = {
    "stdlib-tiny": (16, 4, 32, 128, 20),
    "enwik8-12L": (4, 8, 64, 512, 4),
    "enwik8-12L, long": (2, 8, 64, 1024, 3),
}
"""Lanes, heads, width of a head, T = M, and number of timed runs."""
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
                torch.autograd.grad(attend(*leaves, scope=KeyScope(length)), leaves, above)

            ways[f"{way} {dtype_name}"] = both
    return least(ways, times)


def steps() -> dict[str, float]:
    """Time training steps of stdlib-tiny's shape."""
    run = txl.preset("stdlib-tiny")
    ways: dict[str, Callable[[], Any]] = {}
    for dtype in DTYPES:
        for way in WAYS:
            torch.manual_seed(0)
            model = build_model(dataclasses.replace(run.model, attention=way), VOCABULARY, "cpu").train()
            train = dataclasses.replace(run.train, dtype=dtype)
            optimizer = build_optimizer(model, train)
            states = [model.init_state(train.batch_size).filled_with_noise()]

            def step(model=model, optimizer=optimizer, states=states, train=train) -> None:
                tokens = torch.randint(VOCABULARY, (train.batch_size, train.segment))
                states[:] = training_step(model, optimizer, StepInputs(tokens, tokens, states), train).states

            ways[f"{way} {dtype}"] = step
    return least(ways, STEPS)


def main() -> None:
    """Measure everything."""
    keep_freed_memory()
    torch.set_num_threads(1)
    timed = {name: attention(shape) for name, shape in SHAPES.items()}
    rows = [
        {
            "what": f"attention, {name}: B {lanes}, H {heads}, D {width}, T = M = {length}",
            "seconds": timed[name],
        }
        for name, (lanes, heads, width, length, _) in SHAPES.items()
    ]
    rows.append({"what": "training step, stdlib-tiny", "seconds": steps()})
    for row in rows:
        base = row["seconds"]["shifted float32"]
        row["times_shifted_float32"] = {way: base / seconds for way, seconds in row["seconds"].items()}
        told = ", ".join(f"{way} {times:.2f}" for way, times in row["times_shifted_float32"].items())
        print(f"{row['what']}: {told}", flush=True)
    if len(sys.argv) > 1:
        command = f"python -m benchmarks.training_attention {sys.argv[1]}"
        write(Path(sys.argv[1]), command, {"rows": rows})


if __name__ == "__main__":
    main()
