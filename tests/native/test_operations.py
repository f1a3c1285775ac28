"""Dropout, RMSNorm and cross-entropy in the compiled library: numbers, gradients, threads, and the models that use it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from inspect import unwrap
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.native.test_compiled_attention import philox
from torch import Tensor, nn

from txl.config import TransformerXLConfig, VanillaConfig
from txl.errors import UserError
from txl.models import build_model, layers
from txl.models import loss as losses_of
from txl.models.layers import Dropout, HeadNorm
from txl.models.loss import linear_cross_entropy
from txl.native.build import compiled_code, why_not
from txl.native.operations import compiled_cross_entropy, compiled_dropout, compiled_rms_norm, serves
from txl.native.tensors import computes

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no compiled library: {why_not()}")

DTYPES = (torch.float32, torch.bfloat16)
EPSILON = 1e-3
BLOCK, GROUP = 2048, 64
SHAPE = TransformerXLConfig(n_layer=1, d_model=16, n_head=2, d_head=8, d_inner=16, mem_len=8)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    losses = compiled_cross_entropy(logits, targets)
    assert losses is not None
    return losses


def drawn_losses(n_row: int, n_class: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [n_row,n_class], targets [n_row], and a factor for each loss [n_row]."""
    torch.manual_seed(n_row * 1000 + n_class)
    logits = (3 * torch.randn(n_row, n_class)).to(dtype).requires_grad_()
    return logits, torch.randint(n_class, (n_row,)), torch.randn(n_row)


