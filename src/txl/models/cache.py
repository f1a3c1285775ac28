"""The continuous cache (Grave et al. 2016) around any model: it makes recently read tokens more likely.

The cache holds pairs (h_i, x_{i+1}) of a hidden state and the token that followed it. At position t, which predicts
x_{t+1}, the distribution of the cache is (Equation 3 of the paper)

    p_cache(w) proportional to the sum over the pairs with x_{i+1} = w of exp(theta h_t . h_i),

over the last `size` pairs with i < t. The model's distribution becomes (1 - lambda) p_model + lambda p_cache
(Equation 4). It is p_model if there is no pair. A softmax temperature changes p_model before the mixture. The cache
has no weights to train; `txl.tune_cache` tunes theta and lambda.

Shapes: B lanes, T tokens of a segment, E width of the hidden states, S pairs seen by a block, V vocabulary, Q thetas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor

from txl.config import Lengths, Limit
from txl.errors import UserError
from txl.models.language_model import CacheSettings, LanguageModel, State
from txl.models.loss import EVERY_TARGET, Objective, at_least_float32, nll_at_temperature

# Largest number of products h_t . h_i that exist at a time.
MAX_SCORES = 1 << 24
# Largest size of a cache in pairs, larger than any text used here.
MAX_SIZE = 1 << 32
# Largest theta: products of hidden states times a larger theta overflow float32.
_MOST_THETA = 1e30
_INNER = "inner."  # prefix of the names of tensors of the model inside


@dataclass(frozen=True)
class CacheState:
    """The state of the model inside, the newest n hidden states, and the tokens that followed all but the last."""

    inner: State
    hidden: Float[Tensor, "B n E"]  # oldest first; the next token to be read follows the last one
    following: Int64[Tensor, "B pairs"]  # n - 1 tokens, or none if n is 0
    valid: Bool[Tensor, "B n"]  # false for hidden states from before a reset of the lane

    @property
    def batch_size(self) -> int:
        """Number of lanes B."""
        return self.hidden.shape[0]

    @property
    def lengths(self) -> Lengths:
        """Lengths of the state of the model inside."""
        return self.inner.lengths

    @property
    def length(self) -> int | None:
        """Number of positions in the memory of the model inside."""
        return self.inner.length

    def detach(self) -> CacheState:
        """Return the state, detached from the graph that computed it."""
        return replace(self, inner=self.inner.detach(), hidden=self.hidden.detach())

    def select(self, lanes: Int[Tensor, " lanes"]) -> CacheState:
        """Return the state of the lanes with indices `lanes`, in that order; indices may repeat."""
        chosen = lanes.to(self.hidden.device)
        inner = self.inner.select(lanes)
        return CacheState(inner, self.hidden[chosen], self.following[chosen], self.valid[chosen])

    def reset(self, mask: Bool[Tensor, " B"]) -> CacheState:
        """Return the state, emptied in the lanes where `mask` is true."""
        mask = mask.to(self.valid.device)
        # Zeros, because a NaN or infinity would remain in its lane: NaN times a share of 0 is NaN.
        hidden = self.hidden.masked_fill(mask[:, None, None], 0)
        return replace(self, inner=self.inner.reset(mask), hidden=hidden, valid=self.valid & ~mask[:, None])

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the state as named tensors, lanes first."""
        inner = {f"{_INNER}{name}": tensor for name, tensor in self.inner.to_tensors().items()}
        return inner | {"hidden": self.hidden, "following": self.following, "valid": self.valid}

    def filled_with_noise(self) -> CacheState:
        """Return the state with noise in the state of the model inside; the pairs do not change."""
        return replace(self, inner=self.inner.filled_with_noise())


class _Block(NamedTuple):
    """A block of t positions of a segment, and all S pairs that at least one of the positions sees."""

    positions: slice
    scores: Float[Tensor, "B t S"]  # products h_t . h_i
    seen: Bool[Tensor, "B t S"]
    following: Int64[Tensor, "B S"]


