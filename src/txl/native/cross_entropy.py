"""Cross-entropy of logits in the compiled library: no float32 copy of the logits, no table of log-probabilities.

The forward pass keeps the logits and two numbers per row for the backward pass.

Shapes: N rows, V classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from txl.native.build import library
from txl.native.tensors import Count, call, computes


def serves(logits: Tensor, targets: Tensor) -> bool:
    """Return whether the library computes these losses: `computes` is true, and the targets match the logits."""
    return (
        targets.dtype == torch.int64
        and targets.device == logits.device
        and targets.shape == logits.shape[:1]
        and type(targets) is Tensor
        and computes(logits)
    )


def compiled_cross_entropy(logits: Float[Tensor, "N V"], targets: Tensor) -> Float32[Tensor, " N"] | None:
    """Return -log softmax(logits)[target], row by row, in nats; None if `serves` is false.

    Raises:
        IndexError: if a target is not a class.
    """
    return _losses(logits, targets)[0] if serves(logits, targets) else None


def losses_and_sums(
    logits: Float[Tensor, "N V"], targets: Int64[Tensor, " N"]
) -> tuple[Float32[Tensor, " N"], Float32[Tensor, "N 2"]]:
    """Return the losses, and for each row max(x) and log sum exp(x - max(x)); `serves` must be true.

    Raises:
        IndexError: if a target is not a class.
    """
    n_row, n_class = logits.shape
    if n_row and not 0 <= int(targets.min()) <= int(targets.max()) < n_class:
        raise IndexError(f"targets are {int(targets.min())} to {int(targets.max())}; expected 0 to {n_class - 1}")
    losses = torch.empty(n_row, dtype=torch.float32, device="cpu")
    sums = torch.empty(n_row, 2, dtype=torch.float32, device="cpu")
    call("txl_cross_entropy", logits.dtype, _dense(logits), _dense(targets), Count(n_row), Count(n_class), losses, sums)
    return losses, sums


def write_gradient(
    logits: Float[Tensor, "N V"],
    targets: Int64[Tensor, " N"],
    sums: Float32[Tensor, "N 2"],
    above: Float32[Tensor, " N"],
    out: Float[Tensor, "N V"],
) -> None:
    """Write the gradient with respect to the logits.

    Args:
        logits, targets: arguments of `losses_and_sums`.
        sums: second result of `losses_and_sums`.
        above: gradients with respect to the losses.
        out: contiguous output with the dtype of the logits; contiguous logits may be overwritten.
    """
    n_row, n_class = logits.shape
    rows = Count(n_row), Count(n_class)
    call("txl_cross_entropy_backward", logits.dtype, _dense(logits), _dense(targets), sums, _dense(above), *rows, out)


@torch.library.custom_op("txl::cross_entropy", mutates_args=(), device_types="cpu")
def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return losses_and_sums(logits, targets)


@torch.library.custom_op("txl::cross_entropy_backward", mutates_args=(), device_types="cpu")
def _gradient(logits: Tensor, targets: Tensor, sums: Tensor, above: Tensor) -> Tensor:
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    write_gradient(logits, targets, sums, above, out)
    return out


@_losses.register_fake
def _(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    n_row = logits.shape[0]
    return logits.new_empty(n_row, dtype=torch.float32), logits.new_empty(n_row, 2, dtype=torch.float32)


@_gradient.register_fake
def _(logits: Tensor, targets: Tensor, sums: Tensor, above: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _gradients(ctx, above: Tensor, _above_sums: Tensor | None) -> tuple[Tensor, None]:
    logits, targets, sums = ctx.saved_tensors
    if not torch.is_grad_enabled() and library() is not None:
        return _gradient(logits, targets, sums, above), None
    # Second derivatives are required, or the library is not allowed in the backward pass.
    probabilities = logits.softmax(-1, dtype=torch.float32)
    onehot = F.one_hot(targets, logits.shape[1])
    return ((probabilities - onehot) * above[:, None]).to(logits.dtype), None


_losses.register_autograd(_gradients, setup_context=_keep)


def _dense(values: Tensor) -> Tensor:
    return values.resolve_neg().contiguous()
