"""`/v1/streams`: texts that live on between requests, and are read and continued in constant memory."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence

import torch
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from txl.files import JsonObject
from txl.generation.text import StopStrings
from txl.serving.exchange import beside, event_stream, finite, read_prompt, while_connected
from txl.serving.kept_stream import KeptStream, Operation, new_id, restored, snapshot
from txl.serving.kept_streams import KeptStreams
from txl.serving.requests import ApiError, body_of, dumps, json_response
from txl.serving.schemas import AppendRequest, CreateRequest, ForkRequest, GenerateRequest, Reporting, checked
from txl.serving.work import Continuation, DrawnEvent, EndEvent, Event, Outbox, ReadEvent, ScoredToken, Work, n_reported

SNAPSHOT_TYPE = "application/octet-stream"
_LN2 = math.log(2)


def describe(stream: KeptStream, kept: KeptStreams) -> JsonObject:
    """Return a stream as a JSON object of the API."""
    limits, totals, state = kept.service.limits, stream.totals, stream.state
    idle = time.monotonic() - stream.used
    return {
        "id": stream.id,
        "object": "stream",
        "created": int(stream.created),
        "model": kept.service.model_id,
        "tokens": state.n_token,
        "memory": state.keys[0].shape[1],
        "memory_limit": kept.service.memory,
        "bytes": stream.nbytes,
        "seed": stream.seed,
        "drawn": stream.drawn,
        "scored": totals.scored,
        "bits": totals.bits,
        "characters": totals.characters,
        "bits_per_token": totals.bits / totals.scored if totals.scored else None,
        "bits_per_character": totals.bits / totals.characters if totals.characters else None,
        "fork_from": stream.first,
        "busy": stream.work is not None,
        "idle_seconds": round(idle, 3),
        "expires_in": None if stream.work is not None else round(max(0.0, limits.idle_seconds - idle), 3),
    }


class _Answer(ABC):
    """The answer to a request on a stream: an event stream of parts and a result, or the result alone."""

    source: str  # of its tokens: "read" or "drawn"
    one_by_one: bool  # True: one part for each event; False: one for all events that arrive together

    def __init__(self, kept: KeptStreams, operation: Operation, fields: Reporting, created: bool = False):
        self.kept, self.operation, self._fields, self._created = kept, operation, fields, created
        self._texts, self._position = kept.service.texts, operation.stream.state.n_token
        self.n_token, self.reason = 0, ""

    async def respond(self, request: Request, n_token: int) -> Response:
        """Start the operation, of at most `n_token` tokens, and answer the request (ApiError if it fails)."""
        operation, status = self.operation, 201 if self._created else 200
        operation.start(self.kept.service)
        if self._fields.stream:
            return event_stream(self._events(), [operation.work], self.kept.service, status)
        events = await while_connected(request, _all(operation), [operation.work])
        whole = lambda: json_response(self.result(*self._take(events)), status)  # noqa: E731
        return await beside(n_token * (1 + (self._fields.top or 0)), whole)

    async def _events(self) -> AsyncIterator[str]:
        """Yield the objects of an event stream, as events arrive; delete a created stream if the client leaves."""
        is_complete = False
        try:
            async for batch in self.operation.batches():
                for events in [[event] for event in batch] if self.one_by_one else [batch]:
                    shown = await beside(sum(map(n_reported, events)), functools.partial(self._shown, events))
                    if shown is not None:
                        yield shown
            _check(self.operation)
            is_complete = True
            yield dumps(self.result(None, None))
        finally:
            if self._created and not is_complete:  # the client does not know the stream's id
                self.kept.delete(self.operation.stream)

    def _shown(self, events: Sequence[Event]) -> str | None:
        part = self.part(events, *self._take(events))
        return None if part is None else dumps(part)

    @abstractmethod
    def part(self, events: Sequence[Event], text: str, tokens: list[JsonObject] | None) -> JsonObject | None:
        """Return the object of an event stream for some events; None if they are not shown."""

    @abstractmethod
    def result(self, text: str | None, tokens: list[JsonObject] | None) -> JsonObject:
        """Return the object that ends the answer."""

    def _take(self, events: Sequence[Event]) -> tuple[str, list[JsonObject] | None]:
        """Return text and tokens of events; None for the tokens if the request does not ask for them."""
        text, tokens = "", list[ScoredToken]()
        for event in events:
            if isinstance(event, ReadEvent):
                tokens += event.tokens
            elif isinstance(event, DrawnEvent):
                text += event.token.text
                tokens.append(event.token)
            elif isinstance(event, EndEvent):
                text += event.text
                self.reason = event.reason
        first, self.n_token = self._position + self.n_token, self.n_token + len(tokens)
        if self._fields.top is None:
            return text, None
        return text, [self._token(first + number, token) for number, token in enumerate(tokens)]

    def _token(self, position: int, token: ScoredToken) -> JsonObject:
        log_prob = None if token.log_prob is None else finite(token.log_prob)
        return {
            "position": position,
            **self._named(token.id),
            "piece": token.piece,
            "source": self.source,
            "logprob": log_prob,
            "surprisal": None if log_prob is None else -log_prob / _LN2,
            "rank": token.rank,
            "top": [{**self._named(candidate), "logprob": finite(value)} for candidate, value in token.top],
            "attention": token.attention,
        }

    def _named(self, token: int) -> JsonObject:
        data = self._texts.vocabulary.bytes_of(token)
        return {"id": token, "text": self._texts.shown(data), "bytes": list(data)}


async def _all(operation: Operation) -> list[Event]:
    events = [event async for batch in operation.batches() for event in batch]
    _check(operation)
    return events


def _check(operation: Operation) -> None:
    if operation.stream.deleted:
        raise ApiError(404, "the stream was deleted during this request", code="no_such_stream")
    if operation.failure is not None:
        raise ApiError(operation.failure.status, operation.failure.message)


def _work(kept: KeptStreams, stream: KeptStream, fields: Reporting, ids: Tensor, n_token: int) -> Work:
    """Return a work that reads `ids` after a stream's last token, and reads or draws `n_token` tokens in all."""
    limits = kept.service.limits
    if not fields.stream:  # of an event stream only the unread part is held in memory
        limits.check_reported(n_token, fields.top)
    outbox = Outbox(fields.stream, most_unread=limits.max_reported if fields.stream else None)
    return Work(0, ids, [], outbox, after=stream.state, top=fields.top, attention=fields.attention, keep=True)


