"""Relative effective context length (Section 4.3 and Appendix C): the longest context that a model still gains from.

Symbols as in the paper: l_i(c,t) is the loss of model i at target t when the model sees exactly c tokens. The baseline
b(c,t) is the lowest of all models' losses at the short length c. f_i(c,c') is the mean over targets of the lower of
b(c,t) and l_i(c',t) at the longer length c'. g_i(c,c') is the relative gain in perplexity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral

import torch
from jaxtyping import Float64, Int64
from numpy.typing import ArrayLike
from torch import Tensor

from txl.errors import UserError
from txl.files import JsonObject

Losses = Mapping[str, Mapping[int, Tensor | ArrayLike]]
"""Losses l_i(c,t) in nats by model name and context length: [targets], with equal targets in equal order everywhere."""


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
        losses: losses of all models, at the same lengths and targets.
        r: fraction of the targets to compare at each c, taken from the targets with the largest b(c,t).
        threshold: least relative gain in perplexity that counts; 0.01 in the paper.
        longest: upper limits of the result by model, or None: the most tokens that a model reads at once, if its losses
            stay constant at longer contexts (`txl.losses_at_contexts`).
        step: c' - c (Delta in the paper), if lengths between c and c' are measured too; None: c' is the next length.
    """
    check_fractions(r, threshold)
    lengths = _checked(losses)
    found = dict.fromkeys(losses, lengths[-1])
    stopped: set[str] = set()
    for short, long in _steps(lengths, step):
        gains = relative_gains(losses, short, long, r)
        for name, gain in gains.items():
            if name not in stopped and gain < threshold:
                stopped.add(name)
                found[name] = short
    limits = {name: limit for name, limit in (longest or {}).items() if limit is not None}
    return {name: min(length, limits.get(name, length)) for name, length in found.items()}


@dataclass(frozen=True)
class EffectiveContext:
    """The relative effective context length of every model of a group, and the gains from which it is computed."""

    recl: dict[float, dict[str, int]]
    """Relative effective context length in tokens, by r and model."""
    relative_gains: dict[float, dict[tuple[int, int], dict[str, float]]]
    """g_i(c,c') by r, by pair (c,c') of lengths one step apart, and by model."""
    perplexity_gains: dict[float, dict[tuple[int, int], dict[str, float]]]
    """exp f_i(c,c) - exp f_i(c,c') by r, by pair c < c' of multiples of the step, and by model (Figure 3)."""


def effective_context(
    losses: Losses,
    fractions: Sequence[float],
    threshold: float = 0.01,
    longest: Mapping[str, int | None] | None = None,
    step: int | None = None,
) -> EffectiveContext:
    """Return `relative_effective_context_length` and the gains of a group for every fraction r of hardest targets."""
    recl = {r: relative_effective_context_length(losses, r, threshold, longest, step) for r in fractions}
    lengths = _checked(losses)
    whole = [length for length in lengths if step is None or length % step == 0]
    pairs = [(short, long) for short in whole for long in whole if long > short]
    return EffectiveContext(
        recl,
        {r: {pair: relative_gains(losses, *pair, r) for pair in _steps(lengths, step)} for r in fractions},
        {r: {pair: perplexity_gains(losses, *pair, r) for pair in pairs} for r in fractions},
    )


def group_record(
    models: Sequence[JsonObject], losses: Mapping[str, Mapping[int, Tensor]], r: Sequence[float], threshold: float
) -> JsonObject:
    """Return the effective context lengths, perplexities and gains of a group of models, ready for JSON.

    Args:
        models: for each model its "name", its "longest_context" (the most tokens that it reads at once, or None), and
            anything else to record.
        losses: losses by model name and context length, as in `effective_context`.
        r: fractions of the hardest targets to compare.
        threshold: least relative gain in perplexity that counts.
    """
    longest = {each["name"]: each["longest_context"] for each in models}
    found = effective_context(losses, r, threshold, longest)
    some = next(iter(losses.values()))
    lengths = sorted(some)

    def rows(gains: dict[float, dict[tuple[int, int], dict[str, float]]]) -> dict[str, list[JsonObject]]:
        return {
            str(r): [{"short": short, "long": long, "gain": gain} for (short, long), gain in by_pair.items()]
            for r, by_pair in gains.items()
        }

    return {
        "targets": len(some[lengths[0]]),
        "context_lengths": lengths,
        "threshold": threshold,
        "models": [
            {
                **model,
                "recl": {str(r): each[model["name"]] for r, each in found.recl.items()},
                "ppl": {str(length): values.mean().exp().item() for length, values in losses[model["name"]].items()},
            }
            for model in models
        ],
        "relative_gains": rows(found.relative_gains),
        "perplexity_gains": rows(found.perplexity_gains),
    }


