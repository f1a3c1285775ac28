"""Fields of requests, checked one by one; limits; and errors in the format of the OpenAI API."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from txl.errors import UserError
from txl.files import JsonObject
from txl.generation.sampling import Sampling

T = TypeVar("T")
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    411: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


@dataclass(frozen=True)
class Limits:
    """Limits on one request, and on all together."""

    max_body: int = 8 << 20
    """Bytes of a request's body."""
    max_prompt: int = 1 << 20
    """Tokens of one prompt, or of one text appended to a stream."""
    max_tokens: int = 1 << 16
    """Tokens generated for one request and text."""
    max_choices: int = 128
    """Texts of one request: prompts times `n`."""
    max_logprobs: int = 100
    """Alternatives reported for a token."""
    max_reported: int = 1 << 20
    """Log-probabilities in one answer: tokens times one more than their alternatives. Each takes about 220 bytes."""
    max_queue: int = 128
    """Texts that wait for a place in the engine."""
    max_requests: int = 1024
    """Requests that are answered at the same time."""
    max_kept: int = 64
    """Streams that are kept."""
    idle_seconds: float = 3600.0
    """Time after which a stream that nobody has used is deleted."""
    body_seconds: float = 30.0
    """Time in which a request has to arrive; a snapshot that is larger than `max_body` has more."""
    write_seconds: float = 30.0
    """Time in which a client has to take what was sent, or at least 64 KiB of it."""

    def check_reported(self, n_token: int, top: int | None) -> None:
        """Refuse an answer with more log-probabilities than memory should hold.

        Raises:
            ApiError: for too many.
        """
        if top is not None and n_token * (top + 1) > self.max_reported:
            raise ApiError(
                400,
                f"{n_token:,} tokens with {top} alternatives each are {n_token * (top + 1):,} log-probabilities; one "
                f"answer has at most {self.max_reported:,}",
                param="logprobs",
            )


class ApiError(Exception):
    """An answer other than success."""

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
        """Return the error as the OpenAI API writes it."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the error as a response."""
        return json_response(self.value(), self.status, self.headers)


def _writable(text: str) -> str:
    """Return a text of a request so that an answer can hold it."""
    return text.encode("utf-8", errors="backslashreplace").decode()


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a value as JSON; what is not a number in JSON is an error here, not at the client."""
    return JSONResponse(value, status, headers)


def dumps(value: object) -> str:
    """Return JSON in one line, for an event; in ASCII, for clients that end lines at U+0085 or U+2028 too."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def parsed(body: bytes) -> JsonObject:
    """Return the fields of a JSON object.

    Raises:
        ApiError: if the body is none.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} is 0x{body[error.start]:02x}") from None
    except RecursionError:
        raise ApiError(400, "the body is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {type(value).__name__}; expected a JSON object")
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


async def fields_of(request: Request, known: frozenset[str]) -> Fields:
    """Return the fields of a request's JSON body; an empty body has none.

    Raises:
        ApiError: for a body that is no JSON object, or a field that is not known.
    """
    body = await request.body()
    return Fields(parsed(body) if body else {}, known)


class Fields:
    """The fields of a request, taken out one by one; null counts as absent.

    Raises:
        ApiError: for a field that is not known.
    """

    def __init__(self, values: JsonObject, known: frozenset[str]):
        unknown = sorted(set(values) - known)
        if unknown:
            named = ", ".join(each[:80] for each in unknown[:8])
            raise ApiError(
                400,
                f"unknown or unsupported: {named}; this route knows {', '.join(sorted(known))}",
                param=unknown[0][:80],
                code="unknown_parameter",
            )
        self._values = {name: value for name, value in values.items() if value is not None}
        for name, value in self._values.items():
            try:
                _check_characters(name, value)
            except RecursionError:
                raise ApiError(400, f"{name} is nested too deeply", param=name) from None

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def raw(self, name: str) -> object:
        """Return a field as it came; None if it is absent."""
        return self._values.get(name)

    def whole(self, name: str, default: T, low: int, high: int) -> int | T:
        """Return a whole number of a range."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise ApiError(400, f"{name} is {_short(value)}; expected a whole number from {low} to {high}", param=name)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Return a number of a range."""
        value = self._values.get(name, default)
        if type(value) not in (int, float) or not low <= value <= high:
            raise ApiError(400, f"{name} is {_short(value)}; expected a number from {low:g} to {high:g}", param=name)
        return float(value)

    def flag(self, name: str) -> bool:
        """Return true or false; false by default."""
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            raise ApiError(400, f"{name} is {_short(value)}; expected true or false", param=name)
        return value

    def text(self, name: str) -> str | None:
        """Return a string, if it is there."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise ApiError(400, f"{name} is {_short(value)}; expected a string", param=name)
        return value

    def only(self, name: str, *neutral: object) -> None:
        """Refuse a field that has no effect here, unless its value asks for none."""
        value = self._values.get(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
            raise ApiError(
                400,
                f"{name} is {_short(value)}, which is not supported; leave it out",
                param=name,
                code="unsupported_parameter",
            )

    def strings(self, name: str, most: int) -> list[str]:
        """Return a string or a list of up to `most` strings, none of them empty."""
        value = self._values.get(name, [])
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or len(value) > most or not all(isinstance(each, str) for each in value):
            raise ApiError(400, f"{name} is {_short(value)}; expected a string, or up to {most} strings", param=name)
        if not all(value):
            raise ApiError(400, f"{name} has an empty string; expected at least one character", param=name)
        return value

    def seed(self) -> int:
        """Return the seed, or a new one."""
        value = self.whole("seed", None, -(2**63), 2**64 - 1)
        return secrets.randbelow(2**31) if value is None else value

    def sampling(self) -> Sampling:
        """Return how tokens are drawn: the defaults are those of `txl generate`."""
        temperature = self.number("temperature", 1.0, 0.0, 100.0)
        top_p = self.number("top_p", 1.0, 0.0, 1.0)
        top_k = self._values.get("top_k", 40)
        top_k = None if top_k in (-1, 0) and type(top_k) is int else self.whole("top_k", 40, 1, 2**31)
        return of_user(lambda: Sampling(top_k, None if top_p == 1.0 else top_p, temperature), "top_p")


def of_user(make: Callable[[], T], param: str | None = None) -> T:
    """Return what a function gives; what it refuses is a mistake of the client's."""
    try:
        return make()
    except UserError as error:
        raise ApiError(400, str(error), param=param) from None


def _check_characters(name: str, value: object) -> None:
    """Refuse halves of surrogate pairs: they are no characters, and no answer could hold them."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(value[error.start])
            raise ApiError(
                400, f"{name} has half a surrogate pair (U+{code:04X} at character {error.start})", param=name
            ) from None
    elif isinstance(value, list):
        for each in value:
            if isinstance(each, str | list):
                _check_characters(name, each)
    elif isinstance(value, dict):
        for each in value.values():
            _check_characters(name, each)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
