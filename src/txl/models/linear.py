"""A linear layer that reads its weights at the speed of memory when it has a single row to multiply."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl.models.cross_entropy import at_least_float32
from txl.native.steps import few_rows


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
