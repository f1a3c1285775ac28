"""Faster training steps: layers compiled by `torch.compile`, and whole steps recorded as CUDA graphs.

A recorded step's thousands of kernels cost one launch.

Shapes: B lanes, T tokens of a segment.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from txl.config import RecurrentConfig, RunConfig, TrainConfig
from txl.devices import Captured
from txl.errors import UserError
from txl.models.family import FamilyModel
from txl.models.language_model import State, TailRows
from txl.models.memory import Memory
from txl.training.parallel import TrainedModel
from txl.training.step import StepResult, training_step

WARM = 3
"""Steps of the same shapes that run operation by operation before one is recorded: libraries set themselves up."""
_ROOM, _MULTIPLE = 1.25, 64
"""Room for the targets of a tail cluster: so many times as many as were seen before, rounded up to a multiple."""


def compile_layers(model: FamilyModel, device: str) -> str | None:
    """Compile a model's layers where gradients are taken; everything else, and the names of its weights, stay.

    All layers run one compiled graph, so that compiling takes a layer's time and not the model's. A QRNN's graphs, one
    for each shape of a layer's weights, are for segments of any length from the first; its recurrence is not part of
    them (`models.recurrent`). Evaluation reads a view of the model, whose layers run eagerly.

    Returns:
        Why nothing was compiled, in one line: this machine has no working compiler. None if all is well.
    """
    reason = _compiler_missing(device)
    if reason is None:
        for layer in model.get_submodule("layers").children():
            layer.compile(dynamic=model.compiles_any_length)
    return reason


def _compiler_missing(device: str) -> str | None:
    """Compile something small; the first line of the error if that fails."""
    factor = random.Random().random()  # no earlier attempt has left this one in a cache; torch's generator stays

    def small(values: Tensor) -> Tensor:
        return (values * factor).relu() + 1

    try:
        torch.compile(small)(torch.ones(8, device=device))
    except Exception as error:  # whatever it is, it is the compiler's
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return lines[0].strip()
    return None


def check_capture(run: RunConfig, device: str) -> None:
    """Refuse to record what a graph cannot serve.

    Raises:
        UserError: naming it.
    """
    train, reason = run.train, None
    if not device.startswith("cuda"):
        reason = f"needs an NVIDIA GPU, and this run trains on {device}"
    elif isinstance(run.model, RecurrentConfig):
        reason = "serves Transformers, and this model is recurrent"
    elif run.model.loss_depends_on_progress:
        reason = "needs a loss that stays the same, and this model's layers leave it one by one (model.layer_losses)"
    elif train.optimizer not in ("adam", "adamw"):
        reason = f"needs train.optimizer adam or adamw, and it is {train.optimizer}"
    elif train.on_spike != "report":
        reason = "needs train.on_spike report: a recorded step does not go back to a checkpoint"
    if reason is not None:
        raise UserError(f"train.capture {reason}; leave it out")


@dataclass
class _Shape:
    """Steps of the same shapes, and their graph once there is one."""

    seen: int = 0
    """Steps that ran operation by operation."""
    room: list[TailRows | None] = field(default_factory=list)
    targets: int = 0
    graph: Captured | None = None


class CapturedStep:
    """`training_step`, recorded as a graph once the memory has its full size, and replayed from then on.

    Segments of each length have a graph of their own; all use the same memory for what they compute in between. Before
    a graph is recorded steps run operation by operation, and so do steps with more targets in a tail cluster than there
    is room for, or with none.

    The memory that a replayed step returns is the graph's own: its next replay overwrites it, unless that is void.
    """

    def __init__(self) -> None:
        self._shapes: dict[tuple[torch.Size, ...], _Shape] = {}
        self._first: Captured | None = None

    def __call__(
        self,
        trained: TrainedModel,
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
        """Make one update; arguments as for `training_step`, of one segment (`TrainConfig.validate`)."""
        assert lengths is None
        held = [each for state in states for each in _tensors(state)]
        shape = self._shapes.setdefault((tokens.shape, *(each.shape for each in held)), _Shape())
        rows = list(tail_rows or [None] * len(states))
        if shape.graph is not None and _has_room(shape.room, rows):
            void = torch.zeros((), dtype=torch.bool, device=tokens.device) if void is None else void
            numbers, skipped = shape.graph(tokens, targets, void, *held)
            after = _with_tensors(states, shape.graph.inputs[3:])
            return StepResult(numbers.clone(), skipped.clone(), after, shape.targets)
        result = training_step(trained, optimizer, tokens, targets, states, config, progress, abandon, void, tail_rows)
        if shape.graph is None and self._is_full(held, result.states):
            shape.seen, shape.targets = shape.seen + 1, result.targets
            shape.room = _larger(shape.room, rows)
            if shape.seen == WARM:
                function = self._function(trained, optimizer, result.states, config, shape.room)
                shape.graph = Captured(function, warm_up=0, beside=self._first)
                self._first = self._first or shape.graph
        return result

    @staticmethod
    def _is_full(held: Sequence[Tensor], states: Sequence[State]) -> bool:
        """Return whether memory has kept its size."""
        after = [each for state in states for each in _tensors(state)]
        return all(before.shape == now.shape for before, now in zip(held, after, strict=True))

    def _function(
        self,
        trained: TrainedModel,
        optimizer: torch.optim.Optimizer,
        states: Sequence[State],
        config: TrainConfig,
        room: Sequence[TailRows | None],
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        def step(tokens: Tensor, targets: Tensor, void: Tensor, *held: Tensor) -> tuple[Tensor, Tensor]:
            before = _with_tensors(states, held)
            made = training_step(trained, optimizer, tokens, targets, before, config, void=void, tail_rows=room)
            after = [each for state in made.states for each in _tensors(state)]
            for kept, new in zip(held, after, strict=True):
                kept.copy_(torch.where(void, kept, new))
            return made.numbers, made.skipped

        return step


def _has_room(room: Sequence[TailRows | None], rows: Sequence[TailRows | None]) -> bool:
    """Return whether each tail cluster has targets, so that all weights have gradients, and not too many."""
    return all(
        row is None or (most is not None and all(0 < n <= limit for n, limit in zip(row, most, strict=True)))
        for row, most in zip(rows, room, strict=True)
    )


def _tensors(state: State) -> tuple[Tensor, ...]:
    """Return the tensors of a Transformer's state."""
    return state.hidden if isinstance(state, Memory) else ()


def _with_tensors(states: Sequence[State], tensors: Sequence[Tensor]) -> list[State]:
    """Return the states with other tensors in the places of theirs."""
    left, changed = list(tensors), []
    for state in states:
        if isinstance(state, Memory):
            hidden, left = tuple(left[: len(state.hidden)]), left[len(state.hidden) :]
            state = dataclasses.replace(state, hidden=hidden)
        changed.append(state)
    return changed


def _larger(room: list[TailRows | None], rows: list[TailRows | None]) -> list[TailRows | None]:
    """Return the room for as many targets as there was room for, and for these."""
    room = room or [None] * len(rows)
    return [
        None
        if row is None
        else tuple(
            max(old, -(-int(_ROOM * n) // _MULTIPLE) * _MULTIPLE)
            for old, n in zip(before or (0,) * len(row), row, strict=True)
        )
        for before, row in zip(room, rows, strict=True)
    ]
