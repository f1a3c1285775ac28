"""Products of a few rows with a matrix in the compiled library: `F.linear` in a decoding step.

Shapes: N rows, I and O inputs and outputs of a linear layer.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from txl.native.build import library
from txl.native.tensors import Count, Pointer, readable

MOST_ROWS = 8
"""Largest number of rows for the library's products; for more rows PyTorch's matrix products are faster."""
WEIGHT_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}
"""Dtypes of weights, with the suffixes of the library's functions for them."""


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the library's sums for weights of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def few_rows(
    rows: Float[Tensor, "*rows I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None
) -> Float[Tensor, "N O"] | None:
    """Compute `F.linear` of a few rows and return it in the dtype of the sums.

    Return None if the library does not support the arguments, or PyTorch is as fast.
    """
    n_out, n_in = weight.shape
    dtype = weight.dtype
    if (
        dtype not in WEIGHT_SUFFIXES
        or rows.shape[-1:] != (n_in,)
        or not 0 < rows.numel() <= MOST_ROWS * n_in
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or rows.dtype not in (dtype, sums_dtype(dtype))
        or not (weight.is_contiguous() or weight.t().is_contiguous())
        or (bias is not None and not (bias.is_contiguous() and bias.dtype == dtype and bias.shape == (n_out,)))
        or not readable(rows, weight, *([] if bias is None else [bias]))
    ):
        return None
    compiled = library()
    if compiled is None:
        return None
    x = rows.reshape(-1, n_in).to(sums_dtype(dtype)).contiguous()
    out = x.new_empty(x.shape[0], n_out)
    getattr(compiled, f"txl_linear_{WEIGHT_SUFFIXES[dtype]}")(
        Pointer(weight.data_ptr()),
        Pointer(bias.data_ptr() if bias is not None else None),
        Count(n_out),
        Count(n_in),
        Pointer(x.data_ptr()),
        Count(x.shape[0]),
        Pointer(out.data_ptr()),
        int(not weight.is_contiguous()),
        torch.get_num_threads(),
    )
    return out
