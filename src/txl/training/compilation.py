"""The model that is trained, and its faster steps: layers compiled by `torch.compile`, steps recorded as CUDA graphs.

A recorded step launches its thousands of kernels at the cost of one launch.

Shapes: B lanes, T tokens of a segment.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from txl.config import ModelConfig, RecurrentConfig, RunConfig, TrainConfig
from txl.data.vocabulary import Vocabulary
from txl.devices import Captured, sent
from txl.errors import Field, UserError
from txl.models import FAMILIES, build_model
from txl.models.family import FamilyModel
from txl.models.language_model import State
from txl.models.loss import TailRows
from txl.models.memory import Memory
from txl.training.optimisers import Optimizer
from txl.training.parallel import TrainedModel
from txl.training.step import StepInputs, StepOutput, training_step

WARM = 3  # eager steps with the same shapes before a step is recorded, in which libraries initialise themselves
# Room for targets of a tail cluster: the number seen so far times `_ROOM`, rounded up to a multiple of `_MULTIPLE`.
_ROOM, _MULTIPLE = 1.25, 64


def check_trainable(run: RunConfig, device: str) -> None:
    """Refuse a configuration that cannot be trained on a device (UserError)."""
    train = run.train
    if device.partition(":")[0] not in ("cpu", "cuda"):
        problem = "training is not supported, because the device's random numbers are not saved with the run"
        raise UserError(problem, field="device", value=device, remedy=("use ", Field("device", "cpu")))
    FAMILIES[type(run.model)].check_training(run.model, device, getattr(torch, train.dtype))
    if train.capture:
        check_capture(run, device)
    if train.tf32 and not device.startswith("cuda"):
        but = f"this run trains on {device}, and TF32 needs an NVIDIA GPU"
        raise UserError(field="train.tf32", value=True, but=but, remedy="leave it out")


def check_capture(run: RunConfig, device: str) -> None:
    """Refuse a configuration or device whose steps cannot be recorded as a CUDA graph (UserError)."""
    train, reason = run.train, ""
    if not device.startswith("cuda"):
        reason = f"this run trains on {device}, and recorded steps need an NVIDIA GPU"
    elif isinstance(run.model, RecurrentConfig):
        reason = "this model is recurrent, and only steps of Transformers are recorded"
    elif run.model.loss_depends_on_progress:
        reason = "the losses of this model's layers end one after another (model.layer_losses)"
    elif train.optimizer not in ("adam", "adamw", "muon"):
        reason = f"train.optimizer is {train.optimizer}; adam, adamw and muon can be recorded"
    elif train.on_spike != "report":
        reason = f"train.on_spike is {train.on_spike}, and a recorded step does not go back to a checkpoint"
    if reason:
        raise UserError(field="train.capture", value=True, but=reason, remedy=("set ", Field("train.capture", False)))


def can_capture(run: RunConfig, device: str) -> bool:
    """Return whether a device and a configuration allow recorded steps (`train.capture`)."""
    try:
        check_capture(run, device)
    except UserError:
        return False
    return run.train.backprop_segments == 1


def model_to_train(model: ModelConfig, vocabulary: Vocabulary | int, device: str, train: TrainConfig) -> FamilyModel:
    """Return a new model of a vocabulary (or its size V) in training mode on a device.

    Its initial weights come from the global random generators. The choice of attention depends on `dtype` and `capture`
    of the training configuration; the weights are float64 with `dtype` "float64", else float32.
    """
    dtype = getattr(torch, train.dtype)
    if train.capture:
        model = FAMILIES[type(model)].for_captured_steps(model, device, dtype)
    built = build_model(model, vocabulary, device, dtype).to(device).train()
    return built.double() if train.dtype == "float64" else built


def compile_layers(model: FamilyModel, device: str) -> str | None:
    """Compile the layers of a model for training; all other parts and the names of the weights stay unchanged.

    All layers share one compiled graph, so that compilation takes the time of one layer, not of the whole model. A QRNN
    has one graph for each shape of a layer's weights. Each graph serves segments of any length from the start, and does
    not include the recurrence (`models.recurrent`). Evaluation uses a view of the model whose layers run eagerly.

    Returns:
        Reason why this machine has no working compiler, in one line; None if the layers were compiled.
    """
    factor = random.Random().random()  # a new constant, not in any cache; PyTorch's generator is not used
    try:
        torch.compile(lambda values: (values * factor).relu() + 1)(torch.ones(8, device=device))
    except Exception as error:  # every exception here comes from the compiler
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return (lines or [type(error).__name__])[0]
    # `Module.compile` keeps the module and so the names of its weights; `torch.compile(layer)` would wrap it.
    for layer in model.get_submodule("layers").children():
        layer.compile(dynamic=model.compiles_any_length)
    return None


@dataclass
class _Shape:
    """Steps with the same tensor shapes, and their graph once it is recorded."""

    n_eager: int = 0  # number of steps with full memory that ran eagerly
    room: list[TailRows | None] = field(default_factory=list)
    n_target: int = 0
    graph: Captured | None = None


class CapturedStep:
    """`training_step`, recorded as a graph once the memory has its full size, and replayed from then on.

    Each segment length has its own graph; all graphs share the device memory of intermediate results. Steps run eagerly
    until their graph is recorded, and later if a tail cluster has no target, or more targets than there is room for. If
    lanes are emptied between steps (`train.reset_memory`), the graph reads from a tensor how full each lane is.

    The memory that a replayed step returns belongs to the graph: the next replay overwrites it, unless `void` is set.
    """

    def __init__(self) -> None:
        self._shapes: dict[tuple[torch.Size, ...], _Shape] = {}
        self._first: Captured | None = None

    def __call__(
        self,
        trained: FamilyModel | TrainedModel,
        optimizer: Optimizer,
        inputs: StepInputs,
        config: TrainConfig,
        abandon: Callable[[], object] | None = None,
    ) -> StepOutput:
        """Make one update. The arguments are those of `training_step`, for one segment (see `TrainConfig.validate`)."""
        assert inputs.lengths is None
        tokens, states = inputs.tokens, inputs.states
        hidden = [tensor for state in states for tensor in _tensors(state)]
        filled = []
        if config.reset_memory:
            memories = [state for state in states if isinstance(state, Memory)]
            counts = [memory.filled or (memory.length,) * memory.batch_size for memory in memories]
            filled = [sent(torch.tensor(count, device="cpu"), tokens.device) for count in counts]
        # The memory's shape counts, too: a graph reads full memory, and steps with less of it run eagerly.
        shape = self._shapes.setdefault((tokens.shape, *(tensor.shape for tensor in hidden)), _Shape())
        rows = list(inputs.tail_rows or [None] * len(states))
        if shape.graph is not None and _has_room(shape.room, rows):
            void = torch.zeros((), dtype=torch.bool, device=tokens.device) if inputs.void is None else inputs.void
            numbers, skipped = shape.graph(tokens, inputs.targets, void, *filled, *hidden)
            after = _with_tensors(states, shape.graph.inputs[3 + len(filled) :], n_new=tokens.shape[1])
            # The next replay overwrites the graph's outputs, perhaps before they are read.
            return StepOutput(numbers.clone(), skipped.clone(), after, shape.n_target)
        output = training_step(trained, optimizer, inputs, config, abandon)
        after = [tensor for state in output.states for tensor in _tensors(state)]
        # The memory is full if the step did not change its size.
        if shape.graph is None and all(old.shape == new.shape for old, new in zip(hidden, after, strict=True)):
            shape.n_eager, shape.n_target = shape.n_eager + 1, output.n_target
            shape.room = [_larger(most, row) for most, row in zip(shape.room or [None] * len(rows), rows, strict=True)]
            if shape.n_eager == WARM:
                self._record(shape, trained, optimizer, output.states, config, len(filled))
        return output

    def _record(
        self,
        shape: _Shape,
        trained: FamilyModel | TrainedModel,
        optimizer: Optimizer,
        states: Sequence[State],
        config: TrainConfig,
        n_filled: int,
    ) -> None:
        room = shape.room

        def step(tokens: Tensor, targets: Tensor, void: Tensor, *memory: Tensor) -> tuple[Tensor, Tensor]:
            filled, hidden = memory[:n_filled], memory[n_filled:]
            before = _with_tensors(states, hidden, filled)
            inputs = StepInputs(tokens, targets, before, void=void, tail_rows=room)
            output = training_step(trained, optimizer, inputs, config)
            after = [tensor for state in output.states for tensor in _tensors(state)]
            # Over the graph's own input, which is one copy a step instead of two; a void step leaves the memory.
            for old, new in zip(hidden, after, strict=True):
                old.copy_(torch.where(void, old, new))
            return output.numbers, output.skipped

        shape.graph = Captured(step, warm_up=0, beside=self._first)
        self._first = self._first or shape.graph


def _has_room(room: Sequence[TailRows | None], rows: Sequence[TailRows | None]) -> bool:
    """Return whether each tail cluster has targets, so that all its weights get gradients, and room for them."""
    return all(
        row is None or (most is not None and all(0 < n <= limit for n, limit in zip(row, most, strict=True)))
        for row, most in zip(rows, room, strict=True)
    )


def _larger(most: TailRows | None, row: TailRows | None) -> TailRows | None:
    """Return the room in each cluster, enlarged where necessary to hold the targets counted in `row`."""
    if row is None:
        return None
    enough = (-(-int(_ROOM * n) // _MULTIPLE) * _MULTIPLE for n in row)
    return tuple(map(max, most or (0,) * len(row), enough))


def _tensors(state: State) -> tuple[Tensor, ...]:
    """Return the tensors of a Transformer's state."""
    return state.hidden if isinstance(state, Memory) else ()


def _with_tensors(
    states: Sequence[State], tensors: Sequence[Tensor], filled: Sequence[Tensor] = (), n_new: int = 0
) -> list[State]:
    """Return the states with other hidden states, `n_new` tokens later, or with `filled` positions in each lane."""
    left, counts, changed = list(tensors), list(filled), []
    for state in states:
        if isinstance(state, Memory):
            hidden, left = tuple(left[: len(state.hidden)]), left[len(state.hidden) :]
            if counts:
                state = dataclasses.replace(state, hidden=hidden, filled=None, filled_tensor=counts.pop(0))
            else:
                state = state.followed_by(n_new, hidden)
        changed.append(state)
    return changed
