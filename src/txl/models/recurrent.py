"""Recurrent language models: LSTM and QRNN, plain or with the regularisation of AWD-LSTM.

The layers stand one upon another, with dropout between them; the last one has as many units as the softmax takes.
AWD-LSTM's regularisation (Merity et al. 2017, Section 4) is in the configuration: `weight_drop`, `locked_dropout`,
`dropout_words`, `activation_reg` (of the last layer's states after dropout), `temporal_reg` (of those before it), and
`train.average_patience` for NT-ASGD. As in AWD-LSTM's code, and unlike in the Transformers, embeddings are not scaled.

Shapes: B lanes, T tokens of a segment, I features that enter a layer, H units of it, K tokens of a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from txl.config import Lengths, RecurrentConfig, TrainConfig
from txl.errors import UserError
from txl.models.costs import LayerCosts, dropout_copies
from txl.models.cross_entropy import at_least_float32
from txl.models.family import FamilyModel


def linear_recurrence(
    decay: Float[Tensor, "B T H"],
    drive: Float[Tensor, "B T H"],
    initial: Float[Tensor, "B H"],
    chunk: int | None = None,
) -> Float[Tensor, "B T H"]:
    """Compute c_t = f_t c_{t-1} + b_t for all t, element by element: the f-pooling of Bradbury et al. 2016, Section 2.

    A scan of two levels: about sqrt(T) chunks of about sqrt(T) positions are scanned at once, each from zero; then the
    chunks' last states; then every chunk gets the state before it. That is 2 sqrt(T) dependent steps on large tensors
    instead of T on small ones, for three times the arithmetic. Nothing is divided and no logarithm is taken, so it is
    as exact as a loop over positions. On a CPU one chunk is fastest.

    Args:
        decay: f.
        drive: b.
        initial: c before the first position.
        chunk: positions of a chunk; None: all on a CPU, else about the root of T. It changes speed, not the result.

    Returns:
        c; its gradients to all three can be taken once (no second derivatives).
    """
    n_position = decay.shape[1]
    if chunk is None:
        chunk = n_position if decay.device.type == "cpu" else math.isqrt(n_position - 1) + 1
    return _LinearRecurrence.apply(decay, drive, initial, chunk)  # pyright: ignore[reportReturnType]


class _LinearRecurrence(torch.autograd.Function):
    """The scan. Its backward pass is a recurrence of the same kind from the last position, which needs f and c."""

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
        # d/dc_t of everything after t: g_t + f_{t+1} d_{t+1}; the last position has none after it.
        later = F.pad(decay[:, 1:], (0, 0, 0, 1)).flip(1)
        grad = _scan(later, grads[0].flip(1), torch.zeros_like(initial), ctx.chunk).flip(1)
        before = torch.cat([initial[:, None], states[:, :-1]], dim=1)
        return grad * before, grad, grad[:, 0] * decay[:, 0], None


def _scan(decay: Tensor, drive: Tensor, initial: Tensor, chunk: int) -> Tensor:
    n_position = decay.shape[1]
    n_chunk = -(-n_position // chunk)
    if n_chunk == 1:
        return torch.stack(_one_after_the_other(decay, drive, initial), dim=1)
    padding = (0, 0, 0, n_chunk * chunk - n_position)  # whatever stands there comes after all that is asked for
    decays, drives = (F.pad(each, padding).unflatten(1, (n_chunk, chunk)) for each in (decay, drive))
    # Of each chunk: its states from zero, and the products of its decays, by position within the chunk.
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
    """Return the states [B,H] of all positions of [B,T,H]."""
    states = []
    for place in range(decay.shape[1]):
        states.append(torch.addcmul(drive[:, place], decay[:, place], states[-1] if states else initial))
    return states


LayerState = tuple[Tensor, ...]
"""State of a layer, lanes first. LSTM: h and c, [B,H] each; QRNN: c [B,H] and its last inputs [B,K-1,I]."""

AUTOCAST_IS_FLOAT16 = ("cuda",)
"""Devices where autocast, of bfloat16 too, runs an LSTM in float16 (PyTorch's aten/src/ATen/cudnn/AutocastRNN.cpp).

A loss that is not scaled has gradients below float16's range, so LSTMs leave autocast there, and compute in the
precision of their weights.
"""


@dataclass(frozen=True)
class RecurrentState:
    """The state of every layer; zeros before the first segment."""

    layers: tuple[LayerState, ...]

    @property
    def batch_size(self) -> int:
        """Number of lanes B."""
        return self.layers[0][0].shape[0]

    @property
    def lengths(self) -> Lengths:
        """No memory of positions, and no limits."""
        return Lengths()

    @property
    def length(self) -> None:
        """No positions: the state carries everything that was read."""
        return None

    def detach(self) -> RecurrentState:
        """Return the state cut off from the graph that computed it."""
        return RecurrentState(tuple(tuple(each.detach() for each in layer) for layer in self.layers))

    def select(self, lanes: Int[Tensor, " lanes"]) -> RecurrentState:
        """Return the state of some lanes, in the order of the indices `lanes`; repeats are allowed."""
        chosen = lanes.to(self.layers[0][0].device)
        return RecurrentState(tuple(tuple(each[chosen] for each in layer) for layer in self.layers))

    def reset(self, mask: Bool[Tensor, " B"]) -> RecurrentState:
        """Return the state with zeros in the lanes where `mask` is true."""
        if mask.shape != self.layers[0][0].shape[:1]:
            raise ValueError(f"mask has the shape {tuple(mask.shape)}; expected one entry for each lane")
        mask = mask.to(self.layers[0][0].device)

        def emptied(each: Tensor) -> Tensor:
            return each.masked_fill(mask.view(-1, *[1] * (each.ndim - 1)), 0)

        return RecurrentState(tuple(tuple(emptied(each) for each in layer) for layer in self.layers))

    def filled_with_noise(self) -> RecurrentState:
        """Return the state as it is: it always has its greatest size."""
        return self

    def to_tensors(self) -> dict[str, Tensor]:
        """Return everything as named tensors."""
        return {
            f"layers.{number}.{place}": each.contiguous()
            for number, layer in enumerate(self.layers)
            for place, each in enumerate(layer)
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
        if kind in AUTOCAST_IS_FLOAT16 and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                precision = cast(Tensor, self.lstm.weight_ih_l0).dtype
                return self.forward(inputs.to(precision), tuple(each.to(precision) for each in state))
        before = (state[0][None], state[1][None])
        if self.training and self.weight_drop > 0:
            # By name: others may have put weights in the place of the parameters (`torch.func.functional_call`).
            weights = [cast(Tensor, getattr(self.lstm, name)) for name in self.lstm._flat_weights_names]
            weights[1] = F.dropout(weights[1], self.weight_drop)  # weight_hh, after weight_ih
            outputs, hidden, cell = torch.lstm(inputs, before, weights, True, 1, 0.0, True, False, True)
        else:
            outputs, (hidden, cell) = self.lstm(inputs, before)
        return outputs, (hidden[0], cell[0])

    def extra_repr(self) -> str:
        """Return the rate, for printing."""
        return f"weight_drop={self.weight_drop}"


class QRNNLayer(nn.Module):
    """A quasi-recurrent layer with fo-pooling (Bradbury et al. 2016, Section 2).

    Z, F, O = tanh, sigmoid, sigmoid of a convolution over x_{t-K+1}, ..., x_t; c_t = f_t c_{t-1} + (1 - f_t) z_t;
    h_t = o_t c_t. Everything but c_t is computed for all tokens at once, and c_t by a parallel scan.
    """

    def __init__(self, n_in: int, n_unit: int, kernel_size: int, weight_drop: float, zoneout: float):
        super().__init__()
        self.kernel_size, self.weight_drop, self.zoneout = kernel_size, weight_drop, zoneout
        self.convolution = nn.Linear(kernel_size * n_in, 3 * n_unit)  # of the K tokens side by side, oldest first
        self.fan = kernel_size * n_in
        self.recurrence: Callable[[Tensor, Tensor, Tensor], Tensor] = linear_recurrence

    def compile(self, *arguments: Any, **settings: Any) -> None:
        """Compile everything but the recurrence: a trace would unroll its positions, a graph for every length.

        It is taken out here, not where it is defined, because that imports PyTorch's compiler: a second at every start.
        """
        self.recurrence = torch.compiler.disable(linear_recurrence)  # pyright: ignore (its decorators' type)
        super().compile(*arguments, **settings)

    def empty(self, batch_size: int, like: Tensor) -> LayerState:
        """Return zeros: c [B,H], and as many inputs as the convolution looks back, [B,K-1,I]."""
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
        candidate, forget, output = at_least_float32(F.linear(windows, weight, self.convolution.bias)).chunk(3, dim=-1)
        forget = torch.sigmoid(forget)
        if self.training and self.zoneout > 0:
            # F = 1 - dropout(1 - sigmoid(...)), without dropout's scaling (Section 2.1).
            forget = torch.where(torch.rand_like(forget) < self.zoneout, 1.0, forget)
        cells = self.recurrence(forget, (1 - forget) * torch.tanh(candidate), cell.to(forget.dtype))
        # Copies: views would keep the whole segment's tensors as long as the state lives. Contiguous, even of no
        # inputs: a compiled layer is compiled anew for other strides, and a view's depend on the segment's length.
        last = read[:, read.shape[1] - self.kernel_size + 1 :]
        outputs = (torch.sigmoid(output) * cells).to(inputs.dtype)
        return outputs, (cells[:, -1].clone(), last.clone(memory_format=torch.contiguous_format))

    def extra_repr(self) -> str:
        """Return the rates, for printing."""
        return f"kernel_size={self.kernel_size}, weight_drop={self.weight_drop}, zoneout={self.zoneout}"


class RecurrentModel(FamilyModel[RecurrentState]):
    """The language model. Its state has a constant size, and its numbers never depend on how a stream is cut.

    It has no positions of memory: `mem_len` is always 0, although the state goes on from segment to segment. A context
    of exactly c tokens is c tokens read from an empty state (`txl.losses_at_context`). No gradient flows from a segment
    into the one before it.
    """

    config_class = RecurrentConfig
    config: RecurrentConfig  # pyright: ignore[reportIncompatibleVariableOverride] (nobody assigns it)
    attention_name = "no"
    regularises_dropped = True

    def __init__(self, config: RecurrentConfig, vocab_size: int, device: str | None = None):
        super().__init__(config, vocab_size)
        # A QRNN's segments have random lengths as a rule, and its first, inner and last layers different shapes, each
        # with gradients and without: graphs for the first length beside those for all others would be more than PyTorch
        # keeps of one function, 8, and whatever comes after them runs eagerly.
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
        """See `FamilyModel.layer_matrices`: one matrix for each gate, and for each token of a convolution."""
        if self.config.kind == "lstm":
            names = ("lstm.weight_ih_l0", "lstm.weight_hh_l0")
            return {f"layers.{layer}.{name}": (4, 1) for layer in range(len(self.layers)) for name in names}
        return {f"layers.{layer}.convolution.weight": (3, size) for layer, size in enumerate(self.config.kernels)}

    def layer_costs(self, train: TrainConfig) -> LayerCosts:
        """Return the bytes that the layers take while they train.

        With B lanes of one micro-batch, I features that enter a layer, P its weights and f = 4 bytes:

        - lstm, as PyTorch's on a CPU: f*B*T*5*H, the output and four gates; scratch f*(9*B*T*H + 2*P) of the widest;
        - qrnn: f*B*T*4*H, and the windows f*B*T*K*I where K > 1; scratch f*(4*B*T*H + P) of the widest;
        - between layers f*B*T*H for each tensor that dropout keeps, and with dropped weights 2*f of those.
        """
        config, is_lstm = self.config, self.config.kind == "lstm"
        widths = config.widths
        tokens = train.batch_size // train.micro_batches * train.segment
        kept, state, weights = 0, 0, []
        for n_in, n_unit, size in zip(widths, widths[1:], config.kernels, strict=False):
            if is_lstm:
                weights.append(4 * n_unit * (n_in + n_unit))
                kept += tokens * 5 * n_unit + (2 * 4 * n_unit * n_unit if config.weight_drop > 0 else 0)
                state += 2 * n_unit
            else:
                weights.append(3 * n_unit * size * n_in)
                kept += tokens * (4 * n_unit + (size * n_in if size > 1 else 0))
                kept += 2 * weights[-1] if config.weight_drop > 0 else 0
                state += n_unit + (size - 1) * n_in
        kept += tokens * sum(dropout_copies(config, None)) * sum(widths[1:-1])
        per_token, per_weight = (9, 2) if is_lstm else (4, 1)
        scratch = per_token * tokens * max(widths[1:]) + per_weight * max(weights)
        return LayerCosts(4 * kept, 4 * scratch, 2 * 4 * train.batch_size * state, beside_softmax=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the first weights: PyTorch's for layers and a mixture of softmaxes, the rest as for every model.

        An LSTM's are uniform within 1/sqrt(units), a convolution's and a mixture's within 1/sqrt(features that it
        reads), as in Yang et al.'s code. The tail clusters of an adaptive softmax begin at 0, as in awd-lstm-lm.
        """
        super().init_weights()
        uniform: list[tuple[nn.Module, int]] = [(layer, layer.fan) for layer in self._recurrent_layers()]
        if self.mixture is not None:
            uniform += [(each, each.in_features) for each in (self.mixture.prior, self.mixture.latent)]
        for module, fan in uniform:
            for parameter in module.parameters():
                parameter.uniform_(-(fan**-0.5), fan**-0.5)
        if self.config.cutoffs:
            self.softmax.cluster_weight.zero_()

    def _recurrent_layers(self) -> list[LSTMLayer | QRNNLayer]:
        return [cast("LSTMLayer | QRNNLayer", layer) for layer in self.layers]

    def empty_state(self, batch_size: int, lengths: Lengths) -> RecurrentState:
        """Return zeros for `batch_size` lanes."""
        # Not the parameter itself: one that is sharded would make sharded zeros.
        like = torch.empty(0, dtype=self.softmax.bias.dtype, device=self.softmax.bias.device)
        return RecurrentState(tuple(layer.empty(batch_size, like) for layer in self._recurrent_layers()))

    def state_from_tensors(self, tensors: dict[str, Tensor]) -> RecurrentState:
        """Return the state that `RecurrentState.to_tensors` described."""
        return RecurrentState(
            tuple((tensors[f"layers.{number}.0"], tensors[f"layers.{number}.1"]) for number in range(len(self.layers)))
        )

    def hidden_states(
        self, tokens: Int64[Tensor, "B T"], state: RecurrentState
    ) -> tuple[Float[Tensor, "B T E"], RecurrentState]:
        """Return h of the last layer, and the state for the next segment; see `LanguageModel.hidden_states`."""
        self._check(state)
        hidden, after = self._embedded(tokens, state), []
        for number, layer in enumerate(self.layers):
            hidden, carried = layer(hidden if number == 0 else self.dropout_between(hidden), state.layers[number])
            after.append(carried)
        return hidden, RecurrentState(tuple(after)).detach()

    def _check(self, state: RecurrentState) -> None:
        """Refuse another model's state."""
        if isinstance(state, RecurrentState) and len(state.layers) == len(self.layers):
            expected = self.init_state(1).layers
            shapes = [[each.shape[1:] for each in layer] for layer in state.layers]
            if shapes == [[each.shape[1:] for each in layer] for layer in expected]:
                return
        raise UserError("the state belongs to another model; expected one that this model's init_state made")
