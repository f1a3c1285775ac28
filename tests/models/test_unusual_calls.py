"""Rarely used calls: no lanes, tracing, fake tensors, several threads, states with NaN, other default devices."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from tests.conftest import small_run
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

from txl.config import RecurrentConfig, TransformerXLConfig
from txl.errors import UserError
from txl.models import build_model
from txl.models.layers import Linear
from txl.models.memory import StreamBuffers
from txl.models.recurrent import LSTMLayer
from txl_lab.speed.budget import peak_bytes

V = 20
SHAPE: dict[str, Any] = {"n_layer": 2, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "mem_len": 8}


def tiny(**changes: Any) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = SHAPE | {"dropout": 0.0} | changes
    return build_model(TransformerXLConfig(**shape), V).eval()


def tokens(*shape, seed=1):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def read(model, given, state):
    with torch.no_grad():
        return model.log_probs(given, state)


@pytest.mark.parametrize("n_token", [1, 4, 16])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("attention", ["shifted", "fastest"])
def test_no_lanes_give_no_numbers(n_token, gradients, attention):
    model = tiny(attention=attention)
    _, state = read(model, tokens(2, 10), model.init_state(2))
    with torch.set_grad_enabled(gradients):
        log_probs, _ = model.log_probs(tokens(0, n_token), state.select(torch.tensor([], dtype=torch.long)))
        if gradients:
            log_probs.sum().backward()
            assert all(each.grad is None or not each.grad.any() for each in model.parameters())
    assert log_probs.shape == (0, n_token, V)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_layers_compute():
    layer, rows = Linear(4, 3), torch.randn(1, 4)
    with torch.no_grad():
        expected = torch.nn.functional.linear(rows, layer.weight, layer.bias)
        torch.testing.assert_close(make_fx(layer)(rows)(rows), expected)
        traced: Any = torch.jit.trace(layer, (rows,), check_trace=False)
        torch.testing.assert_close(traced(rows), expected)
        model = tiny()

        def scores(given):
            return model.log_probs(given, model.init_state(1))[0]

        torch.testing.assert_close(make_fx(scores)(tokens(1, 12))(tokens(1, 12)), scores(tokens(1, 12)))


def test_tensors_without_numbers_and_forward_derivatives():
    layer = Linear(4, 3)
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert layer(torch.randn(1, 4)).shape == (1, 3)
        assert Linear(4, 3).to("meta")(torch.randn(1, 4, device="meta")).device.type == "meta"
        tangent = torch.randn(1, 4)
        with forward_ad.dual_level():
            got = forward_ad.unpack_dual(layer(forward_ad.make_dual(torch.randn(1, 4), tangent))).tangent
        torch.testing.assert_close(got, tangent @ layer.weight.T)
        many = torch.randn(5, 1, 4)
        torch.testing.assert_close(torch.vmap(layer)(many), torch.stack([layer(each) for each in many]))


def test_another_default_device_changes_nothing():
    model = tiny(attention="fastest")
    given = tokens(2, 12), tokens(2, 1, seed=2)
    _, state = read(model, given[0], model.init_state(2))
    state = state.reset(torch.tensor([True, False]))
    expected = [read(model, each, state)[0] for each in given]
    torch.set_default_device("meta")
    try:
        got = [read(model, each, state)[0] for each in given]
    finally:
        torch.set_default_device(None)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("n_token", [1, 3, 12])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_reset_lane_forgets_nan(n_token, gradients):
    model = tiny()
    _, state = read(model, tokens(2, 5), model.init_state(2))
    for each in state.hidden:
        each[0] = torch.nan
    for each in (*state.projections.keys, *state.projections.values):
        each[:, 0] = torch.nan
    state = state.reset(torch.tensor([True, False]))
    with torch.set_grad_enabled(gradients):
        got, _ = model.log_probs(tokens(2, n_token, seed=2), state)
        expected, _ = model.log_probs(tokens(2, n_token, seed=2)[:1], model.init_state(1))
    torch.testing.assert_close(got[:1], expected, atol=1e-5, rtol=1e-5)


def in_threads(works: Sequence[Callable[[], None]]) -> None:
    """Do works at the same time, with a change of threads after nearly every instruction."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    try:
        threads = [threading.Thread(target=work) for work in works]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(before)


def test_a_place_is_given_to_one_thread():
    buffers, takers, got = StreamBuffers(100_000), 4, []
    begin = threading.Barrier(takers)

    def take():
        begin.wait()
        got.append([end for end in range(20_000) if buffers.take(end, 1)])

    in_threads([take] * takers)
    places = [place for each in got for place in each]
    assert len(places) == len(set(places)) == buffers.written
    assert copy.deepcopy(buffers).written == pickle.loads(pickle.dumps(buffers)).written == buffers.written


@pytest.mark.parametrize("attention", ["auto", "fastest", "reference"])
def test_a_model_can_be_pickled(attention):
    model = tiny(attention=attention)
    again = pickle.loads(pickle.dumps(model))
    given = tokens(2, 12)
    assert torch.equal(read(again, given, again.init_state(2))[0], read(model, given, model.init_state(2))[0])


