"""RMSNorm in the compiled library against its definition in float64: values, gradients, threads, conditions of use."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from tests.native.threads import assert_same_with_any_number_of_threads
from torch import Tensor

from txl.config import TransformerXLConfig
from txl.models import build_model, layers
from txl.models.layers import HeadNorm
from txl.native.build import compiled_code, why_not
from txl.native.operations import compiled_rms_norm
from txl.native.tensors import computes

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no compiled library: {why_not()}")

DTYPES = (torch.float32, torch.bfloat16)
EPSILON = 1e-3


def by_definition(x: Tensor, gain: Tensor) -> Tensor:
    return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + EPSILON).sqrt() * gain


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return values of the given shape, a gain for the last dimension, and a gradient of the output."""
    torch.manual_seed(sum(shape))
    x = (3 * torch.randn(shape)).to(dtype).requires_grad_()
    return x, (1 + torch.randn(shape[-1])).requires_grad_(), torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 15), (2, 7, 16), (700, 4, 32), (300, 33), (9, 64)], ids=str)
def test_values_and_gradients_are_those_of_float64(shape, dtype):
    x, gain, above = drawn(*shape, dtype=dtype)
    exact = [each.detach().double().requires_grad_() for each in (x, gain)]
    expected = by_definition(*exact)
    wanted = torch.autograd.grad(expected, exact, above.double())
    found = compiled_rms_norm(x, gain, EPSILON)
    assert found.dtype == dtype
    rounding = 4e-3 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=1e-6)
    ours = torch.autograd.grad(found, (x, gain), above)
    assert [each.dtype for each in ours] == [dtype, torch.float32]
    torch.testing.assert_close(ours[0].double(), wanted[0], rtol=rounding, atol=rounding)
    torch.testing.assert_close(ours[1].double(), wanted[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_with_any_number_of_threads(dtype):
    x, gain, above = drawn(1001, 3, 32, dtype=dtype)

    def work() -> tuple[Tensor, ...]:
        out = compiled_rms_norm(x, gain, EPSILON)
        return out.detach(), *torch.autograd.grad(out, (x, gain), above)

    assert_same_with_any_number_of_threads(work)


def test_rows_that_do_not_lie_behind_one_another():
    x, gain, above = drawn(6, 5, 32)
    across = x.detach().permute(1, 2, 0).contiguous().permute(2, 0, 1).requires_grad_()
    spread = above.repeat_interleave(2, -1)[..., ::2]
    ours, other = compiled_rms_norm(x, gain, EPSILON), compiled_rms_norm(across, gain, EPSILON)
    assert torch.equal(ours, other)
    assert torch.equal(torch.autograd.grad(ours, x, above)[0], torch.autograd.grad(other, across, spread)[0])


def test_no_row_is_no_row():
    x, gain, above = drawn(0, 4, 8)
    found = torch.autograd.grad(compiled_rms_norm(x, gain, EPSILON), (x, gain), above)
    assert found[0].shape == x.shape
    assert torch.equal(found[1], torch.zeros(8))


def test_second_derivatives_are_those_of_the_definition():
    x, gain, above = drawn(4, 9)

    def curvature(out: Tensor) -> Tensor:
        [gradient] = torch.autograd.grad(out, x, above, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    expected = curvature(by_definition(x, gain))
    torch.testing.assert_close(curvature(compiled_rms_norm(x, gain, EPSILON)), expected, rtol=1e-4, atol=1e-6)


def test_the_gradient_comes_where_the_library_is_no_longer_wanted():
    x, gain, above = drawn(6, 20)
    expected = torch.autograd.grad(compiled_rms_norm(x, gain, EPSILON), (x, gain), above)
    found = compiled_rms_norm(x, gain, EPSILON)
    with compiled_code(False):
        ours = torch.autograd.grad(found, (x, gain), above)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_pytorch_computes_the_same(dtype):
    norm = HeadNorm(32, eps=EPSILON).to(dtype)
    x, gain, _ = drawn(7, 32)
    with torch.no_grad():
        norm.weight.copy_(gain)
        with compiled_code(False):
            expected = norm(x.to(dtype))
        assert expected.dtype == dtype
        torch.testing.assert_close(norm(x.to(dtype)), expected, rtol=8e-3 if dtype == torch.bfloat16 else 1e-6, atol=0)
        exact = by_definition(x.to(dtype).double(), norm.weight.double())
    torch.testing.assert_close(expected.double(), exact, rtol=8e-3 if dtype == torch.bfloat16 else 1e-6, atol=1e-12)


def test_where_the_library_computes():
    x = torch.zeros(3, 4)
    assert computes(x)
    assert not any(computes(each) for each in (x.double(), x.half(), x.to("meta"), x.int()))
    with compiled_code(False):
        assert not computes(x)


@pytest.mark.parametrize("of", ["values", "gain"])
def test_functional_gradients_are_those_of_the_definition(of):
    x, gain, above = (each.detach() for each in drawn(5, 16))
    norm = HeadNorm(16, eps=EPSILON)
    norm.compiled = True

    def total(given: Tensor) -> Tensor:
        values, weight = (given, gain) if of == "values" else (x, given)
        return (torch.func.functional_call(norm, {"weight": weight}, (values,)) * above).sum()

    given = x if of == "values" else gain
    exact = [each.double().requires_grad_() for each in (x, gain)]
    [expected] = torch.autograd.grad(by_definition(*exact), exact[of == "gain"], above.double())
    torch.testing.assert_close(torch.func.grad(total)(given).double(), expected, rtol=1e-5, atol=1e-5)


def test_training_uses_it_where_attention_is_compiled_and_reading_always(monkeypatch):
    called = []

    def counted(entry, *args):
        called.append(1)
        return entry(*args)

    monkeypatch.setattr(layers, "compiled_rms_norm", partial(counted, layers.compiled_rms_norm))
    shape = TransformerXLConfig(
        n_layer=1, d_model=16, n_head=2, d_head=8, d_inner=16, mem_len=8, dropout=0.0, qk_norm=True
    )
    tokens, gradients = torch.randint(50, (2, 8)), []
    for attention, in_training in (("shifted", 0), ("compiled", 3)):
        torch.manual_seed(3)
        model = build_model(dataclasses.replace(shape, attention=attention), 50).train()
        called.clear()
        loss, _ = model.training_loss(tokens, tokens, model.init_state(2))
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        assert len(called) == in_training
        with torch.no_grad():
            model.eval().nll(tokens, tokens, model.init_state(2))
        assert len(called) > in_training
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
