"""Relative effective context length (Section 4.3 and Appendix C): the longest context that a model still gains from.

Symbols as in the paper: l_i(c,t) is the loss of model i at target t when the model sees exactly c tokens. The baseline
b(c,t) is the lowest of all models' losses at the short length c. f_i(c,c') is the mean over targets of the lower of
b(c,t) and l_i(c',t) at the longer length c'. g_i(c,c') is the relative gain in perplexity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from operator import index

import torch
from jaxtyping import Float64, Int64
from numpy.typing import ArrayLike
from torch import Tensor

from txl.errors import UserError
from txl.files import JsonObject

# Losses l_i(c,t) in nats by model name and context length: [targets], with equal targets in equal order everywhere.
Losses = Mapping[str, Mapping[int, Tensor | ArrayLike]]
Gains = dict[float, dict[tuple[int, int], dict[str, float]]]  # by r, pair (c,c') of context lengths, and model


def relative_effective_context_length(
    losses: Losses,
    r: float = 1.0,
    threshold: float = 0.01,
    longest: Mapping[str, int | None] | None = None,
    step: int | None = None,
) -> dict[str, int]:
    """Return, for each model, the context length beyond which a longer context gains less than `threshold`.

    Each measured length c is compared with a longer length c'. The result is the first c with g_i(c,c') < `threshold`,
    or the largest measured length if no c qualifies. All models share one baseline, so the result depends on the group.

    Args:
        r: fraction of the targets to compare at each c, taken from the targets with the largest b(c,t).
        threshold: least relative gain in perplexity that counts; 0.01 in the paper.
        longest: upper limits of the result by model, or None: the most tokens that a model reads at once, if its losses
            stay constant at longer contexts (`txl.losses_at_contexts`).
        step: c' - c (Delta in the paper), if lengths between c and c' are measured too; None: c' is the next length.
    """
    return effective_context(losses, [r], threshold, longest, step).recl[r]


@dataclass(frozen=True)
class EffectiveContext:
    """The relative effective context length of every model of a group, and the gains from which it is computed."""

    recl: dict[float, dict[str, int]]  # in tokens, by r and model
    relative_gains: Gains  # g_i(c,c') by r, by pair (c,c') of lengths one step apart, and by model
    perplexity_gains: Gains  # exp f_i(c,c) - exp f_i(c,c') by r, pair c < c' of multiples of the step, model (Figure 3)


def effective_context(
    losses: Losses,
    fractions: Sequence[float],
    threshold: float = 0.01,
    longest: Mapping[str, int | None] | None = None,
    step: int | None = None,
) -> EffectiveContext:
    """Return `relative_effective_context_length` and the gains of a group for every fraction r of hardest targets."""
    for r in fractions:
        check_fractions(r, threshold)
    lengths = _checked(losses)
    steps = [(short, short + step) for short in lengths if short + step in lengths] if step else list(pairwise(lengths))
    if step is not None and (step < 1 or (not steps and len(lengths) > 1)):
        raise UserError(f"step is {step}, but no two of the context lengths {lengths} are that far apart")
    whole = [length for length in lengths if step is None or length % step == 0]
    relative = {r: {pair: relative_gains(losses, *pair, r) for pair in steps} for r in fractions}
    recl: dict[float, dict[str, int]] = {r: {} for r in fractions}
    for r, by_pair in relative.items():
        for name in losses:
            stops = [short for (short, _), gains in by_pair.items() if gains[name] < threshold]
            # A model that was held at fewer tokens than were asked for gets no longer answer than it read.
            recl[r][name] = min([*stops, lengths[-1]][0], (longest or {}).get(name) or lengths[-1])
    pairs = list(combinations(whole, 2))
    perplexity = {r: {pair: perplexity_gains(losses, *pair, r) for pair in pairs} for r in fractions}
    return EffectiveContext(recl, relative, perplexity)


def group_record(
    models: Sequence[JsonObject], losses: Mapping[str, Mapping[int, Tensor]], r: Sequence[float], threshold: float
) -> JsonObject:
    """Return the effective context lengths, perplexities and gains of a group of models, ready for JSON.

    `models` has for each model its "name", its "longest_context" (the most tokens that it reads at once, or None), and
    anything else to record; the other arguments are those of `effective_context`.
    """
    context = effective_context(losses, r, threshold, {model["name"]: model["longest_context"] for model in models})
    first = next(iter(losses.values()))
    lengths = sorted(first)

    def rows(gains: Gains) -> dict[str, list[JsonObject]]:
        return {
            str(r): [{"short": short, "long": long, "gain": gain} for (short, long), gain in by_pair.items()]
            for r, by_pair in gains.items()
        }

    return {
        "targets": len(first[lengths[0]]),
        "context_lengths": lengths,
        "threshold": threshold,
        "models": [
            {
                **model,
                "recl": {str(r): by_model[model["name"]] for r, by_model in context.recl.items()},
                "ppl": {str(length): values.mean().exp().item() for length, values in losses[model["name"]].items()},
            }
            for model in models
        ],
        "relative_gains": rows(context.relative_gains),
        "perplexity_gains": rows(context.perplexity_gains),
    }


def spread_targets(n_token: int, longest: int, count: int, step: int) -> range:
    """Return `count` or more targets at equal distances over a stream, each with at least `longest` tokens before it.

    The distance between targets is a multiple or a divisor of `step`, the difference between context lengths: contexts
    of several targets then begin at the same token and are read once (`txl.losses_at_contexts`). If this would yield at
    least four times as many targets as requested, the distance is chosen without regard to `step`.
    """
    distance = widest = max(1, (n_token - longest) // count)
    while step % distance and distance % step:
        distance -= 1
    return range(longest, n_token, widest if 4 * distance <= widest else distance)


def check_fractions(r: float, threshold: float) -> None:
    """Refuse a fraction r or a threshold that is out of range."""
    if not 0 < r <= 1:
        raise UserError(field="r", value=r, expected="a fraction above 0 and at most 1")
    if not 0 <= threshold < 1:
        raise UserError(field="threshold", value=threshold, expected="a relative gain from 0 up to but not including 1")


def relative_gains(losses: Losses, short: int, long: int, r: float = 1.0) -> dict[str, float]:
    """Return g_i(c,c') = (exp f_i(c,c) - exp f_i(c,c')) / exp f_i(c,c) of each model, for c = `short`, c' = `long`."""
    baseline, chosen = _baseline(losses, short, r)
    # f_i(c,c) is the mean baseline for every model: b(c,t) is no larger than any l_i(c,t).
    before = baseline[chosen].mean()
    gains = {}
    for name, by_length in losses.items():
        after = torch.minimum(baseline, _float64(by_length[long]))[chosen].mean()
        # expm1, because a gain near the threshold of 1% is the difference of two nearly equal perplexities.
        gains[name] = 0.0 - torch.expm1(after - before).item()  # not -0.0
    return gains


