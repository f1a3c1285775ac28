"""Measure peak memory of a training step on WikiText-103's vocabulary, for each way to compute cross-entropy.

    python -m benchmarks.vocabulary_memory results/vocabulary-memory.json

Each way runs in a separate process, with the attention that is fastest on this machine. The result is the peak memory
of the process, less the memory held when the model had been built.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.process import run_alone, status
from benchmarks.record import write

from txl.models import cross_entropy
from txl.models.transformer_xl import TransformerXL
from txl.presets import preset
from txl_lab.speed import transformer_xl_of

VOCABULARY = 267_735
LANES, SEGMENT = 16, 128
WAYS = {
    "plain softmax, all logits at once": {"cutoffs": (), "chunked": False},
    "plain softmax, in chunks": {"cutoffs": (), "chunked": True},
    "adaptive softmax, in chunks": {"cutoffs": (20_000, 40_000, 200_000), "chunked": True},
}


def measure(way: dict[str, Any]) -> dict[str, Any]:
    """Return the peak bytes of one way, less the bytes held before the first step."""
    if not way["chunked"]:
        cross_entropy.MAX_LOGITS = 2**62
    changed = {"n_layer": 2, "mem_len": SEGMENT, "attention": "fastest"}
    shape = replace(transformer_xl_of(preset("wt103-base")), cutoffs=way["cutoffs"], **changed)
    torch.manual_seed(0)
    model = TransformerXL(shape, VOCABULARY).train()
    # Token ranks are distributed roughly as in natural text (Zipf).
    ranks = torch.rand(LANES, SEGMENT + 1, dtype=torch.float64).mul(torch.tensor(float(VOCABULARY)).log()).exp()
    tokens = ranks.long().clamp(max=VOCABULARY) - 1
    before = status("VmRSS")
    loss, _ = model.training_loss(tokens[:, :-1], tokens[:, 1:], model.init_state(LANES))
    loss.backward()
    peak = status("VmHWM") - before
    return {"peak_bytes_over_model": peak, "loss": loss.item(), "attention": model.attention_name}


def main() -> None:
    """Measure all ways, one after the other."""
    if len(sys.argv) == 3:
        print(json.dumps(measure(WAYS[sys.argv[2]])))
        return
    rows = {}
    for way in WAYS:
        rows[way] = run_alone("benchmarks.vocabulary_memory", "-", way)
    settings = {"vocabulary": VOCABULARY, "tokens": LANES * SEGMENT, "shape": "wt103-base with 2 layers"}
    write(Path(sys.argv[1]), f"python -m benchmarks.vocabulary_memory {sys.argv[1]}", settings | {"ways": rows})


if __name__ == "__main__":
    main()
