"""Sizes, initialisation and dropout sites of Transformer-XL."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from txl.config import ModelConfig, TransformerXLConfig
from txl.errors import UserError
from txl.models import build_model
from txl.models.transformer_xl import RelativeMultiHeadAttention, TransformerXL


def count(config: ModelConfig, vocab_size: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(config, vocab_size).parameters())


def test_untied_biases_add_one_pair_a_layer():
    shared = TransformerXLConfig(n_layer=5, n_head=3, d_head=7)
    assert count(dataclasses.replace(shared, untie_r=True), 11) - count(shared, 11) == 4 * 2 * 3 * 7


@torch.no_grad()
def test_with_qk_norm_queries_keys_and_positions_of_each_head_are_normalised():
    """Against the definition in float64: mean square 1 over the D features, times a gain; values stay unchanged."""
    torch.manual_seed(0)
    config = TransformerXLConfig(n_layer=1, d_model=12, n_head=3, d_head=5, d_inner=7, layer_norm_eps=1e-3)
    plain = TransformerXL(config, 11).double().layers[0].get_submodule("attention")
    normed = TransformerXL(dataclasses.replace(config, qk_norm=True), 11).double().layers[0].get_submodule("attention")
    assert isinstance(plain, RelativeMultiHeadAttention)
    assert isinstance(normed, RelativeMultiHeadAttention)
    missing, _ = normed.load_state_dict(plain.state_dict(), strict=False)
    assert missing == ["q_norm.weight", "k_norm.weight", "r_norm.weight"]
    context, r = torch.randn(2, 4, 12, dtype=torch.float64), torch.randn(9, 12, dtype=torch.float64)

    def by_hand(heads: Tensor, gain: Tensor) -> Tensor:
        return heads / ((heads**2).sum(-1, keepdim=True) / 5 + 1e-3).sqrt() * gain

    gains = [normed.get_parameter(name) for name in missing]
    found = normed.query(context), normed.keys_and_values(context)[0], normed.position(r)
    without = plain.query(context), plain.keys_and_values(context)[0], plain.position(r)
    for ours, heads, gain in zip(found, without, gains, strict=True):
        torch.testing.assert_close(ours, by_hand(heads, gain), rtol=1e-10, atol=1e-10)
    assert torch.equal(normed.keys_and_values(context)[1], plain.keys_and_values(context)[1])


@pytest.mark.parametrize("untie_r", [False, True])
def test_parameters_with_qk_norm_are_counted(untie_r):
    config = TransformerXLConfig(n_layer=5, n_head=3, d_head=7, qk_norm=True, untie_r=untie_r)
    assert config.parameter_count(11) == count(config, 11)
    assert count(config, 11) - count(dataclasses.replace(config, qk_norm=False), 11) == 5 * 3 * 7


@pytest.mark.parametrize("qk_norm", [False, True])
def test_initial_weights_follow_the_authors(qk_norm):
    torch.manual_seed(0)
    config = TransformerXLConfig(
        n_layer=3, d_model=256, n_head=1, d_head=512, d_embed=128, d_inner=512, qk_norm=qk_norm
    )
    model = TransformerXL(config, 300)
    for name, parameter in model.named_parameters():
        mean, std = parameter.mean().item(), parameter.std().item()
        if name.endswith("norm.weight"):
            assert abs(mean - 1) < 0.01, name
            assert 0.015 < std < 0.025, name
        elif name.endswith("bias"):
            assert parameter.abs().max() == 0, name
        else:
            expected = 0.01 if "projections" in name else 0.02
            assert abs(std - expected) < 0.1 * expected, name
    assert model.u.std() > 0.015


def dropout_layers(model: nn.Module) -> dict[str, float]:
    return {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}


def test_dropout_sites_are_those_of_the_original():
    model = build_model(TransformerXLConfig(n_layer=2, dropout=0.3, dropatt=0.2), 11)
    sites = dropout_layers(model)
    assert sites["dropout_embed"] == sites["dropout_out"] == sites["dropout_r"] == 0.3
    assert sites["layers.0.attention.dropout"] == 0.3  # attention output
    assert sites["layers.0.feed_forward.dropout"] == 0.3  # feed-forward output
    assert sites["layers.0.attention.dropout_qkv"] == 0.0
    own = {"dropout_r": 0.0, "dropout_embed": 0.6, "dropout_out": 0.5}
    changed = dropout_layers(build_model(dataclasses.replace(TransformerXLConfig(n_layer=1, dropout=0.3), **own), 11))
    assert {name: changed[name] for name in own} == own


def test_log_probs_in_training_have_dropout_as_the_loss_has():
    torch.manual_seed(0)
    model = build_model(TransformerXLConfig(n_layer=1, d_model=64, dropout=0.25), 11).train()
    tokens = torch.randint(11, (2, 8))
    torch.manual_seed(1)
    log_probs, _ = model.log_probs(tokens, model.init_state(2))
    torch.manual_seed(1)
    nll, _ = model.nll(tokens, tokens, model.init_state(2))
    torch.testing.assert_close(-log_probs.gather(-1, tokens[..., None]).squeeze(-1), nll)


def test_regularisers_are_the_means_of_squares_of_the_final_states_and_of_their_steps():
    torch.manual_seed(0)
    shape = TransformerXLConfig(n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=16, dropout=0.0, dropout_out=0.5)
    model = build_model(dataclasses.replace(shape, activation_reg=0.3, temporal_reg=0.7), 11).double().train()
    tokens, targets = torch.randint(11, (2, 2, 7))
    state = model.init_state(2)
    h, _ = model.hidden_states(tokens, state)
    steps = torch.stack([h[:, t] - h[:, t - 1] for t in range(1, 7)])
    expected = 0.3 * (h**2).sum() / h.numel() + 0.7 * (steps**2).sum() / steps.numel()
    torch.manual_seed(1)
    loss, penalty, _ = model.training_terms(tokens, targets, state)
    torch.testing.assert_close(penalty, expected, rtol=1e-12, atol=0)
    torch.manual_seed(1)
    assert torch.equal(model.training_loss(tokens, targets, state)[0], loss + penalty)
    torch.manual_seed(1)
    assert torch.equal(model.nll(tokens, targets, state)[0].mean(), loss)  # nll is never regularised
    penalty.backward()
    assert model.get_parameter("layers.0.feed_forward.outer.weight").grad is not None
    one = model.training_terms(tokens[:, :1], targets[:, :1], state)[1]  # a single position has no steps in time
    torch.testing.assert_close(one, 0.3 * model.hidden_states(tokens[:, :1], state)[0].square().mean())


def test_bfloat16_autocast_gives_float32_losses_and_memory_close_to_float32_ones():
    torch.manual_seed(0)
    model = build_model(TransformerXLConfig(n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=64, dropout=0.0), 50)
    tokens = torch.randint(50, (2, 40))
    exact, _ = model.nll(tokens, tokens, model.init_state(2))
    with torch.autocast("cpu", torch.bfloat16):
        found, state = model.nll(tokens, tokens, model.init_state(2))
    assert found.dtype == torch.float32
    assert state.hidden[1].dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoding": "shaw", "qk_norm": True}, r"model\.qk_norm is true, but model\.encoding is shaw"),
        ({"d_model": 31}, r"model.d_model is 31; expected an even number"),
        ({"n_head": 0}, r"model.n_head is 0; expected 1 or more"),
        ({"dropout": 1.0}, r"model.dropout is 1.0"),
        ({"mem_len": -1}, r"model.mem_len is -1"),
        ({"window": 600}, r"model.window 600 needs at least 599 positions of memory"),
        ({"cutoffs": (5, 5)}, r"model.cutoffs is \[5, 5\]; expected numbers above 0 that increase strictly"),
        ({"cutoffs": (0, 5)}, r"model.cutoffs is \[0, 5\]"),
        ({"cutoffs": (5, 11)}, r"model.cutoffs is \[5, 11\].* below 11"),
        ({"cutoffs": (3, 5), "div_val": 100}, r"model.div_val is 100, but of 512 .* would get none"),
        ({"cutoffs": (3,), "div_val": 9, "d_embed": 8}, r"model.div_val is 9, but of 8 .* would get none"),
    ],
)
def test_shapes_that_cannot_be_built_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        build_model(dataclasses.replace(TransformerXLConfig(), **changes), 11)


def test_a_model_does_not_share_its_configuration_with_the_caller():
    config = TransformerXLConfig(n_layer=1)
    model = build_model(config, 11)
    config.mem_len = 3
    assert model.config.mem_len == 512
