"""Relative attention as Section 3.3 of the paper writes it, one query at a time. Slow and obvious: the oracle.

Shapes: B lanes, T queries, M positions of memory, S = M + T keys, H heads, D width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from txl.attention.scope import KeyScope


@dataclass(frozen=True)
class ScoreTerms:
    """The four terms of A^rel for one query, before the scale 1/sqrt(D): [B,H,S] each; c is [B,H,S], d is [H,S]."""

    a: Tensor
    """q_i . k_j: content."""
    b: Tensor
    """q_i . W_kR R_{i-j}: content-dependent position."""
    c: Tensor
    """u . k_j: global content bias."""
    d: Tensor
    """v . W_kR R_{i-j}: global position bias."""

    def score(self) -> Tensor:
        """a + b + c + d: [B,H,S]."""
        return self.a + self.b + self.c + self.d


def score_terms(query: Tensor, key: Tensor, position: Tensor, u: Tensor, v: Tensor) -> ScoreTerms:
    """The terms of one query with every key.

    Args:
        query: [B,H,D], q_i.
        key: [B,S,H,D], k_j.
        position: [S,H,D], W_kR R_{i-j} for this query i and every key j.
        u, v: [H,D].
    """
    return ScoreTerms(
        a=torch.einsum("bhd,bshd->bhs", query, key),
        b=torch.einsum("bhd,shd->bhs", query, position),
        c=torch.einsum("hd,bshd->bhs", u, key),
        d=torch.einsum("hd,shd->hs", v, position),
    )


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    u: Tensor,
    v: Tensor,
    scope: KeyScope,
    dropout: float = 0.0,
) -> Tensor:
    """a_i = Masked-Softmax(A_i / sqrt(D)) V for every query i.

    Args:
        query: [B,T,H,D].
        key, value: [B,S,H,D], memory first.
        position: [S,H,D], W_kR R_d with the farthest distance first: row S-1-d belongs to distance d.
        u, v: [H,D].
        scope: which keys a query sees.
        dropout: probability with which an attention weight is dropped.

    Returns:
        [B,T,H,D].
    """
    n_query, n_key = query.shape[1], key.shape[1]
    mask = scope.mask(n_query, query.device).expand(query.shape[0], n_query, n_key)
    outputs = []
    for i in range(n_query):
        # Key j lies at distance M + i - j. Keys after the query have none (they are masked): any row will do.
        distance = (scope.memory + i - torch.arange(n_key, device=query.device)).clamp(min=0)
        terms = score_terms(query[:, i], key, position[n_key - 1 - distance], u, v)
        score = terms.score() / math.sqrt(query.shape[-1])
        score = score.masked_fill(~mask[:, None, i], -math.inf)
        weight = F.dropout(score.softmax(dim=-1), dropout)
        outputs.append(torch.einsum("bhs,bshd->bhd", weight, value))
    return torch.stack(outputs, dim=1)
