"""One update of the weights.

Shapes: B lanes, T tokens of a segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from txl.config import TrainConfig
from txl.models.family import FamilyModel
from txl.models.language_model import Objective, State
from txl.training.parallel import TrainedModel, full_tensor


@dataclass(frozen=True)
class StepResult:
    """Loss, gradient norm and new memory of an update."""

    loss: float
    """Mean nats over the targets that count, before the update and without what a model adds to regularise itself."""
    grad_norm: float
    """Norm of the gradient, before clipping."""
    states: list[State]
    """The memory of each part of the lanes."""
    targets: int
    """Number of targets that had a loss, in all processes."""
    updated: bool
    """False if the loss or the gradient was not finite; the weights are then as they were."""


class StepAbandoned(Exception):
    """A stop was asked for between two parts of the lanes; the weights are as they were."""


def training_step(
    model: FamilyModel | TrainedModel,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    targets: Tensor,
    states: Sequence[State],
    config: TrainConfig,
    progress: float = 0.0,
    abandon: Callable[[], bool] | None = None,
) -> StepResult:
    """Make one update of the weights: forward, backward, clip, optimiser.

    The lanes are divided into as many parts as there are states; each part has a forward and a backward pass of its
    own and keeps its own memory, and the gradient is that of the mean over all lanes, those of other processes too.

    Args:
        model: in training mode.
        optimizer: with the learning rate of this update already set.
        tokens, targets: int64 [B,T], of this process's lanes.
        states: one for each part.
        config: its dtype, clip and loss are used.
        progress: fraction of all updates that are made, for schedules of auxiliary losses.
        abandon: asked between two parts whether to give up the step.

    Raises:
        StepAbandoned: if it was.
    """
    trained = model if isinstance(model, TrainedModel) else TrainedModel(model)
    processes, parts, objective = trained.processes, len(states), Objective(config.loss, progress)
    total, new_states = 0.0, []
    autocast = torch.autocast(tokens.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16")
    lanes = zip(tokens.chunk(parts), targets.chunk(parts), states, strict=True)
    for number, (part_tokens, part_targets, state) in enumerate(lanes):
        if number and abandon is not None and abandon():
            optimizer.zero_grad(set_to_none=True)
            raise StepAbandoned
        with trained.part(is_last=number == parts - 1):
            with autocast:
                loss, penalty, new_state = trained.training_terms(part_tokens, part_targets, state, objective)
            ((loss + penalty) / parts).backward()
        total += loss.item() / parts
        new_states.append(new_state)
    largest = config.clip if config.clip > 0 else math.inf
    norm = full_tensor(torch.nn.utils.clip_grad_norm_(trained.parameters(), largest)).item()
    # A sum is not finite if one of its terms is not, so all processes decide alike.
    total, norm_sum = (value / processes.count for value in processes.sum(total, norm))
    finite = math.isfinite(total) and math.isfinite(norm_sum)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    n_target = processes.count * len(targets) * objective.counted(targets.shape[1])
    return StepResult(total, norm, new_states, n_target, finite)
