"""Schedules of training, as functions of the step and the validation losses; they do not need PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from txl.config import TrainConfig


def learning_rate(step: int, config: TrainConfig, losses: Sequence[float] = ()) -> float:
    """Return the learning rate of update number `step`, counted from 0.

    Linear warm-up to the peak over `warmup_steps` updates, then

    - cosine: half a cosine from the peak to `min_learning_rate` over the remaining updates (shifted by the warm-up, as
      in the authors' TensorFlow code; the cosine of their PyTorch code jumps at the end of the warm-up),
    - inverse_sqrt: the peak times sqrt(warmup_steps / updates made), not below `min_learning_rate`,
    - constant: the peak,
    - linear: the peak, then a line to `min_learning_rate` over the last `decay_share` of all updates,
    - steps: the peak, divided by ten after each number of updates in `decay_at`, not below `min_learning_rate`,
    - plateau: as linear, divided by four whenever `plateau_patience` of the validation `losses` in a row are no better
      than the best before them (with 1 as in Zaremba et al. 2014 and others), not below `min_learning_rate`. Because
      of the line, a run without such losses also ends at a low rate.

    Cosine and line end where an average of the weights begins (`average_from`); the rate is constant from then on.
    """
    peak, lowest, warmup = config.learning_rate, config.min_learning_rate, config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "constant":
        return peak
    if config.schedule == "steps":
        return max(lowest, peak * 0.1 ** sum(step >= end for end in config.decay_at))
    if config.schedule == "inverse_sqrt":
        return max(lowest, peak * math.sqrt(max(warmup, 1) / (step + 1)))
    end = config.steps if config.average_from is None else config.average_from
    if config.schedule in ("linear", "plateau"):
        begin = max(warmup, end - config.decay_share * end)
        line = lowest + (peak - lowest) * min(1.0, max(0.0, end - step) / max(1.0, end - begin))
        if config.schedule == "linear":
            return line
        plateaus = sum(waited > 0 and waited % config.plateau_patience == 0 for waited in _waits(losses))
        return max(lowest, line * 0.25**plateaus)
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    return lowest + (peak - lowest) * 0.5 * (1 + math.cos(math.pi * progress))


def has_converged(losses: Sequence[float], config: TrainConfig) -> bool:
    """Return whether training is to stop: the last `patience` evaluations were no better than the best before them."""
    return config.patience is not None and bool(losses) and _waits(losses)[-1] >= config.patience


def average_begins(step: int, losses: Sequence[float], config: TrainConfig) -> bool:
    """Return whether the average of the weights begins after this step.

    With `average_from` it begins at that step. With `average_patience` n it begins when the last loss is above the best
    loss of evaluations that are more than n evaluations older (Merity et al. 2017, Section 4).
    """
    if config.average_from is not None:
        return step >= config.average_from
    patience = config.average_patience
    return patience is not None and len(losses) > patience + 1 and losses[-1] > min(losses[: -patience - 1])


def _waits(losses: Sequence[float]) -> list[int]:
    """Return for each evaluation how many in a row, up to this one, were no better than the best before them."""
    waits, best, waited = [], math.inf, 0
    for loss in losses:
        best, waited = (loss, 0) if loss < best else (best, waited + 1)
        waits.append(waited)
    return waits
