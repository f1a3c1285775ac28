"""One stream that is kept between requests: its states, the operations on it, and its snapshot.

A kept stream holds the state after its last token, and one or two earlier states to which a fork can go back. A
snapshot is a safetensors file with the keys and values of every layer, and a description of model and stream.
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
from txl.errors import brief
from txl.files import JsonObject, parsed_json
from txl.generation.engine import StreamState
from txl.serving.requests import ApiError
from txl.serving.service import Service
from txl.serving.texts import TAIL
from txl.serving.work import CHECKPOINT_EVERY, DrawnEvent, Event, FailedEvent, ReadEvent, SavedEvent, ScoredToken, Work

_FORMAT = 2
_STATES = 2  # states that a stream keeps for forks
_MOST = 2**62  # above the counts in a snapshot, so that no later count can overflow
_HEADER = 1 << 17  # bytes of a snapshot's header; that of a model with 100 layers has 20,000
_LARGEST = 1e15  # of keys and values in a snapshot: with larger ones, sums of squares in the model may overflow
_LN2 = math.log(2)


@dataclass(frozen=True, slots=True)
class Entry:
    """A token of a stream, and its contribution to the stream's totals."""

    id: int
    bits: float | None
    characters: int
    drawn: tuple[int, int] | None = None  # seed, and number of tokens drawn with it before; None: it was read


@dataclass
class Totals:
    """Sums over the scored tokens of a stream's whole life: surprisal, and characters that they completed."""

    scored: int = 0
    bits: float = 0.0
    characters: int = 0

    def add(self, entry: Entry, sign: int = 1) -> None:
        """Count a token; with `sign` -1, remove it from the sums."""
        if entry.bits is not None:
            self.scored += sign
            self.bits += sign * entry.bits
            self.characters += sign * entry.characters


@dataclass(eq=False)
class KeptStream:
    """A stream that is kept between requests."""

    id: str
    state: StreamState
    seed: int
    drawn: int = 0  # tokens drawn with `seed`
    totals: Totals = field(default_factory=Totals)
    earlier: deque[StreamState] = field(default_factory=deque)  # to which a fork can go back, the oldest first
    recent: deque[Entry] = field(default_factory=deque)  # tokens after the oldest of these, and up to `TAIL` before
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)
    changed: bool = True  # since its file was written; used if streams are saved in a folder
    work: Work | None = None  # in progress; None: the stream is free
    deleted: bool = False  # perhaps while a request used it

    @property
    def tail(self) -> tuple[int, ...]:
        """Ids of the last tokens, up to `TAIL`."""
        return tuple(entry.id for entry in list(self.recent)[-TAIL:])

    @property
    def first(self) -> int:
        """Smallest number of tokens to which a fork can go back."""
        return self.earlier[0].n_token if self.earlier else self.state.n_token

    @property
    def nbytes(self) -> int:
        """Size of the stream's states in bytes; a state shared by forks counts in each of them."""
        states = {id(state): state for state in (*self.earlier, self.state)}
        return sum(state.nbytes for state in states.values())

    def copy(self) -> KeptStream:
        """Return a copy of the stream as it is now, which another thread can read."""
        return replace(self, totals=replace(self.totals), earlier=self.earlier.copy(), recent=self.recent.copy())

    def go_on(self, entries: list[Entry], state: StreamState) -> None:
        """Append tokens and the state after them, and drop the oldest states and tokens."""
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

        Seed and count of drawn tokens become those at `n_token`, so that the stream would draw the same text again.

        Returns:
            tokens between the saved state and `n_token`, which the stream must read again.

        Raises:
            ApiError: if `n_token` is before the oldest state, or beyond the stream's end.
        """
        now = self.state.n_token
        if not self.first <= n_token <= now:
            expected = f"this stream can be forked at {self.first} to {now} tokens"
            raise ApiError(400, f"at is {n_token}; {expected}", param="at")
        if n_token == now:
            return []
        while self.earlier[-1].n_token > n_token:
            self.earlier.pop()
        self.state, recent = self.earlier[-1], list(self.recent)
        start, end = (len(recent) - (now - place) for place in (self.state.n_token, n_token))
        lost = (entry.drawn for entry in recent[end:] if entry.drawn is not None)
        self.seed, self.drawn = next(lost, (self.seed, self.drawn))
        while len(self.recent) > start:
            self.totals.add(self.recent.pop(), -1)
        return recent[start:end]


class Operation:
    """A work whose events update a kept stream until the work ends, even if no client receives them.

    Args:
        stream: stream that no other operation uses at the same time.
        work: work to submit, with `keep` set.
        seed: seed of the drawn tokens; None: no token is drawn.
        again: tokens that `KeptStream.rewind` returned, which the work reads first.
    """

    def __init__(self, stream: KeptStream, work: Work, seed: int | None, again: Sequence[Entry] = ()):
        self.stream, self.work, self._seed, self._again = stream, work, seed, deque(again)
        self._n_drawn = work.continuations[0].drawn if work.continuations else 0
        self.read = Totals()  # of the tokens that this operation has read
        self.failure: FailedEvent | None = None
        self._queue: asyncio.Queue[list[Event] | None] = asyncio.Queue()
        self._is_read = True
        self._entries: list[Entry] = []
        stream.work = work
        self.task: asyncio.Task[None] | None = None

    def start(self, service: Service) -> None:
        """Submit the work, and start the task that processes its events.

        Raises:
            ApiError: if the queue is full, or the server is stopping.
        """
        decoder = service.texts.decoder_after(self.stream.tail)
        try:
            service.scheduler.submit([self.work])
        except ApiError:
            self.stream.work = None
            raise
        self.task = asyncio.create_task(self._follow(decoder))

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Yield the work's events; if the caller stops iterating, the work is cancelled."""
        try:
            while (batch := await self._queue.get()) is not None:
                yield batch
                self.work.outbox.sent(batch)
        finally:
            self._is_read = False
            self.work.cancelled = True

    async def _follow(self, decoder: Decoder) -> None:
        try:
            async for batch in self.work.outbox.batches():
                for event in batch:
                    self._add(event, decoder)
                if self._is_read:  # only the stream needs saved states
                    self._queue.put_nowait([event for event in batch if not isinstance(event, SavedEvent)])
        finally:
            self.stream.work, self.stream.used = None, time.monotonic()
            self._queue.put_nowait(None)

    def _add(self, event: Event, decoder: Decoder) -> None:
        if isinstance(event, ReadEvent):
            for token in event.tokens:
                token.piece = decoder.push(token.id)
                self._entries.append(_entry(token, self._again.popleft().drawn if self._again else None))
                self.read.add(self._entries[-1])
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
    """Return an id for a new stream, which cannot be guessed."""
    return f"stream-{secrets.token_hex(16)}"