async def create(request: Request) -> Response:
    """Answer `POST /v1/streams`: create a stream that is empty, or from a text or a snapshot."""
    kept: KeptStreams = request.app.state.kept
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == SNAPSHOT_TYPE:
        kept.check_room()
        data = await request.body()
        stream = await asyncio.to_thread(restored, data, kept.service, new_id())
        kept.check_room()
        return json_response(describe(kept.add(stream), kept), 201)
    fields = checked(CreateRequest, await body_of(request), kept.service)
    seed = fields.seed % 2**63
    if fields.text is None and fields.tokens is None:
        for name in ("logprobs", "attention", "stream"):
            if getattr(fields, name) not in (None, False):
                raise ApiError(400, f"{name} is given without text or tokens to read; leave it out", param=name)
        return json_response(describe(kept.new(seed), kept), 201)
    kept.check_room()
    ids = await _to_read(request, fields)
    stream = kept.new(seed)
    try:
        return await _append(request, kept, stream, fields, ids, created=True)
    except BaseException:
        kept.delete(stream)
        raise


async def _to_read(request: Request, fields: AppendRequest) -> Tensor:
    if (fields.text is None) == (fields.tokens is None):
        raise ApiError(400, "expected either text or tokens", param="text")
    name, value = ("text", fields.text) if fields.tokens is None else ("tokens", fields.tokens)
    return (await read_prompt(request, value, name)).ids


async def append(request: Request) -> Response:
    """Answer `POST /v1/streams/ID/append`."""
    kept: KeptStreams = request.app.state.kept
    fields = checked(AppendRequest, await body_of(request), kept.service)
    kept.free(request.path_params["id"])
    ids = await _to_read(request, fields)
    return await _append(request, kept, kept.free(request.path_params["id"]), fields, ids)


async def _append(
    request: Request, kept: KeptStreams, stream: KeptStream, fields: AppendRequest, ids: Tensor, created: bool = False
) -> Response:
    work = _work(kept, stream, fields, ids, ids.numel())
    work.score, work.segment = True, kept.service.segment
    return await _Reading(kept, Operation(stream, work, None), fields, created).respond(request, ids.numel())


class _Reading(_Answer):
    """The answer to an `append` request."""

    source, one_by_one = "read", True

    def part(self, events: Sequence[Event], text: str, tokens: list[JsonObject] | None) -> JsonObject | None:
        """Return the progress that an event reports."""
        [event] = events
        if not isinstance(event, ReadEvent):
            return None
        return {"object": "stream.progress", "read": event.read, "total": event.total, "tokens": tokens}

    def result(self, text: str | None, tokens: list[JsonObject] | None) -> JsonObject:
        """Return the figures of the text, which are not those of the stream if another request has changed it since."""
        n_read, totals = self.operation.work.ids.numel(), self.operation.read
        value = {"object": "stream.append", "read": n_read, "total": n_read}
        value |= {"scored": totals.scored, "bits": totals.bits, "tokens": tokens}
        return value | {"stream": describe(self.operation.stream, self.kept)}


