"""Imitation of recorded steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from txl.devices import Captured
from txl.generation.steps import StaticStep


@pytest.fixture
def recording(monkeypatch):
    """Function that imitates graphs on a CPU: recording computes nothing, and each replay calls the function."""
    recorded = []

    def record(self: Captured) -> Callable[[], None]:
        recorded.append(self)

        def replay() -> None:
            self.outputs = self._function(*self.inputs)

        return replay

    def begin() -> list[Captured]:
        monkeypatch.setattr(Captured, "_record", record)
        monkeypatch.setattr("txl.generation.steps.runs_ahead", lambda _: True)
        real = StaticStep.__init__
        monkeypatch.setattr(StaticStep, "__init__", lambda self, *given, captured: real(self, *given, captured=True))
        return recorded

    return begin
