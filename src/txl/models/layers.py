"""A linear layer that reads its weights at the speed of memory when it has a single row to multiply.

Dropout of hidden states: ordinary, or with one mask for all positions of a segment.

Shapes: L positions, E features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl.models.compiled_step import few_rows
from txl.models.cross_entropy import at_least_float32


class Linear(nn.Linear):
    """`nn.Linear`, parameter for parameter; faster for the one row of a decoding step."""

    def forward(self, input: Tensor) -> Tensor:
        """[...,I] -> [...,O]."""
        return linear(input, self.weight, self.bias)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: [...,I], [O,I], [O] -> [...,O].

    A few rows on a CPU are bound by reading the weights, which the compiled library does at the speed of memory.
    Without it, PyTorch's matrix-vector kernels reach about half the rate of its batched ones for one row of float32:
    the weights go in as a batch of two halves.
    """
    few = few_rows(rows, weight, bias)
    if few is not None:
        return few.to(rows.dtype).view(*rows.shape[:-1], -1)
    n_out, n_in = weight.shape
    if (
        rows.numel() == n_in
        and n_out % 2 == 0
        and rows.dtype == weight.dtype == torch.float32
        and rows.device.type == "cpu"
        and weight.is_contiguous()
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    ):
        halves = weight.view(2, n_out // 2, n_in).transpose(1, 2)
        product = torch.bmm(rows.reshape(1, 1, n_in).expand(2, 1, n_in), halves).view(*rows.shape[:-1], n_out)
        return product if bias is None else product.add_(bias)
    return F.linear(rows, weight, bias)


def logits(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`linear` in float32, or float64 for a float64 model: [N,I], [V,I], [V] -> [N,V]."""
    few = few_rows(rows, weight, bias)
    return few if few is not None else at_least_float32(linear(rows, weight, bias))


class LockedDropout(nn.Module):
    """Dropout that keeps its mask along the positions: [..., L, E] times a mask [..., 1, E].

    Also called variational dropout (Gal and Ghahramani 2016, Section 4; "locked" in AWD-LSTM, Merity et al. 2017).
    Every lane has a mask of its own. What is kept is scaled by 1/(1-p), so the expectation stays.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, hidden: Tensor) -> Tensor:
        """The same shape; the input itself outside of training."""
        if not self.training or self.p == 0:
            return hidden
        ones = hidden.new_ones(*hidden.shape[:-2], 1, hidden.shape[-1])
        return hidden * F.dropout(ones, self.p)

    def extra_repr(self) -> str:
        """The rate, for printing."""
        return f"p={self.p}"


def make_dropout(p: float, locked: bool) -> nn.Module:
    """Locked or ordinary dropout of rate `p`."""
    return LockedDropout(p) if locked else nn.Dropout(p)


def word_mask(vocab_size: int, p: float, device: torch.device) -> Tensor:
    """What each token's embedding is multiplied with for one step: 0 with probability `p`, else 1/(1-p): float32 [V].

    A token that is dropped is dropped wherever it stands (Gal and Ghahramani 2016, Section 4.2; Merity et al. 2017,
    Section 4.3).
    """
    return F.dropout(torch.ones(vocab_size, device=device), p)
