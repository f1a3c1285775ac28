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
import time
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from txl.devices import return_freed_memory
from txl.serving.requests import ApiError, Limits, Metrics

STATIC = "/static/"
_AGAIN = {"Retry-After": "1"}
_CLOSE = {"Connection": "close"}
_SMALL = 1 << 16  # bytes of a body that is accepted even if too many large ones are held
_PAUSE = 1.0  # seconds after a large request until memory is returned to the system
_SENT_AT_ONCE = 1 << 16  # bytes of an answer that a client must receive within `Limits.write_seconds`
_DRAINED = 4  # multiple of the size limit up to which a body is read; within a longer one, the connection is closed


@dataclass(frozen=True)
class Access:
    """API key, host names and origins with which the server may be used."""

    api_key: str | None = None
    hosts: tuple[str, ...] = ()  # names by which the server may be addressed, besides localhost and IP addresses
    origins: tuple[str, ...] = ()  # other origins whose pages may send requests


class _Stuck(Exception):
    """A client that does not receive its answer."""


class Guard:
    """An ASGI application that checks requests, and passes the permitted requests on to another application."""

    def __init__(self, app: Starlette, access: Access, limits: Limits, max_snapshot: int, metrics: Metrics):
        self.app, self._access, self._limits, self._metrics = app, access, limits, metrics
        self._max_snapshot = max_snapshot
        # For pages of other origins that are permitted; outside of `_answer`, so that they can read its errors.
        self._shared = CORSMiddleware(
            self._answer,
            allow_origins=access.origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("*",),
        )
        self._active = 0
        self._held: dict[int, int] = {}  # bytes of the bodies in memory, without the first `_SMALL`, by request
        self._returning: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, path = time.perf_counter(), 500, scope["path"]

        async def sends(message: Message) -> None:
            """Send a message in parts, for each of which the client has `Limits.write_seconds`.

            Otherwise answers that nobody receives would fill the memory, and event streams hold places in the engine.
            """
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
                if path == "/" or path.startswith(STATIC):  # browsers ask at each use: a new version may change it
                    added.append((b"cache-control", b"no-cache"))
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            body, more = message.get("body", b""), message.get("more_body", False)
            for start in range(0, max(1, len(body)), _SENT_AT_ONCE):
                end = start + _SENT_AT_ONCE
                if message["type"] == "http.response.body":
                    message = {**message, "body": body[start:end], "more_body": more or end < len(body)}
                try:
                    async with asyncio.timeout(self._limits.write_seconds):
                        await send(message)
                except TimeoutError:
                    raise _Stuck from None

        self._active += 1
        try:
            headers = Headers(scope=scope)
            self._check_sender(headers.get("host", ""), headers.get("origin"))
            answer = self._shared if headers.get("origin") in self._access.origins else self._answer
            await answer(scope, receive, sends)
        except ApiError as error:
            await error.response()(scope, receive, sends)
        except _Stuck:
            pass  # uvicorn closes the connection, because the answer is incomplete
        finally:
            self._active -= 1
            if self._held.pop(id(scope), None) is not None and (self._returning is None or self._returning.done()):
                self._returning = asyncio.create_task(_return_memory())
            route = getattr(scope.get("route"), "path", None) or "other"
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.request_seconds.labels(route).observe(time.perf_counter() - began)

    def _check_sender(self, host: str, origin: str | None) -> None:
        """Refuse a request that is not addressed to this server, or comes from a page of another origin."""
        name = (_split(f"//{host}").hostname or "") if not set(host) & set("/@?#\\ ") else ""
        if name != "localhost" and name not in self._access.hosts:
            try:
                ipaddress.ip_address(name)
            except ValueError:
                message = "this Host is not served here; who runs the server can allow it (allow_host)"
                raise ApiError(403, message, code="bad_host") from None
        is_other = origin is not None and (origin == "null" or _split(origin).netloc.lower() != host.lower())
        if is_other and origin not in self._access.origins:
            message = "pages of another origin may not ask here; who runs the server can allow it (allow_origin)"
            raise ApiError(403, message, code="bad_origin")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._active > self._limits.max_requests:
                raise ApiError(503, "too many requests at the same time; try again", headers=_AGAIN)
            key, path = self._access.api_key, scope["path"]
            if key is not None and path not in ("/", "/health") and not path.startswith(STATIC):
                scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
                if not (hmac.compare_digest(_digest(given.strip()), _digest(key)) and scheme.lower() == "bearer"):
                    message, headers = (
                        "a valid key is needed: Authorization: Bearer KEY",
                        {"WWW-Authenticate": "Bearer"},
                    )
                    raise ApiError(401, message, code="invalid_api_key", headers=headers)
            messages: list[Message] = [{"type": "http.request", "body": await self._body(scope, receive)}]

            async def received() -> Message:  # the body, and then the next message: the client's disconnect
                return messages.pop() if messages else await receive()

            await self.app(scope, received, send)
        except ApiError as error:
            await error.response()(scope, receive, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Return the whole body, after checking its type, its size and the time of its arrival."""
        headers = Headers(scope=scope)
        has_body = headers.get("content-length", "0") not in ("", "0") or "transfer-encoding" in headers
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            if has_body:
                raise ApiError(400, f"{scope['method']} has no body here; leave it out", headers=_CLOSE)
            return b""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        is_snapshot = scope["path"] == "/v1/streams" and kind == "application/octet-stream"
        if kind != "application/json" and not is_snapshot:
            message = f"Content-Type is {kind[:80] or 'missing'}; expected application/json"
            raise ApiError(415, message, headers=_CLOSE if has_body else None)
        limit = self._max_snapshot if is_snapshot else self._limits.max_body
        seconds = self._limits.body_seconds * max(1, round(limit / self._limits.max_body))
        parts, size, is_full = [], 0, False
        try:
            async with asyncio.timeout(seconds):
                async for part in Request(scope, receive).stream():
                    size += len(part)
                    if size > _SMALL and not is_full:
                        self._held[id(scope)] = size - _SMALL
                        is_full = sum(self._held.values()) > max(self._limits.max_bodies, self._max_snapshot)
                    if size <= limit and not is_full:
                        parts.append(part)
                    else:  # read on, up to `_DRAINED`: a client that is still sending would not see the answer
                        parts.clear()
                        self._held[id(scope)] = 0
                    if size > _DRAINED * limit:
                        break
        except TimeoutError:
            message = f"the request body did not arrive within {seconds:g} seconds"
            raise ApiError(408, message, headers=_CLOSE) from None
        except ClientDisconnect:
            raise ApiError(499, "the client has left") from None
        if size > limit:
            ends = _CLOSE if size > _DRAINED * limit else None
            raise ApiError(413, f"the body has more than {limit:,} bytes", code="too_large", headers=ends)
        if is_full:
            raise ApiError(503, "too many large requests at the same time; try again", headers=_AGAIN)
        return b"".join(parts)


async def _return_memory() -> None:
    """Return freed memory to the system, once for all large requests that end within `_PAUSE`."""
    await asyncio.sleep(_PAUSE)
    await asyncio.to_thread(return_freed_memory)


def _digest(text: str) -> bytes:
    """Return a hash of a key; comparing hashes takes the same time for keys of all lengths."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogateescape")).digest()


def _split(address: str) -> SplitResult:
    """Return the parts of an address; empty parts for an invalid address."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")
