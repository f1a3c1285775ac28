"""Settings of dynamic evaluation: learning rate and decay tuned on a validation split, and published settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from txl.errors import UserError
from txl.evaluation.dynamic import Adaptation, GradientStatistics, evaluate_dynamically
from txl.evaluation.perplexity import EvaluationResult, Progress, Settings, TokenIds, evaluate
from txl.files import JsonObject
from txl.models.language_model import LanguageModel

LEARNING_RATES = {
    "rms": (1e-6, 3e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3),
    "sgd": (1e-3, 3e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0),
}
"""Learning rates to try, by rule."""
DECAYS = (0.0, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1)
"""Decays to try."""


@dataclass(frozen=True)
class DynamicTuning:
    """Mean losses of the pairs of learning rate and decay that were tried, and the best pair."""

    learning_rates: list[float]
    decays: list[float]
    tried: list[tuple[float, float, float]]
    """Learning rate, decay and mean loss in nats per token, in the order of the search; the loss is infinite if the
    weights diverged."""
    static_nll: float
    """Mean loss in nats per token without adaptation."""
    tokens: int
    """Number of targets scored in each evaluation."""
    adaptation: Adaptation
    """Adaptation with the best pair."""
    best_nll: float

    @property
    def at_edge(self) -> list[str]:
        """Names of the parameters (learning rate, a decay above 0) whose best value is the first or last one tried."""
        rates, decays = sorted(self.learning_rates), sorted(self.decays)
        found = []
        if len(rates) > 1 and self.adaptation.learning_rate in (rates[0], rates[-1]):
            found.append("learning rate")
        if len(decays) > 1 and self.adaptation.decay in (decays[0], decays[-1]) and self.adaptation.decay > 0:
            found.append("decay")
        return found

    def to_dict(self) -> JsonObject:
        """Return all fields and `at_edge`, ready for JSON; an infinite loss in `tried` becomes None."""
        tried = [
            {"learning_rate": rate, "decay": decay, "nll": nll if math.isfinite(nll) else None}
            for rate, decay, nll in self.tried
        ]
        return asdict(self) | {"tried": tried, "at_edge": self.at_edge}


@dataclass(frozen=True)
class DynamicGain:
    """Tuning of dynamic evaluation on one split, and results with and without dynamic evaluation on another split."""

    tuning: DynamicTuning
    static: EvaluationResult
    """Result with the trained weights."""
    adapted: EvaluationResult
    """Result with weights that adapt to the text; the loss is not a number if the weights diverged."""

    @property
    def times_static(self) -> float:
        """Time of scoring and adapting, as a multiple of the time of scoring alone."""
        return self.static.tokens_per_second / self.adapted.tokens_per_second


def measure_dynamic(
    model: LanguageModel,
    tune_on: TokenIds,
    measured: TokenIds,
    adaptation: Adaptation,
    statistics: GradientStatistics | None = None,
    *,
    learning_rates: Sequence[float] | None = None,
    decays: Sequence[float] = DECAYS,
    tune_tokens: int | None = None,
    max_tokens: int | None = None,
    tuning_progress: Progress | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> DynamicGain:
    """Tune dynamic evaluation on one split, and evaluate another split with and without dynamic evaluation.

    Args:
        model, adaptation, statistics, learning_rates, decays: as for `tune_dynamic`.
        tune_on: tokens of the validation split.
        measured: tokens of the split whose results are reported.
        tune_tokens, max_tokens: number of tokens to read from the beginning of `tune_on` and of `measured`; None: all.
        tuning_progress, progress: called during tuning and during each evaluation, with the number of targets scored so
            far and their total number.
        settings: segment, memory and so on, as for `txl.evaluate`; used for tuning and for both evaluations.
    """
    tuned = tune_dynamic(
        model,
        tune_on,
        adaptation,
        statistics,
        learning_rates=learning_rates,
        decays=decays,
        progress=tuning_progress,
        max_tokens=tune_tokens,
        **settings,
    )
    common = {"batch_size": 1, **settings, "max_tokens": max_tokens, "progress": progress}
    static = evaluate(model, measured, **common)
    adapted = evaluate_dynamically(model, measured, tuned.adaptation, statistics, **common)
    return DynamicGain(tuned, static, adapted)


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
    """Find the learning rate and decay with the lowest loss over a stream of tokens.

    The search runs on the grid of all pairs. It starts at the middle learning rate and the smallest decay, and moves to
    the best neighbour as long as that neighbour is better: about a dozen evaluations instead of one per pair.

    Args:
        model: any language model, or a continuous cache around a model; it is not changed.
        tokens: tokens of a validation split.
        adaptation: settings that are not tuned; the learning rate and the decay in it are ignored.
        statistics: as for `txl.evaluate_dynamically`.
        learning_rates: learning rates to try; None: `LEARNING_RATES`.
        decays: decays to try.
        progress: called with the number of targets scored in the current evaluation, and their total number.
        settings: segment, memory and so on, as for `txl.evaluate_dynamically`; a small `max_tokens` shortens the
            search.
    """
    rates = sorted(set(LEARNING_RATES[adaptation.rule] if learning_rates is None else learning_rates))
    pulls = sorted(set(decays))
    if not rates or not pulls:
        raise UserError("there is no learning rate or no decay to try; give one or more of each")
    for rate in rates:
        for decay in pulls:
            replace(adaptation, learning_rate=rate, decay=decay)  # raises for a value out of range before hours of work
    same: Settings = {"batch_size": 1} | settings
    static = evaluate(model, tokens, progress=progress, **same)
    if math.isnan(static.nll):
        raise UserError("losses of the fixed weights are not numbers: training diverged, or the weights are damaged")
    found: dict[tuple[int, int], float] = {}

    def loss(place: tuple[int, int]) -> float:
        if place not in found:
            tried = replace(adaptation, learning_rate=rates[place[0]], decay=pulls[place[1]])
            nll = evaluate_dynamically(model, tokens, tried, statistics, progress=progress, **settings).nll
            found[place] = math.inf if math.isnan(nll) else nll
        return found[place]

    best = (len(rates) // 2, 0)
    while best[0] > 0 and math.isinf(loss(best)):
        best = (best[0] - 1, 0)  # the search below cannot leave a pair whose neighbours all diverge too
    while True:
        row, column = best
        around = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        near = [each for each in around if 0 <= each[0] < len(rates) and 0 <= each[1] < len(pulls)]
        better = min(near, key=loss, default=best)
        if loss(better) >= loss(best):
            break
        best = better
    if math.isinf(loss(best)):
        raise UserError(f"the weights diverge at every learning rate down to {rates[0]:g}; try smaller ones")
    return DynamicTuning(
        learning_rates=rates,
        decays=pulls,
        tried=[(rates[row], pulls[column], nll) for (row, column), nll in found.items()],
        static_nll=static.nll,
        tokens=static.tokens,
        adaptation=replace(adaptation, learning_rate=rates[best[0]], decay=pulls[best[1]]),
        best_nll=found[best],
    )


@dataclass(frozen=True)
class PublishedSettings:
    """Settings of a published dynamic evaluation."""

    adaptation: Adaptation
    statistics_segments: int | None
    """Number of segments of the training split that are read for the gradient statistics; None: all."""
    statistics_batch_size: int
    segment: int
    mem_len: int | None = None
    """None: the model has no memory of positions."""
    window: int | None = None
    """Number of keys; in the authors' TensorFlow code, same_length with memory M is a window of M + 1."""
    clamp_len: int | None = None
    batch_size: int = 1


