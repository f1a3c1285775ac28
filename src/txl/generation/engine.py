"""Decoding of many streams of tokens at once, one token of each a step, in constant memory.

    engine = txl.DecodeEngine(model, max_streams=8)
    first = engine.join(prompt, seed=1)
    second = engine.join(other_prompt, seed=2)   # at any time; nobody else notices
    tokens = engine.step()                       # the next token of each, in the order of engine.streams
    engine.leave(first)

Shapes: B streams, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from txl.config import Limit
from txl.errors import UserError
from txl.generation.sampling import Sampling, chances, checked_forbidden, checked_seed, checked_tokens, permitted
from txl.generation.steps import CompiledStep, MemorySlots, ModuleStep, Slots, make_step
from txl.models.language_model import LanguageModel
from txl.models.structure import evaluation_view
from txl.models.transformer_xl import TransformerXL, frozen_structure

PROMPT_SEGMENT = 128
"""Tokens of a prompt read at once."""
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


class DecodeEngine:
    """Decodes with fixed weights: streams join and leave while the others go on.

    A stream's text depends on its prompt, seed and sampling alone. With the compiled step (a CPU with a C++ compiler)
    this holds to the last bit, in engines of any size; without, to the last bit in engines of the same size and place.

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
                self._slots = MemorySlots(max_streams)
                self._step = ModuleStep(self.model, self._slots)
        self.compiled = isinstance(self._step, CompiledStep)
        """True: steps are computed by the compiled library."""
        self._next = torch.zeros(max_streams, dtype=torch.int64, device=self._like.device)
        self._streams: list[Stream] = []
        self._free = list(range(max_streams))

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
        ids = checked_tokens(prompt, vocab_size).to(self._like.device)
        never = checked_forbidden(forbidden, vocab_size)
        stream = self._enter(Stream(-1, sampling or Sampling(), checked_seed(seed), never))
        try:
            with torch.inference_mode():
                self._fill(stream.slot, ids)
        except BaseException:
            self.leave(stream)
            raise
        return stream

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
        self._free.append(stream.slot)

    def step(self) -> Int64[Tensor, " B"]:
        """Draw the next token of every stream, in the order of `streams` after the step.

        A stream ends if no token can be drawn for it, because its probabilities are not numbers or all that have any
        are forbidden: it leaves the engine, and its `ended` says why.

        Raises:
            UserError: if the model has changed since the engine was made.
        """
        if not self._streams:
            return self._next[:0].clone()
        tokens, reasons = self._draw(self.advance())
        for stream, reason in zip(self.streams, reasons, strict=True):
            if reason is not None:
                self.leave(stream)
                self._slots.clear(stream.slot)
                stream.ended = reason
        if len(self._streams) < len(reasons):
            tokens = tokens[[row for row, reason in enumerate(reasons) if reason is None]]
        with torch.inference_mode():
            slots = torch.tensor([each.slot for each in self._streams], dtype=torch.int64, device=tokens.device)
            self._next[slots] = tokens
        for stream in self._streams:
            stream.drawn += 1
            stream.waiting = True
        return tokens.clone()

    def advance(self, streams: Sequence[Stream] | None = None) -> Float[Tensor, "B V"]:
        """Read the token that each of some streams (by default all) has waiting; `put` gives them the next one.

        Returns:
            log-probabilities of the following token, in the order given.

        Raises:
            UserError: if a stream has none waiting, or the model has changed since the engine was made.
        """
        chosen = self._streams if streams is None else list(streams)
        for stream in chosen:
            self._check_member(stream)
            if not stream.waiting:
                raise UserError("a stream has read all its tokens; give it another one with `put`")
        if len({stream.slot for stream in chosen}) < len(chosen):
            raise UserError("a stream was given twice; expected each of them once")
        self._check_weights()
        with torch.inference_mode():
            slots = torch.tensor([each.slot for each in chosen], dtype=torch.int64, device=self._next.device)
            log_probs = self._step(self._next, slots)
            self._slots.read[slots] += 1
        for stream in chosen:
            stream.waiting = False
        return log_probs

    def put(self, stream: Stream, token: int) -> None:
        """Give a stream the token that it reads next, after `advance` or in the place of the token drawn last."""
        self._check_member(stream)
        with torch.inference_mode():
            self._next[stream.slot] = checked_tokens([token], self.model.vocab_size, "the token")[0]
        stream.waiting = True

    def _draw(self, log_probs: Tensor) -> tuple[Tensor, list[str | None]]:
        """Draw a token for every row of [B,V]: int64 [B], and the reason where there is none (else None)."""
        groups: dict[tuple[Sampling, tuple[int, ...]], list[int]] = {}
        for row, stream in enumerate(self._streams):
            groups.setdefault((stream.sampling, stream.forbidden), []).append(row)
        if len(groups) == 1:
            return self._draw_alike(log_probs, range(len(self._streams)))
        tokens = torch.zeros(len(self._streams), dtype=torch.int64, device=log_probs.device)
        reasons: list[str | None] = [None] * len(self._streams)
        for members in groups.values():
            rows = torch.tensor(members, device=log_probs.device)
            tokens[rows], found = self._draw_alike(log_probs[rows], members)
            for row, reason in zip(members, found, strict=True):
                reasons[row] = reason
        return tokens, reasons

    def _draw_alike(self, log_probs: Tensor, members: Sequence[int]) -> tuple[Tensor, list[str | None]]:
        """Compute `_draw` for the streams of these numbers, whose sampling is the same."""
        first = self._streams[members[0]]
        log_probs, reasons = permitted(log_probs, first.forbidden)
        if any(reasons):
            log_probs = log_probs.clone()
            log_probs[[place for place, reason in enumerate(reasons) if reason is not None]] = 0.0  # drawn for nobody
        keys = [(self._streams[row].seed, self._streams[row].drawn) for row in members]
        seeds, numbers = torch.tensor(keys, device=log_probs.device).unbind(1)
        return first.sampling.pick(log_probs, chances(seeds, numbers)), reasons

    def _fill(self, slot: int, ids: Tensor) -> None:
        """Read all of a prompt but its last token into a slot."""
        state = self.model.empty_state(1, self._lengths)
        for start in range(0, ids.shape[0] - 1, PROMPT_SEGMENT):
            part = ids[None, start : min(start + PROMPT_SEGMENT, ids.shape[0] - 1)]
            _, state = self.model.hidden_states(part, state)
        self._slots.fill(slot, state, ids.shape[0] - 1)
        self._next[slot] = ids[-1]

    def _enter(self, stream: Stream) -> Stream:
        if not self._free:
            raise UserError(
                f"all {self.max_streams} places are taken; let a stream leave, or make an engine with more max_streams"
            )
        self._check_weights()
        stream.slot = self._free.pop(0)
        self._streams.append(stream)
        return stream

    def _check_member(self, stream: Stream) -> None:
        if not any(stream is each for each in self._streams):
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


def decodes(model: LanguageModel) -> TypeGuard[TransformerXL]:
    """Say if the decode engine can decode a model."""
    return isinstance(model, TransformerXL)
