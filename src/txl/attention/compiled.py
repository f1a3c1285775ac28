"""Relative attention by the compiled library, forward and backward, without a matrix of all scores.

Shapes: B lanes, T queries, S keys, H heads, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from txl.attention.equations import KeyScope
from txl.attention.shifted import shifted_attention
from txl.errors import UserError
from txl.native.training_attention import training_attention, why_not_training


def compiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor | None,
    u: Tensor | None,
    v: Tensor | None,
    scope: KeyScope,
    dropout: float = 0.0,
) -> Tensor:
    """The same function as `reference_attention`, or plain attention, if `position`, `u` and `v` are None.

    Relative attention without gradients and dropout goes through `shifted`'s way.

    Args:
        query: [B,T,H,D], float32 or bfloat16 on a CPU, where gradients are wanted.
        key, value: [B,S,H,D], memory first.
        position: [S,H,D], W_kR R_d with the farthest distance first.
        u, v: [H,D].
        scope: which keys a query sees.
        dropout: probability with which an attention weight is dropped.

    Returns:
        [B,T,H,D]. Its gradient can be taken once (no second derivatives).
    """
    if dropout == 0 and not torch.is_grad_enabled() and position is not None and u is not None and v is not None:
        return shifted_attention(query, key, value, position, u, v, scope)
    # `torch.compile` traces shapes; what the machine has was asked when the model was built.
    if not torch.compiler.is_compiling() and (reason := why_not_training(query.device.type, query.dtype)):
        raise UserError(f"model.attention compiled {reason}, or use --model.attention auto")
    filled = None if scope.filled is None else torch.tensor(scope.filled)
    return training_attention(query, key, value, position, u, v, window=scope.window, filled=filled, dropout=dropout)
