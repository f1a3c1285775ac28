"""The memory of a Transformer-XL (Section 3.2): the hidden states that entered each layer at earlier positions.

In evaluation and generation the weights are fixed. The keys and values of a position are then fixed as well, and W_kR R
depends only on the distance. `Projections` caches all three beside the hidden states. Code that changes weights or
needs gradients computes from the hidden states.

Shapes: B lanes, T tokens of a segment, M positions of memory, S = M + T keys, H heads, D width of a head, E d_model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from txl.attention.equations import KeyScope
from txl.config import Lengths
from txl.devices import sent
from txl.models.structure import Frozen

# Lock to reserve positions in buffers: threads may continue the same state. Global, because states are copied.
_TAKING = threading.Lock()
# A `MemoryWindow` of more elements moves in at most so many pieces.
_LARGE, _MOST_PIECES = 1 << 24, 64


class StreamBuffers:
    """Buffers for the positions of memory and of future segments, shared by the states of one stream.

    Positions are appended and never overwritten, so all earlier states stay valid. The state that ends at the last
    written position is continued in place; any other state is copied to new buffers, and so is one without enough room.
    """

    def __init__(self, size: int):
        self.size = size
        self.written = 0
        # Hidden states [B,size,E], keys [H,B,size,D] and values [H,B,size,D] of each layer.
        self.layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def take(self, end: int, n_new: int) -> bool:
        """Reserve `n_new` positions after `end`; return False if they are taken or beyond the buffers.

        Must precede all writes, so that no other state gets these positions if reading the segment fails.
        """
        with _TAKING:
            if self.written != end or self.size < end + n_new:
                return False
            # An inference tensor cannot be written outside of inference mode.
            if self.layers and self.layers[0][0].is_inference() and not torch.is_inference_mode_enabled():
                return False
            self.written = end + n_new
            return True


@dataclass(frozen=True)
class Projections:
    """Projected keys and values of the positions in a memory, and W_kR R; one tensor of each per layer."""

    frozen: Frozen  # record of the model at the time of projection; they are valid only while it holds
    autocast: torch.dtype | None  # at the time of projection
    keys: tuple[Float[Tensor, "H B M D"], ...]
    values: tuple[Float[Tensor, "H B M D"], ...]
    positions: tuple[Float[Tensor, "H L D"], ...]  # W_kR R, farthest distance first, for L >= M distances
    buffers: StreamBuffers | None = None  # hold the keys, values and hidden states, and may have room for more
    end: int = 0  # index in the buffers of the position after the newest one


class ProjectedSegment:
    """A segment read with fixed weights, layer by layer; its keys and values are appended to those of memory."""

    def __init__(self, hidden: tuple[Tensor, ...], held: Projections, n_new: int):
        self.hidden, self.held, self.n_new = hidden, held, n_new
        self.n_memory = hidden[0].shape[1]
        self.in_place = held.buffers is not None and held.buffers.take(held.end, n_new)
        if self.in_place:
            assert held.buffers is not None
            self.buffers, self.start = held.buffers, held.end - self.n_memory
        else:
            n_key = self.n_memory + n_new
            # Room for half as much again: a copy of M positions is then made every M/2 tokens.
            self.buffers, self.start = StreamBuffers(n_key + max(2 * n_new, n_key // 2, 32)), 0
            self.buffers.take(0, n_key)
        self.end = self.start + self.n_memory + n_new

    def append(
        self, layer: int, hidden: Float[Tensor, "B T E"], key: Float[Tensor, "B T H D"], value: Float[Tensor, "B T H D"]
    ) -> tuple[Float[Tensor, "B S H D"], Float[Tensor, "B S H D"]]:
        """Store a layer's input, keys and values, layer by layer; return keys and values of memory and segment."""
        added = (hidden, key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3))
        if not self.in_place:
            self._reserve(layer, *added)
        buffers = self.buffers.layers[layer]
        for buffer, new in zip(buffers, added, strict=True):
            buffer.narrow(-2, self.end - self.n_new, self.n_new).copy_(new)
        keys, values = (rows.narrow(2, self.start, self.end - self.start).permute(1, 2, 0, 3) for rows in buffers[1:])
        return keys, values

    def reserve(self) -> None:
        """Provide the buffers of every layer; a compiled step then writes the position before `end`."""
        if not self.in_place:
            for layer, kinds in enumerate(zip(self.hidden, self.held.keys, self.held.values, strict=True)):
                self._reserve(layer, *kinds)

    def _reserve(self, layer: int, *like: Tensor) -> None:
        """Provide the buffers of a layer, which begin with a copy of the memory."""
        memory = (self.hidden[layer], self.held.keys[layer], self.held.values[layer])
        hidden, keys, values = (rows.new_empty(*rows.shape[:-2], self.buffers.size, rows.shape[-1]) for rows in like)
        for buffer, old in zip((hidden, keys, values), memory, strict=True):
            buffer.narrow(-2, 0, self.n_memory).copy_(old)
        self.buffers.layers.append((hidden, keys, values))

    def finish(self, keep: int) -> tuple[tuple[Tensor, ...], Projections]:
        """Return hidden states and projections of the newest `keep` positions."""
        hidden, keys, values = (
            tuple(rows.narrow(-2, self.end - keep, keep) for rows in kind)
            for kind in zip(*self.buffers.layers, strict=True)
        )
        return hidden, replace(self.held, keys=keys, values=values, buffers=self.buffers, end=self.end)


