"""Reading of text, a segment at a time, into a stream state that occupies no slot of an engine.

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
from txl.models.structure import Frozen
from txl.models.transformer_xl import TransformerXL

# Tokens of a prompt read at once: between two segments other streams take steps, and scores stay small.
PROMPT_SEGMENT = 128


@dataclass(frozen=True)
class StreamState:
    """State of a stream as a value: keys, values and the waiting token.

    `DecodeEngine.enter` and `TextReading` continue from a state.
    """

    n_token: int
    """Number of tokens of the stream, including the waiting token; 0 for an empty stream."""
    waiting: int
    """Id of the stream's last token, which the next step reads; 0 for an empty stream."""
    keys: tuple[Float[Tensor, "H M D"], ...]
    """One [H,M,D] a layer, the oldest position first."""
    values: tuple[Float[Tensor, "H M D"], ...]

    @property
    def nbytes(self) -> int:
        """Size of keys and values in bytes."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


class Reader:
    """Reader of text with the fixed weights of an engine's model; converts saved states to memories.

    Args:
        model: model that reads.
        frozen: record of the model when the engine was made.
        lengths: memory lengths used by every stream.
    """

    def __init__(self, model: TransformerXL, frozen: Frozen, lengths: Lengths):
        self.model, self.lengths, self._frozen = model, lengths, frozen
        self.calls_modules = frozen.outsider is not None
        """True: the model's modules must be called, and no state can be saved as a `StreamState`."""
        self._views: dict[int, Frozen] = {}
        self._positions: tuple[Tensor, ...] | None = None

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and the device of the weights."""
        return self.model.softmax.bias

    def check_weights(self) -> None:
        """Raise an error if the model has changed since the engine was made."""
        # If all modules are called, their hooks run too, even hooks that were added later.
        if not self._frozen.holds(hooks=not self.calls_modules):
            raise UserError(
                f"the model's weights have changed since the engine was made ({self._frozen.change()}); make a new "
                f"engine"
            )

    def check_saves(self) -> None:
        """Raise an error if the model's modules are called, since states then cannot be saved."""
        if self.calls_modules:
            raise UserError("decoding calls the model's modules, so that its streams cannot be saved; see the log")

    def empty_memory(self) -> Memory:
        """Return the memory of a stream without tokens."""
        with torch.inference_mode():
            return self.model.empty_state(1, self.lengths)

    def empty_state(self) -> StreamState:
        """Return the state of a stream without tokens."""
        self.check_saves()
        shape = self.model.config
        with torch.inference_mode():
            nothing = tuple(self.like.new_empty(shape.n_head, 0, shape.d_head) for _ in range(shape.n_layer))
        return StreamState(0, 0, nothing, nothing)

    def memory_of(self, state: StreamState, view: TransformerXL | None = None) -> Memory:
        """Return a saved state as a memory for reading segments with a view of the model (default: the model itself).

        A saved state has keys and values but no hidden states, which are NaN here. Of a longer memory only the newest
        positions are kept.

        Raises:
            UserError: if the state comes from an engine with a shorter memory and lacks positions that are seen here.
        """
        self.check_saves()
        empty = self.empty_memory()
        if state.n_token == 0:
            return empty
        n_held = min(state.keys[0].shape[1], empty.capacity)
        wanted = min(state.n_token - 1, empty.capacity)
        if n_held < wanted:
            raise UserError(
                f"the stream holds {n_held} positions of memory, but this engine's streams see {wanted}; enter it into "
                f"an engine with the same mem_len and window"
            )
        newest = slice(state.keys[0].shape[1] - n_held, None)
        with torch.inference_mode():
            # NaN, so that code that needs hidden states cannot compute plausible but wrong numbers.
            unknown = self.like.new_full((1, 1, self.model.config.d_model), float("nan")).expand(1, n_held, -1)
            keys, values = (tuple(layer[:, None, newest] for layer in kind) for kind in (state.keys, state.values))
            held = Projections(self._frozen_view(view or self.model), None, keys, values, self._positions_of(empty))
        return replace(empty, hidden=(unknown,) * len(keys), projections=held)

    def _frozen_view(self, view: TransformerXL) -> Frozen:
        """Return a view's record, cached: a view reuses only keys and values that carry its own record."""
        known = self._views.get(id(view))
        if known is None or known.model is not view or not known.holds():
            known = self._views[id(view)] = view.freeze()
        return known

    def _positions_of(self, empty: Memory) -> tuple[Tensor, ...]:
        """Return W_kR R for segments after a saved state: computed once, for capacity + `PROMPT_SEGMENT` distances."""
        if self._positions is None:
            n_distance = empty.capacity + PROMPT_SEGMENT
            self._positions = self.model.position_projections(n_distance, empty.clamp_len, self.like)
        return self._positions


class TextReading:
    """Reading of tokens, a segment at a time, so that other streams can take steps in between.

    The engine does not change: the result is a value, `memory`, until `DecodeEngine.enter` copies it into a slot or
    `state` returns it as a `StreamState`. The last token is not read; it waits for the stream's next step.

    Args:
        reader: the engine's reader.
        ids: token ids, at least one, all in the vocabulary (see `checked_tokens`).
        after: state of the stream before these tokens; None: an empty stream.
        segment: largest number of tokens of a segment, at most `PROMPT_SEGMENT`.
        view: view of the engine's model with observed attention, which reads instead of the model; None: the model.
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
        self.reader, self._segment, self._model = reader, min(segment, PROMPT_SEGMENT), view or reader.model
        before = after.n_token if after is not None else 0
        if after is not None and before > 0:
            # The last token of a stream is never read: the next step, or the next text, reads it.
            ids = torch.cat([ids.new_tensor([after.waiting]), ids])
            self.memory = reader.memory_of(after, self._model)
        else:
            self.memory = reader.empty_memory()
        self._ids, self._at = ids, 0
        self.n_token = ids.shape[0] + max(0, before - 1)
        """Number of tokens of the stream after the reading, including the waiting token."""

    @property
    def done(self) -> bool:
        """True when all tokens but the last have been read."""
        return self._at >= self._ids.shape[0] - 1

    @property
    def read(self) -> int:
        """Number of tokens of the stream that have been read."""
        return self.n_token - (self._ids.shape[0] - self._at)

    def step(self) -> tuple[Float[Tensor, "1 T E"], Int64[Tensor, "1 T"]]:
        """Read the next segment.

        Returns:
            final hidden states, for `log_probs_of` or `nll_of` of the engine's model; targets, the token after each
            token read.
        """
        self.reader.check_weights()
        end = min(self._at + self._segment, self._ids.shape[0] - 1)
        with torch.inference_mode():
            hidden, self.memory = self._model.hidden_states(self._ids[None, self._at : end], self.memory)
        targets = self._ids[None, self._at + 1 : end + 1]
        self._at = end
        return hidden, targets

    def state(self) -> StreamState:
        """Return the state after the tokens read so far, with the next token as the waiting one."""
        projections = self.memory.projections
        if projections is None:
            return replace(self.reader.empty_state(), n_token=1, waiting=int(self._ids[0]))
        # Copied: reading may go on in the same buffers.
        keys, values = (tuple(layer[:, 0].clone() for layer in kind) for kind in (projections.keys, projections.values))
        return StreamState(self.read + 1, int(self._ids[self._at]), keys, values)
