"""The kernels for both ends of a training step on a GPU: results and gradients are those of the modules in float64.

On a CPU the kernels run in Triton's interpreter (`make triton`), on a GPU as compiled kernels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.kernel_devices import DEVICES, INTERPRETED
from torch import Tensor, nn

from txl.config import TransformerXLConfig
from txl.models import adaptive, build_model, family
from txl.models import loss as losses_of
from txl.models.layers import LockedDropout

V = 13
CONFIG = TransformerXLConfig(
    n_layer=1, d_model=10, n_head=1, d_head=4, d_inner=5, mem_len=3, dropout=0.0, dropout_out=0.4, dropout_embed=0.3,
    dropout_words=0.5, locked_dropout=True, activation_reg=0.3, temporal_reg=0.2,
)  # fmt: skip
CHANGES = {
    "as Penn Treebank": {},
    "no dropout": {"dropout_out": 0.0, "dropout_embed": 0.0, "dropout_words": 0.0},
    "no regularisers": {"activation_reg": 0.0, "temporal_reg": 0.0},
}


@pytest.fixture(autouse=True)
def in_kernels(monkeypatch):
    """In the interpreter, choose the kernels also for tensors of the CPU."""
    if INTERPRETED:

        def dtype_of(tensor: Tensor, *_: Tensor) -> torch.dtype | None:
            return None if tensor.dtype == torch.float64 else tensor.dtype

        for module in (family, adaptive, losses_of):
            monkeypatch.setattr(module, "fused_dtype", dtype_of)


@pytest.fixture(autouse=True)
def alternating(monkeypatch):
    """Draw the same masks everywhere: every third number is dropped."""

    def mask(like: Tensor) -> Tensor:
        return (torch.arange(like.numel(), device=like.device) % 3 > 0).to(like.dtype).view(like.shape)

    monkeypatch.setattr(Tensor, "bernoulli_", lambda self, _: self.copy_(mask(self)))
    monkeypatch.setattr(
        torch.nn.functional, "dropout", lambda rows, p, *_: rows if p == 0 else rows * mask(rows) / (1 - p)
    )


def both(changes: dict[str, Any], device: str) -> tuple[Any, Any]:
    """Return a model in float32, which computes in kernels, and the same model in float64."""
    models = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = build_model(dataclasses.replace(CONFIG, **changes), V).to(device)
        for parameter in model.parameters():
            parameter.data.normal_(0.0, 0.5)
        models.append(model.to(dtype).train())
    return models[0], models[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("changes", CHANGES.values(), ids=list(CHANGES))
@pytest.mark.parametrize(("n_lane", "n_token"), [(1, 1), (3, 7), (2, 4)])
def test_embeddings_and_their_gradient(n_lane, n_token, changes, device):
    torch.manual_seed(n_token)
    tokens = torch.randint(V, (n_token, n_lane), device=device).t()
    begins, above = torch.arange(n_lane, device=device) % 2 == 0, torch.randn(n_lane, n_token, 10, device=device)
    results = []
    for model in both(changes, device):
        hidden = model._embedded(tokens, model.init_state(n_lane), begins=begins)
        grad = torch.autograd.grad(hidden, model.embedding.tables[0], above.to(hidden.dtype))
        results.append((hidden, *grad))
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("changes", CHANGES.values(), ids=list(CHANGES))
@pytest.mark.parametrize("of_dropped", [False, True])
@pytest.mark.parametrize(("n_lane", "n_token", "time_major"), [(1, 1, False), (3, 7, True), (2, 4, False)])
def test_dropped_states_regularisers_and_the_gradient(n_lane, n_token, time_major, of_dropped, changes, device):
    torch.manual_seed(n_token)
    shape = (n_token, n_lane, 16) if time_major else (n_lane, n_token, 16)
    drawn, above = torch.randn(shape, device=device), torch.randn(n_lane, n_token, 10, device=device)
    results = []
    for model in both(changes, device):
        model.regularises_dropped = of_dropped
        leaf = drawn.to(model.softmax.bias.dtype).requires_grad_()
        hidden = (leaf.transpose(0, 1) if time_major else leaf)[..., :10]
        dropped, penalty = model._regularised(hidden)
        total = (dropped * above).sum() + 3.0 * penalty
        results.append((dropped, penalty, *torch.autograd.grad(total, leaf)))
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("many", [0, 16], ids=["summed first", "added whole"])
@pytest.mark.parametrize("changes", [{}, {"cutoffs": (4, 9)}, {"tie_embeddings": False}], ids=["tied", "cut", "untied"])
def test_a_training_step_adds_both_gradients_of_a_table(changes, many, device, monkeypatch):
    monkeypatch.setattr("txl.models.fused_ends._MANY", many)
    tokens, targets = (torch.arange(14, device=device).view(2, 7) * step % V for step in (3, 5))
    results = []
    for model in both(changes, device):
        loss, penalty, _ = model.training_terms(tokens, targets, model.init_state(2))
        results.append([loss, penalty, *torch.autograd.grad(loss + penalty, list(model.parameters()))])
        assert model.embedding.shared is None
        again, penalty, _ = model.training_terms(tokens, targets, model.init_state(2))
        repeated = torch.autograd.grad(again + penalty, list(model.parameters()))
        assert all(torch.equal(one, other) for one, other in zip(results[-1][2:], repeated, strict=True))
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_outside_of_the_vocabulary_becomes_no_number(device):
    model, _ = both({}, device)
    hidden = model._embedded(torch.tensor([[0, V, -1, 1]], device=device), model.init_state(1))
    assert hidden.isnan().any(dim=-1).tolist() == [[False, True, True, False]]
    (grad,) = torch.autograd.grad(hidden.sum(), model.embedding.tables[0])
    assert grad.isnan().any(), "an optimiser would not skip the step"


@pytest.mark.parametrize("device", DEVICES)
def test_modules_with_hooks_compute(device):
    model, _ = both({}, device)
    heard = []
    for module in (model.embedding, model.dropout_out):
        assert isinstance(module, nn.Module)
        module.register_forward_hook(lambda module, *_: heard.append(module))
    hidden = model._embedded(torch.zeros(1, 2, dtype=torch.int64, device=device), model.init_state(1))
    model._regularised(hidden)
    assert heard == [model.embedding, model.dropout_out]
    model.embedding.forward = lambda tokens: torch.ones(*tokens.shape, 10, device=device)  # pyright: ignore
    model.dropout_embed = LockedDropout(0.0)
    model.config.dropout_words = 0.0
    assert bool((model._embedded(torch.zeros(1, 2, dtype=torch.int64, device=device), model.init_state(1)) == 1).all())


@pytest.mark.parametrize("device", DEVICES)
def test_time_major_states_have_the_same_losses(device):
    model, exact = both({}, device)
    hidden, targets = (
        torch.randn(7, 3, 10, device=device).transpose(0, 1),
        torch.arange(21, device=device).view(3, 7) % V,
    )
    found = model._nll_of_dropped(hidden, targets)
    torch.testing.assert_close(found.double(), exact._nll_of_dropped(hidden.double(), targets), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [7, 2000])
def test_many_rows_are_summed_alike_in_every_run(count, device):
    from txl.models.fused_ends import _sums_of_rows

    torch.manual_seed(2)
    rows, numbers = torch.randn(7000, 3).to(device), torch.randint(count, (7000,)).to(device)
    found = _sums_of_rows(rows, numbers, count)
    expected = torch.zeros(count, 3, dtype=torch.float64, device=device).index_add_(0, numbers, rows.double())
    assert torch.allclose(found.double(), expected, atol=1e-4)
    assert all(torch.equal(found, _sums_of_rows(rows, numbers, count)) for _ in range(3))
