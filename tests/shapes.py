"""Check of tensor shapes while tests run: calls are compared with annotations such as `Float[Tensor, "B T E"]`.

Within a test, calls of a function with the same shapes are checked once: a check takes longer than most of the checked
functions with the tests' small tensors. `conftest.py` installs the check before txl is imported. Tests of the messages
about wrong shapes use the fixture `any_shapes`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterator
from dataclasses import is_dataclass
from inspect import isclass
from typing import Any, TypeVar, get_args, get_origin

import jaxtyping
import torch
from beartype import beartype
from torch import Tensor

PACKAGES = ("txl.attention", "txl.models", "txl.generation", "txl.evaluation")
_SHAPE = re.compile(r"\[Tensor, ['\"]")
_jaxtyped = jaxtyping.jaxtyped


def install() -> None:
    """Check the functions of `PACKAGES` whose annotations have shapes; call this before the packages are imported."""
    jaxtyping.jaxtyped = _where_shapes_are_said  # the hook decorates every function; checking all is slow
    jaxtyping.install_import_hook(list(PACKAGES), "tests.shapes.checked")


def _where_shapes_are_said(*, typechecker: Any) -> Callable[[Any], Any]:
    def decorated(given: Any) -> Any:
        said = vars(given).get("__annotations__", {}) if isclass(given) else given.__annotations__
        if not any(_SHAPE.search(str(hint)) for hint in said.values()):
            return given
        known = _jaxtyped(given, typechecker=typechecker)
        return known if isclass(given) else _checked_once(given, known)

    return decorated


_passed: set[Hashable] = set()


def forget() -> None:
    """Check every call again, as at the beginning of a test."""
    _passed.clear()


def _checked_once(function: Callable[..., Any], known: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        key = (function, *map(_key, args), *((name, _key(value)) for name, value in kwargs.items()))
        if key in _passed:
            return function(*args, **kwargs)
        result = known(*args, **kwargs)
        if not jaxtyping.config.jaxtyping_disable:
            _passed.add(key)
        return result

    return called


def _key(value: Any) -> Hashable:
    """Return what decides the shapes of results: shapes of tensors, numbers, and the module that is called."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, torch.nn.Module):
        return id(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value), tuple(each.shape for each in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value):
        yield from _tensors([*vars(value).values()])


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with checks of tensors only: tests pass other arguments of wrong types on purpose."""
    hints = {name: _checkable(hint) for name, hint in function.__annotations__.items() if _has_shape(hint)}
    if not hints:
        return function
    function.__annotations__ = hints
    return beartype(function)


def _checkable(hint: Any) -> Any:
    """Return the hint with `object` in place of each state of a tuple: a state may be of any class."""
    if get_origin(hint) is tuple:
        return tuple[tuple(object if _is_state(each) else each for each in get_args(hint))]
    return hint


def _is_state(hint: Any) -> bool:
    return isinstance(hint, TypeVar) or getattr(hint, "_is_protocol", False)


def _has_shape(hint: Any) -> bool:
    return (isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)) or any(map(_has_shape, get_args(hint)))
