"""The contract of `LanguageModel`, checked on every kind of model, also models whose state is empty.

The additional guarantees of Transformer-XL are in test_contract.py.
"""

from __future__ import annotations

import dataclasses

import jaxtyping
import pytest
import torch
from tests.models.test_contract import VARIANTS
from torch import Tensor

from txl.config import ModelConfig, RecurrentConfig, TransformerXLConfig, VanillaConfig, as_family
from txl.errors import UserError
from txl.models import build_model
from txl.models.cache import ContinuousCache
from txl.models.family import FamilyModel
from txl.models.language_model import LanguageModel

V, B, LENGTH = 17, 3, 12
TRANSFORMER = TransformerXLConfig(n_layer=2, d_model=10, n_head=2, d_head=6, d_inner=14, mem_len=LENGTH, dropout=0.2)
VANILLA = dataclasses.replace(as_family(TRANSFORMER, VanillaConfig), max_segment=LENGTH)
LSTM = RecurrentConfig(kind="lstm", n_layer=3, d_model=10, d_hidden=14, dropout=0.2)
AWD = {"weight_drop": 0.5, "locked_dropout": True, "dropout_words": 0.1, "activation_reg": 2.0, "temporal_reg": 1.0}
CARRYING = {
    **{name: dataclasses.replace(config, mem_len=LENGTH) for name, config in VARIANTS.items()},
    "transformer-xl, mixture of softmaxes": dataclasses.replace(TRANSFORMER, n_softmax=3),
    "lstm": LSTM,
    "awd-lstm": dataclasses.replace(LSTM, **AWD),
    "awd-lstm-mos": dataclasses.replace(LSTM, **AWD, n_softmax=3, d_last=12),
    "lstm, adaptive softmax": dataclasses.replace(LSTM, cutoffs=(5, 9), div_val=2),
    "qrnn": dataclasses.replace(LSTM, kind="qrnn", kernel_sizes=(2, 1)),
    "qrnn, wide kernels": dataclasses.replace(LSTM, kind="qrnn", kernel_sizes=(4,)),
}
"""Models whose state depends on the tokens read so far."""
ALONE = {
    "vanilla, learned": VANILLA,
    "vanilla, sinusoid": dataclasses.replace(VANILLA, encoding="sinusoid"),
    "adaptive input": dataclasses.replace(
        VANILLA, encoding="sinusoid", pre_norm=True, init="xavier", cutoffs=(5, 9), div_val=2, tie_projections="tails"
    ),
}
"""Models without memory, which read every segment independently."""
MODELS = CARRYING | ALONE


def built(config: ModelConfig) -> FamilyModel:
    torch.manual_seed(0)
    model = build_model(config, V).double().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model


@pytest.fixture(params=MODELS)
def model(request) -> FamilyModel:
    return built(MODELS[request.param])


@pytest.fixture(params=[*MODELS, "continuous cache"])
def reader(request) -> LanguageModel:
    return built(MODELS[request.param]) if request.param in MODELS else ContinuousCache(built(LSTM), 6, 0.5, 0.3)


@pytest.fixture(params=CARRYING)
def carrying(request) -> FamilyModel:
    return built(CARRYING[request.param])


