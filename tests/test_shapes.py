"""The check of shapes in tests: every kind of call once in a test, wrong calls always."""

from __future__ import annotations

import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from tests import shapes


def checked(monkeypatch, function):
    """Return the function as the import hook decorates it, and a list that grows with every check."""
    checks, real = [], shapes._jaxtyped

    def counting(given, typechecker):
        known = real(given, typechecker=typechecker)
        return lambda *args, **kwargs: (checks.append(1), known(*args, **kwargs))[1]

    monkeypatch.setattr(shapes, "_jaxtyped", counting)
    return shapes._where_shapes_are_said(typechecker=shapes.checked)(function), checks


def product(one: Float[Tensor, "A B"], other: Float[Tensor, "B C"], transposed: bool = False) -> Float[Tensor, "A C"]:
    return (one @ other).T if transposed else one @ other


def test_calls_of_the_same_shapes_are_checked_once_in_a_test(monkeypatch):
    function, checks = checked(monkeypatch, product)
    for _ in range(3):
        function(torch.ones(2, 3), torch.ones(3, 4))
    assert len(checks) == 1
    function(torch.ones(2, 3), other=torch.ones(3, 5))
    function(torch.ones(2, 3).double(), torch.ones(3, 4).double())
    assert len(checks) == 3
    shapes.forget()
    function(torch.ones(2, 3), torch.ones(3, 4))
    assert len(checks) == 4


def test_wrong_shapes_are_refused_after_right_ones(monkeypatch):
    function, _ = checked(monkeypatch, product)
    function(torch.ones(2, 3), torch.ones(3, 4))
    for _ in range(2):
        with pytest.raises(jaxtyping.TypeCheckError):
            function(torch.ones(2, 3), torch.ones(3, 4), transposed=True)
        with pytest.raises(jaxtyping.TypeCheckError):
            function(torch.ones(2, 3), torch.ones(3))


def test_what_was_not_checked_is_checked_later(monkeypatch):
    function, _ = checked(monkeypatch, product)
    with monkeypatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        function(torch.ones(2, 3), torch.ones(3, 4), transposed=True)
    with pytest.raises(jaxtyping.TypeCheckError):
        function(torch.ones(2, 3), torch.ones(3, 4), transposed=True)
