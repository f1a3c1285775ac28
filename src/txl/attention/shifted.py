"""Relative attention in time linear in the number of distances, without a copy for the shift or the mask.

Appendix B of the paper computes the position terms for all distances with one matrix product and then shifts row i of
the result to the left by T-1-i. Here the shift is a change of stride. The product is written to a buffer P [T,W] of
pitch W = S + 1: column 0 is padding, column c + 1 belongs to distance S-1-c. Entry (i,j) of the shifted matrix is
P[i, T-i+j], at flat offset i*W + T-i+j = T + i*(W-1) + j: a dense view of P with row stride W-1 = S. The entries of P
that row i does not use (columns below T-i) are set to -inf. In the view they are exactly the keys that causality hides
(docs/explanation/attention.md draws it). Entries of the view do not overlap, so the backward pass writes the gradient
of the scores once, through the view, and reads it twice: as that of the content terms, and row by row as that of P.

Shapes: B lanes, T queries, M positions of memory, S = M + T keys, H heads, D width of a head, W = S + 1 pitch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from txl.attention.equations import KeyScope, Operands


def shifted_view(buffer: Float[Tensor, "H BT W"], n_lane: int, n_query: int) -> Float[Tensor, "HB T S"]:
    """Return the shifted view of a buffer of products."""
    n_head, _, pitch = buffer.shape
    return buffer.as_strided((n_head * n_lane, n_query, pitch - 1), (n_query * pitch, pitch - 1, 1), n_query)


def padded_positions(position: Float[Tensor, "S H D"]) -> Float[Tensor, "H W D"]:
    """Return the positions, heads first, with a row of zeros in front."""
    n_key, n_head, d_head = position.shape
    padded = position.new_zeros(n_head, n_key + 1, d_head)  # the padding of Appendix B, once instead of in each row
    padded[:, 1:] = position.transpose(0, 1)
    return padded


def masked_scores(
    query_u: Float[Tensor, "H B T D"],
    query_v: Float[Tensor, "H B T D"],
    key: Float[Tensor, "H B S D"],
    position: Float[Tensor, "H W D"],
    scope: KeyScope,
) -> Float[Tensor, "HB T S"]:
    """Compute A^rel of all queries at once: terms (a) to (d), -inf where the query does not see the key.

    The queries are (q + u) and (q + v) times the scale, `position` is W_kR R after `padded_positions`.
    """
    n_head, n_lane, n_query, _ = query_u.shape
    n_key = key.shape[2]
    query_v = query_v.reshape(n_head, n_lane * n_query, query_v.shape[-1])
    buffer = torch.bmm(query_v, position.transpose(1, 2))  # terms (b) and (d)
    rows = buffer.view(n_head, n_lane, n_query, n_key + 1)
    # Row i uses columns T-i and above; the others become the future keys of the view (the page attention.md draws it).
    column = torch.arange(n_query, device=buffer.device)
    rows[..., :n_query].masked_fill_(column < n_query - column[:, None], -math.inf)
    if scope.window is not None and scope.window < n_key:
        # A window limits the distance, and columns are distances: the far ones are the same for all queries.
        buffer[:, :, : n_key + 1 - scope.window] = -math.inf

    scores = torch.bmm(query_u.flatten(0, 1), key.flatten(0, 1).transpose(1, 2))  # terms (a) and (c)
    scores += shifted_view(buffer, n_lane, n_query)  # column c of row i becomes key c - (T-1-i): no copy
    _hide_unfilled(scores.view(n_head, n_lane, n_query, n_key), scope)
    return scores


def _hide_unfilled(scores: Tensor, scope: KeyScope) -> None:
    """Set scores [H,B,T,S] to -inf at positions of memory that are not filled in a lane."""
    if scope.filled_tensor is not None:
        oldest = scope.oldest()
        assert oldest is not None
        unfilled = torch.arange(scope.memory, device=scores.device) < oldest[:, None]
        scores[..., : scope.memory].masked_fill_(unfilled[:, None], -math.inf)
    elif scope.filled is not None:
        for lane, filled in enumerate(scope.filled):  # a lane that was reset: its oldest positions hold zeros
            scores[:, lane, :, : scope.memory - filled] = -math.inf


class _ShiftedAttention(torch.autograd.Function):
    """Softmax attention over `masked_scores`; its own backward pass avoids a scatter and a second score matrix."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> Tensor:
        query_u, query_v, key, value, position, scope, dropout = operands
        position = padded_positions(position)
        weights = masked_scores(query_u, query_v, key, position, scope)
        torch.softmax(weights, dim=-1, out=weights)  # in place: the scores are not needed again
        keep, applied = None, weights
        if dropout > 0:
            # The mask includes the factor 1/(1-p), so that the forward and backward pass multiply only once.
            keep = torch.bernoulli(weights, 1 - dropout).div_(1 - dropout)  # `weights` gives the shape only
            applied = weights * keep
        output = torch.bmm(applied, value.flatten(0, 1)).view_as(query_u)
        ctx.save_for_backward(query_u, query_v, key, value, position, weights, keep, applied)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        query_u, query_v, key, value, position, weights, keep, applied = ctx.saved_tensors
        n_head, n_lane, n_query, d_head = query_u.shape
        n_key = key.shape[2]
        grad_output = grads[0].reshape(n_head * n_lane, n_query, d_head)

        # dV = P^T dO, with P the weights after dropout.
        grad_value = torch.bmm(applied.transpose(1, 2), grad_output).view_as(value)

        # The gradient of the scores, written through the shifted view of a buffer. Hidden keys get zeros (their weight
        # is zero), which fill the unused corners of rows 1..T-1; the corner of row 0 is cleared here.
        buffer = weights.new_empty(n_head, n_lane * n_query, n_key + 1)
        buffer.view(n_head * n_lane, n_query * (n_key + 1))[:, :n_query] = 0
        grad_scores = shifted_view(buffer, n_lane, n_query)
        grad_weights = torch.bmm(grad_output, value.flatten(0, 1).transpose(1, 2))
        if keep is not None:
            grad_weights.mul_(keep)
        # dA = P * (dP - sum_j P dP): the softmax's derivative, fused by PyTorch.
        grad_scores.copy_(torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype))

        grad_query_u = torch.bmm(grad_scores, key.flatten(0, 1)).view_as(query_u)
        grad_key = torch.bmm(grad_scores.transpose(1, 2), query_u.flatten(0, 1)).view_as(key)
        flat_query = query_v.reshape(n_head, n_lane * n_query, d_head)
        grad_query_v = torch.bmm(buffer, position).view_as(query_v)
        grad_position = torch.bmm(buffer.transpose(1, 2), flat_query)[:, 1:].transpose(0, 1)
        return grad_query_u, grad_query_v, grad_key, grad_value, grad_position, None, None