async def generate(request: Request) -> Response:
    """Answer `POST /v1/streams/ID/generate`."""
    kept: KeptStreams = request.app.state.kept
    fields = checked(GenerateRequest, await body_of(request), kept.service)
    stream, texts = kept.free(request.path_params["id"]), kept.service.texts
    work = _work(kept, stream, fields, torch.zeros(0, dtype=torch.int64), fields.max_tokens)
    if stream.state.n_token == 0:
        raise ApiError(400, "the stream is empty; append some text first", code="empty_stream")
    seed, drawn = (stream.seed, stream.drawn) if fields.seed is None else (fields.seed % 2**63, 0)
    decoder, stop = texts.decoder_after(stream.tail), StopStrings(fields.stop)
    work.continuations.append(
        Continuation(0, fields.max_tokens, seed, fields.sampling, decoder, stop, drawn, flush=False)
    )
    work.forbidden = texts.forbidden
    return await _Generation(kept, Operation(stream, work, seed), fields, seed).respond(request, fields.max_tokens)


class _Generation(_Answer):
    """The answer to a `generate` request."""

    source, one_by_one = "drawn", False

    def __init__(self, kept: KeptStreams, operation: Operation, fields: GenerateRequest, seed: int):
        super().__init__(kept, operation, fields)
        self._seed, self._began = seed, time.perf_counter()

    def part(self, events: Sequence[Event], text: str, tokens: list[JsonObject] | None) -> JsonObject | None:
        """Return the text and the tokens of some events."""
        return {"object": "stream.tokens", "text": text, "tokens": tokens} if text or tokens else None

    def result(self, text: str | None, tokens: list[JsonObject] | None) -> JsonObject:
        """Return the text, its end and the speed."""
        return {
            "object": "stream.generation",
            "text": text,
            "tokens": tokens,
            "finish_reason": self.reason,
            "seed": self._seed,
            "usage": {"completion_tokens": self.n_token},
            "tokens_per_second": self.n_token / max(time.perf_counter() - self._began, 1e-9),
            "stream": describe(self.operation.stream, self.kept),
        }


async def fork(request: Request) -> Response:
    """Answer `POST /v1/streams/ID/fork`: create a second stream, from the last token or from an earlier one."""
    kept: KeptStreams = request.app.state.kept
    fields = checked(ForkRequest, await body_of(request), kept.service)
    stream = kept.free(request.path_params["id"])
    twin = kept.fork(stream)
    try:
        again = twin.rewind(stream.state.n_token if fields.at is None else fields.at)
        if fields.seed is not None:
            twin.seed, twin.drawn = fields.seed % 2**63, 0
        if again or fields.token is not None:
            ids = torch.tensor([entry.id for entry in again] + ([] if fields.token is None else [fields.token]))
            work = Work(0, ids, [], Outbox(False), after=twin.state, score=True, keep=True)
            operation = Operation(twin, work, None, again)
            operation.start(kept.service)
            await while_connected(request, _all(operation), [work])
    except BaseException:
        kept.delete(twin)
        raise
    return json_response(describe(twin, kept), 201)


async def every(request: Request) -> Response:
    """Answer `GET /v1/streams`."""
    kept: KeptStreams = request.app.state.kept
    return json_response({"object": "list", "data": [describe(stream, kept) for stream in kept]})


async def one(request: Request) -> Response:
    """Answer `GET` and `DELETE /v1/streams/ID`."""
    kept: KeptStreams = request.app.state.kept
    stream = kept.get(request.path_params["id"])
    if request.method == "DELETE":
        kept.delete(stream)
        return json_response({"id": stream.id, "object": "stream.deleted", "deleted": True})
    return json_response(describe(stream, kept))


async def take_snapshot(request: Request) -> Response:
    """Answer `GET /v1/streams/ID/snapshot`."""
    kept: KeptStreams = request.app.state.kept
    stream = kept.free(request.path_params["id"])
    data = await asyncio.to_thread(snapshot, stream.copy(), kept.service)
    headers = {"Content-Disposition": f'attachment; filename="{stream.id}.safetensors"'}
    return Response(data, media_type=SNAPSHOT_TYPE, headers=headers)
