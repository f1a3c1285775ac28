"""The fields of each route's request: a class per route, whose fields are checked in one visit of the request's JSON.

A field is declared with the function that checks its value, and with its value where the request has none (or null).
"""

from __future__ import annotations

import dataclasses
import math
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from txl.errors import brief
from txl.files import JsonObject
from txl.generation.sampling import Sampling, checked_forbidden
from txl.serving.requests import ApiError, of_user
from txl.serving.service import Service

T = TypeVar("T")
Check = Callable[[str, Any, Service], Any]  # takes a field's name, its value in JSON, and the service; raises ApiError
_LONGEST_STOP = 1 << 10  # characters of a stop string: the end of a text is compared with it at each token
_MOST_BIASES = 1 << 10


def checked(schema: type[T], values: JsonObject, service: Service) -> T:
    """Return a request's fields as an instance of their class (ApiError for an unknown field or a refused value)."""
    fields = {field.name: field for field in dataclasses.fields(schema)}  # pyright: ignore[reportArgumentType]
    values = {name: value for name, value in values.items() if value is not None}
    if unknown := sorted(set(values) - set(fields)):
        message = f"{unknown[0][:80]} is unknown or unsupported; this route knows {', '.join(sorted(fields))}"
        raise ApiError(400, message, param=unknown[0][:80], code="unknown_parameter")
    for name, field in fields.items():
        if name in values:
            values[name] = field.metadata["check"](name, values[name], service)
        elif callable(field.default):
            values[name] = field.default(service)
    return schema(**values)


def _refused(name: str, value: object, expected: str, code: str | None = None) -> ApiError:
    text = brief(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return ApiError(400, f"{name} is {text}; expected {expected}", param=name, code=code)


def _field(check: Check, default: object = None) -> Any:
    """Declare a field; a `default` that is a function is called with the service."""
    return dataclasses.field(default=default, metadata={"check": check})


def _number(low: float, high: float | str, kind: type = float, neutral: Sequence[float] = ()) -> Check:
    """Return the check of a number, whole if `kind` is int; `high` may name a limit; `neutral` values become None."""

    def check(name: str, value: Any, service: Service) -> float | None:
        most = getattr(service.limits, high) if isinstance(high, str) else high
        if kind is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)  # JavaScript may write any number so
        is_number = type(value) in (int, kind)
        if is_number and value in neutral:
            return None
        if not is_number or not low <= value <= most:
            raise _refused(name, value, f"a {'whole ' if kind is int else ''}number from {low} to {most}")
        return kind(value)

    return check


def _typed(kind: type, expected: str) -> Check:
    def check(name: str, value: Any, service: Service) -> Any:
        if not isinstance(value, kind):
            raise _refused(name, value, expected)
        return value

    return check


_flag, _text, _ids = _typed(bool, "true or false"), _typed(str, "a string"), _typed(list, "a list of token ids")


def _model(name: str, value: Any, service: Service) -> str:
    service.check_model(_text(name, value, service))
    return value


def _neutral(*values: object) -> Check:
    """Return the check of an unsupported field: only values that request no effect are accepted."""

    def check(name: str, value: Any, service: Service) -> object:
        if not any(type(value) is type(neutral) and value == neutral for neutral in values):
            raise _refused(name, value, "no value: it is not supported", "unsupported_parameter")
        return value

    return check


def _stop(name: str, value: Any, service: Service) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or len(strings) > 4 or not all(
        isinstance(text, str) and 1 <= len(text) <= _LONGEST_STOP for text in strings
    ):  # fmt: skip
        raise _refused(name, value, f"up to 4 strings of 1 to {_LONGEST_STOP:,} characters")
    return tuple(strings)


def _banned(name: str, value: Any, service: Service) -> tuple[int, ...]:
    """Return the ids of the tokens that are never drawn: those of the vocabulary, and those banned with -100."""
    if not isinstance(value, dict) or len(value) > _MOST_BIASES or not all(
        type(bias) in (int, float) and bias in (0, -100) and re.fullmatch("[0-9]{1,12}", token)
        for token, bias in value.items()
    ):  # fmt: skip
        expected = f"up to {_MOST_BIASES} token ids, each with -100, which bans it, or 0"
        raise _refused(name, value, expected, "unsupported_parameter")
    ids = [int(token) for token, bias in value.items() if bias]
    texts = service.texts
    return of_user(lambda: checked_forbidden([*texts.forbidden, *ids], len(texts.vocabulary)), name)


