"""The continuous cache against its equations written as loops, with every kind of model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.models.test_contract_of_all import MODELS, built

import txl
from txl.errors import UserError
from txl.evaluation.tuning import tune_cache
from txl.models import cache as cache_module
from txl.models.cache import ContinuousCache

V, B, T = 17, 3, 30
KINDS = ("post-norm", "awd-lstm-mos", "qrnn", "lstm, adaptive softmax", "vanilla, learned")


def stream(length: int = T) -> tuple[torch.Tensor, torch.Tensor]:
    # Only five different tokens, so that tokens repeat often.
    both = torch.randint(5, (B, length + 1), generator=torch.Generator().manual_seed(1))
    return both[:, :-1], both[:, 1:]


def by_loops(model, tokens, segment, size, theta, weight):
    """Return log-probabilities [B,T,V], computed pair by pair with Python floats."""
    hidden, logs, state = [], [], model.init_state(B)
    for start in range(0, tokens.shape[1], segment):
        part, after = model.hidden_states(tokens[:, start : start + segment], state)
        logs.append(model.log_probs(tokens[:, start : start + segment], state)[0])
        hidden.append(part)
        state = after
    hidden, log_probs = torch.cat(hidden, dim=1), torch.cat(logs, dim=1).clone()
    for lane in range(B):
        for t in range(tokens.shape[1]):
            pairs = [(hidden[lane, i], int(tokens[lane, i + 1])) for i in range(max(0, t - size), t)]
            if not pairs:
                continue
            scores = [math.exp(theta * float((hidden[lane, t] @ h).item())) for h, _ in pairs]
            for word in range(V):
                share = sum(score for score, (_, next_word) in zip(scores, pairs, strict=True) if next_word == word)
                p = (1 - weight) * math.exp(log_probs[lane, t, word].item()) + weight * share / sum(scores)
                log_probs[lane, t, word] = math.log(p)
    return log_probs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "theta", "weight"), [(7, 0.4, 0.3), (1, 0.4, 0.9), (100, 0.0, 0.1)])
def test_the_equations_written_out(kind, size, theta, weight):
    model = built(MODELS[kind])
    tokens, targets = stream()
    expected = by_loops(model, tokens, 11, size, theta, weight)
    cached = ContinuousCache(model, size, theta, weight)
    state, logs, nlls = cached.init_state(B), [], []
    for start in range(0, T, 11):
        log_probs, after = cached.log_probs(tokens[:, start : start + 11], state)
        nll, state = cached.nll(tokens[:, start : start + 11], targets[:, start : start + 11], state)
        assert torch.equal(after.following, state.following)
        assert state.hidden.shape[1] <= size
        logs.append(log_probs)
        nlls.append(nll)
    torch.testing.assert_close(torch.cat(logs, dim=1), expected, rtol=0, atol=1e-10)
    taken = -expected.gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(torch.cat(nlls, dim=1), taken, rtol=0, atol=1e-10)


@pytest.fixture
def cached() -> ContinuousCache:
    return ContinuousCache(built(MODELS["awd-lstm"]), 6, 0.5, 0.3)


def in_segments(cached, tokens, targets, segment):
    state, parts = cached.init_state(B), []
    for start in range(0, tokens.shape[1], segment):
        part, state = cached.nll(tokens[:, start : start + segment], targets[:, start : start + segment], state)
        parts.append(part)
    return torch.cat(parts, dim=1)


def test_how_a_stream_is_cut_changes_nothing(cached, monkeypatch):
    whole = in_segments(cached, *stream(), T)
    for segment in (1, 2, 7):
        torch.testing.assert_close(in_segments(cached, *stream(), segment), whole, rtol=0, atol=1e-12)
    monkeypatch.setattr(cache_module, "MAX_SCORES", 1)  # one position at a time
    torch.testing.assert_close(in_segments(cached, *stream(), T), whole, rtol=0, atol=1e-12)


def test_the_token_to_be_predicted_is_not_in_the_cache_yet():
    """With nearly all the weight on the cache, a token that was never read is nearly impossible."""
    cached = ContinuousCache(built(MODELS["lstm"]), 10, 0.1, 0.999)
    tokens = torch.arange(10)[None].expand(B, -1)
    nll, _ = cached.nll(tokens, tokens + 1, cached.init_state(B))
    plain, _ = cached.model.nll(tokens, tokens + 1, cached.model.init_state(B))
    torch.testing.assert_close(nll[:, 1:], plain[:, 1:] - math.log(0.001), rtol=0, atol=1e-9)
    torch.testing.assert_close(nll[:, 0], plain[:, 0], rtol=0, atol=1e-12)


def test_large_products_do_not_overflow():
    model = built(MODELS["post-norm"]).float()
    nll = in_segments(ContinuousCache(model, 9, 1e4, 0.5), *stream(), 7)
    assert nll.isfinite().all()


def test_no_weight_is_no_cache():
    model = built(MODELS["lstm"])
    plain, _ = model.nll(*stream(), model.init_state(B))
    torch.testing.assert_close(
        in_segments(ContinuousCache(model, 9, 1.0, 0.0), *stream(), 7), plain, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [((0, 1.0, 0.1), "size is 0"), ((5, -1.0, 0.1), "theta is -1"), ((5, 1.0, 1.0), "lambda is 1")],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(UserError, match=message):
        ContinuousCache(built(MODELS["lstm"]), *settings)


def test_there_is_nothing_to_train(cached):
    with pytest.raises(UserError, match="no weights to train"):
        cached.training_loss(*stream(), cached.init_state(B))


@pytest.mark.parametrize("kind", ["lstm", "post-norm", "vanilla, sinusoid"])
def test_tuning_is_what_evaluating_each_point_gives(kind):
    model = built(MODELS[kind])
    tokens = torch.randint(5, (200,), generator=torch.Generator().manual_seed(2))
    common: dict[str, Any] = {"segment": 9, "batch_size": 3}
    thetas, lambdas = [0.0, 0.1, 0.5], [0.05, 0.3, 0.6]
    tuned = tune_cache(model, tokens, size=20, thetas=thetas, lambdas=lambdas, **common)
    assert tuned.plain_nll == pytest.approx(txl.evaluate(model, tokens, **common).nll, abs=1e-12)
    for row, theta in enumerate(thetas):
        for column, weight in enumerate(lambdas):
            result = txl.evaluate(ContinuousCache(model, 20, theta, weight), tokens, **common)
            assert tuned.nll[row][column] == pytest.approx(result.nll, abs=1e-12)
            assert (result.cache_size, result.cache_theta, result.cache_lambda) == (20, theta, weight)
            assert result.mem_len == txl.evaluate(model, tokens, **common).mem_len
    assert tuned.best_nll == min(min(row) for row in tuned.nll)
    assert tuned.nll[thetas.index(tuned.theta)][lambdas.index(tuned.weight)] == tuned.best_nll
    assert tuned.tokens == 195


def test_thetas_of_its_own_choice_suit_the_hidden_states():
    """The default thetas depend on the mean of h . h: the largest theta times this mean is about 128."""
    tokens = torch.randint(5, (200,), generator=torch.Generator().manual_seed(2))
    model = built(MODELS["lstm, adaptive softmax"])
    tuned = tune_cache(model, tokens, size=20, batch_size=2)
    assert len(tuned.thetas) > 10
    assert tuned.thetas[0] == 0
    hidden, _ = model.hidden_states(tokens[None, :100], model.init_state(1))
    assert 100 < tuned.thetas[-1] * hidden.square().sum(-1).mean().item() < 160


def test_an_edge_of_the_grid_is_told():
    model = built(MODELS["lstm"])
    tokens = torch.arange(5).repeat(40)
    tuned = tune_cache(model, tokens, size=20, batch_size=2, lambdas=[0.1, 0.2], thetas=[0.0, 1.0])
    assert "lambda" in tuned.at_edge  # in a text that repeats itself, the largest weight is the best
    assert tune_cache(model, tokens, size=20, batch_size=2, lambdas=[0.1], thetas=[0.0]).at_edge == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lambdas": []}, "no theta or no lambda"),
        ({"thetas": []}, "no theta or no lambda"),
        ({"size": 0}, "size is 0"),
        ({"size": 10**23}, "size is 1000"),
        ({"lambdas": [1.5]}, "lambda is 1.5"),
        ({"temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_what_cannot_be_tuned(settings, message):
    with pytest.raises(UserError, match=message):
        tune_cache(built(MODELS["lstm"]), torch.arange(50) % V, **settings)


@pytest.mark.parametrize("kind", ["lstm, adaptive softmax", "awd-lstm-mos"])
def test_the_temperature_is_the_model_s_before_the_cache_is_mixed_in(kind):
    model = built(MODELS[kind])
    tokens = torch.randint(5, (60,), generator=torch.Generator().manual_seed(2))
    common: dict[str, Any] = {"segment": 59, "batch_size": 1, "temperature": 1.7}
    state = model.init_state(1)
    probs = model.log_probs(tokens[None, :-1], state)[0][0].exp() ** (1 / 1.7)
    plain = (probs / probs.sum(dim=-1, keepdim=True))[torch.arange(59), tokens[1:]]
    inside = ContinuousCache(model, 20, 0.3, 0.0)
    cached = inside.parts(tokens[None, :-1], tokens[None, 1:], inside.init_state(1), [0.3])[1]
    expected = torch.cat([plain[:1], 0.8 * plain[1:] + 0.2 * cached[0, 0, 1:]])
    result = txl.evaluate(ContinuousCache(model, 20, 0.3, 0.2), tokens, **common)
    assert result.nll == pytest.approx(-expected.log().mean().item(), abs=1e-12)
    tuned = tune_cache(model, tokens, size=20, thetas=[0.3], lambdas=[0.2], **common)
    assert tuned.best_nll == pytest.approx(result.nll, abs=1e-12)
    assert tuned.plain_nll == pytest.approx(txl.evaluate(model, tokens, **common).nll, abs=1e-12)


def test_a_cache_larger_than_the_text_takes_no_more_blocks(cached, monkeypatch):
    """The number of positions in a block depends on the pairs that exist, not on the size of the cache."""
    monkeypatch.setattr(cache_module, "MAX_SCORES", B * T * T)
    blocks, real = [], cache_module._shares
    monkeypatch.setattr(cache_module, "_shares", lambda *given: blocks.append(1) or real(*given))
    large = ContinuousCache(cached.model, 1 << 32, 0.5, 0.3)
    large.nll(*stream(), large.init_state(B))
    assert len(blocks) == 1


def test_generation_with_a_cache():
    for kind in ("lstm", "vanilla, learned"):
        cached = ContinuousCache(built(MODELS[kind]), 8, 0.2, 0.2)
        prompt = [3, 1, 4, 1, 5, 9]
        greedy = [
            int(token)
            for token in txl.generate_tokens(cached, prompt, max_tokens=9, sampling=txl.Sampling(temperature=0))
        ]
        read = list(prompt)
        for token in greedy:
            within = read if cached.context is None else read[-cached.context :]
            log_probs, _ = cached.log_probs(torch.tensor([within]), cached.init_state(1))
            assert token == int(log_probs[0, -1].argmax()), kind
            read.append(token)


def test_a_reset_lane_forgets_nan():
    cached = ContinuousCache(built(MODELS["post-norm"]), 7, 0.4, 0.3)
    tokens, targets = stream()
    _, state = cached.nll(tokens[:, :9], targets[:, :9], cached.init_state(B))
    state.hidden[0] = torch.nan
    got, after = cached.nll(tokens, targets, state.reset(torch.tensor([True, False, False])))
    expected, _ = cached.nll(tokens[:1], targets[:1], cached.init_state(1))
    torch.testing.assert_close(got[:1], expected, rtol=1e-5, atol=1e-5)
    assert not after.hidden.isnan().any()
