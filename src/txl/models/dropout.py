"""Dropout of hidden states: ordinary, or with one mask for all positions of a segment.

Shapes: L positions, E features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LockedDropout(nn.Module):
    """Dropout that keeps its mask along the positions: [..., L, E] times a mask [..., 1, E].

    Also called variational dropout (Gal and Ghahramani 2016, Section 4; "locked" in AWD-LSTM, Merity et al. 2017).
    Every lane has a mask of its own. What is kept is scaled by 1/(1-p), so the expectation stays.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, hidden: Tensor) -> Tensor:
        """The same shape; the input itself outside of training."""
        if not self.training or self.p == 0:
            return hidden
        ones = hidden.new_ones(*hidden.shape[:-2], 1, hidden.shape[-1])
        return hidden * F.dropout(ones, self.p)

    def extra_repr(self) -> str:
        """The rate, for printing."""
        return f"p={self.p}"


def make_dropout(p: float, locked: bool) -> nn.Module:
    """Locked or ordinary dropout of rate `p`."""
    return LockedDropout(p) if locked else nn.Dropout(p)


def word_mask(vocab_size: int, p: float, device: torch.device) -> Tensor:
    """What each token's embedding is multiplied with for one step: 0 with probability `p`, else 1/(1-p): float32 [V].

    A token that is dropped is dropped wherever it stands (Gal and Ghahramani 2016, Section 4.2; Merity et al. 2017,
    Section 4.3).
    """
    return F.dropout(torch.ones(vocab_size, device=device), p)
