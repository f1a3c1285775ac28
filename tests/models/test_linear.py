"""The linear layer returns the same numbers as PyTorch's on all of its code paths."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from txl.models.layers import Linear


@pytest.mark.parametrize("n_out", [6, 7])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (1, 1, 5), (2, 3, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_same_as_pytorch_s(shape, n_out, bias, dtype):
    layer = Linear(5, n_out, bias=bias).to(dtype)
    rows = torch.randn(shape, dtype=dtype)
    with torch.no_grad():
        found, expected = layer(rows), F.linear(rows, layer.weight, layer.bias)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_autocast_and_gradients_are_pytorch_s():
    layer, rows = Linear(5, 6), torch.randn(1, 5, requires_grad=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(rows).dtype == torch.bfloat16
    layer(rows).sum().backward()
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, layer.weight.sum(0, keepdim=True))
