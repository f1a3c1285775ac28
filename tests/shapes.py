"""The check of tensor shapes while tests run: annotations such as `Float[Tensor, "B T E"]`, at every call.

`conftest.py` installs it before txl is imported. A test of what users are told about wrong shapes takes the fixture
`any_shapes`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from inspect import isclass
from typing import Any, TypeVar, get_args, get_origin

import jaxtyping
from beartype import beartype

PACKAGES = ("txl.attention", "txl.models", "txl.generation", "txl.evaluation")
_SHAPE = re.compile(r"\[Tensor, ['\"]")
_jaxtyped = jaxtyping.jaxtyped


def install() -> None:
    """Have the functions of `PACKAGES` checked that say shapes; call it before they are imported."""
    jaxtyping.jaxtyped = _where_shapes_are_said  # the hook puts it in front of every function, which would be slow
    jaxtyping.install_import_hook(list(PACKAGES), "tests.shapes.checked")


def _where_shapes_are_said(*, typechecker: Any) -> Callable[[Any], Any]:
    def decorated(given: Any) -> Any:
        said = vars(given).get("__annotations__", {}) if isclass(given) else given.__annotations__
        if not any(_SHAPE.search(str(hint)) for hint in said.values()):
            return given
        known = _jaxtyped(given, typechecker=typechecker)
        return known if isclass(given) else _unless_compiling(given, known)

    return decorated


def _unless_compiling(function: Callable[..., Any], known: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (function if torch.compiler.is_compiling() else known)(*args, **kwargs)

    return called


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its tensors checked, and nothing else: tests give other arguments wrong on purpose."""
    hints = {name: _checkable(hint) for name, hint in function.__annotations__.items() if _has_shape(hint)}
    if not hints:
        return function
    function.__annotations__ = hints
    return beartype(function)


def _checkable(hint: Any) -> Any:
    """Return the hint with anything in the place of a state, which may be of any class."""
    if get_origin(hint) is tuple:
        return tuple[tuple(object if _is_state(each) else each for each in get_args(hint))]
    return hint


def _is_state(hint: Any) -> bool:
    return isinstance(hint, TypeVar) or getattr(hint, "_is_protocol", False)


def _has_shape(hint: Any) -> bool:
    return (isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)) or any(map(_has_shape, get_args(hint)))
