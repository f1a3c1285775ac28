"""Relative effective context length, on losses worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import txl
from txl.config import ModelConfig, TransformerXLConfig, VanillaConfig, model_from_dict
from txl.errors import UserError
from txl.evaluation.effective_context import effective_context, perplexity_gains, relative_gains, spread_targets
from txl.evaluation.sliding import sliding_losses
from txl.models.cache import ContinuousCache
from txl.models.family import FamilyModel
from txl.models.language_model import LanguageModel


def far_from_zero(config: ModelConfig) -> FamilyModel:
    """Return a float64 model with V = 13, whose weights are so large that every token read changes the losses."""
    model = txl.build_model(config, 13).double()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


def by_hand(model: FamilyModel, tokens: torch.Tensor, target: int, context: int, **lengths: Any) -> Any:
    """Return the loss of a target, approximately, after reading a context from empty memory."""
    read = tokens[target - context : target][None]
    log_probs, _ = model.eval().log_probs(read, model.init_state(1, **lengths))
    return pytest.approx(-log_probs[0, -1, tokens[target]].item(), abs=1e-10)


def ppl(*values: float) -> torch.Tensor:
    """Return the losses of targets that have the perplexities `values`."""
    return torch.tensor([math.log(value) for value in values], dtype=torch.float64)


def test_a_single_model_stops_where_the_gain_falls_below_the_threshold():
    # All targets are equal: f is the loss, g = 1 - new/old perplexity: 10%, 2%, 0.5%, then 5%, which is never reached.
    values = [100.0, 90.0, 88.2, 87.759, 83.37105]
    losses = {"one": {50 * (k + 1): ppl(value, value) for k, value in enumerate(values)}}
    assert relative_gains(losses, 50, 100)["one"] == pytest.approx(0.1)
    assert relative_gains(losses, 150, 200)["one"] == pytest.approx(0.005)
    assert txl.relative_effective_context_length(losses) == {"one": 150}
    assert txl.relative_effective_context_length(losses, threshold=0.05) == {"one": 100}
    assert txl.relative_effective_context_length(losses, threshold=0.001) == {"one": 250}  # never stops
    assert perplexity_gains(losses, 50, 100)["one"] == pytest.approx(10.0)


def test_a_step_over_lengths_that_were_measured_between():
    # Steps of 50 gain 5% from 50 to 100, 1.5% from 75 to 125, and 0.9% from 100 to 150.
    values = [100.0, 97.0, 95.0, 95.545, 94.145]
    losses = {"one": {25 * (k + 2): ppl(value, value) for k, value in enumerate(values)}}
    assert txl.relative_effective_context_length(losses, step=50) == {"one": 100}
    assert txl.relative_effective_context_length(losses) == {"one": 100}
    assert txl.relative_effective_context_length(losses, threshold=0.02, step=50) == {"one": 75}
    assert txl.relative_effective_context_length(losses, threshold=0.005, step=50) == {"one": 150}  # never stops
    found = effective_context(losses, [1.0], step=50)
    assert list(found.relative_gains[1.0]) == [(50, 100), (75, 125), (100, 150)]
    assert list(found.perplexity_gains[1.0]) == [(50, 100), (50, 150), (100, 150)]
    for step in (0, -25, 30):
        with pytest.raises(UserError, match=f"step is {step}, but no two of the context lengths"):
            txl.relative_effective_context_length(losses, step=step)


def test_models_must_beat_the_best_short_one():
    # Model b is better and sets the baseline. Model a improves from 10 to 20 but stays above the baseline: no gain.
    losses = {"a": {10: ppl(100, 100), 20: ppl(60, 60)}, "b": {10: ppl(50, 50), 20: ppl(45, 45)}}
    assert relative_gains(losses, 10, 20) == {"a": pytest.approx(0.0), "b": pytest.approx(0.1)}
    assert txl.relative_effective_context_length(losses) == {"a": 10, "b": 20}
    assert txl.relative_effective_context_length({"a": losses["a"]}) == {"a": 20}  # without b, a sets the baseline


def test_only_losses_below_the_baseline_count_target_by_target():
    # Target 1 gets worse, so the baseline counts. Mean of logs over two targets: sqrt(40*10) against sqrt(80*10).
    losses = {"a": {1: ppl(80, 10), 3: ppl(40, 30)}}
    assert relative_gains(losses, 1, 3)["a"] == pytest.approx(1 - math.sqrt(0.5))
    # The baseline too is computed target by target: min(80,90)=80 and min(10,5)=5.
    both = losses | {"b": {1: ppl(90, 5), 3: ppl(20, 5)}}
    gains = relative_gains(both, 1, 3)
    assert gains["a"] == pytest.approx(1 - math.sqrt(0.5))
    assert gains["b"] == pytest.approx(1 - math.sqrt(0.25))


def test_r_takes_the_hardest_targets_of_the_baseline():
    # Ten targets; the two hardest (r = 0.2) improve by half, the others not at all.
    short = ppl(9, 1, 2, 3, 4, 5, 6, 7, 8, 10)
    long = ppl(4.5, 1, 2, 3, 4, 5, 6, 7, 8, 5)
    losses = {"a": {5: short, 10: long}}
    assert relative_gains(losses, 5, 10, r=0.2)["a"] == pytest.approx(0.5)
    assert relative_gains(losses, 5, 10, r=0.1)["a"] == pytest.approx(0.5)
    assert relative_gains(losses, 5, 10)["a"] == pytest.approx(1 - 0.25**0.1)
    # The hardest targets are chosen at each length by the baseline at that length, not by the losses of one model.
    other = {"b": {5: ppl(1, 1, 1, 1, 1, 1, 1, 1, 20, 1), 10: ppl(*[1] * 10)}}
    assert relative_gains(losses | other, 5, 10, r=0.1)["b"] == pytest.approx(1 - 1 / 8)


def test_losses_as_lists_and_arrays():
    as_tensors = {"a": {1: ppl(100, 50), 2: ppl(60, 40), 3: ppl(60, 40)}}
    for convert in (torch.Tensor.tolist, torch.Tensor.numpy):
        losses = {name: {c: convert(each) for c, each in by_length.items()} for name, by_length in as_tensors.items()}
        assert txl.relative_effective_context_length(losses) == {"a": 2}
        assert relative_gains(losses, 1, 2) == relative_gains(as_tensors, 1, 2)
        assert perplexity_gains(losses, 1, 2, 0.5) == {"a": pytest.approx(40.0)}
    assert txl.relative_effective_context_length({"A": {1: [1.0]}}) == {"A": 1}


def test_a_model_that_was_held_gets_no_longer_answer_than_it_read():
    # Model a read only 70 tokens where 100 and 150 were requested, and gained up to 70; b gains at every step.
    losses = {"a": {50: ppl(100), 100: ppl(80), 150: ppl(80)}, "b": {50: ppl(100), 100: ppl(85), 150: ppl(60)}}
    assert txl.relative_effective_context_length(losses) == {"a": 100, "b": 150}
    assert txl.relative_effective_context_length(losses, longest={"a": 70, "b": None}) == {"a": 70, "b": 150}
    assert txl.relative_effective_context_length(losses, longest={"a": 120}) == {"a": 100, "b": 150}


@pytest.mark.parametrize(
    ("losses", "settings", "message"),
    [
        ({}, {}, "no models"),
        ({"a": {}}, {}, "context lengths"),
        ({"a": {0: ppl(1)}}, {}, "above 0"),
        ({"a": {1: ppl(1)}, "b": {2: ppl(1)}}, {}, r"'b' has losses at context lengths \[2\]"),
        ({"a": {1: ppl(1), 2: ppl(1, 2)}}, {}, r"shape \[2\] at context length 2"),
        ({"a": {1: ppl(1, 2)[None]}}, {}, r"shape \[1, 2\]"),
        ({"a": {1: ppl()}}, {}, r"shape \[0\]"),
        ({"a": {1: torch.tensor([float("nan")])}}, {}, "a finite number"),
        ({"a": {1: 1.0}}, {}, r"shape \[\]"),
        ({"a": {1: ["x"]}}, {}, "not numbers"),
        ({"a": {1: [[1.0], [1.0, 2.0]]}}, {}, "not numbers"),
        ({"a": [1.0]}, {}, "not numbers by context length"),
        ({"a": {"1": [1.0]}}, {}, "not numbers by context length"),
        ({"a": {1: ppl(1)}}, {"r": 0.0}, "r is 0.0"),
        ({"a": {1: ppl(1)}}, {"r": 1.5}, "r is 1.5"),
        ({"a": {1: ppl(1)}}, {"threshold": -0.1}, "threshold"),
    ],
)
def test_what_is_not_a_group_of_losses(losses, settings, message):
    with pytest.raises(UserError, match=message):
        txl.relative_effective_context_length(losses, **settings)


@pytest.mark.parametrize("encoding", ["relative", "sinusoid"])
def test_losses_at_a_context_see_exactly_that_much(encoding):
    torch.manual_seed(0)
    shape = {"n_layer": 3, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 9, "encoding": encoding}
    shape = model_from_dict(shape | ({"mem_len": 6} if encoding == "relative" else {"max_segment": 9}))
    model = far_from_zero(shape)
    tokens = torch.randint(13, (40,))
    for context in (1, 5, 9):
        found = txl.losses_at_context(model, tokens, context=context, targets=range(9, 40), batch_size=4)
        assert found.shape == (31,)
        for number, target in enumerate(range(9, 40)):
            assert found[number].item() == by_hand(model, tokens, target, context, mem_len=0)
    # A token just beyond the context does not change a loss; a token within the context does.
    changed = tokens.clone()
    changed[20] = (changed[20] + 1) % 13
    difference = txl.losses_at_context(model, changed, context=5, targets=range(9, 40)) - txl.losses_at_context(
        model, tokens, context=5, targets=range(9, 40)
    )
    assert difference.nonzero().flatten().add(9).tolist() == [20, 21, 22, 23, 24, 25]


@pytest.mark.parametrize(
    "shape",
    [
        {"family": "transformer-xl", "mem_len": 6, "n_head": 2, "d_head": 4, "d_inner": 9, "cutoffs": (4,)},
        {"encoding": "sinusoid", "n_head": 2, "d_head": 4, "d_inner": 9, "max_segment": 21},
        {"encoding": "learned", "n_head": 2, "d_head": 4, "d_inner": 9, "max_segment": 21, "layer_losses": True},
        {"encoding": "shaw", "n_head": 2, "d_head": 4, "d_inner": 9, "mem_len": 6},
        {"mem_len": 6, "n_head": 2, "d_head": 4, "d_inner": 9, "n_softmax": 2},
        {"kind": "lstm", "d_hidden": 9},
        {"kind": "qrnn", "d_hidden": 9},
    ],
)
@pytest.mark.parametrize("targets", [range(21, 60, 3), [21, 59, 22, 40, 22, 33]])
def test_contexts_that_begin_alike_share_a_window(shape, targets):
    torch.manual_seed(0)
    model = far_from_zero(model_from_dict({"n_layer": 2, "d_model": 8} | shape))
    tokens, read = torch.randint(13, (60,)), []
    found = txl.losses_at_contexts(
        model,
        tokens,
        contexts=[6, 21, 9, 3],
        targets=targets,
        batch_size=4,
        progress=lambda done, total: read.append((done, total)),
    )
    assert list(found) == [6, 21, 9, 3]
    longest = {}
    for context, losses in found.items():
        assert losses.shape == (len(targets),)
        for number, target in enumerate(targets):
            longest[target - context] = max(longest.get(target - context, 0), context)
            assert losses[number].item() == by_hand(model, tokens, target, context)
    assert {total for _, total in read} == {sum(longest.values())}
    assert read[-1][0] == sum(longest.values())


def test_sliding_over_several_lengths_at_once():
    torch.manual_seed(0)
    shape = VanillaConfig(encoding="sinusoid", n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=9, max_segment=9)
    model, tokens = txl.build_model(shape, 13).double(), torch.randint(13, (40,))
    found = sliding_losses(model, tokens, contexts=[3, 9, 4], batch_size=5, max_tokens=31)
    assert list(found) == [3, 9, 4]
    for context, loss in found.items():
        assert loss == pytest.approx(txl.evaluate_sliding(model, tokens, context=context, max_tokens=31).nll, abs=1e-10)
    assert len({round(loss, 6) for loss in found.values()}) == 3
    told: list[tuple[int, int]] = []
    txl.evaluate_sliding(
        model, tokens, context=9, batch_size=5, max_tokens=31, progress=lambda *counts: told.append(counts)
    )
    assert told == [(done, 30) for done in (9, 14, 19, 24, 29, 30)]


@pytest.mark.parametrize(
    ("n_token", "longest", "count", "step", "distance"),
    [
        (82_430, 900, 2000, 50, 25),
        (245_569, 900, 2000, 50, 100),
        (1000, 900, 100, 50, 1),
        (950, 900, 20, 50, 2),
        (902, 900, 9, 50, 1),
        (60, 5, 7, 5, 5),
        (82_430, 970, 1000, 97, 81),  # 97 is prime: its only smaller divisor is 1
    ],
)
def test_spread_targets_share_windows(n_token, longest, count, step, distance):
    targets = spread_targets(n_token, longest, count, step)
    assert targets == range(longest, n_token, distance)
    assert len(targets) >= min(count, n_token - longest)


def test_several_contexts_hold_a_model_at_the_most_that_it_reads():
    torch.manual_seed(0)
    shape = VanillaConfig(encoding="learned", n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=9, max_segment=7)
    model, tokens, told = txl.build_model(shape, 13), torch.randint(13, (40,)), []
    found = txl.losses_at_contexts(
        model,
        tokens,
        contexts=range(5, 16, 5),
        targets=range(15, 40),
        progress=lambda done, total: told.append((done, total)),
    )
    assert list(found) == [5, 10, 15]
    for context, seen in ((5, 5), (10, 7), (15, 7)):
        expected = txl.losses_at_context(model, tokens, context=seen, targets=range(15, 40))
        torch.testing.assert_close(found[context], expected, rtol=0, atol=1e-6)
    assert not torch.allclose(found[5], found[10])
    assert torch.equal(found[10], found[15])
    # Contexts of 5 tokens share the windows of 7 tokens, except those of the last two targets.
    assert told == [(5 * 2, 5 * 2 + 7 * 25), (10 + 7 * 16, 10 + 7 * 25), (10 + 7 * 25, 10 + 7 * 25)]


def test_contexts_that_are_read_through_a_window():
    torch.manual_seed(0)
    model = far_from_zero(TransformerXLConfig(n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=9, mem_len=6))
    tokens, found = torch.randint(13, (30,)), {}
    for window in (1, 3, "none"):
        found[window] = txl.losses_at_contexts(model, tokens, contexts=[9, 4], targets=range(9, 30, 5), window=window)
        for number, target in enumerate(range(9, 30, 5)):
            for context in (9, 4):
                lengths = {"mem_len": 0 if window == "none" else window - 1, "window": window}
                assert found[window][context][number].item() == by_hand(model, tokens, target, context, **lengths)
    # Two layers with a window of 3 see 5 tokens: a context of 9 holds all 5, a context of 4 does not.
    assert not torch.allclose(found[3][9], found[3][4])
    assert not torch.allclose(found[3][9], found["none"][9])
    assert torch.equal(found[1][9], found[1][4])


def test_exact_contexts_under_a_clamp():
    torch.manual_seed(0)
    config = TransformerXLConfig(n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=9, mem_len=6)
    model = far_from_zero(config)
    tokens = torch.randint(13, (30,))
    for clamp_len in (2, "none"):
        found = txl.losses_at_context(model, tokens, context=9, targets=range(9, 30), clamp_len=clamp_len)
        for number, target in enumerate(range(9, 30)):
            lengths = {"mem_len": 0, "window": "none", "clamp_len": clamp_len}
            assert found[number].item() == by_hand(model, tokens, target, 9, **lengths)
    clamped = txl.evaluate_sliding(model, tokens, context=9, clamp_len=2)
    free = txl.evaluate_sliding(model, tokens, context=9)
    assert (clamped.clamp_len, free.clamp_len) == (2, None)
    assert clamped.nll != pytest.approx(free.nll, abs=1e-4)
    model.config = replace(config, clamp_len=2)  # the default is the clamp of the model's configuration
    own = txl.evaluate_sliding(model, tokens, context=9)
    assert (own.clamp_len, own.nll) == (2, clamped.nll)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chosen_losses_are_those_of_all(temperature):
    torch.manual_seed(0)
    model = txl.build_model(TransformerXLConfig(n_layer=1, d_model=8, cutoffs=(4,), mem_len=3), 13).double().eval()
    tokens, targets, at = torch.randint(13, (2, 5)), torch.randint(13, (2, 5)), torch.tensor([9, 0, 4])
    cached = ContinuousCache(model, size=4, theta=0.5, weight=0.3)
    for each in (model, cached):
        nll, _ = each.nll_at(tokens, targets, each.init_state(2), temperature)
        for chosen_nll in (each.chosen_nll, lambda *arguments, each=each: LanguageModel.chosen_nll(each, *arguments)):
            found = chosen_nll(tokens, at, targets.flatten()[at], each.init_state(2), temperature)
            torch.testing.assert_close(found, nll.flatten()[at], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "settings", [{"targets": [4]}, {"targets": [7, 10]}, {"targets": []}, {"context": 0}, {"dtype": "float16"}]
)
def test_targets_that_cannot_be_scored(settings):
    model = txl.build_model(TransformerXLConfig(n_layer=1, d_model=8, mem_len=3), 13)
    with pytest.raises(UserError):
        txl.losses_at_context(model, torch.zeros(10, dtype=torch.int64), **({"context": 5, "targets": [5]} | settings))
    with pytest.raises(UserError, match="no contexts"):
        txl.losses_at_contexts(model, torch.zeros(10, dtype=torch.int64), contexts=[], targets=[9])
