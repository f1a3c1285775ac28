"""Matrix products in float32 by oneDNN, where PyTorch's usual library is slow.

On a CPU PyTorch multiplies float32 matrices with Intel's MKL. On the processor of AMD with AVX-512 that was measured,
oneDNN, which PyTorch contains too, is 1.2 to 2.5 times as fast (decisions, 2026-11-27).

Shapes: N rows, I and O inputs and outputs of a linear layer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from txl.native.build import is_wanted
from txl.native.tensors import readable
from txl.processor import cpu_fields, cpu_flags

LEAST_ROWS = 16
"""Least number of rows, inputs and outputs for oneDNN; it must rearrange a matrix first."""


def linear(
    rows: Float[Tensor, "*rows I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None = None
) -> Float[Tensor, "*rows O"]:
    """Compute `F.linear`, by oneDNN where that is faster; gradients too."""
    if not _serves(rows, weight, bias):
        return F.linear(rows, weight, bias)
    flat = rows.reshape(-1, rows.shape[-1])
    product = _Product.apply(flat, weight, bias) if torch.is_grad_enabled() else _product(flat, weight, bias)
    assert isinstance(product, Tensor)
    return product.view(*rows.shape[:-1], -1)


def _serves(rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether oneDNN computes this product. It reads a bias as if it were contiguous and of the right length."""
    given = [rows, weight] if bias is None else [rows, weight, bias]
    return (
        readable(*given)  # before sizes are compared: a traced comparison would restrict the sizes
        and all(each.dtype == torch.float32 and each.layout == torch.strided for each in given)
        and onednn_is_faster()
        and is_wanted()
        and not torch.is_autocast_enabled("cpu")
        and weight.dim() == 2
        and min(weight.shape) >= LEAST_ROWS
        and rows.shape[-1] == weight.shape[1]
        and rows.numel() >= LEAST_ROWS * weight.shape[1]
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
    )


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether this processor, one of AMD with AVX-512, multiplies float32 faster by oneDNN than by MKL."""
    return (
        cpu_fields().get("vendor_id") == "AuthenticAMD"
        and "avx512f" in cpu_flags()
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # not a public function of PyTorch
    )


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    """rows W^T + b. The gradients are such products too, so they can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        rows, weight = ctx.saved_tensors
        (grad,) = above
        grad = grad.contiguous()  # that of a sum has strides of 0
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        return (
            linear(grad, weight.t()) if of_rows else None,
            linear(grad.t(), rows.t()) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )
