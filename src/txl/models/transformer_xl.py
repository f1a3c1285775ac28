"""Transformer-XL (Dai et al. 2019, Section 3): segment-level recurrence and relative positional encoding.

With `encoding` "shaw" the model uses the encoding of Shaw et al. (2018) as described in Section 3.3, the baseline of
Tables 6 and 7: only terms (a) and (b), and a learned vector for each distance, layer and head instead of W_{k,R} R_d.
Shaw et al. clip distances (their equation 5), so all distances above `max_distance` share one vector. Memory may
therefore be longer in evaluation than in training.

Shapes: B lanes, T tokens of a segment, M positions of memory, S = M + T keys, H heads, D width of a head,
E d_model, V vocabulary, L distances.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from txl.attention import Backend, RelativeAttention, attention_backend, attention_note
from txl.attention.equations import KeyScope, Operands, distances_farthest_first, sinusoid
from txl.attention.triton_attention import why_not_triton
from txl.config import Lengths, ModelConfig, TransformerXLConfig
from txl.errors import UserError
from txl.models.adaptive import AdaptiveEmbedding
from txl.models.compiled_step import LayerWeights, caches_of, layer_weights, places_of
from txl.models.family import FamilyModel
from txl.models.fused_layers import fused_hidden_states, is_float32, unlike_configuration
from txl.models.initial_weights import init_induction
from txl.models.language_model import check_targets
from txl.models.layers import Dropout, HeadNorm, Linear, LockedDropout, PositionwiseFeedForward, make_dropout
from txl.models.loss import EVERY_TARGET, Objective
from txl.models.memory import Memory, MemoryWindow, ProjectedSegment, Projections
from txl.models.structure import Frozen, outsider
from txl.native.build import library
from txl.native.operations import MOST_ROWS, sums_dtype
from txl.native.tensors import readable, transforms_are_active

# u and v, [H,D] each.
Biases = tuple[Tensor, Tensor]


class RelativeMultiHeadAttention(nn.Module):
    """The attention sub-layer: projections, A^rel, Masked-Softmax, output projection, residual, LayerNorm."""

    attend: RelativeAttention
    """The model's `Backend`, or an observer that wraps it."""

    def __init__(self, config: TransformerXLConfig, backend: Backend):
        super().__init__()
        d_attention = config.n_head * config.d_head
        self.n_head, self.d_head = config.n_head, config.d_head
        self.pre_norm, self.dropatt = config.pre_norm, config.dropatt
        self.attend = backend
        self.q_proj = Linear(config.d_model, d_attention, bias=False)  # W_q
        self.k_proj = Linear(config.d_model, d_attention, bias=False)  # W_{k,E}
        self.v_proj = Linear(config.d_model, d_attention, bias=False)  # W_v
        self.learns_distances = config.encoding == "shaw"
        if self.learns_distances:
            self.distances = nn.Parameter(torch.empty(config.max_distance + 1, config.n_head, config.d_head))
        else:
            self.r_proj = Linear(config.d_model, d_attention, bias=False)  # W_{k,R}
        self.o_proj = Linear(d_attention, config.d_model, bias=False)
        if config.untie_r and not self.learns_distances:
            self.u = nn.Parameter(torch.empty(config.n_head, config.d_head))
            self.v = nn.Parameter(torch.empty(config.n_head, config.d_head))
        self.q_norm, self.k_norm, self.r_norm = (
            HeadNorm(config.d_head, eps=config.layer_norm_eps) if config.qk_norm else None for _ in range(3)
        )
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = make_dropout(config.dropout, config.locked_dropout)
        self.dropout_qkv = make_dropout(config.dropout_qkv, config.locked_dropout)

    def forward(
        self,
        hidden: Float[Tensor, "B T E"],
        memory: Float[Tensor, "B M E"],
        r: Float[Tensor, "S E"] | Int64[Tensor, " S"],
        shared_biases: Biases | None,
        scope: KeyScope,
    ) -> Float[Tensor, "B T E"]:
        """Compute the sub-layer for one segment: the equations of Section 3.3, line by line.

        Args:
            hidden, memory: h^{n-1}, and SG(m^{n-1}), from which W_k and W_v still get gradients.
            r: rows R_d, farthest distance first; with learned vectors the distances.
            shared_biases: u and v, if all layers share them.
        """
        # The segment is h, memory m: [SG(m) o h] is never made, because keys and values are projected part by part.
        context, before = hidden, memory
        if self.pre_norm:
            context = self.norm(hidden)
            before = self.norm(memory) if memory.shape[1] else memory
        query, (key, value) = self.query(context), self.keys_and_values(context, before)  # of h, and of [SG(m) o h]
        u, v = self.biases(shared_biases)
        # A^rel = (a) q k + (b) q W_kR R + (c) u k + (d) v W_kR R, then Masked-Softmax and the values (Section 3.3).
        dropout = self.dropatt if self.training else 0.0
        attended = self.attend(Operands(query, key, value, self.position(r), u, v), scope, dropout)
        return self.merge(hidden, attended)

    def read(
        self,
        hidden: Float[Tensor, "B T E"],
        segment: ProjectedSegment | MemoryWindow,
        layer: int,
        position: Float[Tensor, "S H D"],
        shared_biases: Biases | None,
        scope: KeyScope,
    ) -> Float[Tensor, "B T E"]:
        """Compute `forward` without gradients and dropout, given W_{k,R} R and the keys and values of memory.

        Those of this segment are appended at index `layer`, from 0.
        """
        context = self.norm(hidden) if self.pre_norm else hidden
        # Keys of earlier segments stay as they are: with fixed weights, W_k m is what it was when m was read.
        key, value = segment.append(layer, hidden, *self.keys_and_values(context))
        operands = Operands(self.query(context), key, value, position, *self.biases(shared_biases))
        return self.merge(hidden, self.attend(operands, scope))

    def query(self, context: Float[Tensor, "B T E"]) -> Float[Tensor, "B T H D"]:
        """Project queries; with pre-norm, `context` must already be normalised, here and for keys and values."""
        return self._heads(self.q_proj(context), self.q_norm)

    def keys_and_values(
        self, context: Float[Tensor, "B T E"], before: Float[Tensor, "B M E"] | None = None
    ) -> tuple[Float[Tensor, "B S H D"], Float[Tensor, "B S H D"]]:
        """Project [before o context] to keys and values."""
        # The products of `before`, the memory, are computed separately: a product of both would keep a copy of both for
        # the backward pass, and compute gradients for memory, which are not needed.
        parts = [context] if before is None or before.shape[1] == 0 else [before, context]
        both = [[project(part) for part in parts] for project in (self.k_proj, self.v_proj)]
        key, value = (rows[0] if len(rows) == 1 else torch.cat(rows, dim=1) for rows in both)
        return self._heads(key, self.k_norm), self._heads(value)

    def position(self, r: Float[Tensor, "S E"] | Int64[Tensor, " S"]) -> Float[Tensor, "S H D"]:
        """Project R to W_{k,R} R, or look up the learned vectors if `r` holds distances."""
        if self.learns_distances:
            rows = F.embedding(r.clamp(max=len(self.distances) - 1), self.distances.flatten(1))
            if torch.is_autocast_enabled(rows.device.type):  # autocast does not convert look-ups
                rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        else:
            rows = self.r_proj(r)
        return self._heads(rows, self.r_norm)

    def biases(self, shared: Biases | None) -> Biases:
        """Return u and v: the shared ones if given, else those of this layer; zeros without terms (c) and (d)."""
        if self.learns_distances:
            # Shaw et al. have terms (a) and (b) alone; zeros for u and v remove (c) and (d) exactly.
            zeros = self.distances.new_zeros(self.n_head, self.d_head)
            return zeros, zeros
        return (self.u, self.v) if shared is None else shared

    def merge(self, hidden: Float[Tensor, "B T E"], attended: Float[Tensor, "B T H D"]) -> Float[Tensor, "B T E"]:
        """Apply the steps after attention: output projection, residual, LayerNorm."""
        output = self.dropout(self.o_proj(attended.flatten(-2)))
        return hidden + output if self.pre_norm else self.norm(hidden + output)

    def _heads(self, projected: Tensor, norm: HeadNorm | None = None) -> Tensor:
        """Split [...,H*D] into heads [...,H,D], normalise each head if there is a norm, and apply dropout."""
        heads = (self.n_head, self.d_head)
        if norm is not None:
            projected = norm(projected.unflatten(-1, heads)).flatten(-2)
        return self.dropout_qkv(projected).unflatten(-1, heads)


