"""All streams that a service keeps between requests, and the folder that saves them across restarts."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import portalocker
from portalocker import LockFlags

from txl.errors import UserError
from txl.files import reason_of, refuse_file, replacing
from txl.serving.kept_stream import KeptStream, new_id, restored, snapshot
from txl.serving.requests import ApiError
from txl.serving.service import Service

_WRITE_EVERY = 10.0  # seconds between two writes of changed streams to the folder
_FILE = re.compile(r"stream-[0-9a-f]{32}\.safetensors")
_logger = logging.getLogger(__name__)


class KeptStreams:
    """All kept streams of a service.

    Args:
        service: service whose model the streams belong to.
        folder: folder that saves the streams across restarts; None: streams are not saved.

    Raises:
        UserError: if the folder cannot be used.
    """

    def __init__(self, service: Service, folder: Path | None = None):
        self.service, self._folder = service, folder
        self._streams: dict[str, KeptStream] = {}
        self._lock: TextIO | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._stops = asyncio.Event()
        if folder is not None:
            self._open(folder)

    def __iter__(self):
        return iter(self._streams.values())

    def __len__(self) -> int:
        return len(self._streams)

    def get(self, name: str) -> KeptStream:
        """Return the stream with an id, and mark it as used now (ApiError if no stream has this id)."""
        stream = self._streams.get(name)
        if stream is None:
            raise ApiError(404, "no such stream; it was deleted, or nobody used it for too long", code="no_such_stream")
        stream.used = time.monotonic()
        return stream

    def free(self, name: str) -> KeptStream:
        """Return the stream with an id (ApiError if there is none, or another request is using it)."""
        stream = self.get(name)
        if stream.work is not None:
            raise ApiError(409, "the stream is busy with another request", code="busy", headers={"Retry-After": "1"})
        return stream

    def check_room(self) -> None:
        """Refuse another stream (ApiError) if `Limits.max_kept` are kept; tell when one may have expired."""
        limits = self.service.limits
        if len(self._streams) >= limits.max_kept:
            idle = time.monotonic() - min(stream.used for stream in self)
            wait = max(1, math.ceil(limits.idle_seconds - idle))
            message = f"{limits.max_kept} streams are kept already; delete one, or wait until one has been idle for "
            message += f"{limits.idle_seconds:g} seconds"
            raise ApiError(429, message, code="too_many_streams", headers={"Retry-After": str(min(wait, 3600))})

    def add(self, stream: KeptStream) -> KeptStream:
        """Add a stream, and return it."""
        self._streams[stream.id] = stream
        self._count()
        return stream

    def new(self, seed: int) -> KeptStream:
        """Add and return a stream without tokens (ApiError if no more can be kept)."""
        self.check_room()
        empty = self.service.empty
        return self.add(KeptStream(new_id(), empty, seed, earlier=deque([empty])))

    def fork(self, stream: KeptStream) -> KeptStream:
        """Add and return a second stream that has read the same tokens (ApiError if no more can be kept)."""
        self.check_room()
        twin = stream.copy()
        return self.add(KeptStream(new_id(), twin.state, twin.seed, twin.drawn, twin.totals, twin.earlier, twin.recent))

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
        if self._folder is not None:
            for stream in [stream for stream in self if stream.changed]:
                stream.changed = False
                self._write(stream, stream)
        if self._lock is not None:
            self._lock.close()

    async def _sweep(self) -> None:
        written = time.monotonic()
        while not self._stops.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stops.wait(), min(1.0, self.service.limits.idle_seconds / 4))
            # In methods of their own, whose variables do not hold a deleted stream's state until the next round.
            now = time.monotonic()
            self._delete_idle(now)
            if self._folder is not None and now - written > _WRITE_EVERY:
                await self._write_changed()
                written = time.monotonic()
            self._count()

    def _delete_idle(self, now: float) -> None:
        for stream in [stream for stream in self if stream.work is None]:
            if now - stream.used > self.service.limits.idle_seconds:
                self.delete(stream)

    async def _write_changed(self) -> None:
        for stream in [stream for stream in self if stream.changed]:  # busy ones too: their state is a value
            stream.changed = False
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
        if self._folder is None:
            return
        try:
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
        except portalocker.AlreadyLocked:
            raise _unusable(folder, "another server keeps its streams there") from None
        except (OSError, portalocker.LockException) as error:
            raise _unusable(folder, f"cannot be used ({reason_of(error)})") from None
        for partial in list(folder.glob("stream-*.partial")):  # no other process writes here while the lock is held
            with suppress(OSError):
                partial.unlink()
        for path in sorted(path for path in folder.iterdir() if _FILE.fullmatch(path.name)):
            if len(self) == self.service.limits.max_kept:
                _logger.warning("%s was not loaded: %d streams are kept at most (max_kept)", path, len(self))
                continue
            try:
                stream = restored(path.read_bytes(), self.service, path.stem)
            except (ApiError, OSError) as error:
                reason = error.message if isinstance(error, ApiError) else error.strerror
                _logger.warning("%s was not loaded: %s", path, reason)
                continue
            stream.changed = False
            self.add(stream)


def _unusable(folder: Path, problem: str) -> UserError:
    return UserError(problem, field="streams", value=folder, remedy="give another folder")
