"""`/v1/streams`: texts that live on between requests, and are read and continued in constant memory."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import AsyncIterator

import torch
from starlette.requests import Request
from starlette.responses import Response

from txl.files import JsonObject
from txl.generation.text import StopStrings
from txl.serving.exchange import beside, event_stream, finite, read_prompt, while_connected
from txl.serving.kept import KeptStreams
from txl.serving.kept_stream import KeptStream, Operation, new_id, restored, snapshot
from txl.serving.requests import ApiError, Fields, Limits, dumps, fields_of, json_response
from txl.serving.work import DrawnEvent, EndOfLaneEvent, Event, Lane, Outbox, ReadEvent, ScoredToken, Work

SNAPSHOT_TYPE = "application/octet-stream"
_READ = ("logprobs", "attention", "stream")
_CREATE = frozenset(("model", "text", "tokens", "seed", *_READ))
_APPEND = frozenset(("text", "tokens", *_READ))
_GENERATE = frozenset(("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", *_READ))
_FORK = frozenset(("at", "token", "seed"))
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


class _Shown:
    """Converter of scored tokens to JSON objects of the API, which also counts the tokens' positions."""

    def __init__(self, kept: KeptStreams, stream: KeptStream, detailed: bool):
        self._texts, self._detailed, self._position = kept.service.texts, detailed, stream.state.n_token

    def tokens(self, scored: list[ScoredToken], source: str) -> list[JsonObject] | None:
        """Return the next tokens of the stream as JSON objects; None if the request does not ask for tokens."""
        first, self._position = self._position, self._position + len(scored)
        if not self._detailed:
            return None
        return [self._token(first + number, token, source) for number, token in enumerate(scored)]

    def _token(self, position: int, token: ScoredToken, source: str) -> JsonObject:
        log_prob = token.log_prob
        return {
            "position": position,
            **self._named(token.id),
            "piece": token.piece,
            "source": source,
            "logprob": None if log_prob is None else finite(log_prob),
            "surprisal": None if log_prob is None else -finite(log_prob) / _LN2,
            "rank": token.rank,
            "top": [{**self._named(each), "logprob": finite(value)} for each, value in token.top],
            "attention": token.attention,
        }

    def _named(self, token: int) -> JsonObject:
        data = self._texts.bytes_of(token)
        return {"id": token, "text": self._texts.shown(data), "bytes": list(data)}


async def create(request: Request) -> Response:
    """Answer `POST /v1/streams`: create a stream that is empty, or from a text or a snapshot."""
    kept: KeptStreams = request.app.state.kept
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == SNAPSHOT_TYPE:
        kept.check_room()
        data = await request.body()
        stream = await asyncio.to_thread(restored, data, kept.service, new_id())
        kept.check_room()
        return json_response(describe(kept.add(stream), kept), 201)
    fields = await fields_of(request, _CREATE)
    kept.service.check_model(fields.text("model"))
    seed = fields.seed() % 2**63
    if "text" not in fields and "tokens" not in fields:
        for name in _READ:
            if name in fields:
                raise ApiError(400, f"{name} is given without text or tokens to read; leave it out", param=name)
        return json_response(describe(kept.new(seed), kept), 201)
    kept.check_room()
    prompt = await _to_read(request, fields)
    stream = kept.new(seed)
    try:
        return await _append(request, kept, stream, fields, prompt, created=True)
    except BaseException:
        kept.delete(stream)
        raise


async def _to_read(request: Request, fields: Fields) -> torch.Tensor:
    if ("text" in fields) == ("tokens" in fields):
        raise ApiError(400, "expected either text or tokens", param="text")
    name = "text" if "text" in fields else "tokens"
    kind = str if name == "text" else list
    if not isinstance(fields.raw(name), kind):
        raise ApiError(400, f"{name} is not a {'string' if name == 'text' else 'list of token ids'}", param=name)
    return (await read_prompt(request, fields.raw(name), name)).ids


async def append(request: Request) -> Response:
    """Answer `POST /v1/streams/ID/append`."""
    kept: KeptStreams = request.app.state.kept
    fields = await fields_of(request, _APPEND)
    kept.free(request.path_params["id"])
    ids = await _to_read(request, fields)
    return await _append(request, kept, kept.free(request.path_params["id"]), fields, ids)


async def _append(
    request: Request, kept: KeptStreams, stream: KeptStream, fields: Fields, ids: torch.Tensor, created: bool = False
) -> Response:
    """Read a text into a stream; delete a stream that this request `created`, if its event stream is broken off."""
    service, status = kept.service, 201 if created else 200
    top, attention = _reported(fields, service.limits)
    progressive = fields.flag("stream")
    if not progressive:  # only the unread part of an event stream is held in memory
        service.limits.check_reported(ids.numel(), top)
    work = Work(
        0,
        ids,
        [],
        _outbox(progressive, service.limits),
        after=stream.state,
        score=True,
        top=top,
        attention=attention,
        keep=True,
        segment=service.segment,
    )
    shown = _Shown(kept, stream, detailed=work.top is not None)
    operation = Operation(stream, work, None)
    operation.start(service)

    def result(tokens: list[JsonObject] | None) -> JsonObject:
        value: JsonObject = {"object": "stream.append", "read": ids.numel(), "total": ids.numel()}
        value |= {"scored": operation.read.scored, "bits": operation.read.bits}
        return value | {"tokens": tokens, "stream": describe(stream, kept)}

    def progress(event: ReadEvent) -> str:
        value = {"object": "stream.progress", "read": event.read, "total": event.total}
        return dumps(value | {"tokens": shown.tokens(event.tokens, "read")})

    if progressive:

        async def events() -> AsyncIterator[str]:
            complete = False
            try:
                async for batch in operation.batches():
                    for event in batch:
                        if isinstance(event, ReadEvent):
                            size = len(event.tokens) * (1 + (top or 0))
                            yield await beside(size, functools.partial(progress, event))
                _check(operation)
                complete = True
                yield dumps(result(None))
            finally:
                if created and not complete:  # the client does not know the stream's id
                    kept.delete(stream)

        return event_stream(events(), [work], service, status)
    batches = await while_connected(request, _all(operation), [work])

    def whole() -> Response:
        tokens: list[JsonObject] = []
        for event in batches:
            if isinstance(event, ReadEvent):
                tokens += shown.tokens(event.tokens, "read") or []
        return json_response(result(tokens if work.top is not None else None), status)

    return await beside(ids.numel() * (1 + (top or 0)), whole)