class TransformerXLLayer(nn.Module):
    """A layer of Transformer-XL: attention and feed-forward."""

    def __init__(self, config: TransformerXLConfig, backend: Backend):
        super().__init__()
        self.attention = RelativeMultiHeadAttention(config, backend)
        self.feed_forward = PositionwiseFeedForward(config)

    def forward(self, hidden: Float[Tensor, "B T E"], *segment: Any) -> Float[Tensor, "B T E"]:
        """Compute h^n from h^{n-1}; arguments as in `RelativeMultiHeadAttention`."""
        return self.feed_forward(self.attention(hidden, *segment))

    def read(self, hidden: Float[Tensor, "B T E"], *segment: Any) -> Float[Tensor, "B T E"]:
        """Compute `forward` without gradients and dropout; arguments as in `RelativeMultiHeadAttention.read`."""
        return self.feed_forward(self.attention.read(hidden, *segment))


class TransformerXL(FamilyModel[Memory]):
    """The Transformer-XL language model. Its state is a `Memory`."""

    config_class = TransformerXLConfig
    config: TransformerXLConfig  # pyright: ignore[reportIncompatibleVariableOverride] (never assigned)

    def __init__(
        self, config: TransformerXLConfig, vocab_size: int, device: str | None = None, dtype: torch.dtype | None = None
    ):
        super().__init__(config, vocab_size)
        self.backend = attention_backend(config, device, dtype)
        self.attention_name = self.backend.name
        self.attention_note = attention_note(config, device, dtype)
        self.layers = nn.ModuleList(TransformerXLLayer(config, self.backend) for _ in range(config.n_layer))
        # The paper's u and v are shared by all layers; `untie_r` gives each layer its own, as the authors' code can.
        self.shares_biases = config.encoding == "relative" and not config.untie_r
        if self.shares_biases:
            self.u = nn.Parameter(torch.empty(config.n_head, config.d_head))
            self.v = nn.Parameter(torch.empty(config.n_head, config.d_head))
        self.dropout_r = self._dropout(config.dropout_r)
        self._finish()

    @property
    def attentions(self) -> list[RelativeMultiHeadAttention]:
        """The attention of each layer."""
        return [cast(TransformerXLLayer, layer).attention for layer in self.layers]

    def init_weights(self) -> None:
        """See `FamilyModel.init_weights`; then `init_induction`, if the configuration says so."""
        super().init_weights()
        if self.config.init == "induction":
            init_induction(self.config, self.attentions, self.v if self.shares_biases else self.attentions[0].v)

    @staticmethod
    def check_training(config: ModelConfig, device: str, dtype: torch.dtype) -> None:
        """Raise `AttentionRefused` if the configuration's attention cannot train on a device or in a dtype."""
        assert isinstance(config, TransformerXLConfig)
        if (refusal := attention_backend(config, device, dtype).refusal(config, device, dtype)) is not None:
            raise refusal

    def empty_state(self, batch_size: int, lengths: Lengths) -> Memory:
        """Return a memory without positions."""
        like = self.softmax.bias  # not like.new_empty: for a sharded parameter it returns a sharded tensor
        nothing = torch.empty(batch_size, 0, self.config.d_model, dtype=like.dtype, device=like.device)
        return Memory((nothing,) * self.config.n_layer, None, lengths)

    def state_from_tensors(self, tensors: dict[str, Tensor]) -> Memory:
        """Return the state from the tensors of `Memory.to_tensors`."""
        return Memory.from_tensors(tensors)

    def hidden_states(self, tokens: Int64[Tensor, "B T"], state: Memory) -> tuple[Float[Tensor, "B T E"], Memory]:
        """Return h^N and the memory for the next segment; see `LanguageModel.hidden_states`.

        `_from_hidden` projects the hidden states of memory to keys and values again: in training, for gradients, and if
        a module has a hook or is of another class. Otherwise each key and value is projected only once: `_read_token`
        passes one token through all layers in the compiled library, `_from_projections` reads other segments.
        """
        if (
            not isinstance(state, Memory)
            or len(state.hidden) != self.config.n_layer
            or state.hidden[0].shape[-1] != self.config.d_model
        ):
            raise UserError("the state belongs to another model; expected one that this model's init_state made")
        begins = None  # lanes whose first token `dropout_words` spares
        if self.training and self.config.dropout_words > 0:
            # A token without memory sees only itself. If its word were dropped, it would be exactly 0 in every layer,
            # and the backward pass of each LayerNorm would multiply its gradient by 1/sqrt(eps) = 316.
            oldest = state.scope().oldest(tokens.device)
            begins = torch.full((len(tokens),), state.length == 0, device=tokens.device)
            begins = begins if oldest is None else oldest == state.length
        hidden = self._embedded(tokens, state, begins=begins)
        held = None if self.training or torch.is_grad_enabled() else self.projections(state, hidden, hidden.shape[1])
        if held is None:
            return self._from_hidden(hidden, state)
        read = self._read_token(hidden, state, held)
        return self._from_projections(hidden, state, held) if read is None else read

    def _from_hidden(self, hidden: Tensor, state: Memory) -> tuple[Tensor, Memory]:
        """Compute h^N and the next memory from h^0 [B,T,E] and the hidden states of memory, as in Section 3.3."""
        n_key, clamp_len, scope = state.length + hidden.shape[1], state.lengths.clamp_len, state.scope()
        r = self._encoded(distances_farthest_first(n_key, clamp_len, hidden.device), hidden.dtype)
        if hidden.is_cuda and self.training and torch.is_grad_enabled() and self.why_not_fused(state, hidden) is None:
            biases = self._shared_biases() or [bias for attention in self.attentions for bias in attention.biases(None)]
            hidden, layer_inputs = fused_hidden_states(self.config, [*self.layers], biases, hidden, state, r)
            return hidden, state.after_hidden(layer_inputs)
        layer_inputs = []  # h^{n-1} of every layer n becomes its memory m^{n-1} (Section 3.2)
        for layer, memory in zip(self.layers, state.hidden, strict=True):
            layer_inputs.append(hidden)
            stopped = (memory if state.differentiable else memory.detach()).to(hidden.dtype)  # SG(m)
            if stopped.is_inference() and torch.is_grad_enabled():
                stopped = stopped.clone()  # autograd cannot keep a tensor of inference mode
            hidden = layer(hidden, stopped, r, self._shared_biases(), scope)
        return hidden, state.after_hidden(layer_inputs)

    def _shared_biases(self) -> Biases | None:
        return (self.u, self.v) if self.shares_biases else None

    def training_terms(
        self, tokens: Tensor, targets: Tensor, state: Memory, objective: Objective = EVERY_TARGET
    ) -> tuple[Tensor, Tensor, Memory]:
        """Return `FamilyModel.training_terms` of one segment or of several segments (`Objective.lengths`).

        Several segments train by truncated back-propagation through time: each segment attends to the memory that
        earlier segments have left, and gradients flow through this memory back to the first of the segments. The terms
        of each segment are weighted by its share of the counted targets.
        """
        if objective.lengths is None:
            return super().training_terms(tokens, targets, state, objective)
        check_targets(tokens, targets)
        one = dataclasses.replace(objective, lengths=None)
        counted = [one.counted(length) for length in objective.lengths]
        before = tuple(states.detach() for states in state.hidden)
        state, losses, penalties = dataclasses.replace(state, hidden=before, differentiable=True), [], []
        segments = zip(*(ids.split(objective.lengths, dim=1) for ids in (tokens, targets)), counted, strict=True)
        for read, following, count in segments:
            hidden, state = self.hidden_states(read, state)
            loss, penalty = self._terms(hidden, following, one)
            losses.append(loss * (count / sum(counted)))
            penalties.append(penalty * (count / sum(counted)))
        return torch.stack(losses).sum(), torch.stack(penalties).sum(), state.detach()

    def _encoded(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        """Return R [S,E], or with learned vectors the distances [S] themselves."""
        if self.config.encoding == "shaw":
            return distances
        # The authors drop features of R as they drop those of the embedding.
        return self.dropout_r(sinusoid(distances, self.config.d_model, dtype))

    def read_window(self, tokens: Int64[Tensor, "B T"], window: MemoryWindow) -> Float[Tensor, "B T E"]:
        """Return h^N of a segment and move the window along: `hidden_states` in evaluation, at fixed addresses."""
        memory, held = window.at_fixed_addresses()
        hidden = self._embedded(tokens, memory)
        read = window.read(hidden)
        return self._from_projections(hidden, memory, held, window)[0] if read is None else read

    def _from_projections(
        self, hidden: Tensor, state: Memory, held: Projections, window: MemoryWindow | None = None
    ) -> tuple[Tensor, Memory]:
        """Compute h^N and the next memory from h^0 [B,T,E] and the projected keys and values of memory."""
        segment = window or ProjectedSegment(state.hidden, held, hidden.shape[1])
        biases, scope, n_key = self._shared_biases(), state.scope(), state.length + hidden.shape[1]
        for number, layer in enumerate(self.layers):
            position = held.positions[number]  # [H,L,D] for L >= S distances, the farthest first
            position = position.narrow(1, position.shape[1] - n_key, n_key).transpose(0, 1)
            hidden = cast(TransformerXLLayer, layer).read(hidden, segment, number, position, biases, scope)
        return hidden, state.after_projected(segment)

    def _read_token(self, hidden: Tensor, state: Memory, held: Projections) -> tuple[Tensor, Memory] | None:
        """Return h^N and the next memory from h^0 [B,1,E]; None where PyTorch must compute them."""
        if (
            hidden.shape[:2].numel() > MOST_ROWS
            or hidden.shape[1] != 1
            or not readable(hidden)
            or torch.is_autocast_enabled("cpu")
            or library() is None
        ):
            return None
        weights = held.frozen.weights = held.frozen.weights or self.compiled_weights()
        operands = (hidden, state.hidden[0], held.keys[0], held.positions[0])
        if weights is None or any(tensor.dtype != weights.dtype for tensor in operands):
            return None
        segment = ProjectedSegment(state.hidden, held, 1)
        segment.reserve()
        n_lane, inputs, keys, values = hidden.shape[0], *zip(*segment.buffers.layers, strict=True)
        filled = state.filled or (state.length,) * n_lane
        window = state.length + 1 if state.lengths.window is None else state.lengths.window
        at = torch.full((n_lane,), segment.end - 1, device="cpu")
        seen = torch.tensor([min(count + 1, window) for count in filled], dtype=torch.int64, device="cpu")
        # h^0 in the dtype of the library's sums; the step turns it into h^N in place.
        through = hidden.flatten(0, 1).to(sums_dtype(weights.dtype), copy=True)
        lanes, clamp_len = torch.arange(n_lane, device="cpu"), state.lengths.clamp_len
        places = places_of(keys[0], inputs[0], held.positions[0], clamp_len, lanes, at, seen)
        weights.step(through, caches_of(keys, values, inputs, held.positions), places)
        return through.to(hidden.dtype)[:, None], state.after_projected(segment)

    def compiled_weights(self) -> LayerWeights | None:
        """Return the layers for the compiled library; None if it cannot compute them, or an observer wraps `attend`."""
        if not self.backend.compiled_step or any(own.attend is not self.backend for own in self.attentions):
            return None
        return layer_weights(self.config, self.layers, self if self.shares_biases else None)

    def freeze(self) -> Frozen:
        """Return a record of the model as it is now; while it holds, projections of memory are not computed again."""
        return Frozen(self, _OWN)

    def why_not_fused(self, state: Memory, hidden: Tensor) -> str | None:
        """Return why the modules must compute a training step from h^0 on a GPU; None if `fused_hidden_states` can.

        Nothing is remembered: a record of the model, kept in it, would be a cycle.
        """
        config, device = self.config, hidden.device
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else hidden.dtype  # of the products
        if torch.compiler.is_compiling() or transforms_are_active():  # neither may see the checks below
            return "torch.compile or torch.func traces"
        if self.backend.name != "triton":
            return f"attention is {self.backend.name}"
        if (reason := why_not_triton(device, dtype, config.d_head)) is not None:
            return f"triton {reason}"  # the modules' attention raises this error
        if (obstacle := config.fusion_obstacle()) is not None:
            return obstacle
        reasons = {
            "gradients flow into memory": state.differentiable,
            "layers are compiled": any(layer._compiled_call_impl is not None for layer in self.layers),
            "an observer wraps attention": any(own.attend is not self.backend for own in self.attentions),
            "u and v are not in float32": self.shares_biases and not (is_float32(self.u) and is_float32(self.v)),
        }
        if (reason := next((reason for reason, holds in reasons.items() if holds), None)) is not None:
            return reason
        return outsider(self.layers, _OWN, backward=True) or unlike_configuration(config, self.layers, training=True)

    def position_projections(
        self, n_distance: int, clamp_len: int | None, like: Tensor
    ) -> tuple[Float[Tensor, "H L D"], ...]:
        """Return W_kR R (or the learned vectors) of every layer for L = `n_distance` distances, farthest first."""
        distances = distances_farthest_first(n_distance, clamp_len, like.device)
        r = self._encoded(distances, like.dtype)  # not in training, so without dropout
        return tuple(attention.position(r).transpose(0, 1).contiguous() for attention in self.attentions)

    def projections(self, state: Memory, like: Tensor, n_new: int) -> Projections | None:
        """Return the state's projections if the current weights computed them, else project memory again.

        `like` is on the device and of the dtype of h^0 of the `n_new` tokens that follow. None where all modules must
        be called: in training mode, or with a `Frozen.outsider`.
        """
        held, device = state.projections, like.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        frozen = None if held is None else held.frozen  # None in a copy of a state
        if frozen is None or frozen.model is not self or not (frozen.holds() and frozen.evaluates()):
            frozen = self.freeze()
            if frozen.outsider is not None or not frozen.evaluates():
                return None
        if held is None or held.frozen is not frozen or held.autocast != autocast:
            memories = (memory.to(like.dtype) for memory in state.hidden)  # the model's dtype may have changed
            both = [
                attention.keys_and_values(attention.norm(memory) if attention.pre_norm else memory)
                for attention, memory in zip(self.attentions, memories, strict=True)
            ]
            # Heads first: the rows of one head lie side by side, as the products of a decoding step read them.
            keys, values = (tuple(rows.permute(2, 0, 1, 3) for rows in kind) for kind in zip(*both, strict=True))
            held = Projections(frozen, autocast, keys, values, ())
        n_key, n_known = state.length + n_new, held.positions[0].shape[1] if held.positions else 0
        if n_known < n_key:
            # Double the number of distances: memory may never fill, so its capacity is not computed at once.
            n_distance = max(n_key, min(state.capacity + n_new, 2 * n_known))
            positions = self.position_projections(n_distance, state.lengths.clamp_len, like)
            held = dataclasses.replace(held, positions=positions)
        return held


# Classes whose `forward` is replaced by cached projections and compiled steps.
_OWN = frozenset(
    {TransformerXLLayer, RelativeMultiHeadAttention, PositionwiseFeedForward, AdaptiveEmbedding}
    | {Dropout, HeadNorm, Linear, LockedDropout, nn.Linear, nn.LayerNorm, nn.Dropout, nn.Module}
)
