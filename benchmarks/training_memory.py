"""Compare peak memory of a training step with Hugging Face's Transformer-XL, as T and M double.

    PYTHONPATH=src:. .venv-oracle/bin/python -m benchmarks.training_memory results/training-memory.json

The benchmark runs in the environment of `make oracle`. Each size of each model runs in a separate process: first a
small step, which allocates weights and Adam's moments, then a step of the measured size. The result is the peak memory
of the process in this step, less the memory held before. Dropout is 0 for both models, as in the timed training rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch

import txl
from txl.config import AttentionName, RunConfig
from txl.models import build_model
from txl.training.optimisers import build_optimizer
from txl.training.step import StepInputs, training_step
from txl_lab.records import measure_and_record, process_bytes, run_alone

LANES, LAYERS, VOCABULARY = 2, 4, 204
LENGTHS = (64, 128, 256, 512, 1024)  # values of T = M
WARM = 8  # T and M of the small step
# Attention and dtype of our model
OURS: dict[str, tuple[AttentionName, Literal["float32", "bfloat16"]]] = {
    "shifted": ("shifted", "float32"),
    "shifted, bfloat16": ("shifted", "bfloat16"),
    "compiled": ("compiled", "float32"),
    "compiled, bfloat16": ("compiled", "bfloat16"),
}


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


def case(way: str, length: str) -> dict[str, Any]:
    """Measure one size of one model."""
    torch.manual_seed(0)
    step = peer_step(int(length)) if way == "peer" else our_step(way, int(length))
    step(WARM)
    before = process_bytes("VmRSS")
    step(int(length))
    return {"way": way, "length": int(length), "peak_bytes": process_bytes("VmHWM") - before}


def measure(longest: str = "1024") -> dict[str, Any]:
    """Measure all sizes up to the longest, and all models."""
    rows = []
    for length in (length for length in LENGTHS if length <= int(longest)):
        sizes = {way: run_alone("training_memory", way, str(length))["peak_bytes"] for way in ("peer", *OURS)}
        ratio = {way: sizes["peer"] / sizes[way] for way in OURS}
        rows.append({"length": length, "peak_bytes": sizes, "ratio": ratio})
        print(rows[-1], flush=True)
    shape = {"shape": "enwik8-12L's widths", "n_layer": LAYERS, "batch_size": LANES, "vocabulary": VOCABULARY}
    return {"peer": "transformers 4.37.2, float32"} | shape | {"rows": rows}


if __name__ == "__main__":
    measure_and_record("training_memory", measure, case, keeps_memory=False)
