"""Tuning of theta and lambda of a continuous cache on a validation split (Grave et al. 2016, Section 4).

The split is read once. For every theta, the target's probabilities under the model and in the cache are mixed with all
lambdas at once, and only the sums of the losses are kept.

Shapes: B lanes, T tokens of a segment, Q thetas, L lambdas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from txl.config import Limit, same_length
from txl.errors import UserError
from txl.evaluation.perplexity import (
    EvaluationResult,
    Lanes,
    Progress,
    TokenIds,
    checked_ids,
    checked_segments,
    evaluate,
    evaluation_mode,
)
from txl.models.cache import ContinuousCache, check_cache
from txl.models.language_model import LanguageModel, State

LAMBDAS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5)
"""Values of lambda, the cache's share of the probability, that are tried."""
SHARPNESS = (0.0, 1.0, 2.0, 2.8, 4.0, 5.6, 8.0, 11.3, 16.0, 22.6, 32.0, 45.3, 64.0, 128.0)
"""Products of theta and the mean of h . h (the score of a hidden state with itself); each yields one theta to try."""


@dataclass(frozen=True)
class CacheTuning:
    """Mean losses over the grid of theta and lambda, and the best point of the grid."""

    size: int
    thetas: list[float]
    lambdas: list[float]
    nll: list[list[float]]
    """Mean loss in nats per token, by theta and lambda."""
    plain_nll: float
    """Mean loss in nats per token without the cache."""
    tokens: int
    """Number of targets scored."""
    theta: float
    """Best theta; `weight` is the best lambda."""
    weight: float
    best_nll: float

    @property
    def at_edge(self) -> list[str]:
        """Names of the parameters, theta or lambda, whose best value is the first or last one tried (theta 0: not)."""
        thetas, lambdas = sorted(self.thetas), sorted(self.lambdas)
        found = []
        if len(thetas) > 1 and (self.theta == thetas[-1] or (self.theta == thetas[0] and self.theta > 0)):
            found.append("theta")
        if len(lambdas) > 1 and self.weight in (lambdas[0], lambdas[-1]):
            found.append("lambda")
        return found


@dataclass(frozen=True)
class CacheGain:
    """Tuning of a cache on one split, and results with and without the cache on another split."""

    tuning: CacheTuning
    without: EvaluationResult
    with_cache: EvaluationResult


def measure_cache(
    model: LanguageModel,
    tune_on: TokenIds,
    measured: TokenIds,
    *,
    size: int = 2000,
    thetas: Sequence[float] | None = None,
    lambdas: Sequence[float] | None = None,
    tuning_progress: Progress | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> CacheGain:
    """Tune theta and lambda of a continuous cache on one split, and evaluate another split with and without the cache.

    Args:
        model: any model of this project.
        tune_on: tokens of the validation split.
        measured: tokens of the split whose results are reported.
        size, thetas, lambdas: as in `tune_cache`.
        tuning_progress, progress: called during tuning and during each evaluation, with the number of targets scored so
            far and their total number.
        settings: for all three passes: segment, mem_len, window, clamp_len, batch_size, max_tokens, dtype and
            temperature, as for `txl.evaluate`.
    """
    tuned = tune_cache(
        model, tune_on, size=size, thetas=thetas, lambdas=lambdas or LAMBDAS, **settings, progress=tuning_progress
    )
    cached = ContinuousCache(model, tuned.size, tuned.theta, tuned.weight)
    without, with_cache = (evaluate(each, measured, **settings, progress=progress) for each in (model, cached))
    return CacheGain(tuned, without, with_cache)


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
        model: any model of this project.
        tokens: tokens of a validation split, or any one-dimensional array of token ids.
        size: number of pairs that the cache holds.
        thetas: values of theta to try; None: `SHARPNESS` divided by the mean of h . h in the first segment.
        lambdas: values of lambda to try.
        segment, mem_len, window, clamp_len, batch_size, max_tokens, dtype, temperature, progress: as for
            `txl.evaluate`.
    """
    if not lambdas or (thetas is not None and not thetas):
        raise UserError("there is no theta or no lambda to try; give one or more of each")
    check_cache(size, thetas or [0.0], lambdas)
    ids = checked_ids(tokens, max_tokens, dtype, segment=segment, temperature=temperature)
    window = same_length(mem_len, window)
    lanes = Lanes.cut(len(ids), batch_size)
    device = next(model.parameters()).device
    cache = ContinuousCache(model, size, 0.0, 0.0)
    state = cache.init_state(batch_size, mem_len=mem_len, window=window, clamp_len=clamp_len)
    weights = torch.tensor(list(lambdas), dtype=torch.float64, device=device)
    total, plain, done = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    with evaluation_mode(cache, dtype) as cache:
        for inputs, targets, counts in checked_segments(model, lanes, ids, segment):
            done += int(counts.sum())
            counts = counts.to(device)
            if thetas is None:
                thetas = _spread(cache.model, inputs, state.inner)
            nll, cached, any_pair, state = cache.parts(inputs, targets, state, thetas, temperature)
            nll = nll.double().masked_fill(~counts, 0.0)
            total = total.to(device) + _mixed(nll, cached, any_pair & counts, weights)
            plain = plain.to(device) + nll.sum()
            if progress is not None:
                progress(done, lanes.n_target)
    assert thetas is not None  # Lanes.cut leaves at least one segment
    means = total / done
    row, column = divmod(int(means.argmin()), len(weights))
    return CacheTuning(
        size=size,
        thetas=list(thetas),
        lambdas=list(lambdas),
        nll=means.tolist(),
        plain_nll=plain.item() / done,
        tokens=done,
        theta=thetas[row],
        weight=list(lambdas)[column],
        best_nll=means.min().item(),
    )


def _mixed(nll: Tensor, cached: Tensor, any_pair: Tensor, weights: Tensor) -> Tensor:
    """Sum -log((1 - lambda) p_model + lambda p_cache) over [B,T], by theta and lambda: [Q,L]."""
    plain = nll[~any_pair].sum()
    likely, cached = -nll[any_pair], cached[:, any_pair].log()
    sums = [
        -torch.logaddexp(torch.log1p(-weight) + likely, weight.log() + cached).sum(dim=-1)
        for weight in weights.unbind()
    ]
    return torch.stack(sums, dim=-1) + plain


def _spread(model: LanguageModel, inputs: Tensor, state: State) -> list[float]:
    """Return the thetas to try, scaled to the size of the model's hidden states."""
    hidden, _ = model.hidden_states(inputs, state)
    square = hidden.double().square().sum(dim=-1).mean().item()
    return [float(f"{each / square:.3g}") for each in SHARPNESS]
