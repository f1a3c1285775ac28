"""Tuning of dynamic evaluation and of a continuous cache on a validation split, and published settings.

Learning rate and decay of dynamic evaluation are searched for, each pair by an evaluation of its own. For the cache
(Grave et al. 2016, Section 4) the split is read once: for every theta, the target's probabilities under the model and
in the cache are mixed with all lambdas at once, and only the sums of the losses are kept.

Shapes: B lanes, T tokens of a segment, Q thetas, L lambdas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from txl.config import Limit
from txl.errors import UserError
from txl.evaluation.dynamic import Adaptation, GradientStatistics, adapt_with
from txl.evaluation.perplexity import evaluate_with
from txl.evaluation.stream import Progress, Settings, TokenIds, evaluation_mode, read_lanes
from txl.files import JsonObject
from txl.models.cache import CacheState, ContinuousCache, check_cache
from txl.models.language_model import LanguageModel, State

# Learning rates, by rule, and decays that a tuning tries.
LEARNING_RATES = {
    "rms": (1e-6, 3e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3),
    "sgd": (1e-3, 3e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0),
}
DECAYS = (0.0, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1)
# Values of lambda, the cache's share of the probability, that are tried.
LAMBDAS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5)
# Products of theta and the mean of h . h, the score of a hidden state with itself. Models differ in the size of h by
# orders of magnitude, so that no theta suits all of them.
SHARPNESS = (0.0, 1.0, 2.0, 2.8, 4.0, 5.6, 8.0, 11.3, 16.0, 22.6, 32.0, 45.3, 64.0, 128.0)


@dataclass(frozen=True)
class DynamicTuning:
    """Mean losses of the pairs of learning rate and decay that were tried, and the best pair."""

    learning_rates: list[float]
    decays: list[float]
    tried: list[tuple[float, float, float]]
    """Learning rate, decay and mean loss in nats per token, in the order of the search; the loss is infinite if the
    weights diverged."""
    static_nll: float  #: mean loss in nats per token without adaptation
    tokens: int  #: number of targets scored in each evaluation
    adaptation: Adaptation  #: adaptation with the best pair
    best_nll: float

    @property
    def at_edge(self) -> list[str]:
        """Names of the parameters (learning rate, a decay above 0) whose best value is the first or last one tried."""
        found = []
        if at_end(self.adaptation.learning_rate, self.learning_rates):
            found.append("learning rate")
        if self.adaptation.decay > 0 and at_end(self.adaptation.decay, self.decays):
            found.append("decay")
        return found

    def to_dict(self) -> JsonObject:
        """Return all fields and `at_edge`, ready for JSON; an infinite loss in `tried` becomes None."""
        tried = [
            {"learning_rate": rate, "decay": decay, "nll": nll if math.isfinite(nll) else None}
            for rate, decay, nll in self.tried
        ]
        return asdict(self) | {"tried": tried, "at_edge": self.at_edge}


def tune_dynamic(
    model: LanguageModel,
    tokens: TokenIds,
    adaptation: Adaptation,
    statistics: GradientStatistics | None = None,
    *,
    learning_rates: Sequence[float] | None = None,
    decays: Sequence[float] = DECAYS,
    progress: Progress | None = None,
    **settings: Any,
) -> DynamicTuning:
    """Find the learning rate and decay with the lowest loss over the tokens of a validation split.

    The search runs on the grid of all pairs. It starts at the middle learning rate and the smallest decay, and moves to
    the best neighbour as long as that neighbour is better: about a dozen evaluations instead of one per pair.

    Args:
        adaptation: settings that are not tuned; the learning rate and the decay in it are ignored.
        learning_rates: learning rates to try; None: `LEARNING_RATES`.
        decays: decays to try.
        model, statistics, progress, settings: as for `txl.evaluate_dynamically`.
    """
    common = Settings(**{"batch_size": 1, **settings})
    return tune_dynamic_with(model, tokens, adaptation, statistics, common, learning_rates, decays, progress)


def tune_dynamic_with(
    model: LanguageModel,
    tokens: TokenIds,
    adaptation: Adaptation,
    statistics: GradientStatistics | None,
    settings: Settings,
    learning_rates: Sequence[float] | None = None,
    decays: Sequence[float] = DECAYS,
    progress: Progress | None = None,
) -> DynamicTuning:
    """Return the result of `tune_dynamic` for one value of settings."""
    rates = sorted(set(LEARNING_RATES[adaptation.rule] if learning_rates is None else learning_rates))
    decays = sorted(set(decays))
    if not rates or not decays:
        raise UserError("there is no learning rate or no decay to try")
    # Made here, because a value out of range is refused now and not after hours of work.
    pairs = {
        (row, column): replace(adaptation, learning_rate=rate, decay=decay)
        for row, rate in enumerate(rates)
        for column, decay in enumerate(decays)
    }
    # Without adaptation first: it shows damaged weights before the search begins.
    static = evaluate_with(model, tokens, settings, progress)
    if math.isnan(static.nll):
        raise UserError("losses of the fixed weights are not numbers: training diverged, or the weights are damaged")
    tried: dict[tuple[int, int], float] = {}

    def loss(place: tuple[int, int]) -> float:
        if place not in tried:
            nll = adapt_with(model, tokens, pairs[place], statistics, settings, progress).nll
            # NaN compares false with everything; as infinity, diverged weights lose every comparison.
            tried[place] = math.inf if math.isnan(nll) else nll
        return tried[place]

    best = (len(rates) // 2, 0)
    # The search below cannot leave a pair whose neighbours all diverge too.
    while best[0] > 0 and math.isinf(loss(best)):
        best = (best[0] - 1, 0)
    while True:
        row, column = best
        around = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        # Ties stay: a pair must be better, or the search might go in circles.
        better = min((place for place in around if place in pairs), key=loss, default=best)
        if loss(better) >= loss(best):
            break
        best = better
    if math.isinf(loss(best)):
        raise UserError(f"the weights diverge at every learning rate down to {rates[0]:g}", remedy="try smaller ones")
    all_tried = [(rates[row], decays[column], nll) for (row, column), nll in tried.items()]
    return DynamicTuning(rates, decays, all_tried, static.nll, static.tokens, pairs[best], tried[best])


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


def at_end(best: float, tried: Sequence[float]) -> bool:
    """Return whether the best of several values is the smallest or the largest."""
    return len(tried) > 1 and best in (min(tried), max(tried))


@dataclass(frozen=True)
class PublishedSettings:
    """Settings of a published dynamic evaluation."""

    adaptation: Adaptation
    statistics_segments: int | None  # of the training split; None: all
    statistics_batch_size: int
    segment: int
    mem_len: int | None = None  # None: the model has no memory of positions
    window: int | None = None  # in the authors' TensorFlow code, same_length with memory M is a window of M + 1
    clamp_len: int | None = None
    batch_size: int = 1


def _of_2019(learning_rate: float, decay: float, epsilon: float, segments: int, mem_len: int) -> PublishedSettings:
    adaptation = Adaptation("rms", learning_rate, decay, epsilon, statistics="sum")
    return PublishedSettings(adaptation, segments, 1, 128, mem_len, mem_len + 1, 1000)


def _of_2018(learning_rate: float, decay: float, segment: int) -> PublishedSettings:
    return PublishedSettings(Adaptation("rms", learning_rate, decay, 2e-5), None, 100, segment)


# By the name of the model that they were tuned for; other models need tuning (`tune_dynamic`). Those of 2019 are from
# the scripts tf/sota/*.sh in github.com/benkrause/dynamiceval-transformer, whose num_batch // 5000 segments of 128
# tokens are 140, 140 and 161. There, memory starts with positions of zeros that are attended to; here it starts empty.
# Those of 2018 are the defaults (tuned for AWD-LSTM) and the README's in github.com/benkrause/dynamic-evaluation.
PUBLISHED = {
    "enwik8-24L": _of_2019(1.2e-5, 24.0, 1e-4, 140, 3800),
    "text8-24L": _of_2019(1.5e-5, 24.0, 1e-4, 140, 3800),
    "wt103-large": _of_2019(2e-6, 0.0, 1e-5, 161, 1600),
    "ptb-awd-lstm": _of_2018(5e-5, 2e-3, 5),
    "ptb-qrnn": _of_2018(1.2e-4, 0.02, 20),
    "wikitext-2-qrnn": _of_2018(1.2e-4, 8e-3, 20),
}
