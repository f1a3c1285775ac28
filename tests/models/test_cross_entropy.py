"""The chunked cross-entropy against PyTorch's, and a check that the matrix of all logits is never allocated."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from txl.config import TransformerXLConfig
from txl.models import build_model
from txl.models.loss import linear_cross_entropy

N, V, E = 23, 31, 7


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    return draw(N, E), draw(V, E), draw(V)


def plain(hidden, weight, bias, targets):
    return F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="none")


@pytest.mark.parametrize("max_logits", [1, V, 5 * V, 5 * V + 3, N * V - 1, N * V])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_pytorch_s_in_losses_and_all_gradients(max_logits, dtype, tolerance):
    targets = torch.arange(N) * 5 % V
    weights = torch.linspace(-1, 2, N, dtype=dtype)  # a different weight for every loss
    ours, theirs = inputs(dtype), inputs(dtype)
    found = linear_cross_entropy(*ours, targets, max_logits=max_logits)
    expected = plain(*theirs, targets)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=tolerance, atol=tolerance)


def test_under_autocast_losses_and_gradients_are_float32_and_near():
    targets = torch.arange(N) % V
    ours, theirs = inputs(torch.float32), inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(*ours, targets, max_logits=4 * V)
    assert found.dtype == torch.float32
    expected = plain(*theirs, targets)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)
    found.sum().backward()
    expected.sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None
        assert one.grad.dtype == torch.float32
        torch.testing.assert_close(one.grad, other.grad, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("max_logits", [V, N * V])
@pytest.mark.parametrize("target", [-1, -100, V])
def test_a_target_outside_of_the_vocabulary_is_an_error_not_a_loss_of_zero(target, max_logits):
    targets = torch.zeros(N, dtype=torch.int64)
    targets[3] = target
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy(*inputs(), targets, max_logits=max_logits)


class LargestTensor(TorchDispatchMode):
    """A dispatch mode that records the number of elements of the largest tensor returned by any operation."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, each.numel())
        return result


@pytest.mark.parametrize("cutoffs", [(), (20_000, 40_000, 200_000)])
@pytest.mark.parametrize("rare", [False, True])
def test_a_step_on_a_large_vocabulary_never_holds_tokens_times_vocabulary(cutoffs, rare):
    """The vocabulary has the size of WikiText-103's; with `rare`, all targets fall into the largest cluster."""
    vocab_size, tokens = 267_735, torch.randint(20_000, (4, 64))
    targets = torch.randint(40_000, 200_000, tokens.shape) if rare else torch.randint(vocab_size, tokens.shape)
    shape = TransformerXLConfig(n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8, mem_len=0, cutoffs=cutoffs)
    model = build_model(shape, vocab_size)
    with LargestTensor() as seen:
        loss, _ = model.training_loss(tokens, targets, model.init_state(4))
        loss.backward()
    assert model.embedding.tables[0].grad is not None
    assert seen.largest <= 1 << 25 < tokens.numel() * 160_000
