"""One stream that is kept between requests: its states, what is done with it, and its snapshot.

A kept stream is the state behind its last token, and one or two states from before, to which a fork can go back. A
snapshot is a safetensors file: keys and values of every layer, and what they belong to.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from txl.data.decoders import Decoder
from txl.files import JsonObject
from txl.generation.reading import StreamState
from txl.serving.requests import ApiError
from txl.serving.service import Service
from txl.serving.texts import TAIL
from txl.serving.work import CHECKPOINT_EVERY, DrawnEvent, Event, FailedEvent, ReadEvent, SavedEvent, ScoredToken, Work

_FORMAT = 1
_STATES = 2
"""States from before that a stream keeps."""
_MOST = 2**62
"""Bound of the tokens that a snapshot has read and drawn, so that no count to come overflows."""
_LN2 = math.log(2)


@dataclass(frozen=True, slots=True)
class Entry:
    """A token of a stream, and what it added to the stream's totals."""

    id: int
    bits: float | None
    characters: int
    drawn: tuple[int, int] | None = None
    """Where it was drawn: the seed, and how many tokens were drawn with it before."""


@dataclass
class Totals:
    """Bits that a stream's tokens have cost over its whole life."""

    scored: int = 0
    bits: float = 0.0
    characters: int = 0
    """Characters that the scored tokens completed."""

    def add(self, entry: Entry, sign: int = 1) -> None:
        """Count a token, or take it back."""
        if entry.bits is not None:
            self.scored += sign
            self.bits += sign * entry.bits
            self.characters += sign * entry.characters


@dataclass(eq=False)
class KeptStream:
    """A stream between requests."""

    id: str
    state: StreamState
    seed: int
    drawn: int = 0
    """Tokens drawn with this seed."""
    totals: Totals = field(default_factory=Totals)
    earlier: deque[StreamState] = field(default_factory=deque)
    """States that a fork can go back to, the oldest first."""
    recent: deque[Entry] = field(default_factory=deque)
    """Tokens behind the oldest of them, and up to `TAIL` before these."""
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)
    changed: bool = True
    """True if its file, where streams are kept in a folder, is not up to date."""
    work: Work | None = None
    """The work that is being done with it now."""

    @property
    def tail(self) -> tuple[int, ...]:
        """The last few tokens."""
        return tuple(entry.id for entry in list(self.recent)[-TAIL:])

    @property
    def first(self) -> int:
        """Least number of tokens that a fork can go back to."""
        return self.earlier[0].n_token if self.earlier else self.state.n_token

    @property
    def nbytes(self) -> int:
        """Bytes of its states; states that forks share count for each."""
        states = {id(each): each for each in (*self.earlier, self.state)}
        return sum(each.nbytes for each in states.values())

    def copy(self) -> KeptStream:
        """Return the stream as it is now, for another thread to look at."""
        return replace(self, totals=replace(self.totals), earlier=self.earlier.copy(), recent=self.recent.copy())

    def go_on(self, entries: list[Entry], state: StreamState) -> None:
        """Take in tokens, and the state behind them."""
        for entry in entries:
            self.recent.append(entry)
            self.totals.add(entry)
        self.state, self.changed, self.used = state, True, time.monotonic()
        if not self.earlier or state.n_token - self.earlier[-1].n_token >= CHECKPOINT_EVERY:
            self.earlier.append(state)
        while len(self.earlier) > _STATES:
            self.earlier.popleft()
        while len(self.recent) > state.n_token - self.first + TAIL:
            self.recent.popleft()

    def rewind(self, n_token: int) -> list[Entry]:
        """Go back to a saved state at or before `n_token` tokens.

        Its seed and count of drawn tokens are then those of `n_token`, so that the same text would be drawn again.

        Returns:
            The tokens that it has to read again from there.

        Raises:
            ApiError: if that is too far back, or ahead.
        """
        now = self.state.n_token
        if not self.first <= n_token <= now:
            raise ApiError(
                400, f"at is {n_token}; this stream can be forked at {self.first} to {now} tokens", param="at"
            )
        if n_token == now:
            return []
        state = max((each for each in self.earlier if each.n_token <= n_token), key=lambda each: each.n_token)
        recent = list(self.recent)
        kept, end = (len(recent) - (now - each) for each in (state.n_token, n_token))
        lost = (entry.drawn for entry in recent[end:] if entry.drawn is not None)
        self.seed, self.drawn = next(lost, (self.seed, self.drawn))
        while len(self.recent) > kept:
            self.totals.add(self.recent.pop(), -1)
        self.state = state
        self.earlier = deque(each for each in self.earlier if each.n_token <= state.n_token)
        return recent[kept:end]


