"""The layers of a recorded evaluation step on a GPU, in few kernels: those of `fused_layers.py` without gradients.

Keys and values of memory are kept, not projected again. Tensors are time-major and padded as there; a step of PyTorch's
modules launches four times as many kernels.

Shapes: B lanes, T tokens of a segment, M positions of memory, N = T B rows, L layers, H heads, D width of a head, E
d_model, I d_inner. Padded widths are written D', E', I'.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from txl.attention.triton_attention import AttentionCall, aligned, attend
from txl.models import fused_rows
from txl.models.fused_layers import _MATRICES, padded_weights
from txl.models.fused_rows import Norm
from txl.models.memory import Memory, MemoryWindow, Projections
from txl.models.transformer_xl import TransformerXL, TransformerXLLayer


class FusedWeights:
    """Padded copies of a model's matrices in the dtype of the products, at fixed addresses."""

    def __init__(self, model: TransformerXL, dtype: torch.dtype):
        config = self.config = model.config
        self.model, self.dtype = model, dtype
        self.d_model, self.d_head = aligned(config.d_model), aligned(config.d_head)
        whole, self._views = padded_weights(config, model.softmax.bias, dtype)
        self.query, self.both, _, self.output, self.inner, self.outer = whole
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the model's weights again."""
        for name, view in zip(_MATRICES, self._views, strict=True):
            matrices = tuple(layer.get_parameter(f"{name}.weight") for layer in self.layers)
            view.copy_(torch.stack(matrices).view(view.shape))

    @property
    def shared_biases(self) -> tuple[Tensor, Tensor] | None:
        """u and v, if all layers share them."""
        return (self.model.u, self.model.v) if self.model.shares_biases else None

    @property
    def layers(self) -> list[TransformerXLLayer]:
        """The model's layers."""
        return [layer for layer in self.model.layers if isinstance(layer, TransformerXLLayer)]


class FusedWindow(MemoryWindow):
    """A `MemoryWindow` with time-major, padded rows, which reads a segment through all layers."""

    def __init__(self, memory: Memory, n_new: int, weights: FusedWeights):
        self.weights = weights
        super().__init__(memory, n_new)

    def _allocate(self, hidden: tuple[Tensor, ...], held: Projections) -> None:
        weights, (n_lane, _, _) = self.weights, hidden[0].shape
        n_head, shape = weights.config.n_head, (self._n_layer, self.size)
        self._hidden = hidden[0].new_zeros(*shape, n_lane, weights.d_model)
        self._both = held.keys[0].new_zeros(*shape, n_lane, n_head, 2, weights.d_head)
        self._rows = [self._hidden, self._both]
        self._by_distance = held.keys[0].new_zeros(*shape, n_head, weights.d_head)
        self._positions = self._by_distance[..., : weights.config.d_head].transpose(1, 2).unbind()

    def _newest(self, length: int) -> tuple[tuple[Tensor, ...], ...]:
        if length not in self._views:
            config, newest = self.weights.config, slice(self.capacity - length, self.capacity)
            hidden = self._hidden[:, newest, :, : config.d_model].transpose(1, 2)
            keys, values = self._both[:, newest, ..., : config.d_head].permute(4, 0, 3, 2, 1, 5)
            self._views[length] = hidden.unbind(), keys.unbind(), values.unbind()
        return self._views[length]

    def read(self, hidden: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        """Return h^N from h^0, and move the window by the segment."""
        with torch.autocast(hidden.device.type, enabled=False), torch.cuda.device_of(hidden):
            last = self._read(hidden)
        self._move(min(self.capacity, self.length + self.n_new), 1)
        return last

    def _read(self, hidden: Tensor) -> Tensor:
        weights, config = self.weights, self.weights.config
        n_lane, n_new, width = hidden.shape
        n_row, n_key, heads = n_new * n_lane, self.length + n_new, (n_new, n_lane, config.n_head, weights.d_head)
        window = self._memory.lengths.window
        call = AttentionCall(config.d_head, n_key if window is None else window, None, None, 0.0, n_key)
        rows = hidden.new_zeros(n_new, n_lane, weights.d_model)
        rows[..., :width].copy_(hidden.transpose(0, 1))
        rows = rows.view(n_row, -1)
        low, inputs = rows.to(weights.dtype), []
        for number, layer in enumerate(weights.layers):
            inputs.append(rows)
            attention, feed_forward = layer.attention, layer.feed_forward
            query = low @ weights.query[number].t()
            new = self._both[number, self.capacity :].view(n_row, -1)
            torch.mm(low, weights.both[number].t(), out=new)
            key, value = self._both[number, self.size - n_key :].unbind(-2)
            u, v = attention.biases(weights.shared_biases)
            query_u, query_v = fused_rows.queries(query, u, v, None, value, config.n_head)
            position = self._by_distance[number, self.size - n_key :]
            attended, _ = attend(query_u.view(heads), query_v.view(heads), key, value, position, call)
            first = fused_rows.residual_norm(
                rows, attended.view(n_row, -1) @ weights.output[number].t(), None, None,
                Norm(attention.norm.weight, attention.norm.bias, config.layer_norm_eps), width,
            )  # fmt: skip
            assert first.low is not None
            inner = first.low @ weights.inner[number].t()
            relu = fused_rows.relu_bias(inner, feed_forward.inner.bias, None)
            second = fused_rows.residual_norm(
                first.stream, relu @ weights.outer[number].t(), feed_forward.outer.bias, None,
                Norm(feed_forward.norm.weight, feed_forward.norm.bias, config.layer_norm_eps), width,
            )  # fmt: skip
            rows, low = second.stream, second.low
            assert low is not None
        self._hidden[:, self.capacity :].copy_(torch.stack(inputs).view(len(inputs), n_new, n_lane, -1))
        return rows.view(n_new, n_lane, -1)[..., :width].transpose(0, 1)
