"""The layers of a training step on a GPU, as one function with a hand-written backward pass.

It computes what the modules of `transformer_xl.py` compute, from the same parameters, in a tenth of the kernel
launches: matrix products by cuBLAS, attention (`txl.attention.triton_attention`), and everything between them in one
kernel each (`fused_rows.py`). Where a module has a hook or is of another class, or a model has an option that is not
here, the modules compute (`why_not_fused`).

Tensors are time-major, [T,B,...]: memory and segment then follow each other in one buffer, every product of all rows is
a plain product of matrices, and all lanes and heads are one batch dimension of the products of attention. Products use
copies of the weights in their own dtype, padded with zeros, because a GPU's matrix units read rows of a multiple of 16
bytes.

With pre-norm a sub-layer is LN(z), its products, and an update of the residual stream z. The kernel that adds the
update also normalises for the next sub-layer. Memory holds z, so its rows are normalised again in each step.

Shapes: B lanes, T tokens of a segment, M positions of memory, S = M + T keys, N = T B rows, L layers, H heads, D width
of a head, E d_model, I d_inner. Padded widths are written D', E', I'; A' = H D'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from txl.attention.equations import KeyScope
from txl.attention.triton_attention import AttentionCall, aligned, attend, attend_backward
from txl.config import TransformerXLConfig
from txl.models import fused_rows
from txl.models.fused_rows import Counted, Dropped, Norm, Normed, QueryMasks
from txl.models.layers import LockedDropout
from txl.models.memory import Memory

# Bytes of gradients that are kept for the gradients of several layers' weights: those of small layers, which fill a
# fraction of a GPU, are computed together.
_KEPT_GRADIENTS = 256 * 2**20
# Parameters of a layer: matrices (each the weight of a module), and gains and biases.
_MATRICES = (
    *(f"attention.{name}_proj" for name in "qkvro"),  # W_q, W_{k,E}, W_v, W_{k,R} [A,E], W_o [E,A]
    "feed_forward.inner",  # W_1 [I,E]
    "feed_forward.outer",  # W_2 [E,I]
)
_VECTORS = (
    *("attention.norm.weight", "attention.norm.bias", "feed_forward.norm.weight", "feed_forward.norm.bias"),
    *("feed_forward.inner.bias", "feed_forward.outer.bias"),
)
_GAINS = tuple(f"attention.{name}_norm.weight" for name in "qkr")  # of `qk_norm`, [D] each


@dataclass(frozen=True)
class Plan:
    """All that a call of the layers reads beside tensors with gradients."""

    config: TransformerXLConfig
    scope: KeyScope
    dtype: torch.dtype  # of the products
    memory: tuple[Float[Tensor, "B M E"], ...]
    r: Float[Tensor, "S E"]  # R after its dropout


def fused_hidden_states(
    config: TransformerXLConfig,
    layers: Sequence[nn.Module],
    biases: Sequence[Tensor],
    hidden: Float[Tensor, "B T E"],
    state: Memory,
    r: Float[Tensor, "S E"],
) -> tuple[Float[Tensor, "B T E"], list[Float[Tensor, "B T E"]]]:
    """Return h^N and the inputs h^0, ..., h^{N-1} of all layers in training, from h^0, the memory and R.

    Args:
        config, layers: of a Transformer-XL with relative encoding; `dropout_qkv` only if it is locked.
        biases: u and v of all layers, or u and v of each layer in turn; [H,D] each.
        state: the memory, into which no gradients flow.
        r: R after its dropout, farthest distance first.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32

    def of(layer: nn.Module, name: str) -> Tensor:
        path, _, last = name.rpartition(".")
        return getattr(layer.get_submodule(path), last)

    matrices = [of(layer, f"{name}.weight") for name in _MATRICES for layer in layers]
    vectors = [of(layer, name) for layer in layers for name in _vectors(config)]
    plan = Plan(config, state.scope(), dtype, state.hidden, r)
    # Triton launches on the current device; autograd makes that of the gradient current.
    with torch.autocast(device, enabled=False), torch.cuda.device_of(hidden):
        last, *inputs = _Layers.apply(hidden, plan, *biases, *matrices, *vectors)  # pyright: ignore
    return last, inputs


