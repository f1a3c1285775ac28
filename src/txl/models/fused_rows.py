"""The elementwise work and the norms of a Transformer-XL layer on a GPU, forward and backward, one kernel each.

Plain functions of tensors, without autograd, for a hand-written backward pass. Kernels are those of `fused_kernels.py`;
on a CPU they run in Triton's interpreter.

Rows are time-major: N = T B rows, row n belongs to lane n % B. Their widths are padded: columns after the true widths E
and I, and those after the true width D of each of the H heads, are zeros in all results. Tensors are dense unless
something else is said. The dtype of the matrix products, float32 or lower, is called `low`.

Shapes: B lanes, T tokens of a segment, N rows, S keys, E d_model, I d_inner, H heads, D width of a head; W a padded
width, A = H W the padded width of all heads; P programs (`n_program`).
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

# Most programs that compute sums over rows: each of the 132 multiprocessors of an H100 or H200 runs four at a time,
# as the kernels' registers allow; every program writes its sums, so more would write more.
MOST_PROGRAMS = 528


class Tile(NamedTuple):
    """Numbers that a program computes at a time, and Triton's options."""

    rows: int
    columns: int
    warps: int

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of a launch."""
        return {"ROWS": self.rows, "BLOCK": self.columns, "num_warps": self.warps, "enable_fp_fusion": True}


PART = Tile(4, 256, 4)
"""For kernels that need no whole rows: 16 bytes a thread in 16 bits."""
SUMS = Tile(PART.rows, 128, 1)
"""For those of them that sum over rows: one warp, which sums in registers.

Sums over several warps go through shared memory, where eight columns a thread make 32 threads meet in one bank: 2,000
cycles for each sum of a program.
"""


def whole_rows(width: int) -> Tile:
    """Return the tile of kernels that need whole rows: 8 numbers a thread, more rows if they are short."""
    columns = 1 << (width - 1).bit_length()
    return Tile(max(1, 1024 // columns), columns, max(4, columns // 256))


class Counted(NamedTuple):
    """Ordinary dropout whose mask is not kept: the backward pass counts the same numbers again."""

    seed: Int64[Tensor, " 1"]
    """The generator's key, on the device; one for all dropouts of a step."""
    site: int
    """Number of this dropout in the step; others have other masks."""
    p: float


# Locked dropout is a mask [B,>=width] with one row per lane, scaled by 1/(1-p), stride 1 in the last dimension.
Dropped = Tensor | Counted | None


class Norm(NamedTuple):
    """Parameters of a LayerNorm, in float32."""

    gamma: Float[Tensor, " E"]
    beta: Float[Tensor, " E"]
    eps: float


class Normed(NamedTuple):
    """Output of a sub-layer, and what its backward pass reads: the last three."""

    hidden: Float[Tensor, "N W"] | None
    """LayerNorm's output in float32; None with pre-norm."""
    low: Float[Tensor, "N W"] | None
    """The same in the dtype of products; None without a LayerNorm, as are `mean` and `rstd`."""
    sum: Float[Tensor, "N W"]
    """LayerNorm's input z in float32."""
    mean: Float[Tensor, " N"] | None
    rstd: Float[Tensor, " N"] | None

    @property
    def stream(self) -> Float[Tensor, "N W"]:
        """The residual of the next sub-layer."""
        return self.sum if self.hidden is None else self.hidden


class QueryMasks(NamedTuple):
    """Masks of locked dropout, scaled by 1/(1-p), dense."""

    query: Float[Tensor, "B A"]
    key: Float[Tensor, "B A"]
    position: Float[Tensor, " A"]
    value: Float[Tensor, "B A"]


def n_program(n_row: int) -> int:
    """Return the number P of programs that compute sums over rows, for N rows."""
    return min(MOST_PROGRAMS, math.ceil(n_row / PART.rows))


