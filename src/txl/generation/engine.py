"""Decoding of many streams at once, one token of each stream per step, in constant memory.

    engine = txl.DecodeEngine(model, max_streams=8)
    first = engine.join(prompt, seed=1)
    second = engine.join(other_prompt, seed=2)   # at any time; other streams are not affected
    tokens = engine.step()                       # the next token of each stream, in the order of engine.streams
    engine.leave(first)

A prompt is read a segment at a time by a `TextReading`, into a value that occupies no place of the engine.

Shapes: B streams, T tokens of a segment, V vocabulary, E d_model, H heads, M positions held, D width of a head.
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
from txl.devices import records_on, sent
from txl.errors import UserError
from txl.generation.fused_step import FusedStep, why_not_fused
from txl.generation.sampling import (
    REASONS,
    Sampling,
    chances,
    checked_forbidden,
    checked_seed,
    checked_tokens,
    permitted,
)
from txl.generation.steps import CompiledStep, DrawSettings, ModuleStep, Slots, StaticStep
from txl.models.language_model import LanguageModel
from txl.models.memory import Memory, Projections
from txl.models.structure import Frozen, evaluation_view
from txl.models.transformer_xl import TransformerXL
from txl.native.build import library

# Tokens of a prompt read at once: between two segments other streams take steps, and scores stay small.
PROMPT_SEGMENT = 128
_MOST_DRAWINGS = 1000  # draw settings in the cache: a server's clients may choose any number of them
_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Stream:
    """One text that is being generated. `DecodeEngine.join`, `enter` and `fork` make streams."""

    slot: int
    sampling: Sampling
    seed: int
    forbidden: tuple[int, ...]
    drawn: int = 0  #: number of tokens drawn so far
    waiting: bool = True  #: True: the last token has not been read yet; the next step reads it
    ended: str | None = None  #: why the engine ended the stream, if no token could be drawn


@dataclass(frozen=True)
class StreamState:
    """State of a stream as a value: keys, values and the waiting token.

    `DecodeEngine.enter` and `TextReading` continue from a state.
    """

    n_token: int  # of the stream, including the waiting token; 0 for an empty stream
    waiting: int  # id of the stream's last token, which the next step reads; 0 for an empty stream
    keys: tuple[Float[Tensor, "H M D"], ...]  # one [H,M,D] a layer, the oldest position first
    values: tuple[Float[Tensor, "H M D"], ...]

    @property
    def nbytes(self) -> int:
        """Size of keys and values in bytes."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


