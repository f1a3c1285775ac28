"""The training step: one update of the weights.

Shapes: B lanes, T tokens of a segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from txl.config import TrainConfig
from txl.devices import Late
from txl.models.family import FamilyModel
from txl.models.language_model import Objective, State, TailRows
from txl.training.parallel import TrainedModel, full_tensor, is_sharded


@dataclass(frozen=True)
class StepInputs:
    """Everything that one update reads besides model, optimiser and configuration, for this process's lanes."""

    tokens: Tensor
    """Tokens that the model reads, int64 [B,T]."""
    targets: Tensor
    """Tokens that follow them, int64 [B,T]."""
    states: Sequence[State]
    """State of each part; the B lanes are divided into as many equal parts as there are states."""
    progress: float = 0.0
    """Fraction of all updates already made, for schedules of auxiliary losses."""
    void: Tensor | None = None
    """Bool without dimension, on the device: true if this update must be skipped in any case; for an optimiser that
    `skips_on_device`."""
    tail_rows: Sequence[TailRows | None] | None = None
    """Room for the targets of tail clusters in each part, as in `Objective`."""
    lengths: tuple[int, ...] | None = None
    """Lengths of the consecutive segments that make up the T tokens, as in `Objective`; None: one segment."""


class StepResult:
    """Loss, gradient norm and new memory of an update. Reading the loss or the norm waits for the device.

    Args:
        numbers: loss, gradient norm, and 1 if the update was skipped, else 0, on the device: float64 [3].
        skipped: third number as a bool without dimension, on the device.
        states: new memory of each part of the lanes.
        targets: number of targets that had a loss, in all processes.
    """

    def __init__(self, numbers: Tensor, skipped: Tensor, states: list[State], targets: int):
        self.numbers, self.skipped = numbers, skipped
        self.states, self.targets = states, targets
        self._sent: Late | None = None

    def send(self) -> None:
        """Start to copy the numbers to the host, so that reading them does not wait for work launched later."""
        self._sent = self._sent or Late(self.numbers)

    def _read(self, place: int) -> float:
        self.send()
        assert self._sent is not None
        return self._sent.read()[place]

    @property
    def loss(self) -> float:
        """Mean loss in nats over the targets that count, before the update and without regularisation terms."""
        return self._read(0)

    @property
    def grad_norm(self) -> float:
        """Norm of the gradient, before clipping."""
        return self._read(1)

    @property
    def updated(self) -> bool:
        """False if the update was skipped (not finite, or `void` was set); the weights are then unchanged."""
        return self._read(2) == 0


class StepAbandoned(Exception):
    """Exception for a stop that was requested between two parts of the lanes; the weights are unchanged."""


def training_step(
    trained: FamilyModel | TrainedModel,
    optimizer: torch.optim.Optimizer,
    inputs: StepInputs,
    config: TrainConfig,
    abandon: Callable[[], bool] | None = None,
) -> StepResult:
    """Make one update of the weights: forward, backward, clip, optimiser.

    The lanes are divided into as many parts as there are states. Each part has its own forward and backward pass and
    its own memory. The gradient is that of the mean over all lanes, including those of other processes. If the
    optimiser supports it (`skips_on_device`), an update that is not finite is skipped on the device, and this function
    does not wait for the device.

    Args:
        trained: model in training mode.
        optimizer: optimiser with the learning rate of this update already set.
        inputs: tokens, targets and states, and what else the update reads.
        config: training configuration, of which dtype, clip and loss are used.
        abandon: function called between two parts; if it returns True, the step is abandoned.

    Raises:
        StepAbandoned: if `abandon` returned True.
    """
    if not isinstance(trained, TrainedModel):
        trained = TrainedModel(trained)
    tokens, targets = inputs.tokens, inputs.targets
    processes, parts = trained.processes, len(inputs.states)
    rows = [None] * parts if inputs.tail_rows is None else inputs.tail_rows
    total, new_states = tokens.new_zeros((), dtype=torch.float64), []
    autocast = torch.autocast(tokens.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16")
    lanes = zip(tokens.chunk(parts), targets.chunk(parts), inputs.states, rows, strict=True)
    for number, (part_tokens, part_targets, state, room) in enumerate(lanes):
        if number and abandon is not None and abandon():
            optimizer.zero_grad(set_to_none=True)
            raise StepAbandoned
        objective = Objective(config.loss, inputs.progress, room, inputs.lengths)
        with trained.part(is_last=number == parts - 1):
            with autocast:
                loss, penalty, new_state = trained.training_terms(part_tokens, part_targets, state, objective)
            ((loss + penalty) / parts).backward()
        total = total + loss.detach().double() / parts
        new_states.append(new_state)
    largest = config.clip if config.clip > 0 else math.inf
    norm = full_tensor(torch.nn.utils.clip_grad_norm_(trained.parameters(), largest)).double()
    # A sum is not finite if one of its terms is not, so all processes decide alike.
    total, norm_sum = (processes.sum_of(torch.stack([total, norm])) / processes.count).unbind()
    skipped = ~(total.isfinite() & norm_sum.isfinite())
    if inputs.void is not None:
        skipped = skipped | inputs.void
    _update(optimizer, skipped)
    optimizer.zero_grad(set_to_none=True)
    counted = sum(map(Objective(config.loss).counted, inputs.lengths or targets.shape[1:]))
    n_target = processes.count * len(targets) * counted
    return StepResult(torch.stack([total, norm, skipped.double()]), skipped, new_states, n_target)


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimiser can skip an update by a flag on the device, which the host does not read.

    PyTorch's fused optimisers can, because mixed precision needs it, but not with sharded parameters. Muon can on a
    GPU. SGD with momentum cannot.
    """
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not any(map(is_sharded, parameters))


def _update(optimizer: torch.optim.Optimizer, skipped: Tensor) -> None:
    """Update the weights, unless `skipped` (a bool without dimension) is true."""
    if skips_on_device(optimizer):
        optimizer.found_inf = skipped.float()  # pyright: ignore[reportAttributeAccessIssue] (PyTorch's interface)
        optimizer.step()
        del optimizer.found_inf  # pyright: ignore[reportAttributeAccessIssue]
    elif not bool(skipped):
        optimizer.step()
