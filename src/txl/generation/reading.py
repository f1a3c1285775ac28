"""Reading of text into the state of a stream, which belongs to no engine's place: a segment of tokens at a time.

Shapes: T tokens of a segment, E width of the hidden states, H heads, M positions held, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from txl.config import Lengths
from txl.devices import sent
from txl.errors import UserError
from txl.models.memory import Memory, Projections
from txl.models.structure import Structure
from txl.models.transformer_xl import TransformerXL, frozen_structure

PROMPT_SEGMENT = 128
"""Tokens of a prompt read at once."""


@dataclass(frozen=True)
class StreamState:
    """The keys, values and waiting token of a stream, as a value that `DecodeEngine.enter` and `TextReading` go on
    from."""

    n_token: int
    """Tokens of the stream, the one that waits to be read among them; 0 for a stream that has none yet."""
    waiting: int
    """The last token, which the next step reads; 0 if there is none."""
    keys: tuple[Float[Tensor, "H M D"], ...]
    """One [H,M,D] a layer, the oldest position first."""
    values: tuple[Float[Tensor, "H M D"], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(each.nbytes for each in (*self.keys, *self.values))


class Reader:
    """Reads text with the fixed weights of an engine's model, and turns states into memories.

    Args:
        model: whose weights read.
        structure: the model as it was when the engine was made.
        lengths: of the memory of all streams.
    """

    def __init__(self, model: TransformerXL, structure: Structure, lengths: Lengths):
        self.model, self.lengths, self._structure = model, lengths, structure
        self.calls_modules = structure.outsider is not None
        """True: the model's modules have to be called, and what was read cannot be a `StreamState`."""
        self._views: dict[int, Structure] = {}
        self._positions: tuple[Tensor, ...] | None = None

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and the device of the weights."""
        return self.model.softmax.bias

    def check_weights(self) -> None:
        """Refuse a model that has changed since the engine was made."""
        # Where all modules are called, hooks are too, whenever they come.
        if not self._structure.holds(hooks=not self.calls_modules):
            raise UserError(
                f"the model's weights have changed since the engine was made ({self._structure.change()}); make a new "
                f"engine"
            )

    def check_saves(self) -> None:
        """Refuse a model of which no keys and values are kept."""
        if self.calls_modules:
            raise UserError("streams go through the model's modules, and such a stream cannot be saved; see the log")

    def empty_memory(self) -> Memory:
        """Return the memory of a stream that has read nothing."""
        with torch.inference_mode():
            return self.model.empty_state(1, self.lengths)

    def empty_state(self) -> StreamState:
        """Return the state of a stream that has read nothing."""
        self.check_saves()
        shape = self.model.config
        with torch.inference_mode():
            nothing = tuple(self.like.new_empty(shape.n_head, 0, shape.d_head) for _ in range(shape.n_layer))
        return StreamState(0, 0, nothing, nothing)

    def memory_of(self, state: StreamState, view: TransformerXL | None = None) -> Memory:
        """Return a saved state as a memory, from which a view of the model (by default the model) reads segments.

        A saved state has keys and values but no hidden states. The memory's hidden states are NaN, so that code which
        needs them does not get wrong numbers.
        """
        self.check_saves()
        empty = self.empty_memory()
        if state.n_token == 0:
            return empty
        n_held = state.keys[0].shape[1]
        with torch.inference_mode():
            unknown = self.like.new_full((1, 1, self.model.config.d_model), float("nan")).expand(1, n_held, -1)
            keys, values = (tuple(each[:, None] for each in kind) for kind in (state.keys, state.values))
            held = Projections(self._structure_of(view or self.model), None, keys, values, self._positions_of(empty))
        return replace(empty, hidden=(unknown,) * len(keys), projections=held)

    def _structure_of(self, view: TransformerXL) -> Structure:
        """Return the structure by which a view that reads segments knows keys and values as its own."""
        known = self._views.get(id(view))
        if known is None or known.model is not view or not known.holds():
            known = self._views[id(view)] = frozen_structure(view)
        return known

    def _positions_of(self, empty: Memory) -> tuple[Tensor, ...]:
        """W_kR R for the segments of a saved stream; made once, and always of the same length."""
        if self._positions is None:
            n_distance = empty.capacity + PROMPT_SEGMENT
            self._positions = self.model.position_projections(n_distance, empty.clamp_len, self.like)
        return self._positions


class TextReading:
    """Tokens that are read a segment at a time, so that steps of other streams can be taken in between.

    Nothing of the engine changes: what was read is a value, `memory`, until `DecodeEngine.enter` gives it a place, or
    `state` takes it home. All tokens are read but the last one, which waits for the stream's next step.

    Args:
        reader: the engine's.
        ids: at least one, all of the vocabulary (`checked_tokens`).
        after: what was read before.
        segment: most tokens of a segment, up to `PROMPT_SEGMENT`.
        view: reads in the place of the engine's model: a view of it, whose attention is watched.

    Raises:
        UserError: if the model has changed since the engine was made.
    """

    def __init__(
        self,
        reader: Reader,
        ids: Int64[Tensor, " n"],
        after: StreamState | None = None,
        segment: int = PROMPT_SEGMENT,
        view: TransformerXL | None = None,
    ):
        self.waiting = int(ids[-1])
        ids = sent(ids, reader.like.device)
        self._reader, self._segment, self._model = reader, min(segment, PROMPT_SEGMENT), view or reader.model
        before = after.n_token if after is not None else 0
        if after is not None and before > 0:
            ids = torch.cat([ids.new_tensor([after.waiting]), ids])
            self.memory = reader.memory_of(after, self._model)
        else:
            self.memory = reader.empty_memory()
        self._ids, self._at = ids, 0
        self.n_token = ids.shape[0] + max(0, before - 1)
        """Tokens of the stream when all is read."""

    @property
    def done(self) -> bool:
        """True when everything is read."""
        return self._at >= self._ids.shape[0] - 1

    @property
    def read(self) -> int:
        """Tokens of the stream that have been read."""
        return self.n_token - (self._ids.shape[0] - self._at)

    def step(self) -> tuple[Float[Tensor, "1 T E"], Int64[Tensor, "1 T"]]:
        """Read the next segment.

        Returns:
            The final hidden states, for `log_probs_of` or `nll_of` of the engine's model, and what follows each of the
            tokens read.
        """
        self._reader.check_weights()
        end = min(self._at + self._segment, self._ids.shape[0] - 1)
        with torch.inference_mode():
            hidden, self.memory = self._model.hidden_states(self._ids[None, self._at : end], self.memory)
        targets = self._ids[None, self._at + 1 : end + 1]
        self._at = end
        return hidden, targets

    def state(self) -> StreamState:
        """Return what has been read so far, with the token that comes next waiting."""
        held = self.memory.projections
        if held is None:
            return replace(self._reader.empty_state(), n_token=1, waiting=int(self._ids[0]))
        keys, values = (tuple(each[:, 0].clone() for each in kind) for kind in (held.keys, held.values))
        return StreamState(self.read + 1, int(self._ids[self._at]), keys, values)
