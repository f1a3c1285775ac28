"""Relative attention as written in Section 3.3 of the paper, one query at a time. Slow and simple: the test oracle.

The module also defines the operands of every attention function, the sinusoid R, which keys a query sees, and the error
of an attention that cannot train.

Shapes: B lanes, T queries, M positions of memory, S = M + T keys, H heads, D width of a head, E d_model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, Num
from torch import Tensor

from txl.devices import sent
from txl.errors import Field, UserError


def distances_farthest_first(
    n_key: int, clamp_len: int | None, device: torch.device | None = None
) -> Int64[Tensor, " S"]:
    """Return the distances S-1, ..., 1, 0 of the last query's keys; those above `clamp_len` become `clamp_len`."""
    distances = torch.arange(n_key - 1, -1, -1, device=device)
    return distances if clamp_len is None else distances.clamp(max=min(clamp_len, n_key))


def sinusoid(distances: Num[Tensor, " S"], d_model: int, dtype: torch.dtype) -> Float[Tensor, "S E"]:
    """Compute the rows R_d = [sin(d w_0), ..., sin(d w_{E/2-1}), cos(d w_0), ..., cos(d w_{E/2-1})].

    w_k = 10000^(-2k/E). All sines precede all cosines, as in the authors' code. For float32 models R is computed in
    float32, also as in the authors' code, so that weights trained there are used with the same R to the last bit.
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32  # never bfloat16: 257 would round to 256
    exponents = torch.arange(0, d_model, 2, device=distances.device, dtype=compute) / d_model  # 2k/E
    angles = torch.outer(distances.to(compute), 1.0 / (10000.0**exponents))  # d w_k, [S,E/2]
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


@dataclass(frozen=True)
class KeyScope:
    """Rule of which keys a query sees.

    Query i (0..T-1) has the position of key M + i. It sees key j if all of these conditions hold:

    - causality: j <= M + i,
    - window N: M + i - j < N (the query's own key is one of the N keys),
    - memory: j >= M - n, where n of the M positions of memory are filled in the query's lane.
    """

    memory: int  # M
    window: int | None = None  # N; None: no limit
    filled: tuple[int, ...] | None = None  # n of each lane; None: all M in every lane
    filled_tensor: Int64[Tensor, " B"] | None = None
    """`filled` on the device, instead of it: in a recorded step, whose replays have other numbers."""

    def oldest(self, device: torch.device | None = None) -> Int64[Tensor, " B"] | None:
        """Return the first filled key of each lane; None if all lanes are full. The host does not wait for a GPU."""
        if self.filled_tensor is not None:
            return self.memory - self.filled_tensor
        if self.filled is None:
            return None
        oldest = [self.memory - n for n in self.filled]
        if device is None or torch.compiler.is_compiling():  # the compiler cannot trace pinned memory
            return torch.tensor(oldest, device=device)
        return sent(torch.tensor(oldest, device="cpu"), device)

    def mask(self, n_query: int, device: torch.device | None = None) -> Bool[Tensor, "T S"] | Bool[Tensor, "B T S"]:
        """Return a mask that is true where a query sees a key, with one mask per lane if `filled` is given."""
        query = torch.arange(n_query, device=device)[:, None] + self.memory
        key = torch.arange(self.memory + n_query, device=device)
        mask = key <= query
        if self.window is not None:
            mask &= query - key < self.window
        oldest = self.oldest(device)
        return mask if oldest is None else mask & (key >= oldest[:, None, None])


class Operands(NamedTuple):
    """Projections of one layer for one segment, from which every function here computes attention.

    Memory comes first among keys and values. `value` may have another width than `key`.
    """

    query: Float[Tensor, "B T H D"]  # q_i = W_q h_i
    key: Float[Tensor, "B S H D"]  # k_j = W_{k,E} h_j, with h_j from SG(m) for the first M
    value: Float[Tensor, "B S H D"]  # W_v h_j
    position: Float[Tensor, "S H D"]  # W_{k,R} R_d, farthest distance first: row S-1-d belongs to distance d
    u: Float[Tensor, "H D"]  # global content bias
    v: Float[Tensor, "H D"]  # global position bias


class ScoreTerms(NamedTuple):
    """The four terms of A^rel for one query, before the scale 1/sqrt(D)."""

    a: Float[Tensor, "B H S"]  # content: q_i . k_j
    b: Float[Tensor, "B H S"]  # content-dependent position: q_i . W_kR R_{i-j}
    c: Float[Tensor, "B H S"]  # global content bias: u . k_j
    d: Float[Tensor, "H S"]  # global position bias: v . W_kR R_{i-j}

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
    """Compute the four terms of one query i for every key j; `position` has W_kR R_{i-j}."""
    return ScoreTerms(
        a=torch.einsum("bhd,bshd->bhs", query, key),
        b=torch.einsum("bhd,shd->bhs", query, position),
        c=torch.einsum("hd,bshd->bhs", u, key),
        d=torch.einsum("hd,shd->hs", v, position),
    )


def reference_attention(operands: Operands, scope: KeyScope, dropout: float = 0.0) -> Float[Tensor, "B T H Dv"]:
    """Compute a_i = Masked-Softmax(A_i / sqrt(D)) V for every query i; `dropout` is the rate of attention weights."""
    query, key, value, position, u, v = operands
    n_query, n_key = query.shape[1], key.shape[1]
    mask = scope.mask(n_query, query.device).expand(query.shape[0], n_query, n_key)
    outputs = []
    for i in range(n_query):
        # Key j is at distance M + i - j. Keys after the query are masked, so they may use any row.
        distance = (scope.memory + i - torch.arange(n_key, device=query.device)).clamp(min=0)
        terms = score_terms(query[:, i], key, position[n_key - 1 - distance], u, v)
        score = terms.score() / math.sqrt(query.shape[-1])
        score = score.masked_fill(~mask[:, None, i], -math.inf)
        weight = F.dropout(score.softmax(dim=-1), dropout)
        outputs.append(torch.einsum("bhs,bshd->bhd", weight, value))
    return torch.stack(outputs, dim=1)


class AttentionRefused(UserError):
    """Refusal of an attention backend that cannot train a model on a device, in a dtype, or on this machine.

    Args:
        backend: name of the backend, as `model.attention` gives it.
        why: phrase that follows the name.
        instead: value of `model.attention` that works.
    """

    def __init__(self, backend: str, why: str, instead: str = "shifted"):
        self._arguments = backend, why, instead
        self.reason = f"model.attention {backend} {why}"  # without the remedy, for callers that follow it themselves
        super().__init__((Field("model.attention"), f" {backend} {why}; use ", Field("model.attention", instead)))

    def __reduce__(self) -> tuple[type[AttentionRefused], tuple[str, str, str]]:
        """Return how pickle makes the error again in another process."""
        return type(self), self._arguments