class DecodeEngine:
    """Decoder with fixed weights. Streams join and leave while other streams continue.

    A stream's text depends on its prompt, seed and sampling alone: with the compiled step (a CPU with a C++ compiler)
    to the last bit in engines of any size; without, in engines of the same size and for the same slot; on a GPU, up to
    rounding.

    The model may be trained or used elsewhere at the same time: the engine reads without dropout and does not change
    the model's mode. If the model has forward hooks or foreign modules (LoRA), the engine calls the model's modules for
    one stream after the other, and logs a warning. The engine raises an error if weights, modules or hooks have changed
    since it was made; with another `dtype`, it continues with its converted copy of the weights.

    Args:
        model: a Transformer-XL.
        max_streams: largest number of streams at the same time.
        dtype: dtype of weights, keys and values; None: the model's own. With another dtype, the engine holds a copy of
            the weights, converted once.
        compile: use the compiled step on a CPU, and a CUDA graph on the current GPU; False: a step of PyTorch's
            operations, each of which the compiled library may still compute (`txl.native.build.compiled_code` forbids
            it).
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
            raise UserError(field="max_streams", value=max_streams, expected="1 or more")
        if dtype not in (None, torch.float32, torch.bfloat16, torch.float64):
            raise UserError(field="dtype", value=dtype, expected="torch.float32, torch.bfloat16 or torch.float64")
        # In their own dtype the weights are shared, and the engine notices if they change; a converted copy cannot.
        converted = dtype if dtype != model.softmax.bias.dtype else None
        self.model = evaluation_view(model, converted)
        self._frozen = (model if converted is None else self.model).freeze()
        self._calls_modules = self._frozen.outsider is not None  # streams cannot be saved then
        self._views: dict[int, Frozen] = {}
        self._positions: tuple[Tensor, ...] | None = None
        with torch.inference_mode():
            state = self.model.init_state(1, mem_len, window, clamp_len)
            self.lengths = state.lengths
            shape, like, clamp = self.model.config, self.model.softmax.bias, state.lengths.clamp_len
            # A hook or a foreign module must be called, which rings of projected keys and values would bypass.
            if self._calls_modules:
                problem = self._frozen.outsider
                _logger.warning("decoding calls the model's modules for one stream at a time: %s", problem)
                self._slots = self._step = ModuleStep(self.model, max_streams)
            else:
                self._slots = Slots(shape.n_layer, max_streams, shape.n_head, shape.d_head, state.capacity, like)
                compiles = compile and like.device.type == "cpu" and library() is not None
                if compiles and (weights := self.model.compiled_weights()) is not None:
                    self._step = CompiledStep(self.model, self._slots, clamp, weights)
                else:
                    captured = compile and records_on(like.device)
                    kind = FusedStep if captured and why_not_fused(self.model) is None else StaticStep
                    self._step = kind(self.model, self._slots, clamp, captured=captured)
        self.compiled = isinstance(self._step, CompiledStep)
        """True: steps are computed by the compiled library."""
        self._next = torch.zeros(max_streams, dtype=torch.int64, device=like.device)
        self._streams: dict[Stream, None] = {}  # in the order of joining; two streams are never equal
        self._free = list(range(max_streams))  # a heap: the lowest slot is taken first, so that used slots are adjacent
        self._drawings: dict[tuple[Sampling, tuple[int, ...]], DrawSettings] = {}

    @property
    def max_streams(self) -> int:
        """Largest number of streams at the same time."""
        return self._next.shape[0]

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams that have joined and not left, in the order of joining."""
        return tuple(self._streams)

    def join(
        self,
        prompt: Sequence[int] | Tensor,
        *,
        seed: int = 0,
        sampling: Sampling | None = None,
        forbidden: Sequence[int] = (),
    ) -> Stream:
        """Start a stream, and read its prompt except for the last token, which the first step reads.

        Args:
            prompt: token ids, at least one; may be longer than the memory.
            seed: seed of the drawn tokens; the same seed gives the same text.
            sampling: sampling settings; None: draw from the 40 likeliest tokens.
            forbidden: token ids that are never drawn.
        """
        ids = checked_tokens(prompt, self.model.vocab_size)
        stream = self._stream(seed, 0, sampling, forbidden)
        reading = TextReading(self, ids)
        while not reading.done:
            reading.step()
        return self._place(stream, reading)

    def enter(
        self,
        read: TextReading | StreamState,
        *,
        seed: int = 0,
        drawn: int = 0,
        sampling: Sampling | None = None,
        forbidden: Sequence[int] = (),
    ) -> Stream:
        """Start a stream that continues from a finished reading or a saved state, which several streams may share.

        `drawn` tokens were drawn with this seed before: the stream continues the seed's sequence of draws.

        Raises:
            UserError: if all places are taken, or `read` has no tokens, is not finished, or lacks positions that are
                seen here.
        """
        stream = self._stream(seed, drawn, sampling, forbidden)
        if read.n_token == 0:
            raise UserError("the stream is empty; let it read at least one token first")
        if isinstance(read, TextReading):
            if not read.done:
                raise UserError("the text is not read to its end; call `step` of the reading until it is `done`")
            if read.engine.lengths != self.lengths:
                raise UserError("the text was read for an engine with another mem_len or window; read it for this one")
        return self._place(stream, read)

    def save(self, stream: Stream) -> StreamState:
        """Return a copy of the state of a stream that has a waiting token; the stream does not change."""
        self._check_waiting(stream)
        self._check_saves()
        self._settle()
        slots = self._slots
        assert isinstance(slots, Slots)
        with torch.inference_mode():
            # Copied out: an idle stream is a value beside the engine and takes no slot from others.
            keys, values = slots.held(stream.slot)
        return StreamState(int(slots.read[stream.slot]) + 1, int(self._next[stream.slot]), keys, values)

    def empty_state(self) -> StreamState:
        """Return the state of a stream without tokens."""
        self._check_saves()
        shape = self.model.config
        with torch.inference_mode():
            nothing = (self.model.softmax.bias.new_empty(shape.n_head, 0, shape.d_head),) * shape.n_layer
        return StreamState(0, 0, nothing, nothing)

    def memory_of(self, state: StreamState, view: TransformerXL | None = None) -> Memory:
        """Return a saved state as a memory for reading segments with a view of the model (default: the engine's).

        A saved state has keys and values but no hidden states, which are NaN here. Of a longer memory only the newest
        positions are kept; one that lacks positions which are seen here is refused.
        """
        self._check_saves()
        like, view = self.model.softmax.bias, view or self.model
        with torch.inference_mode():
            empty = self.model.empty_state(1, self.lengths)
            if state.n_token == 0:
                return empty
            n_held = min(state.keys[0].shape[1], empty.capacity)
            wanted = min(state.n_token - 1, empty.capacity)
            if n_held < wanted:
                problem = f"the stream holds {n_held} positions of memory, but this engine's streams see {wanted}"
                raise UserError(problem, remedy="enter it into an engine with the same mem_len and window")
            # A view reuses only keys and values that carry its own record.
            known = self._views.get(id(view))
            if known is None or known.model is not view or not known.holds():
                known = self._views[id(view)] = view.freeze()
            if self._positions is None:
                n_distance = empty.capacity + PROMPT_SEGMENT
                self._positions = self.model.position_projections(n_distance, empty.lengths.clamp_len, like)
            newest = slice(state.keys[0].shape[1] - n_held, None)
            # NaN, so that code that needs hidden states cannot compute plausible but wrong numbers.
            unknown = like.new_full((1, 1, self.model.config.d_model), float("nan")).expand(1, n_held, -1)
            keys, values = (tuple(layer[:, None, newest] for layer in kind) for kind in (state.keys, state.values))
            held = Projections(known, None, keys, values, self._positions)
        return replace(empty, hidden=(unknown,) * len(keys), projections=held)

    def fork(self, stream: Stream, *, seed: int) -> Stream:
        """Start a second stream that has read the same tokens, and continues with another seed."""
        self._check_member(stream)
        twin, slot = replace(stream, seed=checked_seed(seed)), self._free_slot()
        self._settle()
        with torch.inference_mode():
            self._slots.copy(stream.slot, slot)
            self._next[slot] = self._next[stream.slot]
        return self._occupy(slot, twin)

    def leave(self, stream: Stream) -> None:
        """End a stream and free its place."""
        self._check_member(stream)
        del self._streams[stream]
        heapq.heappush(self._free, stream.slot)

    def step(self) -> Int64[Tensor, " B"]:
        """Draw the next token of every stream; return the tokens on the CPU, in the order of `streams` after the step.

        A stream ends if no token can be drawn for it: its probabilities are NaN, or every token with a probability
        above 0 is forbidden. The stream then leaves the engine, and its `ended` holds the reason.
        """
        if not self._streams:
            return torch.zeros(0, dtype=torch.int64)
        streams, step = list(self._streams), self._step
        drawings = [self._drawing(stream) for stream in streams]
        if not isinstance(step, StaticStep) or not step.draws(drawings):
            return self.draw(self.advance())
        self._check_ready(streams)
        slots = [stream.slot for stream in streams]
        # A graph covers the first slots, free ones included; only those with a 1 take part.
        keys = torch.zeros(3, max(slots) + 1, dtype=torch.int64)
        keys[:, slots] = torch.tensor([(stream.seed, stream.drawn, 1) for stream in streams]).T
        with torch.inference_mode():
            drawn = step.draw(self._next, slots, drawings, keys).cpu()[:, slots]
        return self._ended(streams, drawn)

    def prepare(self, sampling: Sampling | None = None, forbidden: Sequence[int] = ()) -> None:
        """On a GPU, record the steps of any number of streams now, so that they do not pause later to be recorded.

        Large vocabularies have a record for each kind of settings: this one is made for `sampling` and `forbidden`, as
        in `join`. Without a call, steps are recorded when they occur first; with `compile=False`, none is.
        """
        if isinstance(self._step, StaticStep):
            never = checked_forbidden(forbidden, self.model.vocab_size)
            with torch.inference_mode():
                self._step.record(self._next, self._drawing_of(sampling or Sampling(), never))

    def draw(self, log_probs: Float[Tensor, "B V"], streams: Sequence[Stream] | None = None) -> Int64[Tensor, " drawn"]:
        """Draw the next token of some streams (default: all) from the log-probabilities that `advance` returned.

        Streams for which no token can be drawn end, as in `step`; the tokens of the others are returned.
        """
        chosen = list(self._streams if streams is None else streams)
        with torch.inference_mode():
            drawn = self._draw(log_probs, chosen)
            slots = sent(torch.tensor([stream.slot for stream in chosen], dtype=torch.int64), drawn.device)
            self._next[slots] = torch.where(drawn[1] == 0, drawn[0], self._next[slots])
        return self._ended(chosen, drawn.cpu())

    def _ended(self, streams: Sequence[Stream], drawn: Int64[Tensor, "2 B"]) -> Int64[Tensor, " drawn"]:
        drawn_at = []
        for place, (stream, obstacle) in enumerate(zip(streams, drawn[1].tolist(), strict=True)):
            if (reason := REASONS[obstacle]) is not None:
                self.leave(stream)
                self._slots.clear(stream.slot)
                stream.ended = reason
                continue
            drawn_at.append(place)
            stream.drawn += 1
            stream.waiting = True
        return drawn[0, drawn_at]

    def advance(self, streams: Sequence[Stream] | None = None) -> Float[Tensor, "B V"]:
        """Read the waiting token of some streams (default: all), and return log-probabilities of the following ones.

        `draw` or `put` sets the next token of each.

        Raises:
            UserError: if a stream has no waiting token, or the model has changed since the engine was made.
        """
        chosen = list(self._streams if streams is None else streams)
        self._check_ready(chosen)
        self._settle()
        places = [stream.slot for stream in chosen]
        with torch.inference_mode():
            slots = sent(torch.tensor(places, dtype=torch.int64), self._next.device)
            log_probs = self._step(self._next, slots, max(places, default=0) + 1)
            # After the step, which finds the place of the token's key by the number of tokens before it.
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
        self._settle()
        with torch.inference_mode():
            self._next[[stream.slot for stream in streams]] = sent(ids, self._next.device)
        for stream in streams:
            stream.waiting = True

    def check_weights(self) -> None:
        """Raise an error if the model has changed since the engine was made."""
        # If all modules are called, their hooks run too, even hooks that were added later.
        if not self._frozen.holds(hooks=not self._calls_modules):
            raise UserError("the model has changed since the engine was made", remedy="make a new engine")

    def _settle(self) -> None:
        if isinstance(self._step, StaticStep):
            with torch.inference_mode():
                self._step.settle(self._next)

    def _check_saves(self) -> None:
        if self._calls_modules:
            raise UserError("decoding calls the model's modules, so that its streams cannot be saved; see the log")

    def _check_ready(self, streams: Sequence[Stream]) -> None:
        """Raise an error if a stream cannot take a step or is given twice, or if the model has changed."""
        for stream in streams:
            self._check_waiting(stream)
        if len(set(streams)) < len(streams):
            raise UserError("a stream was given twice; expected each of them once")
        self.check_weights()

    def _drawing(self, stream: Stream) -> DrawSettings:
        """Return a stream's draw settings, cached so that its forbidden tokens are sent to the device once."""
        return self._drawing_of(stream.sampling, stream.forbidden)

    def _drawing_of(self, sampling: Sampling, forbidden: tuple[int, ...]) -> DrawSettings:
        key = (sampling, forbidden)
        if key not in self._drawings:
            if len(self._drawings) == _MOST_DRAWINGS:
                self._drawings.clear()
            never = sent(torch.tensor(forbidden), self._next.device) if forbidden else None
            self._drawings[key] = DrawSettings(*key, never)
        return self._drawings[key]

    def _draw(self, log_probs: Tensor, streams: list[Stream]) -> Int64[Tensor, "2 B"]:
        """Draw a token for every row of [B,V], without waiting for the device; also return indices into `REASONS`."""
        # Streams with equal settings draw together; a request on the server may have settings of its own.
        groups: dict[DrawSettings, list[int]] = {}
        for row, stream in enumerate(streams):
            groups.setdefault(self._drawing(stream), []).append(row)
        device = log_probs.device
        keys = sent(torch.tensor([(stream.seed, stream.drawn) for stream in streams]), device)
        drawn = torch.empty(2, len(streams), dtype=torch.int64, device=device)
        for drawing, members in groups.items():
            rows = slice(None) if len(groups) == 1 else sent(torch.tensor(members), device)
            allowed, obstacles = permitted(log_probs[rows], drawing.forbidden)
            drawn[0, rows] = drawing.sampling.pick(allowed, chances(*keys[rows].unbind(1)))
            drawn[1, rows] = obstacles
        return drawn

    def _stream(self, seed: int, drawn: int, sampling: Sampling | None, forbidden: Sequence[int]) -> Stream:
        if not isinstance(sampling, Sampling | None):
            raise UserError(field="sampling", value=sampling, expected="a txl.Sampling")
        never = checked_forbidden(forbidden, self.model.vocab_size)
        self._free_slot()
        return Stream(-1, sampling or Sampling(), checked_seed(seed), never, drawn)

    def _free_slot(self) -> int:
        if not self._free:
            raise UserError(
                f"all {self.max_streams} places are taken", remedy="let a stream leave, or raise max_streams"
            )
        self.check_weights()
        return self._free[0]

    def _place(self, stream: Stream, read: TextReading | StreamState) -> Stream:
        memory = read.memory if isinstance(read, TextReading) else self.memory_of(read)
        slot = self._free_slot()
        self._settle()
        with torch.inference_mode():
            self._slots.fill(slot, memory, read.n_token - 1)
            self._next[slot] = read.waiting
        return self._occupy(slot, stream)

    def _occupy(self, slot: int, stream: Stream) -> Stream:
        # After the slot was filled: a stream whose memory could not be copied has not joined.
        heapq.heappop(self._free)
        stream.slot = slot
        self._streams[stream] = None
        return stream

    def _check_member(self, stream: Stream) -> None:
        if stream not in self._streams:
            gone = (
                "is not one of this engine's, or has left it" if stream.ended is None else f"has ended: {stream.ended}"
            )
            raise UserError(f"the stream {gone}")

    def _check_waiting(self, stream: Stream) -> None:
        self._check_member(stream)
        if not stream.waiting:
            raise UserError("the stream has read all its tokens; give it another one with `put`")


