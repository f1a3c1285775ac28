"""The library for processors with narrower vectors than this one computes the same, although this one never uses it."""

from __future__ import annotations

import ctypes
import platform

import pytest
import torch
import torch.nn.functional as F
from tests.native.test_compiled_attention import SHAPES, distance, exact, operands, ours, with_gradients

from txl.attention import Operands, reference_attention
from txl.devices import cpu_flags
from txl.native import build
from txl.native.build import why_not
from txl.native.compiling import PROCESSORS, compile_library, compiler_flags, find_compiler
from txl.native.operations import compiled_cross_entropy, compiled_dropout, compiled_rms_norm, linear
from txl.native.sources import cpp_sources

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=f"no compiled library: {why_not()}"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the widths are those of x86-64"),
]
AVX2 = next(kind for kind in PROCESSORS if kind.name == "avx2")


@pytest.fixture(
    scope="module", params=[pytest.param("x86-64", id="16 bytes"), pytest.param("x86-64-v3", id="32 bytes")]
)
def narrow(request, tmp_path_factory):
    """A library for this width of vectors; the tests use it instead of this processor's own."""
    if request.param == "x86-64-v3" and not AVX2.needs <= cpu_flags():
        pytest.skip("this processor has no AVX2")
    folder, compiler = tmp_path_factory.mktemp("narrow"), find_compiler()
    flags = [*compiler_flags(f"-march={request.param}"), "-O1"]
    try:
        compile_library(compiler, flags, {"none.cpp": ""}, folder / "none.so")
    except ValueError as error:
        pytest.skip(f"the compiler knows no {request.param}: {error}")
    made = folder / "narrow.so"
    compile_library(compiler, flags, cpp_sources(), made)
    return ctypes.CDLL(str(made))


@pytest.fixture
def other_width(narrow, monkeypatch):
    own = build.library()
    monkeypatch.setattr(build, "_load", lambda: (narrow, None))
    assert build.library() is narrow
    return own


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_attention_and_its_gradients_are_the_reference_s(shape, other_width):
    numbers, scope, above = operands(shape, torch.float32)
    found = with_gradients(lambda leaves: ours(leaves, scope), numbers, above)
    wanted = exact(lambda leaves: reference_attention(Operands(*leaves), scope), numbers, above)
    assert max(map(distance, found, wanted)) < 1e-5
    with torch.no_grad():  # the pass that keeps nothing for gradients
        torch.testing.assert_close(ours(numbers, scope), found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lanes", [1, 2, 5, 8])
def test_products_of_a_few_rows(lanes, dtype, other_width):
    for n_in, n_out in ((5, 7), (33, 64), (67, 131)):
        x, weight = torch.randn(lanes, n_in).to(dtype), torch.randn(n_out, n_in).to(dtype)
        with torch.no_grad():
            found = linear(x, weight, keeps_sums=True)
        torch.testing.assert_close(found.double(), F.linear(x.double(), weight.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_drops_the_same_numbers(dtype, other_width, monkeypatch):
    values, seed = torch.randn(1009).to(dtype), torch.tensor(12345)
    drop = torch.ops.txl.dropout
    found = drop(values, seed, 0.3)
    assert 200 < (found == 0).sum() < 400
    torch.testing.assert_close(compiled_dropout(values, 0.0), values)
    monkeypatch.setattr(build, "_load", lambda: (other_width, None))
    assert torch.equal(drop(values, seed, 0.3), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 16, 67, 131])
def test_loss_and_norm(width, dtype, other_width):
    values, gain = torch.randn(7, width).to(dtype).requires_grad_(), torch.randn(width)
    targets, above = torch.randint(width, (7,)), torch.randn(7, width).to(dtype)
    exact_values = values.detach().double().requires_grad_()
    losses = compiled_cross_entropy(values, targets)
    assert losses is not None
    expected = F.cross_entropy(exact_values, targets, reduction="none")
    normalised = compiled_rms_norm(values, gain, 1e-5)
    expected_norm = F.rms_norm(exact_values, (width,), gain.double(), 1e-5)
    found = [losses, *torch.autograd.grad(losses.sum(), values), normalised]
    wanted = [expected, *torch.autograd.grad(expected.sum(), exact_values), expected_norm]
    found += torch.autograd.grad(normalised, values, above)
    wanted += torch.autograd.grad(expected_norm, exact_values, above.double())
    for one, other in zip(found, wanted, strict=True):
        assert distance(one.detach(), other.detach()) < (1e-5 if one.dtype == torch.float32 else 1e-2)
