"""One update of the weights.

Shapes: B lanes, T tokens of a segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from txl.config import TrainConfig
from txl.devices import Late
from txl.models.family import FamilyModel
from txl.models.language_model import Objective, State, TailRows
from txl.training.parallel import TrainedModel, full_tensor, is_sharded


class StepResult:
    """Loss, gradient norm and new memory of an update. To ask for its loss or norm is to wait for the device.

    Args:
        numbers: the loss, the gradient's norm, and 1 if the update was skipped, else 0.
        skipped: the third one on the device: bool, no dimension.
        states: the memory of each part of the lanes.
        targets: number of targets that had a loss, in all processes.
    """

    def __init__(self, numbers: Tensor, skipped: Tensor, states: list[State], targets: int):
        self.numbers, self.skipped = numbers, skipped
        self.states, self.targets = states, targets
        self._sent: Late | None = None

    def send(self) -> None:
        """Let the device copy the numbers to the host when it has them, so that what comes later is not waited for."""
        self._sent = self._sent or Late(self.numbers)

    def _read(self, place: int) -> float:
        self.send()
        assert self._sent is not None
        return self._sent.read()[place]

    @property
    def loss(self) -> float:
        """Mean nats over the targets that count, before the update and without what a model adds to regularise
        itself."""
        return self._read(0)

    @property
    def grad_norm(self) -> float:
        """Norm of the gradient, before clipping."""
        return self._read(1)

    @property
    def updated(self) -> bool:
        """False if the loss or the gradient was not finite; the weights are then as they were."""
        return self._read(2) == 0


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
    void: Tensor | None = None,
    tail_rows: Sequence[TailRows | None] | None = None,
    lengths: tuple[int, ...] | None = None,
) -> StepResult:
    """Make one update of the weights: forward, backward, clip, optimiser.

    The lanes are divided into as many parts as there are states; each part has a forward and a backward pass of its
    own and keeps its own memory, and the gradient is that of the mean over all lanes, those of other processes too.
    Where the optimiser can (`skips_on_device`), an update that is not finite is skipped on the device, and nothing here
    waits for it.

    Args:
        model: in training mode.
        optimizer: with the learning rate of this update already set.
        tokens, targets: int64 [B,T], of this process's lanes.
        states: one for each part.
        config: its dtype, clip and loss are used.
        progress: fraction of all updates that are made, for schedules of auxiliary losses.
        abandon: asked between two parts whether to give up the step.
        void: on the device: true if this update is to be skipped whatever it is; an optimiser that `skips_on_device`.
        tail_rows: for each part, as in `Objective`.
        lengths: of the consecutive segments that the T tokens are, as in `Objective`; None: one segment.

    Raises:
        StepAbandoned: if it was.
    """
    trained = model if isinstance(model, TrainedModel) else TrainedModel(model)
    processes, parts = trained.processes, len(states)
    rows = [None] * parts if tail_rows is None else tail_rows
    total, new_states = tokens.new_zeros((), dtype=torch.float64), []
    autocast = torch.autocast(tokens.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16")
    lanes = zip(tokens.chunk(parts), targets.chunk(parts), states, rows, strict=True)
    for number, (part_tokens, part_targets, state, room) in enumerate(lanes):
        if number and abandon is not None and abandon():
            optimizer.zero_grad(set_to_none=True)
            raise StepAbandoned
        objective = Objective(config.loss, progress, room, lengths)
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
    if void is not None:
        skipped = skipped | void
    _update(optimizer, skipped)
    optimizer.zero_grad(set_to_none=True)
    counted = sum(map(Objective(config.loss).counted, lengths or targets.shape[1:]))
    n_target = processes.count * len(targets) * counted
    return StepResult(torch.stack([total, norm, skipped.double()]), skipped, new_states, n_target)


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimiser takes a decision to skip an update that the device has made, unread.

    PyTorch's fused ones do, as mixed precision needs it; not with shards, nor with momentum of theirs and ours (Muon).
    """
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not any(map(is_sharded, parameters))


def _update(optimizer: torch.optim.Optimizer, skipped: Tensor) -> None:
    """Let the optimiser update the weights, unless it is to be skipped: bool, no dimension."""
    if skips_on_device(optimizer):
        optimizer.found_inf = skipped.float()  # pyright: ignore[reportAttributeAccessIssue] (PyTorch's interface)
        optimizer.step()
        del optimizer.found_inf  # pyright: ignore[reportAttributeAccessIssue]
    elif not bool(skipped):
        optimizer.step()