def _outbox(progressive: bool, limits: Limits) -> Outbox:
    return Outbox(progressive, most_unread=limits.max_reported if progressive else None)


async def _all(operation: Operation) -> list[Event]:
    events = [event async for batch in operation.batches() for event in batch]
    _check(operation)
    return events


def _reported(fields: Fields, limits: Limits) -> tuple[int | None, bool]:
    """Return the number of alternatives for each token (None: no tokens are listed), and whether attention is asked."""
    top, attention = fields.whole("logprobs", None, 0, limits.max_logprobs), fields.flag("attention")
    return 0 if top is None and attention else top, attention


def _check(operation: Operation) -> None:
    if operation.stream.deleted:
        raise ApiError(404, "the stream was deleted during this request", code="no_such_stream")
    if operation.failure is not None:
        raise ApiError(operation.failure.status, operation.failure.message)


async def generate(request: Request) -> Response:
    """Answer `POST /v1/streams/ID/generate`."""
    kept: KeptStreams = request.app.state.kept
    service, limits = kept.service, kept.service.limits
    fields = await fields_of(request, _GENERATE)
    max_tokens = fields.whole("max_tokens", limits.default_tokens, 1, limits.max_tokens)
    top, attention = _reported(fields, limits)
    progressive = fields.flag("stream")
    if not progressive:
        limits.check_reported(max_tokens, top)
    sampling, stop = fields.sampling(), fields.strings("stop", 4)
    stream = kept.free(request.path_params["id"])
    if stream.state.n_token == 0:
        raise ApiError(400, "the stream is empty; append some text first", code="empty_stream")
    seed, drawn = (fields.seed() % 2**63, 0) if "seed" in fields else (stream.seed, stream.drawn)
    decoder = service.texts.decoder_after(stream.tail)
    lane = Lane(0, max_tokens, seed, sampling, decoder, StopStrings(stop), drawn, flush=False)
    work = Work(
        0,
        torch.zeros(0, dtype=torch.int64),
        [lane],
        _outbox(progressive, limits),
        after=stream.state,
        forbidden=service.texts.forbidden,
        top=top,
        attention=attention,
        keep=True,
    )
    operation = Operation(stream, work, seed)
    answer = _Generation(kept, operation, seed)
    operation.start(service)
    if progressive:
        return event_stream(answer.events(), [work], service)
    events = await while_connected(request, _all(operation), [work])
    return await beside(max_tokens * (1 + (top or 0)), lambda: json_response(answer.whole(events)))


class _Generation:
    """The answer to a `generate` request, filled event by event."""

    def __init__(self, kept: KeptStreams, operation: Operation, seed: int):
        self._kept, self._operation, self._seed = kept, operation, seed
        self._shown = _Shown(kept, operation.stream, detailed=operation.work.top is not None)
        self._began, self._made, self._reason = time.perf_counter(), 0, ""

    async def events(self) -> AsyncIterator[str]:
        """Yield the objects of an event stream, as events arrive."""
        async for batch in self._operation.batches():
            text, tokens = self._take(batch)
            if text or tokens:
                yield dumps({"object": "stream.tokens", "text": text, "tokens": tokens})
        _check(self._operation)
        yield dumps(self._result(None, None))

    def whole(self, events: list[Event]) -> JsonObject:
        """Return the complete answer as one object."""
        return self._result(*self._take(events))

    def _take(self, batch: list[Event]) -> tuple[str, list[JsonObject] | None]:
        """Return the text and the tokens of a batch of events."""
        text, scored = "", []
        for event in batch:
            if isinstance(event, DrawnEvent):
                text += event.token.text
                scored.append(event.token)
            elif isinstance(event, EndOfLaneEvent):
                text += event.text
                self._reason = event.reason
        self._made += len(scored)
        return text, self._shown.tokens(scored, "drawn")

    def _result(self, text: str | None, tokens: list[JsonObject] | None) -> JsonObject:
        return {
            "object": "stream.generation",
            "text": text,
            "tokens": tokens,
            "finish_reason": self._reason,
            "seed": self._seed,
            "usage": {"completion_tokens": self._made},
            "tokens_per_second": self._made / max(time.perf_counter() - self._began, 1e-9),
            "stream": describe(self._operation.stream, self._kept),
        }


async def fork(request: Request) -> Response:
    """Answer `POST /v1/streams/ID/fork`: create a second stream, from the last token or from an earlier one."""
    kept: KeptStreams = request.app.state.kept
    fields = await fields_of(request, _FORK)
    seed = fields.seed() % 2**63 if "seed" in fields else None
    stream = kept.free(request.path_params["id"])
    at = fields.whole("at", stream.state.n_token, 0, 2**62)
    token = fields.whole("token", None, 0, len(kept.service.texts.vocabulary) - 1)
    twin = kept.fork(stream)
    try:
        again = twin.rewind(at)
        if seed is not None:
            twin.seed, twin.drawn = seed, 0
        if again or token is not None:
            ids = torch.tensor([entry.id for entry in again] + ([] if token is None else [token]))
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
