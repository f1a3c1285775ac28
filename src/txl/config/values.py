"""Values of configuration fields: declaration, parsing from JSON and from text, and error messages."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from txl.errors import UserError, did_you_mean

T = TypeVar("T")
TypeHint = Any
"""A type annotation (`int | None`, a Literal ...); Python 3.11 has no type for annotations."""
FieldValues = dict[str, Any]
"""Values of fields by name, each of the type of its field."""


class Section(Protocol):
    """A section of a configuration: an instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


class OnlyFields:
    """Base class of a configuration and its sections: a misspelt field cannot be set."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in type(self).__dataclass_fields__:  # pyright: ignore[reportAttributeAccessIssue]
            raise unknown_field(self, name)
        super().__setattr__(name, value)


def unknown_field(section: Any, name: str) -> AttributeError:
    """Return the error for a field that a section does not have; it names the nearest fields."""
    hint = did_you_mean(name, section.__dataclass_fields__)
    return AttributeError(f"{type(section).__name__} has no field {name!r}" + (f"; {hint}" if hint else ""))


LARGEST = 2**53
"""Largest absolute value of a whole number. Every JSON reader preserves numbers up to this one, and their sums and
their products with small numbers fit into the 64-bit integers of tensors."""
_IN_RANGE = f"a whole number from {-LARGEST} to {LARGEST}"


ANYTHING = object()
"""Value of `lacking` for a setting that a family without the setting ignores, whatever the value."""


def setting(
    default: object,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    expected: str = "",
    none: str = "",
    **marks: object,
) -> Any:
    """Declare a field of a configuration, with its help text and rules in its metadata.

    Args:
        default: default value of the field.
        help: help text of the command-line option.
        at_least: lowest allowed value of a number. Infinity is never allowed.
        above: limit that a number must exceed.
        at_most: highest allowed value of a number.
        below: limit that a number must stay below.
        expected: the limits in words, for error messages; empty: words made from the limits.
        none: meaning of None, for the words made from the limits.
        marks: `changes_weights`: weights mean something else with another value. `may_change`: a continued run may have
            another value, because no number that it computes depends on the field. `as_stored`: a continued run keeps
            its stored value if none is given. `drops`: the field is a dropout rate. `lacking`: the value that means the
            same as not having the field, if that is not the default.
    """
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    if limits and not expected:
        expected = _limits_in_words(**limits) + (f", or none for {none}" if none else "")
    return dataclasses.field(default=default, metadata={"help": help, "limits": limits, "expected": expected, **marks})


def _limits_in_words(
    at_least: float | None = None, above: float | None = None, at_most: float | None = None, below: float | None = None
) -> str:
    if (at_least, below) == (0, 1):
        return "a probability from 0 up to but not including 1"
    low = f"a number above {above}" if at_least is None else f"{at_least} or more"
    high = f", at most {at_most}" if at_most is not None else f", below {below}" if below is not None else ""
    return low + high


def check_ranges(section: Section, prefix: str) -> None:
    """Refuse the first number in a section that is outside its limits."""
    for item in dataclasses.fields(section):
        value, limits = getattr(section, item.name), item.metadata.get("limits")
        if not limits or (value is None and _allows_none(hints_of(type(section))[item.name])):
            continue
        fits = (
            limits.get("at_least", -math.inf) <= value <= limits.get("at_most", math.inf)
            and limits.get("above", -math.inf) < value < limits.get("below", math.inf)
        )  # fmt: skip
        require(fits, f"{prefix}{item.name}", value, item.metadata["expected"])


@functools.cache
def hints_of(section: type) -> dict[str, TypeHint]:
    """Return the types of a dataclass's fields by name."""
    return {name: hint for name, hint in typing.get_type_hints(section).items() if name in section.__dataclass_fields__}


def from_plain(
    cls: type[T], values: object, prefix: str = "", readers: dict[type, Callable[[object], object]] | None = None
) -> T:
    """Build a dataclass from plain dictionaries and lists; missing fields take their defaults.

    Args:
        cls: the dataclass; its fields may be dataclasses themselves.
        values: values as parsed from JSON.
        prefix: prefix of the names of fields in error messages: "" or "train.".
        readers: functions that build the value of a field from JSON, by the type of the field.
    """
    if not isinstance(values, dict):
        raise UserError(field=prefix.rstrip(".") or "configuration", value=values, expected="an object")
    hints = hints_of(cls)
    unknown = [name for name in values if name not in hints]
    if unknown:
        raise UserError("not known to this version", field=f"{prefix}{unknown[0]}")
    for each in dataclasses.fields(typing.cast(type[Any], cls)):
        if each.name not in values and each.default is each.default_factory is dataclasses.MISSING:
            raise UserError("missing", field=f"{prefix}{each.name}")
    arguments = {}
    for name, value in values.items():
        hint = hints[name]
        if readers and hint in readers:
            arguments[name] = readers[hint](value)
        elif dataclasses.is_dataclass(hint):
            arguments[name] = from_plain(typing.cast(type[Any], hint), value, f"{prefix}{name}.")
        else:
            arguments[name] = checked(hint, value, f"{prefix}{name}")
    return cls(**arguments)