def residual_norm(
    residual: Float[Tensor, "N W"],
    update: Float[Tensor, "N W"] | None,
    bias: Float[Tensor, " E"] | None,
    dropout: Dropped,
    norm: Norm | None,
    d_model: int,
    out_low: Float[Tensor, "N W"] | None = None,
    pre_norm: bool = False,
) -> Normed:
    """Return LN(residual + drop(update + bias)) gamma + beta, normalised over the first `d_model` columns.

    Args:
        residual: in float32.
        update: in the dtype of products; None: zero, and `Normed.sum` is `residual` itself.
        bias: in float32.
        norm: None, with pre-norm: only the sum.
        out_low: where to write `Normed.low`; None: a new tensor.
        pre_norm: whether the sum is the next sub-layer's residual, instead of the LayerNorm's output.
    """
    n_row, width = residual.shape
    gamma, beta, eps = norm or (None, None, 0.0)
    _check(residual, update, out_low, bias, gamma, beta)
    hidden = None if pre_norm else torch.empty_like(residual)
    total = None if update is None else torch.empty_like(residual)
    low = mean = rstd = None
    if norm is not None:
        low = torch.empty_like(residual if update is None else update) if out_low is None else out_low
        mean, rstd = residual.new_empty(n_row), residual.new_empty(n_row)
    tile = whole_rows(width)
    n_tile = math.ceil(n_row / tile.rows)
    _kernels().residual_norm_kernel[(min(2 * MOST_PROGRAMS, n_tile),)](  # no sums, and half of the registers
        residual=residual, update=update, bias=bias, gamma=gamma, beta=beta, hidden=hidden, low=low, total=total,
        mean=mean, rstd=rstd, n_row=n_row, eps=eps, D_MODEL=d_model, WIDTH=width, STAGES=2,
        **_of_dropout(dropout, n_row, width), **tile.arguments,
    )  # fmt: skip
    return Normed(hidden, low, residual if total is None else total, mean, rstd)


def residual_norm_backward(
    grad: Float[Tensor, "N W"] | None,
    grad_low: Float[Tensor, "N W"] | None,
    saved: tuple[Any, ...],
    gamma: Float[Tensor, " E"] | None,
    dropout: Dropped,
    partial: Float[Tensor, "P 3 W"],
    d_model: int,
    grad_update: Float[Tensor, "N W"],
    pre_norm: bool = False,
) -> Float[Tensor, "N W"]:
    """Return the gradient of residual, in float32.

    Args:
        grad, grad_low: gradients of `Normed.stream` and of `Normed.low`; None: zero.
        saved: z, mean and rstd, or the `Normed` that ends with them.
        gamma: None without a LayerNorm.
        dropout, d_model, pre_norm: as given to `residual_norm`.
        partial: output in float32, any strides but 1 in the last dimension: sums over the rows of each program of the
            gradients of gamma, beta and bias. Without a LayerNorm, the first two are zeros.
        grad_update: where to write the gradient of update, in the dtype of products.
    """
    assert (gamma is None) == (grad_low is None) or not pre_norm
    # Without a LayerNorm the gradient of residual is that of the sum, and is not written.
    grad_residual = None if gamma is None else torch.empty_like(saved[-3])
    grads = (None, grad_low, grad) if pre_norm else (grad, grad_low, None)
    _residual_norm_backward(grads, saved, gamma, dropout, partial, d_model, (grad_residual, grad_update))
    if grad_residual is None:
        assert grad is not None
        return grad
    return grad_residual


def norm_sums(
    grad_low: Float[Tensor, "N W"], saved: tuple[Any, ...], gamma: Float[Tensor, " E"], partial: Float[Tensor, "P 3 W"]
) -> None:
    """Write the sums of `residual_norm_backward` alone, for rows that need no gradients."""
    _residual_norm_backward((None, grad_low, None), saved, gamma, None, partial, len(gamma), (None, None))


def _residual_norm_backward(
    grads: tuple[Tensor | None, ...],
    saved: tuple[Any, ...],
    gamma: Tensor | None,
    dropout: Dropped,
    partial: Tensor,
    d_model: int,
    results: tuple[Tensor | None, ...],
) -> None:
    """Launch the kernel, given the gradients of hidden, low and sum, and the gradients of residual and update."""
    total, mean, rstd = saved[-3:]
    n_row, width = total.shape
    _check(total, *grads, mean, rstd, gamma)
    (grad_hidden, grad_low, grad_total), (grad_residual, grad_update) = grads, results
    assert partial.shape[1:] == (3, width)
    _kernels().residual_norm_backward_kernel[(len(partial),)](
        grad_hidden=grad_hidden, grad_low=grad_low, grad_total=grad_total, total=total, mean=mean, rstd=rstd,
        gamma=gamma, grad_residual=grad_residual, grad_update=grad_update, n_row=n_row,
        D_MODEL=d_model, WIDTH=width, STAGES=3,
        **_of_partial(partial), **_of_dropout(dropout, n_row, width), **whole_rows(width).arguments,
    )  # fmt: skip


