"""The continuous cache (Grave et al. 2016) around any model: tokens that were read lately become likelier.

The cache holds pairs (h_i, x_{i+1}) of a hidden state and the token that followed it. At position t, which predicts
x_{t+1}, it gives (Equation 3 of the paper)

    p_cache(w) proportional to the sum over the pairs with x_{i+1} = w of exp(theta h_t . h_i),

over the last `size` pairs with i < t, and the model's distribution becomes (1 - lambda) p_model + lambda p_cache
(Equation 4). Where there is no pair yet it is p_model. A softmax temperature changes p_model before it is mixed.
Nothing is trained: `txl.tune_cache` tunes theta and lambda.

Shapes: B lanes, T tokens of a segment, E width of the hidden states, S pairs within reach, V vocabulary, Q thetas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor

from txl.config import Lengths, Limit
from txl.errors import UserError
from txl.models.cross_entropy import at_least_float32, nll_at_temperature
from txl.models.language_model import EVERY_TARGET, CacheSettings, LanguageModel, Objective, State

MAX_SCORES = 1 << 24
"""Products h_t . h_i that may exist at a time."""
MAX_SIZE = 1 << 32
_MOST_THETA = 1e30
"""Products of hidden states times more than this leave float32."""
"""Pairs that a cache may be given: more than any text has here."""


@dataclass(frozen=True)
class CacheState:
    """The model's own state, and the newest n hidden states with the tokens that followed all but the last."""

    inner: State
    """The model's own."""
    hidden: Float[Tensor, "B n E"]
    """Oldest first; the last one is followed by the next token to be read."""
    following: Int64[Tensor, "B pairs"]
    """n - 1 tokens (none where n is 0)."""
    valid: Bool[Tensor, "B n"]
    """False for what a lane read before it was reset."""

    @property
    def batch_size(self) -> int:
        """Number of lanes B."""
        return self.hidden.shape[0]

    @property
    def lengths(self) -> Lengths:
        """The lengths of the model's own state."""
        return self.inner.lengths

    @property
    def length(self) -> int | None:
        """Positions of memory of the model's own state."""
        return self.inner.length

    def detach(self) -> CacheState:
        """Return the state cut off from the graph that computed it."""
        return replace(self, inner=self.inner.detach(), hidden=self.hidden.detach())

    def select(self, lanes: Int[Tensor, " lanes"]) -> CacheState:
        """Return the state of some lanes, in the order of the indices `lanes`; repeats are allowed."""
        chosen = lanes.to(self.hidden.device)
        inner = self.inner.select(lanes)
        return CacheState(inner, self.hidden[chosen], self.following[chosen], self.valid[chosen])

    def reset(self, mask: Bool[Tensor, " B"]) -> CacheState:
        """Return the state with nothing in the lanes where `mask` is true."""
        kept = ~mask.to(self.valid.device)
        return replace(self, inner=self.inner.reset(mask), valid=self.valid & kept[:, None])

    def to_tensors(self) -> dict[str, Tensor]:
        """Return everything as named tensors."""
        inner = {f"{_INNER}{name}": each for name, each in self.inner.to_tensors().items()}
        return inner | {"hidden": self.hidden, "following": self.following, "valid": self.valid}

    def filled_with_noise(self) -> CacheState:
        """Return the state with the model's own filled; the pairs stay."""
        return replace(self, inner=self.inner.filled_with_noise())


@dataclass(frozen=True)
class _Block:
    """Some positions of a segment and the pairs that any of them sees."""

    positions: slice
    scores: Float[Tensor, "B t S"]
    """h_t . h_i."""
    seen: Bool[Tensor, "B t S"]
    following: Int64[Tensor, "B S"]


_INNER = "inner."


