"""Steps of an evaluation, recorded as CUDA graphs: a segment's thousands of kernels are launched at the cost of one.

A graph has fixed shapes and addresses. One is recorded for each number of tokens and each length of memory that comes
again; memory lies in a `MemoryWindow`, which every step moves along the text. Kernels and operands are those of eager
steps.

Shapes: B lanes, T tokens of a segment, M positions of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from txl.attention.triton_attention import why_not_triton
from txl.devices import Captured, records_on
from txl.models.fused_layers import is_float32, unlike_configuration
from txl.models.fused_reading import FusedWeights, FusedWindow
from txl.models.language_model import LanguageModel, State
from txl.models.loss import nll_at_temperature
from txl.models.memory import Memory, MemoryWindow, Projections
from txl.models.structure import evaluation_view
from txl.models.transformer_xl import TransformerXL
from txl.models.vanilla import VanillaTransformer

_Step = Callable[[Tensor, Tensor, State, Tensor], tuple[Tensor, State]]  # as `Step` in stream.py

WARM = 3  # steps with the same shapes before a step is recorded, in which libraries initialise themselves
_MOST_SHAPES = 64  # shapes beyond which a step is recorded only if its memory is full


def records(model: LanguageModel) -> bool:
    """Return whether evaluations of a model may be recorded: those of a Transformer-XL on the current NVIDIA GPU."""
    return type(model) is TransformerXL and records_on(model.softmax.bias.device)


def fuses(view: TransformerXL, dtype: torch.dtype) -> bool:
    """Return whether a model's layers are read by `FusedWindow`: on a GPU that has the kernels, unless it names others.

    `dtype` is that of the products.
    """
    config, parameters = view.config, list(view.parameters())
    return (
        (config.attention == "triton" or not config.names_attention)
        and config.fusion_obstacle() is None
        and not (config.pre_norm or config.qk_norm)
        and all(map(is_float32, parameters))
        and unlike_configuration(config, view.layers, training=False) is None
        and why_not_triton(parameters[0].device, dtype, config.d_head) is None
    )


def records_windows(model: LanguageModel) -> bool:
    """Return whether windows without memory may be recorded: those of a Transformer on the current NVIDIA GPU."""
    return type(model) in (TransformerXL, VanillaTransformer) and records_on(next(model.parameters()).device)


@dataclass
class _Shape:
    """Steps with the same B, T and M, and their graph once it is recorded."""

    n_read: int = 0
    graph: Captured | None = None


@dataclass
class _Recorded:
    """All that graphs of one model and of the same settings read."""

    view: TransformerXL
    weights: FusedWeights | None = None  # of layers that are read in few kernels
    shapes: dict[tuple[int, ...], _Shape] = field(default_factory=dict)
    windows: dict[torch.Size, MemoryWindow] = field(default_factory=dict)
    first: Captured | None = None

    def convert(self, modules: list[nn.Module], autocast: torch.dtype | None) -> None:
        """Copy the weights of products, padded or in autocast's dtype, again for every evaluation."""
        dtype = autocast or torch.float32
        if self.weights is not None:
            self.weights.refresh()
        elif fuses(self.view, dtype):
            self.weights = FusedWeights(self.view, dtype)
        elif autocast is not None:
            for own, module in zip(self.view.modules(), modules, strict=True):
                if isinstance(module, nn.Linear):
                    _convert(own, module, dtype)