def relu_bias(inner: Float[Tensor, "N W"], bias: Float[Tensor, " I"], dropout: Dropped) -> Float[Tensor, "N W"]:
    """Return drop(relu(inner + bias)), which replaces `inner` (dtype of products; bias in float32)."""
    n_row, width = inner.shape
    _check(inner, bias)
    _kernels().relu_bias_kernel[_grid(n_row, width, PART)](
        inner=inner, bias=bias, n_row=n_row, D_INNER=len(bias), WIDTH=width,
        **_of_dropout(dropout, n_row, width), **PART.arguments,
    )  # fmt: skip
    return inner


def relu_bias_backward(
    grad: Float[Tensor, "N W"], kept: Float[Tensor, "N W"], factor: float, partial: Float[Tensor, "P W"]
) -> Float[Tensor, "N W"]:
    """Return the gradient of `inner`, which replaces `grad`.

    Args:
        grad: gradient of the result of `relu_bias`.
        kept: this result, positive where neither ReLU nor dropout has put a zero.
        factor: 1/(1-p) of the dropout, 1 without.
        partial: output in float32: sums over the rows of each program of the gradient of the bias.
    """
    n_row, width = grad.shape
    _check(grad, kept)
    assert partial.shape == (n_program(n_row), width)
    _kernels().relu_bias_backward_kernel[_grid(n_row, width, SUMS)](
        grad=grad, kept=kept, **_of_partial(partial), n_row=n_row, factor=factor, WIDTH=width, **SUMS.arguments
    )
    return grad


def queries(
    query: Float[Tensor, "N A"],
    u: Float[Tensor, "H D"],
    v: Float[Tensor, "H D"],
    masks: QueryMasks | None,
    value: Float[Tensor, "S B H W"],
    n_head: int,
) -> tuple[Float[Tensor, "N A"], Float[Tensor, "N A"]]:
    """Return (query m_q + u) m_k and (query m_q + v) m_r, with masks m; multiply `value` by m_v in place.

    Multiplied into the queries, the masks of keys and of positions give the same scores. Without masks: query + u and
    query + v, and `value` stays.

    Args:
        query: in the dtype of products.
        u, v: in float32.
        value: in the dtype of products, any strides but 1 in the last dimension.
    """
    _check(query, u, v, *(masks or ()))
    n_row, width = query.shape
    query_u, query_v = torch.empty_like(query), torch.empty_like(query)
    _kernels().queries_kernel[_grid(n_row, width, PART)](
        query=query, u=u, v=v, value=value, query_u=query_u, query_v=query_v, n_row=n_row,
        **_of_values(value, masks), D_HEAD=u.shape[1], HEAD=width // n_head, WIDTH=width, **PART.arguments,
    )  # fmt: skip
    return query_u, query_v


def queries_backward(
    grad_query_u: Float[Tensor, "N A"],
    grad_query_v: Float[Tensor, "N A"],
    masks: QueryMasks | None,
    grad_value: Float[Tensor, "S B H W"],
    n_head: int,
    partial: Float[Tensor, "P 2 A"],
    grad_query: Float[Tensor, "N A"],
) -> Float[Tensor, "N A"]:
    """Return the gradient of query, m_q (m_k grad_query_u + m_r grad_query_v); multiply `grad_value` by m_v in place.

    Args:
        partial: output in float32: sums over the rows of each program of the gradients of u and v. Columns after the
            true width of a head are zero if those of the given gradients are.
        grad_query: where to write the result.
        others: as in `queries`.
    """
    _check(grad_query_u, grad_query_v, *(masks or ()))
    n_row, width = grad_query_u.shape
    assert partial.shape == (n_program(n_row), 2, width)
    _kernels().queries_backward_kernel[_grid(n_row, width, SUMS)](
        grad_u=grad_query_u, grad_v=grad_query_v, grad_value=grad_value, grad_query=grad_query, n_row=n_row,
        **_of_partial(partial), **_of_values(grad_value, masks), HEAD=width // n_head, WIDTH=width, **SUMS.arguments,
    )  # fmt: skip
    return grad_query


