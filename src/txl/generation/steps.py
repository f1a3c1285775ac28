"""One token of every stream through a model's layers: in the compiled library, in PyTorch, or module by module.

A slot is a stream's place. `Slots` are rings: a slot holds the keys and values of the positions that the next query may
see, the query's own among them, and a new position takes the place of the oldest. Nothing moves, nothing grows.

Shapes: B slots, P slots that take part, R positions of a ring, H heads, D width of a head, E d_model, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from txl.models.compiled_step import MOST_ROWS, LayerWeights, caches_of, layer_weights, places_of, sums_dtype
from txl.models.memory import Memory
from txl.models.structure import Structure
from txl.models.transformer_xl import TransformerXL, TransformerXLLayer
from txl.native.build import library


class Captured:
    """A function of CUDA tensors, recorded once as a graph and replayed: a step's hundreds of kernels cost one launch.

    Shapes must stay those of the first call. The function may write to tensors of its own.
    """

    def __init__(self, function: Callable[..., Tensor]):
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._output: Tensor | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the function's result; the next call overwrites it."""
        if self._graph is None:
            self._record(inputs)
        assert self._graph is not None
        assert self._output is not None
        for kept, new in zip(self._inputs, inputs, strict=True):
            kept.copy_(new)
        self._graph.replay()
        return self._output

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = [each.clone() for each in inputs]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries set themselves up in the first calls, which a graph must not hold
            for _ in range(3):
                self._function(*self._inputs)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = self._function(*self._inputs)


