"""One update of the weights.

Shapes: B lanes, T tokens of a segment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from txl.config import TrainConfig
from txl.models.language_model import LanguageModel
from txl.models.objective import Objective


@dataclass(frozen=True)
class StepResult:
    """What an update leaves behind."""

    loss: float
    """Mean nats over the targets that count, before the update and without what a model adds to regularise itself."""
    grad_norm: float
    """Norm of the gradient, before clipping."""
    states: list[Any]
    """The memory of each part of the lanes."""
    targets: int
    """How many targets counted."""
    updated: bool
    """False if the loss or the gradient was not finite; the weights are then as they were."""


def training_step(
    model: LanguageModel[Any],
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    targets: Tensor,
    states: list[Any],
    config: TrainConfig,
    progress: float = 0.0,
) -> StepResult:
    """Forward, backward, clip, update.

    The lanes are divided into as many parts as there are states; each part has a forward and a backward pass of its
    own and keeps its own memory, and the gradient is that of the mean over all lanes.

    Args:
        model: in training mode.
        optimizer: with the learning rate of this update already set.
        tokens, targets: int64 [B,T].
        states: one for each part.
        config: its dtype, clip and loss are used.
        progress: fraction of all updates that are made, for schedules of auxiliary losses.
    """
    objective = Objective(config.loss, progress)
    parts = len(states)
    total, new_states = 0.0, []
    autocast = torch.autocast(tokens.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16")
    for part_tokens, part_targets, state in zip(tokens.chunk(parts), targets.chunk(parts), states, strict=True):
        with autocast:
            loss, penalty, new_state = model.training_terms(part_tokens, part_targets, state, objective)
        ((loss + penalty) / parts).backward()
        total += loss.item() / parts
        new_states.append(new_state)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip if config.clip > 0 else math.inf).item()
    finite = math.isfinite(total) and math.isfinite(norm)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(total, norm, new_states, len(targets) * objective.counted(targets.shape[1]), finite)
