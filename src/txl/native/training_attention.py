"""Attention with gradients in the compiled library: no matrix of all scores, forward or backward.

The forward pass keeps the operands, the output and two numbers per query for the backward pass. Dropout of an attention
weight is drawn from a seed and the weight's index, so that the backward pass can draw it again; PyTorch's generator
draws the seed. Results are the same to the last bit with any number of threads.

Shapes: B lanes, T queries, S keys of which the last T are the queries' own, H heads, D width of a head.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from txl.native.build import library, why_not
from txl.native.reading_attention import AttentionCall, Rows
from txl.native.tensors import SUFFIXES, Pointer


class _Gradients(ctypes.Structure):
    """`AttentionGradients` in attend_backward.cpp: the arguments of a call."""

    _fields_ = [
        ("of", AttentionCall),
        ("out", Rows),
        ("above", Rows),
        *((name, Pointer) for name in ("query", "key", "value", "position", "u", "v")),
    ]


def training_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor | None,
    u: Tensor | None,
    v: Tensor | None,
    *,
    window: int | None = None,
    filled: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute relative attention (terms (a) to (d)), or plain causal attention if `position`, `u` and `v` are None.

    Args:
        query: queries [B,T,H,D], float32 or bfloat16 on a CPU.
        key, value: keys and values [B,S,H,D], memory first, dtype of the query.
        position: projected positions W_kR R [S,H,D], farthest distance first: row S-1-d belongs to distance d.
        u, v: global biases [H,D].
        window: number of keys that a query sees, its own included; None: no limit.
        filled: int64 [B], number of filled positions among the S - T of memory, which are the newest; None: all.
        dropout: probability with which an attention weight is dropped.

    Returns:
        Attention outputs [B,T,H,D]. There are no second derivatives.

    Raises:
        RuntimeError: if the library is not available; `why_not_training` detects this beforehand.
    """
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu") if dropout > 0 else None
    return _attend(query, key, value, position, u, v, filled, seed, window, dropout)[0]


def why_not_training(device: torch.device | str, dtype: torch.dtype) -> str | None:
    """Return why `training_attention` cannot be used, as a phrase that follows its name; None if it can."""
    if torch.device(device).type != "cpu":
        return f"cannot train on {device}, only on cpu"
    if dtype not in SUFFIXES:
        return f"cannot train in {dtype}; set train.dtype to float32"
    reason = why_not()
    return reason and f"needs the compiled library ({reason})"


@torch.library.custom_op("txl::attention", mutates_args=(), device_types="cpu")
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor | None,
    u: Tensor | None,
    v: Tensor | None,
    filled: Tensor | None,
    seed: Tensor | None,
    window: int | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B,T,H,D], and for each query its greatest score and the sum of exponentials, [B,H,T,2]."""
    dtype = _computed_in(query.dtype)
    operands = _Operands(query, key, value, position, u, v, filled, seed, window, dropout, dtype)
    n_lane, n_query, n_head, _ = query.shape
    out = query.new_empty(query.shape, dtype=dtype)
    sums = query.new_empty(n_lane, n_head, n_query, 2, dtype=torch.float32)
    call = operands.call(sums, out)
    getattr(_library(), f"txl_attend_{SUFFIXES[dtype]}")(ctypes.byref(call), torch.get_num_threads())
    return out.to(query.dtype), sums


@torch.library.custom_op("txl::attention_backward", mutates_args=(), device_types="cpu")
def _attend_backward(
    above: Tensor,
    out: Tensor,
    sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor | None,
    u: Tensor | None,
    v: Tensor | None,
    filled: Tensor | None,
    seed: Tensor | None,
    window: int | None,
    dropout: float,
) -> list[Tensor]:
    """Return the gradients of query, key and value, and of position, u and v if these are given."""
    dtype = _computed_in(query.dtype)
    operands = _Operands(query, key, value, position, u, v, filled, seed, window, dropout, dtype)
    above, out = _dense(above, dtype), _dense(out, dtype)
    given = [each for each in (query, key, value, position, u, v) if each is not None]
    grads = [each.new_empty(each.shape, dtype=torch.float32 if each is u or each is v else dtype) for each in given]
    addresses = [each.data_ptr() for each in grads] + [None] * (6 - len(grads))
    call = _Gradients(operands.call(sums, None), Rows.of(out), Rows.of(above), *addresses)
    getattr(_library(), f"txl_attend_backward_{SUFFIXES[dtype]}")(ctypes.byref(call), torch.get_num_threads())
    return [grad.to(each.dtype) for grad, each in zip(grads, given, strict=True)]


class _Operands:
    """Operands of attention in the dtype of the computation, kept alive while the library reads them."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position: Tensor | None,
        u: Tensor | None,
        v: Tensor | None,
        filled: Tensor | None,
        seed: Tensor | None,
        window: int | None,
        dropout: float,
        dtype: torch.dtype,
    ):
        self.rows = [None if each is None else _dense(each, dtype) for each in (query, key, value, position)]
        self.biases = [None if each is None else each.to(torch.float32).contiguous() for each in (u, v)]
        self.filled = None if filled is None else filled.to("cpu", torch.int64).contiguous()
        self.window = key.shape[1] if window is None else window
        self.dropout, self.seed = dropout, 0 if seed is None else int(seed)

    def call(self, sums: Tensor, out: Tensor | None) -> AttentionCall:
        """Return the arguments for the library: addresses and strides of the operands."""
        query, key = self.rows[:2]
        assert query is not None
        assert key is not None
        n_lane, n_query, n_head, d_head = query.shape
        pointers = (None if each is None else each.data_ptr() for each in (*self.biases, self.filled))
        return AttentionCall(
            *(n_lane, n_query, key.shape[1], n_head, d_head),
            *(Rows() if each is None else Rows.of(each) for each in self.rows),
            *pointers,
            self.window,
            None if out is None else out.data_ptr(),
            sums.data_ptr(),
            self.dropout,
            self.seed,
        )


def _dense(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in a dtype, with stride 1 in the last dimension."""
    rows = rows.to(dtype)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the library's products: float32 instead of bfloat16 if the processor cannot multiply
    bfloat16."""
    if dtype == torch.bfloat16 and not _library().txl_attends_bfloat16():
        return torch.float32
    return dtype


def _library() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise RuntimeError(f"compiled attention needs the compiled library ({why_not()})")
    return found


@_attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor | None,
    u: Tensor | None,
    v: Tensor | None,
    filled: Tensor | None,
    seed: Tensor | None,
    window: int | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    n_lane, n_query, n_head, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(n_lane, n_head, n_query, 2, dtype=torch.float32)


@_attend_backward.register_fake
def _(
    above: Tensor,
    out: Tensor,
    sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor | None,
    u: Tensor | None,
    v: Tensor | None,
    filled: Tensor | None,
    seed: Tensor | None,
    window: int | None,
    dropout: float,
) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in (query, key, value, position, u, v) if each is not None]


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.window, ctx.dropout = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.given = [each is not None for each in tensors[:6]]


def _gradients(ctx, above: Tensor, _above_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    out, sums, *tensors = ctx.saved_tensors
    grads = iter(_attend_backward(above, out, sums, *tensors, ctx.window, ctx.dropout))
    return (*(next(grads) if given else None for given in ctx.given), None, None, None, None)


_attend.register_autograd(_gradients, setup_context=_keep)
