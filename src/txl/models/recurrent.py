"""Recurrent language models: LSTM and QRNN, plain or with the regularisation of AWD-LSTM.

The last layer of the stack has as many units as the softmax has inputs. AWD-LSTM's regularisation (Merity et al. 2017,
Section 4) is set in the configuration: `weight_drop`, `locked_dropout`, `dropout_words`, `activation_reg` (on the last
layer's states after dropout), `temporal_reg` (on its states before dropout), and `train.average_patience` for NT-ASGD.
As in its code, and unlike in the Transformers, embeddings are not scaled.

Shapes: B lanes, T tokens of a segment, I inputs and H units of a layer, K tokens of a convolution.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from txl.config import Lengths, RecurrentConfig
from txl.errors import UserError
from txl.models.family import FamilyModel
from txl.models.initial_weights import init_recurrent
from txl.models.language_model import State
from txl.models.loss import at_least_float32
from txl.native.operations import linear
from txl.native.tensors import transforms_are_active


def linear_recurrence(
    decay: Float[Tensor, "B T H"],
    drive: Float[Tensor, "B T H"],
    initial: Float[Tensor, "B H"],
    chunk: int | None = None,
) -> Float[Tensor, "B T H"]:
    """Compute c_t = f_t c_{t-1} + b_t for all t, element by element: the f-pooling of Bradbury et al. 2016, Section 2.

    The scan has two levels. About sqrt(T) chunks of about sqrt(T) positions are scanned in parallel, each from zero.
    Then the last states of the chunks are scanned, and the state before each chunk, times the decays, is added to the
    chunk. This takes 2 sqrt(T) dependent steps on large tensors instead of T on small ones, for three times the
    arithmetic. The scan has no divisions or logarithms, so it is as exact as a loop over positions. On a CPU one chunk
    is fastest. There are no second derivatives.

    Args:
        decay, drive, initial: f, b, and c before the first position.
        chunk: positions per chunk; None: T on a CPU, else about sqrt(T). It affects the speed, not the result.
    """
    n_position = decay.shape[1]
    if chunk is None:
        chunk = n_position if decay.device.type == "cpu" else math.isqrt(n_position - 1) + 1
    if transforms_are_active():
        return _scan(decay, drive, initial, chunk)
    return _LinearRecurrence.apply(decay, drive, initial, chunk)  # pyright: ignore[reportReturnType]


class _LinearRecurrence(torch.autograd.Function):
    """The scan. Its backward pass is the same recurrence in reverse order, computed from f and c."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, drive: Tensor, initial: Tensor, chunk: int) -> Tensor:
        states = _scan(decay, drive, initial, chunk)
        ctx.save_for_backward(decay, states, initial)
        ctx.chunk = chunk
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        decay, states, initial = ctx.saved_tensors
        # The total gradient of c_t is d_t = g_t + f_{t+1} d_{t+1}; the last position has no second term.
        later = F.pad(decay[:, 1:], (0, 0, 0, 1)).flip(1)
        grad = _scan(later, grads[0].flip(1), torch.zeros_like(initial), ctx.chunk).flip(1)
        before = torch.cat([initial[:, None], states[:, :-1]], dim=1)
        return grad * before, grad, grad[:, 0] * decay[:, 0], None


