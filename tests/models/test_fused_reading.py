"""Segments read by the kernels of a recorded evaluation: h^N and memory are those of the modules.

On a CPU the kernels run in Triton's interpreter (`make triton`), on a GPU as compiled kernels.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.kernel_devices import DEVICES
from tests.models.test_fused_layers import TINY, built

from txl.devices import Captured
from txl.evaluation import recorded
from txl.evaluation.perplexity import evaluate_with
from txl.evaluation.recorded import Recordings
from txl.evaluation.stream import Settings
from txl.models.fused_reading import FusedWeights, FusedWindow
from txl.models.memory import Memory


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("changes", "n_new"),
    [({}, 4), ({"untie_r": True, "window": 6}, 3), ({"clamp_len": 3, "mem_len": 2}, 5)],
    ids=["memory", "untied, window", "memory shorter than a segment, clamp"],
)
@torch.no_grad()
def test_reading_is_that_of_the_modules(device, changes, n_new):
    """Memory fills and moves; weights change in the end; the modules continue from the window's memory."""
    model = built(dataclasses.replace(TINY, **changes), device).eval()
    tokens = torch.randint(30, (3, 7 * n_new), generator=torch.Generator().manual_seed(0)).to(device)
    first, *others = tokens.split(n_new, dim=1)
    _, eager = model.hidden_states(first, model.init_state(3))
    weights = FusedWeights(model, torch.float32)
    window, state = FusedWindow(eager, n_new, weights), eager
    for number, segment in enumerate(others):
        if number == 4:  # as between two evaluations of a training run
            for parameter in model.parameters():
                parameter.mul_(1.1)
            weights.refresh()
        held = model.projections(state, state.hidden[0], n_new)
        assert held is not None
        window.load(dataclasses.replace(state, projections=held))
        hidden = model.read_window(segment, window)
        expected, eager = model.hidden_states(segment, eager)
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
        state = window.after()
        assert_same(state, eager)
    assert_same(model.hidden_states(first[:, :2], state)[1], model.hidden_states(first[:, :2], eager)[1])


def assert_same(found: Memory, expected: Memory) -> None:
    assert found.projections is not None
    assert expected.projections is not None
    torch.testing.assert_close(found.hidden, expected.hidden, rtol=1e-4, atol=1e-4)
    for kind in ("keys", "values"):
        pair = getattr(found.projections, kind), getattr(expected.projections, kind)
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("right_bfloat16")
@pytest.mark.parametrize("device", DEVICES)
def test_evaluations_in_bfloat16_read_so(device, monkeypatch):
    """On a GPU in graphs, on a CPU without: the loss is that of the modules, and stays so when weights change."""
    config = dataclasses.replace(TINY, attention="triton" if device == "cuda" else "shifted")
    model, kept, text = built(config, device).eval(), Recordings(), np.random.default_rng(0).integers(0, 30, 105)
    settings = Settings(4, batch_size=2, dtype="bfloat16")
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(recorded, "records", lambda _: False)
            expected = evaluate_with(model, text, settings).nll
        with monkeypatch.context() as patch:
            if device == "cpu":
                patch.setattr(Captured, "__call__", lambda self, *given: self._function(*given))
                patch.setattr(recorded, "records", lambda _: True)
                patch.setattr(recorded, "fuses", lambda *_: True)
            assert evaluate_with(model, text, settings, recordings=kept).nll == pytest.approx(expected, rel=5e-3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.8)
    assert kept._recorded is not None
    assert kept._recorded.weights is not None