def unlike_configuration(config: TransformerXLConfig, layers: Iterable[nn.Module], training: bool) -> str | None:
    """Return what in the layers differs from what the configuration says, and `fused_hidden_states` would not see.

    Users may add a bias to a projection, change a rate, or train with a part in evaluation mode.

    Args:
        layers: with the modules' own classes.
        training: the mode that all modules must have; only in training, rates of dropout count.
    """
    rates = {
        "attention.dropout": config.dropout,
        "attention.dropout_qkv": config.dropout_qkv,
        "feed_forward.dropout": config.dropout,
        "feed_forward.dropout_inner": _inner_rate(config),
        "attention": config.dropatt,
    }
    expected = {f"{name}.weight" for name in _MATRICES}.union(_vectors(config))
    expected |= {"attention.u", "attention.v"} if config.untie_r else set()
    for number, layer in enumerate(layers):
        parameters = set()
        for name, module in layer.named_modules():
            own, why = vars(module), None
            rate, is_locked = own.get("p", own.get("dropatt")), isinstance(module, LockedDropout)
            if own["training"] != training:
                why = "another mode"
            elif training and (rate != rates.get(name) or ("p" in own and is_locked != config.locked_dropout)):
                why = "another dropout"
            elif own.get("eps", config.layer_norm_eps) != config.layer_norm_eps:
                why = "another eps"
            for key, parameter in own["_parameters"].items():
                if parameter is not None:
                    parameters.add(f"{name}.{key}")
                    if not is_float32(parameter):
                        why = "parameters that are sharded or not in float32"
            if why is not None:
                return f"{name or 'all'} of layer {number} has {why}"
        if parameters != expected:
            return f"layer {number} has other parameters: {', '.join(sorted(parameters ^ expected))}"
    return None


def is_float32(parameter: Tensor) -> bool:
    """Return whether a parameter is a plain one in float32, not sharded."""
    return type(parameter) is nn.Parameter and parameter.dtype == torch.float32


class _Layers(torch.autograd.Function):
    """The layers; inputs after the plan are u and v (of each layer), the matrices kind by kind, the vectors."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, plan: Plan, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run = _Run(plan, hidden, parameters)
        outputs = run.forward(hidden)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore
        run, ctx.run = ctx.run, None
        if run is None:
            raise RuntimeError("the layers were differentiated before; they keep nothing for a second backward pass")
        grad_hidden, grads = run.backward(grad)
        return grad_hidden, None, *grads


class _Kept(NamedTuple):
    """All that the backward pass of a layer reads, beside the layer's part of the context."""

    query: Tensor | None  # [N,A'], before `qk_norm`, if there is one
    query_u: Tensor  # [T,B,H,D']
    query_v: Tensor
    keys_values: Tensor  # [S,B,H,2,D'], keys before `qk_norm`
    key: Tensor  # [S,B,H,D']
    lse: Tensor
    attention_norm: Normed  # after the addition of attention's output
    outer_norm: Normed  # after the addition of the feed-forward's output


