"""What a configuration costs before it is run: parameters by part, tokens a step, memory.

Letters: N layers, B lanes of one micro-batch, T tokens, M positions of memory, S = M + T keys, E d_model, F d_inner,
A = n_head * d_head, H heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from txl.config import RunConfig
from txl.models import build_model


@dataclass(frozen=True)
class Costs:
    """What training would take."""

    parameters: dict[str, int]
    tokens_per_step: int
    memory_bytes: dict[str, int]

    @property
    def total_parameters(self) -> int:
        """Of all parts."""
        return sum(self.parameters.values())

    @property
    def total_bytes(self) -> int:
        """Of all parts."""
        return sum(self.memory_bytes.values())

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self) | {"total_parameters": self.total_parameters, "total_bytes": self.total_bytes}


def parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Number of parameters of embedding, attention, feed-forward, LayerNorms, the biases u and v, and softmax."""
    parts = {"embedding": 0, "attention": 0, "u and v": 0, "feed-forward": 0, "layer norm": 0, "softmax": 0}
    for name, parameter in model.named_parameters():
        names = name.split(".")
        if names[-1] in ("u", "v"):
            part = "u and v"
        elif "norm" in names:
            part = "layer norm"
        elif "feed_forward" in names:
            part = "feed-forward"
        elif "attention" in names:
            part = "attention"
        else:
            part = names[0] if names[0] in parts else "softmax"
        parts[part] += parameter.numel()
    return {part: count for part, count in parts.items() if count}


def estimate(run: RunConfig, vocab_size: int) -> Costs:
    """Parameters, tokens a step, and memory in bytes while training.

    - weights, gradients: 4 bytes a parameter each; optimiser: 8 (Adam's two moments),
    - memory: the states that are carried, 4 * N * M * E * (all lanes),
    - activations, kept for the backward pass of one micro-batch, with w bytes a number (4, or 2 in bfloat16):
      N * B * [ w * (5*T*A + 2*S*A + H*T*S * (1 + 2 if dropatt) + 2*T*F) + 4 * (5*T*E + S*E) ], and the softmax's
      8 * B * T * V (logits and their gradient in float32; with cutoffs V is the shortlist),
    - scratch: the largest buffers of the attention's backward pass, 3 * w * B*H*T*S.

    Masks and the framework's own needs (about 300 MB) are not counted.
    """
    with torch.device("meta"):
        model = build_model(run.model, vocab_size)
    parameters = parameters_by_part(model)
    total = sum(parameters.values())
    shape, train = run.model, run.train
    lanes, tokens = train.batch_size // train.micro_batches, train.segment
    keys, width = shape.mem_len + tokens, shape.n_head * shape.d_head
    bytes_each = 2 if train.dtype == "bfloat16" else 4
    scores = shape.n_head * tokens * keys
    layer = bytes_each * (
        5 * tokens * width + 2 * keys * width + scores * (3 if shape.dropatt else 1) + 2 * tokens * shape.d_inner
    ) + 4 * (5 * tokens * shape.d_model + keys * shape.d_model)
    head = shape.cutoffs[0] if shape.cutoffs else vocab_size
    return Costs(
        parameters,
        train.batch_size * train.segment,
        {
            "weights": 4 * total,
            "gradients": 4 * total,
            "optimiser": 8 * total,
            "memory": 4 * shape.n_layer * train.batch_size * shape.mem_len * shape.d_model,
            "activations": shape.n_layer * lanes * layer + 8 * lanes * tokens * head,
            "scratch": 3 * bytes_each * lanes * scores,
        },
    )
