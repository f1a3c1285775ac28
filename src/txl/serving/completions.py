"""`/v1/completions`: texts continued and scored, as the OpenAI API has it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from txl.generation.text import StopStrings
from txl.serving.requests import ApiError, Fields, dumps, fields_of, json_response, of_user
from txl.serving.scheduler import DrawnEvent, EndEvent, Event, FailedEvent, Lane, Outbox, ReadEvent, ScoredToken, Work
from txl.serving.service import Service
from txl.serving.texts import Texts

_CONTROLS = ("max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop", "echo", "logprobs")
_NEUTRAL = {
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "best_of": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
}
"""Fields that are not supported, with the values by which they ask for nothing."""
KNOWN = frozenset(("model", "prompt", "user", "stream", "stream_options", *_CONTROLS, *_NEUTRAL))
_IN_THREAD = 1 << 14
"""Characters or tokens from which a text is encoded, or an answer written, beside the event loop."""
_LEAST = -9999.0
"""Stands for the logarithm of 0, which JSON has no number for."""
T = TypeVar("T")


@dataclass
class Prompt:
    """One prompt of a request."""

    ids: Tensor
    text: str | None
    """None for token ids."""
    shown: str = ""
    """The text that `echo` shows."""
    parts: list[tuple[bytes, int]] = field(default_factory=list)
    """Each token's bytes, and the character at which it begins."""
    scored: list[ScoredToken] = field(default_factory=list)


class Choice:
    """One continuation of a prompt, as far as it has got."""

    def __init__(self, index: int, prompt: Prompt, echo: bool, texts: Texts):
        self.index, self.prompt, self.echo, self._texts = index, prompt, echo, texts
        self.text = ""
        self.reason: str | None = None
        self.made = 0
        self._at = self._shown = len(prompt.shown) if echo else 0
        self._entries: list[tuple[ScoredToken, bytes, int]] = []
        self._began = False

    def add(self, event: DrawnEvent | EndEvent) -> None:
        """Take in what came."""
        if isinstance(event, EndEvent):
            self.reason = event.reason
            self._extend(event.text)
            return
        token = event.token
        self.made += 1
        self._entries.append((token, *self._texts.place(token.id, token.piece, self._at)))
        self._at += len(token.piece)
        self._extend(token.text)

    def _extend(self, text: str) -> None:
        self.text += text
        self._shown += len(text)

    def take(self, top: int | None) -> dict[str, Any] | None:
        """Return what is new as a choice of a response; None if nothing is."""
        text, entries = self.text, []
        if self.echo and not self._began:
            text = self.prompt.shown + text
            entries = [(token, *part) for token, part in zip(self.prompt.scored, self.prompt.parts, strict=False)]
        if self.reason == "length":
            ready = len(self._entries)
        else:  # a token is shown with its text, which may be held back, or end before it
            ready = next((n for n, each in enumerate(self._entries) if each[2] >= self._shown), len(self._entries))
        entries += self._entries[:ready]
        if not text and not entries and self.reason is None:
            return None
        self.text, self._entries, self._began = "", self._entries[ready:], True
        return {
            "text": text,
            "index": self.index,
            "logprobs": None if top is None else _logprobs(entries, self._texts, top),
            "finish_reason": self.reason,
        }


def _logprobs(entries: Sequence[tuple[ScoredToken, bytes, int]], texts: Texts, top: int) -> dict[str, Any]:
    """Return tokens as the completions API lists them; `bytes` and `token_ids` are this server's own addition."""
    tops: list[dict[str, float] | None] = []
    for token, _, _ in entries:
        if token.log_prob is None:
            tops.append(None)
            continue
        named: dict[str, float] = {}
        for each, log_prob in (*token.top, (token.id, token.log_prob)):
            named.setdefault(texts.shown(texts.bytes_of(each)), finite(log_prob))
        tops.append(named)
    return {
        "tokens": [texts.shown(data) for _, data, _ in entries],
        "token_logprobs": [None if token.log_prob is None else finite(token.log_prob) for token, _, _ in entries],
        "top_logprobs": tops,
        "text_offset": [at for _, _, at in entries],
        "bytes": [list(data) for _, data, _ in entries],
        "token_ids": [token.id for token, _, _ in entries],
    }


