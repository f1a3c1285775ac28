"""Attention in the compiled library, for reading and for training, without a matrix of all scores.

Operands are query [B,T,H,D], key and value [B,S,H,D], memory first, and for relative attention also position [S,H,D],
W_kR R with the farthest distance first, and the biases u and v [H,D]; without these it is plain causal attention.

For the backward pass the operands, the output and two numbers per query are kept. Dropout of an attention weight is
drawn from a seed, drawn by PyTorch's generator, and the weight's index, so that the backward pass can draw it again.
Results are the same to the last bit with any number of threads.

Shapes: B lanes, T queries, S keys of which the last T are the queries' own, H heads, D width of a head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from txl.native.build import library, why_not
from txl.native.tensors import SUFFIXES, Count, Pointer, call, needed, readable

# Smallest number of queries for which packing keys for the library is faster than PyTorch's products.
FEWEST_QUERIES = 8


class _Rows(ctypes.Structure):
    """`Rows` in attention.h: address and strides of numbers [B,n,H,D], or [n,H,D] with a stride of 0 for lanes."""

    _fields_ = [("first", Pointer), *((name, Count) for name in ("lane", "row", "head"))]

    @classmethod
    def of(cls, rows: Tensor) -> _Rows:
        return cls(rows.data_ptr(), *(0, *rows.stride()[:-1])[-3:])


class _Call(ctypes.Structure):
    """`Attention` in attention.h: the arguments of a call."""

    _fields_ = [
        *((name, Count) for name in ("lanes", "queries", "keys", "heads", "width")),
        *((name, _Rows) for name in ("query", "key", "value", "position")),
        *((name, Pointer) for name in ("u", "v", "filled")),
        ("window", Count),
        ("out", Pointer),
        ("sums", Pointer),
        ("dropout", ctypes.c_double),
        ("seed", ctypes.c_uint64),
    ]


class _Gradients(ctypes.Structure):
    """`AttentionGradients` in attend_backward.cpp: the arguments of a call."""

    _fields_ = [
        ("of", _Call),
        ("out", _Rows),
        ("above", _Rows),
        *((name, Pointer) for name in ("query", "key", "value", "position", "u", "v")),
    ]


class _Operands:
    """Operands in the dtype of the computation, kept alive while the library reads them."""

    def __init__(self, operands: Sequence[Tensor], filled: Tensor | None, window: int | None, dtype: torch.dtype):
        self.rows = [_dense(rows, dtype) for rows in operands[:4]]
        # The library adds u and v to the queries in float32, in every dtype.
        self.biases = [bias.detach().to("cpu", torch.float32).contiguous() for bias in operands[4:]]
        self.filled = None if filled is None else filled.to("cpu", torch.int64).contiguous()
        self.window = operands[1].shape[1] if window is None else window

    def call(self, out: Tensor | None, sums: Tensor | None, seed: Tensor | None = None, dropout: float = 0.0) -> _Call:
        """Return the arguments for the library: addresses and strides of the operands and of the results."""
        query, key = self.rows[:2]
        n_lane, n_query, n_head, d_head = query.shape
        rows = [_Rows.of(operand) for operand in self.rows]
        return _Call(
            *(n_lane, n_query, key.shape[1], n_head, d_head),
            *(rows if len(rows) == 4 else [*rows, _Rows()]),
            *([bias.data_ptr() for bias in self.biases] or (None, None)),
            _address(self.filled),
            self.window,
            _address(out),
            _address(sums),
            dropout,
            0 if seed is None else int(seed),
        )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _dense(rows: Tensor, dtype: torch.dtype) -> Tensor:
    rows = rows.to(dtype)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def reading_attention(
    operands: Sequence[Tensor], window: int | None = None, filled: tuple[int, ...] | None = None
) -> Tensor | None:
    """Compute attention [B,T,H,D] without gradients; memory is needed only for the outputs.

    Window and filled positions are those of `KeyScope`. None if the library does not support the call or PyTorch is as
    fast: with gradients, on another device, in another dtype, for few queries, without a C++ compiler, while
    `torch.compile` traces.
    """
    query = operands[0]
    if (
        query.shape[1] < FEWEST_QUERIES
        or query.dtype not in SUFFIXES
        or torch.is_grad_enabled()
        or any(rows.dtype != query.dtype or rows.stride(-1) != 1 for rows in operands[:4])
        or not readable(*operands)
    ):
        return None
    compiled = library()
    if compiled is None or (query.dtype == torch.bfloat16 and not compiled.txl_attends_bfloat16()):
        return None
    counts = None if filled is None else torch.tensor(filled, device="cpu")
    held, out = _Operands(operands, counts, window, query.dtype), query.new_empty(query.shape)
    call("txl_attend", query.dtype, held.call(out, None))
    return out


def training_attention(
    operands: Sequence[Tensor], *, window: int | None = None, filled: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Compute attention [B,T,H,D] with gradients, but without second derivatives.

    Args:
        operands: float32 or bfloat16 on a CPU; `why_not_training` tells beforehand whether the library has them.
        window, filled: as in `KeyScope`; `filled` is int64 [B].
        dropout: probability with which an attention weight is dropped.
    """
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu") if dropout > 0 else None
    return _attend(list(operands), filled, seed, window, dropout)[0]