def drawn_rows(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return values of the given shape, a gain for the last dimension, and a gradient of the output."""
    torch.manual_seed(sum(shape))
    x = (3 * torch.randn(shape)).to(dtype).requires_grad_()
    return x, (1 + torch.randn(shape[-1])).requires_grad_(), torch.randn(shape).to(dtype)


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + EPSILON).sqrt() * gain


def case(name: str, n_row: int, width: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return values, the library's function and PyTorch's, both of the values, and a gradient of their output."""
    if name == "loss":
        logits, targets, weights = drawn_losses(n_row, width, dtype)
        theirs = partial(F.cross_entropy, target=targets, reduction="none")
        return logits, lambda values: cross_entropy(values, targets), theirs, weights
    x, gain, above = drawn_rows(n_row, 3, width, dtype=dtype)
    return x, lambda values: compiled_rms_norm(values, gain, EPSILON), lambda values: rms_norm(values, gain), above


BOTH = pytest.mark.parametrize("name", ["loss", "norm"])


def with_gradient(function: Callable[[Tensor], Tensor], values: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    values = values.detach().requires_grad_()
    output = function(values)
    return output.detach(), torch.autograd.grad(output, values, above.to(output.dtype))[0]


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_with_any_number_of_threads(name, dtype):
    values, ours, _, above = case(name, 301, 77, dtype)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            torch.manual_seed(4)
            found.append((*with_gradient(ours, values, above), compiled_dropout(torch.ones(123_457).to(dtype), 0.1)))
    finally:
        torch.set_num_threads(before)
    for one, other in pairwise(found):
        assert all(map(torch.equal, one, other))


@BOTH
def test_rows_that_do_not_lie_behind_one_another(name):
    values, ours, _, above = case(name, 33, 40)
    across = values.detach().transpose(0, -1).contiguous().transpose(0, -1)
    spread = above.repeat_interleave(2, -1)[..., ::2]
    assert all(map(torch.equal, with_gradient(ours, values, above), with_gradient(ours, across, spread)))


@BOTH
def test_no_row_has_no_numbers(name):
    values, ours, _, above = case(name, 0, 7)
    output, gradient = with_gradient(ours, values, above)
    assert (output.numel(), gradient.shape) == (0, values.shape)


@BOTH
def test_second_derivatives_are_pytorch_s(name):
    values, ours, theirs, above = case(name, 6, 20)

    def curvature(output: Tensor) -> Tensor:
        [gradient] = torch.autograd.grad(output, values, above, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), values)[0]

    torch.testing.assert_close(curvature(ours(values)), curvature(theirs(values)), rtol=1e-4, atol=1e-6)


@BOTH
def test_the_gradient_comes_where_the_library_is_no_longer_wanted(name):
    values, ours, _, above = case(name, 6, 20)
    [expected] = torch.autograd.grad(ours(values), values, above)
    output = ours(values)
    with compiled_code(False):
        [found] = torch.autograd.grad(output, values, above)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_where_the_library_computes():
    logits, targets, _ = drawn_losses(5, 7)
    assert computes(logits)
    assert serves(logits, targets)
    for other in (logits.double(), logits.half(), logits.to("meta")):
        assert not computes(other)
        assert compiled_cross_entropy(other, targets) is None
    for wrong in (targets.int(), targets.to(torch.uint8), targets[:3], targets.repeat(2), targets.to("meta")):
        assert compiled_cross_entropy(logits, wrong) is None
    with compiled_code(False):
        assert not computes(logits)
        assert compiled_cross_entropy(logits, targets) is None


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("cutoffs", [(), (20, 40)])
@pytest.mark.parametrize("max_logits", [None, 60], ids=["whole", "in chunks"])
def test_training_uses_it_where_attention_is_compiled_and_reading_always(max_logits, cutoffs, qk_norm, monkeypatch):
    """Without compiled attention, training uses PyTorch everywhere, so that a run can move between machines."""
    called, gradients = [], []

    def counted(name, entry, *args, **kwargs):
        called.append(name)
        return entry(*args, **kwargs)

    chunks, norm = {"losses_and_sums", "write_gradient"}, {"compiled_rms_norm"} if qk_norm else set()
    for name in ("compiled_cross_entropy", *chunks, "compiled_rms_norm"):
        module = layers if name == "compiled_rms_norm" else losses_of
        monkeypatch.setattr(module, name, partial(counted, name, getattr(module, name)))
    if max_logits is not None:
        monkeypatch.setattr(losses_of, "MAX_LOGITS", max_logits)
    tokens = torch.randint(50, (2, 8))
    for attention, expected in (("shifted", set()), ("compiled", norm | (chunks if max_logits else set()))):
        torch.manual_seed(3)
        config = dataclasses.replace(SHAPE, attention=attention, cutoffs=cutoffs, qk_norm=qk_norm, dropout=0.0)
        model = build_model(config, 50).train()
        called.clear()
        loss, _ = model.training_loss(tokens, tokens, model.init_state(2))
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        assert expected <= set(called)
        assert bool(called) == (attention == "compiled")
        called.clear()
        with torch.no_grad():
            model.training_loss(tokens, tokens, model.init_state(2))
        assert norm < set(called)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- cross-entropy


def in_float64(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return with_gradient(partial(F.cross_entropy, target=targets, reduction="none"), logits.double(), weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_class", [1, 2, 15, 16, 17, 63, 64, 65, 130, 10_001])
def test_losses_and_gradients_are_those_of_float64(n_class, dtype):
    logits, targets, weights = drawn_losses(9, n_class, dtype)
    losses, gradient = in_float64(logits, targets, weights)
    found, ours = with_gradient(lambda values: cross_entropy(values, targets), logits, weights)
    assert (found.dtype, ours.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(found.double(), losses, rtol=1e-6, atol=2e-6)
    # In bfloat16 the only additional error is one rounding of the gradient.
    torch.testing.assert_close(ours.double(), gradient, rtol=4e-3 if dtype == torch.bfloat16 else 3e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits_give_what_pytorch_gives(dtype):
    rows = torch.zeros(6, 70)
    rows[0, 3], rows[0, 40] = 1e30, -1e30
    rows[1] = -300.0
    rows[2, 5:] = -math.inf
    rows[3, 69] = math.inf
    rows[4, 17] = math.nan
    rows[5, 68] = math.nan
    targets, ones = torch.tensor([40, 1, 2, 3, 4, 5]), torch.ones(6)
    expected = in_float64(rows.to(dtype), targets, ones)
    found = with_gradient(lambda values: cross_entropy(values, targets), rows.to(dtype), ones)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=4e-3, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("target", [-1, -100, 7])
def test_a_target_that_is_no_class_is_refused(target):
    with pytest.raises(IndexError, match="targets are .*expected 0 to"):
        compiled_cross_entropy(torch.zeros(2, 7), torch.tensor([0, target]))


def test_targets_of_another_length_are_refused_as_pytorch_refuses_them():
    hidden, weight, bias = torch.randn(4, 6), torch.randn(9, 6), torch.randn(9)
    with pytest.raises(ValueError, match="batch_size"):
        unwrap(linear_cross_entropy)(hidden, weight, bias, torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("offset", [0, 100, 10_000])
def test_gradients_of_logits_with_an_offset_are_as_exact(offset):
    logits, targets, weights = drawn_losses(20, 333)
    _, gradient = in_float64(logits.detach() + offset, targets, weights)
    _, found = with_gradient(lambda values: cross_entropy(values, targets), logits.detach() + offset, weights)
    torch.testing.assert_close(found.double(), gradient, rtol=3e-6, atol=1e-6)


def test_functional_gradients_of_a_loss_are_pytorch_s():
    logits, targets, _ = drawn_losses(6, 20)

    def loss(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, torch.eye(20), torch.zeros(20), targets).sum()

    [expected] = torch.autograd.grad(loss(logits), logits)
    torch.testing.assert_close(torch.func.grad(loss)(logits.detach()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_logits", [4 * 50, 9 * 50])
def test_a_linear_layer_uses_it_whole_and_in_chunks(max_logits, monkeypatch):
    monkeypatch.setattr(losses_of.F, "cross_entropy", None)
    monkeypatch.setattr(Tensor, "scatter_add_", None)
    torch.manual_seed(4)
    inputs = [torch.randn(shape).requires_grad_() for shape in ((9, 6), (50, 6), (50,))]
    hidden, weight, bias = inputs
    losses = linear_cross_entropy(hidden, weight, bias, torch.arange(9), max_logits=max_logits)
    gradients = torch.autograd.grad(losses.sum(), inputs)
    monkeypatch.undo()
    with compiled_code(False):
        expected = linear_cross_entropy(hidden, weight, bias, torch.arange(9), max_logits=max_logits)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    for one, other in zip(gradients, torch.autograd.grad(expected.sum(), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- RMSNorm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 15), (2, 7, 16), (700, 4, 32), (300, 33), (9, 64)], ids=str)
def test_norms_and_gradients_are_those_of_float64(shape, dtype):
    x, gain, above = drawn_rows(*shape, dtype=dtype)
    exact = [each.detach().double().requires_grad_() for each in (x, gain)]
    expected = rms_norm(*exact)
    wanted = torch.autograd.grad(expected, exact, above.double())
    found = compiled_rms_norm(x, gain, EPSILON)
    assert found.dtype == dtype
    rounding = 4e-3 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=1e-6)
    ours = torch.autograd.grad(found, (x, gain), above)
    assert [each.dtype for each in ours] == [dtype, torch.float32]
    torch.testing.assert_close(ours[0].double(), wanted[0], rtol=rounding, atol=rounding)
    torch.testing.assert_close(ours[1].double(), wanted[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_pytorch_computes_the_same_norm(dtype):
    norm, rounding = HeadNorm(32, eps=EPSILON).to(dtype), 8e-3 if dtype == torch.bfloat16 else 1e-6
    x, gain, _ = drawn_rows(7, 32)
    with torch.no_grad():
        norm.weight.copy_(gain)
        with compiled_code(False):
            expected = norm(x.to(dtype))
        assert expected.dtype == dtype
        torch.testing.assert_close(norm(x.to(dtype)), expected, rtol=rounding, atol=0)
        exact = rms_norm(x.to(dtype).double(), norm.weight.double())
    torch.testing.assert_close(expected.double(), exact, rtol=rounding, atol=1e-12)


@pytest.mark.parametrize("of", ["values", "gain"])
def test_functional_gradients_of_a_norm_are_those_of_the_definition(of):
    x, gain, above = (each.detach() for each in drawn_rows(5, 16))
    norm = HeadNorm(16, eps=EPSILON)
    norm.compiled = True

    def total(given: Tensor) -> Tensor:
        values, weight = (given, gain) if of == "values" else (x, given)
        return (torch.func.functional_call(norm, {"weight": weight}, (values,)) * above).sum()

    exact = [each.double().requires_grad_() for each in (x, gain)]
    [expected] = torch.autograd.grad(rms_norm(*exact), exact[of == "gain"], above.double())
    found = torch.func.grad(total)(x if of == "values" else gain)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 15, 64, 2047, 2 * BLOCK + 77, 10 * BLOCK + 1])
def test_what_is_dropped_is_what_the_generator_says(n, dtype):
    torch.manual_seed(n)
    values = torch.randn(n).to(dtype)
    for rate in (0.1, 0.5, 0.9):
        state = torch.get_rng_state()
        seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64))  # that the next call will draw
        torch.set_rng_state(state)
        number = torch.arange(n)
        group, lane = number % BLOCK // GROUP, number % (GROUP // 4)
        counter = [group * (GROUP // 4) + lane, number // BLOCK, torch.zeros_like(number), torch.zeros_like(number)]
        words = philox(torch.stack(counter, dim=-1), seed).gather(-1, (number % GROUP // (GROUP // 4))[:, None])[:, 0]
        kept = words >= round(rate * 2**32)
        expected = (values.float() * torch.tensor(1 / (1 - rate)) * kept).to(dtype)
        torch.testing.assert_close(compiled_dropout(values, rate), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_dropped_where_the_values_were(dtype):
    torch.manual_seed(1)
    values = torch.randn(7, 9, 501, dtype=dtype).transpose(0, 2)  # rows are not contiguous in memory
    above = torch.randn(501, 7, 9, dtype=dtype).transpose(1, 2)
    out, found = with_gradient(lambda given: compiled_dropout(given, 0.3), values, above)
    factors = torch.tensor(1 / 0.7) * (out != 0)
    assert torch.equal(out, (values.float() * factors).to(dtype))
    assert torch.equal(found, (above.float() * factors).to(dtype))


def test_second_derivatives_of_dropout_are_those_of_a_linear_function():
    torch.manual_seed(2)
    values, above = (torch.randn(100, requires_grad=True) for _ in range(2))
    out = compiled_dropout(values, 0.5)
    [first] = torch.autograd.grad(out, values, above, create_graph=True)
    [second] = torch.autograd.grad(first.sum(), above)
    assert torch.equal(second, 2.0 * (out != 0))


def test_rate_mean_and_independence():
    torch.manual_seed(3)
    ones = torch.ones(1000, 1000)
    first, second = compiled_dropout(ones, 0.2), compiled_dropout(ones, 0.2)
    for each in (first, second):
        assert each.unique().tolist() == [0.0, 1.25]
        assert abs((each == 0).double().mean().item() - 0.2) < 4 * (0.2 * 0.8 / 1e6) ** 0.5

    def correlation(a: Tensor, b: Tensor) -> float:
        return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()

    assert abs(correlation(first, second)) < 0.004  # four standard deviations
    flat = first.flatten()
    for distance in (1, 2, 4, 16, 64, BLOCK):
        assert abs(correlation(flat[:-distance], flat[distance:])) < 0.004, distance


@pytest.mark.parametrize("family", [TransformerXLConfig, VanillaConfig])
def test_models_with_compiled_attention_use_it_at_every_site(family):
    def sites(model: nn.Module) -> list[bool]:
        return [module.compiled for module in model.modules() if isinstance(module, Dropout)]

    shape = {"n_layer": 1, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 16, "dropout": 0.5}
    compiled, other = (build_model(family(**shape, attention=name), 11, "cpu") for name in ("compiled", "auto"))
    assert len(sites(compiled)) == len(sites(other)) >= 6
    assert all(sites(compiled))
    assert not any(sites(other))
    assert not any(type(module) is nn.Dropout for module in compiled.modules())
    tokens = torch.randint(11, (2, 7))
    state = compiled.init_state(2)
    torch.manual_seed(0)
    assert not torch.equal(compiled.train().nll(tokens, tokens, state)[0], compiled.nll(tokens, tokens, state)[0])
    assert torch.equal(compiled.eval().nll(tokens, tokens, state)[0], compiled.nll(tokens, tokens, state)[0])
    with pytest.raises(UserError, match=r"model.attention compiled cannot train in torch.float64"):
        compiled.double().train().nll(tokens, tokens, state)


def test_locked_dropout_stays_as_it_was(monkeypatch):
    monkeypatch.setattr(layers, "compiled_dropout", lambda *_: pytest.fail("locked dropout has masks of its own"))
    tokens, drawn = torch.randint(11, (2, 7)), []
    for attention in ("compiled", "shifted"):
        torch.manual_seed(5)
        config = dataclasses.replace(SHAPE, dropout=0.5, attention=attention, locked_dropout=True)
        model = build_model(config, 11, "cpu").train()
        losses = model.nll(tokens, tokens, model.init_state(2))[0]
        drawn.append((losses, torch.rand(3)))
    torch.testing.assert_close(*(losses for losses, _ in drawn))
    assert torch.equal(*(after for _, after in drawn))


def test_another_default_device_changes_nothing():
    values = torch.randn(100)
    with torch.device("meta"):
        out = compiled_dropout(values, 0.5)
    assert torch.equal(out, 2 * values * (out != 0))
    assert 20 < (out == 0).sum() < 80
