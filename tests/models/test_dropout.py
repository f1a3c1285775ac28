"""Locked dropout and word dropout: the dimensions along which a mask is constant."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import txl
from txl.config import TransformerXLConfig
from txl.models import build_model
from txl.models.layers import LockedDropout

SHAPE = TransformerXLConfig(
    n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=24, mem_len=6, dropout=0.5, dropout_qkv=0.5, locked_dropout=True
)


def test_a_locked_mask_is_the_same_along_time_and_another_in_every_lane():
    torch.manual_seed(0)
    dropped = LockedDropout(0.25)(torch.ones(40, 9, 50))
    torch.testing.assert_close(dropped.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert not torch.equal(dropped[0], dropped[1])
    assert abs((dropped[:, 0] == 0).float().mean().item() - 0.25) < 0.03


def test_a_locked_mask_is_drawn_anew_at_each_call_and_off_in_evaluation():
    layer, ones = LockedDropout(0.5), torch.ones(2, 3, 64)
    assert not torch.equal(layer(ones), layer(ones))
    assert layer.eval()(ones) is ones
    assert LockedDropout(0.0)(ones) is ones


def test_every_site_of_a_locked_model_keeps_its_mask_along_time():
    """A feature of hidden states, queries, keys (also of memory), values or R is dropped at all positions or none."""
    torch.manual_seed(0)
    model = build_model(SHAPE, 11).train()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.5)
    seen: dict[str, int] = {}

    def check(name: str):
        def hook(_, inputs, output):
            # The mask can be computed only where the input is not zero (some outputs of a ReLU are zero).
            kept = (output / inputs[0]).nan_to_num(posinf=0, neginf=0)
            highest, lowest = kept.amax(dim=-2), kept.masked_fill(inputs[0] == 0, 2).amin(dim=-2)
            alive = (inputs[0] != 0).any(dim=-2)
            torch.testing.assert_close(highest[alive], lowest[alive])
            assert set(highest[alive].round(decimals=3).unique().tolist()) == {0.0, 2.0}
            seen[name] = seen.get(name, 0) + 1

        return hook

    for name, module in model.named_modules():
        if isinstance(module, LockedDropout):
            module.register_forward_hook(check(name))
    state = model.init_state(3)
    for _ in range(2):
        tokens = torch.randint(11, (3, 7))
        _, state = model.nll(tokens, tokens, state)
    layers = {f"layers.{n}.{site}": 2 * k for n in (0, 1) for site, k in SITES_OF_A_LAYER.items()}
    assert seen == {"dropout_embed": 2, "dropout_r": 2, "dropout_out": 2} | layers


SITES_OF_A_LAYER = {
    "attention.dropout": 1, "attention.dropout_qkv": 4, "feed_forward.dropout_inner": 1, "feed_forward.dropout": 1
}  # fmt: skip


def test_a_dropped_word_is_dropped_wherever_it_stands():
    torch.manual_seed(0)
    shape = dataclasses.replace(SHAPE, dropout=0.0, dropout_qkv=0.0, dropout_words=0.5, n_layer=1)
    model = build_model(shape, 11).train()
    entered = []
    model.dropout_embed.register_forward_hook(lambda _, inputs, __: entered.append(inputs[0].detach()))
    tokens = torch.randint(11, (4, 50))
    model.nll(tokens, tokens, model.init_state(4))
    plain = model.embedding(tokens)
    factors = {}
    for token in range(11):
        here = (entered[0] / plain)[:, 1:][tokens[:, 1:] == token]  # a first word has no memory and is never dropped
        assert here.max() == here.min()
        factors[token] = here.max().item()
    assert set(factors.values()) == {0.0, 2.0}
    model.eval().nll(tokens, tokens, model.init_state(4))
    assert torch.equal(entered[1], plain)


def test_dropped_words_are_still_predicted():
    """The softmax shares the table of the embedding, but word dropout applies only to the input."""
    torch.manual_seed(0)
    shape = dataclasses.replace(SHAPE, dropout=0.0, dropout_qkv=0.0, dropout_words=0.999, n_layer=1)
    model = build_model(shape, 11).train()
    tokens = torch.randint(11, (1, 8))
    hidden, _ = model.hidden_states(tokens, model.init_state(1))
    log_probs = (hidden @ model.embedding.tables[0].t() + model.softmax.bias).log_softmax(dim=-1)
    found, _ = model.log_probs(tokens, model.init_state(1))
    torch.testing.assert_close(found, log_probs)


def test_a_word_dropped_without_memory_does_not_explode_the_gradient():
    """In the first step, and after lanes have been emptied: such a word was exactly 0 in all layers.

    Half of the words are dropped, so that every seed drops a first word.
    """
    config = dataclasses.replace(txl.preset("ptb-small").model, dropout_words=0.5, cutoffs=())
    model = build_model(config, 53).train()
    for seed in range(1, 9):
        torch.manual_seed(seed)
        model.init_weights()
        tokens, state = torch.randint(53, (5, 8)), model.init_state(5)
        for _ in range(2):
            model.zero_grad()
            loss, state = model.training_loss(tokens[:, :-1], tokens[:, 1:], state)
            loss.backward()
            assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))) < 100
            state = state.reset(torch.arange(5) % 2 == 0)


@pytest.mark.parametrize("mem_len", [0, 6])
def test_the_first_word_of_a_lane_without_memory_is_never_dropped(mem_len):
    """Also if only the device knows which lanes are empty, as in a recorded step; other lanes drop their first word."""
    torch.manual_seed(0)
    shape = dataclasses.replace(SHAPE, dropout=0.0, dropout_qkv=0.0, dropout_words=0.999, n_layer=1, mem_len=mem_len)
    model = build_model(shape, 11).train()
    entered = []
    model.dropout_embed.register_forward_hook(lambda _, inputs, __: entered.append(inputs[0].detach()))
    tokens = torch.randint(11, (3, 5))
    plain = model.embedding(tokens)
    _, state = model.nll(tokens, tokens, model.init_state(3))
    assert torch.equal(entered[0][:, 0], plain[:, 0])
    assert not entered[0][:, 1:].any()
    if mem_len == 0:
        return
    model.nll(tokens, tokens, state)
    assert not entered[1].any()
    emptied = state.reset(torch.tensor([False, True, False]))
    recorded = dataclasses.replace(emptied, filled=None, filled_tensor=torch.tensor(emptied.filled))
    for number, one in enumerate((emptied, recorded), start=2):
        model.nll(tokens, tokens, one)
        assert torch.equal(entered[number][1, 0], plain[1, 0])
        assert not entered[number][::2].any()
        assert not entered[number][1, 1:].any()