def spread_targets(n_token: int, longest: int, count: int, step: int) -> range:
    """Return targets at equal distances over a stream, each with at least `longest` tokens before it.

    The distance between targets is a multiple or a divisor of `step`. Contexts of several targets then begin at the
    same token and are read once (`txl.losses_at_contexts`). If such a distance would yield at least four times as many
    targets as requested, the distance is chosen without regard to `step`.

    Args:
        n_token: number of tokens in the stream.
        longest: longest context in tokens.
        count: least number of targets; a stream with too few tokens yields fewer.
        step: difference between neighbouring context lengths.
    """
    distance = widest = max(1, (n_token - longest) // count)
    while step % distance and distance % step:
        distance -= 1
    if 4 * distance <= widest:
        distance = widest
    return range(longest, n_token, distance)


def check_fractions(r: float, threshold: float) -> None:
    """Refuse a fraction r or a threshold that is out of range."""
    if not 0 < r <= 1:
        raise UserError(field="r", value=r, expected="a fraction above 0 and at most 1")
    if not 0 <= threshold < 1:
        raise UserError(field="threshold", value=threshold, expected="a relative gain from 0 up to but not including 1")


def relative_gains(losses: Losses, short: int, long: int, r: float = 1.0) -> dict[str, float]:
    """Return g_i(c,c') = (exp f_i(c,c) - exp f_i(c,c')) / exp f_i(c,c) of each model, for c = `short`, c' = `long`."""
    baseline, chosen = _hardest(losses, short, r)
    # f_i(c,c) is the mean baseline for every model: b(c,t) is no larger than any l_i(c,t).
    before = baseline[chosen].mean()
    gains = {}
    for name, by_length in losses.items():
        after = torch.minimum(baseline, _float64(by_length[long]))[chosen].mean()
        gains[name] = 0.0 - torch.expm1(after - before).item()  # not -0.0
    return gains


def perplexity_gains(losses: Losses, short: int, long: int, r: float = 1.0) -> dict[str, float]:
    """Return exp f_i(c,c) - exp f_i(c,c') of each model, as in Figure 3."""
    baseline, chosen = _hardest(losses, short, r)
    perplexity = baseline[chosen].mean().exp().item()
    return {name: gain * perplexity for name, gain in relative_gains(losses, short, long, r).items()}


def _hardest(losses: Losses, length: int, r: float) -> tuple[Float64[Tensor, " targets"], Int64[Tensor, " hardest"]]:
    """Return b(c,t), and the indices of the fraction r of targets with the largest b(c,t) (at least one index)."""
    baseline = torch.stack([_float64(by_length[length]) for by_length in losses.values()]).amin(dim=0)
    count = max(1, round(r * len(baseline)))
    return baseline, baseline.topk(count, sorted=False).indices


def _checked(losses: Losses) -> list[int]:
    """Check the losses, and return the context lengths in increasing order."""
    if not losses:
        raise UserError("no models were given; expected the losses of one or more")
    for name, each in losses.items():
        if not isinstance(each, Mapping) or not all(isinstance(length, Integral) for length in each):
            raise UserError(f"model {name!r} has {type(each).__name__} {each!r:.60}; expected losses by context length")
    first, by_length = next(iter(losses.items()))
    lengths, n_target = sorted(by_length), None
    if not lengths or lengths[0] < 1:
        raise UserError(f"model {first!r} has losses at context lengths {lengths}; expected one or more, all above 0")
    for name, each in losses.items():
        if sorted(each) != lengths:
            raise UserError(
                f"model {name!r} has losses at context lengths {sorted(each)}, {first!r} at {lengths}; "
                f"expected the same"
            )
        for length, given in each.items():
            try:
                values = _float64(given)
            except (TypeError, ValueError, RuntimeError) as error:
                raise UserError(
                    f"model {name!r} has losses at context length {length} that are no numbers ({error}); expected one "
                    f"of each of the same targets"
                ) from None
            n_target = len(values) if n_target is None and values.ndim == 1 else n_target
            if values.ndim != 1 or len(values) != n_target or n_target == 0:
                raise UserError(
                    f"model {name!r} has losses of shape {list(values.shape)} at context length {length}; expected one "
                    f"of each of the same targets, [{n_target or 'targets'}]"
                )
            if not values.isfinite().all():
                raise UserError(f"model {name!r} has losses at context length {length} that are not finite numbers")
    return lengths


def _steps(lengths: list[int], step: int | None) -> list[tuple[int, int]]:
    """Return the pairs of lengths one step apart; without a step, the pairs of neighbouring lengths."""
    if step is None:
        return list(pairwise(lengths))
    pairs = [(length, length + step) for length in lengths if length + step in lengths]
    if step < 1 or (not pairs and len(lengths) > 1):
        raise UserError(f"step is {step}, but no two of the context lengths {lengths} are that far apart")
    return pairs


def _float64(losses: Tensor | ArrayLike) -> Tensor:
    return torch.as_tensor(losses, dtype=torch.float64)
