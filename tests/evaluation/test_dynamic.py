"""Dynamic evaluation: update rules against slow transcriptions, and no target used before its loss is computed."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.test_contract_of_all import MODELS, TRANSFORMER, VANILLA, V, built
from torch import nn

import txl
from txl.data.prepared import Tokens
from txl.evaluation.dynamic import adapted_parameters
from txl.evaluation.stream import Lanes

SEGMENT = 5
STREAM = np.random.default_rng(3).integers(V, size=38)
TRAIN = np.random.default_rng(4).integers(V, size=64)


def small(**changes: Any) -> Any:
    return built(dataclasses.replace(TRANSFORMER, n_layer=1, d_model=6, d_head=3, d_inner=7, **changes))


def segments_of(tokens: np.ndarray, segment: int, n_lane: int = 1):
    """Yield the inputs and targets of each segment, cut by slicing: a second implementation of `Lanes`."""
    length = len(tokens) // n_lane
    lanes = torch.from_numpy(tokens[: length * n_lane].reshape(n_lane, length))
    for start in range(0, length - 1, segment):
        end = min(start + segment, length - 1)
        yield lanes[:, start:end], lanes[:, start + 1 : end + 1]


def gradient_of(model: Any, inputs: Any, targets: Any, state: Any) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """Return the losses, the new state, and d(mean loss)/d(weight) as arrays by parameter name."""
    model.zero_grad()
    nll, state = model.nll(inputs, targets, state)
    nll.mean().backward()
    gradients = {
        name: np.zeros(weight.shape) if weight.grad is None else weight.grad.numpy().copy()
        for name, weight in model.named_parameters()
    }
    return nll.detach(), state.detach(), gradients


def transcribed(model: Any, rule: str, eta: float, lamb: float, eps: float, n_lane: int) -> tuple[list[float], dict]:
    """Return the losses of STREAM and the weights after STREAM, computed as in both papers' code.

    `rule` is "sgd", "2018" (dynamiceval.py: gradstat, evaluate) or "2019" (dynamic_eval_opt.py: _apply_dense).
    """
    model = copy.deepcopy(model)
    trained = {name: weight.detach().numpy().copy() for name, weight in model.named_parameters()}
    sums, count, state = {name: np.zeros(weight.shape) for name, weight in trained.items()}, 0, model.init_state(n_lane)
    for inputs, targets in segments_of(TRAIN, SEGMENT, n_lane):
        _, state, gradient = gradient_of(model, inputs, targets, state)
        count += 1
        for name in sums:
            sums[name] += gradient[name] ** 2
    root_mean = {name: np.sqrt(total / count) for name, total in sums.items()}
    global_mean = np.mean([values.mean() for values in root_mean.values()])
    current = copy.deepcopy(trained)
    moved = {name: np.zeros(weight.shape) for name, weight in trained.items()}  # the 2019 code's slot "dw"
    losses, state = [], model.init_state(1)
    for inputs, targets in segments_of(STREAM, SEGMENT):
        nll, state, gradient = gradient_of(model, inputs, targets, state)
        losses += nll.flatten().tolist()
        for name, weight in model.named_parameters():
            g, away = gradient[name], trained[name] - current[name]
            if rule == "sgd":
                current[name] += -eta * g + lamb * away
            elif rule == "2018":
                decay_rate = root_mean[name] / global_mean
                if lamb > 0:
                    decay_rate = np.minimum(decay_rate, 1 / lamb)
                current[name] += lamb * decay_rate * away - eta * g / (root_mean[name] + eps)
            else:
                root = np.sqrt(sums[name])
                update = eta / (root + eps) * g + lamb * root * moved[name]
                moved[name] -= update
                current[name] -= update
            with torch.no_grad():
                weight.copy_(torch.from_numpy(current[name]))
    return losses, current


RULES = {
    "sgd": (txl.Adaptation("sgd", 0.3), "sgd"),
    "sgd with decay": (txl.Adaptation("sgd", 0.3, 0.2), "sgd"),
    "2018": (txl.Adaptation("rms", 0.02, 0.0, 1e-3), "2018"),
    "2018 with decay": (txl.Adaptation("rms", 0.02, 0.1, 1e-3), "2018"),
    "2018, decay at its limit": (txl.Adaptation("rms", 0.02, 0.9, 1e-3), "2018"),
    "2019": (txl.Adaptation("rms", 0.05, 0.0, 1e-3, "sum"), "2019"),
    "2019 with decay": (txl.Adaptation("rms", 0.05, 0.3, 1e-3, "sum"), "2019"),
}


@pytest.mark.parametrize("n_lane", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_the_rules_against_slow_transcriptions(name, n_lane):
    adaptation, rule = RULES[name]
    model = small(mem_len=8)
    eta, lamb, eps = adaptation.learning_rate, adaptation.decay, adaptation.epsilon
    losses, weights = transcribed(model, rule, eta, lamb, eps, n_lane)
    statistics = txl.gradient_statistics(model, TRAIN, segment=SEGMENT, batch_size=n_lane)
    result = txl.evaluate_dynamically(model, STREAM, adaptation, statistics, segment=SEGMENT)
    assert result.nll == pytest.approx(np.mean(losses), rel=1e-12)
    assert (result.tokens, result.dropped, result.batch_size) == (len(STREAM) - 1, 0, 1)
    adapting = txl.AdaptingModel(model, adaptation, statistics)
    state, scored = adapting.model.init_state(1), []
    for inputs, targets in segments_of(STREAM, SEGMENT):
        nll, state = adapting.score_then_adapt(inputs, targets, state)
        assert not nll.requires_grad
        scored += nll.flatten().tolist()
    assert scored == pytest.approx(losses, rel=1e-11)
    for each, weight in adapting.model.named_parameters():
        np.testing.assert_allclose(weight.detach().numpy(), weights[each], rtol=1e-9, atol=1e-12)
    if "limit" in name:
        assert max(torch.as_tensor(each).max() for each in adapting._pulls) == 1
    static = txl.evaluate(model, STREAM, segment=SEGMENT, batch_size=1).nll
    assert abs(result.nll - static) > 1e-4
    adapting.reset()
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(adapting.model.parameters(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rule", ["rms", "sgd"])
def test_every_family_scores_first_and_stays_as_it_is(name, rule):
    model = built(MODELS[name]).train()
    model.softmax.bias.requires_grad_(False)  # adapts in the copy, stays frozen in the caller's model
    before = copy.deepcopy(model.state_dict())
    statistics = txl.gradient_statistics(model, TRAIN, segment=SEGMENT) if rule == "rms" else None
    rate = 0.01 if rule == "rms" else 0.1

    def scores(adaptation: txl.Adaptation, stream: np.ndarray) -> torch.Tensor:
        adapting, parts = txl.AdaptingModel(model, adaptation, statistics), []
        state = adapting.model.init_state(2)
        for inputs, targets, counts in Lanes.cut(len(stream), 2).segments(stream, SEGMENT):
            nll, state = adapting.score_then_adapt(inputs, targets, state, counts)
            parts.append(nll)
        return torch.cat(parts, dim=1)

    still = txl.Adaptation(rule, 0.0)
    static = txl.evaluate(model, STREAM, segment=SEGMENT, batch_size=2).nll
    assert scores(still, STREAM).mean().item() == pytest.approx(static, rel=1e-10)
    adaptation = txl.Adaptation(rule, rate, 0.01)
    found = scores(adaptation, STREAM)
    assert torch.equal(found, scores(adaptation, STREAM))
    torch.testing.assert_close(found[:, :SEGMENT], scores(still, STREAM)[:, :SEGMENT], rtol=0, atol=0)
    assert (found[:, SEGMENT:] - scores(still, STREAM)[:, SEGMENT:]).abs().min() > 1e-9
    # A token's loss does not depend on later tokens, including later tokens of the same segment.
    for position in (7, 12):
        changed = STREAM.copy()
        changed[position] = (changed[position] + 1) % V
        torch.testing.assert_close(
            scores(adaptation, changed)[0, : position - 1], found[0, : position - 1], rtol=0, atol=1e-12
        )
    assert model.training
    assert [each.requires_grad for each in (model.softmax.bias, model.embedding.tables[0])] == [False, True]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_off(around):
    model, adaptation = small(), txl.Adaptation("rms", 0.01)

    def measured() -> float:
        statistics = txl.gradient_statistics(model, TRAIN, segment=SEGMENT)
        return txl.evaluate_dynamically(model, STREAM, adaptation, statistics, segment=SEGMENT).nll

    expected = measured()
    with around():
        assert measured() == expected


def changed_names(model: Any, weights: str) -> set[str]:
    statistics = txl.gradient_statistics(model, TRAIN, segment=SEGMENT, weights=weights)
    assert set(statistics.squares) == set(adapted_parameters(model, weights))
    adapting = txl.AdaptingModel(model, txl.Adaptation("rms", 0.01, weights=weights), statistics)
    inputs, targets = next(segments_of(STREAM, 30))
    adapting.score_then_adapt(inputs, targets, adapting.model.init_state(1))
    pairs = zip(adapting.model.named_parameters(), model.parameters(), strict=True)
    return {name for (name, ours), theirs in pairs if not torch.equal(ours, theirs)}


def test_which_weights_adapt():
    model = small()
    names = {name for name, _ in model.named_parameters()}
    assert changed_names(model, "all") == names
    inner = "layers.0.feed_forward"
    assert changed_names(model, "feed-forward") == {
        f"{inner}.{part}.{kind}" for part in ("inner", "outer") for kind in ("weight", "bias")
    }
    assert changed_names(model, "biases") == {"u", "v", "softmax.bias"} | {
        name for name in names if name.endswith("bias") or ".norm." in name
    }
    lstm = built(MODELS["lstm"])
    assert changed_names(lstm, "biases") == {name for name, _ in lstm.named_parameters() if "bias" in name}
    with pytest.raises(txl.UserError, match="no feed-forward weights"):
        adapted_parameters(lstm, "feed-forward")


def test_what_serves_in_training_alone_does_not_adapt():
    """The auxiliary classifiers of Al-Rfou et al. have no gradient, and do not count in the average of mean G."""
    config = dataclasses.replace(VANILLA, n_target=2, layer_losses=True)
    model, plain = built(config), built(VANILLA)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "auxiliary" not in name})
    adaptation = txl.Adaptation("rms", 0.01, 0.05)
    found = []
    for each in (model, plain):
        statistics = txl.gradient_statistics(each, TRAIN, segment=SEGMENT)
        assert not any("auxiliary" in name for name in statistics.squares)
        found.append(txl.evaluate_dynamically(each, STREAM, adaptation, statistics, segment=SEGMENT).nll)
    assert found[0] == found[1]


def test_only_the_targets_that_count_are_followed():
    model, adaptation = small(), txl.Adaptation("sgd", 0.5)
    inputs, targets = next(segments_of(STREAM, 8))
    weights = []
    for counted in (torch.arange(8)[None] < 3, torch.zeros(1, 8, dtype=torch.bool)):
        adapting = txl.AdaptingModel(model, adaptation)
        nll, _ = adapting.score_then_adapt(inputs, targets, adapting.model.init_state(1), counted)
        assert nll.shape == (1, 8)
        weights.append(list(adapting.model.parameters()))
    adapting = txl.AdaptingModel(model, adaptation)
    adapting.score_then_adapt(inputs[:, :3], targets[:, :3], adapting.model.init_state(1))  # without the later targets
    for some, none, alone, trained in zip(*weights, adapting.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(some, alone, rtol=0, atol=1e-12)
        assert torch.equal(none, trained)


def test_statistics():
    model = small(cutoffs=(5, 9), div_val=2)
    for n_lane, limit, expected in ((1, None, 13), (3, 2, 2), (1, 4, 4), (1, 99, 13)):
        statistics = txl.gradient_statistics(model, TRAIN, segment=SEGMENT, batch_size=n_lane, segments=limit)
        assert (statistics.segments, statistics.segment, statistics.batch_size) == (expected, SEGMENT, n_lane)
        state, sums = model.init_state(n_lane), {}
        for inputs, targets in [*segments_of(TRAIN, SEGMENT, n_lane)][:expected]:
            _, state, gradient = gradient_of(model, inputs, targets, state)
            for name, values in gradient.items():
                sums[name] = sums.get(name, 0) + np.square(values)
        for name, squares in statistics.squares.items():
            np.testing.assert_allclose(squares.numpy(), sums[name], rtol=1e-9, atol=1e-15)
    model.zero_grad()


@pytest.mark.parametrize("attention", ["shifted", "reference"])
def test_projections_and_compiled_steps_see_the_new_weights(attention):
    """A state computed without gradients holds keys, values and positions projected by weights before the update."""
    model = small(attention=attention).float()
    adapting = txl.AdaptingModel(model, txl.Adaptation("sgd", 0.5))
    inputs, targets = next(segments_of(STREAM, 30))
    with torch.no_grad():
        _, state = adapting.model.log_probs(inputs[:, :10], adapting.model.init_state(1))
        _, state = adapting.model.log_probs(inputs[:, 10:11], state)  # compiled code, if there is a compiler
    assert state.projections is not None
    adapting.score_then_adapt(inputs, targets, adapting.model.init_state(1))
    fresh = small(attention=attention).float()
    fresh.load_state_dict(adapting.model.state_dict())
    hidden = dataclasses.replace(state, projections=None)
    for length in (1, 4):
        following = inputs[:, 11 : 11 + length]
        expected, _ = fresh.log_probs(following, hidden)
        with torch.no_grad():
            found, _ = adapting.model.log_probs(following, state)
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-5)
        old, _ = model.log_probs(following, hidden)
        assert (found - old.detach()).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["post-norm", "qrnn"])
def test_bfloat16_converts_the_weights_anew_after_an_update(name):
    """Autocast caches converted weights until the outermost autocast block ends, even across an update."""
    model = built(MODELS[name]).float()
    adaptation = txl.Adaptation("sgd", 0.3)
    settings: dict[str, Any] = {"segment": SEGMENT, "dtype": "bfloat16"}
    found = txl.evaluate_dynamically(model, STREAM, adaptation, **settings).nll
    with torch.autocast("cpu", torch.bfloat16):
        assert txl.evaluate_dynamically(model, STREAM, adaptation, **settings).nll == found
    exact = txl.evaluate_dynamically(model, STREAM, adaptation, segment=SEGMENT).nll
    assert found == pytest.approx(exact, abs=0.05)
    assert found != exact


@pytest.mark.parametrize("temperature", [1.0, 1.2])
def test_with_a_cache_the_model_inside_adapts(temperature):
    model = small()
    adaptation = txl.Adaptation("sgd", 0.3)
    settings: dict[str, Any] = {"segment": SEGMENT, "temperature": temperature}
    plain = txl.evaluate_dynamically(model, STREAM, adaptation, **settings)
    none = txl.evaluate_dynamically(txl.ContinuousCache(model, 9, 0.3, 0.0), STREAM, adaptation, **settings)
    assert none.nll == pytest.approx(plain.nll, rel=1e-12)
    cache = txl.ContinuousCache(model, 9, 0.3, 0.4)
    found = txl.evaluate_dynamically(cache, STREAM, adaptation, **settings)
    assert abs(found.nll - plain.nll) > 1e-3
    assert (found.cache_size, plain.cache_size) == (9, None)
    # By hand: weights follow the gradient of the inner model's loss; the cache changes only the score.
    by_hand, total = txl.ContinuousCache(copy.deepcopy(model), 9, 0.3, 0.4), 0.0
    inner: Any = by_hand.model
    state = by_hand.init_state(1)
    for inputs, targets in segments_of(STREAM, SEGMENT):
        scored, after = by_hand.nll_at(inputs, targets, state, temperature)
        log_probs, _ = inner.log_probs(inputs, state.inner)
        followed = nn.functional.cross_entropy(log_probs.flatten(0, 1) / temperature, targets.flatten())
        gradients = torch.autograd.grad(followed, list(inner.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(inner.parameters(), gradients, strict=True):
                weight -= 0.3 * gradient
        total, state = total + scored.sum().item(), after
    assert found.nll == pytest.approx(total / found.tokens, rel=1e-9)
    statistics = [txl.gradient_statistics(each, TRAIN, segment=SEGMENT) for each in (model, cache)]
    assert all(torch.equal(value, statistics[1].squares[name]) for name, value in statistics[0].squares.items())


def test_lanes_of_unequal_length_and_what_is_described():
    model = small()
    statistics = txl.gradient_statistics(model, TRAIN, segment=SEGMENT, batch_size=2, segments=3)
    adaptation = txl.Adaptation("rms", 0.01, weights="biases")
    result = txl.evaluate_dynamically(
        model, STREAM[:37], adaptation, statistics, segment=9, batch_size=4, exhaustive=True, mem_len=6
    )
    assert (result.tokens, result.dropped, result.window) == (36, 0, 6)
    result = txl.evaluate_dynamically(
        model, STREAM[:36], adaptation, statistics, segment=9, batch_size=4, exhaustive=True
    )
    assert np.isfinite(result.nll)  # the last target of one lane counts neither in the loss nor in the gradient
    read = {"statistics_segments": 3, "statistics_batch_size": 2}
    assert result.to_dict().get("dynamic") == dataclasses.asdict(adaptation) | read
    assert txl.evaluate(model, STREAM).dynamic is None
    tokens = Tokens(STREAM.astype(np.uint8), "test", None, unk_id=int(STREAM[3]))
    result = txl.evaluate_dynamically(model, tokens, adaptation, statistics, segment=9)
    assert result.unknown == txl.evaluate(model, tokens).unknown == (STREAM[3] == STREAM).sum()


def test_tuning_finds_the_best_of_the_grid():
    model = small()
    statistics = txl.gradient_statistics(model, TRAIN, segment=SEGMENT)
    base = txl.Adaptation("rms", 0.0, epsilon=1e-3, weights="biases")
    rates, decays = [1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1e30], [0.0, 0.01, 0.1]
    tuned = txl.tune_dynamic(
        model, STREAM, base, statistics, learning_rates=rates, decays=decays, segment=SEGMENT, max_tokens=30
    )
    every = {}
    for pair in itertools.product(rates, decays):
        adaptation = dataclasses.replace(base, learning_rate=pair[0], decay=pair[1])
        result = txl.evaluate_dynamically(model, STREAM, adaptation, statistics, segment=SEGMENT, max_tokens=30)
        every[pair] = result.nll
    best = min(every, key=lambda place: every[place] if every[place] == every[place] else np.inf)
    assert (tuned.adaptation.learning_rate, tuned.adaptation.decay) == best
    assert tuned.best_nll == every[best]
    assert tuned.static_nll == txl.evaluate(model, STREAM, segment=SEGMENT, batch_size=1, max_tokens=30).nll
    assert tuned.adaptation.weights == "biases"
    assert tuned.tokens == 29
    assert all(nll == every[rate, decay] for rate, decay, nll in tuned.tried if nll < np.inf)
    alone = txl.tune_dynamic(
        model, STREAM, base, statistics, learning_rates=[1e-3, 2e-3], decays=[0.0], segment=SEGMENT, max_tokens=30
    )
    assert alone.at_edge == ["learning rate"]
    with pytest.raises(txl.UserError, match="diverge at every learning rate down to 1e"):
        txl.tune_dynamic(
            model, STREAM, txl.Adaptation("sgd", 0), learning_rates=[1e200, 1e250], decays=[0.0], segment=SEGMENT
        )


def test_damaged_weights_are_not_tuned():
    model = small()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(txl.UserError, match="losses of the fixed weights are not numbers"):
        txl.tune_dynamic(model, STREAM, txl.Adaptation("sgd", 0), learning_rates=[1e-3], segment=SEGMENT)


WRONG: list[tuple[str, Any]] = [
    ("rule", "adam"), ("statistics", "max"), ("weights", "some"), ("learning_rate", -1.0), ("learning_rate", math.nan),
    ("decay", math.inf), ("epsilon", 0.0),
]  # fmt: skip


@pytest.mark.parametrize("change", [*({name: value} for name, value in WRONG), {"decay": 1.5, "rule": "sgd"}])
def test_settings_out_of_range(change):
    with pytest.raises(txl.UserError) as refused:
        txl.Adaptation(**({"rule": "rms", "learning_rate": 0.1} | change))
    assert refused.value.field == next(iter(change))


def test_statistics_that_are_missing_or_of_other_weights():
    model = small()
    with pytest.raises(txl.UserError, match="rms needs gradient statistics"):
        txl.evaluate_dynamically(model, STREAM, txl.Adaptation("rms", 0.1), segment=SEGMENT)
    statistics = txl.gradient_statistics(model, TRAIN, segment=SEGMENT, weights="feed-forward")
    for weights in ("all", "biases"):
        with pytest.raises(txl.UserError, match=f"are of feed-forward weights, but {weights} adapt"):
            txl.AdaptingModel(model, txl.Adaptation("rms", 0.1, weights=weights), statistics)
    with pytest.raises(txl.UserError, match="are of a model of another shape"):
        other = {name: torch.zeros(3, 3) for name in statistics.squares}
        wrong = dataclasses.replace(statistics, squares=other)
        txl.AdaptingModel(model, txl.Adaptation("rms", 0.1, weights="feed-forward"), wrong)
    with pytest.raises(txl.UserError, match="statistics_segments is 0"):
        txl.gradient_statistics(model, TRAIN, segments=0)
    with pytest.raises(txl.UserError, match="hold id 99"):
        txl.gradient_statistics(model, [1, 2, 99], segment=2)
    with pytest.raises(txl.UserError, match="hold id 99"):
        txl.evaluate_dynamically(model, [1, 2, 99], txl.Adaptation("sgd", 0.1))


def test_an_interruption_leaves_the_model_as_it_was():
    model = small()
    before = copy.deepcopy(model.state_dict())

    def interrupt(done: int, total: int) -> None:
        if done > 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        txl.evaluate_dynamically(model, STREAM, txl.Adaptation("sgd", 0.5), segment=SEGMENT, progress=interrupt)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
