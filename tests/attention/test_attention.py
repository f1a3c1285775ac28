"""Reference and shifted attention against the equations: outputs and all gradients, in float64, at prime sizes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from txl.attention import KeyScope, Operands, reference_attention, shifted_attention
from txl.attention.equations import distances_farthest_first, sinusoid
from txl.attention.shifted import masked_scores

# (B, T, M, H, D, window, filled)
SHAPES = [
    pytest.param(2, 5, 7, 3, 11, None, None, id="memory"),
    pytest.param(2, 11, 0, 3, 5, None, None, id="no-memory"),
    pytest.param(3, 1, 13, 2, 7, None, None, id="one-query"),
    pytest.param(1, 1, 0, 1, 1, None, None, id="one-key"),
    pytest.param(2, 7, 5, 3, 5, 3, None, id="narrow-window"),
    pytest.param(2, 7, 5, 3, 5, 1, None, id="sees-only-itself"),
    pytest.param(2, 7, 5, 3, 5, 6, None, id="window-of-memory-and-itself"),
    pytest.param(2, 7, 5, 3, 5, 101, None, id="window-wider-than-everything"),
    pytest.param(3, 5, 7, 2, 3, None, (0, 3, 7), id="lanes-with-shorter-memory"),
    pytest.param(3, 5, 7, 2, 3, 4, (0, 3, 7), id="window-and-shorter-memory"),
]


def arguments(B, T, M, H, D, dtype=torch.float64, seed=0):
    """Return operands, which all require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()

    S = M + T
    shapes = [(B, T, H, D), (B, S, H, D), (B, S, H, D), (S, H, D), (H, D), (H, D)]
    return Operands(*(normal(*shape) for shape in shapes))


def loop_attention(operands, scope):
    """Compute attention directly from the equations of Section 3.3, one query and head at a time."""
    query, key, value, position, u, v = operands
    B, T, H, D = query.shape
    M = scope.memory
    output = torch.zeros_like(query)
    for b in range(B):
        oldest = 0 if scope.filled is None else M - scope.filled[b]
        for i in range(T):
            first = oldest if scope.window is None else max(oldest, M + i - scope.window + 1)
            for h in range(H):
                scores = torch.stack(
                    [
                        (query[b, i, h] + u[h]) @ key[b, j, h]
                        + (query[b, i, h] + v[h]) @ position[len(position) - 1 - (M + i - j), h]
                        for j in range(first, M + i + 1)
                    ]
                )
                weights = (scores / math.sqrt(D)).softmax(0)
                output[b, i, h] = weights @ value[b, first : M + i + 1, h]
    return output


@pytest.mark.parametrize(("B", "T", "M", "H", "D", "window", "filled"), SHAPES)
def test_reference_is_the_equation(B, T, M, H, D, window, filled):
    args = Operands(*(tensor.detach() for tensor in arguments(B, T, M, H, D))), KeyScope(M, window, filled)
    torch.testing.assert_close(reference_attention(*args), loop_attention(*args), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("B", "T", "M", "H", "D", "window", "filled"), SHAPES)
def test_shifted_equals_reference_in_output_and_gradients(B, T, M, H, D, window, filled):
    args = arguments(B, T, M, H, D)
    scope = KeyScope(M, window, filled)
    expected, found = reference_attention(args, scope), shifted_attention(args, scope)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.autograd.grad(output, args, upstream) for output in (found, expected))
    for name, our, their in zip(Operands._fields, ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@settings(max_examples=40, deadline=None)
@given(
    B=st.integers(1, 3), T=st.integers(1, 9), M=st.integers(0, 9), H=st.integers(1, 3), D=st.integers(1, 5),
    window=st.none() | st.integers(1, 20), data=st.data(),
)  # fmt: skip
def test_shifted_equals_reference_at_any_shape(B, T, M, H, D, window, data):
    filled = data.draw(st.none() | st.tuples(*[st.integers(0, M)] * B))
    args = arguments(B, T, M, H, D)
    scope = KeyScope(M, window, filled)
    expected, found = reference_attention(args, scope), shifted_attention(args, scope)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    ours, theirs = torch.autograd.grad(found.sum(), args), torch.autograd.grad(expected.sum(), args)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_low_precision_stays_close_to_float64(dtype, tolerance):
    scope = KeyScope(31, 29)
    args, low = arguments(2, 17, 31, 3, 13), arguments(2, 17, 31, 3, 13, dtype=dtype)
    exact, found = reference_attention(args, scope), shifted_attention(low, scope)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=tolerance)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), low), torch.autograd.grad(exact.sum(), args), strict=True):
        assert ((ours.double() - theirs).norm() / theirs.norm()).item() < tolerance


