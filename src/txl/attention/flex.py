"""Relative attention by FlexAttention, as plain attention over wider heads: no T x S position matrix, no shift.

R consists of sines and cosines, so the angle of a distance is the difference of the angles of two positions. With the
query at position i and p = W_kR^T (q_i + v) = [p_s, p_c] (features multiplied by sines, and by cosines),

    (q_i + v) . W_kR R_{i-j} = phi_i . psi_j
    phi_i = [p_c sin(i w) - p_s cos(i w), p_s sin(i w) + p_c cos(i w)]    psi_j = [sin(j w), cos(j w)]

psi has no parameters and is the same for all lanes and heads. Over N consecutive positions its E features are almost
linearly dependent, because neighbouring frequencies hardly differ over this range: its rows lie within `TOLERANCE` of
the span of r orthonormal directions, the columns of B (r is 176 for E 512, N 1024; 96 for E 410, N 300). The score is
then the dot product of [q_i + u ; B^T phi_i] and [k_j ; B^T psi_j], divided by sqrt(D). Any fused attention computes it
whose queries and keys may be wider than its values. The projection changes a score by at most
TOLERANCE * sqrt(E/2) * |p| / sqrt(D), far less than rounding. Angles are computed in float64. In float32 this form is
therefore closer to Section 3.3 than the authors' R, whose angles are rounded.

The identity holds only for the sinusoid R itself: not with a clamp, with dropout on R, or with a learned R.

Shapes: B lanes, T queries, M positions of memory, S = M + T keys, H heads, D width of a head, E d_model, r rank,
W = D + r width of a key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from txl.attention.equations import KeyScope

# Largest distance of a row of psi from the span of B, relative to the norm sqrt(E/2) of the row.
TOLERANCE = 1e-12
# Divisor of all ranks r, for the operand sizes of matrix units.
_MULTIPLE = 16


@dataclass(frozen=True)
class PhaseBasis:
    """Directions B that span psi for N positions around 0."""

    n_position: int
    directions: Float64[Tensor, "E r"]
    """B: orthonormal columns."""

    @classmethod
    def over(cls, n_position: int, d_model: int) -> PhaseBasis:
        """Return the smallest basis whose span is within `TOLERANCE` of all rows of psi."""
        rows = _psi(_centred(n_position), d_model)
        directions = torch.linalg.svd(rows, full_matrices=False).Vh
        # Largest residual of a row outside the span of the first k directions, for every k.
        left_out = (rows @ directions.T).square().flip(1).cumsum(1).flip(1).sqrt().amax(dim=0)
        needed = int((left_out > TOLERANCE * math.sqrt(d_model / 2)).sum())
        rank = min(math.ceil(needed / _MULTIPLE) * _MULTIPLE, len(directions))
        return cls(n_position, directions[:rank].T.contiguous())


@dataclass(frozen=True)
class SegmentPhases:
    """Tables that all layers share for one segment; they replace R in `RelativeMultiHeadAttention.forward`."""

    kernel: FlexKernel
    mask: BlockMask
    """Blocks of keys that each query sees."""
    sin: Float[Tensor, "T half"]
    """sin(i w) of the queries, for the E/2 frequencies."""
    cos: Float[Tensor, "T half"]
    basis: Float[Tensor, "E r"]
    """B."""
    key: Float[Tensor, "S r"]
    """B^T psi_j."""

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
            attended = self.kernel.attend(wide_query, wide_key, value.transpose(1, 2), self.mask, 1 / math.sqrt(d_head))
        return attended.transpose(1, 2)


class PhaseTables:
    """Factory of `SegmentPhases`; caches B and the tables of the last segment, which the next segment mostly reuses."""

    def __init__(self, d_model: int):
        self.kernel, self.d_model = FlexKernel(), d_model
        self._basis: PhaseBasis | None = None
        self._tables: tuple[Any, tuple[Tensor, Tensor, Tensor, Tensor]] | None = None

    def phases(
        self, scope: KeyScope, n_query: int, n_lane: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> SegmentPhases:
        """Return the tables of a segment.

        Args:
            scope: rule of which keys a query sees.
            n_query: T.
            n_lane: B.
            capacity: largest number of positions that the memory will hold; the basis is computed for it at once.
            dtype, device: dtype and device of the queries.
        """
        n_key = scope.memory + n_query
        # Local variables, because other threads may replace the cached values. Tables outlive the mode of this call:
        # they are ordinary tensors, not those of inference mode or of a transform of torch.func.
        basis, cached = self._basis, self._tables
        with torch.inference_mode(False), torch.no_grad(), torch._C._DisableFuncTorch():
            if basis is None or basis.n_position < n_key:
                self._basis = basis = PhaseBasis.over(max(n_key, capacity + n_query), self.d_model)
            wanted = (basis.n_position, n_key, n_query, dtype, device)
            if cached is None or cached[0] != wanted:
                psi = _psi(_centred(n_key), self.d_model)
                sin, cos = psi[scope.memory :].chunk(2, dim=-1)
                tables = (sin, cos, basis.directions, psi @ basis.directions)
                sin, cos, directions, key = (table.to(device=device, dtype=dtype) for table in tables)
                self._tables = cached = wanted, (sin, cos, directions, key)
        mask = self.kernel.mask(scope, n_query, n_lane, device)
        return SegmentPhases(self.kernel, mask, *cached[1])


def _centred(n_position: int) -> Tensor:
    """Return `n_position` integers around 0; a smaller `n_position` gives a subset of a larger one."""
    return torch.arange(n_position, dtype=torch.float64) - n_position // 2


def _psi(positions: Tensor, d_model: int) -> Tensor:
    """Compute the rows [sin(j w), cos(j w)]: float64 [N] -> [N,E]."""
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model
    angles = torch.outer(positions, 1.0 / (10000.0**exponents))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class FlexKernel:
    """FlexAttention: causality, window and memory form a mask of blocks, never a mask [T,S].

    On a CUDA device the first call compiles one fused kernel. On a CPU PyTorch has only the forward pass.
    """

    def __init__(self) -> None:
        self._compiled: Callable[..., Any] | None = None

    def mask(self, scope: KeyScope, n_query: int, n_lane: int, device: torch.device) -> BlockMask:
        """Return the mask of blocks."""
        memory, window = scope.memory, scope.window
        first = scope.oldest(device)

        def sees(lane: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance = query + memory - key
            seen = distance >= 0
            if window is not None:
                seen = seen & (distance < window)
            return seen if first is None else seen & (key >= first[lane])

        lanes = None if first is None else n_lane
        return create_block_mask(sees, lanes, None, n_query, memory + n_query, device=device)

    def attend(
        self,
        query: Float[Tensor, "B H T W"],
        key: Float[Tensor, "B H S W"],
        value: Float[Tensor, "B H S D"],
        mask: BlockMask,
        scale: float,
    ) -> Float[Tensor, "B H T D"]:
        """Return softmax(scale * query . key) times the values; only keys in the mask enter the softmax."""
        function: Callable[..., Any] = flex_attention
        options = None
        if query.device.type == "cuda":
            if self._compiled is None:
                self._compiled = torch.compile(flex_attention)
            function = self._compiled
            if query.dtype == torch.float32:  # PyTorch's blocks do not fit wide heads into an H200's shared memory
                options = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1}
        return function(query, key, value, block_mask=mask, scale=scale, kernel_options=options)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlexKernel:
        """Return a new kernel: a copied model compiles its own kernel."""
        return FlexKernel()
