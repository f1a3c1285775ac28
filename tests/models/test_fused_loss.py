"""The kernels of the cross-entropy for GPUs: losses and all gradients are those of float64.

On a CPU the kernels run in Triton's interpreter (`make triton`), on a GPU as compiled kernels.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.kernel_devices import DEVICES, INTERPRETED
from torch import Tensor

from txl.config import TransformerXLConfig
from txl.models import adaptive, build_model
from txl.models import loss as losses_of
from txl.models.loss import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("right_bfloat16", "in_kernels")
LOW = torch.bfloat16


@pytest.fixture
def in_kernels(monkeypatch):
    """In the interpreter, choose the kernels also for tensors of the CPU."""

    def dtype_of(hidden: Tensor, *_: Tensor) -> torch.dtype | None:
        low = torch.is_autocast_enabled(hidden.device.type)
        dtype = torch.get_autocast_dtype(hidden.device.type) if low else hidden.dtype
        return None if dtype == torch.float64 else dtype

    if INTERPRETED:
        for module in (losses_of, adaptive):
            monkeypatch.setattr(module, "fused_dtype", dtype_of)


def drawn(device: str, n_row: int, n_class: int, width: int) -> list[Tensor]:
    """Return rows, weight and bias in float32 with values of bfloat16, the targets, and a weight for every loss."""
    generator = torch.Generator().manual_seed(n_class)
    floats = [torch.randn(shape, generator=generator) for shape in ((n_row, width), (n_class, width), (n_class,))]
    targets = torch.randint(n_class, (n_row,), generator=generator)
    return [each.to(LOW).float().to(device) for each in floats] + [
        targets.to(device),
        torch.linspace(-1, 2, n_row).to(device),
    ]


def with_gradients(function: Any, numbers: list[Tensor], weights: Tensor) -> list[Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in numbers]
    found = function(*leaves)
    return [found, *torch.autograd.grad((found * weights.to(found.dtype)).sum(), leaves)]


def plain(targets: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="none")


def distance(ours: Tensor, right: Tensor) -> float:
    return ((ours.double() - right).norm() / right.norm().clamp(min=1e-30)).item()


# N, V, E, limit of logits. Blocks have up to 4,096 classes forward, and 32 rows and 1,024 classes backward.
CASES = {
    "one row": (1, 7, 3, None),
    "one class": (3, 1, 5, None),
    "odd": (67, 301, 25, None),
    "several blocks": (33, 9001, 10, None),
    "nothing to pad": (32, 64, 48, None),
    "chunks": (70, 50, 38, 64 * 33 + 7),
    "one row at a time": (5, 70, 4, 1),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_losses_and_gradients_are_those_of_float64(case, low, device):
    n_row, n_class, width, limit = case
    *numbers, targets, weights = drawn(device, n_row, n_class, width)
    right = with_gradients(partial(plain, targets), [each.double() for each in numbers], weights)
    with torch.autocast(device, LOW, enabled=low):
        ours = with_gradients(
            lambda hidden, weight, bias: linear_cross_entropy(hidden, weight, bias, targets, max_logits=limit),
            numbers,
            weights,
        )
    assert all(each.dtype == torch.float32 and each.is_contiguous() for each in ours)
    for our, other in zip(ours, right, strict=True):
        assert distance(our, other) < (1e-2 if low else 2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [-50.0, 2000.0])
def test_large_logits_lose_only_their_own_rounding(offset, device):
    hidden, weight, bias, targets, weights = drawn(device, 9, 1100, 41)
    numbers = [60 * hidden, weight, bias + offset]
    right = with_gradients(partial(plain, targets), [each.double() for each in numbers], weights)
    ours = with_gradients(
        lambda hidden, weight, bias: linear_cross_entropy(hidden, weight, bias, targets), numbers, weights
    )
    for our, other in zip(ours, right, strict=True):
        assert distance(our, other) < 5e-4


@pytest.mark.parametrize("device", DEVICES)
def test_logits_of_low_precision_lose_nothing_else(device):
    """The losses are those of the rounded logits with exact biases, in float32."""
    hidden, weight, bias, targets, _ = drawn(device, 40, 333, 20)
    with torch.autocast(device, LOW):
        found = linear_cross_entropy(hidden, weight, bias, targets)
    logits = (hidden.to(LOW) @ weight.to(LOW).t()).double() + bias.double()
    torch.testing.assert_close(found.double(), F.cross_entropy(logits, targets, reduction="none"), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("target", [-1, -100, 7])
def test_a_target_that_is_no_class_has_no_finite_loss(target, device):
    hidden, weight, bias, targets, _ = drawn(device, 4, 7, 5)
    targets[2] = target
    found = linear_cross_entropy(hidden, weight, bias, targets)
    assert found.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("device", DEVICES)
def test_infinite_logits_and_numbers_that_are_none_give_what_pytorch_gives(device):
    rows = torch.zeros(5, 70, device=device)
    rows[0, 3], rows[0, 40] = 1e30, -1e30
    rows[1, 5:] = -math.inf
    rows[2, 69] = math.inf
    rows[3, 17] = math.nan
    rows[4, 68] = -math.inf
    targets, one = torch.tensor([40, 1, 3, 4, 5], device=device), torch.ones(1, 1, device=device)
    # The logits of each row are the biases.
    found = [
        linear_cross_entropy(one, 0 * row[:, None].nan_to_num(), row, target[None])
        for row, target in zip(rows, targets, strict=True)
    ]
    expected = F.cross_entropy(rows.double(), targets, reduction="none")
    torch.testing.assert_close(torch.cat(found).double(), expected, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_pass_gives_the_same_gradients_and_there_is_no_second_derivative(device):
    *numbers, targets, weights = drawn(device, 20, 30, 10)
    hidden, weight, bias = leaves = [each.requires_grad_() for each in numbers]
    total = (linear_cross_entropy(hidden, weight, bias, targets) * weights).sum()
    first, second = (torch.autograd.grad(total, leaves, retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    losses = linear_cross_entropy(hidden, weight, bias, targets)
    [gradient] = torch.autograd.grad((losses * weights.requires_grad_()).sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


ADAPTIVE = TransformerXLConfig(n_layer=1, d_model=12, n_head=1, d_head=8, d_inner=8, mem_len=0, dropout=0.0)
MODELS = {
    "plain": {},
    "own tables": {"tie_embeddings": False},
    "projected": {"d_embed": 10},
    "a common table": {"cutoffs": (7, 15)},
    "a common projected table": {"cutoffs": (7, 15), "d_embed": 10, "tie_projections": "none"},
    "several tables": {"cutoffs": (7, 15), "div_val": 2},
    "own tables and projections": {
        "cutoffs": (7, 15), "div_val": 2, "tie_embeddings": False, "tie_projections": "all_but_first",
    },
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fixed", [False, True], ids=["counted", "rows given"])
@pytest.mark.parametrize("changes", MODELS.values(), ids=list(MODELS))
def test_models_have_the_gradients_of_float64(changes, fixed, device):
    """Losses and all gradients of a model with 31 tokens, none of which belongs to the second cluster at first."""
    config = dataclasses.replace(ADAPTIVE, **changes)
    torch.manual_seed(1)
    model = build_model(config, 31).to(device)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.4)
    exact = build_model(config, 31).to(device).double()
    exact.load_state_dict(model.state_dict())
    hidden = torch.randn(40, 12, device=device)
    for first, without in ((torch.arange(40) % 31, ()), ((torch.arange(40) % 14 + 17) % 31, range(7, 15))):
        targets = first.to(device)
        assert not set(without) & set(first.tolist())
        rows = [10, 33] if fixed and config.cutoffs else None
        results = []
        for each in (model, exact):
            leaf = hidden.to(each.softmax.bias.dtype).requires_grad_()
            nll = each.softmax.nll(leaf, targets, each.embedding, rows)
            parameters = [*each.softmax.parameters(), *each.embedding.parameters()]
            results.append([nll, *torch.autograd.grad(nll.mean(), [leaf, *parameters], allow_unused=True)])
        for our, right in zip(*results, strict=True):
            assert (our is None) == (right is None)
            if our is not None and right is not None:
                torch.testing.assert_close(our.double(), right, rtol=1e-5, atol=1e-6)
