"""Averages of attention against the equations of Section 3.3, query by query in float64 with memory kept by hand."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from txl.analysis.attention_record import marked
from txl.analysis.average_attention import (
    AttentionAverages,
    AttentionPlan,
    average_attention,
    mean_distance,
    share_beyond,
    sums_by_distance,
)
from txl.analysis.observation import attentions
from txl.attention.equations import score_terms, sinusoid
from txl.config import model_from_dict
from txl.errors import UserError
from txl.evaluation.stream import Settings
from txl.models import build_model

SHAPE = {"n_layer": 2, "d_model": 12, "n_head": 3, "d_head": 5, "d_inner": 7, "dropout": 0.2, "dropatt": 0.2}
VOCABULARY, N_TOKEN = 11, 47


def make_model(**options):
    torch.manual_seed(3)
    model = build_model(model_from_dict(SHAPE | options), VOCABULARY).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return model.eval()


def tokens(n=N_TOKEN):
    return torch.randint(VOCABULARY, (n,), generator=torch.Generator().manual_seed(5)).numpy()


def averages(model: Any, ids: Any, **options: Any) -> AttentionAverages:
    """Return `average_attention` for fields of `Settings` and of `AttentionPlan`."""
    shown = {field.name: options.pop(field.name) for field in fields(AttentionPlan) if field.name in options}
    return average_attention(model, ids, Settings(**options), AttentionPlan(**shown))


@torch.no_grad()
def by_hand(model, ids, segment, mem_len, window, clamp_len, min_keys, lanes):
    """Return average weights by distance (all terms, and each term alone), effective keys, and the number of queries.

    Weights are [layers, heads, mem_len + segment], effective keys [layers, heads]; both are computed query by query.
    """
    length = len(ids) // lanes
    found = {name: np.zeros((2, 3, mem_len + segment)) for name in ("all", "a", "b", "d")}
    entropy, queries = np.zeros((2, 3)), 0
    for lane in range(lanes):
        stream = ids[lane * length : (lane + 1) * length - 1]
        memory = [torch.zeros(0, 12, dtype=torch.float64) for _ in range(2)]
        for start in range(0, len(stream), segment):
            hidden = model.embedding(torch.as_tensor(stream[start : start + segment]))
            kept = []
            for n, layer in enumerate(model.layers):
                attention = layer.attention
                kept.append(torch.cat([memory[n], hidden])[-mem_len:] if mem_len else memory[n])
                context = torch.cat([memory[n], hidden])
                if attention.pre_norm:
                    context = attention.norm(context)
                M = len(memory[n])
                key, value = (
                    project(context).unflatten(-1, (3, 5)) for project in (attention.k_proj, attention.v_proj)
                )
                u, v = (attention.u, attention.v) if model.config.untie_r else (model.u, model.v)
                outputs = []
                for i in range(len(hidden)):
                    seen = [j for j in range(M + i + 1) if window is None or M + i - j < window]
                    distance = torch.tensor([M + i - j for j in seen])
                    clamped = distance if clamp_len is None else distance.clamp(max=clamp_len)
                    position = attention.r_proj(sinusoid(clamped, 12, torch.float64)).unflatten(-1, (3, 5))
                    query = attention.q_proj(context[M + i]).unflatten(-1, (3, 5))
                    terms = score_terms(query[None], key[seen][None], position, u, v)
                    softmax = {
                        name: (score / math.sqrt(5)).softmax(-1)
                        for name, score in (
                            ("all", terms.score()[0]), ("a", terms.a[0]), ("b", terms.b[0]), ("d", terms.d),
                        )
                    }  # fmt: skip
                    outputs.append(torch.einsum("hs,shd->hd", softmax["all"], value[seen]))
                    if len(seen) < min_keys:
                        continue
                    queries += n == 0
                    entropy[n] -= (softmax["all"] * softmax["all"].log()).sum(-1).numpy()
                    for name, weights in softmax.items():
                        found[name][n][:, distance.numpy()] += weights.numpy()
                attended = attention.o_proj(torch.stack(outputs).flatten(1))
                hidden = hidden + attended if attention.pre_norm else attention.norm(hidden + attended)
                hidden = layer.feed_forward(hidden)
            memory = kept
    return {name: sums / queries for name, sums in found.items()}, np.exp(entropy / queries), queries


@pytest.mark.parametrize(
    ("segment", "mem_len", "window", "clamp_len", "min_keys", "lanes", "options"),
    [
        pytest.param(5, 7, None, None, None, 1, {}, id="memory"),
        pytest.param(5, 7, 7, None, None, 2, {"untie_r": True}, id="exact-window-untied"),
        pytest.param(5, 7, 8, 4, None, 1, {"pre_norm": True}, id="window-of-all-clamped-pre-norm"),
        pytest.param(3, 11, 4, 2, None, 3, {}, id="narrow-window"),
        pytest.param(5, 7, None, 3, 1, 2, {}, id="every-token"),
        pytest.param(4, 0, None, None, None, 2, {}, id="no-memory"),
        pytest.param(1, 5, None, None, None, 1, {}, id="token-by-token"),
    ],
)
def test_averages_are_those_of_the_equations(segment, mem_len, window, clamp_len, min_keys, lanes, options):
    model, ids = make_model(**options), tokens()
    found = averages(
        model, ids, segment=segment, mem_len=mem_len, window=window or "none", clamp_len=clamp_len or "none",
        batch_size=lanes, min_keys=min_keys,
    )  # fmt: skip
    expected, effective, queries = by_hand(model, ids, segment, mem_len, window, clamp_len, found.min_keys, lanes)
    assert found.min_keys == (min_keys or window or mem_len + 1)
    assert found.queries == queries
    span = found.weights.shape[-1]
    assert span == (window or mem_len + segment)
    for name, weights in {"all": found.weights, **found.terms}.items():
        np.testing.assert_allclose(weights, expected[name][..., :span], rtol=0, atol=1e-12)
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-12)
    np.testing.assert_allclose(found.effective_keys, effective, rtol=1e-10)


def test_with_an_exact_window_segments_do_not_matter():
    model, ids = make_model(), tokens()
    first, second = (averages(model, ids, segment=n, mem_len=9, window=6, batch_size=1) for n in (3, 13))
    assert first.queries == second.queries == N_TOKEN - 1 - 5
    np.testing.assert_allclose(first.weights, second.weights, atol=1e-12)
    np.testing.assert_allclose(first.terms["b"], second.terms["b"], atol=1e-12)


def test_segments_that_let_no_token_see_so_many_keys():
    model, ids = make_model(), tokens()[:11]
    with pytest.raises(UserError, match="no token of a lane's 10 sees 9 keys, because of where segments begin"):
        averages(model, ids, segment=4, mem_len=6, window="none", batch_size=1, min_keys=9)


def test_the_vanilla_transformer_sees_its_segment_alone():
    model = make_model(encoding="learned", max_segment=6, mem_len=0)
    ids = tokens(13)
    found = averages(model, ids, segment=6, batch_size=1)
    assert (found.queries, found.min_keys, found.weights.shape, found.terms) == (12, 1, (2, 3, 6), {})
    expected = np.zeros((3, 6))
    with torch.no_grad():
        for start in (0, 6):
            layer = attentions(model)[0]
            hidden = model.embedding(torch.as_tensor(ids[start : start + 6])) + model.get_parameter("positions")[0, :6]
            query, key = (project(hidden).unflatten(-1, (3, 5)) for project in (layer.q_proj, layer.k_proj))
            for i in range(6):
                weights = (torch.einsum("hd,shd->hs", query[i], key[: i + 1]) / math.sqrt(5)).softmax(-1).numpy()
                expected[:, : i + 1] += weights[:, ::-1]
    np.testing.assert_allclose(found.weights[0], expected / 12, atol=1e-12)
    with pytest.raises(UserError, match=r"positions are absolute .model\.encoding is learned"):
        averages(model, ids, segment=6, batch_size=1, terms=True)


def test_measures_on_weights_worked_out_by_hand():
    matrix = torch.tensor([[[0.25, 0.75, 0.0, 0.0], [0.0, 0.1, 0.9, 0.0], [0.0, 0.0, 0.4, 0.6]]])  # T 3, M 1
    sums = sums_by_distance(matrix, n_head=1)
    torch.testing.assert_close(sums, torch.tensor([[0.75 + 0.9 + 0.6, 0.25 + 0.1 + 0.4, 0.0, 0.0]]).double())
    found = averages(make_model(n_layer=5), tokens(), segment=5, mem_len=7, window="none", batch_size=1)
    found.weights[:] = 0
    found.weights[..., 0] = 1
    found.weights[0, 1], found.weights[2, 0], found.weights[4, 2] = 0, 0, 0
    found.weights[0, 1, [1, 3]] = 0.5
    found.weights[2, 0, 4] = found.weights[4, 2, 11] = 1
    assert mean_distance(found.weights)[0].tolist() == [0, 2, 0]
    assert share_beyond(found.weights, 3)[0].tolist() == [0, 0.5, 0]
    assert found.farthest() == [(0, 1), (2, 0), (4, 2)]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        pytest.param({}, {"mem_len": 7, "window": "none", "segment": 5}, id="no-window"),
        pytest.param({}, {"mem_len": 7, "window": 6, "segment": 5, "min_keys": 2, "batch_size": 3}, id="every-token"),
        pytest.param({"encoding": "learned", "max_segment": 6, "mem_len": 0}, {"segment": 6}, id="vanilla"),
    ],
)
def test_a_model_that_looks_at_all_keys_alike_has_the_even_figures(options, settings):
    model = make_model(**options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or name in ("u", "v"):
                parameter.zero_()
    found = averages(model, tokens(), **({"batch_size": 1} | settings))
    np.testing.assert_allclose(found.weights, np.broadcast_to(found.even, found.weights.shape), atol=1e-12)
    np.testing.assert_allclose(found.effective_keys, found.even_keys, rtol=1e-10)


def test_a_fifth_of_what_a_token_sees_is_marked_whatever_the_weights():
    weights = np.array([0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0.2, 0.3, 0])
    assert marked(weights, keys=10) == [3, 10]
    assert marked(weights, keys=12) == [3, 9, 10]
    assert marked(np.zeros(6), keys=5) == [5]  # of equal weights, the nearest


@pytest.mark.parametrize("lanes", [1, 2])
def test_close_ups_are_the_weights_themselves(lanes):
    """A close-up covers rows of several segments in one lane, and does not depend on where segments are cut."""
    model, ids = make_model(), tokens()
    where, settings = 20, {"mem_len": 6, "window": 6, "batch_size": lanes, "layers": [1]}
    by_segment, whole = (
        averages(model, ids, segment=n, positions=[where], rows=8, **settings).close[0] for n in (5, 46)
    )
    assert by_segment.position == where
    assert by_segment.first_key == 8
    assert by_segment.weights.shape == (1, 3, 8, 13)
    np.testing.assert_allclose(by_segment.weights, whole.weights, atol=1e-6)
    np.testing.assert_allclose(by_segment.weights.sum(-1), 1, atol=1e-6)
    for row in range(8):
        seen = np.flatnonzero(by_segment.weights[0, 0, row])
        assert (seen.min(), seen.max()) == (row, row + 5)
    assert by_segment.keys.tolist() == [6] * 8
    one = averages(model, ids, segment=5, positions=[where], rows=1, **settings).close[0]
    np.testing.assert_array_equal(one.weights[0, :, 0], by_segment.weights[0, :, -1, -6:])


def test_a_close_up_begins_with_the_first_token_that_is_seen():
    model = make_model(encoding="learned", max_segment=10, mem_len=0)
    close = averages(model, tokens(), segment=10, batch_size=1, positions=[24], rows=3).close[0]
    assert (close.first_key, close.weights.shape) == (20, (2, 3, 3, 5))
    assert close.keys.tolist() == [3, 4, 5]


def test_the_model_is_left_as_it_was():
    model = make_model()
    before = [attention.attend for attention in attentions(model)]
    model.train()
    with pytest.raises(UserError, match="hold id 99"):
        averages(model, np.array([0, 1, 99] * 9), segment=3, mem_len=2, window="none", batch_size=1)
    assert model.training
    assert [attention.attend for attention in attentions(model)] == before
    averages(model.eval(), tokens(), segment=5, mem_len=4, window="none", batch_size=1)
    assert [attention.attend for attention in attentions(model)] == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [2]}, "layers is 3; expected some of this model's layers 1 to 2"),
        ({"layers": []}, "layers is none; expected some"),
        ({"mem_len": 60, "window": 60}, "min_keys is 60; expected 1 to 46"),
        ({"positions": [46]}, "position 46 was not read"),
        ({"positions": [3], "rows": 9, "batch_size": 2}, None),
        ({"positions": [25], "rows": 9, "batch_size": 2}, "lanes begin at 0, 23 and end at 44"),
        ({"segment": 0}, "segment is 0"),
        ({"rows": 0}, "rows is 0"),
        ({"min_keys": 60}, "min_keys is 60; expected 1 to"),
    ],
)
def test_what_cannot_be_averaged_is_refused(options, message):
    call = {"segment": 5, "mem_len": 6, "window": "none", "batch_size": 1} | options
    if message is None:
        assert averages(make_model(), tokens(), **call).close[0].weights.shape[2] == 4  # all rows of the lane
        return
    with pytest.raises(UserError, match=message):
        averages(make_model(), tokens(), **call)


def test_a_model_without_attention_is_refused():
    model = make_model()
    model.layers = torch.nn.ModuleList([torch.nn.LSTM(12, 12)])
    with pytest.raises(UserError, match="has no attention to look at"):
        averages(model, tokens(), segment=5)
