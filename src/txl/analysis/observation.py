"""Observe the attention of a model while it reads: queries, keys and positions of every layer, as they are computed.

Shapes: B lanes, T queries of the segment, M positions of memory, S = M + T keys, H heads, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from txl.attention.equations import KeyScope, Operands
from txl.attention.shifted import masked_scores, padded_positions
from txl.errors import UserError
from txl.models.transformer_xl import RelativeMultiHeadAttention
from txl.models.vanilla import CausalSelfAttention


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of one layer's attention scores."""

    query: Tensor  # [B,T,H,D]
    key: Tensor  # [B,S,H,D], memory first
    position: Tensor | None  # [S,H,D], W_kR R_d with the farthest distance first; None without relative positions
    u: Tensor | None  # [H,D]; None without the global biases
    v: Tensor | None
    scope: KeyScope

    def weights(self, terms: str = "abcd") -> Tensor:
        """Return the softmax, over the keys that a query sees, of the sum of the given terms (a) to (d): [H*B,T,S].

        A model without relative positions has only term (a).
        """
        n_head, d_head = self.query.shape[2:]
        query_u = self.query if "a" in terms else torch.zeros_like(self.query)
        query_v = self.query if "b" in terms else torch.zeros_like(self.query)
        if "c" in terms and self.u is not None:
            query_u = query_u + self.u
        if "d" in terms and self.v is not None:
            query_v = query_v + self.v
        scale = 1 / math.sqrt(d_head)
        query_u, query_v = ((part * scale).permute(2, 0, 1, 3).contiguous() for part in (query_u, query_v))
        key = self.key.permute(2, 0, 1, 3).contiguous()
        position = self.key.new_zeros(self.key.shape[1], n_head, d_head) if self.position is None else self.position
        return masked_scores(query_u, query_v, key, padded_positions(position), self.scope).softmax(dim=-1)


# Receives the number of a layer, from 0, and the inputs of its attention scores.
Observer = Callable[[int, AttentionInputs], None]


@contextmanager
def observed(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Call `observer` for every attention that the model computes within the block; results do not change.

    The model must not be used elsewhere meanwhile; of a shared model, pass a view (`evaluation_view`).
    """
    with ExitStack() as undo:
        for number, attention in enumerate(attentions(model)):
            if isinstance(attention, RelativeMultiHeadAttention):
                name, watched = "attend", _relative(attention, number, observer)
            else:
                name, watched = "forward", _absolute(attention, number, observer)
            before = vars(attention).get(name)
            setattr(attention, name, watched)
            if before is None:
                undo.callback(delattr, attention, name)
            else:
                undo.callback(setattr, attention, name, before)
        yield


def _relative(attention: RelativeMultiHeadAttention, number: int, observer: Observer) -> Callable[..., Tensor]:
    original = attention.attend

    def attend(operands: Operands, scope: KeyScope, dropout: float = 0.0) -> Tensor:
        query, key, _, position, u, v = operands
        observer(number, AttentionInputs(query, key, position, u, v, scope))
        return original(operands, scope, dropout)

    return attend


def _absolute(attention: CausalSelfAttention, number: int, observer: Observer) -> Callable[..., Tensor]:
    original = attention.forward

    def forward(hidden: Tensor) -> Tensor:
        # Queries and keys are projected again, because the fused attention does not expose its scores.
        context = attention.norm(hidden) if attention.pre_norm else hidden
        heads = (attention.n_head, attention.d_head)
        query, key = (project(context).unflatten(-1, heads) for project in (attention.q_proj, attention.k_proj))
        observer(number, AttentionInputs(query, key, None, None, None, KeyScope(0)))
        return original(hidden)

    return forward


def attentions(model: nn.Module) -> list[RelativeMultiHeadAttention | CausalSelfAttention]:
    """Return the attention sub-layer of every layer."""
    layers = getattr(model, "layers", ())
    kinds = (RelativeMultiHeadAttention, CausalSelfAttention)
    found = [layer.attention for layer in layers if isinstance(getattr(layer, "attention", None), kinds)]
    if not found or len(found) < len(layers):
        raise UserError(f"this model ({type(model).__name__}) has no attention to look at", expected="a Transformer")
    return found
