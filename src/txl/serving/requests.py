"""Parts that the whole server shares: limits, metrics, errors in the format of the OpenAI API, and JSON in slices."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import Request
from starlette.responses import Response

from txl.errors import UserError
from txl.files import JsonObject

T = TypeVar("T")
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
AT_ONCE = 1 << 16  # size from which JSON is read and written in slices: Python's functions for it hold up all threads
_MOST_OUTSIDE = 1 << 18  # characters of a large body outside of strings and lists of token ids
_LISTED = 64  # values of a list that are written to JSON at once
_IDS = re.compile(r"\[\s*[0-9][0-9,\s]{1024,}\]", re.ASCII)
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_encode_ascii = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class Limits:
    """Limits on a single request and on the whole server."""

    max_body: int = 8 << 20  # bytes of a request's body, except for snapshots
    max_bodies: int = 128 << 20  # bytes of all bodies in memory, without 64 KiB of each; one snapshot is accepted
    max_prompt: int = 1 << 20  # tokens of one prompt, or of one text appended to a stream
    max_tokens: int = 1 << 16  # tokens generated for one text of a request
    max_choices: int = 128  # texts of one request: prompts times `n`
    max_logprobs: int = 100  # alternatives reported for each token
    # Log-probabilities in one answer, tokens times (alternatives + 1); each takes about 220 bytes. With so many unread
    # ones in an event stream, the engine waits for the client.
    max_reported: int = 1 << 20
    max_queue: int = 128  # texts that wait for a place in the engine
    max_requests: int = 1024  # requests answered at the same time
    max_kept: int = 64  # streams kept at the same time
    idle_seconds: float = 3600.0  # time without use after which a stream is deleted
    body_seconds: float = 30.0  # time within which a body must arrive; more for snapshots larger than `max_body`
    write_seconds: float = 30.0  # time within which a client must receive 64 KiB of its answer

    def check_reported(self, n_token: int, top: int | None) -> None:
        """Refuse an answer with more log-probabilities than `max_reported` (ApiError)."""
        n_reported = 0 if top is None else n_token * (top + 1)
        if n_reported > self.max_reported:
            message = f"{n_reported:,} log-probabilities are wanted; one answer has at most {self.max_reported:,}"
            raise ApiError(400, message, param="logprobs")


class Metrics:
    """Prometheus metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = self.registry
        self.requests = Counter("txl_requests", "Answers, by route and status.", ["route", "status"], registry=own)
        self.tokens_read = Counter("txl_tokens_read", "Tokens of prompts and appended text read.", registry=own)
        self.tokens_generated = Counter("txl_tokens_generated", "Tokens drawn.", registry=own)
        self.steps = Counter("txl_steps", "Decoding steps, of one token for every running text.", registry=own)
        self.running = Gauge("txl_texts_running", "Texts that are being read or decoded now.", registry=own)
        self.queued = Gauge("txl_texts_queued", "Texts that wait for a place in the engine.", registry=own)
        self.streams = Gauge("txl_streams", "Streams that are kept.", registry=own)
        self.stream_bytes = Gauge("txl_stream_bytes", "Bytes of the kept streams' memory.", registry=own)
        about = "From a request's arrival to its first token."
        self.first_token = Histogram("txl_first_token_seconds", about, buckets=_SECONDS, registry=own)
        about = "Duration of requests."
        self.request_seconds = Histogram("txl_request_seconds", about, ["route"], buckets=_SECONDS, registry=own)


class ApiError(Exception):
    """An error with which a request is answered."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        # Halves of surrogate pairs, which a request may have, are escaped, so that the answer can be encoded.
        self.message = message.encode("utf-8", errors="backslashreplace").decode()
        self.param = None if param is None else param.encode("utf-8", errors="backslashreplace").decode()
        self.status, self.code, self.headers = status, code, headers or {}

    def value(self) -> JsonObject:
        """Return the error as a JSON object in the format of the OpenAI API."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the error as an HTTP response."""
        return json_response(self.value(), self.status, self.headers)


