"""`/v1/streams`: texts that live on between requests, and are read and continued in constant memory."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Sequence

import torch
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from txl.files import JsonObject
from txl.generation.text import StopStrings
from txl.serving.exchange import beside, event_stream, finite, read_prompt, while_connected
from txl.serving.kept_streams import LN2, KeptStream, KeptStreams, Operation, restored, snapshot
from txl.serving.requests import ApiError, body_of, dumps, json_response
from txl.serving.schemas import AppendRequest, CreateRequest, ForkRequest, GenerateRequest, Reporting, checked
from txl.serving.work import Continuation, DrawnEvent, EndEvent, Event, Outbox, ReadEvent, ScoredToken, Work, n_reported

SNAPSHOT_TYPE = "application/octet-stream"


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


class _Answer:
    """The answer to a request on a stream: an event stream of parts and a result, or the result alone.

    The operation reads a text or, with a seed, draws one. A stream that the request has `created` is deleted if the
    client leaves, which does not know its id.
    """

    def __init__(self, kept: KeptStreams, operation: Operation, fields: Reporting, created: bool = False):
        self._kept, self._operation, self._fields, self._created = kept, operation, fields, created
        self._texts, self._position = kept.service.texts, operation.stream.state.n_token
        self._is_read, self._began = operation.seed is None, time.perf_counter()
        self._n_token, self._reason = 0, ""

    async def respond(self, request: Request, n_token: int) -> Response:
        """Start the operation, of at most `n_token` tokens, and answer the request (ApiError if it fails)."""
        operation, status = self._operation, 201 if self._created else 200
        operation.start(self._kept.service)
        if self._fields.stream:
            return event_stream(self._events(), [operation.work], self._kept.service, status)
        events = await while_connected(request, _all(operation), [operation.work])
        whole = lambda: json_response(self._result(*self._take(events)), status)  # noqa: E731
        return await beside(n_token * (1 + (self._fields.top or 0)), whole)

    async def _events(self) -> AsyncIterator[str]:
        """Yield the objects of an event stream: one for each segment that was read, or for tokens drawn together."""
        is_complete = False
        try:
            async for batch in self._operation.batches():
                for events in [[event] for event in batch] if self._is_read else [batch]:
                    part = await beside(sum(map(n_reported, events)), functools.partial(self._part, events))
                    if part is not None:
                        yield part
            _check(self._operation)
            is_complete = True
            yield dumps(self._result(None, None))
        finally:
            if self._created and not is_complete:
                self._kept.delete(self._operation.stream)

    def _part(self, events: Sequence[Event]) -> str | None:
        text, tokens = self._take(events)
        if not self._is_read:
            return dumps({"object": "stream.tokens", "text": text, "tokens": tokens}) if text or tokens else None
        [event] = events
        if not isinstance(event, ReadEvent):
            return None
        return dumps({"object": "stream.progress", "read": event.read, "total": event.total, "tokens": tokens})

    def _result(self, text: str | None, tokens: list[JsonObject] | None) -> JsonObject:
        """Return the object that ends the answer."""
        stream, totals = describe(self._operation.stream, self._kept), self._operation.read
        if self._is_read:  # the figures are those of the text: another request may have changed the stream since
            n_read = self._operation.work.ids.numel()
            value = {"object": "stream.append", "read": n_read, "total": n_read}
            return value | {"scored": totals.scored, "bits": totals.bits, "tokens": tokens, "stream": stream}
        return {
            "object": "stream.generation",
            "text": text,
            "tokens": tokens,
            "finish_reason": self._reason,
            "seed": self._operation.seed,
            "usage": {"completion_tokens": self._n_token},
            "tokens_per_second": self._n_token / max(time.perf_counter() - self._began, 1e-9),
            "stream": stream,
        }

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
                self._reason = event.reason
        first, self._n_token = self._position + self._n_token, self._n_token + len(tokens)
        if self._fields.top is None:
            return text, None
        listed = []
        for position, token in enumerate(tokens, start=first):
            log_prob = finite(token.log_prob)
            listed.append(
                {
                    "position": position,
                    **self._named(token.id),
                    "piece": token.piece,
                    "source": "read" if self._is_read else "drawn",
                    "logprob": log_prob,
                    "surprisal": None if log_prob is None else -log_prob / LN2,
                    "rank": token.rank,
                    "top": [{**self._named(candidate), "logprob": finite(value)} for candidate, value in token.top],
                    "attention": token.attention,
                }
            )
        return text, listed

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
        stream = await asyncio.to_thread(restored, await request.body(), kept.service)
        return json_response(describe(kept.add(stream), kept), 201)
    fields = checked(CreateRequest, await body_of(request), kept.service)
    if fields.text is None and fields.tokens is None:
        for name in ("logprobs", "attention", "stream"):
            if getattr(fields, name) not in (None, False):
                raise ApiError(400, f"{name} is given without text or tokens to read; leave it out", param=name)
        return json_response(describe(kept.new(fields.seed), kept), 201)
    kept.check_room()
    ids = await _to_read(request, fields)
    stream = kept.new(fields.seed)
    try:
        return await _append(request, stream, fields, ids, created=True)
    except BaseException:
        kept.delete(stream)
        raise


async def append(request: Request) -> Response:
    """Answer `POST /v1/streams/ID/append`."""
    kept: KeptStreams = request.app.state.kept
    fields = checked(AppendRequest, await body_of(request), kept.service)
    kept.get(request.path_params["id"])
    ids = await _to_read(request, fields)
    return await _append(request, kept.get(request.path_params["id"]), fields, ids)


async def _to_read(request: Request, fields: AppendRequest) -> Tensor:
    if (fields.text is None) == (fields.tokens is None):
        raise ApiError(400, "expected either text or tokens", param="text")
    name, value = ("text", fields.text) if fields.tokens is None else ("tokens", fields.tokens)
    return (await read_prompt(request, value, name)).ids


async def _append(
    request: Request, stream: KeptStream, fields: AppendRequest, ids: Tensor, created: bool = False
) -> Response:
    kept: KeptStreams = request.app.state.kept
    work = _work(kept, stream, fields, ids, ids.numel())
    work.score, work.segment = True, kept.service.segment
    return await _Answer(kept, Operation(stream, work, None), fields, created).respond(request, ids.numel())


async def generate(request: Request) -> Response:
    """Answer `POST /v1/streams/ID/generate`."""
    kept: KeptStreams = request.app.state.kept
    fields = checked(GenerateRequest, await body_of(request), kept.service)
    stream, texts = kept.get(request.path_params["id"]), kept.service.texts
    work = _work(kept, stream, fields, torch.zeros(0, dtype=torch.int64), fields.max_tokens)
    if stream.state.n_token == 0:
        raise ApiError(400, "the stream is empty; append some text first", code="empty_stream")
    seed, drawn = (stream.seed, stream.drawn) if fields.seed is None else (fields.seed, 0)
    decoder, stop = texts.decoder_after(stream.tail), StopStrings(fields.stop)
    work.continuations.append(
        Continuation(0, fields.max_tokens, seed, fields.sampling, decoder, stop, drawn, flush=False)
    )
    work.forbidden = texts.forbidden
    return await _Answer(kept, Operation(stream, work, seed), fields).respond(request, fields.max_tokens)


async def fork(request: Request) -> Response:
    """Answer `POST /v1/streams/ID/fork`: create a second stream, from the last token or from an earlier one."""
    kept: KeptStreams = request.app.state.kept
    fields = checked(ForkRequest, await body_of(request), kept.service)
    stream = kept.get(request.path_params["id"])
    twin = kept.fork(stream)
    try:
        again = twin.rewind(stream.state.n_token if fields.at is None else fields.at)
        if fields.seed is not None:
            twin.seed, twin.drawn = fields.seed, 0
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
    stream = kept.get(request.path_params["id"], free=False)
    if request.method == "DELETE":
        kept.delete(stream)
        return json_response({"id": stream.id, "object": "stream.deleted", "deleted": True})
    return json_response(describe(stream, kept))


async def take_snapshot(request: Request) -> Response:
    """Answer `GET /v1/streams/ID/snapshot`."""
    kept: KeptStreams = request.app.state.kept
    stream = kept.get(request.path_params["id"])
    data = await asyncio.to_thread(snapshot, stream.copy(), kept.service)
    headers = {"Content-Disposition": f'attachment; filename="{stream.id}.safetensors"'}
    return Response(data, media_type=SNAPSHOT_TYPE, headers=headers)
