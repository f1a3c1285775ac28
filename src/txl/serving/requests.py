"""Limits of the server, errors in the format of the OpenAI API, and JSON that is read and written in slices."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeVar

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
AT_ONCE = 1 << 16  # size from which JSON is read and written in slices: Python's functions for it hold up all threads
_MOST_STRINGS = 1 << 12  # of a large body, names included
_MOST_LISTS = 1 << 12  # of a large body
_MOST_OUTSIDE = 1 << 18  # characters of a large body outside of strings and lists of token ids
_LISTED = 64  # values of a list that are written to JSON at once
_IDS = re.compile(r"\[\s*[0-9][0-9,\s]{1024,}\]", re.ASCII)
_CHARACTERS = re.compile(r"(?:[^\\]+|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\[^u]){1,4096}", re.DOTALL)
_NAMES = re.compile(r"\s*:")
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
        if top is not None and n_token * (top + 1) > self.max_reported:
            raise ApiError(
                400,
                f"{n_token:,} tokens with {top} alternatives each are {n_token * (top + 1):,} log-probabilities; one "
                f"answer has at most {self.max_reported:,}",
                param="logprobs",
            )


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
        self.message, self.param = _writable(message), None if param is None else _writable(param)
        self.status, self.code, self.headers = status, code, headers or {}

    def value(self) -> JsonObject:
        """Return the error as a JSON object in the format of the OpenAI API."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the error as an HTTP response."""
        return json_response(self.value(), self.status, self.headers)


def _writable(text: str) -> str:
    """Return text from a request with halves of surrogate pairs escaped, so that an answer can be encoded."""
    return text.encode("utf-8", errors="backslashreplace").decode()


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a value as a JSON response; NaN or an infinite number raises an error here, not at the client."""
    return Response("".join(_slices(value, _encode)), status, headers, "application/json")


def dumps(value: object) -> str:
    """Return a value as one line of JSON for an event; in ASCII, because some clients end lines at U+0085 or U+2028."""
    return "".join(_slices(value, _encode_ascii))


def _slices(value: object, encode: Callable[[object], str]) -> Iterator[str]:
    """Yield a value as JSON, encoded in slices: of a text, of the entries of a long list, or of the values inside."""
    if isinstance(value, dict):
        start = "{"
        for name, part in value.items():
            yield f"{start}{encode(name)}:"
            yield from _slices(part, encode)
            start = ","
        yield "{}" if start == "{" else "}"
    elif isinstance(value, list) and len(value) > _LISTED:
        for start in range(0, len(value), _LISTED):
            yield ("," if start else "[") + encode(value[start : start + _LISTED])[1:-1]
        yield "]"
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield "," if number else "["
            yield from _slices(part, encode)
        yield "]" if value else "[]"
    elif isinstance(value, str) and len(value) > AT_ONCE:
        for start in range(0, len(value), AT_ONCE):
            yield ("" if start else '"') + encode(value[start : start + AT_ONCE])[1:-1]
        yield '"'
    else:
        yield encode(value)


def parsed(body: bytes) -> JsonObject:
    """Return the fields of a body that is a JSON object.

    Raises:
        ApiError: if the body is not a JSON object, is nested too deeply, has half a surrogate pair, or is large and has
            more in it than long strings and lists of token ids.
    """
    try:
        text = body.decode("utf-8")
        value = _large(text) if len(text) > AT_ONCE else json.loads(text, parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} is 0x{body[error.start]:02x}") from None
    except RecursionError:
        raise ApiError(400, "the body is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {type(value).__name__}; expected a JSON object")
    if "\\u" in text:
        for name, part in value.items():
            _refuse_surrogates(name, part)
    return value


def _large(text: str) -> object:
    """Return the value of a large JSON text, read in slices; a text that takes long to read is refused before.

    Lists of token ids and long strings with escapes are read alone. `NaN`, which is no JSON, stands for them in the
    rest of the text.
    """
    masked = text.replace("\\\\", "..").replace('\\"', "..")
    if masked.count('"') > 2 * _MOST_STRINGS:
        raise ApiError(400, f"the body has more than {_MOST_STRINGS:,} strings")
    taken: list[list[int] | str] = []

    def take(ids: re.Match[str]) -> str:
        taken.append(_numbers(ids[0]))
        return "NaN"

    rest, start, n_outside, n_list = [], 0, 0, 0
    parts = masked.split('"')
    for number, part in enumerate(parts):
        own, is_last = text[start : start + len(part)], number + 1 == len(parts)
        start += len(part) + 1
        if number % 2 == 0:  # outside of strings
            if "NaN" in own or "Infinity" in own:
                raise ValueError("NaN and Infinity are no numbers of JSON")
            n_list += own.count("[")
            if n_list > _MOST_LISTS:
                raise ApiError(400, f"the body has more than {_MOST_LISTS:,} lists")
            rest.append(_IDS.sub(take, own))
            n_outside += len(rest[-1])
        elif len(own) > AT_ONCE and "\\" in own and not is_last and not _NAMES.match(parts[number + 1]):
            taken.append(_string(own))
            rest.append("NaN")
        else:
            rest.append(f'"{own}' if is_last else f'"{own}"')
    if n_outside > _MOST_OUTSIDE:
        what = f"{_MOST_OUTSIDE:,} characters outside of strings and lists of token ids"
        raise ApiError(400, f"the body has more than {what}")
    values = iter(taken)
    return json.loads("".join(rest), parse_constant=lambda _: next(values))


def _string(text: str) -> str:
    """Return the value of a JSON string without its quotes, read in slices between escapes."""
    slices, start = [], 0
    while start < len(text):
        piece = _CHARACTERS.match(text, start)
        end = len(text) if piece is None else piece.end()
        slices.append(json.loads(f'"{text[start:end]}"'))
        start = end
    return "".join(slices)


def _numbers(text: str) -> list[int]:
    """Return a JSON list of one or more whole numbers, read in slices that end at commas."""
    numbers: list[int] = []
    start = 1
    while start < len(text):
        end = text.find(",", start + AT_ONCE)
        end = len(text) - 1 if end < 0 else end
        some = json.loads(f"[{text[start:end]}]")
        if not some:
            raise ValueError("a list of numbers ends with a comma")
        numbers += some
        start = end + 1
    return numbers


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


async def body_of(request: Request) -> JsonObject:
    """Return the JSON object of a request's body, read in a thread if it is large; {} for an empty body.

    Raises:
        ApiError: as `parsed` does.
    """
    body = await request.body()
    if len(body) <= AT_ONCE:
        return parsed(body) if body else {}
    return await asyncio.to_thread(parsed, body)


def of_user(make: Callable[[], T], param: str | None = None) -> T:
    """Return the result of `make`; a `UserError` becomes an `ApiError` 400, as a mistake of the client."""
    try:
        return make()
    except UserError as error:
        raise ApiError(400, str(error), param=param) from None


def _refuse_surrogates(name: str, value: object) -> None:
    """Refuse halves of surrogate pairs in a field: they are not characters and cannot be encoded in an answer."""
    values = [value]
    while values:
        part = values.pop()
        if isinstance(part, list):
            values += [item for item in part if isinstance(item, str | list | dict)]
        elif isinstance(part, dict):
            values += part.values()
        elif isinstance(part, str):
            try:
                part.encode("utf-8")
            except UnicodeEncodeError as error:
                place = f"(U+{ord(part[error.start]):04X} at character {error.start})"
                raise ApiError(400, f"{name} has half a surrogate pair {place}", param=name) from None