class Slots:
    """The rings of all layers, and the number of tokens that each stream has read."""

    def __init__(self, n_layer: int, n_slot: int, n_head: int, d_head: int, capacity: int, like: Tensor):
        self.size = capacity + 1
        self.keys, self.values = (
            [like.new_zeros(n_head, n_slot, self.size, d_head) for _ in range(n_layer)] for _ in range(2)
        )
        self.read = torch.zeros(n_slot, dtype=torch.int64)
        """Tokens that each stream has read, prompt included."""

    def place(self, slots: Int64[Tensor, " P"]) -> Int64[Tensor, " P"]:
        """Return the ring positions for the keys of the slots' next tokens."""
        return self.read[slots] % self.size

    def seen(self, slots: Int64[Tensor, " P"]) -> Int64[Tensor, " P"]:
        """Return the number of keys that the slots' next tokens see, their own among them."""
        return (self.read[slots] + 1).clamp(max=self.size)

    def fill(self, slot: int, memory: Memory, read: int) -> None:
        """Put the memory of a stream that has read `read` tokens into a slot, whatever is in it."""
        self.read[slot] = read
        held = memory.projections
        if held is None or memory.length == 0:
            return
        places = torch.arange(read - memory.length, read, device=held.keys[0].device) % self.size
        for kind, source in ((self.keys, held.keys), (self.values, held.values)):
            for ring, projected in zip(kind, source, strict=True):
                ring[:, slot].index_copy_(1, places, projected[:, 0].to(ring.dtype))

    def held(self, slot: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return copies of the keys and values that a slot's next token may see, oldest first: [H,M,D] a layer."""
        read = int(self.read[slot])
        places = torch.arange(max(0, read - (self.size - 1)), read, device=self.keys[0].device) % self.size
        keys, values = (
            tuple(ring[:, slot].index_select(1, places) for ring in kind) for kind in (self.keys, self.values)
        )
        return keys, values

    def copy(self, source: int, target: int) -> None:
        """Copy a stream into another slot."""
        self.read[target] = self.read[source]
        for ring in (*self.keys, *self.values):
            ring[:, target].copy_(ring[:, source])

    def clear(self, slot: int) -> None:
        """Set a slot to zeros: values that are not numbers would reach its next stream even with weights of 0."""
        with torch.inference_mode():
            for ring in (*self.keys, *self.values):
                ring[:, slot].zero_()


class MemorySlots:
    """The memory of each stream, for a model whose modules all have to be called."""

    def __init__(self, n_slot: int):
        self.states: list[Memory | None] = [None] * n_slot
        self.read = torch.zeros(n_slot, dtype=torch.int64)
        """Tokens that each stream has read, prompt included."""

    def fill(self, slot: int, memory: Memory, read: int) -> None:
        """Put the memory of a stream into a slot."""
        self.states[slot], self.read[slot] = memory, read

    def copy(self, source: int, target: int) -> None:
        """Give another slot the same state, which is a value."""
        self.states[target], self.read[target] = self.states[source], self.read[source]

    def clear(self, slot: int) -> None:
        """Forget the state of a slot."""
        self.states[slot] = None


class StaticStep:
    """A step of all slots at once in PyTorch, whichever take part: every shape is the same at every step.

    A slot that does not take part reads a token all the same. Its key is written where that of its next token will be,
    and is never seen.
    """

    def __init__(self, model: TransformerXL, slots: Slots, clamp_len: int | None, captured: bool):
        self.model, self.slots = model, slots
        like = slots.keys[0]
        self.positions = model.position_projections(slots.size, clamp_len, like)
        self.lanes = torch.arange(like.shape[1], device=like.device)
        self.ring = torch.arange(slots.size, device=like.device)
        self._through: Callable[[Tensor, Tensor, Tensor], Tensor] = self._layers
        if captured:
            self._through = Captured(self._layers)

    def __call__(self, tokens: Int64[Tensor, " B"], slots: Int64[Tensor, " P"]) -> Float[Tensor, "P V"]:
        """Read the next token of some slots, and return log-probabilities of the one after it.

        Args:
            tokens: next token of every slot.
            slots: those that take part.
        """
        place, seen = self.slots.place(self.lanes), self.slots.seen(self.lanes)
        hidden = self.model.embedding.of_every_cluster(tokens[:, None])
        return self.model.log_probs_of(self._through(hidden, place, seen))[slots, 0]

    def _layers(self, hidden: Tensor, place: Tensor, seen: Tensor) -> Tensor:
        """Return h^N from h^0 [B,1,E]; `place` and `seen` are those of `Slots` for all slots."""
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
    """A step in the compiled library: a stream's numbers are the same to the last bit whoever else takes part."""

    def __init__(self, model: TransformerXL, slots: Slots, clamp_len: int | None, weights: LayerWeights):
        self.model, self.slots, self.clamp_len, self.weights = model, slots, clamp_len, weights
        self.positions = model.position_projections(slots.size, clamp_len, slots.keys[0])
        self.caches = caches_of(slots.keys, slots.values, None, self.positions)

    def __call__(self, tokens: Int64[Tensor, " B"], slots: Int64[Tensor, " P"]) -> Float[Tensor, "P V"]:
        """Take a step; arguments as for `StaticStep`."""
        # The embedding's and the softmax's products are the library's up to so many rows, and then alike for all.
        return torch.cat([self._some(tokens[some], some) for some in slots.split(MOST_ROWS)])

    def _some(self, tokens: Tensor, slots: Tensor) -> Tensor:
        hidden = self.model.embedding(tokens).to(sums_dtype(self.weights.dtype), copy=True)
        place, seen = self.slots.place(slots), self.slots.seen(slots)
        places = places_of(self.slots.keys[0], None, self.positions[0], self.clamp_len, slots, place, seen)
        self.weights.step(hidden, self.caches, places)
        return self.model.log_probs_of(hidden.to(self.weights.dtype)[:, None])[:, 0]


class ModuleStep:
    """A step of the slots one after the other, through every module of the model."""

    def __init__(self, model: TransformerXL, slots: MemorySlots):
        self.model, self.slots = model, slots

    def __call__(self, tokens: Int64[Tensor, " B"], slots: Int64[Tensor, " P"]) -> Float[Tensor, "P V"]:
        """Take a step; arguments as for `StaticStep`."""
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
    """Make the compiled step if it is wanted and available (if not, the library has said why), else the static one."""
    device = slots.keys[0].device.type
    if compile and device == "cpu" and model.backend.compiled_step and library() is not None:
        weights = layer_weights(model, structure)
        if weights is not None:
            return CompiledStep(model, slots, clamp_len, weights)
    return StaticStep(model, slots, clamp_len, captured=compile and device == "cuda")
