"""One token of every stream through a model's layers.

In the compiled library, in PyTorch with static shapes, or where a model has hooks or other modules, by calling it.

Shapes: B slots, B' slots that take part, R positions of a ring, H heads, D width of a head, E d_model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from txl.attention.memory import Memory
from txl.decoding.slots import MemorySlots, Slots
from txl.models.structure import Structure
from txl.models.transformer_xl import TransformerXL, TransformerXLLayer
from txl.native.build import library
from txl.native.steps import MOST_ROWS, LayerWeights, caches_of, layer_weights, places_of, sums_dtype


class StaticStep:
    """All slots at once, whoever takes part: every shape is the same at every step.

    A slot that does not take part is given a token all the same. What that writes lies where its next token will, and
    is never seen.
    """

    def __init__(self, model: TransformerXL, slots: Slots, clamp_len: int | None, captured: bool):
        self.model, self.slots = model, slots
        like = slots.keys[0]
        self.positions = model.position_projections(slots.size, clamp_len, like)
        self.lanes = torch.arange(like.shape[1], device=like.device)
        self.ring = torch.arange(slots.size, device=like.device)
        self._through: Callable[[Tensor, Tensor, Tensor], Tensor] = self._layers
        if captured:
            from txl.decoding.capture import Captured

            self._through = Captured(self._layers)

    def __call__(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Log-probabilities of what follows: int64 [B] of all slots, and [B'] -> [B',V]."""
        place, seen = self.slots.place(self.lanes), self.slots.seen(self.lanes)
        hidden = self.model.embedding.of_every_cluster(tokens[:, None])
        return self.model.log_probs_of(self._through(hidden, place, seen))[slots, 0]

    def _layers(self, hidden: Tensor, place: Tensor, seen: Tensor) -> Tensor:
        """h^0 [B,1,E] -> h^N. `place` and `seen` int64 [B]: where the token's key goes, and how many keys it sees."""
        distance = (place[:, None] - self.ring) % self.slots.size
        hidden_keys = (distance >= seen[:, None])[None]
        row = (self.slots.size - 1 - distance).expand(self.model.config.n_head, -1, -1)
        for number, module in enumerate(self.model.layers):
            layer = cast(TransformerXLLayer, module)
            attention = layer.attention
            context = attention.norm(hidden) if attention.pre_norm else hidden
            ring = self.slots.keys[number], self.slots.values[number]
            for buffer, new in zip(ring, attention.keys_and_values(context), strict=True):
                buffer[:, self.lanes, place] = new[:, 0].transpose(0, 1)
            u, v = attention.biases((self.model.u, self.model.v) if self.model.shares_biases else None)
            query = attention.query(context)[:, 0].transpose(0, 1) / math.sqrt(attention.d_head)
            bias_u, bias_v = ((bias / math.sqrt(attention.d_head))[:, None] for bias in (u, v))
            by_distance = torch.bmm(query + bias_v, self.positions[number].transpose(1, 2)).gather(2, row)
            scores = torch.matmul(ring[0], (query + bias_u)[..., None]).squeeze(-1) + by_distance
            weights = scores.masked_fill(hidden_keys, -math.inf).softmax(dim=-1)
            attended = torch.matmul(weights[:, :, None], ring[1]).squeeze(2).transpose(0, 1)
            hidden = layer.feed_forward(attention.merge(hidden, attended[:, None]))
        return hidden


class CompiledStep:
    """The slots that take part, by the compiled library; each is given the same to the last bit in any company."""

    def __init__(self, model: TransformerXL, slots: Slots, clamp_len: int | None, weights: LayerWeights):
        self.model, self.slots, self.clamp_len, self.weights = model, slots, clamp_len, weights
        self.positions = model.position_projections(slots.size, clamp_len, slots.keys[0])
        self.caches = caches_of(slots.keys, slots.values, None, self.positions)

    def __call__(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """As `StaticStep.__call__`."""
        # The embedding's and the softmax's products are the library's up to so many rows, and then alike for all.
        return torch.cat([self._some(tokens[some], some) for some in slots.split(MOST_ROWS)])

    def _some(self, tokens: Tensor, slots: Tensor) -> Tensor:
        hidden = self.model.embedding(tokens).to(sums_dtype(self.weights.dtype), copy=True)
        place, seen = self.slots.place(slots), self.slots.seen(slots)
        places = places_of(self.slots.keys[0], None, self.positions[0], self.clamp_len, slots, place, seen)
        self.weights.step(hidden, self.caches, places)
        return self.model.log_probs_of(hidden.to(self.weights.dtype)[:, None])[:, 0]


class ModuleStep:
    """The slots that take part, one after the other, through every module of the model."""

    def __init__(self, model: TransformerXL, slots: MemorySlots):
        self.model, self.slots = model, slots

    def __call__(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """As `StaticStep.__call__`."""
        chosen = slots.tolist()
        read = [self.model.log_probs(tokens[slot].view(1, 1), self._state(slot)) for slot in chosen]
        for slot, (_, state) in zip(chosen, read, strict=True):
            self.slots.states[slot] = state
        return torch.cat([log_probs[:, 0] for log_probs, _ in read])

    def _state(self, slot: int) -> Memory:
        state = self.slots.states[slot]
        assert state is not None  # a stream has filled it
        return state


def make_step(
    model: TransformerXL, slots: Slots, clamp_len: int | None, compile: bool, structure: Structure
) -> StaticStep | CompiledStep:
    """The compiled step where it is wanted and can be had (if not, the library has said why), else the static one."""
    device = slots.keys[0].device.type
    if compile and device == "cpu" and model.attention_name in ("shifted", "compiled") and library() is not None:
        weights = layer_weights(model, structure)
        if weights is not None:
            return CompiledStep(model, slots, clamp_len, weights)
    return StaticStep(model, slots, clamp_len, captured=compile and device == "cuda")
