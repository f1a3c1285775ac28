"""Parts that all routes share: reading of prompts, and answers that stop when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from txl.serving.requests import ApiError, dumps, of_user
from txl.serving.service import Service
from txl.serving.work import ScoredToken, Work

_logger = logging.getLogger(__name__)

_IN_THREAD = 1 << 12  # characters or tokens from which work is done in a thread beside the event loop
_LONG = 1 << 18  # characters from which texts are encoded one by one, to leave threads and processors to shorter ones
FAILED = "the server failed to answer; its log says why"
T = TypeVar("T")


@dataclass
class Prompt:
    """One prompt of a request."""

    ids: Tensor
    text: str | None  # None if the request has token ids
    shown: str = ""  # text that `echo` shows
    parts: list[tuple[bytes, int]] = field(default_factory=list)  # each token's bytes, and where its characters begin
    scored: list[ScoredToken] = field(default_factory=list)


async def read_prompt(request: Request, value: object, name: str) -> Prompt:
    """Return a prompt given as a string or as token ids (ApiError if it is neither, empty, too long, or unknown)."""
    if isinstance(value, str) and value:
        prompt = Prompt(await encoded(request, value, name), value, value)
        if prompt.ids.numel() == 0:
            raise ApiError(400, f"{name} has no tokens; expected at least one", param=name)
        return prompt
    if isinstance(value, list) and value:
        return Prompt(await checked_ids(request, value, name), None)
    raise ApiError(400, f"{name}: expected text, or a list of token ids, at least one", param=name)


async def encoded(request: Request, text: str, name: str) -> Tensor:
    """Return the token ids of a text, int64 [n] (ApiError if it is too long, cannot be encoded, or the client leaves).

    Long texts are encoded one after the other.
    """
    service: Service = request.app.state.service
    texts, most = service.texts, service.limits.max_prompt
    await beside(len(text), lambda: of_user(lambda: texts.refuse_long(text, most), name))

    def encode() -> Tensor:
        return of_user(lambda: texts.encode(text), name)

    if len(text) < _LONG:
        ids = await beside(len(text), encode)
    else:
        encoding = asyncio.get_running_loop().run_in_executor(service.encoder, encode)
        ids = await while_connected(request, encoding, ())
    _refuse_long(ids.numel(), most, name)
    return ids


async def checked_ids(request: Request, value: Sequence[object], name: str) -> Tensor:
    """Return token ids of a request as int64 [n] (ApiError if they are too many, or are no ids of the vocabulary)."""
    service: Service = request.app.state.service
    _refuse_long(len(value), service.limits.max_prompt, name)

    def check() -> Tensor:
        ids = [token for token in value if type(token) is int]
        if len(ids) < len(value):
            raise ApiError(400, f"{name} has the wrong type; expected a list of token ids", param=name)
        return of_user(lambda: service.texts.checked(ids, name), name)

    return await beside(len(value), check)


def _refuse_long(n_token: int, most: int, name: str) -> None:
    if n_token > most:
        raise ApiError(400, f"{name} has {n_token:,} tokens; at most {most:,} are read", param=name)


async def beside(size: int, make: Callable[[], T]) -> T:
    """Return the result of `make`, computed in a thread if `size` is so large that it may take long."""
    if size >= _IN_THREAD:
        return await asyncio.to_thread(make)
    await asyncio.sleep(0)  # the turn of other requests: a request may have many small texts
    return make()


def finite(log_prob: float | None) -> float | None:
    """Return a log-probability for JSON, which cannot represent minus infinity; None stays None."""
    return None if log_prob is None else max(log_prob, -9999.0)


def event_stream(events: AsyncIterator[str], works: Sequence[Work], service: Service, status: int = 200) -> Response:
    """Return a response of events in JSON, ended by `[DONE]`; cancel the works when the client disconnects."""

    async def data() -> AsyncIterator[dict[str, str]]:
        try:
            async for event in events:
                yield {"data": event}
            yield {"data": "[DONE]"}
        except ApiError as error:
            yield {"data": dumps(error.value())}
        except Exception:
            _logger.exception("an event stream failed")
            yield {"data": dumps(ApiError(500, FAILED).value())}
        finally:
            for work in works:
                work.cancelled = True

    grace = service.grace + 5
    return EventSourceResponse(
        data(), status, ping=15, sep="\n", shutdown_event=service.farewell, shutdown_grace_period=grace
    )


async def while_connected(request: Request, waiting: Awaitable[T], works: Sequence[Work]) -> T:
    """Return the result of `waiting`; cancel the works if the client disconnects first (ApiError)."""

    async def departure() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.ensure_future(waiting), asyncio.ensure_future(departure())
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has left")
        return task.result()
    finally:
        for work in works:
            work.cancelled = True
        for future in (task, left):
            future.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await future
