"""Cross-entropy of a linear layer over many classes, without a matrix of all logits.

Shapes: N rows, E features, V classes; B lanes, T tokens of a segment.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from txl.config import validate_temperature
from txl.native.operations import compiled_cross_entropy, linear, losses_and_sums, serves, write_gradient
from txl.native.tensors import transforms_are_active

# Largest number of logits that exist at a time: 128 MiB in float32.
MAX_LOGITS = 1 << 25
# `ignore_index` that is no class (PyTorch's default silently gives target -100 a loss of 0).
_NEVER = -(2**62)


def nll_at_temperature(
    log_probs: Float[Tensor, "B T V"], targets: Int64[Tensor, "B T"], temperature: float
) -> Float[Tensor, "B T"]:
    """Return -log p of each target after every p is replaced by p^(1/temperature), normalised.

    Raises:
        UserError: if the temperature is not a number above 0.
    """
    validate_temperature(temperature)
    flattened = (log_probs / temperature).log_softmax(dim=-1)
    return -flattened.gather(-1, targets[..., None]).squeeze(-1)


def linear_cross_entropy(
    hidden: Float[Tensor, "N E"],
    weight: Float[Tensor, "V E"],
    bias: Float[Tensor, " V"],
    targets: Int64[Tensor, " N"],
    max_logits: int | None = None,
    compiled: bool = True,
) -> Float[Tensor, " N"]:
    """Return -log softmax(hidden W^T + b)[target], row by row, in nats.

    Up to `max_logits` logits are computed at once, by PyTorch's linear layer. The cross-entropy is then computed on a
    CPU by the compiled library, which reads the logits in their own dtype, and elsewhere by PyTorch. More logits are
    computed in chunks of rows, discarded at once and computed again in the backward pass: this keeps memory constant
    for one more matrix product.

    Args:
        hidden: rows to classify.
        weight, bias: W and b of the linear layer.
        targets: classes.
        max_logits: largest number of logits that exist at a time (at least one row); None: `MAX_LOGITS`.
        compiled: False leaves losses with gradients to PyTorch, so that a run does not depend on the library.

    Returns:
        Losses in float32 (also under autocast), or float64 for float64 inputs. The chunked form has no second
        derivatives; within transforms of `torch.func` all logits are computed at once.
    """
    max_logits = MAX_LOGITS if max_logits is None else max_logits
    compiled = compiled or not torch.is_grad_enabled()
    if hidden.shape[0] * weight.shape[0] <= max_logits or transforms_are_active():
        logits = linear(hidden, weight, bias, few=False)
        found = compiled_cross_entropy(logits, targets) if compiled else None
        return _pytorch_s(at_least_float32(logits), targets) if found is None else found
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(low), weight.to(low)
    with torch.autocast(device, enabled=False):
        rows = max(1, max_logits // weight.shape[0])
        losses = _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, rows, compiled)
    return losses  # pyright: ignore[reportReturnType]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of `rows` rows at a time; keeps two numbers per row: max(x) and log sum exp(x - max(x))."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, rows: int, compiled: bool
    ) -> Tensor:
        losses, sums = [], []  # the logits of a chunk are discarded at once
        for part, target in zip(hidden.split(rows), targets.split(rows), strict=True):
            loss, of_rows = _losses_and_sums(_logits(part, weight, bias), target, compiled)
            losses.append(loss)
            sums.append(of_rows)
        ctx.save_for_backward(hidden, weight, bias, targets, torch.cat(sums))
        ctx.rows, ctx.compiled = rows, compiled
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden, weight, bias, targets, sums = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)  # d loss / d hidden = (softmax - onehot) W, chunk by chunk
        # Sums over chunks are kept in the precision of the loss.
        grad_weight = torch.zeros_like(weight, dtype=sums.dtype)
        grad_bias = torch.zeros_like(bias, dtype=sums.dtype)
        parts = (tensor.split(ctx.rows) for tensor in (hidden, targets, sums, grads[0], grad_hidden))
        for part, target, of_rows, grad, grad_part in zip(*parts, strict=True):
            grad_logits = _gradient_over(_logits(part, weight, bias), target, of_rows, grad, ctx.compiled)
            grad_bias += grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(weight.dtype)
            grad_part.copy_(linear(grad_logits, weight.t(), few=False))
            if weight.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad_logits.t(), part)
            else:
                grad_weight += grad_logits.t() @ part
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias.to(bias.dtype), None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return at_least_float32(linear(hidden, weight, few=False)).add_(bias)


def _losses_and_sums(logits: Tensor, targets: Tensor, compiled: bool) -> tuple[Tensor, Tensor]:
    if compiled and type(logits) is Tensor and serves(logits, targets):
        return losses_and_sums(logits, targets)
    losses, greatest = _pytorch_s(logits, targets), logits.amax(dim=1)
    return losses, torch.stack([greatest, losses + (logits.gather(1, targets[:, None]).squeeze(1) - greatest)], dim=1)


def _gradient_over(logits: Tensor, targets: Tensor, sums: Tensor, above: Tensor, compiled: bool) -> Tensor:
    """Return (softmax - onehot(target)) times the gradient of the loss, written over the logits."""
    if compiled and type(logits) is Tensor and serves(logits, targets):
        write_gradient(logits, targets, sums, above, out=logits)
        return logits
    gradient = logits.sub_(sums[:, :1]).sub_(sums[:, 1:]).exp_()
    gradient.scatter_add_(1, targets[:, None], -torch.ones_like(gradient[:, :1]))
    return gradient.mul_(above[:, None])


def _pytorch_s(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=_NEVER)


def at_least_float32(logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Convert logits to float32; float64 stays float64."""
    return logits if logits.dtype == torch.float64 else logits.float()
