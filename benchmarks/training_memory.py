"""Compare peak memory of a training step with Hugging Face's Transformer-XL, as T and M double.

    PYTHONPATH=src:. .venv-oracle/bin/python -m benchmarks.training_memory results/training-memory.json

The benchmark runs in the environment of `make oracle`. Each size of each model runs in a separate process: first a
small step, which allocates weights and Adam's moments, then a step of the measured size. The result is the peak memory
of the process in this step, less the memory held before. Dropout is 0 for both models, as in the timed training rows.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from benchmarks.process import run_alone, status
from benchmarks.record import write

import txl
from txl.config import AttentionName, RunConfig
from txl.models import build_model
from txl.training.optimisers import build_optimizer
from txl.training.step import StepInputs, training_step

LANES, LAYERS, VOCABULARY = 2, 4, 204
LENGTHS = (64, 128, 256, 512, 1024)
"""Values of T = M."""
WARM = 8
"""T and M of the small step."""
OURS: dict[str, tuple[AttentionName, Literal["float32", "bfloat16"]]] = {
    "shifted": ("shifted", "float32"),
    "shifted, bfloat16": ("shifted", "bfloat16"),
    "compiled": ("compiled", "float32"),
    "compiled, bfloat16": ("compiled", "bfloat16"),
}
"""Attention and dtype of our model."""


def settings(length: int, attention: AttentionName) -> RunConfig:
    """Return a configuration with enwik8-12L's widths and fewer layers."""
    run = txl.preset("enwik8-12L")
    shape = {"n_layer": LAYERS, "mem_len": length, "attention": attention}
    model = dataclasses.replace(run.model, dropout=0.0, dropatt=0.0, dropout_r=0.0, **shape)
    return dataclasses.replace(run, model=model, train=dataclasses.replace(run.train, batch_size=LANES))


def our_step(way: str, length: int) -> Callable[[int], None]:
    """Return a training step of our model as a function of T = M."""
    attention, dtype = OURS[way]
    run = settings(length, attention)
    train = dataclasses.replace(run.train, dtype=dtype)
    model = build_model(run.model, VOCABULARY, "cpu").train()
    optimizer = build_optimizer(model, train)

    def step(length: int) -> None:
        state = model.init_state(LANES, mem_len=length)
        hidden = tuple(torch.randn(LANES, length, run.model.d_model) for _ in state.hidden)
        tokens = torch.randint(VOCABULARY, (LANES, length))
        inputs = StepInputs(tokens, tokens, [dataclasses.replace(state, hidden=hidden)])
        training_step(model, optimizer, inputs, train)

    return step


def peer_step(length: int) -> Callable[[int], None]:
    """Return a training step of the peer as a function of T = M."""
    from benchmarks.peers import Workload, peer_of

    run = settings(length, "shifted")
    work = Workload("memory", run.name, VOCABULARY, LANES, length, length, (0, 0), training=True)
    model = peer_of(run, work).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=run.train.learning_rate)

    def step(length: int) -> None:
        mems = [torch.randn(length, LANES, run.model.d_model) for _ in range(LAYERS)]
        tokens = torch.randint(VOCABULARY, (LANES, length))
        model(tokens, mems=mems, labels=tokens).loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.train.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(way: str, length: int) -> dict[str, Any]:
    """Measure one size of one model."""
    torch.manual_seed(0)
    step = peer_step(length) if way == "peer" else our_step(way, length)
    step(WARM)
    before = status("VmRSS")
    step(length)
    return {"way": way, "length": length, "peak_bytes": status("VmHWM") - before}


def main() -> None:
    """Measure all sizes and models, or, in a separate process, one of them."""
    if len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
        return
    lengths = [length for length in LENGTHS if len(sys.argv) < 3 or length <= int(sys.argv[2])]
    rows = []
    for length in lengths:
        found = {
            way: run_alone("benchmarks.training_memory", "-", way, str(length))["peak_bytes"] for way in ("peer", *OURS)
        }
        row = {"length": length, "peak_bytes": found}
        rows.append(row | {"ratio": {way: found["peer"] / found[way] for way in OURS}})
        print(
            f"T = M = {length}: " + ", ".join(f"{way} {size / 2**20:,.0f} MiB" for way, size in found.items()),
            flush=True,
        )
    shape = {"shape": "enwik8-12L's widths", "n_layer": LAYERS, "batch_size": LANES, "vocabulary": VOCABULARY}
    command = "python -m benchmarks.training_memory results/training-memory.json"
    write(Path(sys.argv[1]), command, {"peer": "transformers 4.37.2, float32"} | shape | {"rows": rows})


if __name__ == "__main__":
    main()
