"""The kernels between the products of a layer: outputs and gradients equal those of float64 autograd, at odd sizes.

On a CPU the kernels run in Triton's interpreter (`make triton`), on a GPU as compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.kernel_devices import DEVICES
from tests.native.test_compiled_attention import philox
from torch import Tensor

from txl.models import fused_rows
from txl.models.fused_rows import Counted, Norm, QueryMasks, n_program

EPS = 1e-5
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
# N, B, true width, padded width.
SIZES = [(1, 1, 41, 48), (6, 2, 380, 384), (33, 3, 41, 48), (5, 1, 512, 512), (4, 2, 1000, 1008)]
DROPS = ["none", "locked", "counted"]

pytestmark = [
    pytest.mark.usefixtures("right_bfloat16", "few_programs"),
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("dtype", TOLERANCE, ids=str),
]


@pytest.fixture
def few_programs(monkeypatch):
    """Let each program compute several tiles, as with thousands of rows."""
    monkeypatch.setattr(fused_rows, "MOST_PROGRAMS", 3)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill new tensors with NaN, so that an entry that no kernel writes is seen."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _filled(getattr(torch, name)))


def _filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        new = make(*args, **kwargs)
        return new.fill_(float("nan")) if new.is_floating_point() else new

    return made


def padded(true: Tensor, width: int, fill: float = 0.0) -> Tensor:
    return F.pad(true, (0, width - true.shape[-1]), value=fill)


def random(*shape: int, dtype: torch.dtype = torch.float32, width: int | None = None, fill: float = 0.0) -> Tensor:
    """Return normal numbers in `dtype`, the last dimension padded to `width`."""
    numbers = torch.randn(shape, generator=GENERATOR)
    return padded(numbers, shape[-1] if width is None else width, fill).to(dtype)


GENERATOR = torch.Generator().manual_seed(3)


def locked(n_lane: int, true: int, width: int, device: str) -> Tensor:
    """Return a scaled mask with garbage after the true width, as part of a wider buffer."""
    kept = (torch.rand(n_lane, true, generator=GENERATOR) > 0.3) / 0.7
    buffer = torch.full((n_lane, 3, width), float("nan"))
    buffer[:, 1, :true] = kept
    return buffer.to(device)[:, 1]


def dropout(kind: str, sizes: tuple[int, int, int, int], device: str) -> tuple[Any, Tensor]:
    """Return a dropout, and its scaled mask [N,true] in float64."""
    n_row, n_lane, true, width = sizes
    if kind == "none":
        return None, torch.ones(n_row, true, dtype=torch.float64, device=device)
    if kind == "locked":
        mask = locked(n_lane, true, width, device)
        return mask, mask[:, :true].double()[torch.arange(n_row, device=device) % n_lane]
    drop = Counted(torch.tensor([2**40 + 7], device=device), 5, 0.25)
    return drop, counted(drop, n_row, true, width, device).double()


def counted(drop: Counted, n_row: int, true: int, width: int, device: str) -> Tensor:
    """Return the scaled mask [N,true] that a `Counted` means, from ReLU's kernel."""
    ones = torch.ones(n_row, width, device=device)
    return fused_rows.relu_bias(ones, torch.zeros(true, device=device), drop)[:, :true]