def test_unused_places_of_the_buffer_cannot_leak(monkeypatch):
    """New buffers are filled with NaN, so that reading an entry before it is written shows in the result."""
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *size, **kwargs):
        return new_empty(self, *size, **kwargs).fill_(math.nan)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    args = arguments(2, 7, 5, 3, 5)
    for scope in (KeyScope(5), KeyScope(5, 3), KeyScope(5, 3, (0, 4))):
        found = shifted_attention(args, scope)
        assert found.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(found.sum(), args))


def test_hidden_keys_score_minus_infinity_and_seen_ones_do_not():
    H, B, T, M, D = 2, 3, 5, 7, 3
    scope = KeyScope(M, 6, (0, 3, 7))
    query, key = torch.randn(H, B, T, D), torch.randn(H, B, M + T, D)
    scores = masked_scores(query, query, key, torch.randn(H, M + T + 1, D), scope).view(H, B, T, M + T)
    assert torch.equal(scores.isfinite(), scope.mask(T).expand(H, B, T, M + T))


def test_masks_worked_out_by_hand():
    assert KeyScope(2).mask(2).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert KeyScope(2, window=2).mask(2).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert KeyScope(2, filled=(0, 1)).mask(1).int().tolist() == [[[0, 0, 1]], [[0, 1, 1]]]


@pytest.mark.parametrize("attend", [reference_attention, shifted_attention])
def test_dropout_keeps_the_expected_output_and_its_gradient_is_consistent(attend):
    args = arguments(1, 3, 4, 1, 2)
    exact = attend(args, KeyScope(4))
    torch.manual_seed(3)
    mean = torch.stack([attend(args, KeyScope(4), 0.3).detach() for _ in range(1000)]).mean(0)
    torch.testing.assert_close(mean, exact.detach(), rtol=0, atol=0.1)
    assert not torch.equal(attend(args, KeyScope(4), 0.3), exact)


def test_gradient_under_dropout_is_that_of_finite_differences():
    args = [tensor.detach().requires_grad_() for tensor in arguments(2, 3, 2, 2, 3)]

    def fixed_mask(*leaves):
        torch.manual_seed(5)
        return shifted_attention(Operands(*leaves), KeyScope(2, 4), 0.4)

    assert torch.autograd.gradcheck(fixed_mask, args)


def test_distances_run_from_the_farthest_to_zero_and_stop_at_the_clamp():
    assert distances_farthest_first(5, None).tolist() == [4, 3, 2, 1, 0]
    assert distances_farthest_first(5, 2).tolist() == [2, 2, 2, 1, 0]
    assert distances_farthest_first(3, 0).tolist() == [0, 0, 0]


def test_sinusoid_has_all_sines_first_then_all_cosines():
    row = sinusoid(torch.tensor([7]), 6, torch.float64)[0].tolist()
    angles = [7 / 10000 ** (2 * k / 6) for k in range(3)]
    expected = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
    assert all(math.isclose(found, want, abs_tol=1e-14) for found, want in zip(row, expected, strict=True))


def test_a_float32_model_has_the_authors_sinusoid_to_the_last_bit():
    """The authors' code: inv_freq = 1 / 10000 ** (arange(0, d, 2.0) / d), outer product, sin, cos; all in float32."""
    distances = torch.arange(3800, -1, -1.0)
    inv_freq = 1 / (10000 ** (torch.arange(0.0, 512, 2.0) / 512))
    angles = torch.ger(distances, inv_freq)
    theirs = torch.cat([angles.sin(), angles.cos()], dim=-1)
    assert torch.equal(sinusoid(distances_farthest_first(3801, None), 512, torch.float32), theirs)


def test_sinusoid_has_the_dtype_of_the_model_but_is_never_computed_below_float32():
    distances = distances_farthest_first(3001, None)
    low = sinusoid(distances, 14, torch.bfloat16)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, sinusoid(distances, 14, torch.float32).bfloat16())
