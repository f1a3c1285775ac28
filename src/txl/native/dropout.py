"""Dropout in the compiled library: on all cores, and with only a seed kept for the backward pass.

The mask is drawn from the seed and the index of each number (Philox); PyTorch's generator draws the seed. PyTorch's own
dropout keeps a mask of the input's size. On processors not made by Intel it also draws all numbers on one core.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from txl.native.tensors import Count, call


def compiled_dropout(values: Tensor, rate: float) -> Tensor:
    """Set numbers to 0 with probability `rate`, and multiply the others by 1/(1-rate).

    Args:
        values: numbers in float32 or bfloat16, on a CPU.
        rate: probability of a drop, at least 0 and below 1.

    Returns:
        Numbers of the shape and dtype of `values`, with derivatives of any order.

    Raises:
        KeyError: for any other dtype.
        RuntimeError: if the library is not available. `why_not_training` detects both errors beforehand.
    """
    return _dropout(values, torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"), rate)


@torch.library.custom_op("txl::dropout", mutates_args=(), device_types="cpu")
def _dropout(values: Tensor, seed: Tensor, rate: float) -> Tensor:
    """Drop numbers by a seed; applied to a gradient, it is also the backward pass, as it drops the same numbers."""
    given = values.contiguous()
    out = torch.empty_like(given)
    numbers = Count(given.numel()), ctypes.c_double(rate), ctypes.c_uint64(int(seed))
    call("txl_dropout", values.dtype, given, out, *numbers)
    return out


@_dropout.register_fake
def _(values: Tensor, seed: Tensor, rate: float) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _keep(ctx, inputs, output) -> None:
    _, seed, ctx.rate = inputs
    ctx.save_for_backward(seed)


def _gradient(ctx, above: Tensor) -> tuple[Tensor, None, None]:
    [seed] = ctx.saved_tensors
    return _dropout(above, seed, ctx.rate), None, None


_dropout.register_autograd(_gradient, setup_context=_keep)