class MemoryWindow:
    """Memory at fixed addresses, for recorded steps of T tokens: each step moves it along the text by T.

    It has room for `capacity` positions, of which the last M are in use, and for the segment behind them. All layers
    share one tensor of hidden states and one of keys and values, so that few kernels move them.

    Args:
        memory: memory with projections, for shapes and dtypes.
        n_new: number of tokens T.
    """

    length = 0  #: number of positions M in use

    def __init__(self, memory: Memory, n_new: int):
        held = memory.projections
        assert held is not None
        self.n_new, self.capacity, self._n_layer = n_new, memory.capacity, len(memory.hidden)
        self.size = self.capacity + n_new
        self._memory = memory
        self._known: tuple[Tensor, ...] = ()  # the positions of which `_positions` are a copy
        self._views: dict[int, tuple[tuple[Tensor, ...], ...]] = {}
        self._allocate(memory.hidden, held)

    def _allocate(self, hidden: tuple[Tensor, ...], held: Projections) -> None:
        """Provide `_rows`, and `_positions` [H,L,D] for the distances of all layers."""
        self._rows = [
            kind[0].new_zeros(len(kind), *kind[0].shape[:-2], self.size, kind[0].shape[-1])
            for kind in (hidden, held.keys + held.values)
        ]
        self._positions = tuple(rows.new_zeros(rows.shape[0], self.size, rows.shape[-1]) for rows in held.positions)

    def load(self, memory: Memory) -> None:
        """Take a memory, filled in all lanes, with projections of at least M + T distances; copy what is not here."""
        held = memory.projections
        assert held is not None
        self._memory, self.length = memory, memory.length
        here = self._newest(self.length)
        if memory.hidden is not here[0] or held.keys is not here[1]:
            for layers, new in zip(here, (memory.hidden, held.keys, held.values), strict=True):
                for own, rows in zip(layers, new, strict=True):
                    own.copy_(rows)
        if held.positions is not self._known:
            for own, rows in zip(self._positions, held.positions, strict=True):
                most = min(own.shape[1], rows.shape[1])
                own[:, own.shape[1] - most :].copy_(rows[:, rows.shape[1] - most :])
            self._known = held.positions

    def at_fixed_addresses(self) -> tuple[Memory, Projections]:
        """Return the memory that was loaded and its projections, for a recorded step."""
        hidden, keys, values = self._newest(self.length)
        assert self._memory.projections is not None
        held = replace(self._memory.projections, keys=keys, values=values, positions=self._positions, buffers=None)
        return replace(self._memory, hidden=hidden, projections=held), held

    def read(self, hidden: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"] | None:
        """Return h^N from h^0, and move the window; None: the model's modules read it."""
        return None

    def append(
        self, layer: int, hidden: Float[Tensor, "B T E"], key: Float[Tensor, "B T H D"], value: Float[Tensor, "B T H D"]
    ) -> tuple[Float[Tensor, "B S H D"], Float[Tensor, "B S H D"]]:
        """Store a layer's input, keys and values, as `ProjectedSegment.append`."""
        places = (self._rows[0][layer], self._rows[1][layer], self._rows[1][self._n_layer + layer])
        for rows, new in zip(places, (hidden, key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)), strict=True):
            rows.narrow(-2, self.capacity, self.n_new).copy_(new)
        first, n_key = self.capacity - self.length, self.length + self.n_new
        keys, values = (rows.narrow(-2, first, n_key).permute(1, 2, 0, 3) for rows in places[1:])
        return keys, values

    def finish(self, keep: int) -> tuple[tuple[Tensor, ...], Projections]:
        """Move the newest `keep` rows by T; return their hidden states and projections."""
        self._move(keep, -2)
        return self._kept(keep)

    def _move(self, keep: int, place: int) -> None:
        """Move the newest `keep` positions, which are dimension `place` of `_rows`, by T."""
        for kind in self._rows:
            old, new = (kind.narrow(place, first, keep) for first in (self.capacity - keep, self.size - keep))
            # They overlap, but not pieces of T positions, one after the other. A copy is less work for few bytes.
            if kind.numel() > _LARGE and keep <= _MOST_PIECES * self.n_new:
                for into, rows in zip(old.split(self.n_new, place), new.split(self.n_new, place), strict=True):
                    into.copy_(rows)
            else:
                old.copy_(new.clone())

    def after(self) -> Memory:
        """Return the memory that the step has left. The next step overwrites it."""
        keep = min(self.capacity, self.length + self.n_new)
        return self._memory.followed_by(self.n_new, *self._kept(keep))

    def _kept(self, keep: int) -> tuple[tuple[Tensor, ...], Projections]:
        hidden, keys, values = self._newest(keep)
        assert self._memory.projections is not None
        return hidden, replace(self._memory.projections, keys=keys, values=values, buffers=None)

    def _newest(self, length: int) -> tuple[tuple[Tensor, ...], ...]:
        """Return hidden states, keys and values of the newest positions, one tensor of each per layer."""
        if length not in self._views:
            hidden, both = (rows.narrow(-2, self.capacity - length, length).unbind() for rows in self._rows)
            self._views[length] = hidden, both[: self._n_layer], both[self._n_layer :]
        return self._views[length]