def of_user(make: Callable[[], T], param: str | None = None) -> T:
    """Return the result of `make`; a `UserError` becomes an `ApiError` 400, as a mistake of the client."""
    try:
        return make()
    except UserError as error:
        raise ApiError(400, str(error), param=param) from None


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a value as a JSON response; NaN or an infinite number raises an error here, not at the client."""
    return Response("".join(_slices(value, _encode)), status, headers, "application/json")


def dumps(value: object) -> str:
    """Return a value as one line of JSON for an event; in ASCII, because some clients end lines at U+0085 or U+2028."""
    return "".join(_slices(value, _encode_ascii))


def _slices(value: object, encode: Callable[[object], str]) -> Iterator[str]:
    """Yield a value as JSON, encoded in slices: of a text, of the entries of a long list, or of the values inside."""
    if isinstance(value, dict):
        for number, (name, part) in enumerate(value.items()):
            yield f"{',' if number else '{'}{encode(name)}:"
            yield from _slices(part, encode)
        yield "}" if value else "{}"
    elif isinstance(value, list) and len(value) <= _LISTED:
        for number, part in enumerate(value):
            yield "," if number else "["
            yield from _slices(part, encode)
        yield "]" if value else "[]"
    elif isinstance(value, list) or (isinstance(value, str) and len(value) > AT_ONCE):
        (first, last), between, size = ("[]", ",", _LISTED) if isinstance(value, list) else ('""', "", AT_ONCE)
        for start in range(0, len(value), size):
            yield (between if start else first) + encode(value[start : start + size])[1:-1]
        yield last
    else:
        yield encode(value)


async def body_of(request: Request) -> JsonObject:
    """Return the JSON object of a request's body as `parsed` does, in a thread if it is large; {} for an empty body."""
    body = await request.body()
    if len(body) <= AT_ONCE:
        return parsed(body) if body else {}
    return await asyncio.to_thread(parsed, body)


def parsed(body: bytes) -> JsonObject:
    """Return the fields of a body that is a JSON object.

    Raises:
        ApiError: if the body is no JSON object, is nested too deeply, has half a surrogate pair, or is large and has
            more in it than long strings and lists of token ids.
    """
    name = None
    try:
        text = body.decode("utf-8")
        value = _large(text) if len(text) > AT_ONCE else json.loads(text, parse_constant=_no_number)
        if not isinstance(value, dict):
            raise ApiError(400, f"the body is {type(value).__name__}; expected a JSON object")
        if "\\u" in text:  # halves of surrogate pairs are not characters and cannot be encoded in an answer
            for name, part in value.items():
                values: list[object] = [name, part]
                while values:  # a recursive generator would pass each leaf up through all levels
                    inner = values.pop()
                    if isinstance(inner, list):
                        values += [item for item in inner if isinstance(item, str | list | dict)]
                    elif isinstance(inner, dict):
                        values += [*inner, *inner.values()]
                    elif isinstance(inner, str):
                        inner.encode()
        return value
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} is 0x{body[error.start]:02x}") from None
    except UnicodeEncodeError:
        raise ApiError(400, f"{name} has half a surrogate pair", param=name) from None
    except RecursionError:
        raise ApiError(400, "the body is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _large(text: str) -> object:
    """Return the value of a large JSON text; a text that takes long to read is refused before.

    Lists of token ids are read alone, in slices. `NaN`, which is no JSON, stands for them in the rest of the text.
    """
    taken: list[list[int]] = []

    def take(ids: re.Match[str]) -> str:
        numbers, start, end = list[int](), 1, 0
        while end < len(ids[0]) - 1:
            end = ids[0].find(",", start + AT_ONCE)
            end = len(ids[0]) - 1 if end < 0 else end
            some = json.loads(f"[{ids[0][start:end]}]")
            if not some:
                raise ValueError("a list of numbers ends with a comma")
            numbers += some
            start = end + 1
        taken.append(numbers)
        return "NaN"

    masked = text.replace("\\\\", "..").replace('\\"', "..")
    parts, start, n_outside = [], 0, 0
    for number, part in enumerate(masked.split('"', 2 * _MOST_OUTSIDE)):
        own = text[start : start + len(part)]
        start += len(part) + 1
        if number % 2 == 0:  # outside of strings
            if "NaN" in own or "Infinity" in own:
                raise ValueError("NaN and Infinity are no numbers of JSON")
            own = _IDS.sub(take, own)
            n_outside += len(own) + 1
            if n_outside > _MOST_OUTSIDE:
                raise ApiError(400, f"the body has more than {_MOST_OUTSIDE:,} characters outside of strings and ids")
        parts.append(own)
    values = iter(taken)
    return json.loads('"'.join(parts), parse_constant=lambda _: next(values))