def _of_2019(learning_rate: float, decay: float, epsilon: float, segments: int, mem_len: int) -> PublishedSettings:
    adaptation = Adaptation("rms", learning_rate, decay, epsilon, statistics="sum")
    return PublishedSettings(adaptation, segments, 1, 128, mem_len, mem_len + 1, 1000)


def _of_2018(learning_rate: float, decay: float, segment: int) -> PublishedSettings:
    return PublishedSettings(Adaptation("rms", learning_rate, decay, 2e-5), None, 100, segment)


PUBLISHED = {
    "enwik8-24L": _of_2019(1.2e-5, 24.0, 1e-4, 140, 3800),
    "text8-24L": _of_2019(1.5e-5, 24.0, 1e-4, 140, 3800),
    "wt103-large": _of_2019(2e-6, 0.0, 1e-5, 161, 1600),
    "ptb-awd-lstm": _of_2018(5e-5, 2e-3, 5),
    "ptb-qrnn": _of_2018(1.2e-4, 0.02, 20),
    "wikitext-2-qrnn": _of_2018(1.2e-4, 8e-3, 20),
}
"""Published settings, by the name of the model that they were tuned for; other models need tuning (`tune_dynamic`).

The 2019 settings come from the scripts tf/sota/*.sh in github.com/benkrause/dynamiceval-transformer. In these scripts
num_batch // 5000 segments of 128 tokens are 140, 140 and 161, and memory starts with positions of zeros that are
attended to; in this package memory starts empty. The 2018 settings are the defaults (tuned for AWD-LSTM) and the
settings of the README in github.com/benkrause/dynamic-evaluation.
"""