def head_norm(rows: Float[Tensor, "R G H W"], gains: Float[Tensor, "G D"], eps: float) -> Float[Tensor, "R G H W"]:
    """Return the RMSNorm of the first D columns of each head, in a dense tensor.

    Args:
        rows: in the dtype of products, any strides but 1 in the last dimension.
        gains: one for each of G groups of rows, in float32.
    """
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    tile = whole_rows(rows.shape[-1])
    n_program = min(MOST_PROGRAMS, math.ceil(len(rows) * rows.shape[2] / tile.rows))
    _kernels().head_norm_kernel[n_program, rows.shape[1]](
        out=out, **_of_heads(rows, "row"), **_of_norm(rows, gains, eps), **tile.arguments
    )
    return out


def head_norm_backward(
    grad: Float[Tensor, "R G H W"],
    rows: Float[Tensor, "R G H W"],
    gains: Float[Tensor, "G D"],
    eps: float,
    partial: Float[Tensor, "P G W"],
) -> None:
    """Replace the gradient of the result of `head_norm` by that of `rows`.

    Args:
        grad: any strides but 1 in the last dimension.
        rows, gains, eps: as given to `head_norm`.
        partial: output in float32, any strides but 1 in the last dimension: sums over the rows of each of any number of
            programs of the gradients of gains.
    """
    assert partial.shape[1:] == (rows.shape[1], rows.shape[3])
    _kernels().head_norm_backward_kernel[len(partial), rows.shape[1]](
        grad=grad, **_of_heads(rows, "row"), **_of_heads(grad, "grad"), **_of_norm(rows, gains, eps),
        **_of_partial(partial), **whole_rows(rows.shape[-1]).arguments,
    )  # fmt: skip


def _of_heads(rows: Tensor, name: str) -> dict[str, int]:
    """Return the kernels' arguments for the strides of rows [R,G,H,W]."""
    outer, group, head, one = rows.stride()
    assert one == 1
    return {f"{name}_outer": outer, f"{name}_group": group, f"{name}_head": head}


def _of_norm(rows: Tensor, gains: Tensor, eps: float) -> dict[str, Any]:
    _check(gains)
    n_row, _, n_head, width = rows.shape
    sizes = {"n_row": n_row * n_head, "n_head": n_head, "D_HEAD": gains.shape[1], "HEAD": width}
    return {"rows": rows, "gains": gains, "eps": eps, **sizes}


def _kernels() -> ModuleType:
    from txl.models import fused_kernels

    return fused_kernels


def _check(*tensors: Tensor | None) -> None:
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)


def _grid(n_row: int, width: int, tile: Tile) -> tuple[int, int]:
    return n_program(n_row), math.ceil(width / tile.columns)


def _of_dropout(dropout: Dropped, n_row: int, width: int) -> dict[str, Any]:
    """Return the kernels' arguments for a dropout."""
    found = {"mask": None, "seed_at": None, "mask_row": 0, "n_lane": 1, "site": 0, "factor": 1.0}
    constants = {"MASK_WIDTH": 0, "THRESHOLD": 0}
    if isinstance(dropout, Counted):
        found |= {"seed_at": dropout.seed, "site": dropout.site, "factor": 1 / (1 - dropout.p)}
        constants["THRESHOLD"] = round(dropout.p * 2**32)
    elif dropout is not None:
        assert n_row % len(dropout) == 0
        assert dropout.stride(1) == 1
        found |= {"mask": dropout, "mask_row": dropout.stride(0), "n_lane": len(dropout)}
        constants["MASK_WIDTH"] = min(dropout.shape[1], width)
    return found | constants


def _of_partial(partial: Tensor) -> dict[str, Any]:
    """Return the kernels' arguments for sums over the rows of each program."""
    assert partial.stride(-1) == 1
    kind = {"partial_kind": partial.stride(1)} if partial.ndim == 3 else {}
    return {"partial": partial, "partial_program": partial.stride(0), **kind}


def _of_values(value: Tensor, masks: QueryMasks | None) -> dict[str, Any]:
    """Return the kernels' arguments for the masks of attention's operands and for the values."""
    n_key, n_lane, _, _ = value.shape
    row, lane, head, one = value.stride()
    assert one == 1
    fields = (None,) * 4 if masks is None else masks
    of_masks = {f"{name}_mask": mask for name, mask in zip(QueryMasks._fields, fields, strict=True)}
    sizes = {"n_value": n_key * n_lane, "n_lane": n_lane}
    return {**of_masks, "value_row": row, "value_lane": lane, "value_head": head, **sizes}
