"""Streams that are kept between requests: their states, the operations on them, snapshots, and the folder of a server.

A kept stream holds the state after its last token, and one or two earlier states to which a fork can go back. A
snapshot is a safetensors file with the keys and values of every layer, and a description of model and stream.
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
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

import portalocker
import safetensors.torch
import torch
from portalocker import LockFlags
from safetensors import SafetensorError
from torch import Tensor

from txl.data.vocabulary import Decoder
from txl.errors import UserError, brief
from txl.files import JsonObject, parsed_json, reason_of, refuse_file, replacing
from txl.generation.engine import StreamState
from txl.serving.requests import ApiError
from txl.serving.service import Service
from txl.serving.texts import TAIL
from txl.serving.work import CHECKPOINT_EVERY, DrawnEvent, Event, FailedEvent, ReadEvent, SavedEvent, ScoredToken, Work

LN2 = math.log(2)
_FORMAT = 2
_STATES = 2  # states that a stream keeps for forks
_MOST = 2**62  # above the counts in a snapshot, so that no later count can overflow
_HEADER = 1 << 17  # bytes of a snapshot's header; that of a model with 100 layers has 20,000
_LARGEST = 1e15  # of keys and values in a snapshot: with larger ones, sums of squares in the model may overflow
_WRITE_EVERY = 10.0  # seconds between two writes of changed streams to the folder
_FILE = re.compile(r"stream-[0-9a-f]{32}\.safetensors")
_logger = logging.getLogger(__name__)


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
    id: str = field(default_factory=lambda: f"stream-{secrets.token_hex(16)}")  # cannot be guessed

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
        """Go back to a saved state at or before `n_token` tokens; return the tokens that are to be read again.

        Seed and count of drawn tokens become those at `n_token`, so that the stream would draw the same text again.
        """
        now = self.state.n_token
        if not self.first <= n_token <= now:
            raise ApiError(400, f"at is {n_token}; this stream can be forked at {self.first} to {now} tokens", "at")
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
    """A work, with `keep` set, whose events update a kept stream until the work ends, even if no client receives them.

    The stream is in no other operation. `seed` is that of the drawn tokens (None: none is drawn); `again` are tokens
    that `KeptStream.rewind` returned, which the work reads first.
    """

    def __init__(self, stream: KeptStream, work: Work, seed: int | None, again: Sequence[Entry] = ()):
        self.stream, self.work, self.seed, self._again = stream, work, seed, deque(again)
        self.read = Totals()  # of the tokens that this operation has read
        self.failure: FailedEvent | None = None
        self._queue: asyncio.Queue[list[Event] | None] = asyncio.Queue()
        self._is_read = True
        stream.work = work
        self._task: asyncio.Task[None] | None = None

    def start(self, service: Service) -> None:
        """Submit the work (ApiError if it is refused), and start the task that processes its events."""
        decoder = service.texts.decoder_after(self.stream.tail)
        try:
            service.scheduler.submit([self.work])
        except ApiError:
            self.stream.work = None
            raise
        self._task = asyncio.create_task(self._follow(decoder))

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
        n_drawn = self.work.continuations[0].drawn if self.work.continuations else 0
        entries: list[Entry] = []
        try:
            async for batch in self.work.outbox.batches():
                for event in batch:
                    if isinstance(event, ReadEvent):
                        for token in event.tokens:
                            token.piece = decoder.push(token.id)
                            entries.append(_entry(token, self._again.popleft().drawn if self._again else None))
                            self.read.add(entries[-1])
                    elif isinstance(event, DrawnEvent):
                        entries.append(_entry(event.token, None if self.seed is None else (self.seed, n_drawn)))
                        n_drawn += 1
                    elif isinstance(event, SavedEvent):
                        n_new = event.state.n_token - self.stream.state.n_token
                        self.stream.go_on(entries[:n_new], event.state)
                        del entries[:n_new]
                        if self.seed is not None:
                            self.stream.seed, self.stream.drawn = self.seed, event.drawn
                    elif isinstance(event, FailedEvent):
                        self.failure = event
                if self._is_read:  # only the stream needs saved states
                    self._queue.put_nowait([event for event in batch if not isinstance(event, SavedEvent)])
        finally:
            self.stream.work, self.stream.used = None, time.monotonic()
            self._queue.put_nowait(None)


def _entry(token: ScoredToken, drawn: tuple[int, int] | None) -> Entry:
    return Entry(token.id, None if token.log_prob is None else -token.log_prob / LN2, len(token.piece), drawn)


def _tensors(state: StreamState) -> dict[str, Tensor]:
    """Return keys, then values, by their names in a snapshot."""
    kinds = (("keys", state.keys), ("values", state.values))
    return {f"{kind}.{layer}": tensor for kind, layers in kinds for layer, tensor in enumerate(layers)}


def snapshot(stream: KeptStream, service: Service) -> bytes:
    """Return a safetensors file with everything that is needed to continue a stream."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _tensors(stream.state).items()}
    about = {
        "format": _FORMAT,
        **service.identity,
        "kernel": service.kernel,
        "n_token": stream.state.n_token,
        "waiting": stream.state.waiting,
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


def restored(data: bytes, service: Service) -> KeptStream:
    """Return the stream of a snapshot (ApiError if it is none, is damaged, or has another model or other settings)."""
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
    for name, ours in service.identity.items():
        if about.get(name) != ours:
            message = (
                f"the snapshot is of another model or other settings: {name} {brief(about.get(name))}, here {ours}"
            )
            raise ApiError(409, message, code="mismatch")
    try:
        if about.pop("sha256", None) != _digest(about, tensors):
            raise ValueError("its content does not match its hash")
        like, n_token = _tensors(service.empty), int(about["n_token"])
        length = min(max(n_token - 1, 0), service.memory)  # the last token has not been read yet
        if tensors.keys() != like.keys():
            raise ValueError("its tensors are not those of this model")
        for name, empty in like.items():
            if tensors[name].shape != (empty.shape[0], length, empty.shape[2]) or tensors[name].dtype != empty.dtype:
                raise ValueError("its tensors have other shapes")
            if not (tensors[name].abs() <= _LARGEST).all():  # false for NaN too
                raise ValueError(f"its keys and values are not numbers up to {_LARGEST:g}, which no model computes")
        held = tuple(tensors[name].to(empty.device) for name, empty in like.items())
        state = StreamState(n_token, int(about["waiting"]), held[: len(held) // 2], held[len(held) // 2 :])
        totals = Totals(int(about["scored"]), float.fromhex(about["bits"]), int(about["characters"]))
        recent = deque(Entry(int(token), None, 0) for token in about["tail"][-TAIL:])
        stream = KeptStream(state, int(about["seed"]), int(about["drawn"]), totals, deque([state]), recent)
        stream.created = float(about["created"])
        if not all(0 <= token < len(service.texts.vocabulary) for token in (*stream.tail, state.waiting)):
            raise ValueError("a token is outside of the vocabulary")
        counts = n_token, stream.drawn, totals.scored, totals.characters
        is_sane = all(0 <= count < _MOST for count in counts) and 0 <= stream.seed < 2 * _MOST
        if not (is_sane and math.isfinite(totals.bits) and abs(stream.created) < _MOST):  # false for NaN too
            raise ValueError("a number is out of range")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ApiError(400, f"the snapshot is damaged: {error}", code="bad_snapshot") from None
    return stream


def _digest(about: JsonObject, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class KeptStreams:
    """All kept streams of a service, saved across restarts if there is a folder (UserError if it cannot be used)."""

    def __init__(self, service: Service, folder: Path | None = None):
        self.service, self._folder = service, folder
        self._streams: dict[str, KeptStream] = {}
        self._lock: TextIO | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._stops = asyncio.Event()
        if folder is not None:
            self._open(folder)

    def __iter__(self) -> Iterator[KeptStream]:
        return iter(self._streams.values())

    def __len__(self) -> int:
        return len(self._streams)

    def get(self, name: str, free: bool = True) -> KeptStream:
        """Return the stream with an id, and mark it as used (ApiError if there is none, or `free` and it is in use)."""
        stream = self._streams.get(name)
        if stream is None:
            raise ApiError(404, "no such stream; it was deleted, or nobody used it for too long", code="no_such_stream")
        stream.used = time.monotonic()
        if free and stream.work is not None:
            raise ApiError(409, "the stream is busy with another request", code="busy", headers={"Retry-After": "1"})
        return stream

    def check_room(self) -> None:
        """Refuse another stream (ApiError) if `Limits.max_kept` are kept; tell when one may have expired."""
        limits = self.service.limits
        if len(self._streams) >= limits.max_kept:
            idle = time.monotonic() - min(stream.used for stream in self)
            wait = max(1, math.ceil(limits.idle_seconds - idle))
            message = f"{limits.max_kept} streams are kept already; delete one, or wait until one has expired"
            raise ApiError(429, message, code="too_many_streams", headers={"Retry-After": str(min(wait, 3600))})

    def add(self, stream: KeptStream) -> KeptStream:
        """Add a stream, and return it (ApiError if no more can be kept)."""
        self.check_room()
        self._streams[stream.id] = stream
        self._count()
        return stream

    def new(self, seed: int) -> KeptStream:
        """Add and return a stream without tokens (ApiError if no more can be kept)."""
        return self.add(KeptStream(self.service.empty, seed, earlier=deque([self.service.empty])))

    def fork(self, stream: KeptStream) -> KeptStream:
        """Add and return a second stream that has read the same tokens (ApiError if no more can be kept)."""
        twin = stream.copy()
        return self.add(KeptStream(twin.state, twin.seed, twin.drawn, twin.totals, twin.earlier, twin.recent))

    def delete(self, stream: KeptStream) -> None:
        """Delete a stream with its file, and cancel the work in progress on the stream."""
        stream.deleted = True
        if stream.work is not None:
            stream.work.cancelled = True
        self._streams.pop(stream.id, None)
        self._remove(stream)
        self._count()

    def start(self) -> None:
        """Start the task that deletes idle streams and writes changed streams."""
        self._sweeping = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """End the task, and write changed streams if there is a folder."""
        if self._sweeping is not None:  # two writers at once would damage a file
            self._stops.set()
            await asyncio.wait([self._sweeping])
        for _ in range(100):  # the engine's thread has ended, but its last events may not be processed yet
            if all(stream.work is None for stream in self):
                break
            await asyncio.sleep(0.01)
        await self._write_changed()
        if self._lock is not None:
            self._lock.close()

    async def _sweep(self) -> None:
        written = time.monotonic()
        while not self._stops.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stops.wait(), min(1.0, self.service.limits.idle_seconds / 4))
            # In methods of their own, whose variables do not hold a deleted stream's state until the next round.
            self._delete_idle()
            if time.monotonic() - written > _WRITE_EVERY:
                await self._write_changed()
                written = time.monotonic()
            self._count()

    def _delete_idle(self) -> None:
        for stream in [stream for stream in self if stream.work is None]:
            if time.monotonic() - stream.used > self.service.limits.idle_seconds:
                self.delete(stream)

    async def _write_changed(self) -> None:
        for stream in [stream for stream in self if stream.changed and self._folder is not None]:
            stream.changed = False  # a busy one's state is a value, too
            await asyncio.to_thread(self._write, stream, stream.copy())
            if stream.id not in self._streams:
                self._remove(stream)

    def _count(self) -> None:
        self.service.metrics.streams.set(len(self._streams))
        self.service.metrics.stream_bytes.set(sum(stream.nbytes for stream in self))

    def _path(self, stream: KeptStream) -> Path:
        assert self._folder is not None
        return self._folder / f"{stream.id}.safetensors"  # a safe name: requests can only name ids made here

    def _remove(self, stream: KeptStream) -> None:
        """Remove a stream's file, if the file exists."""
        try:
            if self._folder is not None:
                self._path(stream).unlink(missing_ok=True)
        except OSError as error:
            _logger.error("%s: the file could not be removed (%s)", self._path(stream), error.strerror)

    def _write(self, stream: KeptStream, as_it_was: KeptStream) -> None:
        """Write a stream's file from the copy `as_it_was`; if the write fails, mark the stream as changed again."""
        try:
            data = snapshot(as_it_was, self.service)
            with replacing(self._path(stream)) as temporary:
                temporary.write_bytes(data)
        except (OSError, RuntimeError) as error:  # a full disk, or no memory for a copy
            stream.changed = True
            _logger.error("%s: the stream could not be written (%s)", self._path(stream), reason_of(error))

    def _open(self, folder: Path) -> None:
        refuse_file(folder, "streams", "a folder")
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)  # the streams hold what clients read
            self._lock = open(folder / ".lock", "w")  # noqa: SIM115 (closed when the server stops)
            portalocker.lock(self._lock, LockFlags.EXCLUSIVE | LockFlags.NON_BLOCKING)
        except (OSError, portalocker.LockException) as error:
            is_taken = isinstance(error, portalocker.AlreadyLocked)
            problem = "another server keeps its streams there" if is_taken else f"cannot be used ({reason_of(error)})"
            raise UserError(problem, field="streams", value=folder, remedy="give another folder") from None
        for partial in list(folder.glob("stream-*.partial")):  # no other process writes here while the lock is held
            with suppress(OSError):
                partial.unlink()
        for path in sorted(path for path in folder.iterdir() if _FILE.fullmatch(path.name)):
            try:
                self.check_room()  # before a file is read
                stream = restored(path.read_bytes(), self.service)
                stream.id, stream.changed = path.stem, False
                self.add(stream)
            except (ApiError, OSError) as error:
                _logger.warning("%s was not loaded: %s", path, reason_of(error))
