"""Streams that are kept between requests, in constant memory, and their snapshots.

A kept stream is the state behind its last token, and one or two states from before, to which a fork can go back. A
snapshot is a safetensors file: keys and values of every layer, and what they belong to.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import portalocker
import safetensors.torch
import torch
from portalocker import LockFlags
from safetensors import SafetensorError
from torch import Tensor

from txl.errors import UserError
from txl.files import replacing
from txl.generation.engine import StreamState
from txl.serving.requests import ApiError
from txl.serving.scheduler import (
    CHECKPOINT_EVERY,
    DrawnEvent,
    Event,
    FailedEvent,
    ReadEvent,
    SavedEvent,
    ScoredToken,
    Work,
)
from txl.serving.service import Service

_FORMAT = 1
_TAIL = 8
"""Last tokens that a snapshot holds, from which a decoder knows where it is."""
_STATES = 2
"""States from before that a stream keeps."""
_WRITE_EVERY = 10.0
"""Seconds between two times at which changed streams are written."""
_FILE = re.compile(r"stream-[0-9a-f]{32}\.safetensors")
_LN2 = math.log(2)
_logger = logging.getLogger(__name__)


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
    """Tokens behind the oldest of them."""
    tail: tuple[int, ...] = ()
    """The last few tokens."""
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)
    changed: bool = True
    """True if its file, where streams are kept in a folder, is not up to date."""
    work: Work | None = None
    """The work that is being done with it now."""

    @property
    def first(self) -> int:
        """Least number of tokens that a fork can go back to."""
        return self.earlier[0].n_token if self.earlier else self.state.n_token

    @property
    def nbytes(self) -> int:
        """Bytes of its states; states that forks share count for each."""
        states = {id(each): each for each in (*self.earlier, self.state)}
        return sum(each.nbytes for each in states.values())

    def go_on(self, entries: list[Entry], state: StreamState) -> None:
        """Take in tokens, and the state behind them."""
        for entry in entries:
            self.recent.append(entry)
            self.totals.add(entry)
        self.tail = (*self.tail, *(entry.id for entry in entries[-_TAIL:]))[-_TAIL:]
        self.state, self.changed, self.used = state, True, time.monotonic()
        if not self.earlier or state.n_token - self.earlier[-1].n_token >= CHECKPOINT_EVERY:
            self.earlier.append(state)
        while len(self.earlier) > _STATES:
            self.earlier.popleft()
        while len(self.recent) > state.n_token - self.first:
            self.recent.popleft()


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
        self._decoder: Any = None
        stream.work = work
        self.task: asyncio.Task[None] | None = None

    def start(self, service: Service) -> None:
        """Submit the work and follow it.

        Raises:
            ApiError: if the queue is full.
        """
        self._decoder = service.texts.decoder_after(self.stream.tail)
        try:
            service.submit([self.work])
        except ApiError:
            self.stream.work = None
            raise
        self.task = asyncio.create_task(self._follow())

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Yield what comes; who stops listening ends the work."""
        try:
            while (batch := await self._queue.get()) is not None:
                yield batch
        finally:
            self._listens = False
            self.work.cancelled = True

    async def _follow(self) -> None:
        try:
            async for batch in self.work.outbox.batches():
                for event in batch:
                    self._take_in(event)
                if self._listens:
                    self._queue.put_nowait(batch)
        finally:
            self.stream.work, self.stream.used = None, time.monotonic()
            self._queue.put_nowait(None)

    def _take_in(self, event: Event) -> None:
        if isinstance(event, ReadEvent):
            for token in event.tokens:
                token.piece = self._decoder.push(token.id)
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