class TextReading:
    """Reading of tokens, a segment at a time, so that other streams can take steps in between.

    The engine does not change: the result is a value, `memory`, until `DecodeEngine.enter` copies it into a slot or
    `state` returns it as a `StreamState`. The last token is not read; it waits for the stream's next step.

    Args:
        ids: token ids, at least one, all in the vocabulary (see `checked_tokens`).
        after: state of the stream before these tokens; None: an empty stream.
        segment: largest number of tokens of a segment, at most `PROMPT_SEGMENT`.
        view: view of the engine's model with observed attention, which reads instead of the model.
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
        ids = sent(ids, engine.model.softmax.bias.device)
        self.engine, self._segment, self._model = engine, min(segment, PROMPT_SEGMENT), view or engine.model
        before = after.n_token if after is not None else 0
        if after is not None and before > 0:
            # The last token of a stream is never read: the next step, or the next text, reads it.
            ids = torch.cat([ids.new_tensor([after.waiting]), ids])
            self.memory = engine.memory_of(after, self._model)
        else:
            with torch.inference_mode():
                self.memory = engine.model.empty_state(1, engine.lengths)
        self._ids, self._at = ids, 0
        # Number of tokens of the stream after the reading, including the waiting token.
        self.n_token = ids.shape[0] + max(0, before - 1)

    @property
    def done(self) -> bool:
        """True when all tokens but the last have been read."""
        return self._at >= self._ids.shape[0] - 1

    @property
    def read(self) -> int:
        """Number of tokens of the stream that have been read."""
        return self.n_token - (self._ids.shape[0] - self._at)

    def step(self) -> tuple[Float[Tensor, "1 T E"], Int64[Tensor, "1 T"]]:
        """Read the next segment; return its final hidden states, and the token after each token read."""
        self.engine.check_weights()
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
            return replace(self.engine.empty_state(), n_token=1, waiting=int(self._ids[0]))
        # Copied: reading may go on in the same buffers.
        keys, values = (tuple(layer[:, 0].clone() for layer in kind) for kind in (projections.keys, projections.values))
        return StreamState(self.read + 1, int(self._ids[self._at]), keys, values)


def decodes(model: LanguageModel) -> TypeGuard[TransformerXL]:
    """Return True if the decode engine can decode a model."""
    return isinstance(model, TransformerXL)
