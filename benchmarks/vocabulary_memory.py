"""Peak memory of a training step on WikiText-103's vocabulary, by how its cross-entropy is computed.

    python -m benchmarks.vocabulary_memory results/vocabulary-memory.json

Each way runs in a process of its own, with the attention that is fastest here. What is told is the most memory it held,
over what it held with the model built.
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

from txl.benchmarking.workloads import transformer_xl_of
from txl.models import cross_entropy
from txl.models.transformer_xl import TransformerXL
from txl.presets import preset

VOCABULARY = 267_735
LANES, SEGMENT = 16, 128
WAYS = {
    "plain softmax, all logits at once": {"cutoffs": (), "chunked": False},
    "plain softmax, in chunks": {"cutoffs": (), "chunked": True},
    "adaptive softmax, in chunks": {"cutoffs": (20_000, 40_000, 200_000), "chunked": True},
}


def measure(way: dict[str, Any]) -> dict[str, Any]:
    """One way: bytes held at most, over those held before the first step."""
    if not way["chunked"]:
        cross_entropy.MAX_LOGITS = 2**62
    changed = {"n_layer": 2, "mem_len": SEGMENT, "attention": "fastest"}
    shape = replace(transformer_xl_of(preset("wt103-base")), cutoffs=way["cutoffs"], **changed)
    torch.manual_seed(0)
    model = TransformerXL(shape, VOCABULARY).train()
    # Ranks as natural text has them, roughly (Zipf).
    ranks = torch.rand(LANES, SEGMENT + 1, dtype=torch.float64).mul(torch.tensor(float(VOCABULARY)).log()).exp()
    tokens = ranks.long().clamp(max=VOCABULARY) - 1
    before = status("VmRSS")
    loss, _ = model.training_loss(tokens[:, :-1], tokens[:, 1:], model.init_state(LANES))
    loss.backward()
    peak = status("VmHWM") - before
    return {"peak_bytes_over_model": peak, "loss": loss.item(), "attention": model.attention_name}


def main() -> None:
    """All ways, one after the other."""
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
