"""The element-wise linear recurrence c_t = f_t c_{t-1} + b_t as a parallel scan.

Two levels: the positions are cut into about sqrt(T) chunks of about sqrt(T); all chunks are scanned at once, each from
zero; then what each one hands on; then every chunk gets what came before it. That is 2 sqrt(T) dependent steps on large
tensors instead of T on small ones, for three times the arithmetic, and nothing is divided or taken to a logarithm, so
it is as exact as one position after the other. A CPU, which has no thousands of lanes to fill, takes one chunk.

Shapes: B lanes, T positions, H units.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear_recurrence(decay: Tensor, drive: Tensor, initial: Tensor, chunk: int | None = None) -> Tensor:
    """c_t = f_t c_{t-1} + b_t for all t, element by element; the f*-pooling of Bradbury et al. 2016, Section 2.

    Args:
        decay: f, [B,T,H].
        drive: b, [B,T,H].
        initial: c before the first position, [B,H].
        chunk: positions of a chunk; None: all on a CPU, else about the root of T. It changes speed, not the result.

    Returns:
        c, [B,T,H]; its gradients to all three can be taken once (no second derivatives).
    """
    return _apply(decay, drive, initial, chunk)  # pyright: ignore (PyTorch's decorator loses the arguments' types)


@torch.compiler.disable  # a trace would unroll the positions: a graph for every length
def _apply(decay: Tensor, drive: Tensor, initial: Tensor, chunk: int | None) -> Tensor:
    n_position = decay.shape[1]
    if chunk is None:
        chunk = n_position if decay.device.type == "cpu" else math.isqrt(n_position - 1) + 1
    return _LinearRecurrence.apply(decay, drive, initial, chunk)  # pyright: ignore[reportReturnType]


class _LinearRecurrence(torch.autograd.Function):
    """With f and c kept for the backward pass, which is a recurrence of the same kind, from the last position."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, drive: Tensor, initial: Tensor, chunk: int) -> Tensor:
        states = _scan(decay, drive, initial, chunk)
        ctx.save_for_backward(decay, states, initial)
        ctx.chunk = chunk
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        decay, states, initial = ctx.saved_tensors
        # d/dc_t of everything after t: g_t + f_{t+1} d_{t+1}; the last position has none after it.
        later = F.pad(decay[:, 1:], (0, 0, 0, 1)).flip(1)
        grad = _scan(later, grads[0].flip(1), torch.zeros_like(initial), ctx.chunk).flip(1)
        before = torch.cat([initial[:, None], states[:, :-1]], dim=1)
        return grad * before, grad, grad[:, 0] * decay[:, 0], None


def _scan(decay: Tensor, drive: Tensor, initial: Tensor, chunk: int) -> Tensor:
    n_position = decay.shape[1]
    n_chunk = -(-n_position // chunk)
    if n_chunk == 1:
        return torch.stack(_one_after_the_other(decay, drive, initial), dim=1)
    padding = (0, 0, 0, n_chunk * chunk - n_position)  # whatever stands there comes after all that is asked for
    decays, drives = (F.pad(each, padding).unflatten(1, (n_chunk, chunk)) for each in (decay, drive))
    # Of each chunk: its states from zero, and the products of its decays, by position within the chunk.
    local, product = [drives[:, :, 0]], [decays[:, :, 0]]
    for place in range(1, chunk):
        local.append(torch.addcmul(drives[:, :, place], decays[:, :, place], local[-1]))
        product.append(decays[:, :, place] * product[-1])
    before = [initial, *_one_after_the_other(product[-1][:, :-1], local[-1][:, :-1], initial)]
    states = torch.addcmul(
        torch.stack(local, dim=2), torch.stack(product, dim=2), torch.stack(before, dim=1)[:, :, None]
    )
    return states.flatten(1, 2)[:, :n_position]


def _one_after_the_other(decay: Tensor, drive: Tensor, initial: Tensor) -> list[Tensor]:
    """The states [B,H] of all positions of [B,T,H]."""
    states = []
    for place in range(decay.shape[1]):
        states.append(torch.addcmul(drive[:, place], decay[:, place], states[-1] if states else initial))
    return states