def _scan(decay: Tensor, drive: Tensor, initial: Tensor, chunk: int) -> Tensor:
    n_position = decay.shape[1]
    n_chunk = -(-n_position // chunk)
    if n_chunk == 1:
        return torch.stack(_one_after_the_other(decay, drive, initial), dim=1)
    padding = (0, 0, 0, n_chunk * chunk - n_position)  # padding follows all requested positions, so it has no effect
    decays, drives = (F.pad(tensor, padding).unflatten(1, (n_chunk, chunk)) for tensor in (decay, drive))
    # For each position within the chunks: the states from zero, and the products of the decays.
    local, product = [drives[:, :, 0]], [decays[:, :, 0]]
    for place in range(1, chunk):
        local.append(torch.addcmul(drives[:, :, place], decays[:, :, place], local[-1]))
        product.append(decays[:, :, place] * product[-1])
    before = [initial, *_one_after_the_other(product[-1][:, :-1], local[-1][:, :-1], initial)]
    states = torch.addcmul(
        torch.stack(local, dim=2), torch.stack(product, dim=2), torch.stack(before, dim=1)[:, :, None]
    )
    return states.flatten(1, 2)[:, :n_position]


def _one_after_the_other(decay: Tensor, drive: Tensor, initial: Tensor) -> list[Tensor]:
    """Return the states [B,H] of all T positions, computed in a loop."""
    states = []
    for place in range(decay.shape[1]):
        states.append(torch.addcmul(drive[:, place], decay[:, place], states[-1] if states else initial))
    return states


# State of a layer, lanes first. LSTM: h and c, [B,H] each; QRNN: c [B,H] and the last K-1 inputs, [B,K-1,I].
LayerState = tuple[Tensor, ...]

# Devices where autocast, even to bfloat16, runs an LSTM in float16 (PyTorch's aten/src/ATen/cudnn/AutocastRNN.cpp). The
# loss is not scaled, and its gradients are below the range of float16. LSTMs therefore disable autocast on these
# devices and compute in the precision of their weights.
AUTOCAST_IS_FLOAT16 = ("cuda",)
# The CPU, if PyTorch cannot run an LSTM in bfloat16 on it (seen with AVX2 alone). LSTMs disable autocast there.
_HAS_NO_BFLOAT16 = (
    ("cpu",) if torch.backends.mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported() else ()
)


@dataclass(frozen=True)
class RecurrentState(State):
    """The state of every layer; zeros before the first segment."""

    layers: tuple[LayerState, ...]

    @property
    def batch_size(self) -> int:
        """Number of lanes B."""
        return self.layers[0][0].shape[0]

    def _changed(self, change: Callable[[Tensor], Tensor]) -> RecurrentState:
        return RecurrentState(tuple(tuple(map(change, layer)) for layer in self.layers))

    def detach(self) -> RecurrentState:
        """Return the state, detached from the graph that computed it."""
        return self._changed(Tensor.detach)

    def select(self, lanes: Int[Tensor, " lanes"]) -> RecurrentState:
        """Return the state of the lanes with indices `lanes`, in that order; indices may repeat."""
        chosen = lanes.to(self.layers[0][0].device)
        return self._changed(lambda tensor: tensor[chosen])

    def reset(self, mask: Bool[Tensor, " B"]) -> RecurrentState:
        """Return the state with zeros in the lanes where `mask` is true."""
        if mask.shape != self.layers[0][0].shape[:1]:
            raise ValueError(f"mask has the shape {tuple(mask.shape)}; expected one entry for each lane")
        mask = mask.to(self.layers[0][0].device)
        return self._changed(lambda tensor: tensor.masked_fill(mask.view(-1, *[1] * (tensor.ndim - 1)), 0))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the state as named tensors, lanes first."""
        return {
            f"layers.{number}.{place}": tensor.contiguous()
            for number, layer in enumerate(self.layers)
            for place, tensor in enumerate(layer)
        }


class LSTMLayer(nn.Module):
    """PyTorch's LSTM, with DropConnect on its hidden-to-hidden weights (Merity et al. 2017, Section 2).

    i, f, o = sigmoid(W x_t + U h_{t-1}), g = tanh(W_g x_t + U_g h_{t-1}), c_t = f c_{t-1} + i g, h_t = o tanh(c_t),
    with one mask on U for all tokens and lanes of a segment.
    """

    def __init__(self, n_in: int, n_unit: int, weight_drop: float):
        super().__init__()
        self.lstm = nn.LSTM(n_in, n_unit, batch_first=True)
        self.weight_drop, self.fan = weight_drop, n_unit

    def empty(self, batch_size: int, like: Tensor) -> LayerState:
        """Return zeros: h and c, [B,H] each."""
        return tuple(like.new_zeros(batch_size, self.lstm.hidden_size) for _ in range(2))

    def forward(self, inputs: Float[Tensor, "B T I"], state: LayerState) -> tuple[Float[Tensor, "B T H"], LayerState]:
        """Return h, and the state after the last token."""
        kind = inputs.device.type
        # No CPU runs an LSTM in float16.
        low_cpu = kind == "cpu" and torch.get_autocast_dtype(kind) == torch.float16
        if torch.is_autocast_enabled(kind) and (low_cpu or kind in (*AUTOCAST_IS_FLOAT16, *_HAS_NO_BFLOAT16)):
            with torch.autocast(kind, enabled=False):
                precision = cast(Tensor, self.lstm.weight_ih_l0).dtype
                return self.forward(inputs.to(precision), tuple(tensor.to(precision) for tensor in state))
        hidden, cell = (tensor.to(inputs.dtype)[None] for tensor in state)  # autocast may have begun or ended since
        if self.training and self.weight_drop > 0:
            # Look weights up by name: `torch.func.functional_call` may have replaced the parameters.
            weights = [cast(Tensor, getattr(self.lstm, name)) for name in self.lstm._flat_weights_names]
            weights[1] = F.dropout(weights[1], self.weight_drop)  # weight_hh, after weight_ih
            # cuDNN warns that it copies the weights side by side in each call, which dropout makes unavoidable.
            with warnings.catch_warnings() if inputs.is_cuda else nullcontext():
                if inputs.is_cuda:
                    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
                outputs, hidden, cell = torch.lstm(inputs, (hidden, cell), weights, True, 1, 0.0, True, False, True)
        else:
            outputs, (hidden, cell) = self.lstm(inputs, (hidden, cell))
        return outputs, (hidden[0], cell[0])

    def extra_repr(self) -> str:
        """Return the rate, for printing."""
        return f"weight_drop={self.weight_drop}"


class QRNNLayer(nn.Module):
    """A quasi-recurrent layer with fo-pooling (Bradbury et al. 2016, Section 2).

    Z, F, O = tanh, sigmoid, sigmoid of a convolution over x_{t-K+1}, ..., x_t; c_t = f_t c_{t-1} + (1 - f_t) z_t;
    h_t = o_t c_t. A parallel scan computes c_t; all other values are computed for all tokens at once.
    """

    def __init__(self, n_in: int, n_unit: int, kernel_size: int, weight_drop: float, zoneout: float):
        super().__init__()
        self.kernel_size, self.weight_drop, self.zoneout = kernel_size, weight_drop, zoneout
        self.convolution = nn.Linear(kernel_size * n_in, 3 * n_unit)  # inputs: K tokens side by side, oldest first
        self.fan = kernel_size * n_in
        self.recurrence: Callable[[Tensor, Tensor, Tensor], Tensor] = linear_recurrence

    def compile(self, *arguments: Any, **settings: Any) -> None:
        """Compile the layer except for its recurrence, which a trace would unroll into one graph per segment length."""
        # Not by a decorator, which would import PyTorch's compiler at every start of the program (1 s).
        self.recurrence = torch.compiler.disable(linear_recurrence)  # pyright: ignore (type of the decorator)
        super().compile(*arguments, **settings)

    def empty(self, batch_size: int, like: Tensor) -> LayerState:
        """Return zeros: c [B,H], and the K-1 inputs before the first token, [B,K-1,I]."""
        n_in, n_unit = self.convolution.in_features // self.kernel_size, self.convolution.out_features // 3
        return like.new_zeros(batch_size, n_unit), like.new_zeros(batch_size, self.kernel_size - 1, n_in)

    def forward(self, inputs: Float[Tensor, "B T I"], state: LayerState) -> tuple[Float[Tensor, "B T H"], LayerState]:
        """Return h, and the state after the last token."""
        cell, earlier = state
        read = torch.cat([earlier.to(inputs.dtype), inputs], dim=1)
        windows = read if self.kernel_size == 1 else read.unfold(1, self.kernel_size, 1).transpose(2, 3).flatten(2)
        weight = self.convolution.weight
        if self.training and self.weight_drop > 0:
            weight = F.dropout(weight, self.weight_drop)
        # Z, F and O before their nonlinearities, in float32: states are sums over the whole text.
        gates = at_least_float32(linear(windows, weight, self.convolution.bias, few=False))
        candidate, forget, output = gates.chunk(3, dim=-1)
        forget = torch.sigmoid(forget)
        if self.training and self.zoneout > 0:
            # F = 1 - dropout(1 - sigmoid(...)), without dropout's scaling (Section 2.1).
            forget = torch.where(torch.rand_like(forget) < self.zoneout, 1.0, forget)
        cells = self.recurrence(forget, (1 - forget) * torch.tanh(candidate), cell.to(forget.dtype))
        # Clone, since views would keep the tensors of the whole segment alive with the state. Make the clone contiguous
        # even if it is empty: strides of a view depend on the segment length, and new strides recompile the layer.
        last = read[:, read.shape[1] - self.kernel_size + 1 :]
        outputs = (torch.sigmoid(output) * cells).to(inputs.dtype)
        return outputs, (cells[:, -1].clone(), last.clone(memory_format=torch.contiguous_format))

    def extra_repr(self) -> str:
        """Return the rates, for printing."""
        return f"kernel_size={self.kernel_size}, weight_drop={self.weight_drop}, zoneout={self.zoneout}"


class RecurrentModel(FamilyModel[RecurrentState]):
    """The recurrent language model. Its state has a constant size, and results do not depend on where segments are cut.

    The state has no positions: `mem_len` is always 0. No gradient flows from a segment to the one before it.
    """

    config_class = RecurrentConfig
    config: RecurrentConfig  # pyright: ignore[reportIncompatibleVariableOverride] (never assigned)
    attention_name = "no"
    regularises_dropped = True

    def __init__(
        self, config: RecurrentConfig, vocab_size: int, device: str | None = None, dtype: torch.dtype | None = None
    ):
        super().__init__(config, vocab_size)
        # A QRNN usually has random segment lengths, and its first, inner and last layers have different shapes, each
        # with and without gradients. Separate graphs for the first length and for all other lengths would exceed the 8
        # graphs that PyTorch keeps of one function; layers beyond that limit would run eagerly.
        self.compiles_any_length = True if config.kind == "qrnn" else None
        widths = config.widths
        self.layers = nn.ModuleList(
            LSTMLayer(n_in, n_unit, config.weight_drop)
            if config.kind == "lstm"
            else QRNNLayer(n_in, n_unit, kernel_size, config.weight_drop, config.zoneout)
            for n_in, n_unit, kernel_size in zip(widths, widths[1:], config.kernels, strict=False)
        )
        self.dropout_between = self._dropout(config.dropout)
        self._finish(widths[-1])

    def layer_matrices(self) -> dict[str, tuple[int, int]]:
        """Implement `FamilyModel.layer_matrices`: one matrix per gate, and per token of a convolution."""
        if self.config.kind == "lstm":
            names = ("lstm.weight_ih_l0", "lstm.weight_hh_l0")
            return {f"layers.{layer}.{name}": (4, 1) for layer in range(len(self.layers)) for name in names}
        return {f"layers.{layer}.convolution.weight": (3, size) for layer, size in enumerate(self.config.kernels)}

    def init_weights(self) -> None:
        """Draw the initial weights; see `init_recurrent`."""
        super().init_weights()
        uniform: list[tuple[nn.Module, int]] = [(layer, layer.fan) for layer in self._recurrent_layers()]
        if self.mixture is not None:
            uniform += [(matrix, matrix.in_features) for matrix in (self.mixture.prior, self.mixture.latent)]
        init_recurrent(uniform, self.softmax.cluster_weight if self.config.cutoffs else None)

    def _recurrent_layers(self) -> list[LSTMLayer | QRNNLayer]:
        return [cast("LSTMLayer | QRNNLayer", layer) for layer in self.layers]

    def empty_state(self, batch_size: int, lengths: Lengths) -> RecurrentState:
        """Return zeros for `batch_size` lanes."""
        # Do not create zeros from the parameter itself: they would be sharded if the parameter is.
        like = torch.empty(0, dtype=self.softmax.bias.dtype, device=self.softmax.bias.device)
        return RecurrentState(tuple(layer.empty(batch_size, like) for layer in self._recurrent_layers()))

    def state_from_tensors(self, tensors: dict[str, Tensor]) -> RecurrentState:
        """Return the state from the tensors of `RecurrentState.to_tensors`."""
        names = (f"layers.{number}" for number in range(len(self.layers)))
        return RecurrentState(tuple((tensors[f"{name}.0"], tensors[f"{name}.1"]) for name in names))

    def hidden_states(
        self, tokens: Int64[Tensor, "B T"], state: RecurrentState
    ) -> tuple[Float[Tensor, "B T E"], RecurrentState]:
        """Return h of the last layer, and the state for the next segment; see `LanguageModel.hidden_states`."""
        expected = [[tensor.shape[1:] for tensor in layer] for layer in self.init_state(1).layers]
        if not isinstance(state, RecurrentState) or expected != [
            [tensor.shape[1:] for tensor in layer] for layer in state.layers
        ]:
            raise UserError("the state belongs to another model; expected one that this model's init_state made")
        hidden, after = self._embedded(tokens, state), []
        for number, (layer, before) in enumerate(zip(self.layers, state.layers, strict=True)):
            if torch.is_grad_enabled():  # the backward pass cannot keep tensors of inference mode
                before = tuple(tensor.clone() if tensor.is_inference() else tensor for tensor in before)
            hidden, carried = layer(hidden if number == 0 else self.dropout_between(hidden), before)
            after.append(carried)
        return hidden, RecurrentState(tuple(after)).detach()