def assert_near(our: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    """Assert that `our` is `right`, relative to the largest number, with zeros in all columns after it."""
    true = right.shape[-1]
    assert (our[..., true:] == 0).all()
    error = (our[..., :true].double() - right).abs().max() / right.abs().max().clamp(min=1e-30)
    assert error < TOLERANCE[dtype], float(error)


@pytest.mark.parametrize(
    ("kind", "biased"), [("none", False), ("none", True), ("locked", False), ("counted", True)], ids=str
)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_residual_and_norm(sizes, kind, biased, dtype, device):
    n_row, _, true, width = sizes
    drop, mask = dropout(kind, sizes, device)
    residual = random(n_row, true, width=width).to(device)
    update = random(n_row, true, width=width, dtype=dtype).to(device)
    bias, gamma, beta = (random(true).to(device) for _ in range(3))
    bias = bias if biased else None
    out_low = None if biased else random(n_row + 2, width, dtype=dtype).to(device)[1:-1]
    found = fused_rows.residual_norm(residual, update, bias, drop, Norm(gamma, beta, EPS), true, out_low)

    leaves = [rows[:, :true].double() for rows in (residual, update)]
    leaves += [row.double() for row in (torch.zeros_like(gamma) if bias is None else bias, gamma, beta)]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    z = leaves[0] + (leaves[1] + leaves[2]) * mask
    expected = F.layer_norm(z, (true,), leaves[3], leaves[4], EPS)
    assert_near(found.sum, z.detach(), torch.float32)
    assert found.hidden is not None
    assert found.low is not None
    assert found.mean is not None
    assert found.rstd is not None
    assert_near(found.hidden, expected.detach(), torch.float32)
    assert torch.equal(found.low, found.hidden.to(dtype))
    assert out_low is None or found.low.data_ptr() == out_low.data_ptr()
    assert_near(found.mean, z.detach().mean(-1), torch.float32)
    assert_near(found.rstd, (z.detach().var(-1, correction=0) + EPS).rsqrt(), torch.float32)

    for given in ("both", "hidden", "low"):
        grad_hidden = random(n_row, true, width=width, fill=9.0).to(device) if given != "low" else None
        grad_low = random(n_row, true, width=width, dtype=dtype, fill=9.0).to(device) if given != "hidden" else None
        above = torch.stack([grad[:, :true].double() for grad in (grad_hidden, grad_low) if grad is not None]).sum(0)
        grads = torch.autograd.grad(expected, leaves, above, retain_graph=True)
        partial = torch.empty(n_program(n_row), 2, 3, width, device=device)[:, 1]
        saved = found if given == "both" else (found.sum, found.mean, found.rstd)
        to_update = torch.empty(n_row, width, dtype=dtype, device=device)
        to_residual = fused_rows.residual_norm_backward(
            grad_hidden, grad_low, saved, gamma, drop, partial, true, to_update
        )
        assert_near(to_residual, grads[0], torch.float32)
        assert_near(to_update, grads[1], dtype)
        sums = partial.double().sum(0)
        for sum_of_programs, grad in zip(sums, (grads[3], grads[4], grads[2]), strict=True):
            assert_near(sum_of_programs, grad, torch.float32)


@pytest.mark.parametrize("kind", DROPS)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
def test_pre_norm_adds_to_the_stream_and_normalises_for_the_next_sub_layer(sizes, normed, kind, dtype, device):
    n_row, _, true, width = sizes
    drop, mask = dropout(kind, sizes, device)
    residual = random(n_row, true, width=width).to(device)
    update = random(n_row, true, width=width, dtype=dtype).to(device)
    bias, gamma, beta = (random(true).to(device) for _ in range(3))
    norm = Norm(gamma, beta, EPS) if normed else None
    found = fused_rows.residual_norm(residual, update, bias, drop, norm, true, pre_norm=True)
    leaves = [*(rows[:, :true].double() for rows in (residual, update)), *(row.double() for row in (bias, gamma, beta))]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    z = leaves[0] + (leaves[1] + leaves[2]) * mask
    low = F.layer_norm(z, (true,), leaves[3], leaves[4], EPS)
    assert found.hidden is None
    assert_near(found.stream, z.detach(), torch.float32)
    grad = random(n_row, true, width=width).to(device)
    grad_low = random(n_row, true, width=width, dtype=dtype, fill=9.0).to(device) if normed else None
    total = (z * grad[:, :true].double()).sum()
    if grad_low is not None:
        assert found.low is not None
        assert_near(found.low, low.detach(), dtype)
        total += (low * grad_low[:, :true].double()).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    partial = torch.empty(n_program(n_row) + 1, 3, width, device=device)  # the last program has no rows
    to_update = torch.empty(n_row, width, dtype=dtype, device=device)
    to_residual = fused_rows.residual_norm_backward(
        grad, grad_low, found, gamma if normed else None, drop, partial, true, to_update, pre_norm=True
    )
    assert_near(to_residual, grads[0], torch.float32)
    assert_near(to_update, grads[1], dtype)
    for sum_of_programs, grad in zip(partial.double().sum(0), (grads[3], grads[4], grads[2]), strict=True):
        assert_near(sum_of_programs, grad, torch.float32)


@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
def test_rows_of_memory_are_normalised_and_give_sums_alone(sizes, dtype, device):
    n_row, _, true, width = sizes
    rows, out = random(n_row, true, width=width).to(device), torch.empty(n_row, width, dtype=dtype, device=device)
    gamma, beta = (random(true).to(device) for _ in range(2))
    found = fused_rows.residual_norm(rows, None, None, None, Norm(gamma, beta, EPS), true, out, pre_norm=True)
    leaves = [leaf.double().requires_grad_() for leaf in (gamma, beta)]
    expected = F.layer_norm(rows[:, :true].double(), (true,), leaves[0], leaves[1], EPS)
    assert found.stream is rows
    assert_near(out, expected.detach(), dtype)
    grad = random(n_row, true, width=width, dtype=dtype, fill=9.0).to(device)
    partial = torch.empty(5, 3, width, device=device)
    fused_rows.norm_sums(grad, found, gamma, partial)
    grads = torch.autograd.grad(expected, leaves, grad[:, :true].double())
    for sum_of_programs, right in zip(partial.double().sum(0), (*grads, torch.zeros_like(grads[0])), strict=True):
        assert_near(sum_of_programs, right, torch.float32)


# R, G, H, D, D'.
@pytest.mark.parametrize("sizes", [(1, 1, 1, 7, 16), (70, 1, 3, 38, 48), (33, 3, 2, 41, 48), (9, 2, 2, 200, 208)])
def test_norms_of_heads(sizes, dtype, device):
    *shape, d_head, head = sizes

    def strided() -> Tensor:
        return random(*shape, 2, d_head, dtype=dtype, width=head).to(device)[..., 1, :]

    rows, grad, gains = strided(), strided(), random(shape[1], d_head).to(device)
    leaves = [leaf.double().requires_grad_() for leaf in (rows[..., :d_head], gains)]
    expected = F.rms_norm(leaves[0], (d_head,), eps=EPS) * leaves[1][:, None]
    found = fused_rows.head_norm(rows, gains, EPS)
    assert found.is_contiguous()
    assert_near(found, expected.detach(), dtype)
    grads = torch.autograd.grad(expected, leaves, grad[..., :d_head].double())
    partial = torch.empty(shape[1], 4, head, device=device).transpose(0, 1)
    fused_rows.head_norm_backward(grad, rows, gains, EPS, partial)
    assert_near(grad, grads[0], dtype)
    assert_near(partial.double().sum(0), grads[1], torch.float32)


@pytest.mark.parametrize("kind", DROPS)
@pytest.mark.parametrize("sizes", [*SIZES[:3], (5, 1, 570, 576)], ids=str)
def test_bias_and_relu(sizes, kind, dtype, device):
    n_row, _, true, width = sizes
    drop, mask = dropout(kind, sizes, device)
    inner = random(n_row, true, width=width, dtype=dtype, fill=9.0).to(device)
    bias = random(true).to(device)
    leaves = [leaf.double().requires_grad_() for leaf in (inner[:, :true], bias)]
    expected = F.relu(leaves[0] + leaves[1]) * mask
    kept = fused_rows.relu_bias(inner, bias, drop)
    assert_near(kept, expected.detach(), dtype)

    grad = random(n_row, true, width=width, dtype=dtype, fill=9.0).to(device)
    grads = torch.autograd.grad(expected, leaves, grad[:, :true].double())
    partial = torch.empty(n_program(n_row), width, device=device)
    found = fused_rows.relu_bias_backward(grad, kept, float(mask.max()), partial)
    assert_near(found, grads[0], dtype)
    assert_near(partial.double().sum(0), grads[1], torch.float32)


# N, B, S, H, D, D'.
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 7, 16), (6, 2, 5, 3, 38, 48), (33, 3, 12, 2, 41, 48), (4, 1, 9, 5, 64, 64)]
)
def test_queries(sizes, masked, dtype, device):
    n_row, n_lane, n_key, n_head, d_head, head = sizes

    def by_head(*shape: int, fill: float = 0.0) -> Tensor:
        return random(*shape, n_head, d_head, dtype=dtype, width=head, fill=fill).flatten(-2).to(device)

    def true(rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (n_head, head))[..., :d_head].double()

    query, grad_u, grad_v = (by_head(n_row) for _ in range(3))
    u, v = (random(n_head, d_head).to(device) for _ in range(2))
    pairs = [random(n_key, n_lane, n_head, 2, d_head, dtype=dtype, width=head).to(device) for _ in range(2)]
    values, befores = [pair[..., 1, :] for pair in pairs], [pair.clone() for pair in pairs]
    masks, lane = None, torch.arange(n_row, device=device) % n_lane
    of = [torch.ones((), dtype=torch.float64, device=device)] * 4
    if masked:
        masks = QueryMasks(by_head(n_lane), by_head(n_lane), by_head(), by_head(n_lane))
        of = [true(masks.query)[lane], true(masks.key)[lane], true(masks.position), true(masks.value)]
    leaves = [leaf.detach().requires_grad_() for leaf in (true(query), u.double(), v.double())]
    expected = [(leaves[0] * of[0] + leaves[1]) * of[1], (leaves[0] * of[0] + leaves[2]) * of[2]]
    found = fused_rows.queries(query, u, v, masks, values[0], n_head)
    for our, right in zip(found, expected, strict=True):
        assert_near(our.unflatten(-1, (n_head, head)), right.detach(), dtype)

    grads = torch.autograd.grad(expected, leaves, [true(grad_u), true(grad_v)])
    partial = torch.empty(n_program(n_row), 2, n_head * head, device=device)
    grad_query = fused_rows.queries_backward(grad_u, grad_v, masks, values[1], n_head, partial, torch.empty_like(query))
    assert_near(grad_query.unflatten(-1, (n_head, head)), grads[0], dtype)
    for sum_of_programs, grad in zip(partial.double().sum(0), grads[1:], strict=True):
        assert_near(sum_of_programs.unflatten(-1, (n_head, head)), grad, torch.float32)
    for pair, before in zip(pairs, befores, strict=True):
        assert torch.equal(pair[..., 0, :], before[..., 0, :])
        assert_near(pair[..., 1, :], before[..., 1, :d_head].double() * of[3], dtype)


