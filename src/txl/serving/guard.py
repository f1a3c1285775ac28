"""Checks of every request before a route sees it: key, Host, Origin, content type and size.

A page of another site that is open in the user's browser can send requests to localhost. The page cannot forge `Host`
or `Origin`, so both are checked. A POST must be JSON or a snapshot: before a page sends these types to another origin,
the browser must ask the server for permission.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import time
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

from txl.allocator import return_freed_memory
from txl.serving.metrics import Metrics
from txl.serving.requests import ApiError, Limits

_logger = logging.getLogger(__name__)
_OPEN = ("/", "/health")
_STATIC = "/static/"
_AGAIN = {"Retry-After": "1"}
_SMALL = 1 << 16
"""Size in bytes up to which a body is accepted even if too many large ones are held."""
_PAUSE = 1.0
"""Seconds after a large request until memory is returned to the system."""
_READ_AT_ONCE = 1 << 13
"""Bytes read from a connection before the other connections' turn; in chunks of one byte, they take about 20 ms."""
_LEAST_TAKEN = 1 << 16
"""Bytes of an answer that a client must receive within `Limits.write_seconds`."""
_DRAINED = 4
"""Multiple of the size limit up to which a body is read; during a longer body, the connection is closed."""


@dataclass(frozen=True)
class Access:
    """API key, host names and origins with which the server may be used."""

    api_key: str | None = None
    hosts: tuple[str, ...] = ()
    """Host names by which the server may be addressed, besides localhost and IP addresses."""
    origins: tuple[str, ...] = ()
    """Other origins whose pages may send requests."""


