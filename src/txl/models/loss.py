"""Losses in nats: the cross-entropy of a linear layer over many classes, and which targets of a segment count.

Shapes: N rows, E features, V classes; B lanes, T tokens of a segment.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from txl.config import LossName, validate_temperature
from txl.native.operations import compiled_cross_entropy, linear, losses_and_sums, serves, write_gradient
from txl.native.tensors import transforms_are_active

# Number of rows for the targets of each tail cluster of an adaptive softmax.
TailRows = tuple[int, ...]
# Largest number of logits that exist at a time: 128 MiB in float32 on a CPU, and on a GPU 1 GiB in bfloat16.
MAX_LOGITS = 1 << 25
MAX_LOGITS_CUDA = 1 << 29
# `ignore_index` that is no class (PyTorch's default silently gives target -100 a loss of 0).
_NEVER = -(2**62)


@dataclass(frozen=True)
class Objective:
    """Arguments of a training step: positions of a segment whose loss counts, progress of training, and sizes."""

    loss: LossName = "full"  # positions that count: all, the more recent half (Section 4.2, Table 6), or the last
    progress: float = 0.0  # fraction of all updates already made, 0 to 1, for schedules of auxiliary losses
    tail_rows: TailRows | None = None
    """Rows to reserve for the targets of each tail cluster, at least as many as targets there; None: the model counts
    the targets, which waits for the device."""
    lengths: tuple[int, ...] | None = None
    """Lengths of the consecutive segments that the tokens consist of; gradients flow through the memory from each
    segment to the one before (`train.backprop_segments`). None: one segment."""

    def counted(self, n_position: int) -> int:
        """Return the number of most recent positions that count; half of an odd number is rounded up."""
        return {"full": n_position, "half": n_position - n_position // 2, "last": 1}[self.loss]


# Full loss, at the beginning of training.
EVERY_TARGET = Objective()


def nll_at_temperature(
    log_probs: Float[Tensor, "B T V"], targets: Int64[Tensor, "B T"], temperature: float
) -> Float[Tensor, "B T"]:
    """Return -log p of each target after every p is replaced by p^(1/temperature), normalised."""
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
    """Return -log softmax(hidden W^T + b)[target], row by row, in float32 also under autocast (float64 for float64).

    Up to `max_logits` logits are computed at once, by PyTorch's linear layer. The cross-entropy is then computed on a
    CPU by the compiled library, which reads the logits in their own dtype, on a GPU by kernels that do the same
    (`fused_dtype`), and elsewhere by PyTorch. More logits are computed in chunks of rows, discarded at once and
    computed again in the backward pass: this keeps memory constant for one more matrix product. Chunks and kernels have
    no second derivatives; within transforms of `torch.func` there are none of either.

    Args:
        max_logits: largest number of logits that exist at a time (at least one row); None: that of the device.
        compiled: False leaves losses with gradients on a CPU to PyTorch, so that a run does not depend on the library.
    """
    if max_logits is None:
        max_logits = MAX_LOGITS_CUDA if hidden.is_cuda else MAX_LOGITS
    if (dtype := fused_dtype(hidden, weight, bias)) is not None:
        from txl.models.loss_kernels import Cluster, Slice, fused_cross_entropies

        classes = (Slice(0, 0, len(weight)),), (Slice(1, 0, len(bias)),)
        return fused_cross_entropies([Cluster(hidden, targets, *classes)], [weight, bias], dtype, max_logits)[0]
    compiled = compiled or not torch.is_grad_enabled()
    if hidden.shape[0] * weight.shape[0] <= max_logits or transforms_are_active():
        logits = linear(hidden, weight, bias, few=False)
        losses = compiled_cross_entropy(logits, targets) if compiled else None
        return _pytorch_s(at_least_float32(logits), targets) if losses is None else losses
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(low), weight.to(low)
    with torch.autocast(device, enabled=False):
        rows = max(1, max_logits // weight.shape[0])
        return _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, rows, compiled)  # pyright: ignore[reportReturnType]


def fused_dtype(hidden: Tensor, *parameters: Tensor) -> torch.dtype | None:
    """Return the dtype of the products if `txl.models.loss_kernels` computes a loss, else None.

    It does on NVIDIA GPUs with Triton in float32, bfloat16 and float16, but not within transforms of `torch.func` and
    while `torch.compile` traces.
    """
    plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in (hidden, *parameters))
    if not (hidden.is_cuda and plain) or torch.compiler.is_compiling() or transforms_are_active():
        return None
    dtype = hidden.dtype
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
    elif any(parameter.dtype != dtype for parameter in parameters):
        return None  # PyTorch refuses such products
    known = dtype in (torch.float32, torch.bfloat16, torch.float16)
    return dtype if known and _has_kernels(hidden.device) else None


@functools.cache  # the hardware does not change
def _has_kernels(device: torch.device) -> bool:
    if importlib.util.find_spec("triton") is None or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (7, 5)  # as Triton requires


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of `rows` rows at a time; keeps two numbers per row: max(x) and log sum exp(x - max(x))."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, rows: int, compiled: bool
    ) -> Tensor:
        parts = []
        for part, target in zip(hidden.split(rows), targets.split(rows), strict=True):
            logits = _logits(part, weight, bias)
            if compiled and type(logits) is Tensor and serves(logits, target):
                parts.append(losses_and_sums(logits, target))
                del logits  # before those of the next chunk exist
                continue
            loss, greatest = _pytorch_s(logits, target), logits.amax(dim=1)
            rest = loss + (logits.gather(1, target[:, None]).squeeze(1) - greatest)
            parts.append((loss, torch.stack([greatest, rest], dim=1)))
            del logits
        losses, sums = (torch.cat(kind) for kind in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, sums)
        ctx.rows, ctx.compiled = rows, compiled
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden, weight, bias, targets, sums = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)  # d loss / d hidden = (softmax - onehot) W, chunk by chunk
        # Sums over chunks are kept in the precision of the loss.
        grad_weight = torch.zeros_like(weight, dtype=sums.dtype)
        grad_bias = torch.zeros_like(bias, dtype=sums.dtype)
        parts = (tensor.split(ctx.rows) for tensor in (hidden, targets, sums, grads[0], grad_hidden))
        for part, target, of_rows, above, grad_part in zip(*parts, strict=True):
            logits = _logits(part, weight, bias)  # (softmax - onehot) times the gradient of the loss is written over it
            if ctx.compiled and type(logits) is Tensor and serves(logits, target):
                write_gradient(logits, target, of_rows, above, out=logits)
            else:
                logits.sub_(of_rows[:, :1]).sub_(of_rows[:, 1:]).exp_()
                logits.scatter_add_(1, target[:, None], -torch.ones_like(logits[:, :1])).mul_(above[:, None])
            grad_bias += logits.sum(dim=0)
            grad_logits = logits.to(weight.dtype)
            del logits
            grad_part.copy_(linear(grad_logits, weight.t(), few=False))
            if weight.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad_logits.t(), part)
            else:
                grad_weight += grad_logits.t() @ part
            del grad_logits  # before the logits of the next chunk exist
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias.to(bias.dtype), None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return at_least_float32(linear(hidden, weight, few=False)).add_(bias)


def _pytorch_s(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=_NEVER)


def at_least_float32(logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Convert to float32; float64 stays float64."""
    return logits if logits.dtype == torch.float64 else logits.float()
