"""Checks of the tensors that the compiled library supports, and calls of its functions with tensors."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from txl.native.build import library, why_not

Pointer, Count = ctypes.c_void_p, ctypes.c_int64
# Dtypes of activations, with the suffixes of the library's functions for them.
SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def computes(values: Tensor, *parameters: Tensor) -> bool:
    """Return whether the library computes with these values, and the gradients of the values and parameters.

    PyTorch computes everything but float32 and bfloat16 on a CPU, wrapped tensors of `torch.func`, and code that
    `torch.compile` traces. Fake tensors, of which the library's operations compute the shapes, count as tensors.
    """
    return (
        values.device.type == "cpu"
        and values.dtype in SUFFIXES
        and type(values) in (Tensor, FakeTensor)
        and not any(_stands_for_others(tensor) for tensor in (values, *parameters))
        and not torch.compiler.is_compiling()
        and library() is not None
    )


def readable(*tensors: Tensor) -> bool:
    """Return whether the library may read the memory of these tensors, without hiding operations from PyTorch.

    False on other devices than the CPU, for subclasses and wrapped tensors, within forward derivatives, while something
    traces, and under a dispatch mode.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
        and all(
            type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and not _stands_for_others(tensor)
            for tensor in tensors
        )
    )


def transforms_are_active() -> bool:
    """Return whether a transform of `torch.func` is active; this project's own backward passes support none."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _stands_for_others(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def needed(name: str) -> ctypes.CDLL:
    """Return the library, or raise `RuntimeError` with the name of what needs it."""
    found = library()
    if found is None:
        raise RuntimeError(f"{name} needs the compiled library ({why_not()})")
    return found


def call(name: str, dtype: torch.dtype, *arguments: Tensor | ctypes.Structure | ctypes._SimpleCData) -> None:
    """Call the library's function for a dtype, with addresses of tensors and structures and the number of threads."""
    function = getattr(needed(name), f"{name}_{SUFFIXES[dtype]}")
    addresses = (
        Pointer(argument.data_ptr())
        if isinstance(argument, Tensor)
        else ctypes.byref(argument)
        if isinstance(argument, ctypes.Structure)
        else argument
        for argument in arguments
    )
    function(*addresses, torch.get_num_threads())
