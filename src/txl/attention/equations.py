"""Relative attention as Section 3.3 of the paper writes it, one query at a time. Slow and obvious: the oracle.

Beside the equations: the sinusoid R, and the rule of which keys a query sees.

Shapes: B lanes, T queries, M positions of memory, S = M + T keys, H heads, D width of a head, E d_model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, Num
from torch import Tensor


def distances_farthest_first(
    n_key: int, clamp_len: int | None, device: torch.device | None = None
) -> Int64[Tensor, " S"]:
    """Return the distances S-1, ..., 1, 0, those above `clamp_len` replaced by it.

    The order is that of the keys as the last query of a segment sees them.
    """
    distances = torch.arange(n_key - 1, -1, -1, device=device)
    return distances if clamp_len is None else distances.clamp(max=min(clamp_len, n_key))


def sinusoid(distances: Num[Tensor, " S"], d_model: int, dtype: torch.dtype) -> Float[Tensor, "S E"]:
    """Compute the rows R_d = [sin(d w_0), ..., sin(d w_{E/2-1}), cos(d w_0), ..., cos(d w_{E/2-1})].

    w_k = 10000^(-2k/E). All sines come first, then all cosines, as in the authors' code. Computed in float32 for a
    float32 model, again as the authors did, so that weights trained there meet the same R to the last bit.
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, d_model, 2, device=distances.device, dtype=compute) / d_model
    angles = torch.outer(distances.to(compute), 1.0 / (10000.0**exponents))
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


@dataclass(frozen=True)
class KeyScope:
    """The rule of which keys a query sees: query i (0..T-1) stands at key M + i and sees key j if all of these hold.

    - causality: j <= M + i,
    - window N: M + i - j < N (the query itself is one of the N keys),
    - its lane's memory: j >= M - n, where n of the M positions of memory are filled in its lane.
    """

    memory: int
    """M, positions of memory in front of the segment."""
    window: int | None = None
    """N, keys a query sees, itself included; None: no limit."""
    filled: tuple[int, ...] | None = None
    """Filled positions of memory of each lane; None: all M in every lane."""

    def mask(self, n_query: int, device: torch.device | None = None) -> Bool[Tensor, "T S"] | Bool[Tensor, "B T S"]:
        """Return true where a query sees a key; one mask for each lane where `filled` is given."""
        query = torch.arange(n_query, device=device)[:, None] + self.memory
        key = torch.arange(self.memory + n_query, device=device)
        mask = key <= query
        if self.window is not None:
            mask &= query - key < self.window
        if self.filled is not None:
            first = self.memory - torch.tensor(self.filled, device=device)
            mask = mask & (key >= first[:, None, None])
        return mask


@dataclass(frozen=True)
class ScoreTerms:
    """The four terms of A^rel for one query, before the scale 1/sqrt(D)."""

    a: Float[Tensor, "B H S"]
    """q_i . k_j: content."""
    b: Float[Tensor, "B H S"]
    """q_i . W_kR R_{i-j}: content-dependent position."""
    c: Float[Tensor, "B H S"]
    """u . k_j: global content bias."""
    d: Float[Tensor, "H S"]
    """v . W_kR R_{i-j}: global position bias."""

    def score(self) -> Float[Tensor, "B H S"]:
        """Return a + b + c + d."""
        return self.a + self.b + self.c + self.d


def score_terms(
    query: Float[Tensor, "B H D"],
    key: Float[Tensor, "B S H D"],
    position: Float[Tensor, "S H D"],
    u: Float[Tensor, "H D"],
    v: Float[Tensor, "H D"],
) -> ScoreTerms:
    """Compute the terms of one query with every key.

    Args:
        query: q_i.
        key: k_j.
        position: W_kR R_{i-j} for this query i and every key j.
        u, v: the global biases.
    """
    return ScoreTerms(
        a=torch.einsum("bhd,bshd->bhs", query, key),
        b=torch.einsum("bhd,shd->bhs", query, position),
        c=torch.einsum("hd,bshd->bhs", u, key),
        d=torch.einsum("hd,shd->hs", v, position),
    )


def reference_attention(
    query: Float[Tensor, "B T H D"],
    key: Float[Tensor, "B S H D"],
    value: Float[Tensor, "B S H Dv"],
    position: Float[Tensor, "S H D"],
    u: Float[Tensor, "H D"],
    v: Float[Tensor, "H D"],
    scope: KeyScope,
    dropout: float = 0.0,
) -> Float[Tensor, "B T H Dv"]:
    """Compute a_i = Masked-Softmax(A_i / sqrt(D)) V for every query i.

    Args:
        query: q_i of the segment.
        key, value: of memory and segment, memory first.
        position: W_kR R_d with the farthest distance first: row S-1-d belongs to distance d.
        u, v: the global biases.
        scope: which keys a query sees.
        dropout: probability with which an attention weight is dropped.
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
