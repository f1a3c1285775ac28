"""Keys and values of memory, projected once and kept while the weights do not change.

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
