"""The training step: one update of the weights, and the reading of its loss.

Shapes: B lanes, T tokens of a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from txl.config import TrainConfig
from txl.data.lanes import Segment
from txl.models.family import FamilyModel
from txl.models.language_model import State
from txl.models.loss import Objective, TailRows
from txl.training.optimisers import Optimizer
from txl.training.parallel import TrainedModel
from txl.training.state import WeightAverage


@dataclass(frozen=True)
class StepInputs:
    """Everything that one update reads besides model, optimiser and configuration, for this process's lanes."""

    tokens: Tensor  # tokens that the model reads, int64 [B,T]
    targets: Tensor  # tokens that follow them, int64 [B,T]
    states: Sequence[State]  # state of each part; the B lanes are divided into as many equal parts
    progress: float = 0.0  # fraction of all updates already made, for schedules of auxiliary losses
    void: Tensor | None = None  # bool on the device: true if the update must be skipped, as the one before it was
    tail_rows: Sequence[TailRows | None] | None = None  # room for targets of tail clusters in each part (`Objective`)
    lengths: tuple[int, ...] | None = None  # lengths of the consecutive segments of the T tokens; None: one segment
    average: WeightAverage | None = None  # average to which the weights after the update are added


class UpdateResult(NamedTuple):
    """Figures of an update."""

    loss: float  # mean nats over the targets that count, before the update and without regularisation terms
    grad_norm: float  # before clipping
    updated: bool  # False: the update was skipped (not finite, or `void` was set), and the weights are unchanged
    overflowed: bool = False  # True: skipped because the scaled loss was too large for float16, and is scaled less now


class StepOutput(NamedTuple):
    """Tensors that an update returns; those on the device may still be computed."""

    # Loss, gradient norm, and 0 if the update was made, 1 if it was skipped, 2 if float16 overflowed: float64 [3].
    numbers: Tensor
    skipped: Tensor  # whether the third number is not 0, as a bool without dimension
    states: list[State]  # new memory of each part of the lanes
    n_target: int  # number of targets that had a loss, in all processes

    def result(self) -> UpdateResult:
        """Return the figures of the update, after waiting for the device."""
        loss, grad_norm, outcome = self.numbers.tolist()
        return UpdateResult(loss, grad_norm, updated=outcome == 0, overflowed=outcome == 2)


class PendingUpdate:
    """An update that was launched, and whose figures are read when the next update was launched, too.

    Reading the loss at once would leave a GPU without work while the host prepares the next update. The copy of the
    figures to the host begins here, between this update and the next, so that `result` waits for this update alone.
    `generators` and `averaged` are the random states and the number of averaged updates before it.
    """

    def __init__(self, output: StepOutput, segment: Segment, generators: dict[str, Tensor], averaged: int | None):
        self.output, self.segment, self.generators, self.averaged = output, segment, generators, averaged
        self._copied: torch.cuda.Event | None = None
        if output.numbers.is_cuda:
            # Only a copy to pinned memory does not wait; it lies before the next update in the GPU's queue.
            numbers = torch.empty(3, dtype=torch.float64, pin_memory=True)
            numbers.copy_(output.numbers, non_blocking=True)
            self.output = output._replace(numbers=numbers)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def result(self) -> UpdateResult:
        """Return the figures of the update, after waiting for it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self.output.result()


class StepAbandoned(Exception):
    """Exception for a stop that was requested between two parts of the lanes; the weights are unchanged."""


def training_step(
    trained: FamilyModel | TrainedModel,
    optimizer: Optimizer,
    inputs: StepInputs,
    config: TrainConfig,
    abandon: Callable[[], object] | None = None,
) -> StepOutput:
    """Make one update of the weights: forward, backward, clip, optimiser, average of the weights.

    The lanes are divided into as many parts as there are states, each with its own passes and memory. The gradient is
    that of the mean over all lanes, including those of other processes. If the optimiser supports it
    (`skips_on_device`), an update that is not finite is skipped on the device, without waiting for it. In float16 the
    loss is scaled (`LossScale`).

    Args:
        trained: model in training mode.
        optimizer: optimiser with the learning rate of this update already set.
        inputs: what the update reads.
        config: training configuration, of which dtype, clip and loss are used.
        abandon: called between two parts; if its result is true, the step raises StepAbandoned.
    """
    if not isinstance(trained, TrainedModel):
        trained = TrainedModel(trained)
    tokens, targets = inputs.tokens, inputs.targets
    processes, parts = trained.processes, len(inputs.states)
    rows = [None] * parts if inputs.tail_rows is None else inputs.tail_rows
    losses: list[Tensor] = []
    new_states: list[State] = []
    half = torch.float16 if config.dtype == "float16" else torch.bfloat16
    autocast = torch.autocast(tokens.device.type, half, enabled=config.dtype in ("float16", "bfloat16"))
    scale = optimizer.loss_scale
    lanes = zip(tokens.chunk(parts), targets.chunk(parts), inputs.states, rows, strict=True)
    for number, (part_tokens, part_targets, state, room) in enumerate(lanes):
        if number and abandon is not None and abandon():
            optimizer.zero_grad()
            raise StepAbandoned
        objective = Objective(config.loss, inputs.progress, room, inputs.lengths)
        with trained.part(is_last=number == parts - 1):
            with autocast:
                loss, penalty, new_state = trained.training_terms(part_tokens, part_targets, state, objective)
            # All parts have equally many targets, so the mean of their means is the mean over the whole batch.
            mean = (loss + penalty) / parts
            (mean if scale is None else mean * scale.factor).backward()
        losses.append(loss.detach().double() / parts)
        new_states.append(new_state)
    norm, divisor = optimizer.clip(trained.model.parameters(), config.clip)
    figures = torch.stack([sum(losses[1:], losses[0]), norm.double()])
    # A sum is not finite if one of its terms is not, so all processes decide alike.
    means = processes.sum_of(figures) / processes.count if processes.count > 1 else figures
    skipped = (means - means != 0).any()  # the difference of a number that is not finite is NaN
    overflowed = None if scale is None else scale.update(skipped, inputs.void)
    if inputs.void is not None:
        skipped = skipped | inputs.void
    optimizer.step(skipped, divisor)
    optimizer.zero_grad()
    if inputs.average is not None:
        inputs.average.update(trained.model, skipped)
    counted = sum(map(Objective(config.loss).counted, inputs.lengths or targets.shape[1:]))
    n_target = processes.count * len(targets) * counted
    outcome = skipped.double() if overflowed is None else skipped.double() + overflowed
    return StepOutput(torch.stack([means[0], figures[1], outcome]), skipped, new_states, n_target)