def perplexity_gains(losses: Losses, short: int, long: int, r: float = 1.0) -> dict[str, float]:
    """Return exp f_i(c,c) - exp f_i(c,c') of each model, as in Figure 3."""
    baseline, chosen = _baseline(losses, short, r)
    perplexity = baseline[chosen].mean().exp().item()
    return {name: gain * perplexity for name, gain in relative_gains(losses, short, long, r).items()}


def _baseline(losses: Losses, length: int, r: float) -> tuple[Float64[Tensor, " targets"], Int64[Tensor, " hardest"]]:
    """Return b(c,t), the lowest loss of all models at each target, and the fraction r of targets where it is largest.

    At least one target is chosen, by the baseline and not by a model's own losses: all models are compared on the same.
    """
    baseline = torch.stack([_float64(by_length[length]) for by_length in losses.values()]).amin(dim=0)
    return baseline, baseline.topk(max(1, round(r * len(baseline))), sorted=False).indices


def _checked(losses: Losses) -> list[int]:
    """Check the losses, and return the context lengths in increasing order."""
    if not losses:
        raise UserError("no models were given", expected="the losses of one or more")
    lengths: list[int] = []
    shape: list[int] = []
    for name, by_length in losses.items():
        try:
            measured = sorted(map(index, by_length.keys()))
            values = {length: _float64(given) for length, given in by_length.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"the losses of {name!r} are not numbers by context length ({error})") from None
        lengths = lengths or measured
        if measured != lengths or not lengths or lengths[0] < 1:
            expected = "one or more lengths above 0, the same for all models"
            raise UserError(f"model {name!r} has losses at context lengths {measured}", expected=expected)
        for length, found in values.items():
            shape = shape or list(found.shape)
            if list(found.shape) != shape or len(shape) != 1 or not shape[0] or not found.isfinite().all():
                problem = f"model {name!r} has losses of shape {list(found.shape)} at context length {length}"
                raise UserError(problem, expected="a finite number for each of the same targets, in one dimension")
    return lengths


def _float64(losses: Tensor | ArrayLike) -> Tensor:
    return torch.as_tensor(losses, dtype=torch.float64)