@dataclass(frozen=True)
class Memory:
    """Hidden states m^{n-1} of the last positions, for every layer n. An immutable value.

    Memory starts without positions and grows to `capacity`. After a reset, a lane never attends to earlier positions.
    """

    hidden: tuple[Float[Tensor, "B M E"], ...]  # one tensor per layer, oldest position first
    filled: tuple[int, ...] | None  # number of filled positions in each lane, the newest; None: all M in every lane
    lengths: Lengths  # as requested
    projections: Projections | None = None  # cached beside `hidden` if they were read without gradients
    differentiable: bool = False
    """True within a training step of several segments: gradients flow through `hidden` to earlier segments."""
    filled_tensor: Int64[Tensor, " B"] | None = None  # `filled` on the device, within a recorded step; see `KeyScope`

    @property
    def batch_size(self) -> int:
        """Number of lanes B."""
        return self.hidden[0].shape[0]

    @property
    def length(self) -> int:
        """Number of positions M currently held (in the fullest lane)."""
        return self.hidden[0].shape[1]

    @property
    def capacity(self) -> int:
        """Largest number of positions held; a window limits it, since queries never attend to older positions."""
        return self.lengths.capacity

    def scope(self) -> KeyScope:
        """Return the rule of which keys the queries of the next segment see."""
        return KeyScope(self.length, self.lengths.window, self.filled, self.filled_tensor)

    def after_hidden(self, layer_inputs: list[Float[Tensor, "B T E"]]) -> Memory:
        """Return the memory after a segment of training, from the states that entered each layer (Section 3.2)."""
        n_new = layer_inputs[0].shape[1]
        keep = min(self.capacity, self.length + n_new)
        # SG(m): no gradient flows into memory, except within a step of several segments.
        left = layer_inputs if self.differentiable else [rows.detach() for rows in layer_inputs]
        if keep > n_new:
            hidden = [torch.cat([old[:, n_new - keep :], new], 1) for old, new in zip(self.hidden, left, strict=True)]
        else:  # clones, because views would keep the whole segment alive
            hidden = [new if keep == n_new else new[:, n_new - keep :].clone() for new in left]
        return self.followed_by(n_new, tuple(hidden))

    def after_projected(self, segment: ProjectedSegment | MemoryWindow) -> Memory:
        """Return the memory after a segment that was read with fixed weights."""
        keep = min(self.capacity, self.length + segment.n_new)
        return self.followed_by(segment.n_new, *segment.finish(keep))

    def followed_by(self, n_new: int, hidden: tuple[Tensor, ...], projections: Projections | None = None) -> Memory:
        """Return the memory with the given `hidden`, after `n_new` more positions were read."""
        keep, filled = hidden[0].shape[1], self.filled
        if filled is not None:
            filled = tuple(min(keep, count + n_new) for count in filled)
        filled = _none_if_full(filled, keep)
        return replace(self, hidden=hidden, filled=filled, projections=projections, filled_tensor=None)

    def filled_with_noise(self) -> Memory:
        """Return a memory of `capacity` positions with random numbers; see `State.filled_with_noise`."""
        shape = (self.batch_size, self.capacity, self.hidden[0].shape[-1])
        hidden = tuple(torch.randn(shape).to(old) for old in self.hidden)
        return replace(self, hidden=hidden, filled=None, projections=None, filled_tensor=None)

    def detach(self) -> Memory:
        """Return the memory, detached from the graph that computed it; the memory itself unless `differentiable`."""
        if not self.differentiable:
            return self
        return replace(self, hidden=tuple(rows.detach() for rows in self.hidden), differentiable=False)

    def select(self, lanes: Int[Tensor, " lanes"]) -> Memory:
        """Return the memory of the lanes with indices `lanes`, in that order; indices may repeat."""
        filled = self.filled and tuple(self.filled[lane] for lane in lanes.tolist())
        chosen = lanes.to(self.hidden[0].device)
        return self._changed(lambda rows: rows.index_select(-3, chosen), filled)._trimmed()

    def reset(self, mask: Bool[Tensor, " B"]) -> Memory:
        """Return the memory, emptied in the lanes where `mask` is true."""
        filled = self.filled or (self.length,) * self.batch_size
        emptied = tuple(0 if clear else count for clear, count in zip(mask.tolist(), filled, strict=True))
        # Set masked positions to 0: their attention weight is 0, but 0 times a number that is not finite is NaN.
        clear = sent(mask.cpu(), self.hidden[0].device)[:, None, None]
        return self._changed(lambda rows: rows.masked_fill(clear, 0), emptied)._trimmed()

    def with_mem_len(self, mem_len: int) -> Memory:
        """Return the memory with the length `mem_len`; the oldest positions beyond this length are dropped."""
        changed = replace(self, lengths=replace(self.lengths, mem_len=mem_len))
        keep = min(changed.capacity, self.length)
        filled = self.filled and tuple(min(count, keep) for count in self.filled)
        return changed._newest(keep, filled)._trimmed()

    def _trimmed(self) -> Memory:
        """Return the memory without the oldest positions that are filled in no lane."""
        return self if self.filled is None else self._newest(max(self.filled, default=0), self.filled)

    def _newest(self, keep: int, filled: tuple[int, ...] | None) -> Memory:
        filled, held = _none_if_full(filled, keep), self.projections
        kept = self._changed(lambda rows: rows.narrow(-2, rows.shape[-2] - keep, keep), filled)
        # The positions that are kept still end where those of the buffers do.
        return replace(kept, projections=kept.projections and replace(kept.projections, buffers=held and held.buffers))

    def _changed(self, change: Callable[[Tensor], Tensor], filled: tuple[int, ...] | None) -> Memory:
        """Return the memory with all tensors changed: hidden states [B,M,E], keys and values [H,B,M,D]."""
        held = self.projections
        if held is not None:
            keys, values = (tuple(map(change, kind)) for kind in (held.keys, held.values))
            held = replace(held, keys=keys, values=values, buffers=None)
        return replace(self, hidden=tuple(map(change, self.hidden)), filled=filled, projections=held)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the memory as named tensors, without projections; `from_tensors` is the inverse."""
        filled = self.filled or (self.length,) * self.batch_size
        limits = [-1 if limit is None else limit for limit in astuple(self.lengths)]
        tensors = {f"hidden.{layer}": states for layer, states in enumerate(self.hidden)}
        return tensors | {"filled": torch.tensor(filled), "limits": torch.tensor(limits)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Memory:
        """Return the memory from the tensors of `to_tensors`, without positions that are filled in no lane.

        Raises:
            ValueError: if the shapes and values of the tensors do not match.
        """
        hidden = tuple(tensors[f"hidden.{layer}"] for layer in range(len(tensors) - 2))
        mem_len, window, clamp_len = tensors["limits"].tolist()
        n_lane, n_position, _ = hidden[0].shape
        filled = tensors["filled"].tolist()
        if any(rows.shape != hidden[0].shape for rows in hidden) or len(filled) != n_lane:
            shapes = [list(rows.shape) for rows in hidden]
            raise ValueError(f"hidden states have shapes {shapes} and filled {len(filled)} lanes; expected one shape")
        if not all(0 <= count <= n_position for count in filled) or n_position > mem_len:
            raise ValueError(f"filled is {filled}, with {n_position} positions and mem_len {mem_len}")
        lengths = Lengths(mem_len, None if window < 0 else window, None if clamp_len < 0 else clamp_len)
        return cls(hidden, _none_if_full(tuple(filled), n_position), lengths)._trimmed()


def _none_if_full(filled: tuple[int, ...] | None, length: int) -> tuple[int, ...] | None:
    """Return `filled`, or None if every lane holds all positions, which is the faster case."""
    return None if filled is None or all(count == length for count in filled) else filled
