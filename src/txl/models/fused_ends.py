"""Both ends of a model's training step on a GPU, one Triton kernel each: look-up with dropout, and regularisers.

They compute what `FamilyModel._embedded` and `FamilyModel._terms` compute with locked dropout, in a tenth of the kernel
launches. The order of every sum depends only on the shape: the same bits in every run.

This module needs Triton; only `txl.models.family` uses it, and imports it at the first call.

Shapes: B lanes, T tokens of a segment, E features, V tokens of the vocabulary. Results are time-major: views [B,T,E] of
tensors [T,B,E].
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_TILE = 4  # rows of a tile
# Most rows that PyTorch's kernel sums without atomic operations, whose order differs from run to run.
_ORDERED = 3072
_FEW = 1024  # tokens of a vocabulary up to which rows are summed by a product with a matrix of zeros and ones
# From this many times as many rows of a table as tokens, gradients of embeddings are summed among themselves first.
_MANY = 16


@triton.jit(do_not_specialize=["n_row", "token_lane", "token_position"])
def look_up_kernel(
    source, out, tokens, words, begins, lanes, n_row, n_lane, n_token, width, scale, word_factor, lane_factor,
    source_lane, source_position, token_lane, token_position,
    LOOKS_UP: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write embeddings times their dropout factors, or gradients of embeddings times the same factors: [T,B,E].

    Args:
        source: pointer to the table [V,E], or with LOOKS_UP False to the gradient [B,T,E] with the strides given.
        tokens: pointer to int64 [B,T], strides `token_lane` and `token_position`.
        words: pointer to float32 [V], 1 if the word is kept, else 0; None: all words are kept.
        begins: pointer to bool [B], lanes whose first word is kept without a factor; None: no lane.
        lanes: pointer to float32 [B,E], 1 where a feature is kept in the lane, else 0; None: everywhere.
    """
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    there = row < n_row
    lane, position = row % n_lane, row // n_lane
    token = tl.load(tokens + lane * token_lane + position * token_position, mask=there, other=0)
    known = (token >= 0) & (token < n_token)  # others become NaN
    if LOOKS_UP:
        first = token * width
    else:
        first = lane.to(tl.int64) * source_lane + position.to(tl.int64) * source_position
    mask = there[:, None] & (column < width)[None, :]
    readable = mask & known[:, None]
    values = (
        tl.load(source + first[:, None] + column[None, :], mask=readable, other=float("nan")).to(tl.float32) * scale
    )
    if words is not None:
        factor = tl.load(words + token, mask=there & known, other=0.0) * word_factor
        if begins is not None:
            spared = tl.load(begins + lane, mask=there, other=0).to(tl.int1) & (position == 0)
            factor = tl.where(spared, 1.0, factor)
        values *= factor[:, None]
    if lanes is not None:
        values *= tl.load(lanes + lane[:, None] * width + column[None, :], mask=mask, other=0.0) * lane_factor
    tl.store(out + row.to(tl.int64)[:, None] * width + column[None, :], values.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_row", "n_position"])
def regularised_kernel(
    hidden, lanes, dropped, partial, n_row, n_lane, n_position, width, hidden_lane, hidden_position,
    lane_factor, activation, temporal,
    OF_DROPPED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the dropped hidden states [T,B,E], and each program's part of the regularisers.

    Args:
        hidden: pointer to [B,T,E] with the strides given.
        lanes: as in `look_up_kernel`.
        partial: pointer to float32, one number for each program.
        activation, temporal: factors of the squared (dropped) states and of the squared steps from the state before.
    """
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    lane, position = row % n_lane, row // n_lane
    mask = (row < n_row)[:, None] & (column < width)[None, :]
    first = lane.to(tl.int64) * hidden_lane + position.to(tl.int64) * hidden_position
    at = hidden + first[:, None] + column[None, :]
    values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    kept = values
    if lanes is not None:
        kept *= tl.load(lanes + lane[:, None] * width + column[None, :], mask=mask, other=0.0) * lane_factor
    tl.store(dropped + row.to(tl.int64)[:, None] * width + column[None, :], kept, mask=mask)
    later = mask & (position > 0)[:, None]
    step = tl.where(later, values - tl.load(at - hidden_position, mask=later, other=0.0).to(tl.float32), 0.0)
    squared = kept if OF_DROPPED else values
    tl.store(partial + tl.program_id(0), tl.sum(squared * squared * activation + step * step * temporal))


@triton.jit(do_not_specialize=["n_row", "n_position"])
def regularised_gradient_kernel(
    hidden, lanes, above, above_penalty, grad, n_row, n_lane, n_position, width, hidden_lane, hidden_position,
    above_lane, above_position, lane_factor, activation, temporal,
    OF_DROPPED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the hidden states, [T,B,E], from those of `regularised_kernel`'s results.

    `above` is a pointer to [B,T,E] with the strides given, `above_penalty` to one float32.
    """
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    lane, position = row % n_lane, row // n_lane
    mask = (row < n_row)[:, None] & (column < width)[None, :]
    first = lane.to(tl.int64) * hidden_lane + position.to(tl.int64) * hidden_position
    at = hidden + first[:, None] + column[None, :]
    values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    later, earlier = mask & (position > 0)[:, None], mask & (position < n_position - 1)[:, None]
    step = tl.where(later, values - tl.load(at - hidden_position, mask=later, other=0.0).to(tl.float32), 0.0)
    step -= tl.where(earlier, tl.load(at + hidden_position, mask=earlier, other=0.0).to(tl.float32) - values, 0.0)
    first = lane.to(tl.int64) * above_lane + position.to(tl.int64) * above_position
    from_above = tl.load(above + first[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if lanes is not None:
        factor = tl.load(lanes + lane[:, None] * width + column[None, :], mask=mask, other=0.0) * lane_factor
        from_above *= factor
        if OF_DROPPED:
            values *= factor * factor
    result = from_above + 2.0 * tl.load(above_penalty) * (activation * values + temporal * step)
    tl.store(grad + row.to(tl.int64)[:, None] * width + column[None, :], result, mask=mask)


class LookUp(NamedTuple):
    """Factors of embeddings in training; masks are 1 where kept and 0 where dropped."""

    scale: float
    words: Tensor | None  # float32 [V], `dropout_words`
    word_factor: float  # 1/(1-p)
    begins: Tensor | None  # bool [B], lanes whose first word is kept
    lanes: Tensor | None  # float32 [B,E], locked dropout of embeddings
    lane_factor: float


def looked_up(table: Tensor, tokens: Tensor, drops: LookUp) -> tuple[Tensor, Tensor]:
    """Return the embeddings [B,T,E] of tokens after their dropouts, and the table for a softmax that shares it.

    Gradients of the second result are those of the table. If both results have gradients, those of the embeddings are
    added in place to the other, which spares three passes over the table. There are no second derivatives.
    """
    with torch.cuda.device_of(table):  # where Triton launches; autograd does the same
        return _LookedUp.apply(table, tokens, drops)  # pyright: ignore[reportReturnType]


class _LookedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor, drops: LookUp) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tokens, drops.words, drops.begins, drops.lanes)
        ctx.drops, ctx.n_token = drops._replace(words=None, begins=None, lanes=None), len(table)
        return _factored(table.contiguous(), tokens, len(table), drops).transpose(0, 1), table.view_as(table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor | None, of_table: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        if above is None:
            return of_table, None, None
        tokens, words, begins, lanes = ctx.saved_tensors
        drops = ctx.drops._replace(words=words, begins=begins, lanes=lanes)
        rows = _factored(_dense(above), tokens, ctx.n_token, drops).flatten(0, 1)
        # The rows of tokens outside of the vocabulary are NaN, and sums would be written outside of the gradient.
        inside = tokens.new_empty(tokens.t().shape)
        tokens = torch.clamp(tokens.t(), 0, ctx.n_token - 1, out=inside).flatten()
        if of_table is None:
            of_table = _sums_of_rows(rows, tokens, ctx.n_token)
        elif ctx.n_token < _MANY * len(tokens):
            of_table = of_table.add_(_sums_of_rows(rows, tokens, ctx.n_token))
        else:
            # Rows of one token are summed at its first place. All other places add zeros, so that the order in which
            # atomic operations add does not matter.
            places = torch.arange(len(tokens), device=tokens.device)
            first = places.new_full((ctx.n_token,), len(tokens)).scatter_reduce_(0, tokens, places, "amin")
            of_table = of_table.index_add_(0, tokens, _sums_of_rows(rows, first[tokens], len(tokens)))
        return of_table, None, None


def _sums_of_rows(rows: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Return [count,E], whose row n is the sum of the rows with the number n, always in the same order."""
    if count <= _FEW and len(numbers) > _ORDERED:
        return (numbers == torch.arange(count, device=numbers.device)[:, None]).to(rows.dtype) @ rows
    parts = zip(rows.split(_ORDERED), numbers.split(_ORDERED), strict=True)
    total, *others = (torch.ops.aten.embedding_dense_backward(*part, count, -1, False) for part in parts)
    for other in others:
        total += other
    return total


def _factored(source: Tensor, tokens: Tensor, n_token: int, drops: LookUp) -> Tensor:
    """Launch `look_up_kernel` with a table or with gradients [B,T,E], and return its result [T,B,E]."""
    looks_up = source.dim() == 2
    (n_lane, n_position), width = tokens.shape, source.shape[-1]
    out = source.new_empty(n_position, n_lane, width)
    strides = (0, 0) if looks_up else source.stride()[:2]
    look_up_kernel[(triton.cdiv(tokens.numel(), _TILE),)](
        source, out, tokens, drops.words, drops.begins, drops.lanes, tokens.numel(), n_lane, n_token, width,
        drops.scale, drops.word_factor, drops.lane_factor, *strides, *tokens.stride(),
        LOOKS_UP=looks_up, TILE=_TILE, BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return out


class Regularisers(NamedTuple):
    """Locked dropout of the last hidden states, and the factors of the regularisers; see `FamilyModel._terms`."""

    lanes: Tensor | None  # float32 [B,E], 1 where kept
    lane_factor: float  # 1/(1-p)
    activation: float  # alpha
    temporal: float  # beta
    of_dropped: bool  # whether the activations are squared after dropout


def regularised(hidden: Tensor, terms: Regularisers) -> tuple[Tensor, Tensor]:
    """Return h^N [B,T,E] after dropout in float32, and the sum of the regularisers; no second derivatives."""
    with torch.cuda.device_of(hidden):
        return _Regularised.apply(hidden, terms)  # pyright: ignore[reportReturnType]


class _Regularised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, terms: Regularisers) -> tuple[Tensor, Tensor]:
        hidden = _dense(hidden)
        ctx.save_for_backward(hidden, terms.lanes)
        n_lane, n_position, width = hidden.shape
        # Means over all numbers, and over all steps.
        activation = terms.activation / hidden.numel()
        temporal = terms.temporal / max(1, hidden.numel() - n_lane * width)
        ctx.terms = terms._replace(lanes=None, activation=activation, temporal=temporal)
        dropped = hidden.new_empty(n_position, n_lane, width, dtype=torch.float32)
        n_program = triton.cdiv(n_lane * n_position, _TILE)
        partial = hidden.new_empty(n_program, dtype=torch.float32)
        regularised_kernel[(n_program,)](
            hidden, terms.lanes, dropped, partial, *_sizes(hidden), *hidden.stride()[:2],
            terms.lane_factor, activation, temporal,
            OF_DROPPED=terms.of_dropped, TILE=_TILE, BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip
        return dropped.transpose(0, 1), partial.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        (hidden, lanes), terms, of_dropped = ctx.saved_tensors, ctx.terms, _dense(above[0])
        n_lane, n_position, width = hidden.shape
        grad = hidden.new_empty(n_position, n_lane, width)
        regularised_gradient_kernel[(triton.cdiv(n_lane * n_position, _TILE),)](
            hidden, lanes, of_dropped, above[1], grad, *_sizes(hidden), *hidden.stride()[:2], *of_dropped.stride()[:2],
            terms.lane_factor, terms.activation, terms.temporal,
            OF_DROPPED=terms.of_dropped, TILE=_TILE, BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip
        return grad.transpose(0, 1), None


def _dense(rows: Tensor) -> Tensor:
    """Return rows whose features follow each other."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _sizes(hidden: Tensor) -> tuple[int, int, int, int]:
    n_lane, n_position, width = hidden.shape
    return n_lane * n_position, n_lane, n_position, width
