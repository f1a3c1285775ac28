"""Relative attention in time linear in the number of distances, without a copy for the shift or the mask.

Appendix B of the paper computes the position terms for all distances with one matrix product and then shifts row i of
the result to the left by T-1-i. Here the shift is a change of stride. The product goes into a buffer P [T,W] whose
column c means distance S-1-c; its pitch W = S + 1 leaves one column of padding. Entry (i,j) of the shifted matrix is
P[i, T-1-i+j], which lies at flat offset i*W + T-1-i+j = (T-1) + i*(W-1) + j: a view with row stride W-1 = S.

The entries of P that row i does not use (c < T-1-i) and its padding are set to -inf. Through the view they are just
the keys that causality hides: key j > M+i runs past the end of row i into its padding and on into the unused corner of
row i+1, which is exactly as long as needed. No two entries of the view share a place, so the scores are accumulated
in the same buffer, and in the backward pass the gradient of the scores is written once and read twice: through the
view as the gradient of the content terms, and row by row as the gradient of P.

Shapes: B lanes, T queries, M positions of memory, S = M + T keys, H heads, D width of a head, W = S + 1 pitch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from txl.attention.scope import KeyScope


def shifted_view(buffer: Tensor, n_lane: int, n_query: int) -> Tensor:
    """The shifted view [H*B,T,S] of a buffer [H,B*T,W]."""
    n_head, _, pitch = buffer.shape
    return buffer.as_strided((n_head * n_lane, n_query, pitch - 1), (n_query * pitch, pitch - 1, 1), n_query - 1)


def _first_visible_column(n_key: int, window: int | None) -> int:
    """The first column of P whose distance a query may see."""
    return 0 if window is None else max(0, n_key - window)


def masked_scores(query_u: Tensor, query_v: Tensor, key: Tensor, position: Tensor, scope: KeyScope) -> Tensor:
    """Scores of all four terms, -inf where the query does not see the key.

    Args:
        query_u, query_v: (q + u) and (q + v), both times the scale: [H,B,T,D].
        key: [H,B,S,D].
        position: [H,S,D], farthest distance first.
        scope: which keys a query sees.

    Returns:
        The shifted view [H*B,T,S] of a new buffer.
    """
    n_head, n_lane, n_query, d_head = query_u.shape
    n_key = key.shape[2]
    first = _first_visible_column(n_key, scope.window)

    buffer = query_v.new_empty(n_head, n_lane * n_query, n_key + 1)
    flat_query = query_v.reshape(n_head, n_lane * n_query, d_head)
    torch.bmm(flat_query, position[:, first:].transpose(1, 2), out=buffer[:, :, first:n_key])  # terms (b) and (d)
    buffer[:, :, :first] = -math.inf
    buffer[:, :, n_key] = -math.inf
    rows = buffer.view(n_head, n_lane, n_query, n_key + 1)
    unused = n_query - 1 - torch.arange(n_query, device=buffer.device)
    corner = torch.arange(n_query - 1, device=buffer.device) < unused[:, None]
    rows[..., : n_query - 1].masked_fill_(corner, -math.inf)

    scores = shifted_view(buffer, n_lane, n_query)
    if scope.filled is not None:
        by_lane = scores.view(n_head, n_lane, n_query, n_key)
        for lane, filled in enumerate(scope.filled):
            by_lane[:, lane, :, : scope.memory - filled] = -math.inf
    return scores.baddbmm_(query_u.flatten(0, 1), key.flatten(0, 1).transpose(1, 2))  # terms (a) and (c)


class _ShiftedAttention(torch.autograd.Function):
    """Softmax attention over `masked_scores` with its backward written by hand: no scatter, no second score matrix."""

    @staticmethod
    def forward(
        ctx: Any,
        query_u: Tensor,
        query_v: Tensor,
        key: Tensor,
        value: Tensor,
        position: Tensor,
        scope: KeyScope,
        dropout: float,
    ) -> Tensor:
        weights = masked_scores(query_u, query_v, key, position, scope).softmax(dim=-1)
        if dropout > 0:
            # The factor 1/(1-p) is folded into the mask, so forward and backward multiply once.
            keep = torch.empty_like(weights).bernoulli_(1 - dropout).div_(1 - dropout)
            applied = weights * keep
        else:
            keep, applied = None, weights
        output = torch.bmm(applied, value.flatten(0, 1)).view_as(query_u)
        ctx.scope = scope
        ctx.save_for_backward(query_u, query_v, key, value, position, weights, keep, applied)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        query_u, query_v, key, value, position, weights, keep, applied = ctx.saved_tensors
        n_head, n_lane, n_query, d_head = query_u.shape
        n_key = key.shape[2]
        first = _first_visible_column(n_key, ctx.scope.window)
        grad_output = grads[0].reshape(n_head * n_lane, n_query, d_head)

        grad_value = torch.bmm(applied.transpose(1, 2), grad_output).view_as(value)

        # The gradient of the scores, written through the shifted view of a buffer. Hidden keys get zeros (their weight
        # is zero), which fill the padding and the unused corners of rows 1..T-1; the rest is cleared here.
        buffer = weights.new_empty(n_head, n_lane * n_query, n_key + 1)
        blocks = buffer.view(n_head * n_lane, -1)
        blocks[:, : n_query - 1] = 0
        blocks[:, -1] = 0
        grad_scores = shifted_view(buffer, n_lane, n_query)
        grad_weights = torch.bmm(grad_output, value.flatten(0, 1).transpose(1, 2))
        if keep is not None:
            grad_weights.mul_(keep)
        grad_scores.copy_(torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype))

        grad_query_u = torch.bmm(grad_scores, key.flatten(0, 1)).view_as(query_u)
        grad_key = torch.bmm(grad_scores.transpose(1, 2), query_u.flatten(0, 1)).view_as(key)
        flat_query = query_v.reshape(n_head, n_lane * n_query, d_head)
        by_distance = buffer[:, :, first:n_key]
        grad_query_v = torch.bmm(by_distance, position[:, first:]).view_as(query_v)
        grad_position = torch.zeros_like(position)
        torch.bmm(by_distance.transpose(1, 2), flat_query, out=grad_position[:, first:])
        return grad_query_u, grad_query_v, grad_key, grad_value, grad_position, None, None


def _batched(matrices: Tensor) -> Tensor:
    """Matrices [...,S,D] that a batched product reads without a copy of its own.

    As they are, if their rows lie behind one another. Keys and values of a memory's buffers do; those of a training
    step are copied here, once for all their products.
    """
    return matrices if matrices.stride()[-2:] == (matrices.shape[-1], 1) else matrices.contiguous()


def shifted_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    u: Tensor,
    v: Tensor,
    scope: KeyScope,
    dropout: float = 0.0,
) -> Tensor:
    """The same function as `reference_attention`, to which it is tested, in outputs and all gradients.

    Args:
        query: [B,T,H,D].
        key, value: [B,S,H,D], memory first.
        position: [S,H,D], W_kR R_d with the farthest distance first: row S-1-d belongs to distance d.
        u, v: [H,D].
        scope: which keys a query sees.
        dropout: probability with which an attention weight is dropped.

    Returns:
        [B,T,H,D]. Its gradient can be taken once (no second derivatives).
    """
    scale = 1 / math.sqrt(query.shape[-1])
    heads_first = (2, 0, 1, 3)
    with torch.autocast(query.device.type, enabled=False):  # the products below are already in the dtype of the query
        output = _ShiftedAttention.apply(
            ((query + u.to(query.dtype)) * scale).permute(heads_first).contiguous(),
            ((query + v.to(query.dtype)) * scale).permute(heads_first).contiguous(),
            _batched(key.permute(heads_first)),
            _batched(value.permute(heads_first)),
            _batched(position.transpose(0, 1)),
            scope,
            dropout,
        )
    return output.permute(1, 2, 0, 3)  # pyright: ignore[reportOptionalMemberAccess]