class Recordings:
    """Graphs of a model's evaluations, valid as long as its weights stay at their addresses.

    A value that is kept serves all evaluations of a training run: graphs read the weights where they are, or copies of
    the matrices, padded or in bfloat16, which are made once for each evaluation.
    """

    def __init__(self) -> None:
        self._recorded: _Recorded | None = None  # None: the model is read eagerly
        self._fixed: tuple[object, ...] | None = None  # what `_recorded` is valid for
        self._evaluation: tuple[object, ...] = ()

    def nll_at(
        self,
        model: LanguageModel,
        tokens: Int64[Tensor, "B T"],
        targets: Int64[Tensor, "B T"],
        state: State,
        temperature: float,
    ) -> tuple[Float[Tensor, "B T"], State]:
        """Compute `LanguageModel.nll_at`, recorded or eagerly; `model` is a view without dropout.

        The next call may overwrite the state that this one returns.
        """
        if not records(model) or not isinstance(state, Memory) or state.filled is not None or state.projections is None:
            return model.nll_at(tokens, targets, state, temperature)
        assert isinstance(model, TransformerXL)
        held = model.projections(state, state.hidden[0], tokens.shape[1])
        if held is None or (recorded := self._of(model, state, held, temperature)) is None:
            return model.nll_at(tokens, targets, state, temperature)
        state = replace(state, projections=held)
        shape = recorded.shapes.setdefault((*tokens.shape, state.length), _Shape())
        if state.length == state.capacity or len(recorded.shapes) <= _MOST_SHAPES:
            shape.n_read += 1
        if shape.n_read < WARM and recorded.weights is None:
            return model.nll_at(tokens, targets, state, temperature)
        return _from_window(recorded, shape, tokens, targets, state, temperature)

    def _of(self, model: TransformerXL, state: Memory, held: Projections, temperature: float) -> _Recorded | None:
        """Return the graphs that read this model with these settings; None if all of its modules must be called."""
        settings = (held.autocast, state.lengths, temperature)
        if (held.frozen, *settings) == self._evaluation:
            return self._recorded
        modules = list(model.modules())
        # Hooks, PyTorch's own included, and observers of attention are called for each segment.
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in modules)
        hooked = hooked or any(attention.attend is not model.backend for attention in model.attentions)
        fixed = None if hooked else (*settings, *(parameter.data_ptr() for parameter in model.parameters()))
        if fixed != self._fixed:
            if model.softmax.bias.is_cuda:
                torch.cuda.synchronize()  # a graph must not be destroyed while it runs
            self._recorded = None if hooked else _Recorded(evaluation_view(model))
        self._fixed, self._evaluation = fixed, (held.frozen, *settings)
        if self._recorded is not None:
            self._recorded.convert(modules, held.autocast)
        return self._recorded


def _convert(own: nn.Module, module: nn.Linear, dtype: torch.dtype) -> None:
    """Set the parameters of `own` to those of a linear layer in autocast's dtype, at the same addresses each time."""
    if own._parameters is module._parameters:
        copies = {name: p if p is None else nn.Parameter(p.to(dtype), False) for name, p in own._parameters.items()}
        vars(own)["_parameters"] = copies
        return
    for copy, parameter in zip(own.parameters(), module.parameters(), strict=True):
        copy.copy_(parameter)


def _from_window(
    recorded: _Recorded, shape: _Shape, tokens: Tensor, targets: Tensor, state: Memory, temperature: float
) -> tuple[Tensor, Memory]:
    """Compute `nll_at` with memory at fixed addresses: at first without a graph, then in the graph."""
    view = recorded.view
    if (window := recorded.windows.get(tokens.shape)) is None:
        n_new, weights = tokens.shape[1], recorded.weights
        window = MemoryWindow(state, n_new) if weights is None else FusedWindow(state, n_new, weights)
        recorded.windows[tokens.shape] = window
    window.load(state)
    # The number of targets in a tail cluster is part of a shape, so such losses are computed after the graph.
    has_losses = temperature != 1 or not view.config.cutoffs

    def step(tokens: Tensor, targets: Tensor) -> tuple[Tensor]:
        device = tokens.device.type
        # The weights that autocast has cached end with its block, and a graph may serve longer.
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        with torch.autocast(device, dtype, enabled=enabled, cache_enabled=False):
            hidden = view.read_window(tokens, window)
            if not has_losses:
                return (hidden,)
            if temperature == 1:
                return (view.nll_of(hidden, targets),)
            return (nll_at_temperature(view.log_probs_of(hidden), targets, temperature),)

    if shape.n_read <= WARM:
        (result,) = step(tokens, targets)
    else:
        if shape.graph is None:
            shape.graph = Captured(step, warm_up=0, beside=recorded.first)
            recorded.first = recorded.first or shape.graph
        (result,) = shape.graph(tokens, targets)
    # A copy, because the next replay overwrites the result.
    return result.clone() if has_losses else view.nll_of(result, targets), window.after()


