"""Fields of a configuration: declaration, rules, and values from JSON and from text."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from txl.errors import Text, UserError, did_you_mean
from txl.errors import shown as shown

T = TypeVar("T")
TypeHint = Any  # a type annotation (`int | None`, a Literal ...); Python 3.11 has no type for annotations
FieldValues = dict[str, Any]  # values of fields by name, each of the type of its field
# Largest absolute value of a whole number. Every JSON reader preserves numbers up to this one, and their sums and their
# products with small numbers fit into the 64-bit integers of tensors.
LARGEST = 2**53
_IN_RANGE = f"a whole number from {-LARGEST} to {LARGEST}"
# Value of `lacking` for a setting that a family without the setting ignores, whatever the value.
ANYTHING = object()
_KEEPS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


@dataclass
class Section:
    """Section of a configuration. Its fields have rules, and a misspelt field cannot be set."""

    section: ClassVar[str] = ""  # "train" of "train.steps"

    def __setattr__(self, name: str, value: object) -> None:
        if name not in hints_of(type(self)):
            hint = did_you_mean(name, hints_of(type(self)))
            raise AttributeError(f"{type(self).__name__} has no field {name!r}" + (f"; {hint}" if hint else ""))
        super().__setattr__(name, value)

    def require(self, holds: bool, name: str, expected: Text = "", but: Text = "") -> None:
        """Refuse the value of a field that breaks a rule; `expected` and `but` as for `TxlError`."""
        if not holds:
            raise UserError(field=f"{self.section}.{name}", value=getattr(self, name), but=but, expected=expected)

    def check_ranges(self) -> None:
        """Refuse the first number that is outside its limits."""
        for item in dataclasses.fields(self):
            value: Any = getattr(self, item.name)
            limits = item.metadata.get("limits")
            may_be_none = kind_of(hints_of(type(self))[item.name]).optional
            if limits and not (may_be_none and value is None):
                is_within = all(_KEEPS[name](value, bound) for name, bound in limits.items())
                self.require(is_within and -math.inf < value < math.inf, item.name, item.metadata["expected"])


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
        at_least, above, at_most, below: limits of a number. Infinity is never allowed.
        expected: the limits in words, for error messages; empty: words made from the limits.
        none: meaning of None, for the words made from the limits.
        marks: `changes_weights`: weights mean something else with another value. `may_change`: a continued run may have
            another value, because no number that it computes depends on the field. `as_stored`: a continued run keeps
            its stored value if none is given. `drops`: the field is a dropout rate. `lacking`: the value that means the
            same as not having the field, if that is not the default.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    limits = {name: bound for name, bound in bounds.items() if bound is not None}
    if limits and not expected:
        low = f"{at_least} or more" if at_least is not None else f"a number above {above}"
        high = "" if at_most is None else f", at most {at_most}"
        expected = low + (high if below is None else f", below {below}") + (f", or none for {none}" if none else "")
        if limits == {"at_least": 0, "below": 1}:
            expected = "a number from 0 up to but not including 1"
    return dataclasses.field(default=default, metadata={"help": help, "limits": limits, "expected": expected, **marks})


@functools.cache
def hints_of(section: type) -> dict[str, TypeHint]:
    """Return the types of a dataclass's fields by name."""
    hints = typing.get_type_hints(section)
    return {item.name: hints[item.name] for item in dataclasses.fields(section)}


@dataclass(frozen=True)
class Kind:
    """Type of a field: `base` is bool, int, float, str (of choices, too) or tuple (of whole numbers)."""

    base: type
    choices: tuple[str, ...]
    optional: bool

    def words(self) -> str:
        """Return the type in words, for messages."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        return words.get(self.base, "whole numbers separated by commas")


@functools.cache
def kind_of(hint: TypeHint) -> Kind:
    """Return the kind of values that a type annotation allows."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)  # typing.Union if one part is a Literal
    parts = typing.get_args(hint) if is_union else (hint,)
    kind = next(part for part in parts if part is not type(None))
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    return Kind(str if choices else typing.get_origin(kind) or kind, choices, type(None) in parts)


