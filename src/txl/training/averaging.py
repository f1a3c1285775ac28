"""An average of the weights over the later part of training, which evaluation uses and checkpoints restore.

The average is PyTorch's `AveragedModel`. With the plain mean it is averaged SGD's (Polyak and Juditsky 1992), begun at
a step of the user's or, as AWD-LSTM begins it, when the validation stops improving (Merity et al. 2017, Section 4).
The authors' moving average for Penn Treebank, mu = 1/step counted from its beginning, is that same mean.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from txl.config import TrainConfig


class WeightAverage:
    """The running average of a model's weights; the model itself goes on training.

    Args:
        model: the one that trains. The average begins as a copy of its weights.
        mu: weight of the newest weights; None: 1/n at the n-th update, the plain mean of the n.
    """

    def __init__(self, model: nn.Module, mu: float | None = None):
        self._averaged = AveragedModel(model, multi_avg_fn=functools.partial(_mix, mu=mu))
        self._averaged.requires_grad_(False).eval()

    @property
    def model(self) -> nn.Module:
        """A model with the averaged weights, to evaluate and to save."""
        return self._averaged.module

    @property
    def count(self) -> int:
        """Weights averaged so far; 0: the copy it began with."""
        return int(self._averaged.n_averaged)

    @count.setter
    def count(self, value: int) -> None:
        self._averaged.n_averaged.fill_(value)

    def update(self, model: nn.Module) -> None:
        """Take in the weights that a step has led to."""
        self._averaged.update_parameters(model)


def _mix(averages: Any, newest: Any, count: Any, mu: float | None) -> None:
    """average + mu (newest - average) for each tensor, in place; `count` weights are in the averages."""
    weight = 1 / (int(count) + 1) if mu is None else mu
    for average, new in zip(averages, newest, strict=True):
        average.lerp_(new, weight)


def average_begins(step: int, losses: Sequence[float], config: TrainConfig) -> bool:
    """Whether an average of the weights begins after this step.

    Args:
        step: steps made.
        losses: of all evaluations so far, oldest first.
        config: its `average_from`; or its `average_patience` n: the last loss is above the best of those that are more
            than n evaluations older (the non-monotonic trigger, as AWD-LSTM's code has it).
    """
    if config.average_from is not None:
        return step >= config.average_from
    patience = config.average_patience
    return patience is not None and len(losses) > patience + 1 and losses[-1] > min(losses[: -patience - 1])