class RecordedWindows:
    """`LanguageModel.chosen_nll` of windows that begin with empty memory, recorded once their shapes repeat.

    A graph reads weights that autocast has converted: a value serves one evaluation, inside one autocast block.
    """

    def __init__(self, model: LanguageModel, temperature: float):
        self._model, self._temperature = model, temperature
        self._shapes: dict[tuple[torch.Size, ...], _Shape] = {}

    def __call__(
        self, tokens: Int64[Tensor, "B T"], at: Int64[Tensor, " P"], targets: Int64[Tensor, " P"], state: State
    ) -> Float[Tensor, " P"]:
        """Return the losses of `targets`; `state` is empty, and one of as many lanes serves all windows."""

        # Not `self`: a graph that refers to what holds it keeps its memory until Python collects cycles.
        model, temperature = self._model, self._temperature

        def read(tokens: Tensor, at: Tensor, targets: Tensor) -> tuple[Tensor]:
            return (model.chosen_nll(tokens, at, targets, state, temperature),)

        # As in `Recordings`: the rows of tail clusters depend on the targets, and hooks are called for each window.
        shape = self._shapes.setdefault((tokens.shape, at.shape), _Shape())
        is_fixed = records_windows(model) and (temperature != 1 or not model.config.cutoffs)
        if not is_fixed or any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
            return read(tokens, at, targets)[0]
        shape.n_read += 1
        if shape.n_read <= WARM:
            return read(tokens, at, targets)[0]
        shape.graph = shape.graph or Captured(read, warm_up=0)
        return shape.graph(tokens, at, targets)[0].clone()


class RecordedChanges:
    """A step that changes tensors in place (weights that adapt, sums of squares), recorded once memory is full.

    Args:
        model: the model that the step reads. Its memory consists of hidden states, since weights change.
        step: the step of the stream.
        temperature: softmax temperature of the losses.
        recordable: the step as it is recorded, if it is another: it must not wait for the device.
    """

    def __init__(self, model: LanguageModel, step: _Step, temperature: float, recordable: _Step | None = None):
        # As in `Recordings`: the rows of tail clusters depend on the targets, and hooks are called for each segment.
        self._records = (
            records(model)
            and (temperature != 1 or not model.config.cutoffs)
            and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        )
        self._step, self._recordable = step, recordable or step
        self._shapes: dict[torch.Size, _Shape] = {}

    def __call__(
        self,
        tokens: Int64[Tensor, "B T"],
        targets: Int64[Tensor, "B T"],
        state: State,
        counted: Bool[Tensor, "B T"],
    ) -> tuple[Float[Tensor, "B T"], State]:
        """Take the step. The next call may overwrite the state that this one returns."""
        is_full = isinstance(state, Memory) and state.filled is None and state.length == state.capacity
        if not self._records or not is_full:
            return self._step(tokens, targets, state, counted)
        assert isinstance(state, Memory)
        shape = self._shapes.setdefault(tokens.shape, _Shape())
        shape.n_read += 1
        if shape.n_read < WARM:
            return self._step(tokens, targets, state, counted)
        if shape.n_read == WARM:
            return self._recordable(tokens, targets, state, counted)
        before, step = state, self._recordable  # not `self`, as in `RecordedWindows`

        def change(tokens: Tensor, targets: Tensor, counted: Tensor, *hidden: Tensor) -> tuple[Tensor]:
            nll, after = step(tokens, targets, replace(before, hidden=hidden, projections=None), counted)
            assert isinstance(after, Memory)
            for old, new in zip(hidden, after.hidden, strict=True):
                old.copy_(new)
            return (nll,)

        shape.graph = shape.graph or Captured(change, warm_up=0)
        (nll,) = shape.graph(tokens, targets, counted, *state.hidden)
        return nll.clone(), state.followed_by(tokens.shape[1], tuple(shape.graph.inputs[3:]))
