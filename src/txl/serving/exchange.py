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
_LEAST = -9999.0  # reported for the logarithm of 0, which JSON cannot represent
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
    """Return a prompt of a request, given as a string or as token ids.

    Raises:
        ApiError: if the value is neither, is empty or too long, or is not in the vocabulary.
    """
    if isinstance(value, str) and value:
        prompt = Prompt(await encoded(request, value, name), value, value)
        if prompt.ids.numel() == 0:
            raise ApiError(400, f"{name} has no tokens; expected at least one", param=name)
        return prompt
    if isinstance(value, list) and value:
        return Prompt(await checked_ids(request, value, name), None)
    what = "is empty" if value in ("", []) else "is missing" if value is None else "has the wrong type"
    raise ApiError(400, f"{name} {what}; expected text, or a list of token ids, at least one", param=name)


async def encoded(request: Request, text: str, name: str) -> Tensor:
    """Return the token ids of a text of a request, int64 [n]. Long texts are encoded one after the other.

    Raises:
        ApiError: for a text that is too long, or cannot be encoded, or if the client disconnects first.
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
    """Return token ids of a request as int64 [n].

    Raises:
        ApiError: if the list is too long, or has something that is no id of the vocabulary.
    """
    service: Service = request.app.state.service
    _refuse_long(len(value), service.limits.max_prompt, name)

    def check() -> Tensor:
        ids = [token for token in value if type(token) is int]
        if len(ids) < len(value):
            raise ApiError(400, f"{name} has the wrong type; expected a list of token ids", param=name)
        return of_user(lambda: service.texts.checked(ids, name), name)

    return await beside(len(value), check)


async def locate(prompt: Prompt, service: Service, shown: bool, located: bool) -> None:
    """Set the text that `echo` shows, and with `located` the text and place of each token."""
    texts, text = service.texts, prompt.text
    if located and text is not None:
        prompt.parts = await beside(len(text), lambda: texts.located(text, prompt.ids))
    elif text is None and (shown or located):
        ids = prompt.ids.tolist()
        prompt.shown, prompt.parts = await beside(len(ids), lambda: texts.placed(ids))


def _refuse_long(n_token: int, most: int, name: str) -> None:
    if n_token > most:
        raise ApiError(400, f"{name} has {n_token:,} tokens; at most {most:,} are read", param=name)


async def beside(size: int, make: Callable[[], T]) -> T:
    """Return the result of `make`, computed in a thread if `size` is so large that it may take long."""
    if size >= _IN_THREAD:
        return await asyncio.to_thread(make)
    await asyncio.sleep(0)  # the turn of other requests: a request may have many small texts
    return make()


def finite(log_prob: float) -> float:
    """Return a log-probability, with minus infinity replaced by a number that JSON can represent."""
    return max(log_prob, _LEAST)


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
            yield {"data": dumps(ApiError(500, "the server failed to answer; its log says why").value())}
        finally:
            for work in works:
                work.cancelled = True

    grace = service.grace + 5
    return EventSourceResponse(
        data(), status, ping=15, sep="\n", shutdown_event=service.farewell(), shutdown_grace_period=grace
    )


async def while_connected(request: Request, waiting: Awaitable[T], works: Sequence[Work]) -> T:
    """Return the result of `waiting`; cancel the works if the client disconnects first.

    Raises:
        ApiError: as `waiting` does, or if the client has disconnected.
    """
    task = asyncio.ensure_future(waiting)
    departure = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, departure}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has left")
        return task.result()
    finally:
        for work in works:
            work.cancelled = True
        for future in (task, departure):
            if not future.done():
                future.cancel()
                with suppress(asyncio.CancelledError):
                    await future


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
