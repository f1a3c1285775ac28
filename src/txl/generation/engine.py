"""Decoding of many streams of tokens at once, one token of each a step, in constant memory.

    engine = txl.DecodeEngine(model, max_streams=8)
    first = engine.join(prompt, seed=1)
    second = engine.join(other_prompt, seed=2)   # at any time; nobody else notices
    tokens = engine.step()                       # the next token of each, in the order of engine.streams
    engine.leave(first)

Shapes: B streams, V vocabulary.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from txl.config import Limit
from txl.devices import sent
from txl.errors import UserError
from txl.generation.sampling import (
    REASONS,
    Sampling,
    chances,
    checked_forbidden,
    checked_seed,
    checked_tokens,
    permitted,
)
from txl.generation.steps import CompiledStep, Drawing, MemorySlots, ModuleStep, Slots, StaticStep, make_step
from txl.models.language_model import LanguageModel
from txl.models.memory import Memory, Projections
from txl.models.structure import Structure, evaluation_view
from txl.models.transformer_xl import TransformerXL, frozen_structure

PROMPT_SEGMENT = 128
"""Tokens of a prompt read at once."""
_MOST_DRAWINGS = 1000
"""Settings of sampling that are remembered."""
_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Stream:
    """One text in the making. `DecodeEngine.join` and `fork` make them."""

    slot: int
    sampling: Sampling
    seed: int
    forbidden: tuple[int, ...]
    drawn: int = 0
    """Tokens drawn so far."""
    waiting: bool = True
    """True: it has a token that has not been read yet."""
    ended: str | None = None
    """The reason why the engine ended it, if it could not go on."""


@dataclass(frozen=True)
class StreamState:
    """The keys, values and waiting token of a stream, as a value that `enter` and `Reading` go on from.

    Shapes: H heads, M positions held, D width of a head.
    """

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


class DecodeEngine:
    """Decodes with fixed weights: streams join and leave while the others go on.

    A stream's text depends on its prompt, seed and sampling alone. With the compiled step (a CPU with a C++ compiler)
    this holds to the last bit, in engines of any size; without, to the last bit in engines of the same size and place;
    on a GPU up to rounding.

    The model may train, or be read by others, at the same time: it is read without dropout and left in its mode. If it
    has forward hooks, or modules of others (LoRA), each stream goes through its modules, one by one, and one line says
    so. The engine refuses to go on when weights, modules or hooks have changed since it was made.

    Args:
        model: a Transformer-XL.
        max_streams: most streams at a time.
        dtype: dtype of weights, keys and values; None: the model's own. With another dtype the engine has a copy of the
            weights, converted once.
        compile: use the compiled step on a CPU, and a CUDA graph on a GPU; False: PyTorch, operation by operation.
            Where there is none, one line says so.
        mem_len, window, clamp_len: as in `LanguageModel.init_state`, for all streams.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_streams: int = 1,
        dtype: torch.dtype | None = None,
        compile: bool = True,
        mem_len: int | None = None,
        window: Limit = None,
        clamp_len: Limit = None,
    ):
        if not decodes(model):
            raise UserError(f"the model is a {type(model).__name__}; the decode engine needs a Transformer-XL")
        if max_streams < 1:
            raise UserError(f"max_streams is {max_streams}; expected 1 or more")
        if dtype not in (None, torch.float32, torch.bfloat16, torch.float64):
            raise UserError(f"dtype is {dtype}; expected torch.float32, torch.bfloat16 or torch.float64")
        converted = dtype if dtype != model.softmax.bias.dtype else None
        self.model = evaluation_view(model, converted)
        self._structure = frozen_structure(model if converted is None else self.model)
        self._like = self.model.softmax.bias
        with torch.inference_mode():
            state = self.model.init_state(1, mem_len, window, clamp_len)
            self._lengths = state.lengths
            shape = self.model.config
            if self._structure.outsider is None:
                self._slots = Slots(shape.n_layer, max_streams, shape.n_head, shape.d_head, state.capacity, self._like)
                self._step = make_step(self.model, self._slots, self._lengths.clamp_len, compile, self._structure)
            else:
                _logger.warning("streams go through the model's modules, one by one: %s", self._structure.outsider)
                self._slots = MemorySlots(max_streams, self._like.device)
                self._step = ModuleStep(self.model, self._slots)
        self.compiled = isinstance(self._step, CompiledStep)
        """True: steps are computed by the compiled library."""
        self._next = torch.zeros(max_streams, dtype=torch.int64, device=self._like.device)
        self._streams: list[Stream] = []
        self._free = list(range(max_streams))  # a heap, so that those taken lie together
        self._drawings: dict[tuple[Sampling, tuple[int, ...]], Drawing] = {}
        self._structures: dict[int, Structure] = {}
        self._positions: tuple[Tensor, ...] | None = None

    @property
    def max_streams(self) -> int:
        """Most streams at a time."""
        return self._next.shape[0]

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams that have joined and not left, in order."""
        return tuple(self._streams)

    def join(
        self,
        prompt: Sequence[int] | Tensor,
        *,
        seed: int = 0,
        sampling: Sampling | None = None,
        forbidden: Sequence[int] = (),
    ) -> Stream:
        """Start a stream. It reads all of the prompt but the last token, which the first step will read.

        Args:
            prompt: token ids, at least one; may be longer than the memory.
            seed: the same seed gives the same text.
            sampling: how tokens are drawn; by default from the 40 likeliest.
            forbidden: token ids that are never drawn.
        """
        if not isinstance(sampling, Sampling | None):
            raise UserError(f"sampling is {sampling!r}; expected a txl.Sampling")
        vocab_size = self.model.vocab_size
        ids = checked_tokens(prompt, vocab_size)
        never = checked_forbidden(forbidden, vocab_size)
        stream = self._enter(Stream(-1, sampling or Sampling(), checked_seed(seed), never))
        try:
            reading = Reading(self, ids)
            while not reading.done:
                reading.step()
            self._place(stream, reading.memory, reading.n_token, int(ids[-1]))
        except BaseException:
            self.leave(stream)
            raise
        return stream

    def enter(
        self,
        read: Reading | StreamState,
        *,
        seed: int = 0,
        drawn: int = 0,
        sampling: Sampling | None = None,
        forbidden: Sequence[int] = (),
    ) -> Stream:
        """Start a stream that continues from what was read; several streams may continue from the same state.

        Args:
            read: a finished reading or a saved state, of at least one token.
            seed, sampling, forbidden: as in `join`.
            drawn: tokens that were drawn with this seed before; the stream continues that sequence of draws.

        Raises:
            UserError: if there is no room, or nothing was read.
        """
        never = checked_forbidden(forbidden, self.model.vocab_size)
        if read.n_token == 0:
            raise UserError("the stream is empty; let it read at least one token first")
        stream = self._enter(Stream(-1, sampling or Sampling(), checked_seed(seed), never, drawn))
        memory = read.memory if isinstance(read, Reading) else self.memory_of(read)
        self._place(stream, memory, read.n_token, read.waiting)
        return stream

    def save(self, stream: Stream) -> StreamState:
        """Return what a stream has read; it stays as it is.

        Raises:
            UserError: if the stream has no token waiting, or the model's modules have to be called.
        """
        self._check_member(stream)
        if not stream.waiting:
            raise UserError("the stream has read all its tokens; give it another one with `put`")
        slots = self._rings()
        with torch.inference_mode():
            keys, values = slots.held(stream.slot)
        return StreamState(int(slots.read[stream.slot]) + 1, int(self._next[stream.slot]), keys, values)

    def empty_state(self) -> StreamState:
        """Return the state of a stream that has read nothing."""
        like = self._rings().keys
        nothing = tuple(ring[:, 0, :0].clone() for ring in like)
        return StreamState(0, 0, nothing, nothing)

    def memory_of(self, state: StreamState, view: TransformerXL | None = None) -> Memory:
        """Return a saved state as a memory, from which a view of the model (by default the engine's) reads segments.

        A saved state has keys and values but no hidden states. The memory's hidden states are NaN, so that code which
        needs them does not get wrong numbers.
        """
        self._rings()
        with torch.inference_mode():
            empty = self.model.empty_state(1, self._lengths)
            if state.n_token == 0:
                return empty
            n_held = state.keys[0].shape[1]
            unknown = self._like.new_full((1, 1, self.model.config.d_model), float("nan")).expand(1, n_held, -1)
            keys, values = (tuple(each[:, None] for each in kind) for kind in (state.keys, state.values))
            held = Projections(self._structure_of(view or self.model), None, keys, values, self._positions_of(empty))
        return replace(empty, hidden=(unknown,) * len(keys), projections=held)

    def fork(self, stream: Stream, *, seed: int) -> Stream:
        """Start a second stream that has read the same, and goes on by another seed."""
        self._check_member(stream)
        twin = self._enter(replace(stream, slot=-1, seed=checked_seed(seed)))
        with torch.inference_mode():
            self._slots.copy(stream.slot, twin.slot)
            self._next[twin.slot] = self._next[stream.slot]
        return twin

    def leave(self, stream: Stream) -> None:
        """End a stream and free its place."""
        self._check_member(stream)
        self._streams.remove(stream)
        heapq.heappush(self._free, stream.slot)

    def step(self) -> Int64[Tensor, " B"]:
        """Draw the next token of every stream, in the order of `streams` after the step; the tokens are on the CPU.

        A stream ends if no token can be drawn for it, because its probabilities are not numbers or all that have any
        are forbidden: it leaves the engine, and its `ended` says why.

        Raises:
            UserError: if the model has changed since the engine was made.
        """
        if not self._streams:
            return torch.zeros(0, dtype=torch.int64)
        streams, step = list(self._streams), self._step
        drawing, *others = {self._drawing(each) for each in streams}
        if not isinstance(step, StaticStep) or others or not step.draws(drawing):
            return self.draw(self.advance())
        self._check_ready(streams)
        slots = [each.slot for each in streams]
        keys = torch.zeros(3, max(slots) + 1, dtype=torch.int64)
        keys[:, slots] = torch.tensor([(each.seed, each.drawn, 1) for each in streams]).T
        with torch.inference_mode():
            drawn = step.draw(self._next, drawing, keys).cpu()[:, slots]
        return self._ended(streams, drawn)

    def draw(self, log_probs: Float[Tensor, "B V"], streams: Sequence[Stream] | None = None) -> Int64[Tensor, " kept"]:
        """Draw the next token of some streams (by default all) from what `advance` gave for them: int64, on the CPU.

        Streams for which none can be drawn end, as in `step`; the tokens are those of the others, in the order given.
        """
        chosen = list(self._streams if streams is None else streams)
        with torch.inference_mode():
            drawn = self._draw(log_probs, chosen)
            slots = sent(torch.tensor([each.slot for each in chosen], dtype=torch.int64), drawn.device)
            self._next[slots] = torch.where(drawn[1] == 0, drawn[0], self._next[slots])
        return self._ended(chosen, drawn.cpu())

    def _ended(self, streams: Sequence[Stream], drawn: Int64[Tensor, "2 B"]) -> Int64[Tensor, " kept"]:
        """Let the streams go on for which a token was drawn, and the others end; return the tokens."""
        kept = []
        for place, (stream, obstacle) in enumerate(zip(streams, drawn[1].tolist(), strict=True)):
            if (reason := REASONS[obstacle]) is not None:
                self.leave(stream)
                self._slots.clear(stream.slot)
                stream.ended = reason
                continue
            kept.append(place)
            stream.drawn += 1
            stream.waiting = True
        return drawn[0, kept].clone()

    def advance(self, streams: Sequence[Stream] | None = None) -> Float[Tensor, "B V"]:
        """Read the token that each of some streams (by default all) has waiting; `put` gives them the next one.

        Returns:
            log-probabilities of the following token, in the order given.

        Raises:
            UserError: if a stream has none waiting, or the model has changed since the engine was made.
        """
        chosen = self._streams if streams is None else list(streams)
        self._check_ready(chosen)
        places = [each.slot for each in chosen]
        with torch.inference_mode():
            slots = sent(torch.tensor(places, dtype=torch.int64), self._next.device)
            log_probs = self._step(self._next, slots, max(places, default=0) + 1)
            self._slots.read[slots] += 1
        for stream in chosen:
            stream.waiting = False
        return log_probs

    def put(self, stream: Stream, token: int) -> None:
        """Set the token that a stream reads next: after `advance`, or instead of the token drawn last."""
        self.put_all([stream], [token])

    def put_all(self, streams: Sequence[Stream], tokens: Sequence[int] | Tensor) -> None:
        """Set the next token of several streams at once, as `put` does for one."""
        for stream in streams:
            self._check_member(stream)
        ids = checked_tokens(tokens, self.model.vocab_size, "the token")
        if len(ids) != len(streams):
            raise UserError(f"{len(ids)} tokens were given for {len(streams)} streams; expected one for each")
        with torch.inference_mode():
            self._next[[stream.slot for stream in streams]] = sent(ids, self._next.device)
        for stream in streams:
            stream.waiting = True

    def _check_ready(self, streams: Sequence[Stream]) -> None:
        """Refuse streams that cannot take a step."""
        for stream in streams:
            self._check_member(stream)
            if not stream.waiting:
                raise UserError("a stream has read all its tokens; give it another one with `put`")
        if len({stream.slot for stream in streams}) < len(streams):
            raise UserError("a stream was given twice; expected each of them once")
        self._check_weights()

    def _drawing(self, stream: Stream) -> Drawing:
        """Return how a stream draws; its forbidden tokens are sent to the device once."""
        key = (stream.sampling, stream.forbidden)
        if key not in self._drawings:
            if len(self._drawings) == _MOST_DRAWINGS:
                self._drawings.clear()
            never = sent(torch.tensor(stream.forbidden), self._next.device) if stream.forbidden else None
            self._drawings[key] = Drawing(stream.sampling, stream.forbidden, never)
        return self._drawings[key]

    def _draw(self, log_probs: Tensor, streams: list[Stream]) -> Int64[Tensor, "2 B"]:
        """Draw a token for every row of [B,V]: the tokens, and the places of reasons in `REASONS` where there is none.

        Nothing waits for the device.
        """
        groups: dict[Drawing, list[int]] = {}
        for row, stream in enumerate(streams):
            groups.setdefault(self._drawing(stream), []).append(row)
        device = log_probs.device
        keys = sent(torch.tensor([(each.seed, each.drawn) for each in streams]), device)
        drawn = torch.empty(2, len(streams), dtype=torch.int64, device=device)
        for drawing, members in groups.items():
            rows = slice(None) if len(groups) == 1 else sent(torch.tensor(members), device)
            allowed, obstacles = permitted(log_probs[rows], drawing.forbidden)
            drawn[0, rows] = drawing.sampling.pick(allowed, chances(*keys[rows].unbind(1)))
            drawn[1, rows] = obstacles
        return drawn

    def _place(self, stream: Stream, memory: Memory, n_token: int, waiting: int) -> None:
        """Put what was read, all of `n_token` tokens but the last one, into a stream's slot."""
        with torch.inference_mode():
            self._slots.fill(stream.slot, memory, n_token - 1)
            self._next[stream.slot] = waiting

    def _rings(self) -> Slots:
        if not isinstance(self._slots, Slots):
            raise UserError("streams go through the model's modules, and such a stream cannot be saved; see the log")
        return self._slots

    def _structure_of(self, view: TransformerXL) -> Structure:
        """Return the structure by which a view that reads segments knows keys and values as its own."""
        known = self._structures.get(id(view))
        if known is None or known.model is not view or not known.holds():
            known = self._structures[id(view)] = frozen_structure(view)
        return known

    def _positions_of(self, empty: Memory) -> tuple[Tensor, ...]:
        """W_kR R for the segments of a saved stream; made once, and always of the same length."""
        if self._positions is None:
            n_distance = empty.capacity + PROMPT_SEGMENT
            self._positions = self.model.position_projections(n_distance, empty.clamp_len, self._like)
        return self._positions

    def _enter(self, stream: Stream) -> Stream:
        if not self._free:
            raise UserError(
                f"all {self.max_streams} places are taken; let a stream leave, or make an engine with more max_streams"
            )
        self._check_weights()
        stream.slot = heapq.heappop(self._free)
        self._streams.append(stream)
        return stream

    def _check_member(self, stream: Stream) -> None:
        if stream not in self._streams:  # two streams are never equal
            if stream.ended is not None:
                raise UserError(f"the stream has ended: {stream.ended}")
            raise UserError("the stream is not one of this engine's, or has left it")

    def _check_weights(self) -> None:
        # Where all modules are called, hooks are too, whenever they come.
        if not self._structure.holds(hooks=not isinstance(self._step, ModuleStep)):
            raise UserError(
                f"the model's weights have changed since the engine was made ({self._structure.change()}); make a new "
                f"engine"
            )


class Reading:
    """Tokens that are read a segment at a time, so that steps of other streams can be taken in between.

    Nothing of the engine changes: what was read is a value, `memory`, until `DecodeEngine.enter` gives it a place, or
    `state` takes it home. All tokens are read but the last one, which waits for the stream's next step.

    Args:
        engine: whose model reads.
        ids: at least one, all of the vocabulary (`checked_tokens`).
        after: what was read before.
        segment: most tokens of a segment, up to `PROMPT_SEGMENT`.
        view: reads in the place of the engine's model: a view of it, whose attention is watched.

    Raises:
        UserError: if the model has changed since the engine was made.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        ids: Int64[Tensor, " n"],
        after: StreamState | None = None,
        segment: int = PROMPT_SEGMENT,
        view: TransformerXL | None = None,
    ):
        self.waiting = int(ids[-1])
        ids = sent(ids, engine._like.device)
        self._engine, self._segment, self._model = engine, min(segment, PROMPT_SEGMENT), view or engine.model
        continues = after is not None and after.n_token > 0
        if after is not None and continues:
            ids = torch.cat([ids.new_tensor([after.waiting]), ids])
            self.memory = engine.memory_of(after, self._model)
        else:
            with torch.inference_mode():
                self.memory = engine.model.empty_state(1, engine._lengths)
        self._ids, self._at = ids, 0
        self.n_token = ids.shape[0] + (after.n_token - 1 if after is not None and continues else 0)
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
        self._engine._check_weights()
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
            self._engine._rings()  # refuses a model whose modules have to be called
            return replace(self._engine.empty_state(), n_token=1, waiting=int(self._ids[0]))
        keys, values = (tuple(each[:, 0].clone() for each in kind) for kind in (held.keys, held.values))
        return StreamState(self.read + 1, int(self._ids[self._at]), keys, values)


def decodes(model: LanguageModel) -> TypeGuard[TransformerXL]:
    """Say if the decode engine can decode a model."""
    return isinstance(model, TransformerXL)
