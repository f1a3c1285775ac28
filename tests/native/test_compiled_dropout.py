"""Dropout in the compiled library: the numbers of its generator, gradients, threads, and the models that use it."""

from __future__ import annotations

import pytest
import torch
from tests.native.threads import assert_same_with_any_number_of_threads
from torch import Tensor, nn

from txl.config import TransformerXLConfig, VanillaConfig
from txl.errors import UserError
from txl.models import build_model, layers
from txl.models.layers import Dropout
from txl.native.build import why_not
from txl.native.operations import compiled_dropout

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no compiled library: {why_not()}")

DTYPES = (torch.float32, torch.bfloat16)
LOW = 0xFFFFFFFF
BLOCK, GROUP = 2048, 64


def philox(counter: tuple[int, int, int, int], seed: int) -> tuple[int, int, int, int]:
    """Return the words of Philox4x32 with 7 rounds (Salmon et al. 2011), computed with Python integers."""
    a, b, c, d = counter
    k0, k1 = seed & LOW, seed >> 32
    for _ in range(7):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (second >> 32) ^ b ^ k0, second & LOW, (first >> 32) ^ d ^ k1, first & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return a, b, c, d


def dropped_by_hand(n: int, rate: float, seed: int) -> list[bool]:
    found = []
    for number in range(n):
        block, place = divmod(number, BLOCK)
        group, within = divmod(place, GROUP)
        word, lane = divmod(within, GROUP // 4)
        found.append(philox((group * (GROUP // 4) + lane, block, 0, 0), seed)[word] < round(rate * 2**32))
    return found


def seed_of_next() -> int:
    """Return the seed that the next call will draw, and leave the state of the generator unchanged."""
    state = torch.get_rng_state()
    seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64))
    torch.set_rng_state(state)
    return seed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 15, 64, 2047, 2 * BLOCK + 77, 10 * BLOCK + 1])
def test_what_is_dropped_is_what_the_generator_says(n, dtype):
    torch.manual_seed(n)
    values = torch.randn(n).to(dtype)
    for rate in (0.1, 0.5, 0.9):
        kept = ~torch.tensor(dropped_by_hand(n, rate, seed_of_next()))
        expected = (values.float() * torch.tensor(1 / (1 - rate)) * kept).to(dtype)
        torch.testing.assert_close(compiled_dropout(values, rate), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_dropped_where_the_values_were(dtype):
    torch.manual_seed(1)
    values = torch.randn(7, 9, 501, dtype=dtype).transpose(0, 2).requires_grad_()  # rows are not contiguous in memory
    above = torch.randn(501, 7, 9, dtype=dtype).transpose(1, 2)
    out = compiled_dropout(values, 0.3)
    assert out.shape == values.shape
    [found] = torch.autograd.grad(out, values, above)
    factors = torch.tensor(1 / 0.7) * (out != 0)
    assert torch.equal(out, (values.float() * factors).to(dtype))
    assert torch.equal(found, (above.float() * factors).to(dtype))


def test_second_derivatives_are_those_of_a_linear_function():
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


def test_any_number_of_threads_drops_the_same():
    values = torch.randn(123_457)

    def work() -> tuple[Tensor, ...]:
        torch.manual_seed(4)
        return (compiled_dropout(values, 0.1),)

    assert_same_with_any_number_of_threads(work)


SHAPE = {"n_layer": 1, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 16, "dropout": 0.5}


@pytest.mark.parametrize("family", [TransformerXLConfig, VanillaConfig])
def test_models_with_compiled_attention_use_it_at_every_site(family):
    def sites(model: nn.Module) -> list[bool]:
        return [module.compiled for module in model.modules() if isinstance(module, Dropout)]

    compiled, other = (build_model(family(**SHAPE, attention=name), 11, "cpu") for name in ("compiled", "auto"))
    assert len(sites(compiled)) == len(sites(other)) >= 6
    assert all(sites(compiled))
    assert not any(sites(other))
    assert not any(type(module) is nn.Dropout for module in compiled.modules())
    tokens = torch.randint(11, (2, 7))
    state = compiled.init_state(2)
    torch.manual_seed(0)
    assert not torch.equal(compiled.train().nll(tokens, tokens, state)[0], compiled.nll(tokens, tokens, state)[0])
    assert torch.equal(compiled.eval().nll(tokens, tokens, state)[0], compiled.nll(tokens, tokens, state)[0])


def test_locked_dropout_stays_as_it_was(monkeypatch):
    monkeypatch.setattr(layers, "compiled_dropout", lambda *_: pytest.fail("locked dropout has masks of its own"))
    tokens, drawn = torch.randint(11, (2, 7)), []
    for attention in ("compiled", "shifted"):
        torch.manual_seed(5)
        model = build_model(TransformerXLConfig(**SHAPE, attention=attention, locked_dropout=True), 11, "cpu").train()
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


def test_a_dtype_that_it_lacks_is_refused_in_one_line():
    model = build_model(TransformerXLConfig(**SHAPE, attention="compiled"), 11, "cpu").double().train()
    tokens = torch.randint(11, (2, 7))
    with pytest.raises(UserError, match=r"model.attention compiled cannot train in torch.float64"):
        model.nll(tokens, tokens, model.init_state(2))