def why_not_training(device: torch.device | str, dtype: torch.dtype) -> str | None:
    """Return why `training_attention` cannot be used, as a phrase that follows its name; None if it can."""
    if torch.device(device).type != "cpu":
        return f"cannot train on {device}, only on cpu"
    if dtype not in SUFFIXES:
        return f"cannot train in {dtype}, only in float32 and bfloat16"
    reason = why_not()
    return reason and f"needs the compiled library ({reason})"


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the library's products: float32 for bfloat16 that the processor cannot multiply."""
    return dtype if dtype != torch.bfloat16 or needed("attention").txl_attends_bfloat16() else torch.float32


@torch.library.custom_op("txl::attention", mutates_args=(), device_types="cpu")
def _attend(
    operands: Sequence[Tensor], filled: Tensor | None, seed: Tensor | None, window: int | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """Return outputs [B,T,H,D], and for each query its greatest score and the sum of exponentials, [B,H,T,2]."""
    query, dtype = operands[0], _computed_in(operands[0].dtype)
    n_lane, n_query, n_head, _ = query.shape
    out = query.new_empty(query.shape, dtype=dtype)
    sums = query.new_empty(n_lane, n_head, n_query, 2, dtype=torch.float32)
    held = _Operands(operands, filled, window, dtype)
    call("txl_attend", dtype, held.call(out, sums, seed, dropout))
    return out.to(query.dtype), sums


@torch.library.custom_op("txl::attention_backward", mutates_args=(), device_types="cpu")
def _attend_backward(
    above: Tensor,
    out: Tensor,
    sums: Tensor,
    operands: Sequence[Tensor],
    filled: Tensor | None,
    seed: Tensor | None,
    window: int | None,
    dropout: float,
) -> list[Tensor]:
    """Return the gradients of the operands."""
    dtype = _computed_in(operands[0].dtype)
    held = _Operands(operands, filled, window, dtype)
    above, out = _dense(above, dtype), _dense(out, dtype)
    # The gradients of u and v are sums over all lanes and queries, and stay in float32.
    dtypes = [dtype] * len(held.rows) + [torch.float32] * len(held.biases)
    grads = [of.new_empty(of.shape, dtype=dtype) for of, dtype in zip(operands, dtypes, strict=True)]
    addresses = [grad.data_ptr() for grad in grads]
    arguments = _Gradients(held.call(None, sums, seed, dropout), _Rows.of(out), _Rows.of(above), *addresses)
    call("txl_attend_backward", dtype, arguments)
    return [grad.to(of.dtype) for grad, of in zip(grads, operands, strict=True)]


@_attend.register_fake
def _(operands: Sequence[Tensor], *others: Any) -> tuple[Tensor, Tensor]:
    query = operands[0]
    n_lane, n_query, n_head, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(n_lane, n_head, n_query, 2, dtype=torch.float32)


@_attend_backward.register_fake
def _(above: Tensor, out: Tensor, sums: Tensor, operands: Sequence[Tensor], *others: Any) -> list[Tensor]:
    return [of.new_empty(of.shape) for of in operands]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    operands, filled, seed, ctx.window, ctx.dropout = inputs
    ctx.save_for_backward(*output, filled, seed, *operands)


def _gradients(ctx: Any, above: Tensor, _above_sums: Tensor | None) -> tuple[list[Tensor] | None, ...]:
    out, sums, filled, seed, *operands = ctx.saved_tensors
    return _attend_backward(above, out, sums, operands, filled, seed, ctx.window, ctx.dropout), None, None, None, None


_attend.register_autograd(_gradients, setup_context=_keep)
