"""Cross-entropy in the compiled library against PyTorch's in float64: losses, gradients, threads, conditions of use."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from inspect import unwrap

import pytest
import torch
import torch.nn.functional as F
from tests.native.threads import assert_same_with_any_number_of_threads
from torch import Tensor

from txl.config import TransformerXLConfig
from txl.models import build_model, cross_entropy
from txl.models.cross_entropy import linear_cross_entropy
from txl.native.build import compiled_code, why_not
from txl.native.operations import compiled_cross_entropy, serves

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no compiled library: {why_not()}")

DTYPES = (torch.float32, torch.bfloat16)
CLASSES = [1, 2, 15, 16, 17, 63, 64, 65, 130, 10_001]


def drawn(n_row: int, n_class: int, dtype: torch.dtype, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [n_row,n_class], targets [n_row], and a factor for each loss [n_row]."""
    torch.manual_seed(n_row * 1000 + n_class)
    logits = (scale * torch.randn(n_row, n_class)).to(dtype).requires_grad_()
    return logits, torch.randint(n_class, (n_row,)), torch.randn(n_row)


def in_float64(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    exact = logits.detach().double().requires_grad_()
    losses = F.cross_entropy(exact, targets, reduction="none")
    [gradient] = torch.autograd.grad(losses, exact, weights.double())
    return losses.detach(), gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_class", CLASSES)
def test_losses_and_gradients_are_those_of_float64(n_class, dtype):
    logits, targets, weights = drawn(9, n_class, dtype)
    losses, gradient = in_float64(logits, targets, weights)
    found = compiled_cross_entropy(logits, targets)
    assert found is not None
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), losses, rtol=1e-6, atol=2e-6)
    [ours] = torch.autograd.grad(found, logits, weights)
    assert ours.dtype == dtype
    # In bfloat16 the only additional error is one rounding of the gradient.
    torch.testing.assert_close(ours.double(), gradient, rtol=4e-3 if dtype == torch.bfloat16 else 3e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_at_least_as_near_to_float64_as_pytorch_s_is(dtype):
    logits, targets, weights = drawn(200, 10_000, dtype)
    losses, _ = in_float64(logits, targets, weights)
    found = compiled_cross_entropy(logits.detach(), targets)
    assert found is not None
    theirs = F.cross_entropy(logits.detach().float(), targets, reduction="none")
    assert (found - losses).abs().mean() <= 1.1 * (theirs - losses).abs().mean()


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits_give_what_pytorch_gives(dtype):
    rows = torch.zeros(6, 70)
    rows[0, 3], rows[0, 40] = 1e30, -1e30
    rows[1] = -300.0
    rows[2, 5:] = -math.inf
    rows[3, 69] = math.inf
    rows[4, 17] = math.nan
    rows[5, 68] = math.nan
    logits, targets = rows.to(dtype).requires_grad_(), torch.tensor([40, 1, 2, 3, 4, 5])
    losses, gradient = in_float64(logits, targets, torch.ones(6))
    found = compiled_cross_entropy(logits, targets)
    assert found is not None
    torch.testing.assert_close(found.double(), losses, rtol=1e-6, atol=1e-6, equal_nan=True)
    [ours] = torch.autograd.grad(found.sum(), logits)
    torch.testing.assert_close(ours.double(), gradient, rtol=4e-3, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_with_any_number_of_threads(dtype):
    logits, targets, weights = drawn(301, 777, dtype)

    def work() -> tuple[Tensor, ...]:
        losses = compiled_cross_entropy(logits, targets)
        assert losses is not None
        return losses.detach(), *torch.autograd.grad(losses, logits, weights)

    assert_same_with_any_number_of_threads(work)


def test_rows_that_do_not_lie_behind_one_another():
    logits, targets, weights = drawn(33, 40, torch.float32)
    across = logits.detach().t().contiguous().t().requires_grad_()
    spread = weights.repeat_interleave(2)[::2]
    found, other = compiled_cross_entropy(logits, targets), compiled_cross_entropy(across, targets)
    assert found is not None
    assert other is not None
    assert torch.equal(found, other)
    assert torch.equal(torch.autograd.grad(found, logits, weights)[0], torch.autograd.grad(other, across, spread)[0])


def test_no_row_is_no_loss():
    logits, targets = torch.empty(0, 7, requires_grad=True), torch.empty(0, dtype=torch.int64)
    found = compiled_cross_entropy(logits, targets)
    assert found is not None
    assert found.shape == (0,)
    assert torch.autograd.grad(found.sum(), logits)[0].shape == (0, 7)


@pytest.mark.parametrize("target", [-1, -100, 7])
def test_a_target_that_is_no_class_is_refused(target):
    with pytest.raises(IndexError, match="targets are .*expected 0 to"):
        compiled_cross_entropy(torch.zeros(2, 7), torch.tensor([0, target]))


def test_pytorch_takes_over_where_it_cannot_serve():
    logits, targets, _ = drawn(5, 7, torch.float32)
    for other in (logits.double(), logits.half(), logits.to("meta")):
        assert compiled_cross_entropy(other, targets) is None
    for wrong in (targets.int(), targets.to(torch.uint8), targets[:3], targets.repeat(2), targets.to("meta")):
        assert compiled_cross_entropy(logits, wrong) is None
    with compiled_code(False):
        assert compiled_cross_entropy(logits, targets) is None
    assert serves(logits, targets)


def test_targets_of_another_length_are_refused_as_pytorch_refuses_them():
    hidden, weight, bias = torch.randn(4, 6), torch.randn(9, 6), torch.randn(9)
    with pytest.raises(ValueError, match="batch_size"):
        unwrap(linear_cross_entropy)(hidden, weight, bias, torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("offset", [0, 100, 10_000])
def test_gradients_of_logits_with_an_offset_are_as_exact(offset):
    logits, targets, weights = drawn(20, 333, torch.float32)
    moved = (logits.detach() + offset).requires_grad_()
    _, gradient = in_float64(moved, targets, weights)
    found = compiled_cross_entropy(moved, targets)
    assert found is not None
    torch.testing.assert_close(torch.autograd.grad(found, moved, weights)[0].double(), gradient, rtol=3e-6, atol=1e-6)


def test_second_derivatives_are_pytorch_s():
    logits, targets, weights = drawn(6, 20, torch.float32)

    def curvature(losses: Tensor | None) -> Tensor:
        assert losses is not None
        [gradient] = torch.autograd.grad((losses * weights).sum(), logits, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), logits)[0]

    expected = curvature(F.cross_entropy(logits, targets, reduction="none"))
    torch.testing.assert_close(curvature(compiled_cross_entropy(logits, targets)), expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_comes_where_the_library_is_no_longer_wanted():
    logits, targets, weights = drawn(6, 20, torch.float32)
    found, again = compiled_cross_entropy(logits, targets), compiled_cross_entropy(logits, targets)
    assert found is not None
    assert again is not None
    with compiled_code(False):
        [gradient] = torch.autograd.grad(found, logits, weights)
    torch.testing.assert_close(gradient, torch.autograd.grad(again, logits, weights)[0], rtol=1e-5, atol=1e-6)


def test_functional_gradients_are_pytorch_s():
    logits, targets, _ = drawn(6, 20, torch.float32)
    weight, bias = torch.eye(20), torch.zeros(20)

    def loss(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, bias, targets).sum()

    [expected] = torch.autograd.grad(loss(logits), logits)
    torch.testing.assert_close(torch.func.grad(loss)(logits.detach()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_logits", [4 * 50, 9 * 50])
def test_a_linear_layer_uses_it_whole_and_in_chunks(max_logits, monkeypatch):
    monkeypatch.setattr(cross_entropy.F, "cross_entropy", None)
    monkeypatch.setattr(Tensor, "scatter_add_", None)
    torch.manual_seed(4)
    inputs = torch.randn(9, 6), torch.randn(50, 6), torch.randn(50)
    for each in inputs:
        each.requires_grad_()
    found = linear_cross_entropy(*inputs, torch.arange(9), max_logits=max_logits)
    gradients = torch.autograd.grad(found.sum(), inputs)
    monkeypatch.undo()
    with compiled_code(False):
        expected = linear_cross_entropy(*inputs, torch.arange(9), max_logits=max_logits)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for one, other in zip(gradients, torch.autograd.grad(expected.sum(), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cutoffs", [(), (20, 40)])
@pytest.mark.parametrize("max_logits", [None, 60], ids=["whole", "in chunks"])
def test_training_uses_it_where_attention_is_compiled_and_reading_always(max_logits, cutoffs, monkeypatch):
    """Without compiled attention, training uses PyTorch's loss everywhere, so that a run can move between machines."""
    called = []

    def counted(name, entry, *args, **kwargs):
        called.append(name)
        return entry(*args, **kwargs)

    for name in ("compiled_cross_entropy", "losses_and_sums", "write_gradient"):
        monkeypatch.setattr(cross_entropy, name, partial(counted, name, getattr(cross_entropy, name)))
    if max_logits is not None:
        monkeypatch.setattr(cross_entropy, "MAX_LOGITS", max_logits)
    shape = TransformerXLConfig(n_layer=1, d_model=16, n_head=2, d_head=8, d_inner=16, mem_len=8, cutoffs=cutoffs)
    tokens = torch.randint(50, (2, 8))
    chunks = {"losses_and_sums", "write_gradient"}
    for attention, in_training in (("shifted", False), ("compiled", True)):
        model = build_model(dataclasses.replace(shape, attention=attention), 50).train()
        called.clear()
        loss, _ = model.training_loss(tokens, tokens, model.init_state(2))
        loss.backward()
        assert set(called) <= {"compiled_cross_entropy"} | chunks
        assert (chunks <= set(called) if max_logits else "compiled_cross_entropy" in called) is in_training
        assert in_training or not called
        called.clear()
        with torch.no_grad():
            model.training_loss(tokens, tokens, model.init_state(2))
        assert called