def from_plain(
    cls: type[T], values: object, prefix: str = "", readers: dict[type, Callable[[object], object]] | None = None
) -> T:
    """Build a dataclass, and the dataclasses in its fields, from parsed JSON; missing fields take their defaults.

    Args:
        cls: the dataclass.
        values: values as parsed from JSON.
        prefix: prefix of the names of fields in error messages: "" or "train.".
        readers: functions that build the value of a field from JSON, by the type of the field.
    """
    if not isinstance(values, dict):
        raise UserError(field=prefix.rstrip(".") or "configuration", value=values, expected="an object")
    hints, arguments = hints_of(cls), {}
    for name, value in values.items():
        hint, field = hints.get(name), f"{prefix}{name}"
        if hint is None:
            raise UserError("not known to this version", field=field)
        if readers and hint in readers:
            arguments[name] = readers[hint](value)
        elif dataclasses.is_dataclass(hint):
            arguments[name] = from_plain(typing.cast(type[Any], hint), value, f"{field}.")
        else:
            arguments[name] = checked(hint, value, field)
    for item in dataclasses.fields(typing.cast(type[Any], cls)):
        if item.name not in values and item.default is item.default_factory is dataclasses.MISSING:
            raise UserError("missing", field=f"{prefix}{item.name}")
    return cls(**arguments)


def checked(hint: TypeHint, value: object, name: str) -> Any:
    """Convert a JSON value to the type of a field, or refuse the value."""
    kind = kind_of(hint)
    if value is None and kind.optional:
        return None
    if kind.base is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise UserError("too large", field=name, expected=kind.words()) from None
    if kind.base is tuple and isinstance(value, list):
        value = tuple(value)
    items, item_type = (value, int) if kind.base is tuple and isinstance(value, tuple) else ((value,), kind.base)
    if not all(type(item) is item_type for item in items) or (kind.choices and value not in kind.choices):
        raise UserError(field=name, value=value, expected=kind.words())
    if any(isinstance(item, int) and abs(item) > LARGEST for item in items):
        raise UserError(field=name, value=value, expected=_IN_RANGE)
    return value


def parse_value(hint: TypeHint, text: str, name: str) -> Any:
    """Parse text as a value of a type: "none" for None, commas in lists, "true" and "false"."""
    kind = kind_of(hint)
    if kind.optional and text.lower() == "none":
        return None
    try:
        if kind.base is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind.base is tuple:
            return tuple(whole_number(part) for part in text.split(",") if part.strip())
        if kind.choices:
            return kind.choices[kind.choices.index(text)]
        return whole_number(text) if kind.base is int else kind.base(text)
    except OverflowError as error:
        raise UserError(field=name, value=text, expected=str(error)) from None
    except (ValueError, KeyError):
        expected = kind.words() + (" or none" if kind.optional else "")
        raise UserError(field=name, value=text, expected=expected) from None


def whole_number(text: str) -> int:
    """Parse a whole number; other texts are a ValueError, numbers beyond `LARGEST` an OverflowError with the range."""
    number = int(text)
    if abs(number) > LARGEST:
        raise OverflowError(_IN_RANGE)
    return number


def placeholder(hint: TypeHint) -> str:
    """Return the placeholder of a value in help texts: the choices if they are short, else a word for the type."""
    kind = kind_of(hint)
    if choices := kind.choices or (("true", "false") if kind.base is bool else ()):
        words = "|".join([*choices, *(["none"] if kind.optional else [])])
        return words if len(words) <= 24 else "NAME"
    return {int: "N", float: "X", str: "TEXT"}.get(kind.base, "N,N,...")


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Refuse a value that breaks a rule, see `TxlError`."""
    if not holds:
        raise UserError(field=name, value=value, expected=expected)