class Guard:
    """An ASGI application that checks requests, and passes the permitted requests on to another application."""

    def __init__(self, app: Starlette, access: Access, limits: Limits, max_snapshot: int, metrics: Metrics):
        self.app, self._access, self._limits, self._metrics = app, access, limits, metrics
        self._max_snapshot = max_snapshot
        self._key = None if access.api_key is None else _digest(access.api_key)
        self._active = 0
        self._held: dict[int, int] = {}
        """Bytes of the bodies that are in memory, without the first `_SMALL` of each, by request."""
        self._returning: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin")

        async def sends(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *self._added(origin)]}
            await send(message)

        self._active += 1
        try:
            if self._active > self._limits.max_requests:
                raise ApiError(503, "too many requests at the same time; try again", headers=_AGAIN)
            self._check_host(headers.get("host"))
            self._check_origin(origin, headers.get("host"))
            if scope["method"] == "OPTIONS" and origin in self._access.origins:
                asked = headers.get("access-control-request-headers", "authorization, content-type")
                allowed = [(b"access-control-allow-headers", asked.encode("latin-1"))]
                await sends({"type": "http.response.start", "status": 204, "headers": allowed})
                await sends({"type": "http.response.body", "body": b""})
                return
            self._check_key(scope["path"], headers.get("authorization"))
            body = await self._body(scope, headers, receive)
            await self.app(scope, _replayed(body, receive), sends)
        except ApiError as error:
            await error.response()(scope, receive, sends)
        finally:
            self._active -= 1
            if self._held.pop(id(scope), None) is not None and (self._returning is None or self._returning.done()):
                self._returning = asyncio.create_task(_return_memory())
            route = getattr(scope.get("route"), "path", None) or "other"
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.request_seconds.labels(route).observe(time.perf_counter() - began)

    def _check_host(self, host: str | None) -> None:
        name = _split(f"//{host}").hostname if host and not set(host) & set("/@?#\\ ") else None
        if name is None or not (name == "localhost" or _is_address(name) or name in self._access.hosts):
            raise ApiError(
                403,
                "this Host is not served here; start the server with --allow-host NAME to allow it",
                code="bad_host",
            )

    def _check_origin(self, origin: str | None, host: str | None) -> None:
        if origin is None or origin in self._access.origins:
            return
        if _split(origin).netloc.lower() != (host or "").lower() or origin == "null":
            raise ApiError(
                403,
                "pages of another origin may not ask here; start the server with --allow-origin ORIGIN to allow it",
                code="bad_origin",
            )

    def _check_key(self, path: str, authorization: str | None) -> None:
        if self._key is None or path in _OPEN or path.startswith(_STATIC):
            return
        scheme, _, given = (authorization or "").partition(" ")
        if not (hmac.compare_digest(_digest(given.strip()), self._key) and scheme.lower() == "bearer"):
            raise ApiError(
                401,
                "a valid key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, scope: Scope, headers: dict[str, str], receive: Receive) -> bytes:
        """Return the whole body, after checking its type, its size and the time of its arrival."""
        length = headers.get("content-length", "")
        has_body = length not in ("", "0") or "transfer-encoding" in headers
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            if has_body:
                raise ApiError(
                    400, f"{scope['method']} has no body here; leave it out", headers={"Connection": "close"}
                )
            return b""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        is_snapshot = kind == "application/octet-stream" and scope["path"] == "/v1/streams"
        if kind != "application/json" and not is_snapshot:
            raise ApiError(
                415,
                f"Content-Type is {kind[:80] or 'missing'}; expected application/json"
                + (", or application/octet-stream for a snapshot" if scope["path"] == "/v1/streams" else ""),
                headers={"Connection": "close"} if has_body else None,
            )
        limit = self._max_snapshot if is_snapshot else self._limits.max_body
        seconds = self._limits.body_seconds * max(1, round(limit / self._limits.max_body))
        parts, size, full = [], 0, False
        try:
            async with asyncio.timeout(seconds):
                more = True
                while more and size <= _DRAINED * limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(499, "the client has left")
                    more, part = message.get("more_body", False), message.get("body", b"")
                    size += len(part)
                    full = full or not self._has_room(id(scope), size)
                    if size <= limit and not full:
                        parts.append(part)
                    else:  # read on, up to `_DRAINED`: a client that is still sending would not see the answer
                        parts.clear()
                        self._held[id(scope)] = 0
        except TimeoutError:
            raise ApiError(
                408,
                f"the request body did not arrive within {seconds:g} seconds",
                headers={"Connection": "close"},
            ) from None
        if size > limit:
            raise ApiError(
                413,
                f"the body has more than {limit:,} bytes",
                code="too_large",
                headers={"Connection": "close"} if more else None,
            )
        if full:
            raise ApiError(503, "too many large requests at the same time; try again", headers=_AGAIN)
        return b"".join(parts)

    def _has_room(self, request: int, size: int) -> bool:
        """Count the first `size` bytes of a body as held; return False if too many bytes of bodies are held then."""
        if size > _SMALL:
            self._held[request] = size - _SMALL
        return size <= _SMALL or sum(self._held.values()) <= max(self._limits.max_bodies, self._max_snapshot)

    def _added(self, origin: str | None) -> list[tuple[bytes, bytes]]:
        """Return the headers that are added to every answer."""
        added = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
        if origin is not None and origin in self._access.origins:
            added += [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-allow-methods", b"GET, POST, DELETE"),
                (b"access-control-expose-headers", b"*"),
                (b"access-control-max-age", b"600"),
                (b"vary", b"Origin, Access-Control-Request-Headers"),
            ]
        return added


async def _return_memory() -> None:
    """Return freed memory to the system, once for all large requests that end within `_PAUSE`."""
    await asyncio.sleep(_PAUSE)
    await asyncio.to_thread(return_freed_memory)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns the body read here, and then the next message: the client's disconnect."""
    sent = False

    async def received() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return received


def _digest(text: str) -> bytes:
    """Return a hash of a key; comparing hashes takes the same time for keys of all lengths."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogateescape")).digest()


def _split(address: str) -> SplitResult:
    """Return the parts of an address; empty parts for an invalid address."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def patient_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """Return a subclass of uvicorn's HTTP protocol that does not wait for a client forever.

    A connection is aborted if no complete request head arrives within `body_seconds`, or if the client does not receive
    the data sent to it within `write_seconds`.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class PatientProtocol(H11Protocol):
        _silent: asyncio.TimerHandle | None = None
        _stuck: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if hasattr(transport, "max_size"):  # an attribute of asyncio's own transports, not of uvloop's
                transport.max_size = _READ_AT_ONCE  # pyright: ignore[reportAttributeAccessIssue]
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop("_silent")
            self._stop("_stuck")
            super().connection_lost(exc)

        def handle_events(self) -> None:
            super().handle_events()
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop("_silent")
                if not self.flow.write_paused:
                    self._stop("_stuck")  # a new answer adds data

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle is None or self.cycle.response_complete:
                self._expect_head()
                # Even a closed transport waits until the client has received all data.
                self._stop("_stuck")
                self._watch_writing()

        def pause_writing(self) -> None:
            self.flow.pause_writing()
            self._stop("_stuck")
            self._watch_writing()

        def resume_writing(self) -> None:
            self._stop("_stuck")
            self.flow.resume_writing()
            if self.cycle is None or self.cycle.response_complete:
                self._watch_writing()  # the rest of the answer

        def _watch_writing(self) -> None:
            """Abort the connection if its client does not receive its data; call this only while no data is added."""
            left = self.transport.get_write_buffer_size()
            if left:
                self._stuck = self.loop.call_later(limits.write_seconds, self._check_stuck, left)

        def _check_stuck(self, before: int) -> None:
            self._stuck = None
            left = self.transport.get_write_buffer_size()
            if left and before - left < _LEAST_TAKEN:
                self.transport.abort()
            else:
                self._watch_writing()

        def _expect_head(self) -> None:
            self._stop("_silent")
            self._silent = self.loop.call_later(limits.body_seconds, self._close_silent)

        def _close_silent(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                return
            if self.transport.get_write_buffer_size():
                self._expect_head()  # the client is still receiving the last answer
            else:
                self.transport.abort()

        def _stop(self, name: str) -> None:
            timer = getattr(self, name)
            if timer is not None:
                timer.cancel()
                setattr(self, name, None)

    return PatientProtocol