def stream() -> tuple[Tensor, Tensor]:
    both = torch.randint(V, (B, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return both[:, :-1], both[:, 1:]


def in_segments(model: LanguageModel, tokens: Tensor, targets: Tensor, segment: int) -> Tensor:
    state, parts = model.init_state(B), []
    for start in range(0, tokens.shape[1], segment):
        part, state = model.nll(tokens[:, start : start + segment], targets[:, start : start + segment], state)
        parts.append(part)
    return torch.cat(parts, dim=1)


def test_a_state_says_how_far_it_sees_and_survives_as_tensors(model):
    tokens, targets = stream()
    for each in (model, ContinuousCache(model, 5, 0.3, 0.2)):
        _, state = each.nll(tokens, targets, each.init_state(B))
        assert state.lengths == model.config.lengths()
        assert state.length in (None, 0, LENGTH)
        copy = each.state_from_tensors(state.to_tensors())
        assert torch.equal(each.nll(tokens, targets, copy)[0], each.nll(tokens, targets, state)[0])
        assert copy.filled_with_noise().batch_size == B
        with torch.no_grad():
            _, state = each.nll(tokens, targets, each.init_state(B))
            assert each.nll(tokens, targets, state.filled_with_noise())[0].isfinite().all()


def test_a_model_without_hidden_states_says_so(model):
    cache = ContinuousCache(model, 5, 0.3, 0.2)
    with pytest.raises(UserError, match="ContinuousCache has no final hidden states"):
        cache.hidden_states(stream()[0], cache.init_state(B))
    assert cache.own_model is model
    assert (model.own_model, model.cache_settings) == (model, {})


def test_shapes_are_checked_while_tests_run(model):
    tokens, targets = stream()
    with pytest.raises(jaxtyping.TypeCheckError, match="targets"):
        model.nll(tokens, targets[:, 1:], model.init_state(B))


@pytest.mark.parametrize("segment", [1, 3, 5])
def test_whole_equals_segments_equals_tokens(carrying, segment):
    whole = in_segments(carrying, *stream(), LENGTH)
    torch.testing.assert_close(in_segments(carrying, *stream(), segment), whole, rtol=0, atol=1e-10)
    in_float32 = in_segments(carrying.float(), *stream(), segment)
    assert in_float32.dtype == torch.float32
    torch.testing.assert_close(in_float32.double(), whole, rtol=0, atol=1e-5)


def test_what_was_read_long_ago_still_counts(carrying):
    tokens, targets = stream()
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % V
    before, after = (in_segments(carrying, each, targets, 5) for each in (tokens, changed))
    assert (after[:, -1] - before[:, -1]).abs().min() > 1e-12


def test_causality_by_perturbation(reader):
    tokens, targets = stream()
    before = in_segments(reader, tokens, targets, 5)
    for position in (0, 4, 7, LENGTH - 1):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % V
        after = in_segments(reader, changed, targets, 5)
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-12)
        assert (after[:, position] - before[:, position]).abs().min() > 1e-9


def test_lanes_are_independent(reader):
    tokens, targets = stream()
    before = in_segments(reader, tokens, targets, 5)
    changed = tokens.clone()
    changed[1] = (changed[1] + 1) % V
    after = in_segments(reader, changed, targets, 5)
    torch.testing.assert_close(after[[0, 2]], before[[0, 2]], rtol=0, atol=1e-12)
    assert (after[1] - before[1]).abs().max() > 1e-6


def test_nll_is_the_target_s_entry_of_log_probs_which_sum_to_one(model):
    tokens, targets = stream()
    log_probs, _ = model.log_probs(tokens, model.init_state(B))
    nll, _ = model.nll(tokens, targets, model.init_state(B))
    assert (log_probs.shape, nll.shape) == ((B, LENGTH, V), (B, LENGTH))
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(B, LENGTH, dtype=torch.float64), rtol=0, atol=1e-12)
    entries = -log_probs.gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(entries, nll, rtol=0, atol=1e-10)
    gradients = (torch.autograd.grad(losses.sum(), list(model.parameters())) for losses in (entries, nll))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)
    at = torch.tensor([B * LENGTH - 1, 0, LENGTH])
    chosen = model.chosen_nll(tokens, at, targets.flatten()[at], model.init_state(B))
    torch.testing.assert_close(chosen, nll.flatten()[at], rtol=0, atol=1e-12)


def test_training_loss_is_the_mean_and_what_regularises_and_every_weight_has_a_gradient(model):
    tokens, targets = stream()
    loss, penalty, state = model.training_terms(tokens, targets, model.init_state(B))
    nll, _ = model.nll(tokens, targets, model.init_state(B))
    torch.testing.assert_close(loss, nll.mean(), rtol=0, atol=1e-12)
    assert (penalty > 0) == (model.config.activation_reg > 0)
    gradients = torch.autograd.grad(loss + penalty, list(model.parameters()))
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    # The next segment has its own autograd graph, so that a second backward pass works.
    torch.autograd.grad(model.training_loss(tokens, targets, state)[0], list(model.parameters()))


def test_a_state_is_a_value(reader):
    model = reader
    tokens, targets = stream()
    _, state = model.nll(tokens[:, :6], targets[:, :6], model.init_state(B))
    first, _ = model.nll(tokens[:, 6:], targets[:, 6:], state)
    again, _ = model.nll(tokens[:, 6:], targets[:, 6:], state.detach())
    assert torch.equal(first, again)
    order = torch.tensor([2, 0, 2, 1])
    picked, _ = model.nll(tokens[order, 6:], targets[order, 6:], state.select(order))
    torch.testing.assert_close(picked, first[order], rtol=0, atol=1e-10)
    copied, _ = model.nll(tokens[:, 6:], targets[:, 6:], model.state_from_tensors(state.to_tensors()))
    assert torch.equal(copied, first)
    fresh, _ = model.nll(tokens[:, 6:], targets[:, 6:], model.init_state(B))
    reset, _ = model.nll(tokens[:, 6:], targets[:, 6:], state.reset(torch.tensor([False, True, False])))
    torch.testing.assert_close(reset[1], fresh[1], rtol=0, atol=1e-10)
    torch.testing.assert_close(reset[[0, 2]], first[[0, 2]], rtol=0, atol=1e-10)
    assert state.batch_size == B


def test_lanes_must_be_those_of_the_state(model):
    tokens, targets = stream()
    with pytest.raises(ValueError, match="tokens have 3 lanes, the state has 2"):
        model.nll(tokens, targets, model.init_state(2))
    with pytest.raises(ValueError, match="batch_size is 0"):
        model.init_state(0)
