"""The factorised form of `flex` against the equations: outputs and all gradients, in float64, at prime sizes.

FlexAttention has gradients on a GPU alone, so that on a CPU plain attention with a mask replaces it.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.test_attention import SHAPES

from txl.attention import KeyScope, Operands, flex, reference_attention
from txl.attention.equations import distances_farthest_first, sinusoid

CPU = torch.device("cpu")


@contextmanager
def dense(wanted: bool = True):
    """Attention with a mask of all keys instead of FlexAttention."""

    def mask_of(scope, n_query, n_lane, device):
        mask = scope.mask(n_query, device)
        return mask if mask.dim() == 2 else mask[:, None]

    def attend(query, key, value, mask, scale):
        return (query @ key.transpose(2, 3) * scale).masked_fill(~mask, -math.inf).softmax(dim=-1) @ value

    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setattr(flex, "block_mask", mask_of)
            patch.setattr(flex, "fused_attention", attend)
        yield


@dataclasses.dataclass
class Case:
    """Random arguments of one size, with the results of the equations and of the factorised form."""

    B: int
    T: int
    M: int
    H: int
    D: int
    E: int
    window: int | None = None
    filled: tuple[int, ...] | None = None

    def __post_init__(self):
        draw = torch.Generator().manual_seed(0)
        S = self.M + self.T
        shapes = [(self.B, self.T, self.H, self.D), *[(self.B, S, self.H, self.D)] * 2, (self.H * self.D, self.E)]
        shapes += [(self.H, self.D)] * 2
        self.inputs = [torch.randn(*shape, dtype=torch.float64, generator=draw) for shape in shapes]
        self.scope = KeyScope(self.M, self.window, self.filled)

    def exact(self, inputs):
        """Return the output computed by the equations from R; `inputs` are query, key, value, W_kR, u and v."""
        query, key, value, weight, u, v = inputs
        r = sinusoid(distances_farthest_first(self.M + self.T, None), self.E, torch.float64)
        position = (r @ weight.T).view(self.M + self.T, self.H, self.D)
        return reference_attention(Operands(query, key, value, position, u, v), self.scope)

    def factorised(self, inputs, fused=False, capacity=0, device=CPU):
        with dense(not fused):
            tables = flex.PhaseTables(self.E)
            return tables.phases(self.scope, self.T, self.B, capacity, inputs[0].dtype, device).attend(*inputs)

    def inputs_in(self, dtype=torch.float64, device=CPU, grad=True):
        return [each.to(device, dtype).requires_grad_(grad) for each in self.inputs]

    def errors(self, dtype=torch.float64, fused=False, capacity=0, device=CPU):
        """Return the errors of the output and all gradients by name, relative to the largest entry of each tensor."""
        ours, theirs = self.inputs_in(dtype, device), self.inputs_in()
        found, expected = self.factorised(ours, fused, capacity, device), self.exact(theirs)
        assert found.dtype == dtype
        upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        grads = torch.autograd.grad(found, ours, upstream.to(device, dtype))
        names = ("output", "query", "key", "value", "W_kR", "u", "v")
        right = (expected, *torch.autograd.grad(expected, theirs, upstream))
        return {
            name: ((got.double().cpu() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-2)).item()  # some are 0
            for name, got, wanted in zip(names, (found, *grads), right, strict=True)
        }


@pytest.mark.parametrize(("B", "T", "M", "H", "D", "window", "filled"), SHAPES)
def test_equals_reference_in_output_and_gradients(B, T, M, H, D, window, filled):
    found = Case(B, T, M, H, D, 22, window, filled).errors()
    assert all(error < 1e-11 for error in found.values()), str(found)


@settings(max_examples=20, deadline=None)
@given(
    B=st.integers(1, 3), T=st.integers(1, 9), M=st.integers(0, 9), H=st.integers(1, 3), D=st.integers(1, 5),
    E=st.integers(1, 8).map(lambda half: 2 * half), window=st.none() | st.integers(1, 20), slack=st.integers(0, 30),
    data=st.data(),
)  # fmt: skip
def test_equals_reference_at_any_shape(B, T, M, H, D, E, window, slack, data):
    filled = data.draw(st.none() | st.tuples(*[st.integers(0, M)] * B))
    found = Case(B, T, M, H, D, E, window, filled).errors(capacity=slack)
    assert all(error < 1e-10 for error in found.values()), str(found)


def test_where_far_fewer_directions_than_features_are_needed():
    case = Case(1, 53, 103, 2, 13, 254)
    assert flex.phase_basis(156, 254).shape == (254, 64)
    found = case.errors()
    assert all(error < 1e-11 for error in found.values()), str(found)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.05)])
def test_low_precision_stays_close_to_float64(dtype, tolerance):
    found = Case(2, 17, 31, 3, 13, 62, 29).errors(dtype)
    assert all(error < tolerance for error in found.values()), str(found)


@pytest.mark.parametrize(
    ("n_position", "d_model", "rank"),
    [
        pytest.param(1024, 512, 176, id="enwik8-12L"),
        pytest.param(300, 410, 96, id="wt103-base"),
        pytest.param(768, 1024, 224, id="wt103-large"),
        pytest.param(7, 14, 7, id="fewer-positions-than-features"),
    ],
)
def test_the_rank_and_what_the_projection_leaves_out(n_position, d_model, rank):
    B = flex.phase_basis(n_position, d_model)
    assert B.shape == (d_model, rank)
    torch.testing.assert_close(B.T @ B, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-12)
    positions = torch.arange(n_position, dtype=torch.float64) - n_position // 2
    psi = sinusoid(positions, d_model, torch.float64)
    left_out = (psi - psi @ B @ B.T).norm(dim=1).max() / math.sqrt(d_model / 2)
    assert left_out < flex.TOLERANCE + 1e-14


def test_the_bound_on_a_score_holds():
    """The error of a score, |q . W R - phi . B B^T psi|, is at most flex.TOLERANCE sqrt(E/2) |p|, plus rounding."""
    n_position, d_model = 389, 254
    B = flex.phase_basis(n_position, d_model)
    p = torch.randn(d_model, dtype=torch.float64)
    p_s, p_c = p.chunk(2)
    middle = n_position // 2
    psi = sinusoid(torch.arange(n_position, dtype=torch.float64) - middle, d_model, torch.float64)
    sin, cos = psi[-1].chunk(2)
    phi = torch.cat([p_c * sin - p_s * cos, p_s * sin + p_c * cos])
    exact = sinusoid(distances_farthest_first(n_position, None), d_model, torch.float64) @ p
    rounding = 1e-11
    assert ((psi @ B) @ (B.T @ phi) - exact).abs().max() < flex.TOLERANCE * math.sqrt(d_model / 2) * p.norm() + rounding


def test_one_basis_serves_every_length_up_to_its_own():
    tables = flex.PhaseTables(30)
    for M, T in ((0, 5), (5, 5), (11, 3), (2, 7), (40, 3)):  # the last one needs a new basis
        case = Case(1, T, M, 2, 3, 30)
        with torch.no_grad(), dense():
            found = tables.phases(case.scope, T, 1, 13, torch.float64, CPU).attend(*case.inputs)
            torch.testing.assert_close(found, case.exact(case.inputs), rtol=0, atol=1e-11)


UNCOMPILED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@UNCOMPILED
@pytest.mark.parametrize(("B", "T", "M", "H", "D", "window", "filled"), SHAPES)
def test_flex_attention_equals_reference_without_gradients(B, T, M, H, D, window, filled):
    case = Case(B, T, M, H, D, 22, window, filled)
    found = case.factorised(case.inputs, fused=True)
    torch.testing.assert_close(found, case.exact(case.inputs), rtol=0, atol=1e-11)


@UNCOMPILED
def test_flex_attention_over_several_blocks_of_its_mask():
    case = Case(2, 149, 211, 2, 5, 38, 131, (211, 97))
    found = case.factorised(case.inputs, fused=True)
    torch.testing.assert_close(found, case.exact(case.inputs), rtol=0, atol=1e-11)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
# A CPU's largest error in bfloat16 is 0.065.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-2), (torch.bfloat16, 0.08)])
@pytest.mark.parametrize(("window", "filled"), [(None, None), (131, None), (131, (211, 97))])
def test_on_a_gpu_outputs_and_gradients_equal_reference(dtype, tolerance, window, filled):
    case = Case(2, 149, 211, 2, 64, 254, window, filled)
    found = case.errors(dtype, fused=True, device=torch.device("cuda"))
    assert all(error < tolerance for error in found.values()), str(found)
