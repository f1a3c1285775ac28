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
from txl.devices import Captured, compute_capability, sent
from txl.errors import Field, UserError
from txl.models import FAMILIES, build_model
from txl.models.family import FamilyModel
from txl.models.language_model import State
from txl.models.loss import TailRows
from txl.models.memory import Memory
from txl.training.optimisers import Optimizer
from txl.training.parallel import TrainedModel
from txl.training.state import WeightAverage
from txl.training.step import StepInputs, StepOutput, training_step

WARM = 3  # eager steps before the first graph is recorded, in which libraries initialise themselves
# Room for targets of a tail cluster: the number seen so far times `_ROOM`, rounded up to a multiple of `_MULTIPLE`.
_ROOM, _MULTIPLE = 1.25, 64


def check_trainable(run: RunConfig, device: str) -> None:
    """Refuse a configuration that cannot be trained on a device (UserError)."""
    train = run.train
    if device.partition(":")[0] not in ("cpu", "cuda"):
        problem = "training is not supported, because the device's random numbers are not saved with the run"
        raise UserError(problem, field="device", value=device, remedy=("use ", Field("device", "cpu")))
    FAMILIES[type(run.model)].check_training(run.model, device, getattr(torch, train.dtype))
    is_gpu, capability = device.startswith("cuda"), compute_capability(device)
    if train.dtype == "float16" and not is_gpu:
        but, remedy = f"this run trains on {device}, and float16 needs an NVIDIA GPU", Field("train.dtype", "float32")
        raise UserError(field="train.dtype", value=train.dtype, but=but, remedy=("use ", remedy))
    if train.dtype == "bfloat16" and capability is not None and capability < (8, 0):
        but, remedy = "this GPU has no bfloat16", Field("train.dtype", "float16")
        raise UserError(field="train.dtype", value=train.dtype, but=but, remedy=("use ", remedy))
    if train.capture:
        check_capture(run, device)
    if train.tf32 and not is_gpu:
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

    Its initial weights come from the global random generators. They are float64 with `train.dtype` "float64", else
    float32.
    """
    built = build_model(model, vocabulary, device, getattr(torch, train.dtype)).to(device).train()
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


class _StackedMemory:
    """Hidden states [B,M,E] of all layers and parts, which every graph of one memory's shape reads and overwrites.

    They are stacked, so that a few kernels write all of them, and lie in memory as the states that a step returns do
    (the batch or the positions first), so that no layer has to copy them.
    """

    def __init__(self, hidden: Sequence[Tensor]):
        self._time_first = bool(hidden) and hidden[0].stride(0) < hidden[0].stride(1)
        self._stack = self._stacked(hidden)
        self.tensors = [self._turned(part) for part in self._stack.unbind()] if hidden else []

    def _turned(self, states: Tensor) -> Tensor:
        return states.transpose(0, 1) if self._time_first else states

    def _stacked(self, hidden: Sequence[Tensor]) -> Tensor:
        return torch.stack([self._turned(states) for states in hidden]) if hidden else torch.empty(0)

    def load(self, hidden: Sequence[Tensor]) -> None:
        """Copy states to `tensors`, unless they are these tensors."""
        if not all(own is states for own, states in zip(self.tensors, hidden, strict=True)):
            self._stack.copy_(self._stacked(hidden))

    def replace(self, hidden: Sequence[Tensor], void: Tensor) -> None:
        """Overwrite `tensors`, unless `void` (a bool without dimension) is true."""
        if hidden:
            torch.where(void, self._stack, self._stacked(hidden), out=self._stack)


@dataclass
class _Shape:
    """Steps with the same tensor shapes, and their graph once there is one."""

    n_eager: int = 0  # number of steps with full memory that ran eagerly
    room: list[TailRows | None] = field(default_factory=list)
    n_target: list[int] = field(default_factory=list)  # one number, from the first call of `step` on
    memory: _StackedMemory | None = None
    step: Callable[..., tuple[Tensor, ...]] | None = None  # the function that is recorded at its second call
    graph: Captured | None = None


class CapturedStep:
    """`training_step`, recorded as a graph once the memory has its full size, and replayed from then on.

    Each segment length has its own graph; all graphs share the device memory of intermediate results, and the memory of
    the lanes. Steps run eagerly until their graph is recorded, and later if a tail cluster has no target, or more
    targets than there is room for. Graphs are recorded anew when an average of the weights begins. If lanes are emptied
    between steps (`train.reset_memory`), the graph reads from a tensor how full each lane is.

    The memory that such a step returns belongs to the graphs: the next one overwrites it, unless `void` is set.
    """

    def __init__(self) -> None:
        self._shapes: dict[tuple[torch.Size, ...], _Shape] = {}
        self._memories: dict[tuple[torch.Size, ...], _StackedMemory] = {}
        self._first: Captured | None = None
        self._average: WeightAverage | None = None

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
        memories = [state for state in states if isinstance(state, Memory)]
        hidden = [tensor for memory in memories for tensor in memory.hidden]
        if inputs.average is not self._average:  # a graph updates the average that there was when it was recorded
            self._average = inputs.average
            if tokens.is_cuda:
                torch.cuda.synchronize()  # a graph must not be destroyed while it runs
            self._shapes.clear()
        # The memory's shape counts, too: a graph reads full memory, and steps with less of it run eagerly.
        sizes = tuple(tensor.shape for tensor in hidden)
        shape = self._shapes.setdefault((tokens.shape, *sizes), _Shape())
        rows = list(inputs.tail_rows or [None] * len(states))
        step = shape.graph or shape.step
        if step is None and all(memory.length == memory.capacity for memory in memories):
            shape.n_eager += 1
            shape.room = [_larger(most, row) for most, row in zip(shape.room or [None] * len(rows), rows, strict=True)]
            # Later, only kernels for one more shape are new; but room for tail clusters is known after several steps.
            if shape.n_eager >= (WARM if self._first is None or any(rows) else 1):
                if sizes not in self._memories:
                    self._memories[sizes] = _StackedMemory(hidden)
                shape.memory = self._memories[sizes]
                step = self._step(shape, trained, optimizer, states, config)
        if step is None or shape.memory is None or not _has_room(shape.room, rows):
            return training_step(trained, optimizer, inputs, config, abandon)
        if shape.step is None:
            shape.step = step  # this step runs eagerly, but with the same kernels as the graph
        elif shape.graph is None:
            # Recorded at once: the graphs after the first one share its memory, so it must have some.
            step = shape.graph = Captured(shape.step, warm_up=0, beside=self._first)
            self._first = self._first or shape.graph
        filled = []
        if config.reset_memory:
            counts = [memory.filled or (memory.length,) * memory.batch_size for memory in memories]
            filled = [sent(torch.tensor(count, device="cpu"), tokens.device) for count in counts]
        void = torch.zeros((), dtype=torch.bool, device=tokens.device) if inputs.void is None else inputs.void
        shape.memory.load(hidden)
        numbers, skipped = step(tokens, inputs.targets, void, *filled)
        after = _with_tensors(states, shape.memory.tensors, n_new=tokens.shape[1])
        # The next replay overwrites the graph's outputs, perhaps before they are read.
        return StepOutput(numbers.clone(), skipped.clone(), after, shape.n_target[0])

    def _step(
        self,
        shape: _Shape,
        trained: FamilyModel | TrainedModel,
        optimizer: Optimizer,
        states: Sequence[State],
        config: TrainConfig,
    ) -> Callable[..., tuple[Tensor, ...]]:
        """Return the function that is recorded: an update that also overwrites the memory of its shape."""
        # Not `shape`: a graph that refers to what holds it keeps its memory until Python collects cycles.
        memory, average, room, n_target = shape.memory, self._average, shape.room, shape.n_target
        assert memory is not None
        own = _with_tensors(states, memory.tensors)  # not `states`, which the function would keep alive

        def step(tokens: Tensor, targets: Tensor, void: Tensor, *filled: Tensor) -> tuple[Tensor, Tensor]:
            before = _with_tensors(own, memory.tensors, filled)
            inputs = StepInputs(tokens, targets, before, void=void, tail_rows=room, average=average)
            output = training_step(trained, optimizer, inputs, config)
            memory.replace([tensor for state in output.states for tensor in _tensors(state)], void)
            n_target[:] = [output.n_target]
            return output.numbers, output.skipped

        return step


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
