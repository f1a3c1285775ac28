"""Measure the distance over which a trained model's prediction depends on earlier tokens, layer by layer.

    python -m benchmarks.reach results/memory-reach.json RUN

With an exact window of W keys, every layer sees W - 1 positions back, so that N layers see N (W - 1). The script
computes the gradient of a target's log-probability with respect to every layer's input at every earlier position.
Memory carries no gradient; the text is therefore read as one segment, which gives the numbers of reading in segments if
the window is exact.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import txl
from txl.models.transformer_xl import TransformerXL
from txl.runs.corpus import open_run_corpus
from txl.runs.directory import RunDirectory
from txl_lab.records import write

# Keys that a query attends to; length of the segments in the figure; positions read beyond the reach; targets
WINDOW, SEGMENT, BEYOND, TARGETS = 64, 64, 20, 24


def gradients(model: TransformerXL, tokens: Tensor, target: int, window: int) -> Tensor:
    """Return the norm of d log p(target) / d h^n at each position, [N,T], for layers' inputs h^0 ... h^(N-1)."""
    inputs: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0].requires_grad_()))
        for layer in model.layers
    ]
    try:
        log_probs, _ = model.log_probs(tokens[None], model.init_state(1, mem_len=window - 1, window=window))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([each[0].norm(dim=-1) for each in torch.autograd.grad(log_probs[0, -1, target], inputs)])


def measure(model: TransformerXL, tokens: Tensor, window: int = WINDOW, targets: int = TARGETS) -> dict[str, Any]:
    n_layer = model.config.n_layer
    length = n_layer * (window - 1) + 1 + BEYOND
    model = model.eval()
    starts = torch.linspace(0, len(tokens) - length - 1, targets).long().tolist()
    mean = sum(
        (gradients(model, tokens[at : at + length], int(tokens[at + length]), window) for at in starts),
        start=torch.zeros(n_layer, length, dtype=torch.float64),
    )
    mean = (mean / mean.max(dim=1, keepdim=True).values).flip(1)
    return {
        "window": window,
        "segment": SEGMENT,
        "targets": targets,
        "farthest": [int(row.nonzero().max()) for row in mean],
        "relative": [[float(f"{value:.2e}") for value in row] for row in mean.tolist()],
    }


def main(out: str, run: str) -> None:
    model, vocabulary = txl.load(run)
    directory = RunDirectory(Path(run))
    corpus = open_run_corpus(directory, vocabulary, {}, quiet=True)
    tokens = torch.as_tensor(corpus.tokens("valid")[:].astype("int64"))
    start = next(event for event in directory.events() if event["event"] == "start")
    measured = measure(cast(TransformerXL, model), tokens)
    text = start["corpus"]["splits"]["train"]["sha256_text"]
    about = {"command": ["txl", *start["command"][1:]], "training_text_sha256": text, "model": start["config"]["model"]}
    write(Path(out), f"python -m benchmarks.reach {out} RUN", measured | {"run": about})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.reach FILE RUN")
    main(*sys.argv[1:])
