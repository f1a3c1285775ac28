"""Cross-entropy of a linear layer over many classes, without the matrix of all logits.

Shapes: N rows, E features, V classes; B lanes, T tokens of a segment.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_LOGITS = 1 << 25
"""Logits that may exist at a time: 128 MiB in float32."""
_NEVER = -(2**62)
"""No class is ignored (PyTorch's default silently gives target -100 a loss of 0)."""


def nll_at_temperature(
    log_probs: Float[Tensor, "B T V"], targets: Int64[Tensor, "B T"], temperature: float
) -> Float[Tensor, "B T"]:
    """Return -log p of each target once every p has become p^(1/temperature), normalised."""
    flattened = (log_probs / temperature).log_softmax(dim=-1)
    return -flattened.gather(-1, targets[..., None]).squeeze(-1)


def linear_cross_entropy(
    hidden: Float[Tensor, "N E"],
    weight: Float[Tensor, "V E"],
    bias: Float[Tensor, " V"],
    targets: Int64[Tensor, " N"],
    max_logits: int | None = None,
) -> Float[Tensor, " N"]:
    """Return -log softmax(hidden W^T + b)[target], row by row, in nats.

    Up to `max_logits` logits this is PyTorch's own linear and cross_entropy. Above, the rows are taken in chunks whose
    logits are thrown away at once and computed again in the backward pass: memory stays constant for one more matrix
    product.

    Args:
        hidden: rows to classify.
        weight, bias: of the linear layer, W and b.
        targets: classes.
        max_logits: logits that may exist at a time (one row at least); None: `MAX_LOGITS`.

    Returns:
        float32 (also under autocast), or float64 for float64. The gradient of the chunked form can be taken once (no
        second derivatives).
    """
    max_logits = MAX_LOGITS if max_logits is None else max_logits
    if hidden.shape[0] * weight.shape[0] <= max_logits:
        return F.cross_entropy(
            at_least_float32(F.linear(hidden, weight, bias)), targets, reduction="none", ignore_index=_NEVER
        )
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(low), weight.to(low)
    with torch.autocast(device, enabled=False):
        rows = max(1, max_logits // weight.shape[0])
        losses = _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, rows)
    return losses  # pyright: ignore[reportReturnType]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of `rows` rows at a time, which keeps only the log of the softmax's sum of a row's logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, rows: int) -> Tensor:
        losses, log_sums = [], []
        for part, target in zip(hidden.split(rows), targets.split(rows), strict=True):
            logits = _logits(part, weight, bias)
            losses.append(F.cross_entropy(logits, target, reduction="none", ignore_index=_NEVER))
            log_sums.append(losses[-1] + logits.gather(1, target[:, None]).squeeze(1))
        ctx.save_for_backward(hidden, weight, bias, targets, torch.cat(log_sums))
        ctx.rows = rows
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden, weight, bias, targets, log_sums = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Sums over chunks are kept in the precision of the loss.
        grad_weight = torch.zeros_like(weight, dtype=log_sums.dtype)
        grad_bias = torch.zeros_like(bias, dtype=log_sums.dtype)
        parts = (each.split(ctx.rows) for each in (hidden, targets, log_sums, grads[0], grad_hidden))
        for part, target, log_sum, grad, grad_part in zip(*parts, strict=True):
            # d loss / d logits = softmax - onehot(target), times the gradient of the loss.
            grad_logits = _logits(part, weight, bias).sub_(log_sum[:, None]).exp_()
            grad_logits.scatter_add_(1, target[:, None], -torch.ones_like(grad_logits[:, :1]))
            grad_logits.mul_(grad[:, None])
            grad_bias += grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(weight.dtype)
            torch.mm(grad_logits, weight, out=grad_part)
            if weight.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad_logits.t(), part)
            else:
                grad_weight += grad_logits.t() @ part
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias.to(bias.dtype), None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return at_least_float32(F.linear(hidden, weight)).add_(bias)


def at_least_float32(logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Convert logits to float32 where autocast computed them in bfloat16; float64 stays."""
    return logits if logits.dtype == torch.float64 else logits.float()
