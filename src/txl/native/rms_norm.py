"""RMSNorm in the compiled library: each number is read once and written once; one number per row is kept.

Shapes: D features.
"""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

from txl.native.build import library
from txl.native.tensors import Count, call


def compiled_rms_norm(
    values: Float[Tensor, "*rows D"], gain: Float[Tensor, " D"], epsilon: float
) -> Float[Tensor, "*rows D"]:
    """Return x / sqrt(mean(x^2) + epsilon) * gain for each row x, in the dtype of the values (Zhang and Sennrich 2019).

    Args:
        values: rows in float32 or bfloat16 on a CPU; `computes` returns whether the library supports them.
        gain: gain in any floating-point dtype, converted to float32.
        epsilon: positive number added to the mean square.
    """
    return _normalised(values, gain.float(), epsilon)[0]


@torch.library.custom_op("txl::rms_norm", mutates_args=(), device_types="cpu")
def _normalised(values: Tensor, gain: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    given = values.contiguous()
    out = torch.empty_like(given)
    scales = torch.empty(given.shape[:-1], dtype=torch.float32, device="cpu")
    call("txl_rms_norm", given.dtype, given, gain.contiguous(), *_sizes(given), ctypes.c_double(epsilon), out, scales)
    return out, scales


@torch.library.custom_op("txl::rms_norm_backward", mutates_args=(), device_types="cpu")
def _gradients_of(values: Tensor, gain: Tensor, scales: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    given, out = values.contiguous(), torch.empty(values.shape, dtype=values.dtype, device="cpu")
    gain_gradient = torch.empty(gain.shape, dtype=torch.float32, device="cpu")
    arguments = gain.contiguous(), scales, above.to(values.dtype).contiguous(), *_sizes(given), out, gain_gradient
    call("txl_rms_norm_backward", given.dtype, given, *arguments)
    return out, gain_gradient


@_normalised.register_fake
def _(values: Tensor, gain: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    scales = values.new_empty(values.shape[:-1], dtype=torch.float32)
    return torch.empty_like(values, memory_format=torch.contiguous_format), scales


@_gradients_of.register_fake
def _(values: Tensor, gain: Tensor, scales: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(values, memory_format=torch.contiguous_format), torch.empty_like(gain)


def _keep(ctx, inputs, output) -> None:
    values, gain, ctx.epsilon = inputs
    ctx.save_for_backward(values, gain, output[1])


def _gradients(ctx, above: Tensor, _above_scales: Tensor | None) -> tuple[Tensor, Tensor, None]:
    values, gain, scales = ctx.saved_tensors
    if not torch.is_grad_enabled() and library() is not None:
        return *_gradients_of(values, gain, scales, above), None
    # Second derivatives are required, or the library is not allowed in the backward pass.
    wide, factors = values.float(), above.float()
    scale = (wide.square().mean(-1, keepdim=True) + ctx.epsilon).rsqrt()
    normal, weighted = wide * scale, factors * gain
    gradient = scale * (weighted - normal * (weighted * normal).mean(-1, keepdim=True))
    return gradient.to(values.dtype), (factors * normal).reshape(-1, len(gain)).sum(0), None


_normalised.register_autograd(_gradients, setup_context=_keep)


def _sizes(values: Tensor) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    n = values.shape[-1]
    return Count(values.numel() // n if n else 0), Count(n)
