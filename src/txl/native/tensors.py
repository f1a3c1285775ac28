"""Which tensors the compiled library computes with."""

from __future__ import annotations

import torch
from torch import Tensor

from txl.native.build import library
from txl.native.reading_attention import SUFFIXES


def computes(values: Tensor, *parameters: Tensor) -> bool:
    """Return whether the library computes with these numbers, their gradients and those of the parameters too.

    It leaves to PyTorch other devices and dtypes than float32 and bfloat16 on a CPU, tensors that stand for others
    (`torch.func`, fake ones), and what `torch.compile` traces, which makes code of its own.
    """
    return (
        values.device.type == "cpu"
        and values.dtype in SUFFIXES
        and type(values) is Tensor
        and not any(_stands_for_others(each) for each in (values, *parameters))
        and not torch.compiler.is_compiling()
        and library() is not None
    )


def _stands_for_others(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]
