"""What Transformer-XL carries from segment to segment: the hidden states that enter each layer (Section 3.2).

Shapes: B lanes, T tokens of a segment, M positions held, E d_model.

Keys and values of memory, projected once and kept while the weights do not change.

Weights do not change in evaluation and generation, so the keys and values of a position of memory never change either,
and W_kR R depends on the distance alone. They are a cache beside the hidden states, which stay what memory is: whoever
changes the weights, or takes gradients, gets the numbers that the hidden states give.

Shapes: B lanes, T tokens of a segment, M positions of memory, S = M + T keys, H heads, D width of a head, E d_model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from txl.attention.equations import KeyScope


class StreamBuffers:
    """Room for the positions of memory and of segments to come, shared by the states of one stream.

    Positions are appended and never written again, so every state made from them stays valid. The state that ends
    where writing has ended is continued in place; any other one, and one that finds no more room, moves to buffers of
    its own. As there is room for half of the memory, this costs about two positions a token.
    """

    def __init__(self, size: int):
        self.size = size
        self.written = 0
        self.layers: list[tuple[Tensor, Tensor, Tensor]] = []
        """Hidden states [B,size,E], keys and values [H,B,size,D] of each layer."""
        self.compiled: Any = None
        """What compiled steps know of the model that reads here, and need not look up again."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"compiled": None}  # addresses mean nothing elsewhere


@dataclass(frozen=True)
class Projections:
    """Keys and values of the positions that a memory holds, with the position projections."""

    structure: Any
    """The `txl.models.structure.Structure` of the model that projected them; others must not use them."""
    autocast: torch.dtype | None
    """The dtype that autocast had them projected in; None: that of the weights."""
    keys: tuple[Tensor, ...]
    """One [H,B,M,D] a layer."""
    values: tuple[Tensor, ...]
    positions: tuple[Tensor, ...]
    """W_kR R, one [H,L,D] a layer, farthest distance first, for L >= M distances."""
    buffers: StreamBuffers | None = None
    """Where keys, values and hidden states lie, if there may be room behind them."""
    end: int = 0
    """The position of the buffers behind the newest one."""

    def select(self, lanes: Tensor) -> Projections:
        """Those of some lanes."""
        chosen = lanes.to(self.keys[0].device)
        keys, values = (tuple(each.index_select(1, chosen) for each in kind) for kind in (self.keys, self.values))
        return replace(self, keys=keys, values=values, buffers=None)

    def newest(self, keep: int) -> Projections:
        """Those of the newest `keep` positions."""
        keys, values = (tuple(each[:, :, each.shape[2] - keep :] for each in kind) for kind in (self.keys, self.values))
        return replace(self, keys=keys, values=values)