def test_counted_dropout_has_its_rate_and_its_own_mask_at_every_site(dtype, device):
    del dtype
    seed, sizes = torch.tensor([11], device=device), (64, 300, 304)
    first, other_site, other_seed = (
        counted(drop, *sizes, device)
        for drop in (Counted(seed, 0, 0.3), Counted(seed, 1, 0.3), Counted(seed + 1, 0, 0.3))
    )
    assert torch.equal(first, counted(Counted(seed, 0, 0.3), *sizes, device))
    n = first.numel()
    for mask in (first, other_site, other_seed):
        assert set(mask.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.7))}
        assert abs((mask == 0).double().mean() - 0.3) < 4 * (0.3 * 0.7 / n) ** 0.5
    for pair in ((first, other_site), (first, other_seed), (first[:-1], first[1:]), (first[:, :-1], first[:, 1:])):
        both = ((pair[0] == 0) & (pair[1] == 0)).double().mean()
        assert abs(both - 0.09) < 4 * (0.09 * 0.91 / n) ** 0.5


def test_counted_dropout_draws_the_words_of_philox(dtype, device):
    del dtype
    drop, (n_row, width) = Counted(torch.tensor([2**40 + 7], device=device), 5, 0.5), (3, 12)
    row, group = torch.meshgrid(torch.arange(n_row), torch.arange(width // 4), indexing="ij")
    site, constant = torch.full_like(row, 5), torch.full_like(row, 0x726F7773)
    words = philox(torch.stack([row, group, site, constant], dim=-1), 2**40 + 7).flatten(1)
    assert torch.equal((counted(drop, n_row, width, 16, device) > 0).cpu(), words >= 2**31)
