"""Which keys a query sees: the memory's length, the window, and lanes whose memory is shorter than others'.

Shapes: B lanes, T queries of the segment, M positions of memory, S = M + T keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeyScope:
    """Query i (0..T-1) stands at key M + i and sees key j if all of these hold:

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

    def mask(self, n_query: int, device: torch.device | None = None) -> Tensor:
        """Boolean [T,S], or [B,T,S] where lanes differ: true where the query sees the key."""
        query = torch.arange(n_query, device=device)[:, None] + self.memory
        key = torch.arange(self.memory + n_query, device=device)
        mask = key <= query
        if self.window is not None:
            mask &= query - key < self.window
        if self.filled is not None:
            first = self.memory - torch.tensor(self.filled, device=device)
            mask = mask & (key >= first[:, None, None])
        return mask