class FrozenSegment:
    """Reads one segment, layer by layer, behind a memory whose keys and values are projected."""

    def __init__(self, hidden: tuple[Tensor, ...], held: Projections, n_new: int):
        self.hidden, self.held, self.n_new = hidden, held, n_new
        self.n_memory = hidden[0].shape[1]
        old = held.buffers
        self.in_place = (
            old is not None
            and old.written == held.end
            and old.size >= held.end + n_new
            # What was made in inference mode cannot be written outside of it.
            and (torch.is_inference_mode_enabled() or not old.layers[0][0].is_inference())
        )
        if self.in_place:
            assert old is not None
            self.buffers, self.start = old, held.end - self.n_memory
        else:
            n_key = self.n_memory + n_new
            self.buffers, self.start = StreamBuffers(n_key + max(2 * n_new, n_key // 2, 32)), 0
        self.end = self.start + self.n_memory + n_new
        self.buffers.written = self.end  # first of all, so that nobody takes the place if this segment is broken off

    def append(self, layer: int, hidden: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep what a layer was entered by, [B,T,E], and its keys and values, [B,T,H,D].

        Layers come in order. Returns the keys and values of memory and segment, [B,S,H,D] each, without a copy.
        """
        added = (hidden, key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3))
        if not self.in_place:
            self._reserve(layer, added)
        buffers = self.buffers.layers[layer]
        for buffer, new in zip(buffers, added, strict=True):
            buffer.narrow(-2, self.end - self.n_new, self.n_new).copy_(new)
        keys, values = (each.narrow(2, self.start, self.end - self.start).permute(1, 2, 0, 3) for each in buffers[1:])
        return keys, values

    def reserve(self) -> None:
        """Have room in every layer for what someone else writes there, at the last position before `end`."""
        if not self.in_place:
            for layer, kinds in enumerate(zip(self.hidden, self.held.keys, self.held.values, strict=True)):
                self._reserve(layer, kinds)

    def _reserve(self, layer: int, like: tuple[Tensor, Tensor, Tensor]) -> None:
        old = (self.hidden[layer], self.held.keys[layer], self.held.values[layer])
        self.buffers.layers.append(tuple(map(self._moved, old, like)))  # pyright: ignore[reportArgumentType]

    def _moved(self, old: Tensor, new: Tensor) -> Tensor:
        """A buffer of the right size that begins with the memory."""
        buffer = new.new_empty(*new.shape[:-2], self.buffers.size, new.shape[-1])
        buffer.narrow(-2, 0, self.n_memory).copy_(old)
        return buffer

    def finish(self, keep: int) -> tuple[tuple[Tensor, ...], Projections]:
        """Hidden states and projections of the newest `keep` positions."""
        kinds = [
            tuple(each.narrow(-2, self.end - keep, keep) for each in kind)
            for kind in zip(*self.buffers.layers, strict=True)
        ]
        held = replace(self.held, keys=kinds[1], values=kinds[2], buffers=self.buffers, end=self.end)
        return kinds[0], held


@dataclass(frozen=True)
class Memory:
    """Hidden states m^{n-1} of the last positions, for every layer n. A value: nothing changes it in place.

    It starts with no positions and grows to `capacity`; what has been reset in a lane is never attended to again.
    """

    hidden: tuple[Tensor, ...]
    """One [B,M,E] a layer, detached, oldest position first."""
    filled: tuple[int, ...] | None
    """Positions of each lane that hold something, counted from the newest; None: all M in every lane."""
    mem_len: int
    """Positions that the user asked to carry."""
    window: int | None
    """Keys a query sees, itself included; None: no limit."""
    clamp_len: int | None
    """Distances above this one count as it; None: no clamp."""
    projections: Projections | None = None
    """Keys and values of the positions held, if they were read without gradients; a cache of what `hidden` says."""

    @classmethod
    def empty(
        cls,
        n_layer: int,
        batch_size: int,
        d_model: int,
        mem_len: int,
        window: int | None,
        clamp_len: int | None,
        like: Tensor,
    ) -> Memory:
        """No positions yet, with the dtype and device of `like`."""
        # Not like.new_empty: a sharded parameter would make it a sharded tensor.
        nothing = torch.empty(batch_size, 0, d_model, dtype=like.dtype, device=like.device)
        return cls((nothing,) * n_layer, None, mem_len, window, clamp_len)

    @property
    def batch_size(self) -> int:
        """Number of lanes B."""
        return self.hidden[0].shape[0]

    @property
    def length(self) -> int:
        """Positions M held now (in the fullest lane)."""
        return self.hidden[0].shape[1]

    @property
    def capacity(self) -> int:
        """Most positions worth holding: beyond the window nothing is ever seen."""
        return self.mem_len if self.window is None else min(self.mem_len, self.window - 1)

    def scope(self) -> KeyScope:
        """Which keys the queries of the next segment see."""
        return KeyScope(self.length, self.window, self.filled)

    def extended(self, layer_inputs: list[Tensor]) -> Memory:
        """The memory after a segment whose layers were entered by `layer_inputs`, one [B,T,E] each."""
        n_new = layer_inputs[0].shape[1]
        keep = min(self.capacity, self.length + n_new)
        hidden = tuple(_newest(old, new.detach(), keep) for old, new in zip(self.hidden, layer_inputs, strict=True))
        return self._followed_by(n_new, hidden, None)

    def _followed_by(self, n_new: int, hidden: tuple[Tensor, ...], projections: Projections | None) -> Memory:
        """The memory of what is held after `n_new` more positions."""
        keep, filled = hidden[0].shape[1], self.filled
        if filled is not None:
            filled = tuple(min(keep, count + n_new) for count in filled)
        return replace(self, hidden=hidden, filled=_none_if_full(filled, keep), projections=projections)

    def extended_by(self, segment: FrozenSegment) -> Memory:
        """The memory after a segment that was read without gradients."""
        keep = min(self.capacity, self.length + segment.n_new)
        return self._followed_by(segment.n_new, *segment.finish(keep))

    def filled_with_noise(self) -> Memory:
        """A memory at its capacity, of random numbers: what a step takes does not depend on what they are."""
        shape = (self.batch_size, self.capacity, self.hidden[0].shape[-1])
        return replace(self, hidden=tuple(torch.randn(shape).to(old) for old in self.hidden), filled=None)

    def detach(self) -> Memory:
        """Itself: memory never carries a gradient."""
        return self

    def select(self, lanes: Tensor) -> Memory:
        """The memory of some lanes, in the order of the int64 indices `lanes` [B']; repeats are allowed."""
        filled = self.filled
        if filled is not None:
            filled = tuple(filled[lane] for lane in lanes.tolist())
        hidden = tuple(states.index_select(0, lanes.to(states.device)) for states in self.hidden)
        projections = self.projections and self.projections.select(lanes)
        return replace(self, hidden=hidden, filled=filled, projections=projections)._trimmed()

    def reset(self, mask: Tensor) -> Memory:
        """The memory with nothing in the lanes where the boolean `mask` [B] is true."""
        filled = self.filled or (self.length,) * self.batch_size
        emptied = tuple(0 if clear else count for clear, count in zip(mask.tolist(), filled, strict=True))
        return replace(self, filled=emptied)._trimmed()

    def with_mem_len(self, mem_len: int) -> Memory:
        """The memory with another length from here on; positions beyond it are dropped, the oldest first."""
        changed = replace(self, mem_len=mem_len)
        keep = min(changed.capacity, self.length)
        filled = None if self.filled is None else tuple(min(count, keep) for count in self.filled)
        return replace(changed._newest(keep), filled=_none_if_full(filled, keep))._trimmed()

    def _trimmed(self) -> Memory:
        """Without the oldest positions that no lane uses."""
        if self.filled is None:
            return self
        keep = max(self.filled, default=0)
        return replace(self._newest(keep), filled=_none_if_full(self.filled, keep))

    def _newest(self, keep: int) -> Memory:
        """Only the newest `keep` positions; which of them lanes have filled is the caller's to say."""
        hidden = tuple(states[:, states.shape[1] - keep :] for states in self.hidden)
        return replace(self, hidden=hidden, projections=self.projections and self.projections.newest(keep))

    def to_tensors(self) -> dict[str, Tensor]:
        """Everything as named tensors, to be saved; `from_tensors` is the inverse."""
        filled = self.filled or (self.length,) * self.batch_size
        limits = [-1 if limit is None else limit for limit in (self.mem_len, self.window, self.clamp_len)]
        tensors = {f"hidden.{layer}": states for layer, states in enumerate(self.hidden)}
        return tensors | {"filled": torch.tensor(filled), "limits": torch.tensor(limits)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Memory:
        """The memory that `to_tensors` described.

        Raises:
            ValueError: if the tensors do not fit one another.
        """
        hidden = tuple(tensors[f"hidden.{layer}"] for layer in range(len(tensors) - 2))
        mem_len, window, clamp_len = tensors["limits"].tolist()
        n_lane, n_position, _ = hidden[0].shape
        filled = tensors["filled"].tolist()
        if any(each.shape != hidden[0].shape for each in hidden) or len(filled) != n_lane:
            raise ValueError(f"layers of shapes {[list(each.shape) for each in hidden]}, {len(filled)} lanes")
        if not all(0 <= count <= n_position for count in filled) or n_position > mem_len:
            raise ValueError(f"{filled} of {n_position} positions, of at most {mem_len}")
        return cls(
            hidden,
            _none_if_full(tuple(filled), n_position),
            mem_len,
            None if window < 0 else window,
            None if clamp_len < 0 else clamp_len,
        )


def _newest(old: Tensor, new: Tensor, keep: int) -> Tensor:
    """The last `keep` positions of [old, new], without reading what is dropped, or keeping it alive."""
    n_new = new.shape[1]
    if keep <= n_new:
        return new if keep == n_new else new[:, n_new - keep :].clone()
    return torch.cat([old[:, old.shape[1] - (keep - n_new) :], new], dim=1)


def _none_if_full(filled: tuple[int, ...] | None, length: int) -> tuple[int, ...] | None:
    """None, the faster case, if every lane holds all positions."""
    return None if filled is None or all(count == length for count in filled) else filled