class KeptStreams:
    """All kept streams of a service.

    Args:
        service: whose model they belong to.
        folder: where they are kept over a restart; None: nowhere.

    Raises:
        UserError: if the folder cannot be used.
    """

    def __init__(self, service: Service, folder: Path | None = None):
        self.service, self._folder = service, folder
        self._streams: dict[str, KeptStream] = {}
        self._lock: Any = None
        self._swept: asyncio.Task[None] | None = None
        if folder is not None:
            self._open(folder)

    def __iter__(self):
        return iter(self._streams.values())

    def __len__(self) -> int:
        return len(self._streams)

    def get(self, name: str) -> KeptStream:
        """Return the stream of this id.

        Raises:
            ApiError: if there is none.
        """
        stream = self._streams.get(name)
        if stream is None:
            raise ApiError(404, "no such stream; it was deleted, or nobody used it for too long", code="no_such_stream")
        stream.used = time.monotonic()
        return stream

    def free(self, name: str) -> KeptStream:
        """Return the stream of this id, if nothing is done with it now.

        Raises:
            ApiError: if there is none, or it is busy.
        """
        stream = self.get(name)
        if stream.work is not None:
            raise ApiError(409, "the stream is busy with another request", code="busy", headers={"Retry-After": "1"})
        return stream

    def check_room(self) -> None:
        """Refuse one more stream where there is no room.

        Raises:
            ApiError: with the time after which a stream may be gone.
        """
        limit = self.service.limits.max_kept
        if len(self._streams) >= limit:
            idle = time.monotonic() - min(stream.used for stream in self)
            wait = max(1, math.ceil(self.service.limits.idle_seconds - idle))
            raise ApiError(
                429,
                f"{limit} streams are kept already; delete one, or wait until one has been idle for "
                f"{self.service.limits.idle_seconds:g} seconds",
                code="too_many_streams",
                headers={"Retry-After": str(min(wait, 3600))},
            )

    def add(self, stream: KeptStream) -> KeptStream:
        """Keep a stream."""
        self._streams[stream.id] = stream
        self._count()
        return stream

    def new(self, seed: int) -> KeptStream:
        """Keep and return a stream that has read nothing.

        Raises:
            ApiError: if there is no room.
        """
        self.check_room()
        empty = self.service.empty
        return self.add(KeptStream(new_id(), empty, seed, earlier=deque([empty])))

    def fork(self, stream: KeptStream) -> KeptStream:
        """Keep and return a second stream that has read the same.

        Raises:
            ApiError: if there is no room.
        """
        self.check_room()
        return self.add(
            KeptStream(
                new_id(),
                stream.state,
                stream.seed,
                stream.drawn,
                Totals(stream.totals.scored, stream.totals.bits, stream.totals.characters),
                deque(stream.earlier),
                deque(stream.recent),
                stream.tail,
            )
        )

    def rewind(self, stream: KeptStream, n_token: int) -> list[Entry]:
        """Take a stream back to a saved state at or before `n_token` tokens.

        Its seed and count of drawn tokens are then those of `n_token`, so that the same text would be drawn again.

        Returns:
            The tokens that it has to read again from there.

        Raises:
            ApiError: if that is too far back, or ahead.
        """
        now = stream.state.n_token
        if not stream.first <= n_token <= now:
            raise ApiError(
                400, f"at is {n_token}; this stream can be forked at {stream.first} to {now} tokens", param="at"
            )
        if n_token == now:
            return []
        state = max((each for each in stream.earlier if each.n_token <= n_token), key=lambda each: each.n_token)
        recent = list(stream.recent)
        again = recent[state.n_token - stream.first : n_token - stream.first]
        lost = (entry.drawn for entry in recent[n_token - stream.first :] if entry.drawn is not None)
        stream.seed, stream.drawn = next(lost, (stream.seed, stream.drawn))
        while stream.state.n_token > state.n_token and len(stream.recent) > state.n_token - stream.first:
            stream.totals.add(stream.recent.pop(), -1)
        stream.state = state
        stream.earlier = deque(each for each in stream.earlier if each.n_token <= state.n_token)
        stream.tail = tuple(entry.id for entry in list(stream.recent)[-_TAIL:])
        return again

    def delete(self, stream: KeptStream) -> None:
        """Forget a stream; what is done with it ends."""
        if stream.work is not None:
            stream.work.cancelled = True
        self._streams.pop(stream.id, None)
        self._remove(stream)
        self._count()

    def start(self) -> None:
        """Begin to delete idle streams, and to write changed ones."""
        self._swept = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Write all streams, if they are kept in a folder."""
        if self._swept is not None:
            self._swept.cancel()
        for _ in range(100):  # the engine's thread has ended; what it sent last may still be on its way
            if all(stream.work is None for stream in self):
                break
            await asyncio.sleep(0.01)
        self._write_changed()
        if self._lock is not None:
            self._lock.close()

    async def _sweep(self) -> None:
        written = time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self.service.limits.idle_seconds / 4))
            now = time.monotonic()
            for stream in [each for each in self if each.work is None]:
                if now - stream.used > self.service.limits.idle_seconds:
                    self.delete(stream)
            if self._folder is not None and now - written > _WRITE_EVERY:
                for stream in [each for each in self if each.changed and each.work is None]:
                    data, stream.changed = snapshot(stream, self.service), False
                    await asyncio.to_thread(self._write, stream, data)
                    if stream.id not in self._streams:
                        self._remove(stream)
                written = time.monotonic()

    def _count(self) -> None:
        self.service.metrics.streams.set(len(self._streams))
        self.service.metrics.stream_bytes.set(sum(stream.nbytes for stream in self))

    def _path(self, stream: KeptStream) -> Path:
        assert self._folder is not None
        return self._folder / f"{stream.id}.safetensors"  # an id of ours: a request only names one that there is

    def _remove(self, stream: KeptStream) -> None:
        """Remove a stream's file, if it has one."""
        if self._folder is None:
            return
        try:
            self._path(stream).unlink(missing_ok=True)
        except OSError as error:
            _logger.error("%s: the file could not be removed (%s)", self._path(stream), error.strerror)

    def _write_changed(self) -> None:
        if self._folder is None:
            return
        for stream in self:
            if stream.changed:
                self._write(stream, snapshot(stream, self.service))
                stream.changed = False

    def _write(self, stream: KeptStream, data: bytes) -> None:
        try:
            with replacing(self._path(stream)) as temporary:
                temporary.write_bytes(data)
        except OSError as error:
            stream.changed = True
            _logger.error("%s: the stream could not be written (%s)", self._path(stream), error.strerror)

    def _open(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(folder / ".lock", "w")  # noqa: SIM115 (closed when the server stops)
            portalocker.lock(self._lock, LockFlags.EXCLUSIVE | LockFlags.NON_BLOCKING)
        except portalocker.AlreadyLocked:
            raise UserError(
                f"--streams {folder}: another server keeps its streams there; give another folder"
            ) from None
        except (OSError, portalocker.LockException) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"--streams {folder} cannot be used ({reason}); give another folder") from None
        for path in sorted(folder.iterdir()):
            if _FILE.fullmatch(path.name) and len(self) < self.service.limits.max_kept:
                try:
                    stream = restored(path.read_bytes(), self.service, path.stem)
                except (ApiError, OSError) as error:
                    reason = error.message if isinstance(error, ApiError) else error.strerror
                    _logger.warning("%s was left alone: %s", path, reason)
                    continue
                stream.changed = False
                self.add(stream)


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
            tail=tuple(int(each) for each in about["tail"])[-_TAIL:],
            created=float(about["created"]),
        )
        if not all(0 <= each < len(service.texts.vocabulary) for each in (*stream.tail, state.waiting)):
            raise ValueError("a token is outside of the vocabulary")
        if not (0 <= stream.seed < 2**63 and 0 <= stream.drawn < 2**63 and math.isfinite(stream.totals.bits)):
            raise ValueError("a number is out of range")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ApiError(400, f"the snapshot is damaged: {error}", code="bad_snapshot") from None
    return stream


def _state_of(about: dict[str, Any], tensors: dict[str, Tensor], service: Service) -> StreamState:
    n_layer, n_token = len(service.empty.keys), int(about["n_token"])
    if n_token < 0 or len(tensors) != 2 * n_layer:
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


def _digest(about: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