class ContinuousCache(LanguageModel[CacheState]):
    """A model with a cache of what it has read. Its state is the model's and the last `size` pairs.

    Args:
        model: any model of this project; it is not changed.
        size: pairs that a position sees.
        theta: how much more similar contexts count, 0 or more; 0 counts all pairs alike.
        weight: lambda, the cache's share of the probability, from 0 up to but not including 1.
    """

    def __init__(self, model: LanguageModel, size: int, theta: float, weight: float):
        super().__init__()
        check_cache(size, [theta], [weight])
        self.model, self.size, self.theta, self.weight = model, size, theta, weight
        self.vocab_size, self.context, self.config = model.vocab_size, model.context, model.config

    @property
    def own_model(self) -> LanguageModel:
        """The model inside."""
        return self.model

    @property
    def cache_settings(self) -> CacheSettings:
        """Size, theta and lambda."""
        return {"cache_size": self.size, "cache_theta": self.theta, "cache_lambda": self.weight}

    def init_state(
        self, batch_size: int, mem_len: int | None = None, window: Limit = None, clamp_len: Limit = None
    ) -> CacheState:
        """Return the model's empty memory, and an empty cache; see `LanguageModel.init_state`."""
        inner = self.model.init_state(batch_size, mem_len=mem_len, window=window, clamp_len=clamp_len)
        like = next(self.model.parameters()).detach()
        nothing = torch.zeros(batch_size, 0, device=like.device)
        return CacheState(inner, like.new_zeros(batch_size, 0, 0), nothing.long(), nothing.bool())

    def state_from_tensors(self, tensors: dict[str, Tensor]) -> CacheState:
        """Return the state that `CacheState.to_tensors` described."""
        inner = {name.removeprefix(_INNER): each for name, each in tensors.items() if name.startswith(_INNER)}
        pairs = (tensors[name] for name in ("hidden", "following", "valid"))
        return CacheState(self.model.state_from_tensors(inner), *pairs)

    def nll(
        self, tokens: Int64[Tensor, "B T"], targets: Int64[Tensor, "B T"], state: CacheState
    ) -> tuple[Float[Tensor, "B T"], CacheState]:
        """Return the negative log-likelihood of each target, without gradient; see `LanguageModel.nll`."""
        return self.nll_at(tokens, targets, state, 1.0)

    @torch.no_grad()
    def nll_at(
        self, tokens: Int64[Tensor, "B T"], targets: Int64[Tensor, "B T"], state: CacheState, temperature: float
    ) -> tuple[Float[Tensor, "B T"], CacheState]:
        """Return `nll` with a temperature of the model's softmax, to which the cache is mixed in afterwards."""
        mixed, _, state = self.nll_and_own(tokens, targets, state, temperature)
        return mixed, state

    def nll_and_own(
        self, tokens: Int64[Tensor, "B T"], targets: Int64[Tensor, "B T"], state: CacheState, temperature: float
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"], CacheState]:
        """Return the loss of each target with the cache, without gradient, and the model's own with gradient."""
        plain, cached, any_pair, state = self.parts(tokens, targets, state, [self.theta], temperature)
        nll = plain.detach()
        mixed = -torch.logaddexp(math.log1p(-self.weight) - nll, _log(self.weight) + cached[0].log().to(nll.dtype))
        return torch.where(any_pair, mixed, nll), plain, state

    def parts(
        self,
        tokens: Int64[Tensor, "B T"],
        targets: Int64[Tensor, "B T"],
        state: CacheState,
        thetas: Sequence[float],
        temperature: float = 1.0,
    ) -> tuple[Float[Tensor, "B T"], Float64[Tensor, "Q B T"], Bool[Tensor, "B T"], CacheState]:
        """Return the two losses that are mixed, for several thetas at once.

        Returns:
            the model's loss of each target in nats, which alone may have a gradient; the target's probability in the
            cache, for each theta; true where there was any pair (elsewhere that probability is 0); the next state.
        """
        hidden, blocks, after = self._read(tokens, state)
        if temperature == 1:
            nll = self.model.nll_of(hidden, targets)
        else:
            nll = nll_at_temperature(self.model.log_probs_of(hidden), targets, temperature)
        cached = torch.zeros(len(thetas), *targets.shape, dtype=torch.float64, device=hidden.device)
        any_pair = torch.zeros_like(targets, dtype=torch.bool)
        for block in blocks:
            matches = block.following[:, None] == targets[:, block.positions, None]
            any_pair[:, block.positions] = block.seen.any(dim=-1)
            for number, theta in enumerate(thetas):
                matched = _shares(block, theta) * matches
                cached[number, :, block.positions] = matched.sum(dim=-1, dtype=torch.float64)
        return nll, cached, any_pair, after

    @torch.no_grad()
    def log_probs(self, tokens: Int64[Tensor, "B T"], state: CacheState) -> tuple[Float[Tensor, "B T V"], CacheState]:
        """Return log-probabilities of the next token, without gradient; see `LanguageModel.log_probs`."""
        hidden, blocks, after = self._read(tokens, state)
        log_probs = self.model.log_probs_of(hidden)
        for block in blocks:
            plain = log_probs[:, block.positions]
            shares = _shares(block, self.theta).to(plain.dtype)
            cached = torch.zeros_like(plain).scatter_add_(-1, block.following[:, None].expand_as(shares), shares)
            mixed = torch.logaddexp(math.log1p(-self.weight) + plain, _log(self.weight) + cached.log())
            log_probs[:, block.positions] = torch.where(block.seen.any(dim=-1, keepdim=True), mixed, plain)
        return log_probs, after

    def training_terms(
        self, tokens: Tensor, targets: Tensor, state: CacheState, objective: Objective = EVERY_TARGET
    ) -> NoReturn:
        """Refuse: there is nothing to train."""
        raise UserError("a continuous cache has nothing to train; train the model inside it")

    def _read(self, tokens: Tensor, state: CacheState) -> tuple[Tensor, Iterator[_Block], CacheState]:
        """Return the model's hidden states [B,T,E], the segment block by block, and the next state."""
        if not isinstance(state, CacheState):
            raise UserError("the state belongs to another model; expected one that this cache's init_state made")
        hidden, inner = self.model.hidden_states(tokens, state.inner)
        n_before, new = state.hidden.shape[1], at_least_float32(hidden).detach()
        keys = torch.cat([state.hidden, new], dim=1) if n_before else new
        following = torch.cat([state.following, tokens if n_before else tokens[:, 1:]], dim=1)
        valid = torch.cat([state.valid, torch.ones_like(tokens, dtype=torch.bool)], dim=1)
        oldest = max(0, keys.shape[1] - self.size)
        after = CacheState(inner, keys[:, oldest:], following[:, oldest:], valid[:, oldest:])
        return hidden, self._blocks(keys, following, valid, n_before), after

    def _blocks(self, keys: Tensor, following: Tensor, valid: Tensor, n_before: int) -> Iterator[_Block]:
        """Yield the positions after the first `n_before`, as many at a time as `MAX_SCORES` allows."""
        n_token = keys.shape[1] - n_before
        # A block of t positions sees at most size + t pairs, and no more than there are.
        most = min(self.size + n_token, keys.shape[1])
        step = max(1, MAX_SCORES // (keys.shape[0] * most))
        for start in range(0, n_token, step):
            end = min(start + step, n_token)
            # Position t, whose hidden state has the number n + t, sees the pairs n + t - size to n + t - 1.
            first, last = max(0, n_before + start - self.size), n_before + end - 1
            if first == last:
                continue  # the first token of all: nothing was read before it
            place = torch.arange(first, last, device=keys.device)
            newest = torch.arange(n_before + start, n_before + end, device=keys.device)[:, None]
            within = (place < newest) & (place >= newest - self.size)
            with torch.autocast(keys.device.type, enabled=False):
                scores = keys[:, n_before + start : n_before + end] @ keys[:, first:last].transpose(1, 2)
            yield _Block(slice(start, end), scores, within & valid[:, None, first:last], following[:, first:last])


def _shares(block: _Block, theta: float) -> Tensor:
    """Return each pair's share of the cache's probability: [B,t,S], rows of zeros where nothing is seen."""
    largest = block.scores.masked_fill(~block.seen, -math.inf).amax(dim=-1, keepdim=True)
    # A pair that is not seen may have a larger product: it must not overflow before its share becomes 0.
    shares = ((block.scores - largest).clamp(max=0) * theta).exp() * block.seen
    return shares / shares.sum(dim=-1, keepdim=True).clamp(min=1)  # the largest one seen counts 1


def _log(weight: float) -> float:
    return math.log(weight) if weight > 0 else -math.inf


def check_cache(size: int, thetas: Sequence[float], weights: Sequence[float]) -> None:
    """Refuse settings of a cache that are out of their ranges."""
    if not 1 <= size <= MAX_SIZE:
        raise UserError(f"the cache's size is {size}; expected 1 pair or more, at most {MAX_SIZE}")
    for theta in thetas:
        if not 0 <= theta <= _MOST_THETA:
            raise UserError(f"the cache's theta is {theta}; expected 0 or more, at most {_MOST_THETA:g}")
    for weight in weights:
        if not 0 <= weight < 1:
            raise UserError(f"the cache's lambda is {weight}; expected a share from 0 up to but not including 1")
