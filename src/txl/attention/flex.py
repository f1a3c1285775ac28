"""Relative attention by FlexAttention, as plain attention over wider heads: no T x S position matrix, no shift.

R consists of sines and cosines, so the angle of a distance is the difference of the angles of two positions. With the
query at position i and p = W_kR^T (q_i + v) = [p_s, p_c] (features multiplied by sines, and by cosines),

    (q_i + v) . W_kR R_{i-j} = phi_i . psi_j
    phi_i = [p_c sin(i w) - p_s cos(i w), p_s sin(i w) + p_c cos(i w)]    psi_j = [sin(j w), cos(j w)]

psi has no parameters. Over N consecutive positions its E features are almost linearly dependent, because neighbouring
frequencies hardly differ over this range: its rows lie within `TOLERANCE` of the span of r orthonormal directions, the
columns of B (r is 176 for E 512, N 1024; 96 for E 410, N 300). The score is then the dot product of
[q_i + u ; B^T phi_i] and [k_j ; B^T psi_j], divided by sqrt(D), which any fused attention computes whose queries and
keys may be wider than its values. The projection changes a score by at most TOLERANCE * sqrt(E/2) * |p| / sqrt(D), far
less than rounding. The identity holds only for the sinusoid R itself: not with a clamp, dropout on R, or a learned R.

Shapes: B lanes, T queries, S keys, H heads, D width of a head, E d_model, r rank, W = D + r width of a key.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from txl.attention.equations import KeyScope, sinusoid

# Largest distance of a row of psi from the span of B, relative to the norm sqrt(E/2) of the row.
TOLERANCE = 1e-12
# Divisor of all ranks r, for the operand sizes of matrix units.
_MULTIPLE = 16


def phase_basis(n_position: int, d_model: int) -> Float64[Tensor, "E r"]:
    """Return B: the fewest orthonormal directions whose span is within `TOLERANCE` of psi at N positions around 0."""
    rows = sinusoid(_centred(n_position), d_model, torch.float64)
    directions = torch.linalg.svd(rows, full_matrices=False).Vh
    # Largest residual of a row outside the span of the first k directions, for every k.
    left_out = (rows @ directions.T).square().flip(1).cumsum(1).flip(1).sqrt().amax(dim=0)
    needed = int((left_out > TOLERANCE * math.sqrt(d_model / 2)).sum())
    return directions[: min(math.ceil(needed / _MULTIPLE) * _MULTIPLE, len(directions))].T.contiguous()


def _centred(n_position: int) -> Float64[Tensor, " N"]:
    """Return the positions -floor(N/2), ..., N - floor(N/2) - 1; small numbers have the most accurate angles."""
    return torch.arange(n_position, dtype=torch.float64, device="cpu") - n_position // 2


@dataclass(frozen=True)
class SegmentPhases:
    """Tables that all layers share for one segment; they replace R in `RelativeMultiHeadAttention.forward`."""

    mask: BlockMask  # blocks of keys that each query sees
    sin: Float[Tensor, "T half"]  # sin(i w) of the queries, for the E/2 frequencies
    cos: Float[Tensor, "T half"]
    basis: Float[Tensor, "E r"]  # B
    key: Float[Tensor, "S r"]  # B^T psi_j

    def attend(
        self,
        query: Float[Tensor, "B T H D"],
        key: Float[Tensor, "B S H D"],
        value: Float[Tensor, "B S H D"],
        weight: Float[Tensor, "HD E"],
        u: Float[Tensor, "H D"],
        v: Float[Tensor, "H D"],
    ) -> Float[Tensor, "B T H D"]:
        """Compute `reference_attention`, given W_kR (`weight`) instead of W_kR R."""
        (n_lane, n_key, n_head, d_head), dtype = key.shape, query.dtype
        with torch.autocast(query.device.type, enabled=False):  # all operands have the dtype of the query
            by_head = weight.to(dtype).view(n_head, d_head, -1)
            # p = W_kR^T (q + v) moves the projection of R to the query: S distances need no projection at all.
            p = torch.einsum("bthd,hde->bhte", query + v.to(dtype), by_head)
            p_s, p_c = p.chunk(2, dim=-1)
            phi = torch.cat([p_c * self.sin - p_s * self.cos, p_s * self.sin + p_c * self.cos], dim=-1)
            # [q + u ; B^T phi] . [k ; B^T psi] = (a) + (c) + (b) + (d).
            wide_query = torch.cat([(query + u.to(dtype)).transpose(1, 2), phi @ self.basis], dim=-1)
            psi = self.key.expand(n_lane, n_head, n_key, -1)
            wide_key = torch.cat([key.transpose(1, 2), psi], dim=-1)
            attended = fused_attention(wide_query, wide_key, value.transpose(1, 2), self.mask, 1 / math.sqrt(d_head))
        return attended.transpose(1, 2)


class PhaseTables:
    """Factory of `SegmentPhases`; caches B and the tables of the last segment, which the next segment mostly reuses."""

    def __init__(self, d_model: int):
        self.d_model = d_model
        self._basis: tuple[int, Tensor] = (0, torch.empty(0, device="cpu"))  # number of positions, and B for them
        self._tables: tuple[Any, list[Tensor]] | None = None

    def phases(
        self, scope: KeyScope, n_query: int, n_lane: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> SegmentPhases:
        """Return the tables of a segment, for queries of a dtype on a device.

        `capacity` is the largest number of positions that the memory will hold; the basis is computed for it at once.
        """
        n_key = scope.memory + n_query
        # Local variables, because other threads may replace the cached values. Tables outlive the mode of this call:
        # they are ordinary tensors, not those of inference mode or of a transform of torch.func.
        (n_position, basis), cached = self._basis, self._tables
        with torch.inference_mode(False), torch.no_grad(), torch._C._DisableFuncTorch():
            if n_position < n_key:
                n_position = max(n_key, capacity + n_query)
                basis = phase_basis(n_position, self.d_model)
                self._basis = n_position, basis
            wanted = (n_position, n_key, n_query, dtype, device)
            if cached is None or cached[0] != wanted:
                psi = sinusoid(_centred(n_key), self.d_model, torch.float64)
                sin, cos = psi[scope.memory :].chunk(2, dim=-1)
                tables = [table.to(device, dtype) for table in (sin, cos, basis, psi @ basis)]
                self._tables = cached = wanted, tables
        return SegmentPhases(block_mask(scope, n_query, n_lane, device), *cached[1])


def block_mask(scope: KeyScope, n_query: int, n_lane: int, device: torch.device) -> BlockMask:
    """Return the mask of blocks for causality, window and memory, never a mask [T,S]."""
    memory, window, first = scope.memory, scope.window, scope.oldest(device)

    def sees(lane: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + memory - key
        seen = distance >= 0
        if window is not None:
            seen = seen & (distance < window)
        return seen if first is None else seen & (key >= first[lane])

    lanes = None if first is None else n_lane
    return create_block_mask(sees, lanes, None, n_query, memory + n_query, device=device)


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def fused_attention(
    query: Float[Tensor, "B H T W"],
    key: Float[Tensor, "B H S W"],
    value: Float[Tensor, "B H S D"],
    mask: BlockMask,
    scale: float,
) -> Float[Tensor, "B H T D"]:
    """Return softmax(scale * query . key) times the values, over the keys in the mask; on a GPU in one fused kernel.

    On a CPU PyTorch has only the forward pass.
    """
    function, options = flex_attention, None
    if query.device.type == "cuda":
        function = _compiled()
        if query.dtype == torch.float32:  # PyTorch's blocks do not fit wide heads into an H200's shared memory
            options = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1}
    return function(query, key, value, block_mask=mask, scale=scale, kernel_options=options)  # pyright: ignore
