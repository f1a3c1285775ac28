"""The linear layer returns PyTorch's numbers and gradients, whichever library computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from txl import devices
from txl.native import operations
from txl.native.build import compiled_code

AMD = {"vendor_id": "AuthenticAMD", "flags": "avx2 avx512f"}


@pytest.fixture
def calls(monkeypatch):
    """Make oneDNN compute on every processor, and record the shapes of its operations."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch has no oneDNN")
    found, original = [], torch.ops.mkldnn._linear_pointwise

    def recorded(rows, weight, *others):
        found.append((*rows.shape, weight.shape[0]))
        return original(rows, weight, *others)

    monkeypatch.setattr(operations, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", recorded)
    return found


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("lanes", [(), (3,), (2, 3)])
@pytest.mark.parametrize("n_in", [16, 37])
@pytest.mark.parametrize("n_out", [16, 203])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_and_gradients_are_those_of_float64_but_for_rounding(lanes, n_in, n_out, has_bias, calls):
    rows, weight, bias = tensors((*lanes, 19, n_in), (n_out, n_in), (n_out,))
    given = [rows, weight, bias] if has_bias else [rows, weight]
    above = torch.randn(*lanes, 19, n_out)
    found = operations.linear(*given)
    exact = [each.detach().double().requires_grad_() for each in given]
    expected = F.linear(*exact)
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    found_grads = torch.autograd.grad(found, given, above)
    for grad, other in zip(found_grads, torch.autograd.grad(expected, exact, above.double()), strict=True):
        torch.testing.assert_close(grad.double(), other, rtol=0, atol=5e-5)
    n_row = above.numel() // n_out
    assert calls == [(n_row, n_in, n_out), (n_row, n_out, n_in), (n_out, n_row, n_in)]


def test_rows_and_gradients_of_any_strides(calls):
    rows, weight = tensors((40, 32), (16, 32))
    for given, matrix in ((rows[::2], weight), (rows.t()[:, :32], torch.randn(16, 32)), (rows, weight[:, :32])):
        torch.testing.assert_close(operations.linear(given, matrix), F.linear(given, matrix), rtol=0, atol=1e-5)
    grads = torch.autograd.grad(operations.linear(rows, weight).sum(), [rows, weight])  # the gradient is expanded
    expected = torch.autograd.grad(F.linear(rows, weight).sum(), [rows, weight])
    torch.testing.assert_close(grads, expected, rtol=0, atol=1e-5)
    assert len(calls) == 6


def test_only_the_gradients_that_are_needed_are_computed(calls):
    rows, weight = tensors((20, 16), (24, 16))
    operations.linear(rows.detach(), weight).sum().backward()
    assert calls == [(20, 16, 24), (24, 20, 16)]
    assert rows.grad is None


def test_gradients_have_gradients(calls):
    rows, weight = tensors((17, 16), (18, 16))

    def second(linear):
        (grad,) = torch.autograd.grad(linear(rows, weight).tanh().sum(), rows, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [rows, weight])

    torch.testing.assert_close(second(operations.linear), second(F.linear), rtol=1e-4, atol=1e-4)
    assert len(calls) > 3


@pytest.mark.parametrize(
    ("rows", "weight", "dtype"),
    [
        ((15, 32), (32, 32), torch.float32),
        ((32, 15), (32, 15), torch.float32),
        ((32, 32), (15, 32), torch.float32),
        ((32, 32), (32, 32), torch.float64),
        ((32, 32), (32, 32), torch.bfloat16),
    ],
)
def test_small_products_and_other_dtypes_are_pytorch_s(rows, weight, dtype, calls):
    given = tensors(rows, weight, dtype=dtype)
    assert torch.equal(operations.linear(*given), F.linear(*given))
    assert calls == []


def test_autocast_transforms_and_modes_are_pytorch_s(calls):
    rows, weight = (each.detach() for each in tensors((32, 32), (32, 32)))
    with torch.autocast("cpu", torch.bfloat16):
        assert operations.linear(rows, weight).dtype == torch.bfloat16
    with compiled_code(False):
        assert torch.equal(operations.linear(rows, weight), F.linear(rows, weight))
    traced: Any = torch.jit.trace(operations.linear, (rows, weight), check_trace=False)
    assert torch.equal(traced(rows, weight), F.linear(rows, weight))
    of_each = torch.func.vmap(operations.linear, in_dims=(0, None))(torch.stack([rows, -rows]), weight)
    torch.testing.assert_close(of_each[1], -of_each[0])
    assert operations.linear(rows.to("meta"), weight.to("meta")).device.type == "meta"
    assert calls == []
    with torch.inference_mode():
        operations.linear(rows, weight)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [(AMD, True), (AMD | {"vendor_id": "GenuineIntel"}, False), (AMD | {"flags": "avx2"}, False), ({}, False)],
)
def test_onednn_serves_amd_with_avx_512(fields, expected, monkeypatch):
    monkeypatch.setattr(devices, "cpu_fields", lambda: fields)
    monkeypatch.setattr(operations, "cpu_fields", lambda: fields)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch has no oneDNN")
    assert operations.onednn_is_faster.__wrapped__() is expected


@pytest.mark.parametrize(
    "bias",
    [torch.arange(64.0)[::2], torch.ones(1).expand(32), torch.arange(32.0)[None], torch.arange(32.0).double()],
    ids=["strided", "expanded", "two dimensions", "float64"],
)
def test_a_bias_that_onednn_would_misread_is_pytorch_s(bias, calls):
    """oneDNN reads the numbers of a bias one after another, whatever its strides."""
    rows, weight = (each.detach() for each in tensors((32, 32), (32, 32)))
    try:
        expected = F.linear(rows, weight, bias)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error).splitlines()[0][:30]):
            operations.linear(rows, weight, bias)
    else:
        assert torch.equal(operations.linear(rows, weight, bias), expected)
    assert calls == []


def test_other_layouts_and_wrong_shapes_are_pytorch_s(calls):
    rows, weight = (each.detach() for each in tensors((32, 32), (32, 32)))
    assert torch.equal(operations.linear(rows, weight.to_sparse()), F.linear(rows, weight.to_sparse()))
    assert torch.equal(operations.linear(rows, weight[0]), F.linear(rows, weight[0]))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        operations.linear(rows, weight[:, :16])
    assert calls == []


def test_overlapping_rows(calls):
    """A QRNN's windows overlap: each row begins inside the row before it."""
    numbers, (weight,) = torch.arange(200.0), tensors((16, 32))
    rows = numbers.unfold(0, 32, 8)
    torch.testing.assert_close(operations.linear(rows, weight), F.linear(rows, weight), rtol=1e-5, atol=1e-3)
    assert len(calls) == 1
