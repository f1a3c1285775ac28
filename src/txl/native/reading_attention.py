"""Attention without gradients in the compiled library.

Shapes: B lanes, T queries, S keys, H heads, D width of a head.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from txl.native.build import library
from txl.native.tensors import SUFFIXES, Count, Pointer, readable

FEWEST_QUERIES = 8
"""Smallest number of queries for which packing keys for the library is faster than PyTorch's products."""


class Rows(ctypes.Structure):
    """`Rows` in attention.h: address and strides of numbers [B,n,H,D]."""

    _fields_ = [("first", Pointer), *((name, Count) for name in ("lane", "row", "head"))]

    @classmethod
    def of(cls, rows: Tensor) -> Rows:
        """Return the address and strides of numbers [B,n,H,D] or [n,H,D], which has a stride of 0 for lanes."""
        lane, row, head = (0, *rows.stride()[:-1])[-3:]
        return cls(rows.data_ptr(), lane, row, head)


class AttentionCall(ctypes.Structure):
    """`Attention` in attention.h: the arguments of a call."""

    _fields_ = [
        *((name, Count) for name in ("lanes", "queries", "keys", "heads", "width")),
        *((name, Rows) for name in ("query", "key", "value", "position")),
        *((name, Pointer) for name in ("u", "v", "filled")),
        ("window", Count),
        ("out", Pointer),
        ("sums", Pointer),
        ("dropout", ctypes.c_double),
        ("seed", ctypes.c_uint64),
    ]


def reading_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor | None,
    u: Tensor | None,
    v: Tensor | None,
    window: int | None = None,
    filled: tuple[int, ...] | None = None,
) -> Tensor | None:
    """Compute `shifted_attention` without gradients; plain attention if `position`, `u` and `v` are None.

    There is no matrix of all scores, so memory is needed only for the outputs.

    Args:
        query: queries [B,T,H,D].
        key, value: keys and values [B,S,H,D], memory first, with any strides between rows.
        position: projected positions W_kR R [S,H,D], farthest distance first.
        u, v: global biases [H,D].
        window: number of keys that a query sees, its own included; None: all up to its own.
        filled: number of filled positions of memory in each lane, which are the newest; None: all.

    Returns:
        Attention outputs [B,T,H,D]. None if the library does not support the call or PyTorch is as fast: with
        gradients, on another device, in another dtype, for few queries, without a C++ compiler, while `torch.compile`
        traces.
    """
    n_lane, n_query, n_head, d_head = query.shape
    numbers = [query, key, value, *([] if position is None else [position])]
    if (
        n_query < FEWEST_QUERIES
        or query.dtype not in SUFFIXES
        or torch.is_grad_enabled()
        or any(each.dtype != query.dtype or each.stride(-1) != 1 for each in numbers)
        or not readable(*numbers, *(each for each in (u, v) if each is not None))
    ):
        return None
    compiled = library()
    if compiled is None or (query.dtype == torch.bfloat16 and not compiled.txl_attends_bfloat16()):
        return None
    biases = [each if each is None else each.detach().to("cpu", torch.float32).contiguous() for each in (u, v)]
    counts = None if filled is None else torch.tensor(filled, device="cpu")
    out = query.new_empty(query.shape)
    attention = AttentionCall(
        n_lane,
        n_query,
        key.shape[1],
        n_head,
        d_head,
        Rows.of(query),
        Rows.of(key),
        Rows.of(value),
        Rows() if position is None else Rows.of(position),
        *(None if each is None else each.data_ptr() for each in (*biases, counts)),
        key.shape[1] if window is None else window,
        out.data_ptr(),
    )
    getattr(compiled, f"txl_attend_{SUFFIXES[query.dtype]}")(ctypes.byref(attention), torch.get_num_threads())
    return out
