"""What a configuration costs before it is run: parameters by part, tokens a step, memory.

Letters: N layers, B lanes of one micro-batch, T tokens, M positions of memory that a window leaves in use, S = M + T
keys, E d_model, F d_inner, A = n_head * d_head, H heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from txl.config import RunConfig, has_absolute_positions, has_auxiliary_losses
from txl.models import build_model
from txl.models.cross_entropy import MAX_LOGITS
from txl.models.objective import Objective
from txl.training.estimate_recurrent import recurrent_costs


@dataclass(frozen=True)
class Costs:
    """What training would take."""

    parameters: dict[str, int]
    tokens_per_step: int
    targets_per_step: int
    """Of these tokens' targets, those that have a loss."""
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
    """Number of parameters of the embedding, positions, attention and so on, as far as the model has them."""
    names_of_parts = ("embedding", "positions", "attention", "u and v", "feed-forward", "layer norm")
    names_of_parts += ("recurrent layers", "mixture", "softmax", "auxiliary")
    parts = dict.fromkeys(names_of_parts, 0)
    for name, parameter in model.named_parameters():
        names = name.split(".")
        if names[-1] in ("u", "v"):
            part = "u and v"
        elif names[-1] == "distances":
            part = "positions"
        elif "norm" in names:
            part = "layer norm"
        elif "feed_forward" in names:
            part = "feed-forward"
        elif "attention" in names:
            part = "attention"
        elif "lstm" in names or "convolution" in names:
            part = "recurrent layers"
        else:
            part = names[0] if names[0] in parts else "softmax"
        parts[part] += parameter.numel()
    return {part: count for part, count in parts.items() if count}


def estimate(run: RunConfig, vocab_size: int) -> Costs:
    """Parameters, tokens a step, and bytes of all tensors that live at once while training.

    With f = 4 bytes, w = 4 (2 for bfloat16), P parameters, d = 1 if there is dropout, else 0, and m = d, but 0 for
    locked dropout, whose masks are small:

    - weights f*P (and 2*P for their copies in bfloat16), gradients f*P, optimiser 2*f*P (Adam's two moments), f*P for
      averaged weights,
    - memory: 2 * f*N*(all lanes)*max(M,T)*E, the states that go into a step and those that come out (which keep their
      layer's whole input alive),
    - activations, kept for the backward pass of one micro-batch:
      N*B * [ (f*S + (2*m*w + 2*f + w)*T) * E       the context; two dropout masks, two LayerNorm inputs, one output
              + w * (3*T + 2*S) * A                 q+u, q+v and what attention gives; k and v
              + w * m * (T + 2*S) * A               masks of queries, keys and values, if they have dropout
              + w * H*T*S * (3 if dropatt else 1)   attention probabilities, their mask and the product
              + w * (1 + d + m) * T*F ]             after the ReLU; its dropout mask and the product
      + f*B*T * ((2*m + 2)*E + 3*V)                 embedding; logits, log-probabilities, their gradient
      with auxiliary losses, f*B*T*V more for every classifier; with half or last losses T of the logits is what counts
      where pre-norm adds N*B * (f*S - w*T) * E, with cutoffs V is the shortlist, and 3*B*T*V is 2 *
      `txl.models.cross_entropy.MAX_LOGITS` where B*T*V is above it,
    - scratch, the buffers of a backward pass: w*B * max(3*H*T*S, 2*T*F).

    With K softmaxes 3*B*T*V is K times as much, and f*B*T*K*(2 + 2*m)*E more. The layers of recurrent models are
    counted in `txl.training.estimate_recurrent`.

    Held against measurement in the tests. Not counted: the interpreter and its libraries (0.3 GB), and what the
    allocator loses to fragmentation (on a CPU, where `txl.allocator` lets glibc keep freed memory, 0.1 to 0.8 of the
    total has been seen).
    """
    with torch.device("meta"):
        model = build_model(run.model, vocab_size)
    parameters = parameters_by_part(model)
    total = sum(parameters.values())
    shape, train = run.model, run.train
    carried = shape.mem_len if shape.window is None else min(shape.mem_len, shape.window - 1)
    lanes, n_query, n_key = train.batch_size // train.micro_batches, train.segment, carried + train.segment
    memory = 2 * 4 * shape.n_layer * train.batch_size * max(carried, n_query) * shape.d_model
    full, low = 4, 2 if train.dtype == "bfloat16" else 4
    dropped = 1 if shape.dropout > 0 else 0
    masked = 0 if shape.locked_dropout else dropped
    with_memory = not has_absolute_positions(shape)  # without, the fused attention keeps no probabilities
    scores = shape.n_head * n_query * n_key if with_memory or shape.dropatt > 0 else 0
    layer = (
        (full * n_key + (2 * masked * low + 2 * full + low) * n_query) * shape.d_model
        + low * (3 * n_query + 2 * n_key) * shape.n_head * shape.d_head
        + low * scores * (3 if shape.dropatt > 0 else 1)
        + low * (1 + dropped + masked) * n_query * shape.d_inner
    )
    if shape.dropout_qkv > 0 and not shape.locked_dropout:
        layer += low * (n_query + 2 * n_key) * shape.n_head * shape.d_head
    if shape.pre_norm:  # the LayerNorm before the attention sees memory and segment
        layer += (full * n_key - low * n_query) * shape.d_model
    head = shape.cutoffs[0] if shape.cutoffs else vocab_size
    n_counted = Objective(train.loss).counted(n_query)
    n_logit = 3 * lanes * n_counted * head * shape.n_softmax
    if n_logit > 3 * MAX_LOGITS:  # in chunks; those of the forward pass are gone before the backward's
        n_logit = 2 * max(MAX_LOGITS, head)
    if has_auxiliary_losses(shape):  # log-probabilities of every classifier
        n_head = (shape.n_layer if shape.layer_losses else 1) * shape.n_target - 1
        n_logit += n_head * lanes * n_counted * head
    widths = (1 + (shape.n_softmax if shape.n_softmax > 1 else 0)) * shape.d_model
    ends = full * (lanes * n_query * (2 * masked + 2) * widths + n_logit)
    layers, scratch = shape.n_layer * lanes * layer, low * lanes * max(3 * scores, 2 * n_query * shape.d_inner)
    if shape.kind != "transformer":
        recurrent = recurrent_costs(shape, lanes, train.batch_size, n_query)
        # The softmax is done with before the layers' backward pass begins.
        ends, scratch = ends - full * n_logit, max(full * n_logit, recurrent.scratch)
        layers, memory = recurrent.activations, recurrent.state
    averaged = train.average_from is not None or train.average_patience is not None
    return Costs(
        parameters,
        train.batch_size * n_query,
        train.batch_size * n_counted,
        {
            "weights": (full + (2 if low == 2 else 0)) * total,
            "gradients": full * total,
            "optimiser": 2 * full * total,
            **({"averaged weights": full * total} if averaged else {}),
            **({"memory": memory} if with_memory or shape.kind != "transformer" else {}),
            "activations": layers + ends,
            "scratch": scratch,
        },
    )
