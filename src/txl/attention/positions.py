"""The sinusoid encoding R of relative distances (Section 3.3), which has no parameters."""

from __future__ import annotations

import torch
from torch import Tensor


def distances_farthest_first(n_key: int, clamp_len: int | None, device: torch.device | None = None) -> Tensor:
    """Distances S-1, ..., 1, 0, none above `clamp_len`: int64 [S].

    The order is that of the keys as the last query of a segment sees them.
    """
    distances = torch.arange(n_key - 1, -1, -1, device=device)
    return distances if clamp_len is None else distances.clamp(max=min(clamp_len, n_key))


def sinusoid(distances: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """Rows R_d = [sin(d w_0), ..., sin(d w_{E/2-1}), cos(d w_0), ..., cos(d w_{E/2-1})]: [S] -> [S,E].

    w_k = 10000^(-2k/E). All sines come first, then all cosines, as in the authors' code. Computed in float32 for a
    float32 model, again as the authors did, so that weights trained there meet the same R to the last bit.
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, d_model, 2, device=distances.device, dtype=compute) / d_model
    angles = torch.outer(distances.to(compute), 1.0 / (10000.0**exponents))
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)
