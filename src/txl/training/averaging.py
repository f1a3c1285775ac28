"""The average of the weights over the later part of training, which evaluation uses.

With the plain mean this is averaged SGD (Polyak and Juditsky 1992). The authors' moving average for Penn Treebank,
mu = 1/step counted from the beginning of the average, equals this plain mean. `average_begins` in `training.schedule`
says when an average begins.
"""

from __future__ import annotations

import copy
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

ModelT = TypeVar("ModelT", bound=nn.Module)


class WeightAverage(Generic[ModelT]):
    """The running average of a model's weights, while the model itself continues training.

    Args:
        model: model that is trained; the average begins as a copy of its weights.
        mu: weight of the newest weights in the average; None: 1/n at the n-th update, the plain mean of n weights.
    """

    def __init__(self, model: ModelT, mu: float | None = None):
        self.model = copy.deepcopy(model).requires_grad_(False).eval()  # averaged weights, to evaluate and to save
        self.count = 0  # number of updates averaged so far; 0: the average is the initial copy
        self._mu = mu

    @torch.no_grad()
    def update(self, model: nn.Module, skipped: Tensor | None = None) -> None:
        """Add the weights after a step to the average: average + mu (newest - average).

        Args:
            model: model that is trained.
            skipped: bool without dimension, on the device, which the host does not read. If it is true, the averaged
                weights stay unchanged, and the caller has to set `count` back.
        """
        weight = 1 / (self.count + 1) if self._mu is None else self._mu
        for average, newest in zip(self.model.parameters(), model.parameters(), strict=True):
            if self.count == 0:  # the copy made at the beginning is no weight of a step
                average.copy_(newest)
            elif skipped is None:
                average.lerp_(newest, weight)
            else:
                average.lerp_(newest, torch.where(skipped, 0.0, weight).to(average.dtype))
        for average, newest in zip(self.model.buffers(), model.buffers(), strict=True):
            average.copy_(newest)
        self.count += 1