def whole_number(text: str) -> int:
    """Parse a whole number.

    Raises:
        ValueError: if the text is not a whole number.
        OverflowError: if the number is beyond `LARGEST`; the message is the expected range.
    """
    number = int(text)
    if abs(number) > LARGEST:
        raise OverflowError(_IN_RANGE)
    return number


def parse_value(expected: TypeHint, text: str, name: str) -> Any:
    """Parse text as a value of type `expected`: "none" for None, commas in lists, "true" and "false"."""
    if text.lower() == "none" and _allows_none(expected):
        return None
    or_none = " or none" if _allows_none(expected) else ""
    expected = _without_none(expected)
    try:
        if expected is bool:
            return {"true": True, "false": False}[text.lower()]
        if typing.get_origin(expected) is tuple:
            return tuple(whole_number(part) for part in text.split(",") if part.strip())
        if typing.get_origin(expected) is Literal:
            choices = typing.get_args(expected)
            return choices[choices.index(text)]
        return whole_number(text) if expected is int else typing.cast(type[Any], expected)(text)
    except OverflowError as error:
        raise UserError(field=name, value=text, expected=str(error)) from None
    except (ValueError, KeyError):
        raise UserError(field=name, value=text, expected=_described(expected) + or_none) from None


def choices_of(hint: TypeHint) -> tuple[str, ...]:
    """Return the allowed words of a field with a Literal type; for other types an empty tuple."""
    expected = _without_none(hint)
    return typing.get_args(expected) if typing.get_origin(expected) is Literal else ()


def placeholder(hint: TypeHint) -> str:
    """Return the placeholder of a value in help texts: the choices if they are short, else a word for the type."""
    expected, none = _without_none(hint), "|none" if _allows_none(hint) else ""
    if choices := choices_of(hint):
        words = "|".join(choices) + none
        return words if len(words) <= 24 else "NAME"
    if typing.get_origin(expected) is tuple:
        return "N,N,..."
    return {int: "N", float: "X", bool: f"true|false{none}", str: "TEXT"}[expected]


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Refuse a value that breaks a rule, see `TxlError`."""
    if not holds:
        raise UserError(field=name, value=value, expected=expected)


def shown(value: object) -> str:
    """Return a value as text for messages and the command line: none, true, [1, 2]."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)


def checked(hint: TypeHint, value: object, name: str) -> Any:
    """Convert a JSON value to the type of a field, or refuse the value."""
    if value is None and _allows_none(hint):
        return None
    expected = _without_none(hint)
    items = value if isinstance(value, (list, tuple)) else (value,)
    if expected is not float and any(type(item) is int and abs(item) > LARGEST for item in items):
        raise UserError(field=name, value=value, expected=_IN_RANGE)
    if typing.get_origin(expected) is tuple and isinstance(value, (list, tuple)):
        if all(type(item) is int for item in value):
            return tuple(value)
    elif typing.get_origin(expected) is Literal:
        if value in typing.get_args(expected):
            return value
    elif expected is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise UserError("too large", field=name, expected=_described(expected)) from None
    elif type(value) is expected:
        return value
    raise UserError(field=name, value=value, expected=_described(expected))


def _allows_none(hint: TypeHint) -> bool:
    return _is_union(hint) and type(None) in typing.get_args(hint)


def _is_union(hint: TypeHint) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)  # typing.Union if one part is a Literal


def _without_none(hint: TypeHint) -> TypeHint:
    if not _is_union(hint):
        return hint
    return next(each for each in typing.get_args(hint) if each is not type(None))


def _described(expected: TypeHint) -> str:
    if typing.get_origin(expected) is Literal:
        return "one of " + ", ".join(typing.get_args(expected))
    if typing.get_origin(expected) is tuple:
        return "whole numbers separated by commas"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[expected]