def _random_seed(service: Service) -> int:
    return secrets.randbelow(2**31)


def _seed(name: str, value: Any, service: Service) -> int:
    """Return the seed; -1 stands for a random one, as for other servers."""
    seed = _number(-(2**63), 2**64 - 1, int)(name, value, service)
    return _random_seed(service) if seed == -1 else seed % 2**63


def _default_tokens(service: Service) -> int:
    return min(16, service.limits.max_tokens)  # 16 as in the OpenAI API


def _usage(name: str, value: Any, service: Service) -> bool:
    return checked(_StreamOptions, _typed(dict, "an object")(name, value, service), service).include_usage


@dataclass(frozen=True)
class _StreamOptions:
    include_usage: bool = _field(_flag, False)  # an event stream ends with the token counts


@dataclass(frozen=True)
class _Drawing:
    """Fields of the requests that draw tokens; the defaults are those of `txl generate`."""

    temperature: float = _field(_number(0, 100), 1.0)
    top_p: float | None = _field(_number(math.nextafter(0, 1), 1, neutral=(1,)))
    top_k: int | None = _field(_number(1, 2**31, int, neutral=(-1, 0)), 40)
    stop: tuple[str, ...] = _field(_stop, ())

    @property
    def sampling(self) -> Sampling:
        """Settings of sampling."""
        return Sampling(self.top_k, self.top_p, self.temperature)


@dataclass(frozen=True)
class Reporting:
    """Fields of the requests that list tokens."""

    logprobs: int | None = _field(_number(0, "max_logprobs", int))
    attention: bool = _field(_flag, False)
    stream: bool = _field(_flag, False)

    @property
    def top(self) -> int | None:
        """Number of alternatives listed for each token; None: no tokens are listed."""
        return 0 if self.logprobs is None and self.attention else self.logprobs


@dataclass(frozen=True)
class CompletionRequest(_Drawing):
    """`POST /v1/completions`."""

    model: str | None = _field(_model)
    prompt: object = _field(_typed(object, ""))
    presence_penalty: object = _field(_neutral(0, 0.0))
    frequency_penalty: object = _field(_neutral(0, 0.0))
    best_of: object = _field(_neutral(1))
    suffix: object = _field(_neutral(""))
    user: str | None = _field(_text)  # no effect
    stream: bool = _field(_flag, False)
    n: int = _field(_number(1, "max_choices", int), 1)
    max_tokens: int = _field(_number(0, "max_tokens", int), _default_tokens)
    logprobs: int | None = _field(_number(0, "max_logprobs", int))
    echo: bool = _field(_flag, False)
    stream_options: bool | None = _field(_usage)
    seed: int = _field(_seed, _random_seed)
    logit_bias: tuple[int, ...] = _field(_banned, lambda service: service.texts.forbidden)

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options requires stream: true", param="stream_options")

    @property
    def scores_prompts(self) -> bool:
        """True if the tokens of the prompts are scored and listed too."""
        return self.echo and self.logprobs is not None


@dataclass(frozen=True)
class AppendRequest(Reporting):
    """`POST /v1/streams/ID/append`."""

    text: str | None = _field(_text)
    tokens: Sequence[Any] | None = _field(_ids)


@dataclass(frozen=True)
class CreateRequest(AppendRequest):
    """`POST /v1/streams`, unless its body is a snapshot."""

    model: str | None = _field(_model)
    seed: int = _field(_seed, _random_seed)


@dataclass(frozen=True)
class GenerateRequest(_Drawing, Reporting):
    """`POST /v1/streams/ID/generate`."""

    max_tokens: int = _field(_number(1, "max_tokens", int), _default_tokens)
    seed: int | None = _field(_seed)


@dataclass(frozen=True)
class ForkRequest:
    """`POST /v1/streams/ID/fork`."""

    at: int | None = _field(_number(0, 2**62, int))
    token: int | None = _field(
        lambda name, value, service: _number(0, len(service.texts.vocabulary) - 1, int)(name, value, service)
    )
    seed: int | None = _field(_seed)


@dataclass(frozen=True)
class TokenizeRequest:
    """`POST /tokenize`."""

    model: str | None = _field(_model)
    prompt: str | None = _field(_text)
    add_special_tokens: bool = _field(_flag, False)  # no effect: an encoded text has its special tokens in any case


@dataclass(frozen=True)
class DetokenizeRequest:
    """`POST /detokenize`."""

    model: str | None = _field(_model)
    tokens: Sequence[Any] | None = _field(_ids)
