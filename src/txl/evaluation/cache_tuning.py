"""Tuning of theta and lambda of a continuous cache on a validation split (Grave et al. 2016, Section 4).

The split is read once. For every theta, the target's probabilities under the model and in the cache are mixed with all
lambdas at once, and only the sums of the losses are kept.

Shapes: B lanes, T tokens of a segment, Q thetas, L lambdas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from txl.config import Limit
from txl.errors import UserError
from txl.evaluation.dynamic_tuning import at_end
from txl.evaluation.stream import Progress, Settings, TokenIds, evaluation_mode, read_lanes
from txl.models.cache import CacheState, ContinuousCache, check_cache
from txl.models.language_model import LanguageModel, State

# Values of lambda, the cache's share of the probability, that are tried.
LAMBDAS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5)
# Products of theta and the mean of h . h, the score of a hidden state with itself. Models differ in the size of h by
# orders of magnitude, so that no theta suits all of them.
SHARPNESS = (0.0, 1.0, 2.0, 2.8, 4.0, 5.6, 8.0, 11.3, 16.0, 22.6, 32.0, 45.3, 64.0, 128.0)


@dataclass(frozen=True)
class CacheTuning:
    """Mean losses over the grid of theta and lambda, and the best point of the grid."""

    size: int
    thetas: list[float]
    lambdas: list[float]
    nll: list[list[float]]  #: mean loss in nats per token, by theta and lambda
    plain_nll: float  #: mean loss in nats per token without the cache
    tokens: int  #: number of targets scored
    theta: float  #: best theta; `weight` is the best lambda
    weight: float
    best_nll: float

    @property
    def at_edge(self) -> list[str]:
        """Names of the parameters, theta or lambda, whose best value is the first or last one tried (theta 0: not)."""
        names = ["theta"] if self.theta > 0 and at_end(self.theta, self.thetas) else []
        return names + ["lambda"] * at_end(self.weight, self.lambdas)

    def around(self, model: LanguageModel) -> ContinuousCache:
        """Return a model with the best cache."""
        return ContinuousCache(model, self.size, self.theta, self.weight)


def tune_cache(
    model: LanguageModel,
    tokens: TokenIds,
    *,
    size: int = 2000,
    thetas: Sequence[float] | None = None,
    lambdas: Sequence[float] = LAMBDAS,
    segment: int = 128,
    mem_len: int | None = None,
    window: Limit = None,
    clamp_len: Limit = None,
    batch_size: int = 10,
    max_tokens: int | None = None,
    dtype: str = "float32",
    temperature: float = 1.0,
    progress: Progress | None = None,
) -> CacheTuning:
    """Find the theta and lambda with the lowest mean loss in one pass over a stream of tokens.

    Args:
        tokens: tokens of a validation split, or any one-dimensional array of token ids.
        size: number of pairs that the cache holds.
        thetas: values of theta to try; None: `SHARPNESS` divided by the mean of h . h in the first segment.
        lambdas: values of lambda to try.
        model, segment, mem_len, window, clamp_len, batch_size, max_tokens, dtype, temperature, progress: as for
            `txl.evaluate`.
    """
    settings = Settings(segment, mem_len, window, clamp_len, batch_size, max_tokens, False, dtype, temperature)
    return tune_cache_with(model, tokens, settings, size, thetas, lambdas, progress)


def tune_cache_with(
    model: LanguageModel,
    tokens: TokenIds,
    settings: Settings,
    size: int = 2000,
    thetas: Sequence[float] | None = None,
    lambdas: Sequence[float] = LAMBDAS,
    progress: Progress | None = None,
) -> CacheTuning:
    """Return the result of `tune_cache` for one value of settings."""
    if not lambdas or (thetas is not None and not thetas):
        raise UserError("there is no theta or no lambda to try")
    check_cache(size, thetas or [0.0], lambdas)
    tried = list(thetas or ())
    with evaluation_mode(ContinuousCache(model, size, 0.0, 0.0), settings.dtype) as cache:
        weights = torch.tensor(list(lambdas), dtype=torch.float64, device=next(cache.parameters()).device)
        total = torch.zeros((), dtype=torch.float64, device=weights.device)

        def step(inputs: Tensor, targets: Tensor, state: State, counted: Tensor) -> tuple[Tensor, State]:
            nonlocal total
            assert isinstance(state, CacheState)
            if not tried:  # theta multiplies h . h, so the range to try is found from the first hidden states
                hidden, _ = cache.model.hidden_states(inputs, state.inner)
                square = hidden.double().square().sum(dim=-1).mean().item()
                tried.extend(float(f"{product / square:.3g}") for product in SHARPNESS)
            nll, cached, any_pair, after = cache.parts(inputs, targets, state, tried, settings.temperature)
            nll = nll.double().masked_fill(~counted, 0.0)
            total = total + _mixed(nll, cached, any_pair & counted, weights)
            return nll, after

        # One pass: the state of model and cache does not depend on theta and lambda.
        plain = read_lanes(cache, tokens, settings, step, progress=progress)
    means = total / plain.tokens
    row, column = divmod(int(means.argmin()), len(lambdas))
    return CacheTuning(
        size=size,
        thetas=tried,
        lambdas=list(lambdas),
        nll=means.tolist(),
        plain_nll=plain.nll,
        tokens=plain.tokens,
        theta=tried[row],
        weight=lambdas[column],
        best_nll=means.min().item(),
    )


def _mixed(nll: Tensor, cached: Tensor, any_pair: Tensor, lambdas: Tensor) -> Tensor:
    """Sum -log((1 - lambda) p_model + lambda p_cache) over [B,T], by theta and lambda: [Q,L]."""
    # A position without a pair has the model's probability alone, whatever lambda.
    plain = nll[~any_pair].sum()
    likely, cached = -nll[any_pair], cached[:, any_pair].log()
    # One lambda at a time: all of them at once would need [Q,L,B*T] numbers.
    sums = [
        -torch.logaddexp(torch.log1p(-weight) + likely, weight.log() + cached).sum(dim=-1)
        for weight in lambdas.unbind()
    ]
    return torch.stack(sums, dim=-1) + plain
