"""Which tensors the compiled library computes with, and how its functions are called with them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from txl.native.build import library, why_not

Pointer, Count = ctypes.c_void_p, ctypes.c_int64
SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Dtypes of activations, and how the library's functions for them end."""


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


def readable(*tensors: Tensor) -> bool:
    """Return whether these numbers lie where the library may read them, and nobody watches what is done with them.

    False on other devices, for subclasses, for tensors that stand for others (`torch.func`, fake ones), within forward
    derivatives, while `torch.compile` or `torch.jit.trace` looks on, and under a dispatch mode.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
        and all(
            type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu" and not _stands_for_others(each)
            for each in tensors
        )
    )


def _stands_for_others(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def call(
    name: str, dtype: torch.dtype, *arguments: Tensor | ctypes.c_int64 | ctypes.c_uint64 | ctypes.c_double
) -> None:
    """Call the library's function for numbers of a dtype, with the tensors' addresses and the number of threads.

    Raises:
        RuntimeError: if there is no library.
    """
    found = library()
    if found is None:
        raise RuntimeError(f"{name} needs the library that is compiled for this processor ({why_not()})")
    addresses = [Pointer(each.data_ptr()) if isinstance(each, Tensor) else each for each in arguments]
    getattr(found, f"{name}_{SUFFIXES[dtype]}")(*addresses, torch.get_num_threads())
