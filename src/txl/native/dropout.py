"""Dropout by the compiled library: on all cores, and with nothing kept for the backward pass but a seed.

What is dropped is drawn from the seed and each number's place (Philox); the seed comes from PyTorch's generator. On
processors that are not Intel's, PyTorch's own dropout draws one number after another on one core; everywhere it keeps a
mask of the input's size.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from txl.native.tensors import Count, call


def compiled_dropout(values: Tensor, rate: float) -> Tensor:
    """Set numbers to 0 with probability `rate`, and multiply the others by 1/(1-rate).

    Args:
        values: float32 or bfloat16, on a CPU.
        rate: at least 0, below 1.

    Returns:
        Numbers of the same shape and dtype; gradients go through them, of any order.

    Raises:
        KeyError: for another dtype.
        RuntimeError: if there is no library. `why_not_training` says both beforehand.
    """
    return _dropout(values, torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"), rate)


@torch.library.custom_op("txl::dropout", mutates_args=(), device_types="cpu")
def _dropout(values: Tensor, seed: Tensor, rate: float) -> Tensor:
    """Drop what a seed says; the same of a gradient as of what it is the gradient of."""
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