def finite(log_prob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(log_prob, _LEAST)


async def completions(request: Request) -> Response:
    """Answer `POST /v1/completions`."""
    service: Service = request.app.state.service
    fields = await fields_of(request, KNOWN)
    service.check_model(fields.text("model"))
    for name, neutral in _NEUTRAL.items():
        fields.only(name, *neutral)
    fields.text("user")  # says who asks, and changes nothing
    limits = service.limits
    n = fields.whole("n", 1, 1, limits.max_choices)
    max_tokens = fields.whole("max_tokens", 16, 0, limits.max_tokens)
    top = fields.whole("logprobs", None, 0, limits.max_logprobs)
    echo, progressive = fields.flag("echo"), fields.flag("stream")
    sampling, seed, stop = fields.sampling(), fields.seed(), fields.strings("stop", 4)
    include_usage = _include_usage(fields, progressive)
    prompts = await _prompts(fields, service, echo, top is not None)
    if len(prompts) * n > limits.max_choices:
        raise ApiError(400, f"{len(prompts)} prompts times n {n}; expected at most {limits.max_choices} texts")
    score = echo and top is not None
    outbox = Outbox(progressive, len(prompts))
    choices: list[Choice] = []
    works: list[Work] = []
    for number, prompt in enumerate(prompts):
        lanes = []
        for sample in range(n):
            index = number * n + sample
            choices.append(Choice(index, prompt, echo, service.texts))
            lanes.append(
                Lane(index, max_tokens, seed + sample, sampling, _decoder(service.texts, prompt), StopStrings(stop))
            )
        works.append(
            Work(
                number,
                prompt.ids,
                lanes,
                outbox,
                forbidden=service.texts.forbidden,
                score=score,
                top=top,
                segment=service.segment if score else Work.segment,
            )
        )
    service.submit(works)
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.model_id,
        "system_fingerprint": service.fingerprint,
    }

    def take_in(batch: list[Event]) -> set[int]:
        """Sort events into choices; returns those that something came for."""
        touched = set()
        for event in batch:
            if isinstance(event, DrawnEvent | EndEvent):
                choices[event.lane].add(event)
                touched.add(event.lane)
            elif isinstance(event, ReadEvent):
                prompts[event.work].scored += event.tokens
            elif isinstance(event, FailedEvent):
                raise ApiError(event.status, event.message)
        return touched

    def usage() -> dict[str, int]:
        read, made = sum(prompt.ids.numel() for prompt in prompts), sum(choice.made for choice in choices)
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    if progressive:

        async def chunks() -> AsyncIterator[dict[str, Any]]:
            async for batch in outbox.batches():
                for index in sorted(take_in(batch)):
                    made = choices[index].take(top)
                    if made is not None:
                        yield head | {"choices": [made]} | ({"usage": None} if include_usage else {})
            if include_usage:
                yield head | {"choices": [], "usage": usage()}

        return event_stream(chunks(), works, service)

    async def all_of_it() -> None:
        async for batch in outbox.batches():
            take_in(batch)

    await while_connected(request, all_of_it(), works)

    def whole() -> Response:
        return json_response(head | {"choices": [choice.take(top) for choice in choices], "usage": usage()})

    return await beside(usage()["total_tokens"] if top is not None else 0, whole)


def _include_usage(fields: Fields, progressive: bool) -> bool:
    options = fields.raw("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not progressive:
        raise ApiError(400, "stream_options needs stream: true, and is an object", param="stream_options")
    return Fields(options, frozenset({"include_usage"})).flag("include_usage")


async def _prompts(fields: Fields, service: Service, echo: bool, score: bool) -> list[Prompt]:
    value = fields.raw("prompt")
    many = value if isinstance(value, list) and value and not _is_ids(value) else [value]
    return [await read_prompt(each, service, "prompt", echo, score and echo) for each in many]


def _is_ids(value: list[Any]) -> bool:
    return isinstance(value[0], int) and not isinstance(value[0], bool)


async def read_prompt(value: Any, service: Service, name: str, shown: bool, located: bool) -> Prompt:
    """Return a prompt of a request, a string or token ids.

    Raises:
        ApiError: if it is neither, empty, too long, or not of the vocabulary.
    """
    texts = service.texts
    if isinstance(value, str) and value:
        ids = await beside(len(value), lambda: of_user(lambda: texts.encode(value), name))
        prompt = Prompt(ids, value, value)
        if ids.numel() == 0:
            raise ApiError(400, f"{name} has no tokens; expected at least one", param=name)
    elif isinstance(value, list) and value and all(type(each) is int for each in value):
        prompt = Prompt(of_user(lambda: texts.checked(value, name), name), None)
    else:
        what = "is empty" if value in ("", []) else "is missing" if value is None else "is of another kind"
        raise ApiError(400, f"{name} {what}; expected text, or a list of token ids, at least one", param=name)
    n_token = prompt.ids.numel()
    if n_token > service.limits.max_prompt:
        raise ApiError(
            400, f"{name} has {n_token:,} tokens; at most {service.limits.max_prompt:,} are read", param=name
        )
    if located and prompt.text is not None:
        text = prompt.text
        prompt.parts = await beside(len(text), lambda: texts.located(text, prompt.ids))
    elif prompt.text is None and (shown or located):
        prompt.shown, prompt.parts = texts.placed(prompt.ids.tolist())
    return prompt


async def beside(size: int, make: Callable[[], T]) -> T:
    """Return what a function gives, computed in a thread if that may take long."""
    return make() if size < _IN_THREAD else await asyncio.to_thread(make)


def _decoder(texts: Texts, prompt: Prompt) -> Any:
    if prompt.text is not None:
        return texts.vocabulary.decoder(prompt.text)
    return texts.decoder_after(prompt.ids[-8:].tolist())


def event_stream(events: AsyncIterator[dict[str, Any]], works: Sequence[Work], service: Service) -> Response:
    """Return objects as server-sent events, ended by `[DONE]`; who leaves ends the works."""

    async def data() -> AsyncIterator[dict[str, str]]:
        try:
            async for each in events:
                yield {"data": dumps(each)}
            yield {"data": "[DONE]"}
        except ApiError as error:
            yield {"data": dumps(error.value())}
        finally:
            for work in works:
                work.cancelled = True

    return EventSourceResponse(
        data(), ping=15, sep="\n", shutdown_event=service.farewell(), shutdown_grace_period=service.grace + 5
    )


async def while_connected(request: Request, waiting: Awaitable[T], works: Sequence[Work]) -> T:
    """Wait for works; if the client leaves first, they end, and so does this.

    Raises:
        ApiError: as `waiting` does.
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
