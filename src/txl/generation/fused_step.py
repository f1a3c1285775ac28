"""The decoding step on NVIDIA GPUs: Triton kernels for attention, and for the products of a few lanes.

Up to `_FEW` lanes a step is bound by launches and by reading the weights: five kernels a layer. With more lanes it is
bound by reading keys and values: one kernel reads them once, and PyTorch computes the rest.

Shapes: n lanes, H heads, D width of a head, E d_model, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from txl.attention.triton_attention import aligned, why_not_triton
from txl.devices import Captured, sent
from txl.generation.steps import DrawSettings, Slots, StaticStep
from txl.models.transformer_xl import RelativeMultiHeadAttention, TransformerXL, TransformerXLLayer

_FEW = 8  # lanes whose products are computed by `product_kernel`
_TILE = 8192  # bytes of a tile of keys: four loads of 16 bytes a thread
_PROGRAMS = 8192  # of the attention kernel, if memory is long enough: so many that the last ones cost little
_MOST_SPLITS = 32  # programs that share a head
_MOST_SORTED = 2048  # tokens of a vocabulary that `draw_kernel` sorts
_STEADY = 4  # steps in a row without a change of streams, after which a step is taken ahead
_STAGES = 3  # one tile of keys and values is used while two are on their way


def why_not_fused(model: TransformerXL) -> str | None:
    """Return why the kernels cannot decode a model, as a phrase that follows their name; None if they can."""
    like = model.softmax.bias
    return why_not_triton(like.device, like.dtype, model.config.d_head)


@dataclass(frozen=True)
class _Layer:
    """Weights of a layer as the kernels read them: contiguous, in rows of a multiple of 16 numbers."""

    module: TransformerXLLayer
    positions: Float[Tensor, "H R C"]  # W_kR R, the nearest distance first
    biases: tuple[Tensor, Tensor]  # u and v
    projections: Tensor | None  # W_q, W_k and W_v one below the other; None: the modules project

    @property
    def attention(self) -> RelativeMultiHeadAttention:
        """The module of the attention sub-layer."""
        return self.module.attention


class FusedStep(StaticStep):
    """`StaticStep` in the kernels, for models in float32 and bfloat16; sums and softmax are in float32."""

    def __init__(self, model: TransformerXL, slots: Slots, clamp_len: int | None, captured: bool):
        super().__init__(model, slots, clamp_len, captured=captured)
        config, shared = model.config, (model.u, model.v) if model.shares_biases else None
        # Modules compute models of other structure; their attention is that of the kernel all the same.
        self._is_usual = not (config.pre_norm or config.qk_norm)
        missing = aligned(config.d_head) - config.d_head
        self._layers = []
        for module, position in zip(model.layers, self.positions, strict=True):
            attention = cast(TransformerXLLayer, module).attention
            parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
            self._layers.append(
                _Layer(
                    cast(TransformerXLLayer, module),
                    F.pad(position.flip(1), (0, missing)).contiguous(),
                    cast(tuple[Tensor, Tensor], tuple(bias.contiguous() for bias in attention.biases(shared))),
                    torch.cat(parts) if self._is_usual else None,
                )
            )
        self.positions = ()
        # Weights whose rows are no multiple of 16 numbers are copied once, by the address of the original.
        self._aligned: dict[int, Tensor] = {}
        self._tickets = torch.zeros(len(self.lanes) * config.n_head, dtype=torch.int32, device=self.lanes.device)

        self._drawn: dict[int, Captured] = {}  # graphs that draw too, by their number of lanes, and the keys in each
        self._keys: dict[int, Tensor] = {}
        self._ahead: Captured | None = None  # the graph of a step that was taken before it was asked for
        n_slot, vocab_size, device = len(self.lanes), model.vocab_size, self.lanes.device
        self._is_sorted = vocab_size <= _MOST_SORTED
        if self._is_sorted:
            # Settings of each slot: top_k, top_p and temperature, and 1 for the tokens that it never draws.
            self._settings = torch.ones(3, n_slot, dtype=torch.float64, device=device)
            self._never = torch.zeros(n_slot, vocab_size, dtype=torch.uint8, device=device)
            self._nevers: list[tuple[int, ...]] = [()] * n_slot
            self._drawings: tuple[list[int], list[DrawSettings]] = [], []
            # What a step overwrites that is taken before it is asked for.
            self._before = torch.zeros(n_slot, dtype=torch.int64, device=device)
            self._steady = 0

    def draws(self, drawings: Sequence[DrawSettings]) -> bool:
        """Return True if `draw` should compute a step: always, except with a large vocabulary."""
        return self.captured if self._is_sorted else super().draws(drawings)

    def draw(
        self,
        tokens: Int64[Tensor, " B"],
        slots: Sequence[int],
        drawings: Sequence[DrawSettings],
        keys: Int64[Tensor, "3 N"],
    ) -> Int64[Tensor, "2 n"]:
        """Compute `StaticStep.draw` for any settings, which are inputs of the same graph; the result is on the CPU.

        While streams do not change, the next step is launched before the tokens of this one are waited for, so that
        the device works while the program handles them. `settle` undoes such a step.
        """
        if not self._is_sorted:
            return super().draw(tokens, slots, drawings, keys)
        n_lane = self._rounded(keys.shape[1])
        keys, known = F.pad(keys, (0, n_lane - keys.shape[1])), self._keys.get(n_lane)
        # The graph counts tokens by itself: if streams have not changed, its keys are these.
        alike = (slots, drawings) == self._drawings
        follows = alike and known is not None and torch.equal(keys, known)
        self._steady = self._steady + 1 if follows else 0
        if not follows:
            self.settle(tokens)
        if not alike:
            self._set_drawings(slots, drawings)
        graph = self._with_drawing(tokens, n_lane, drawings[0])
        if self._ahead is None:
            graph(graph.inputs[0] if follows else sent(keys, tokens.device))
        self._keys[n_lane] = torch.stack([keys[0], keys[1] + keys[2], keys[2]])
        drawn = graph.outputs[0].to("cpu", non_blocking=True, copy=True)
        arrived = torch.cuda.Event() if tokens.is_cuda else None
        if arrived is not None:
            arrived.record()
        self._ahead = graph if self._steady >= _STEADY else None
        if self._ahead is not None:
            graph(graph.inputs[0])
        if arrived is not None:
            arrived.synchronize()
        return drawn

    def settle(self, tokens: Int64[Tensor, " B"]) -> None:
        """Undo a step that was taken ahead: the keys that it has written lie where the slots' next tokens will lie."""
        if self._ahead is not None:
            keys, self._ahead = self._ahead.inputs[0], None
            n_lane = keys.shape[1]
            tokens[:n_lane] = self._before[:n_lane]
            self.slots.read[:n_lane] -= keys[2]
            del self._keys[n_lane]  # the graph's own have grown

    def record(self, tokens: Int64[Tensor, " B"], drawing: DrawSettings) -> None:
        """Record all graphs; see `StaticStep.record`."""
        self.settle(tokens)
        super().record(tokens, drawing)

    def _with_drawing(self, tokens: Int64[Tensor, " B"], n_lane: int, drawing: DrawSettings) -> Captured:
        """Return the graph that takes a step and draws; one graph serves all settings."""
        if not self._is_sorted:
            return super()._with_drawing(tokens, n_lane, drawing)
        if n_lane in self._drawn:
            return self._drawn[n_lane]

        def drawn(keys: Tensor) -> tuple[Tensor]:
            return (self._drawn_from(self._log_probs(tokens[:n_lane])[0], keys, tokens),)

        graph = Captured(drawn)
        graph.record(torch.zeros(3, n_lane, dtype=torch.int64, device=tokens.device))  # no slot takes part
        self._drawn[n_lane] = graph  # after it was recorded: a failed one would be recorded with keys that take part
        return graph

    def _drawn_from(
        self, log_probs: Float[Tensor, "n V"], keys: Int64[Tensor, "3 n"], tokens: Int64[Tensor, " B"]
    ) -> Int64[Tensor, "2 n"]:
        """Draw a token in each lane, and count it in `keys` and in the slots; see `draw_kernel`."""
        log_probs, (n_lane, vocab_size) = log_probs.contiguous(), log_probs.shape
        drawn = keys.new_empty(2, n_lane)
        _kernels().draw_kernel[(n_lane,)](
            log_probs,
            self._settings,
            self._never,
            keys,
            tokens,
            self._before,
            self.slots.read,
            drawn,
            vocab_size,
            len(self.lanes),
            n_lane,
            WIDTH=max(32, 1 << (vocab_size - 1).bit_length()),
            num_warps=4,
        )
        return drawn

    def _set_drawings(self, slots: Sequence[int], drawings: Sequence[DrawSettings]) -> None:
        """Send the settings of slots to the device."""
        rows, settings = [], torch.ones(self._settings.shape, dtype=torch.float64)
        for slot, drawing in zip(slots, drawings, strict=True):
            top_k, top_p, temperature = drawing.sampling.top_k, drawing.sampling.top_p, drawing.sampling.temperature
            # None: numbers that have no effect.
            rows.append((top_k or self.model.vocab_size, 2.0 if top_p is None else top_p, temperature))
            if self._nevers[slot] != drawing.never:
                self._nevers[slot] = drawing.never
                self._never[slot] = 0
                if drawing.forbidden is not None:
                    self._never[slot].index_fill_(0, drawing.forbidden, 1)
        settings[:, list(slots)] = torch.tensor(rows, dtype=torch.float64).T
        self._settings.copy_(sent(settings, self._settings.device))
        self._drawings = list(slots), list(drawings)

    def _log_probs(self, tokens: Int64[Tensor, " n"]) -> tuple[Float[Tensor, "n V"]]:
        """Read the next tokens of the first n slots."""
        hidden = self.model.embedding.of_every_cluster(tokens[:, None])
        few = self._is_usual and len(tokens) <= _FEW
        hidden = self._few_rows(hidden[:, 0].contiguous())[:, None] if few else self._many_rows(hidden)
        return (self.model.log_probs_of(hidden)[:, 0],)

    def _few_rows(self, hidden: Float[Tensor, "n E"]) -> Float[Tensor, "n E"]:
        """Compute all layers in five kernels each; a LayerNorm is computed by the product that reads it."""
        norm, residual = None, hidden
        for number, layer in enumerate(self._layers):
            attention, after = layer.attention, layer.module.feed_forward
            assert layer.projections is not None
            projected, residual = self._product(hidden, layer.projections, norm=norm, residual=residual)
            attended = self._attended(number, *projected.chunk(3, dim=1))
            merged, _ = self._product(attended, attention.o_proj.weight)
            inner, residual = self._product(
                merged, after.inner.weight, after.inner.bias, norm=attention.norm, residual=residual, relu=True
            )
            hidden, _ = self._product(inner, after.outer.weight, after.outer.bias)
            norm = after.norm
        assert norm is not None
        return norm(hidden + residual)

    def _many_rows(self, hidden: Float[Tensor, "n 1 E"]) -> Float[Tensor, "n 1 E"]:
        """Compute all layers in PyTorch and the kernels of attention."""
        for number, layer in enumerate(self._layers):
            attention = layer.attention
            if layer.projections is not None:
                rows = F.linear(hidden[:, 0], layer.projections).chunk(3, dim=1)
            else:
                context = attention.norm(hidden) if attention.pre_norm else hidden
                rows = [kind.flatten(1) for kind in (attention.query(context), *attention.keys_and_values(context))]
            attended = self._attended(number, *rows).view(len(hidden), 1, attention.n_head, attention.d_head)
            hidden = layer.module.feed_forward(attention.merge(hidden, attended))
        return hidden

    def _attended(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Float[Tensor, "n A"]:
        """Return the attention of new rows [n,H*D] of equal strides, and put keys and values into the rings."""
        layer, config, size = self._layers[number], self.model.config, self.slots.size
        keys, values = (kind[number].transpose(0, 1) for kind in (self.slots.keys, self.slots.values))  # [B,H,R,D]
        n_lane, n_head, d_head, stored = len(query), config.n_head, config.d_head, aligned(config.d_head)
        width = max(32, 1 << (d_head - 1).bit_length())
        block, inside = _TILE // width // query.itemsize, n_lane <= _FEW
        wanted = min(math.ceil(_PROGRAMS / (n_lane * n_head)), _MOST_SPLITS, math.ceil(size / block))
        chunk = math.ceil(size / wanted / block) * block
        splits = math.ceil(size / chunk)
        out = query.new_empty(n_lane, n_head * d_head)
        of_part = query.new_empty(n_lane * n_head * splits, width, dtype=torch.float32)
        pitch = math.ceil(size / 4) * 4  # for stores of 16 bytes
        shared: dict[str, Any] = {
            "query": query,
            "v": layer.biases[1],
            "positions": layer.positions,
            "by_distance": of_part if inside else of_part.new_empty(n_lane, n_head, pitch),
            "row_lane": query.stride(0),
            "position_head": layer.positions.stride(0),
            "score_lane": n_head * pitch,
            "score_head": pitch,
            "size": size,
            "d_head": d_head,
            "scale": math.log2(math.e) / math.sqrt(d_head),
            "STORED": stored,
            "WIDTH": width,
        }
        if not inside:
            _kernels().position_kernel[math.ceil(size / 64), n_head, math.ceil(n_lane / 64)](
                **shared, n_lane=n_lane, LANES=64, BLOCK=64, PRECISION="ieee", num_warps=4
            )
        _kernels().attention_kernel[splits, n_head, n_lane](
            **shared,
            key=key,
            value=value,
            u=layer.biases[0],
            keys=keys,
            values=values,
            read=self.slots.read,
            out=out,
            partials=of_part,
            sums=of_part.new_empty(len(of_part), 2),
            tickets=self._tickets,
            ring_lane=keys.stride(0),
            ring_head=keys.stride(1),
            chunk=chunk,
            BLOCK=block,
            SPLITS=1 << (splits - 1).bit_length(),
            INSIDE=inside,
            STAGES=_STAGES,
            num_warps=4,
        )
        return out

    def _product(
        self,
        rows: Float[Tensor, "n I"],
        weight: Float[Tensor, "O I"],
        bias: Float[Tensor, " O"] | None = None,
        *,
        norm: nn.LayerNorm | None = None,
        residual: Tensor | None = None,
        relu: bool = False,
    ) -> tuple[Float[Tensor, "n O"], Float[Tensor, "n I"]]:
        """Return the product of rows, or of LayerNorm(residual + rows), and the rows that were multiplied."""
        weight = self._of_aligned_rows(weight)
        (n_lane, n_in), n_out = rows.shape, len(weight)
        width = 1 << (n_in - 1).bit_length()
        # At least 128 programs, of at most 8,192 numbers of the weight.
        block = 1 << (max(1, min(8192 // width, n_out // 128)).bit_length() - 1)
        out = rows.new_empty(n_lane, n_out)
        normed = rows if norm is None else torch.empty_like(rows)
        _kernels().product_kernel[(math.ceil(n_out / block),)](
            rows=rows,
            residual=rows if residual is None else residual,
            normed=normed,
            gain=rows if norm is None else norm.weight,
            shift=rows if norm is None else norm.bias,
            weight=weight,
            bias=rows if bias is None else bias,
            out=out,
            n_in=n_in,
            n_out=n_out,
            weight_row=weight.stride(0),
            eps=0.0 if norm is None else norm.eps,
            LANES=n_lane,
            WIDTH=width,
            BLOCK=block,
            NORM=norm is not None,
            BIAS=bias is not None,
            RELU=relu,
            num_warps=4,
        )
        return out, normed

    def __del__(self) -> None:
        if getattr(self, "_ahead", None) is not None and self.lanes.is_cuda:
            torch.cuda.synchronize()  # a graph must not be destroyed while it runs

    def _of_aligned_rows(self, weight: Tensor) -> Tensor:
        missing = -weight.shape[1] % 16
        if missing == 0 and weight.is_contiguous():
            return weight
        if weight.data_ptr() not in self._aligned:
            self._aligned[weight.data_ptr()] = F.pad(weight, (0, missing))
        return self._aligned[weight.data_ptr()]


def _kernels() -> Any:
    from txl.generation import decode_kernels  # needs Triton

    return decode_kernels
