"""The learning rate as a function of the step, with nothing to save."""

from __future__ import annotations

import math

from txl.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of update number `step`, counted from 0.

    Linear warm-up to the peak over `warmup_steps` updates, then

    - cosine: half a cosine from the peak to `min_learning_rate` over the remaining updates (shifted by the warm-up, as
      in the authors' TensorFlow code; their PyTorch code does not shift it and jumps at the warm-up's end),
    - inverse_sqrt: the peak times sqrt(warmup_steps / updates made), not below `min_learning_rate`,
    - constant: the peak,
    - steps: the peak, divided by ten after each number of updates in `decay_at`, not below `min_learning_rate`.

    The cosine ends where an average of the weights begins (`average_from`), and stays at its end from there on.
    """
    peak, lowest, warmup = config.learning_rate, config.min_learning_rate, config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "constant":
        return peak
    if config.schedule == "steps":
        return max(lowest, peak * 0.1 ** sum(step >= each for each in config.decay_at))
    if config.schedule == "inverse_sqrt":
        return max(lowest, peak * math.sqrt(max(warmup, 1) / (step + 1)))
    end = config.steps if config.average_from is None else config.average_from
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    return lowest + (peak - lowest) * 0.5 * (1 + math.cos(math.pi * progress))
