"""How the next token is drawn, by chance that depends on a stream's seed and on the token's number alone.

Whoever else is drawn for at the same time, on whatever device, changes nothing.

Shapes: B lanes (streams), V vocabulary, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from txl.errors import UserError

if TYPE_CHECKING:  # bad settings are refused without PyTorch, which takes seconds to import
    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: from the `top_k` likeliest (40 in the paper), cut to the nucleus `top_p`."""

    top_k: int | None = 40
    top_p: float | None = None
    temperature: float = 1.0
    """0 takes the likeliest token always."""

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}; expected 1 or more candidates, or none for the whole vocabulary")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; expected a probability above 0 and at most 1")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}; expected 0 (greedy) or a number above it")

    def draw(self, log_probs: Tensor, chances: Tensor) -> Tensor:
        """One token a lane, where its chance, from 0 to below 1, falls: [B,V], float64 [B] -> int64 [B].

        Raises:
            UserError: if the probabilities are not numbers.
        """
        if not log_probs.amax(dim=-1).isfinite().all():
            raise UserError(
                "the model's probabilities are not numbers; its weights are damaged: use another checkpoint"
            )
        if self.temperature == 0:
            return log_probs.argmax(dim=-1)
        n_candidate = min(self.top_k or log_probs.shape[-1], log_probs.shape[-1])
        values, candidates = log_probs.topk(n_candidate, dim=-1)  # sorted, the likeliest first
        # Relative to the likeliest, so that no temperature is too low to divide by.
        probs = ((values - values[:, :1]).double() / self.temperature).softmax(dim=-1)
        if self.top_p is not None:
            # A candidate stays while those before it hold less than top_p; the first one always does.
            probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= self.top_p, 0.0)
        ends = probs.cumsum(dim=-1)
        place = (ends <= chances[:, None] * ends[:, -1:]).sum(dim=-1, keepdim=True)
        return candidates.gather(-1, place.clamp_(max=n_candidate - 1)).squeeze(-1)


def chances(seeds: Tensor, numbers: Tensor) -> Tensor:
    """Uniform in [0, 1), one for each seed and number of a token: int64 [B] twice -> float64 [B].

    SplitMix64 (Steele, Lea and Flood 2014) of the two, one after the other: 53 bits.
    """
    mixed = _mixed(_mixed(seeds) + numbers)
    return _shifted(mixed, 11).double() * 2.0**-53


def _mixed(state: Tensor) -> Tensor:
    """A step of SplitMix64; int64 products wrap around."""
    state = state + _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in."""
    return (state >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