class ContinuousCache(LanguageModel[CacheState]):
    """A model with a continuous cache. Its state is that of the model inside, and the last `size` pairs.

    With a `theta` of 0 all pairs count equally; `weight` is lambda, the cache's share of the probability, from 0 up to
    but not including 1.
    """

    def __init__(self, model: LanguageModel, size: int, theta: float, weight: float):
        super().__init__()
        check_cache(size, [theta], [weight])
        self.model, self.size, self.theta, self.weight = model, size, theta, weight
        self.vocab_size, self.context, self.config = model.vocab_size, model.context, model.config

    @property
    def own_model(self) -> LanguageModel:
        """The model inside the cache."""
        return self.model

    @property
    def cache_settings(self) -> CacheSettings:
        """Size, theta and lambda of the cache."""
        return {"cache_size": self.size, "cache_theta": self.theta, "cache_lambda": self.weight}

    def init_state(
        self, batch_size: int, mem_len: int | None = None, window: Limit = None, clamp_len: Limit = None
    ) -> CacheState:
        """Return a state with empty memory and an empty cache; see `LanguageModel.init_state`."""
        inner = self.model.init_state(batch_size, mem_len=mem_len, window=window, clamp_len=clamp_len)
        like = next(self.model.parameters()).detach()
        nothing = torch.zeros(batch_size, 0, device=like.device)
        return CacheState(inner, like.new_zeros(batch_size, 0, 0), nothing.long(), nothing.bool())

    def state_from_tensors(self, tensors: dict[str, Tensor]) -> CacheState:
        """Return the state from the tensors of `CacheState.to_tensors`."""
        inner = {name.removeprefix(_INNER): tensor for name, tensor in tensors.items() if name.startswith(_INNER)}
        pairs = (tensors[name] for name in ("hidden", "following", "valid"))
        return CacheState(self.model.state_from_tensors(inner), *pairs)

    def nll(self, tokens: Tensor, targets: Tensor, state: CacheState) -> tuple[Tensor, CacheState]:
        """Return the negative log-likelihood of each target, without gradient; see `LanguageModel.nll`."""
        return self.nll_at(tokens, targets, state, 1.0)

    @torch.no_grad()
    def nll_at(
        self, tokens: Tensor, targets: Tensor, state: CacheState, temperature: float
    ) -> tuple[Tensor, CacheState]:
        """Return `nll` with a temperature that applies to the model's softmax before the mixture with the cache."""
        mixed, _, state = self.nll_and_own(tokens, targets, state, temperature)
        return mixed, state

    def nll_and_own(
        self, tokens: Tensor, targets: Tensor, state: CacheState, temperature: float
    ) -> tuple[Tensor, Tensor, CacheState]:
        """Return the losses with the cache, without gradient, the model's losses with gradient, and the next state."""
        plain, cached, any_pair, state = self.parts(tokens, targets, state, [self.theta], temperature)
        nll = plain.detach()
        # -log((1 - lambda) p_model + lambda p_cache), Equation 4, in logarithms.
        mixed = -torch.logaddexp(math.log1p(-self.weight) - nll, self._log_weight + cached[0].log().to(nll.dtype))
        return torch.where(any_pair, mixed, nll), plain, state

    @property
    def _log_weight(self) -> float:
        return math.log(self.weight) if self.weight > 0 else -math.inf

    def parts(
        self,
        tokens: Int64[Tensor, "B T"],
        targets: Int64[Tensor, "B T"],
        state: CacheState,
        thetas: Sequence[float],
        temperature: float = 1.0,
    ) -> tuple[Float[Tensor, "B T"], Float64[Tensor, "Q B T"], Bool[Tensor, "B T"], CacheState]:
        """Return the parts of the mixture, for several thetas at once.

        They are the model's loss of each target, the only part with gradients; the probability of each target in the
        cache, for each theta; true at positions that see a pair (elsewhere the probability is 0); the next state.
        """
        hidden, blocks, after = self._read(tokens, state)
        if temperature == 1:
            nll = self.model.nll_of(hidden, targets)
        else:
            nll = nll_at_temperature(self.model.log_probs_of(hidden), targets, temperature)
        cached = torch.zeros(len(thetas), *targets.shape, dtype=torch.float64, device=hidden.device)
        any_pair = torch.zeros_like(targets, dtype=torch.bool)
        for block in blocks:
            # p_cache(target): the shares of the pairs whose token is the target (Equation 3).
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
            mixed = torch.logaddexp(math.log1p(-self.weight) + plain, self._log_weight + cached.log())
            log_probs[:, block.positions] = torch.where(block.seen.any(dim=-1, keepdim=True), mixed, plain)
        return log_probs, after

    def training_terms(
        self, tokens: Tensor, targets: Tensor, state: CacheState, objective: Objective = EVERY_TARGET
    ) -> NoReturn:
        """Raise `UserError`: a continuous cache has nothing to train."""
        self._lacks("weights to train")

    def _read(self, tokens: Tensor, state: CacheState) -> tuple[Tensor, Iterator[_Block], CacheState]:
        """Return the model's hidden states [B,T,E], an iterator over blocks of the segment, and the next state."""
        if not isinstance(state, CacheState):
            raise UserError("the state belongs to another model; expected one that this cache's init_state made")
        hidden, inner = self.model.hidden_states(tokens, state.inner)
        # In float32, because theta multiplies these products before an exponential.
        n_before, new = state.hidden.shape[1], at_least_float32(hidden).detach()
        keys = torch.cat([state.hidden, new], dim=1) if n_before else new
        following = torch.cat([state.following, tokens if n_before else tokens[:, 1:]], dim=1)
        valid = torch.cat([state.valid, torch.ones_like(tokens, dtype=torch.bool)], dim=1)
        oldest = max(0, keys.shape[1] - self.size)
        after = CacheState(inner, keys[:, oldest:], following[:, oldest:], valid[:, oldest:])
        return hidden, self._blocks(keys, following, valid, n_before), after

    def _blocks(self, keys: Tensor, following: Tensor, valid: Tensor, n_before: int) -> Iterator[_Block]:
        """Yield the positions after the first `n_before` in blocks as large as `MAX_SCORES` allows."""
        n_token = keys.shape[1] - n_before
        # A block of t positions sees at most size + t pairs, and at most all pairs that exist.
        most = min(self.size + n_token, keys.shape[1])
        step = max(1, MAX_SCORES // (keys.shape[0] * most))
        for start in range(0, n_token, step):
            end = min(start + step, n_token)
            # Position t, whose hidden state has the number n + t, sees the pairs n + t - size to n + t - 1.
            first, last = max(0, n_before + start - self.size), n_before + end - 1
            if first == last:
                continue  # the very first token sees no pair
            place = torch.arange(first, last, device=keys.device)
            newest = torch.arange(n_before + start, n_before + end, device=keys.device)[:, None]
            within = (place < newest) & (place >= newest - self.size)
            with torch.autocast(keys.device.type, enabled=False):
                scores = keys[:, n_before + start : n_before + end] @ keys[:, first:last].transpose(1, 2)
            yield _Block(slice(start, end), scores, within & valid[:, None, first:last], following[:, first:last])


def _shares(block: _Block, theta: float) -> Tensor:
    """Return each pair's share of the cache's probability, [B,t,S]; zeros for a position that sees no pair."""
    largest = block.scores.masked_fill(~block.seen, -math.inf).amax(dim=-1, keepdim=True)
    # Clamp, since a pair that is not seen may have a larger product, which would overflow before its share becomes 0.
    shares = ((block.scores - largest).clamp(max=0) * theta).exp() * block.seen
    return shares / shares.sum(dim=-1, keepdim=True).clamp(min=1)  # the largest term of a sum is 1


def check_cache(size: int, thetas: Sequence[float], weights: Sequence[float]) -> None:
    """Raise `UserError` if a setting of a cache is out of its range."""
    settings = [("size", size, 1 <= size <= MAX_SIZE, f"1 to {MAX_SIZE}")]
    settings += [("theta", theta, 0 <= theta <= _MOST_THETA, f"0 to {_MOST_THETA:g}") for theta in thetas]
    settings += [("lambda", weight, 0 <= weight < 1, "a share from 0 up to but not including 1") for weight in weights]
    for name, value, allowed, expected in settings:
        if not allowed:
            raise UserError(f"the cache's {name} is {value}; expected {expected}")
