"""Transformer-XL (Dai et al. 2019, Section 3): segment-level recurrence and relative positional encoding.

With `encoding` "shaw" it has the encoding that Tables 6 and 7 compare with, that of Shaw et al. (2018) as Section 3.3
describes it: terms (a) and (b) alone, and in the place of W_{k,R} R_d a learned vector for each distance, layer and
head. As Shaw et al. clip distances (their equation 5), all above `max_distance` share its vector, so that memory may
be longer in evaluation than it was in training.

Shapes: B lanes, T tokens of a segment, M positions of memory, S = M + T keys, H heads, D width of a head,
E d_model, F d_inner, V vocabulary, N tokens of all lanes.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl.attention import RelativeAttention, attention_backend, unmeasured_note
from txl.attention.equations import KeyScope, distances_farthest_first, sinusoid
from txl.attention.factorised import PhaseTables, SegmentPhases
from txl.config import ModelConfig, TrainConfig, TransformerXLConfig, validate_lengths
from txl.errors import UserError
from txl.models.adaptive import AdaptiveEmbedding
from txl.models.compiled_step import read_token
from txl.models.costs import LayerCosts, transformer_costs
from txl.models.decoder import Decoder, PositionwiseFeedForward
from txl.models.language_model import Limit
from txl.models.layers import Linear, LockedDropout, make_dropout
from txl.models.memory import FrozenSegment, Memory, Projections
from txl.models.structure import Structure


class RelativeMultiHeadAttention(nn.Module):
    """The attention sub-layer: projections, A^rel, Masked-Softmax, output projection, residual, LayerNorm."""

    def __init__(self, config: TransformerXLConfig, attend: RelativeAttention):
        super().__init__()
        d_attention = config.n_head * config.d_head
        self.n_head, self.d_head = config.n_head, config.d_head
        self.pre_norm, self.dropatt = config.pre_norm, config.dropatt
        self.attend = attend
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
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = make_dropout(config.dropout, config.locked_dropout)
        self.dropout_qkv = make_dropout(config.dropout_qkv, config.locked_dropout)

    def forward(
        self,
        hidden: Tensor,
        memory: Tensor,
        r: Tensor | SegmentPhases,
        shared_biases: tuple[Tensor, Tensor] | None,
        scope: KeyScope,
    ) -> Tensor:
        """One segment.

        Args:
            hidden: [B,T,E], h^{n-1}.
            memory: [B,M,E], m^{n-1}; no gradient flows into it, but W_k and W_v learn from it.
            r: [S,E], the rows R_d, farthest distance first; with learned distances these themselves, int64 [S]; or what
                takes their place in the factorised form.
            shared_biases: u and v, [H,D] each, if all layers share them.
            scope: which keys a query sees.

        Returns:
            [B,T,E]: LayerNorm(Linear(a) + h^{n-1}), or h^{n-1} + Linear(a) with pre-norm.
        """
        context = torch.cat([memory.detach(), hidden], dim=1)  # [SG(m) o h], [B,S,E]
        if self.pre_norm:
            context = self.norm(context)
        query, (key, value) = self.query(context[:, memory.shape[1] :]), self.keys_and_values(context)
        if isinstance(r, SegmentPhases):
            u, v = self.biases(shared_biases)
            return self.merge(hidden, r.attend(query, key, value, self.r_proj.weight, u, v))
        return self._attended(hidden, query, key, value, self.position(r), shared_biases, scope)

    def read(
        self,
        hidden: Tensor,
        segment: FrozenSegment,
        layer: int,
        position: Tensor,
        shared_biases: tuple[Tensor, Tensor] | None,
        scope: KeyScope,
    ) -> Tensor:
        """The same without gradients, with memory's keys and values and `position` [S,H,D] projected beforehand."""
        context = self.norm(hidden) if self.pre_norm else hidden
        key, value = segment.append(layer, hidden, *self.keys_and_values(context))
        return self._attended(hidden, self.query(context), key, value, position, shared_biases, scope)

    def query(self, context: Tensor) -> Tensor:
        """[B,T,E] -> [B,T,H,D]; what comes in is normalised already, with pre-norm."""
        return self._heads(self.dropout_qkv(self.q_proj(context)))

    def keys_and_values(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """[B,S,E] -> [B,S,H,D] twice."""
        key, value = self.k_proj(context), self.v_proj(context)
        return self._heads(self.dropout_qkv(key)), self._heads(self.dropout_qkv(value))

    def position(self, r: Tensor) -> Tensor:
        """W_{k,R} R: [S,E] -> [S,H,D]; or the learned vectors of distances [S]."""
        if self.learns_distances:
            rows = F.embedding(r.clamp(max=len(self.distances) - 1), self.distances.flatten(1))
            if torch.is_autocast_enabled(rows.device.type):  # which leaves look-ups as they are
                rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        else:
            rows = self.r_proj(r)
        return self._heads(self.dropout_qkv(rows))

    @property
    def position_weight(self) -> Tensor:
        """What `position` computes with."""
        return self.distances if self.learns_distances else self.r_proj.weight

    def biases(self, shared: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """u and v, [H,D] each; zeros without terms (c) and (d)."""
        if self.learns_distances:
            zeros = self.distances.new_zeros(self.n_head, self.d_head)
            return zeros, zeros
        return (self.u, self.v) if shared is None else shared

    def _attended(
        self,
        hidden: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position: Tensor,
        shared_biases: tuple[Tensor, Tensor] | None,
        scope: KeyScope,
    ) -> Tensor:
        u, v = self.biases(shared_biases)
        attended = self.attend(query, key, value, position, u, v, scope, self.dropatt if self.training else 0.0)
        return self.merge(hidden, attended)

    def merge(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """What comes after attention: [B,T,E], [B,T,H,D] -> [B,T,E]."""
        output = self.dropout(self.o_proj(attended.flatten(-2)))
        return hidden + output if self.pre_norm else self.norm(hidden + output)

    def _heads(self, projected: Tensor) -> Tensor:
        """[..., H*D] -> [...,H,D]."""
        return projected.unflatten(-1, (self.n_head, self.d_head))


class TransformerXLLayer(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, config: TransformerXLConfig, attend: RelativeAttention):
        super().__init__()
        self.attention = RelativeMultiHeadAttention(config, attend)
        self.feed_forward = PositionwiseFeedForward(config)

    def forward(
        self,
        hidden: Tensor,
        memory: Tensor,
        r: Tensor | SegmentPhases,
        shared_biases: tuple[Tensor, Tensor] | None,
        scope: KeyScope,
    ) -> Tensor:
        """h^{n-1} [B,T,E] -> h^n [B,T,E]; arguments as in `RelativeMultiHeadAttention`."""
        return self.feed_forward(self.attention(hidden, memory, r, shared_biases, scope))

    def read(
        self,
        hidden: Tensor,
        segment: FrozenSegment,
        layer: int,
        position: Tensor,
        shared_biases: tuple[Tensor, Tensor] | None,
        scope: KeyScope,
    ) -> Tensor:
        """The same without gradients; arguments as in `RelativeMultiHeadAttention.read`."""
        return self.feed_forward(self.attention.read(hidden, segment, layer, position, shared_biases, scope))


class TransformerXL(Decoder[Memory]):
    """The language model. Its state is a `Memory`.

    Args:
        config: its shape.
        vocab_size: tokens of the vocabulary.
        device: where it will train, which the choice of attention depends on; None: not known yet.

    Raises:
        UserError: for a configuration that cannot be built.
    """

    config_class = TransformerXLConfig
    config: TransformerXLConfig  # pyright: ignore[reportIncompatibleVariableOverride] (nobody assigns it)

    def __init__(self, config: TransformerXLConfig, vocab_size: int, device: str | None = None):
        super().__init__(config, vocab_size)
        self.backend = attention_backend(config, device)
        self.attention_name, make_kernel = self.backend.name, self.backend.kernel
        self.attention_note = unmeasured_note(config, device)
        self.phase_tables = None if make_kernel is None else PhaseTables(make_kernel(), config.d_model)
        self.layers = nn.ModuleList(TransformerXLLayer(config, self.backend.attend) for _ in range(config.n_layer))
        self.shares_biases = config.encoding == "relative" and not config.untie_r
        if self.shares_biases:
            self.u = nn.Parameter(torch.empty(config.n_head, config.d_head))
            self.v = nn.Parameter(torch.empty(config.n_head, config.d_head))
        self.dropout_r = self._dropout(config.dropout_r)
        self._finish()

    def layer_costs(self, train: TrainConfig) -> LayerCosts:
        """See `Decoder.layer_costs`; a window leaves less memory in use."""
        config = self.config
        n_memory = config.mem_len if config.window is None else min(config.mem_len, config.window - 1)
        return transformer_costs(config, train, n_memory=n_memory, queries=3, keeps_scores=True)

    @staticmethod
    def check_device(config: ModelConfig, device: str) -> None:
        """See `Decoder.check_device`: the attention that it asks for may not train there."""
        assert isinstance(config, TransformerXLConfig)
        attention_backend(config, device)

    def init_state(
        self, batch_size: int, mem_len: int | None = None, window: Limit = None, clamp_len: Limit = None
    ) -> Memory:
        """Empty memory; see `LanguageModel.init_state`."""
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; expected 1 lane or more")
        mem_len = self.config.mem_len if mem_len is None else mem_len
        resolved_window = _resolve(window, self.config.window)
        resolved_clamp = _resolve(clamp_len, self.config.clamp_len)
        validate_lengths(mem_len, resolved_window, resolved_clamp)
        return Memory.empty(
            self.config.n_layer,
            batch_size,
            self.config.d_model,
            mem_len,
            resolved_window,
            resolved_clamp,
            like=self.softmax.bias,
        )

    def state_from_tensors(self, tensors: dict[str, Tensor]) -> Memory:
        """The state that `Memory.to_tensors` described."""
        return Memory.from_tensors(tensors)

    def hidden_states(self, tokens: Tensor, state: Memory) -> tuple[Tensor, Memory]:
        """h^N, and the memory for the next segment; see `Decoder.hidden_states`."""
        if (
            not isinstance(state, Memory)
            or len(state.hidden) != self.config.n_layer
            or state.hidden[0].shape[-1] != self.config.d_model
        ):
            raise UserError("the state belongs to another model; expected one that this model's init_state made")
        hidden = self._embedded(tokens, state)
        if not self.training and not torch.is_grad_enabled():
            held = self._projections(hidden, state)
            if held is not None:
                return self._read_frozen(hidden, state, held)
        r = self._relative_positions(hidden, state)
        shared_biases = (self.u, self.v) if self.shares_biases else None
        scope = state.scope()
        layer_inputs = []
        for layer, memory in zip(self.layers, state.hidden, strict=True):
            layer_inputs.append(hidden)
            hidden = layer(hidden, memory, r, shared_biases, scope)
        return hidden, state.extended(layer_inputs)

    def _encoded(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        """What the layers make position vectors from: R [S,E], or the distances [S] themselves."""
        if self.config.encoding == "shaw":
            return distances
        return self.dropout_r(sinusoid(distances, self.config.d_model, dtype))

    def _relative_positions(self, hidden: Tensor, state: Memory) -> Tensor | SegmentPhases:
        """What `_encoded` makes of the distances, farthest first, or what takes its place in the factorised form."""
        n_lane, n_new, _ = hidden.shape
        if self.phase_tables is None:
            distances = distances_farthest_first(state.length + n_new, state.clamp_len, hidden.device)
            return self._encoded(distances, hidden.dtype)
        device, dtype = hidden.device, hidden.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        here = dataclasses.replace(self.config, clamp_len=state.clamp_len)  # a state may have a clamp of its own
        if (reason := self.backend.refusal(here, str(device), dtype)) is not None:
            raise UserError(reason)
        return self.phase_tables.phases(state.scope(), n_new, n_lane, state.capacity, dtype, device)

    def _read_frozen(self, hidden: Tensor, state: Memory, held: Projections) -> tuple[Tensor, Memory]:
        """What `hidden_states` gives, every key, value and position projected once in the life of the state."""
        n_new = hidden.shape[1]
        if n_new == 1 and self.attention_name in ("shifted", "compiled"):
            read = read_token(self, hidden, state, held)
            if read is not None:
                return read
        segment = FrozenSegment(state.hidden, held, n_new)
        shared_biases = (self.u, self.v) if self.shares_biases else None
        scope, n_key = state.scope(), state.length + n_new
        for number, layer in enumerate(self.layers):
            position = held.positions[number]
            position = position.narrow(1, position.shape[1] - n_key, n_key).transpose(0, 1)
            hidden = cast(TransformerXLLayer, layer).read(hidden, segment, number, position, shared_biases, scope)
        return hidden, state.extended_by(segment)

    def position_projections(self, n_distance: int, clamp_len: int | None, like: Tensor) -> tuple[Tensor, ...]:
        """W_kR R of every layer, or its learned vectors, farthest distance first: [H,n_distance,D], dtype as `like`."""
        distances = distances_farthest_first(n_distance, clamp_len, like.device)
        r = self._encoded(distances, like.dtype)  # not in training, so without dropout
        attentions = (cast(TransformerXLLayer, layer).attention for layer in self.layers)
        return tuple(attention.position(r).transpose(0, 1).contiguous() for attention in attentions)

    def _projections(self, hidden: Tensor, state: Memory) -> Projections | None:
        """Keys, values and positions for a segment: those of the state if this model made them as it is now, else new.

        None where others have a part in the model (`frozen_structure`): then memory goes through the modules.
        """
        held, device, n_new = state.projections, hidden.device.type, hidden.shape[1]
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        structure = None if held is None else held.structure
        if structure is None or structure.model is not self or not (structure.holds() and structure.evaluates()):
            structure = frozen_structure(self)
            if structure.outsider is not None or not structure.evaluates():
                return None
        if held is None or held.structure is not structure or held.autocast != autocast:
            attentions = (cast(TransformerXLLayer, layer).attention for layer in self.layers)
            both = [
                attention.keys_and_values(attention.norm(memory) if attention.pre_norm else memory)
                for attention, memory in zip(attentions, state.hidden, strict=True)
            ]
            keys, values = (tuple(each.permute(2, 0, 1, 3) for each in kind) for kind in zip(*both, strict=True))
            held = Projections(structure, autocast, keys, values, ())
        n_key, n_known = state.length + n_new, held.positions[0].shape[1] if held.positions else 0
        if n_known < n_key:
            # Not at once for all of a memory that may never fill: twice as many as before.
            n_distance = max(n_key, min(state.capacity + n_new, 2 * n_known))
            held = dataclasses.replace(held, positions=self.position_projections(n_distance, state.clamp_len, hidden))
        return held


_OWN = frozenset(
    {TransformerXLLayer, RelativeMultiHeadAttention, PositionwiseFeedForward, AdaptiveEmbedding}
    | {Linear, LockedDropout, nn.Linear, nn.LayerNorm, nn.Dropout, nn.Module}
)
"""Classes whose `forward` the reading of frozen memory and compiled steps stand in for."""


def frozen_structure(model: TransformerXL) -> Structure:
    """What the model is made of now.

    The one rule of all paths that do not call every module: they are taken only where it has no `outsider`, a module of
    another class or one with forward hooks, for as long as it holds. Elsewhere the model computes as with gradients.
    """
    return Structure(model, _OWN)


def _resolve(limit: Limit, configured: int | None) -> int | None:
    """None is the configuration's value, "none" is no limit."""
    if limit is None:
        return configured
    if isinstance(limit, str):
        if limit != "none":
            raise UserError(f"a window or clamp_len is {limit!r}; expected a number or 'none'")
        return None
    return limit