class Operation:
    """A work that changes a kept stream, followed to its end whoever listens.

    Args:
        stream: nobody else works with it meanwhile.
        work: what is done; it has `keep` set.
        seed: of the tokens that are drawn; None: nothing is drawn.
        again: tokens that the work reads first and that the stream had before.
    """

    def __init__(self, stream: KeptStream, work: Work, seed: int | None, again: Sequence[Entry] = ()):
        self.stream, self.work, self._seed, self._again = stream, work, seed, deque(again)
        self._n_drawn = work.lanes[0].drawn if work.lanes else 0
        self.failure: FailedEvent | None = None
        self._queue: asyncio.Queue[list[Event] | None] = asyncio.Queue()
        self._listens = True
        self._entries: list[Entry] = []
        stream.work = work
        self.task: asyncio.Task[None] | None = None

    def start(self, service: Service) -> None:
        """Submit the work and follow it.

        Raises:
            ApiError: if the queue is full.
        """
        decoder = service.texts.decoder_after(self.stream.tail)
        try:
            service.submit([self.work])
        except ApiError:
            self.stream.work = None
            raise
        self.task = asyncio.create_task(self._follow(decoder))

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Yield what comes; who stops listening ends the work."""
        try:
            while (batch := await self._queue.get()) is not None:
                yield batch
        finally:
            self._listens = False
            self.work.cancelled = True

    async def _follow(self, decoder: Decoder) -> None:
        try:
            async for batch in self.work.outbox.batches():
                for event in batch:
                    self._take_in(event, decoder)
                if self._listens:  # states stay with the stream: nobody else needs them
                    self._queue.put_nowait([event for event in batch if not isinstance(event, SavedEvent)])
        finally:
            self.stream.work, self.stream.used = None, time.monotonic()
            self._queue.put_nowait(None)

    def _take_in(self, event: Event, decoder: Decoder) -> None:
        if isinstance(event, ReadEvent):
            for token in event.tokens:
                token.piece = decoder.push(token.id)
                self._entries.append(_entry(token, self._again.popleft().drawn if self._again else None))
        elif isinstance(event, DrawnEvent):
            self._entries.append(_entry(event.token, None if self._seed is None else (self._seed, self._n_drawn)))
            self._n_drawn += 1
        elif isinstance(event, SavedEvent):
            n_new = event.state.n_token - self.stream.state.n_token
            self.stream.go_on(self._entries[:n_new], event.state)
            del self._entries[:n_new]
            if self._seed is not None:
                self.stream.seed, self.stream.drawn = self._seed, event.drawn
        elif isinstance(event, FailedEvent):
            self.failure = event


def _entry(token: ScoredToken, drawn: tuple[int, int] | None) -> Entry:
    return Entry(token.id, None if token.log_prob is None else -token.log_prob / _LN2, len(token.piece), drawn)


def new_id() -> str:
    """Return the id of a new stream, which nobody can guess."""
    return f"stream-{secrets.token_hex(16)}"


def snapshot(stream: KeptStream, service: Service) -> bytes:
    """Return everything that a stream goes on from, as a safetensors file."""
    state = stream.state
    tensors: dict[str, Tensor] = {}
    for kind, each in (("keys", state.keys), ("values", state.values)):
        tensors |= {f"{kind}.{layer}": tensor.detach().cpu().contiguous() for layer, tensor in enumerate(each)}
    about = {
        "format": _FORMAT,
        **service.identity,
        "kernel": service.kernel,
        "n_token": state.n_token,
        "waiting": state.waiting,
        "seed": stream.seed,
        "drawn": stream.drawn,
        "scored": stream.totals.scored,
        "bits": stream.totals.bits.hex(),
        "characters": stream.totals.characters,
        "tail": list(stream.tail),
        "created": stream.created,
    }
    about["sha256"] = _digest(about, tensors)
    return safetensors.torch.save(tensors, {"txl_stream": json.dumps(about)})


def restored(data: bytes, service: Service, name: str) -> KeptStream:
    """Return the stream of a snapshot.

    Raises:
        ApiError: if it is none, damaged, or of another model or other settings, with the reason.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        about = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["txl_stream"])
        tensors = safetensors.torch.load(data)
        assert about["format"] == _FORMAT
    except (ValueError, KeyError, TypeError, AssertionError, SafetensorError, RecursionError):
        raise ApiError(400, "not a snapshot of a stream that this version reads", code="bad_snapshot") from None
    for field_name, ours in service.identity.items():
        if about.get(field_name) != ours:
            theirs = about.get(field_name)
            what = "of another model" if field_name == "model" else f"of a stream with {field_name} {theirs}"
            here = f"{ours[:12]}..." if field_name == "model" else ours
            there = f"{str(theirs)[:12]}..." if field_name == "model" else theirs
            raise ApiError(
                409,
                f"the snapshot is {what}; this server has {field_name} {here}, the snapshot {there}",
                code="mismatch",
            )
    if about.pop("sha256", None) != _digest(about, tensors):
        raise ApiError(400, "the snapshot is damaged: its content is not what its hash says", code="bad_snapshot")
    try:
        state = _state_of(about, tensors, service)
        stream = KeptStream(
            name,
            state,
            int(about["seed"]),
            int(about["drawn"]),
            Totals(int(about["scored"]), float.fromhex(about["bits"]), int(about["characters"])),
            deque([state]),
            deque(Entry(int(each), None, 0) for each in about["tail"][-TAIL:]),
            created=float(about["created"]),
        )
        if not all(0 <= each < len(service.texts.vocabulary) for each in (*stream.tail, state.waiting)):
            raise ValueError("a token is outside of the vocabulary")
        counts = stream.drawn, stream.totals.scored, stream.totals.characters
        if not (
            0 <= stream.seed < 2**63
            and all(0 <= each < _MOST for each in counts)
            and math.isfinite(stream.totals.bits)
            and abs(stream.created) < _MOST  # not NaN either
        ):
            raise ValueError("a number is out of range")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ApiError(400, f"the snapshot is damaged: {error}", code="bad_snapshot") from None
    return stream


def _state_of(about: JsonObject, tensors: dict[str, Tensor], service: Service) -> StreamState:
    n_layer, n_token = len(service.empty.keys), int(about["n_token"])
    if not 0 <= n_token < _MOST or len(tensors) != 2 * n_layer:
        raise ValueError("its tensors are not those of this model")
    held = min(max(n_token - 1, 0), service.memory)
    kinds = []
    for kind, like in (("keys", service.empty.keys), ("values", service.empty.values)):
        found = tuple(tensors[f"{kind}.{layer}"] for layer in range(n_layer))
        for tensor, empty in zip(found, like, strict=True):
            if tensor.shape != (empty.shape[0], held, empty.shape[2]) or tensor.dtype != empty.dtype:
                raise ValueError("its tensors have other shapes")
        kinds.append(tuple(tensor.to(like[0].device) for tensor in found))
    return StreamState(n_token, int(about["waiting"]), *kinds)


def _digest(about: JsonObject, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
