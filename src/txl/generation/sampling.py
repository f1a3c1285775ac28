"""Sampling of the next token.

The random numbers depend only on a stream's seed and on the token's number. They depend neither on streams that draw
at the same time nor on the device.

Shapes: B lanes (streams), V vocabulary, F forbidden tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any

from txl.config import Limit
from txl.errors import UserError

if TYPE_CHECKING:  # bad settings are refused without PyTorch, which takes seconds to import
    import torch
    from jaxtyping import Float, Float64, Int64
    from torch import Tensor

    from txl.data.detokenise import Convention


@dataclass(frozen=True)
class Sampling:
    """Sampling settings: draw from the `top_k` likeliest tokens (40 in the paper), cut to the nucleus `top_p`."""

    top_k: int | None = 40
    top_p: float | None = None
    temperature: float = 1.0  #: 0: always draw the likeliest token

    def __post_init__(self) -> None:
        top_k, top_p, temperature = self.top_k, self.top_p, self.temperature
        if top_k is not None and _whole(top_k, "top_k") < 1:
            raise UserError(field="top_k", value=top_k, expected="1 or more, or none for the whole vocabulary")
        if top_p is not None and not (isinstance(top_p, Real) and 0 < top_p <= 1):
            raise UserError(field="top_p", value=top_p, expected="a probability above 0 and at most 1")
        if not (isinstance(temperature, Real) and 0 <= temperature < float("inf")):
            raise UserError(field="temperature", value=temperature, expected="0 (greedy) or a number above it")

    def pick(self, log_probs: Float[Tensor, "B V"], chances: Float64[Tensor, " B"]) -> Int64[Tensor, " B"]:
        """Draw a token for each lane by its random number in [0, 1); `permitted` has checked the probabilities."""
        if self.temperature == 0:
            return log_probs.argmax(dim=-1)
        n_candidate = min(self.top_k or log_probs.shape[-1], log_probs.shape[-1])
        # Sorted, the likeliest first: the same draw gives the same token wherever the ids of the vocabulary lie.
        values, candidates = log_probs.topk(n_candidate, dim=-1)
        # Relative to the likeliest, so that the division by a very low temperature cannot give NaN.
        probs = ((values - values[:, :1]).double() / self.temperature).softmax(dim=-1)
        if self.top_p is not None:
            # A candidate stays if the candidates before it hold less than top_p; the first one always stays.
            probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= self.top_p, 0.0)
        # The draw is compared with cumulated probabilities, not made by `multinomial`, whose generator is one for all
        # lanes: a stream's token would depend on its neighbours.
        ends = probs.cumsum(dim=-1)
        place = (ends <= chances[:, None] * ends[:, -1:]).sum(dim=-1, keepdim=True)
        return candidates.gather(-1, place.clamp_(max=n_candidate - 1)).squeeze(-1)


@dataclass(frozen=True)
class GenerationOptions:
    """Options by which texts are generated, one value; the fields are those of `txl.generate` and `generate_tokens`."""

    max_tokens: int
    samples: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    stop: Sequence[str] = ()
    forbid_unknown: bool = False
    mem_len: int | None = None
    window: Limit = None
    clamp_len: Limit = None
    dtype: torch.dtype | None = None
    compile: bool = True
    detokenise: Convention | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "samples"):
            if getattr(self, name) < 1:
                raise UserError(field=name, value=getattr(self, name), expected="1 or more")
        if not all([self.stop] if isinstance(self.stop, str) else self.stop):
            raise UserError("a stop string is empty", expected="at least one character")


def permitted(
    log_probs: Float[Tensor, "B V"], forbidden: Int64[Tensor, " F"] | None = None
) -> tuple[Float[Tensor, "B V"], Int64[Tensor, " B"]]:
    """Remove the forbidden tokens, and find the lanes in which no token can be drawn, without waiting for the device.

    Returns log-probabilities, with zeros in lanes in which no token can be drawn, and indices into `REASONS`.
    """
    allowed = log_probs if forbidden is None else log_probs.index_fill(1, forbidden, float("-inf"))
    drawable = allowed.amax(dim=-1).isfinite()
    has_numbers = log_probs.amax(dim=-1).isfinite()
    obstacles = (~drawable).long() * (1 + (~has_numbers).long())
    return allowed.masked_fill(~drawable[:, None], 0.0), obstacles


# Why no token can be drawn, by the index that `permitted` returns; None: a token can be drawn. Indices come from the
# device together with the tokens, so that one wait is enough for both.
NO_NUMBERS = "the model's probabilities are not numbers; its weights are damaged: use another checkpoint"
NOTHING_LEFT = "every token that is not forbidden has probability 0; forbid fewer"
REASONS = (None, NOTHING_LEFT, NO_NUMBERS)


def checked_forbidden(forbidden: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return forbidden token ids, sorted and each once, after checking that at least one token stays allowed."""
    ids = sorted({_whole(token, "a forbidden token id") for token in forbidden})
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UserError(f"forbidden has id {token}, outside of the model's vocabulary, 0 to {vocab_size - 1}")
    if len(ids) == vocab_size:
        raise UserError(f"all {vocab_size} tokens of the vocabulary are forbidden; leave at least one")
    return tuple(ids)


def checked_tokens(ids: Sequence[int] | Tensor, vocab_size: int, what: str = "the prompt") -> Int64[Tensor, " n"]:
    """Return one or more token ids as a tensor, after checking that they are in the vocabulary."""
    import torch

    try:
        tokens = torch.as_tensor(ids).reshape(-1)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UserError(f"{what} is not made of token ids; expected whole numbers") from None
    if tokens.numel() == 0:
        raise UserError(f"{what} is empty; expected at least one token to continue from")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise UserError(f"{what} is of {tokens.dtype}; expected token ids, whole numbers")
    tokens = tokens.long()
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise UserError(f"{what} has token ids outside of the model's vocabulary, 0 to {vocab_size - 1}")
    return tokens


def checked_seed(seed: int) -> int:
    """Return a whole number modulo 2^63 as a seed."""
    return _whole(seed, "seed") % 2**63


def _whole(value: Any, what: str) -> int:
    try:
        return index(value)
    except TypeError:
        raise UserError(f"{what} is {value!r}; expected a whole number") from None


def chances(seeds: Int64[Tensor, " B"], numbers: Int64[Tensor, " B"]) -> Float64[Tensor, " B"]:
    """Return a uniform random number in [0, 1), of 53 bits, for each seed and token number.

    SplitMix64 (Steele, Lea and Flood 2014) mixes first the seed, then the sum of the result and the token number.
    """
    # A hash needs no state: streams may join, leave and be saved at any token, and all of them draw in one operation.
    mixed = _mixed(_mixed(seeds) + numbers)
    return _shifted(mixed, 11).double() * 2.0**-53


def _mixed(state: Tensor) -> Tensor:
    """Take a step of SplitMix64."""
    # PyTorch has no uint64 arithmetic on all devices. Sums and products of int64 wrap around to the same bits (the
    # factors are those of the paper, minus 2^64); only the shift to the right needs care.
    state = state + (0x9E3779B97F4A7C15 - 2**64)
    state = (state ^ _shifted(state, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    state = (state ^ _shifted(state, 27)) * (0x94D049BB133111EB - 2**64)
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, by: int) -> Tensor:
    return (state >> by) & ((1 << (64 - by)) - 1)