class _Run:
    """One forward pass and its backward pass."""

    def __init__(self, plan: Plan, hidden: Tensor, parameters: Sequence[Tensor]):
        config = self.config = plan.config
        self.plan, self.like = plan, hidden
        self.n_lane, self.n_new, _ = hidden.shape
        self.n_layer, self.n_head, self.memory = config.n_layer, config.n_head, plan.scope.memory
        self.n_key, self.n_row = self.memory + self.n_new, self.n_new * self.n_lane
        self.n_padded = aligned(self.n_key)
        self.d_model, self.d_head, self.d_inner = map(aligned, (config.d_model, config.d_head, config.d_inner))
        self.d_attention = self.n_head * self.d_head
        n_vector = len(_vectors(config))
        n_bias = len(parameters) - self.n_layer * (len(_MATRICES) + n_vector)
        self.biases = [(parameters[at], parameters[at + 1]) for at in range(0, n_bias, 2)]
        kinds = parameters[n_bias : n_bias + self.n_layer * len(_MATRICES)]
        vectors = parameters[n_bias + len(kinds) :]
        stacks = [torch.stack(list(kinds[at : at + self.n_layer])) for at in range(0, len(kinds), self.n_layer)]
        self.weights = self._copies(stacks)
        self.vectors = [vectors[at : at + n_vector] for at in range(0, len(vectors), n_vector)]
        # The norms of all sub-layers. With pre-norm the first one comes before all updates, and after the last none.
        self.norms: list[Norm | None] = []
        for gain, shift, outer_gain, outer_shift, *_ in self.vectors:
            eps = config.layer_norm_eps
            self.norms += [Norm(gain, shift, eps), Norm(outer_gain, outer_shift, eps)]
        self.norms += [None] * config.pre_norm
        # Memory's rows need gradients, for the gain and shift of the norm, only with pre-norm.
        self.n_before = self.memory * self.n_lane if config.pre_norm else 0
        self.gains: list[Tensor] = []  # of `qk_norm`: those of queries and keys [L,1,D], of positions [1,L,D]
        if config.qk_norm:
            query, key, position = (torch.stack([of[-3 + kind] for of in self.vectors]) for kind in range(3))
            self.gains = [query[:, None], key[:, None], position[None]]
        self.kept: list[_Kept] = []
        self._draw()

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.like.new_empty(shape, dtype=dtype or self.plan.dtype)

    def _copies(self, stacked: list[Tensor]) -> list[Tensor]:
        config = self.config
        true, padded = (config.d_model, config.d_head, config.d_inner), (self.d_model, self.d_head, self.d_inner)
        whole, views = padded_weights(config, self.like, self.plan.dtype, zeros=true != padded)
        for view, stack in zip(views, stacked, strict=True):
            view.copy_(stack.view(view.shape))
        return whole

    # Dropout: all masks of a step from a few draws.

    def _draw(self) -> None:
        config, device = self.config, self.like.device
        inner = _inner_rate(config)
        self.drops: list[tuple[Dropped, Dropped, Dropped]] = []  # of each layer: after W_o, after ReLU, after W_2
        self.masks: list[QueryMasks | None] = [None] * self.n_layer
        self.inner_factor = 1 / (1 - inner)
        seeds = torch.randint(2**63 - 1, (self.n_layer + 1,), dtype=torch.int64, device=device)
        self.seeds = seeds[1:].split(1) if config.dropatt > 0 else [None] * self.n_layer
        if not config.locked_dropout:
            rates = (config.dropout, inner, config.dropout)
            for layer in range(self.n_layer):
                first, second, third = (
                    Counted(seeds[:1], 3 * layer + site, p) if p else None for site, p in enumerate(rates)
                )
                self.drops.append((first, second, third))
            return
        n_lane = self.n_lane
        rows = self._locked(config.dropout, 2, n_lane, self.d_model)
        relus = self._locked(inner, 1, n_lane, self.d_inner)
        projections = self._locked(config.dropout_qkv, 1, 3 * n_lane + 1, self.d_attention)
        for layer in range(self.n_layer):
            self.drops.append((rows[layer][0], relus[layer][0], rows[layer][1]))
            if (of := projections[layer][0]) is not None:
                query, key, value, position = of.split([n_lane, n_lane, n_lane, 1])
                self.masks[layer] = QueryMasks(query, key, position[0], value)

    def _locked(self, p: float, n_site: int, n_row: int, width: int) -> list[list[Tensor | None]]:
        """Return scaled masks [n_row,width] of locked dropout, for `n_site` places of every layer; None without."""
        if p == 0:
            return [[None] * n_site] * self.n_layer
        ones = torch.ones(self.n_layer, n_site, n_row, width, device=self.like.device)
        return [list(masks.unbind()) for masks in F.dropout(ones, p).unbind()]

    def _call(self, layer: int) -> AttentionCall:
        scope, config = self.plan.scope, self.config
        window = self.n_key if scope.window is None else scope.window
        return AttentionCall(config.d_head, window, self.oldest, self.seeds[layer], config.dropatt, self.n_key)

    # The layers.

    def forward(self, hidden: Float[Tensor, "B T E"]) -> tuple[Tensor, ...]:
        """Return h^N and the inputs of all layers, [B,T,E] float32 each."""
        config, plan, n_row, width = self.config, self.plan, self.n_row, self.d_model
        oldest = plan.scope.oldest(hidden.device)
        self.oldest = None if oldest is None else oldest.to(torch.int32)
        # [SG(m) o h] of every layer in the dtype of the products, with pre-norm normalised; the kernel that adds the
        # update of a layer writes the rows of the next one into it.
        new = self._zeros_if_padded
        self.context = new(self.n_layer + 1, self.n_padded, self.n_lane, width)
        self.context[:, self.n_key :] = 0  # rows whose keys and values are zeros
        segment = slice(self.memory, self.n_key)
        rows = self._time_major(hidden)
        self.before: list[Normed] = []
        if config.pre_norm:
            self.first = self._normed(rows, 0, segment)
            for layer, memory in enumerate(plan.memory if self.memory else ()):
                self.before.append(self._normed(self._time_major(memory), layer, slice(self.memory)))
        else:
            for context, memory in zip(self.context, plan.memory, strict=False):
                context[: self.memory, :, : config.d_model].copy_(memory.transpose(0, 1))
            self.context[0, segment].view(n_row, width).copy_(rows)
        self.r = new(self.n_padded, width)
        self.r[: self.n_key, : config.d_model].copy_(plan.r)
        self.r[self.n_key :] = 0
        w_query, w_both, w_position, w_output, w_inner, w_outer = self.weights
        positions = (self.r @ w_position.t()).view(self.n_padded, self.n_layer, self.n_head, self.d_head)
        self.projected = self.positions = positions
        if self.gains:
            self.positions = fused_rows.head_norm(positions, self.gains[2][0], config.layer_norm_eps)
        # Inputs of W_o, W_1 and W_2.
        self.attended = self._empty(self.n_layer, self.n_new, self.n_lane, self.n_head, self.d_head)
        self.normed, self.relu = (self._empty(self.n_layer, n_row, size) for size in (width, self.d_inner))
        inputs = []
        for layer in range(self.n_layer):
            inputs.append(rows)
            context = self.context[layer].view(-1, width)
            after_output, after_relu, after_outer = self.drops[layer]
            inner_bias, outer_bias = self.vectors[layer][4:6]
            projected = query = self.context[layer, segment].view(n_row, width) @ w_query[layer].t()
            both = (context @ w_both[layer].t()).view(self.n_padded, self.n_lane, self.n_head, 2, self.d_head)
            key, value = both.unbind(3)
            if self.gains:
                query, key = self._heads_normed(query, 0, layer), self._heads_normed(key, 1, layer)
            u, v = self.biases[layer % len(self.biases)]
            queries = fused_rows.queries(query.view(n_row, -1), u, v, self.masks[layer], value, self.n_head)
            query_u, query_v = (rows.view(self.n_new, self.n_lane, self.n_head, self.d_head) for rows in queries)
            position, attended = self.positions[:, layer], self.attended[layer]
            _, lse = attend(query_u, query_v, key, value, position, self._call(layer), attended)
            update = attended.view(n_row, -1) @ w_output[layer].t()
            after_attention, after_feed_forward = self.norms[2 * layer + config.pre_norm :][:2]
            first = fused_rows.residual_norm(
                rows, update, None, after_output, after_attention, config.d_model, self.normed[layer], config.pre_norm
            )
            relu = torch.mm(self.normed[layer], w_inner[layer].t(), out=self.relu[layer])
            fused_rows.relu_bias(relu, inner_bias, after_relu)
            second = fused_rows.residual_norm(
                first.stream, relu @ w_outer[layer].t(), outer_bias, after_outer, after_feed_forward, config.d_model,
                self.context[layer + 1, segment].view(n_row, width), config.pre_norm,
            )  # fmt: skip
            rows = second.stream
            first, second = (normed._replace(hidden=None, low=None) for normed in (first, second))
            kept = projected if self.gains else None, query_u, query_v, both, key, lse
            self.kept.append(_Kept(*kept, first, second))
        return tuple(self._batch_first(rows) for rows in (rows, *inputs))

    def _normed(self, rows: Float[Tensor, "N W"], layer: int, part: slice) -> Normed:
        """Write the LayerNorm of rows of the stream into a part of the context of a layer with pre-norm."""
        out = self.context[layer, part].view(rows.shape)
        return fused_rows.residual_norm(
            rows, None, None, None, self.norms[2 * layer], self.config.d_model, out, pre_norm=True
        )

    def _by_head(self, rows: Tensor) -> Float[Tensor, "rows 1 H W"]:
        """View queries or keys, [N,A'] or [S,B,H,D'] with any strides, as rows for `head_norm`."""
        return rows.view(-1, 1, self.n_head, self.d_head) if rows.ndim == 2 else rows.flatten(0, 1)[:, None]

    def _heads_normed(self, rows: Tensor, kind: int, layer: int) -> Tensor:
        normed = fused_rows.head_norm(self._by_head(rows), self.gains[kind][layer], self.config.layer_norm_eps)
        return normed.view(rows.shape)

    def backward(self, grad: Float[Tensor, "B T E"]) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of h^0 and of all parameters, in the order of the inputs of `_Layers`."""
        config, n_row, width, pre_norm = self.config, self.n_row, self.d_model, self.config.pre_norm
        rows, low = self._time_major(grad), None
        w_query, w_both, _, w_output, w_inner, w_outer = self.weights
        grads, views = padded_weights(config, self.like, self.plan.dtype, zeros=False)
        grad_positions = torch.empty_like(self.positions)
        # Sums over the rows of each program of a kernel; one reduction for all layers follows. Those of norms: of each
        # in the order of `norms`, then of memory's rows in each layer.
        n_program = fused_rows.n_program(max(n_row, self.n_before))
        n_norm = len(self.norms) + len(self.before)
        of_norms = self._empty(n_norm, n_program, 3, width, dtype=torch.float32)
        n_program = fused_rows.n_program(n_row)
        of_inner = self._empty(self.n_layer, n_program, self.d_inner, dtype=torch.float32)
        of_biases = self._empty(self.n_layer, n_program, 2, self.d_attention, dtype=torch.float32)
        n_program = fused_rows.n_program(self.n_key * self.n_lane)
        of_gains = self._empty(len(self.gains), self.n_layer, n_program, self.d_head, dtype=torch.float32)

        # Gradients of the outputs of W_q, of W_k and W_v, of W_o, W_1 and W_2, for a group of layers.
        sizes = [(n_row, self.d_attention), (self.n_padded * self.n_lane, 2 * self.d_attention), (n_row, width)]
        sizes += [(n_row, self.d_inner), (n_row, width)]
        of_layer = self.context.element_size() * sum(rows * size for rows, size in sizes)
        n_group = min(self.n_layer, max(1, _KEPT_GRADIENTS // of_layer))
        of_group = [self._empty(n_group, *size) for size in sizes]

        def of_norm(at: int, saved: Normed, dropout: Dropped, update: Tensor) -> Tensor:
            norm = self.norms[at]
            gain = None if norm is None else norm.gamma
            return fused_rows.residual_norm_backward(
                rows, low, saved, gain, dropout, of_norms[at], config.d_model, update, pre_norm
            )

        for layer in reversed(range(self.n_layer)):
            kept = self.kept.pop()
            after_output, after_relu, after_outer = self.drops[layer]
            query, both, output, inner, outer = (grads[layer % n_group] for grads in of_group)
            rows = of_norm(2 * layer + 1 + pre_norm, kept.outer_norm, after_outer, outer)
            torch.mm(outer, w_outer[layer], out=inner)
            factor = self.inner_factor if after_relu is not None else 1.0
            fused_rows.relu_bias_backward(inner, self.relu[layer], factor, of_inner[layer])
            low = inner @ w_inner[layer]
            rows = of_norm(2 * layer + pre_norm, kept.attention_norm, after_output, output)
            above = (output @ w_output[layer]).view(kept.query_u.shape)
            key, value = both.view(kept.keys_values.shape).unbind(3)
            grad_u, grad_v = attend_backward(
                above, self.attended[layer], kept.lse, kept.query_u, kept.query_v,
                kept.key, kept.keys_values[..., 1, :], self.positions[:, layer], self._call(layer),
                key, value, grad_positions[:, layer],
            )  # fmt: skip
            fused_rows.queries_backward(
                grad_u.view(n_row, -1), grad_v.view(n_row, -1), self.masks[layer], value, self.n_head,
                of_biases[layer], query,
            )  # fmt: skip
            if kept.query is not None:
                for kind, (of, before) in enumerate(((query, kept.query), (key, kept.keys_values[..., 0, :]))):
                    fused_rows.head_norm_backward(
                        self._by_head(of), self._by_head(before), self.gains[kind][layer], config.layer_norm_eps,
                        of_gains[kind, layer, :, None],
                    )  # fmt: skip
            end = self.n_key * self.n_lane
            start = end - n_row
            low = both[start - self.n_before : end] @ w_both[layer]
            before, low = low[:-n_row], low[-n_row:].addmm_(query, w_query[layer])
            if self.before:
                gain = self.vectors[layer][0]
                fused_rows.norm_sums(before, self.before[layer], gain, of_norms[len(self.norms) + layer])
            if layer % n_group == 0:
                self._weight_gradients(slice(layer, min(layer + n_group, self.n_layer)), of_group, grads)
        if self.gains:
            fused_rows.head_norm_backward(
                grad_positions, self.projected, self.gains[2][0], config.layer_norm_eps, of_gains[2].transpose(0, 1)
            )
        torch.mm(grad_positions.view(self.n_padded, -1).t(), self.r, out=grads[2])
        assert low is not None
        rows = of_norm(0, self.first, None, of_group[2][0]) if pre_norm else rows + low
        return self._batch_first(rows), self._parameter_gradients(views, of_norms, of_inner, of_biases, of_gains)

    def _weight_gradients(self, layers: slice, of_outputs: list[Tensor], grads: list[Tensor]) -> None:
        """Compute the gradients of the matrices of a group of layers, but for W_kR."""
        context = self.context[layers].flatten(1, 2)
        segment = context[:, self.memory * self.n_lane : self.n_key * self.n_lane]
        attended = self.attended[layers].view(len(context), self.n_row, -1)
        inputs = segment, context, attended, self.normed[layers], self.relu[layers]
        of_query, of_both, _, *of_others = grads
        for of_output, rows, grad in zip(of_outputs, inputs, (of_query, of_both, *of_others), strict=True):
            torch.bmm(of_output[: len(rows)].mT, rows, out=grad[layers])

    def _parameter_gradients(
        self, views: list[Tensor], of_norms: Tensor, of_inner: Tensor, of_biases: Tensor, of_gains: Tensor
    ) -> list[Tensor]:
        config, pre_norm = self.config, self.config.pre_norm
        matrices = []
        for name, view in zip(_MATRICES, views, strict=True):
            wide = view.to(torch.float32, memory_format=torch.contiguous_format)
            if name.startswith("attention"):  # split into heads
                wide = wide.flatten(2, 3) if name.endswith("o_proj") else wide.flatten(1, 2)
            matrices += wide.unbind()
        norms, inner = of_norms.sum(1)[..., : config.d_model], of_inner.sum(1)[:, : config.d_inner]
        if self.before:
            norms[: 2 * self.n_layer : 2, :2] += norms[len(self.norms) :, :2]
        biases = of_biases.sum(1).unflatten(-1, (self.n_head, self.d_head))[..., : config.d_head]  # [L,2,H,D]
        if len(self.biases) == 1:
            biases = biases.sum(0, keepdim=True)
        gains = of_gains.sum(2)[..., : config.d_head].transpose(0, 1) if self.gains else [()] * self.n_layer
        vectors = []
        for layer in range(self.n_layer):
            # The kernel that adds the feed-forward's output has its bias; with pre-norm its norm is the next layer's.
            attention, feed_forward, after = (norms[2 * layer + at].unbind() for at in (0, 1, 1 + pre_norm))
            vectors += [*attention[:2], *feed_forward[:2], inner[layer], after[2], *gains[layer]]
        return [*biases.contiguous().flatten(0, 1).unbind(), *matrices, *vectors]

    def _zeros_if_padded(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        new = self.like.new_empty if self.d_model == self.config.d_model else self.like.new_zeros
        return new(shape, dtype=dtype or self.plan.dtype)

    def _time_major(self, hidden: Float[Tensor, "B n E"]) -> Float[Tensor, "nB W"]:
        """Copy to float32, padded with zeros."""
        rows = self._zeros_if_padded(hidden.shape[1], self.n_lane, self.d_model, dtype=torch.float32)
        rows[..., : self.config.d_model].copy_(hidden.transpose(0, 1))
        return rows.view(-1, self.d_model)

    def _batch_first(self, rows: Tensor) -> Float[Tensor, "B T E"]:
        return rows.view(self.n_new, self.n_lane, -1)[..., : self.config.d_model].transpose(0, 1)


def _vectors(config: TransformerXLConfig) -> tuple[str, ...]:
    return _VECTORS + _GAINS if config.qk_norm else _VECTORS


def _inner_rate(config: TransformerXLConfig) -> float:
    return config.dropout if config.dropout_inner is None else config.dropout_inner


def padded_weights(
    config: TransformerXLConfig, like: Tensor, dtype: torch.dtype, zeros: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """Return tensors for padded weights, [L,rows,columns] each, and their true numbers: a view for each of `_MATRICES`.

    Rows of W_k and W_v alternate by heads, so that one product gives keys and values side by side. The views are split
    into heads.
    """
    sizes = d_model, d_head, d_inner = config.d_model, config.d_head, config.d_inner
    (width, head, inner), n_head = map(aligned, sizes), config.n_head
    shapes = (n_head, head, width), (n_head, 2, head, width), (n_head, head, width), (width, n_head, head)
    query, both, position, output, first, second = (
        (like.new_zeros if zeros else like.new_empty)((config.n_layer, *shape), dtype=dtype)
        for shape in (*shapes, (inner, width), (width, inner))
    )
    views = [rows[:, :, :d_head, :d_model] for rows in (query, both[:, :, 0], both[:, :, 1], position)]
    views += [output[:, :d_model, :, :d_head], first[:, :d_inner, :d_model], second[:, :d_model, :d_inner]]
    return [query.flatten(1, 2), both.flatten(1, 3), position.flatten(0, 2), output.flatten(2), first, second], views
