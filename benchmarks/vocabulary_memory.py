"""Measure peak memory of a training step on WikiText-103's vocabulary, for each way to compute cross-entropy.

    python -m benchmarks.vocabulary_memory results/vocabulary-memory.json

Each way runs in a separate process, with the attention that is fastest on this machine. The result is the peak memory
of the process, less the memory held when the model had been built.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from txl.models import loss as losses
from txl.models.transformer_xl import TransformerXL
from txl.presets import preset
from txl_lab.records import measure_and_record, process_bytes, run_alone
from txl_lab.speed import transformer_xl_of
from txl_lab.speed.budget import ranked_tokens

VOCABULARY = 267_735
LANES, SEGMENT = 16, 128
WAYS = {
    "plain softmax, all logits at once": {"cutoffs": (), "chunked": False},
    "plain softmax, in chunks": {"cutoffs": (), "chunked": True},
    "adaptive softmax, in chunks": {"cutoffs": (20_000, 40_000, 200_000), "chunked": True},
}


def case(name: str) -> dict[str, Any]:
    """Return the peak bytes of one way, less the bytes held before the first step."""
    way = WAYS[name]
    if not way["chunked"]:
        losses.MAX_LOGITS = 2**62
    changed = {"n_layer": 2, "mem_len": SEGMENT, "attention": "fastest"}
    shape = replace(transformer_xl_of(preset("wt103-base")), cutoffs=way["cutoffs"], **changed)
    torch.manual_seed(0)
    model = TransformerXL(shape, VOCABULARY).train()
    tokens = ranked_tokens(VOCABULARY, LANES, SEGMENT + 1)
    before = process_bytes("VmRSS")
    loss, _ = model.training_loss(tokens[:, :-1], tokens[:, 1:], model.init_state(LANES))
    loss.backward()
    peak = process_bytes("VmHWM") - before
    return {"peak_bytes_over_model": peak, "loss": loss.item(), "attention": model.attention_name}


def measure() -> dict[str, Any]:
    """Measure all ways, one after the other."""
    rows = {way: run_alone("vocabulary_memory", way) for way in WAYS}
    settings = {"vocabulary": VOCABULARY, "tokens": LANES * SEGMENT, "shape": "wt103-base with 2 layers"}
    return settings | {"ways": rows}


if __name__ == "__main__":
    measure_and_record("vocabulary_memory", measure, case, keeps_memory=False)