def test_embeddings_of_another_width_stay_in_float32_under_autocast():
    model = tiny(d_embed=8, n_layer=4, pre_norm=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, state = model.log_probs(tokens(2, 9), model.init_state(2))
    assert {each.dtype for each in state.hidden} == {torch.float32}
    assert read(model, tokens(2, 9), state)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_qrnn_reads_in_half_precision(dtype):
    torch.manual_seed(0)
    model = build_model(RecurrentConfig(kind="qrnn", n_layer=2, d_model=16, dropout=0.0), V).eval()
    expected, _ = read(model, tokens(2, 9), model.init_state(2))
    model.to(dtype)
    got, state = read(model, tokens(2, 9), model.init_state(2))
    torch.testing.assert_close(got.float(), expected, atol=0.05, rtol=0.05)
    assert read(model, tokens(2, 1), state)[0].isfinite().all()


def test_an_lstm_with_weight_drop_uses_the_weights_that_it_is_given():
    torch.manual_seed(0)
    config = RecurrentConfig(kind="lstm", n_layer=1, d_model=16, dropout=0.0, weight_drop=0.5)
    layer: Any = next(each for each in build_model(config, V).train().modules() if isinstance(each, LSTMLayer))

    class Zero(torch.nn.Module):
        def forward(self, weight):
            return torch.zeros_like(weight)

    for name in [name for name, _ in layer.lstm.named_parameters()]:
        parametrize.register_parametrization(layer.lstm, name, Zero())
    outputs, _ = layer(torch.randn(2, 3, 16), (torch.zeros(2, 16), torch.zeros(2, 16)))
    assert not outputs.any()


def test_a_recurrent_state_is_reset_lane_by_lane():
    model = build_model(RecurrentConfig(kind="lstm", n_layer=1, d_model=16), V)
    with pytest.raises(ValueError, match="one entry for each lane"):
        model.init_state(4).reset(torch.tensor([True]))


def test_generators_of_gpus_are_left_alone_by_a_cpu(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    peak_bytes(small_run("stdlib"), V, "cpu")
    assert (seeded, torch.equal(torch.get_rng_state(), before)) == ([], True)


@pytest.mark.parametrize("attention", ["auto", "compiled"])
def test_transforms_of_functions(attention):
    """Gradients and vectorised calls by torch.func; the model can be copied and trained afterwards."""
    model, given = tiny(attention=attention), tokens(2, 12)

    def loss(parameters):
        return functional_call(Losses(model), parameters, (given,))

    parameters = dict(Losses(model).named_parameters())
    expected = torch.autograd.grad(loss(parameters), list(parameters.values()))
    for got, wanted in zip(torch.func.grad(loss)(parameters).values(), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        many = tokens(3, 2, 12)
        every = torch.vmap(Losses(model))(many)
        torch.testing.assert_close(every, torch.stack([Losses(model)(each) for each in many]))
    assert pickle.dumps(copy.deepcopy(model))
    loss(parameters).backward()


class Losses(torch.nn.Module):
    """The mean loss of tokens read from an empty memory, each of them its own target."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.model.nll(given, given, self.model.init_state(given.shape[0]))[0].mean()


@pytest.mark.parametrize(
    "config",
    [
        TransformerXLConfig(**SHAPE, dropout=0.0),
        RecurrentConfig(kind="lstm", n_layer=2, d_model=16),
        RecurrentConfig(kind="qrnn", n_layer=2, d_model=16),
    ],
)
def test_training_goes_on_from_what_inference_mode_read(config):
    model, given = build_model(config, V), tokens(2, 12)
    with torch.inference_mode():
        _, state = model.nll(given, given, model.init_state(2))
    loss, _ = model.train().training_loss(given, given, state)
    loss.backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


@pytest.mark.parametrize("changes", [{}, {"pre_norm": True}])
def test_training_takes_memory_of_another_dtype(changes):
    model, given = tiny(**changes), tokens(2, 12)
    _, state = model.nll(given, given, model.init_state(2))
    expected, _ = model.train().training_loss(given, given, state)
    found, _ = model.double().training_loss(given, given, state)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=1e-5)


def test_no_module_is_called_for_an_empty_memory():
    model, given, lengths = tiny(pre_norm=True).train(), tokens(2, 12), []
    for name in ("norm", "k_proj", "v_proj"):
        module = model.get_submodule(f"layers.1.attention.{name}")
        module.register_forward_hook(lambda _, inputs, __: lengths.append(inputs[0].shape[1]))
    _, state = model.training_loss(given, given, model.init_state(2))
    assert lengths == [12, 12, 12]
    model.training_loss(given, given, state)
    assert sorted(lengths[3:]) == [8, 8, 8, 12, 12, 12]


def test_threads_read_segments_of_several_lengths():
    model, got, failed = tiny(), {}, []
    lengths = (5, 9, 13)
    expected = {n: read(model, tokens(2, n), model.init_state(2))[0] for n in lengths}

    def reads(n_token):
        try:
            for _ in range(30):
                got[n_token] = read(model, tokens(2, n_token), model.init_state(2))[0]
        except RuntimeError as error:
            failed.append(error)

    in_threads([partial(reads, each) for each in lengths])
    assert not failed
    for n_token in lengths:
        torch.testing.assert_close(got[n_token], expected[n_token])


def test_an_lstm_computes_in_its_own_precision_where_the_cpu_has_no_float16():
    model, given = build_model(RecurrentConfig(kind="lstm", n_layer=2, d_model=16), V).eval(), tokens(2, 12)
    with torch.no_grad():
        expected, _ = model.nll(given, given, model.init_state(2))
        with torch.autocast("cpu", torch.float16):
            got, _ = model.nll(given, given, model.init_state(2))
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperatures_that_are_no_temperatures(temperature):
    model, given = tiny(), tokens(2, 5)
    with pytest.raises(UserError, match="temperature is .*; expected a number above 0"):
        model.nll_at(given, given, model.init_state(2), temperature)


def test_a_vocabulary_s_size_may_be_numpy_s():
    assert build_model(TransformerXLConfig(**SHAPE), np.int64(V)).vocab_size == V
