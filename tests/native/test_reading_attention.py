"""Attention without gradients in the compiled library: outputs equal the reference's; PyTorch computes other cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from txl.attention.backends import attention_without_gradients
from txl.attention.equations import KeyScope, Operands, reference_attention
from txl.attention.shifted import shifted_attention
from txl.native.attention import FEWEST_QUERIES, reading_attention
from txl.native.build import compiled_code, library, why_not

needs_compiler = pytest.mark.skipif(why_not() is not None, reason=f"no compiled library: {why_not()}")

# B, T, M, H, D, window, filled: below and above a vector, a panel, a block of keys, and the queries of a task.
SHAPES = {
    "no memory": (2, 33, 0, 1, 7, None, None),
    "narrower than a vector": (3, 17, 5, 2, 5, None, None),
    "odd width, lanes of several lengths": (3, 64, 640, 2, 41, 600, (0, 640, 13)),
    "window shorter than a segment": (2, 100, 40, 3, 33, 7, (40, 0)),
    "window of one": (1, 20, 20, 1, 32, 1, None),
    "several blocks, more queries than a task has": (1, 300, 1700, 2, 64, None, None),
    "window that hides whole blocks": (1, 600, 1100, 1, 128, 300, None),
    "many heads": (1, 9, 16, 11, 16, None, None),
    "all memory hidden": (2, 24, 40, 2, 64, None, (0, 0)),
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def operands(shape, dtype) -> Any:
    B, T, M, H, D, window, filled = shape
    S = M + T
    torch.manual_seed(0)
    query = torch.randn(B, T, H, D).to(dtype)
    # The layout of memory buffers: each head has a block of rows, with unused rows at both ends.
    key, value = (torch.randn(H, B, S + 3, D).to(dtype)[:, :, 2 : S + 2].permute(1, 2, 0, 3) for _ in range(2))
    position = torch.randn(H, S + 5, D).to(dtype)[:, 5:].transpose(0, 1)
    u, v = torch.randn(H, D), torch.randn(H, D)
    return query, key, value, position, u, v, KeyScope(M, window, filled)


def fused(*numbers: torch.Tensor, scope: KeyScope) -> torch.Tensor | None:
    return reading_attention(numbers, scope.window, scope.filled)


def test_lanes_whose_memory_a_tensor_describes_are_read_alike():
    query, key, value, position, u, v, scope = operands((2, 9, 8, 2, 5, None, (0, 4)), torch.float32)
    numbers = Operands(query, key, value, position, u, v)
    as_tensor = KeyScope(scope.memory, scope.window, None, torch.tensor(scope.filled))
    with torch.no_grad():
        expected = reference_attention(Operands(*numbers), scope)
        torch.testing.assert_close(attention_without_gradients(numbers, scope), expected)
        torch.testing.assert_close(attention_without_gradients(numbers, as_tensor), expected)


def usable(dtype: torch.dtype) -> bool:
    found = library()
    assert found is not None
    return dtype != torch.bfloat16 or bool(found.txl_attends_bfloat16())


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_relative_attention_is_the_reference_s(shape, dtype):
    if not usable(dtype):
        pytest.skip("this processor does not multiply bfloat16")
    *numbers, scope = operands(shape, dtype)
    with torch.no_grad():
        found = fused(*numbers, scope=scope)
        expected = reference_attention(Operands(*(each.double() for each in numbers)), scope)
    assert found is not None
    assert found.dtype == dtype
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCES[dtype])


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(2, 70, 4, 32), (1, 700, 1, 41), (3, 8, 2, 64)])
def test_without_positions_it_is_plain_causal_attention(shape, dtype):
    if not usable(dtype):
        pytest.skip("this processor does not multiply bfloat16")
    query, key, value = (torch.randn(shape).to(dtype) for _ in range(3))
    with torch.no_grad():
        found = reading_attention((query, key, value))
    q, k, v = (each.double().transpose(1, 2) for each in (query, key, value))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    assert found is not None
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCES[dtype])


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_nothing_depends_on_the_other_lanes_or_on_threads(dtype):
    if not usable(dtype):
        pytest.skip("this processor does not multiply bfloat16")
    query, key, value, position, u, v, scope = operands((5, 70, 600, 2, 33, 500, (600, 0, 3, 70, 600)), dtype)
    assert scope.filled is not None
    threads = torch.get_num_threads()
    with torch.no_grad():
        together = fused(query, key, value, position, u, v, scope=scope)
        assert together is not None
        try:
            for number in (1, 3):
                torch.set_num_threads(number)
                assert torch.equal(together, fused(query, key, value, position, u, v, scope=scope))  # pyright: ignore
        finally:
            torch.set_num_threads(threads)
        for lane in range(5):
            one = slice(lane, lane + 1)
            alone = KeyScope(600, 500, scope.filled[one])
            found = fused(query[one], key[one], value[one], position, u, v, scope=alone)
            assert found is not None
            assert torch.equal(together[one], found)


@needs_compiler
def test_scores_far_apart_do_not_overflow():
    query, key, value, position, u, v, scope = operands((1, 40, 1100, 2, 16, None, None), torch.float32)
    with torch.no_grad():
        found = fused(query * 1000, key * 10, value, position, u, v, scope=scope)
        exact = Operands(*(x.double() for x in (query * 1000, key * 10, value, position, u, v)))
        expected = reference_attention(exact, scope)
    assert found is not None
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-2)  # scores of 1e5 in float32


@needs_compiler
@pytest.mark.parametrize("which", range(4))
def test_what_is_not_a_number_stays_so(which):
    *numbers, scope = operands((1, 40, 600, 1, 16, None, None), torch.float32)
    numbers[which][0, 0] = torch.nan
    with torch.no_grad():
        found = fused(*numbers, scope=scope)
    assert found is not None
    assert found.isnan().any(dim=-1).any()


@needs_compiler
def test_what_it_does_not_do_is_pytorch_s():
    *numbers, scope = operands((1, FEWEST_QUERIES, 5, 1, 16, None, None), torch.float32)
    assert fused(*numbers, scope=scope) is None  # gradients are required
    with torch.no_grad():
        assert fused(*numbers, scope=scope) is not None
        assert fused(*(each.double() for each in numbers), scope=scope) is None
        assert fused(numbers[0][:, 1:], *numbers[1:], scope=scope) is None
        with compiled_code(False):
            assert fused(*numbers, scope=scope) is None


@needs_compiler
def test_torch_compile_does_not_look_into_the_library(monkeypatch):
    *numbers, scope = operands((1, 16, 5, 1, 16, None, None), torch.float32)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.no_grad():
        assert fused(*numbers, scope=scope) is None


@needs_compiler
def test_attention_dropout_is_not_left_out():
    *numbers, scope = operands((1, 16, 5, 1, 16, None, None), torch.float32)
    with torch.no_grad():
        assert not torch.equal(
            shifted_attention(Operands(*numbers), scope, dropout=0.5), shifted_attention(Operands(*numbers), scope)
        )
