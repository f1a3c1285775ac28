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

from txl.files import JsonObject
from txl.serving.requests import ApiError, dumps, of_user
from txl.serving.service import Service
from txl.serving.work import ScoredToken, Work

_logger = logging.getLogger(__name__)

_IN_THREAD = 1 << 14
"""Characters or tokens from which a text is encoded, or an answer is built, in a thread beside the event loop."""
_LEAST = -9999.0
"""Value reported for the logarithm of 0, which JSON cannot represent."""
T = TypeVar("T")


@dataclass
class Prompt:
    """One prompt of a request."""

    ids: Tensor
    text: str | None
    """Text of the request; None if the request has token ids."""
    shown: str = ""
    """Text that `echo` shows."""
    parts: list[tuple[bytes, int]] = field(default_factory=list)
    """Bytes of each token, and index of the character at which the token begins."""
    scored: list[ScoredToken] = field(default_factory=list)


async def read_prompt(value: object, service: Service, name: str, shown: bool, located: bool) -> Prompt:
    """Return the prompt of a request, given as a string or as token ids.

    Raises:
        ApiError: if the value is neither, is empty or too long, or is not in the vocabulary.
    """
    texts = service.texts
    if isinstance(value, str) and value:
        ids = await beside(len(value), lambda: of_user(lambda: texts.encode(value), name))
        prompt = Prompt(ids, value, value)
        if ids.numel() == 0:
            raise ApiError(400, f"{name} has no tokens; expected at least one", param=name)
    elif isinstance(value, list) and value and all(type(each) is int for each in value):
        _refuse_long(len(value), service, name)
        prompt = Prompt(of_user(lambda: texts.checked(value, name), name), None)
    else:
        what = "is empty" if value in ("", []) else "is missing" if value is None else "has the wrong type"
        raise ApiError(400, f"{name} {what}; expected text, or a list of token ids, at least one", param=name)
    _refuse_long(prompt.ids.numel(), service, name)
    if located and prompt.text is not None:
        text = prompt.text
        prompt.parts = await beside(len(text), lambda: texts.located(text, prompt.ids))
    elif prompt.text is None and (shown or located):
        ids = prompt.ids.tolist()
        prompt.shown, prompt.parts = await beside(len(ids), lambda: texts.placed(ids))
    return prompt


def _refuse_long(n_token: int, service: Service, name: str) -> None:
    most = service.limits.max_prompt
    if n_token > most:
        raise ApiError(400, f"{name} has {n_token:,} tokens; at most {most:,} are read", param=name)


async def beside(size: int, make: Callable[[], T]) -> T:
    """Return the result of `make`, computed in a thread if `size` is so large that it may take long."""
    return make() if size < _IN_THREAD else await asyncio.to_thread(make)


def finite(log_prob: float) -> float:
    """Return a log-probability, with minus infinity replaced by a number that JSON can represent."""
    return max(log_prob, _LEAST)


def event_stream(
    events: AsyncIterator[JsonObject], works: Sequence[Work], service: Service, status: int = 200
) -> Response:
    """Return a response of server-sent events, ended by `[DONE]`; cancel the works when the client disconnects."""

    async def data() -> AsyncIterator[dict[str, str]]:
        try:
            async for each in events:
                yield {"data": dumps(each)}
            yield {"data": "[DONE]"}
        except ApiError as error:
            yield {"data": dumps(error.value())}
        except Exception:
            _logger.exception("an event stream failed")
            yield {"data": dumps(ApiError(500, "the server failed to answer; its log says why").value())}
        finally:
            for work in works:
                work.cancelled = True

    return EventSourceResponse(
        data(),
        status,
        ping=15,
        sep="\n",
        shutdown_event=service.farewell(),
        shutdown_grace_period=service.grace + 5,
    )


async def while_connected(request: Request, waiting: Awaitable[T], works: Sequence[Work]) -> T:
    """Return the result of `waiting`; cancel the works if the client disconnects first.

    Raises:
        ApiError: as `waiting` does, or if the client has disconnected.
    """
    task = asyncio.ensure_future(waiting)
    gone = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has left")
        return task.result()
    finally:
        for work in works:
            work.cancelled = True
        for each in (task, gone):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError):
                    await each


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
