"""Steps that read one token of every stream: in the compiled library, in PyTorch, or module by module.

A slot is a stream's place in the engine. `Slots` holds ring buffers: a slot's rings hold the keys and values of the
positions that the next query may see, including the query's own. A new position overwrites the oldest, so that nothing
is moved and memory stays constant.

Every step is a function of the next token of every slot, int64 [B], the slots that take part, [P], and the number of
slots up to the last one of them. It returns the log-probabilities of the token after it, [P,V].

Shapes: B slots, P slots that take part, R positions of a ring, H heads, D width of a head, E d_model, V vocabulary.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from txl.attention.triton_attention import aligned
from txl.devices import Captured, runs_ahead, sent
from txl.generation.sampling import Sampling, chances, permitted
from txl.models.compiled_step import LayerWeights, caches_of, places_of
from txl.models.memory import Memory
from txl.models.transformer_xl import TransformerXL, TransformerXLLayer
from txl.native.operations import MOST_ROWS, sums_dtype

_ALIKE = 32  # steps in a row with equal draw settings before a graph with drawing is recorded; recording is slow
_MOST_DRAWS = 16  # recorded graphs that include drawing; each keeps buffers for its results


class Slots:
    """Ring buffers of all layers, and the number of tokens that each stream has read."""

    def __init__(self, n_layer: int, n_slot: int, n_head: int, d_head: int, capacity: int, like: Tensor):
        # One more than memory has: the key of the token that is being read takes a place too.
        self.size = capacity + 1
        # On a GPU, stored as [B,H,R,D], so that the rings of the first slots are one contiguous block, in rows of a
        # width that suits loads of 16 bytes.
        self.lanes_first = runs_ahead(like)
        shape = (n_slot, n_head) if self.lanes_first else (n_head, n_slot)
        width = aligned(d_head) if self.lanes_first else d_head
        rings = [like.new_zeros(*shape, self.size, width)[..., :d_head] for _ in range(2 * n_layer)]
        if self.lanes_first:
            rings = [ring.transpose(0, 1) for ring in rings]
        self.keys, self.values = rings[:n_layer], rings[n_layer:]  # [H,B,R,D] a layer
        # Number of tokens that each stream has read, including the prompt: int64 [B].
        self.read = torch.zeros(n_slot, dtype=torch.int64, device=like.device)

    def place(self, slots: Int64[Tensor, " P"]) -> Int64[Tensor, " P"]:
        """Return the ring positions for the keys of the slots' next tokens."""
        return self.read[slots] % self.size

    def seen(self, slots: Int64[Tensor, " P"]) -> Int64[Tensor, " P"]:
        """Return the number of keys that the slots' next tokens see, including their own."""
        return (self.read[slots] + 1).clamp(max=self.size)

    def fill(self, slot: int, memory: Memory, read: int) -> None:
        """Put the memory of a stream that has read `read` tokens into a slot, overwriting the slot's content."""
        self.read[slot] = read
        projections = memory.projections
        if projections is None or memory.length == 0:
            return
        # As if the tokens had been read here one by one: token i of the stream lies at i modulo the ring's size.
        places = torch.arange(read - memory.length, read, device=projections.keys[0].device) % self.size
        for kind, source in ((self.keys, projections.keys), (self.values, projections.values)):
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
        """Set a slot to zeros: NaN would reach the slot's next stream even with attention weights of 0."""
        with torch.inference_mode():
            for ring in (*self.keys, *self.values):
                ring[:, slot].zero_()


@dataclass(frozen=True)
class DrawSettings:
    """Settings for drawing tokens, equal if `sampling` and `never` are equal."""

    sampling: Sampling
    never: tuple[int, ...]  # ids of the forbidden tokens
    forbidden: Tensor | None = field(compare=False)  # `never` as an int64 tensor on the device; None if it is empty


