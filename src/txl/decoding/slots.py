"""What every stream has read: keys and values in rings of one size, or memory as the model carries it.

A slot is a stream's place. In a ring it holds the keys and values of the positions that the next query may see, the
query's own among them; a new position takes the place of the oldest. Nothing moves, nothing grows.

Shapes: B slots, R positions of a ring, H heads, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from txl.attention.memory import Memory


class Slots:
    """The rings of all layers, and how far each has got."""

    def __init__(self, n_layer: int, n_slot: int, n_head: int, d_head: int, capacity: int, like: Tensor):
        self.size = capacity + 1
        self.keys, self.values = (
            [like.new_zeros(n_head, n_slot, self.size, d_head) for _ in range(n_layer)] for _ in range(2)
        )
        self.read = torch.zeros(n_slot, dtype=torch.int64)
        """Tokens that each stream has read, prompt included: the next one is this one by number."""

    def place(self, slots: Tensor) -> Tensor:
        """Where the keys of the slots' next tokens go: int64 [B'] -> [B']."""
        return self.read[slots] % self.size

    def seen(self, slots: Tensor) -> Tensor:
        """Keys that the slots' next tokens see, their own among them: int64 [B'] -> [B']."""
        return (self.read[slots] + 1).clamp(max=self.size)

    def fill(self, slot: int, memory: Memory, read: int) -> None:
        """Put the memory of a stream of `read` tokens into a slot, whatever is in it."""
        self.read[slot] = read
        held = memory.projections
        if held is None or memory.length == 0:
            return
        places = torch.arange(read - memory.length, read, device=held.keys[0].device) % self.size
        for kind, source in ((self.keys, held.keys), (self.values, held.values)):
            for ring, projected in zip(kind, source, strict=True):
                ring[:, slot].index_copy_(1, places, projected[:, 0].to(ring.dtype))

    def copy(self, source: int, target: int) -> None:
        """Put a second stream that has read the same into another slot."""
        self.read[target] = self.read[source]
        for ring in (*self.keys, *self.values):
            ring[:, target].copy_(ring[:, source])

    def clear(self, slot: int) -> None:
        """Forget what a slot holds: values that are not numbers would reach its next stream, with weights of 0."""
        with torch.inference_mode():
            for ring in (*self.keys, *self.values):
                ring[:, slot].zero_()


class MemorySlots:
    """The memory of each stream, for a model whose modules all have to be called."""

    def __init__(self, n_slot: int):
        self.states: list[Memory | None] = [None] * n_slot
        self.read = torch.zeros(n_slot, dtype=torch.int64)
        """As in `Slots`."""

    def fill(self, slot: int, memory: Memory, read: int) -> None:
        """As `Slots.fill`."""
        self.states[slot], self.read[slot] = memory, read

    def copy(self, source: int, target: int) -> None:
        """As `Slots.copy`; a state is a value."""
        self.states[target], self.read[target] = self.states[source], self.read[source]

    def clear(self, slot: int) -> None:
        """As `Slots.clear`."""
        self.states[slot] = None