def snapshot(stream: KeptStream, service: Service) -> bytes:
    """Return a safetensors file with everything that is needed to continue a stream."""
    state = stream.state
    tensors: dict[str, Tensor] = {}
    for kind, layers in (("keys", state.keys), ("values", state.values)):
        tensors |= {f"{kind}.{layer}": tensor.detach().cpu().contiguous() for layer, tensor in enumerate(layers)}
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
    """Return the stream that a snapshot holds.

    Args:
        data: content of the snapshot's file.
        service: service that will continue the stream.
        name: id of the stream.

    Raises:
        ApiError: with the reason, if `data` is not a snapshot, is damaged, or has another model or other settings.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        if size > _HEADER:
            raise ValueError
        about = parsed_json(parsed_json(data[8 : 8 + size].decode())["__metadata__"]["txl_stream"])
        tensors = safetensors.torch.load(data)
        if about["format"] != _FORMAT or not isinstance(about["tail"], list):
            raise ValueError
    except (ValueError, KeyError, TypeError, SafetensorError):
        raise ApiError(400, "not a snapshot of a stream that this version reads", code="bad_snapshot") from None
    for name_of_setting, ours in service.identity.items():
        theirs = about.get(name_of_setting)
        if theirs != ours:
            is_model = name_of_setting == "model"
            what = "of another model" if is_model else f"of a stream with {name_of_setting} {brief(theirs)}"
            here = f"{ours[:12]}..." if is_model else ours
            message = f"the snapshot is {what}; this server has {name_of_setting} {here}, the snapshot {brief(theirs)}"
            raise ApiError(409, message, code="mismatch")
    try:
        if about.pop("sha256", None) != _digest(about, tensors):
            raise ValueError("its content does not match its hash")
        state = _state_of(about, tensors, service)
        stream = KeptStream(
            name,
            state,
            int(about["seed"]),
            int(about["drawn"]),
            Totals(int(about["scored"]), float.fromhex(about["bits"]), int(about["characters"])),
            deque([state]),
            deque(Entry(int(token), None, 0) for token in about["tail"][-TAIL:]),
            created=float(about["created"]),
        )
        if not all(0 <= token < len(service.texts.vocabulary) for token in (*stream.tail, state.waiting)):
            raise ValueError("a token is outside of the vocabulary")
        counts = stream.drawn, stream.totals.scored, stream.totals.characters
        if not (
            0 <= stream.seed < 2**63
            and all(0 <= count < _MOST for count in counts)
            and math.isfinite(stream.totals.bits)
            and abs(stream.created) < _MOST  # excludes NaN too
        ):
            raise ValueError("a number is out of range")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ApiError(400, f"the snapshot is damaged: {error}", code="bad_snapshot") from None
    return stream


def _state_of(about: JsonObject, tensors: dict[str, Tensor], service: Service) -> StreamState:
    n_layer, n_token = len(service.empty.keys), int(about["n_token"])
    if not 0 <= n_token < _MOST or len(tensors) != 2 * n_layer:
        raise ValueError("its tensors are not those of this model")
    length = min(max(n_token - 1, 0), service.memory)  # the last token has not been read yet
    kinds = []
    for kind, like in (("keys", service.empty.keys), ("values", service.empty.values)):
        layers = tuple(tensors[f"{kind}.{layer}"] for layer in range(n_layer))
        for tensor, empty in zip(layers, like, strict=True):
            if tensor.shape != (empty.shape[0], length, empty.shape[2]) or tensor.dtype != empty.dtype:
                raise ValueError("its tensors have other shapes")
            if not (tensor.abs() <= _LARGEST).all():  # false for NaN too
                raise ValueError(f"its keys and values are not numbers up to {_LARGEST:g}, which no model computes")
        kinds.append(tuple(tensor.to(like[0].device) for tensor in layers))
    return StreamState(n_token, int(about["waiting"]), *kinds)


def _digest(about: JsonObject, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