class StaticStep:
    """A step in PyTorch that computes all slots at once, so that shapes do not depend on the slots that take part.

    A slot that does not take part computes a token too. The key of this token goes to the ring position of the slot's
    next token, which overwrites the key, so that no stream sees it.

    With `captured`, a CUDA graph is recorded for the first 1, 2, 4, ... slots; a step replays the smallest graph that
    covers all slots that take part.
    """

    def __init__(self, model: TransformerXL, slots: Slots, clamp_len: int | None, captured: bool):
        self.model, self.slots, self.captured = model, slots, captured
        like = slots.keys[0]
        # With fixed weights W_kR R depends on the distance alone: it is projected once, not once a token.
        self.positions = model.position_projections(slots.size, clamp_len, like)
        self.lanes = torch.arange(like.shape[1], device=like.device)
        self.ring = torch.arange(slots.size, device=like.device)
        self._graphs: dict[int, Captured] = {}
        self._draws: OrderedDict[tuple[int, DrawSettings], Captured] = OrderedDict()
        self._alike: tuple[DrawSettings | None, int] = (None, 0)
        self._prepared: DrawSettings | None = None

    def __call__(self, tokens: Int64[Tensor, " B"], slots: Int64[Tensor, " P"], n_lane: int) -> Float[Tensor, "P V"]:
        """Read the next token of some slots, and return the log-probabilities of the token after it."""
        if not self.captured:
            return self._log_probs(tokens)[0][slots]
        n_lane = self._rounded(n_lane)
        if n_lane not in self._graphs:
            self._graphs[n_lane] = Captured(self._log_probs)
        return self._graphs[n_lane](tokens[:n_lane])[0][slots]

    def draws(self, drawings: Sequence[DrawSettings]) -> bool:
        """Count a step with these settings, and return True if `draw` should compute it: if it is recorded for them.

        That is so after many steps in a row with one kind of settings, or after `record`. One recorded graph then takes
        the step and draws: the program waits once a token.
        """
        drawing, *others = set(drawings)
        if others:
            return False
        known, count = self._alike
        self._alike = drawing, count + 1 if drawing == known else 1
        return self.captured and (self._alike[1] > _ALIKE or drawing == self._prepared)

    def draw(
        self,
        tokens: Int64[Tensor, " B"],
        slots: Sequence[int],
        drawings: Sequence[DrawSettings],
        keys: Int64[Tensor, "3 N"],
    ) -> Int64[Tensor, "2 n"]:
        """Read the next token of slots, draw the tokens after it, and write them to `tokens`, all in one graph.

        `tokens` is always the same tensor; `drawings` are the settings of `slots`. `keys` are seed, number of the
        token, and 1 if the slot takes part, else 0. Returns drawn tokens, and indices into `REASONS`, of the first
        n >= N slots.
        """
        n_lane = self._rounded(keys.shape[1])
        graph = self._with_drawing(tokens, n_lane, drawings[0])
        return graph(sent(F.pad(keys, (0, n_lane - keys.shape[1])), tokens.device))[0]

    def _with_drawing(self, tokens: Int64[Tensor, " B"], n_lane: int, drawing: DrawSettings) -> Captured:
        """Return the graph that takes a step and draws with these settings."""
        graph = self._draws.pop((n_lane, drawing), None)
        if graph is None:
            following = tokens[:n_lane]

            def drawn(keys: Tensor) -> tuple[Tensor]:
                seeds, numbers, takes_part = keys.unbind(0)
                allowed, obstacles = permitted(self._log_probs(following)[0], drawing.forbidden)
                picked = drawing.sampling.pick(allowed, chances(seeds, numbers))
                following.copy_(torch.where((takes_part == 1) & (obstacles == 0), picked, following))
                self.slots.read[:n_lane] += takes_part
                return (torch.stack([picked, obstacles]),)

            graph = Captured(drawn)
            graph.record(torch.zeros(3, n_lane, dtype=torch.int64, device=tokens.device))  # no slot takes part
            if len(self._draws) == _MOST_DRAWS:
                self._draws.popitem(last=False)
        self._draws[n_lane, drawing] = graph  # as the most recently used
        return graph

    def settle(self, tokens: Int64[Tensor, " B"]) -> None:
        """Bring the slots and `tokens` to the state that the last call left, before others read or change it."""

    def record(self, tokens: Int64[Tensor, " B"], drawing: DrawSettings) -> None:
        """Record the graphs of steps, which the first steps would record otherwise; streams do not change."""
        if not self.captured:
            return
        self._prepared = drawing
        sizes = sorted({self._rounded(1 << power) for power in range(len(self.lanes).bit_length() + 1)})
        for n_lane in sizes:
            if n_lane not in self._graphs:
                self._graphs[n_lane] = graph = Captured(self._log_probs)
                graph.record(tokens[:n_lane])
            self._with_drawing(tokens, n_lane, drawing)

    def _rounded(self, n_lane: int) -> int:
        # Powers of two: a few graphs serve every number of streams, and at most half of a step is wasted.
        return min(1 << (n_lane - 1).bit_length(), len(self.lanes))

    def _log_probs(self, tokens: Int64[Tensor, " n"]) -> tuple[Float[Tensor, "n V"]]:
        """Read the next tokens of the first n slots."""
        lanes = self.lanes[: len(tokens)]
        place, seen = self.slots.place(lanes), self.slots.seen(lanes)
        # Ring position p holds the key of the token (place - p) mod R back. At a distance of `seen` or more it is not
        # filled yet, or holds a key of the slot's earlier stream.
        distance = (place[:, None] - self.ring) % self.slots.size
        hidden_keys = (distance >= seen[:, None])[None]
        # Projected positions are stored with the farthest distance first.
        row = (self.slots.size - 1 - distance).expand(self.model.config.n_head, -1, -1)
        hidden = self.model.embedding.of_every_cluster(tokens[:, None])
        for number, module in enumerate(self.model.layers):
            layer = cast(TransformerXLLayer, module)
            attention = layer.attention
            context = attention.norm(hidden) if attention.pre_norm else hidden
            keys, values = (kind[number][:, : len(lanes)] for kind in (self.slots.keys, self.slots.values))
            # Written before the scores are computed, because a token attends to itself.
            for buffer, new in zip((keys, values), attention.keys_and_values(context), strict=True):
                buffer[:, lanes, place] = new[:, 0].transpose(0, 1)
            u, v = attention.biases((self.model.u, self.model.v) if self.model.shares_biases else None)
            # The factor 1/sqrt(D) goes to query and biases, D numbers a head, not to the R scores.
            query = attention.query(context)[:, 0].transpose(0, 1) / math.sqrt(attention.d_head)
            bias_u, bias_v = ((bias / math.sqrt(attention.d_head))[:, None] for bias in (u, v))
            # Terms (b) and (d) for every distance, then gathered in the order of the ring; (a) and (c) are below.
            by_distance = torch.bmm(query + bias_v, self.positions[number].transpose(1, 2)).gather(2, row)
            scores = self._products(keys, (query + bias_u)[..., None]).squeeze(-1) + by_distance
            weights = scores.masked_fill(hidden_keys, -math.inf).softmax(dim=-1)
            attended = self._products(weights[:, :, None], values).squeeze(2).transpose(0, 1)
            hidden = layer.feed_forward(attention.merge(hidden, attended[:, None]))
        return (self.model.log_probs_of(hidden)[:, 0],)

    def _products(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the products [H,n,...] of each head and slot, in the storage order of the rings: no ring is copied."""
        if not self.slots.lanes_first:
            return torch.matmul(left, right)
        return torch.matmul(left.transpose(0, 1), right.transpose(0, 1)).transpose(0, 1)


class CompiledStep:
    """A step in the compiled library; a stream's numbers do not depend on the other streams, to the last bit."""

    def __init__(self, model: TransformerXL, slots: Slots, clamp_len: int | None, weights: LayerWeights):
        self.model, self.slots, self.clamp_len, self.weights = model, slots, clamp_len, weights
        self.positions = model.position_projections(slots.size, clamp_len, slots.keys[0])
        self.caches = caches_of(slots.keys, slots.values, None, self.positions)

    def __call__(self, tokens: Int64[Tensor, " B"], slots: Int64[Tensor, " P"], n_lane: int) -> Float[Tensor, "P V"]:
        """Take a step."""
        parts = []
        # Up to MOST_ROWS rows, the library also computes the products of embedding and softmax, each row independently.
        for some in slots.split(MOST_ROWS):
            # A copy, because the library turns h^0 into h^N in place, in the dtype of its sums.
            hidden = self.model.embedding(tokens[some]).to(sums_dtype(self.weights.dtype), copy=True)
            place, seen = self.slots.place(some), self.slots.seen(some)
            places = places_of(self.slots.keys[0], None, self.positions[0], self.clamp_len, some, place, seen)
            self.weights.step(hidden, self.caches, places)
            parts.append(self.model.log_probs_of(hidden.to(self.weights.dtype)[:, None])[:, 0])
        return torch.cat(parts)


class ModuleStep:
    """A step that calls every module of the model, for one slot after the other, and the memory of each slot."""

    def __init__(self, model: TransformerXL, n_slot: int):
        self.model = model
        self.memories: list[Memory | None] = [None] * n_slot
        self.read = torch.zeros(n_slot, dtype=torch.int64, device=model.softmax.bias.device)  # as in `Slots`

    def __call__(self, tokens: Int64[Tensor, " B"], slots: Int64[Tensor, " P"], n_lane: int) -> Float[Tensor, "P V"]:
        """Take a step."""
        parts, after = [], {}
        # One slot after the other: their memories have different lengths.
        for slot in slots.tolist():
            memory = self.memories[slot]
            assert memory is not None  # `fill` has set it when the stream joined
            log_probs, after[slot] = self.model.log_probs(tokens[slot].view(1, 1), memory)
            parts.append(log_probs[:, 0])
        for slot, memory in after.items():  # none of them, if a module has raised an error
            self.memories[slot] = memory
        return torch.cat(parts)

    def fill(self, slot: int, memory: Memory, read: int) -> None:
        """Put the memory of a stream into a slot."""
        self.memories[slot], self.read[slot] = memory, read

    def copy(self, source: int, target: int) -> None:
        """Let a second slot share a stream's memory, which is never changed in place."""
        self.memories[target], self.read[target] = self.memories[source], self.read[source]

    def clear(self, slot: int) -> None:
        """Remove the memory of a slot."""
        self.memories[slot] = None