def _batched(matrices: Tensor) -> Tensor:
    """Return matrices [...,S,D] in a layout that batched products read without copying.

    Keys and values in the buffers of a memory already have this layout. Those of a training step are copied here, once
    for all products.
    """
    return matrices if matrices.stride()[-2:] == (matrices.shape[-1], 1) else matrices.contiguous()


def shifted_attention(operands: Operands, scope: KeyScope, dropout: float = 0.0) -> Float[Tensor, "B T H D"]:
    """Compute `reference_attention`; outputs and gradients are tested against it. There are no second derivatives."""
    query, position = operands.query, operands.position
    # (q + u) k is terms (a) + (c), and (q + v) W_kR R is terms (b) + (d): two products instead of four. The scale is
    # applied to the queries, because the scores are the larger tensor.
    scale = 1 / math.sqrt(query.shape[-1])
    heads_first = (2, 0, 1, 3)
    query_u, query_v = (
        ((query + bias.to(query.dtype)) * scale).permute(heads_first).contiguous() for bias in (operands.u, operands.v)
    )
    key, value = (_batched(rows.permute(heads_first)) for rows in (operands.key, operands.value))
    with torch.autocast(query.device.type, enabled=False):  # the operands below already have the dtype of the query
        if query.shape[1] != 1 or torch.is_grad_enabled() or dropout > 0:
            output = _ShiftedAttention.apply(query_u, query_v, key, value, position, scope, dropout)
            return output.permute(1, 2, 0, 3)  # pyright: ignore[reportOptionalMemberAccess]
        # A single query per lane: no shift, no causality. In each product the long matrix is the first factor, which
        # CPU libraries read at about the speed of memory. The vectors are transposed rows; for columns of stride 1 the
        # library would use a code path four times slower.
        n_head, n_lane, n_key, d_head = key.shape
        vectors = query_v.view(n_head, n_lane, d_head).transpose(1, 2)
        by_distance = torch.bmm(_batched(position.transpose(0, 1)), vectors)  # (b) and (d): [H,S,B]
        content = torch.bmm(key.flatten(0, 1), query_u.flatten(0, 1).transpose(1, 2))  # (a) and (c): [H*B,S,1]
        scores = content.view(n_head, n_lane, n_key)
        scores += by_distance.transpose(1, 2)
        if scope.window is not None and scope.window < n_key:
            scores[:, :, : n_key - scope.window] = -math.inf
        _hide_unfilled(scores[:, :, None], scope)
        weights = scores.view(-1, 1, n_key).softmax(dim=-1)
        return torch.bmm(weights, value.flatten(0, 1)).view_as(query_u).permute(1, 2, 0, 3)
