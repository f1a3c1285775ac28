"""Shaw et al.'s encoding as in Section 3.3 and Tables 6 and 7: equations, clipping, and refused settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import small_run
from torch import Tensor

import txl
from txl.config import TransformerXLConfig, validate
from txl.errors import UserError
from txl.models import build_model
from txl.models.transformer_xl import TransformerXL
from txl.training.estimate import parameters_by_part

V, B = 13, 2
SHAW = TransformerXLConfig(
    encoding="shaw", max_distance=5, n_layer=2, d_model=10, n_head=3, d_head=5, d_inner=7, mem_len=4, dropout=0.0
)


def model_of(**changes) -> TransformerXL:
    torch.manual_seed(0)
    model = build_model(dataclasses.replace(SHAW, **changes), V).double()
    assert isinstance(model, TransformerXL)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model


def attended(
    weights: Mapping[str, Tensor], hidden: Tensor, memory: Tensor, config: TransformerXLConfig, clip: int
) -> Tensor:
    """Return a_i = sum_j softmax_j(q_i . (k_j + w_{min(i-j, clip)}) / sqrt(D)) v_j, [B,T,H*D], key by key.

    Shaw et al. 2018, equations 2, 4 and 5, without the vectors added to the values.
    """
    context = torch.cat([memory, hidden], dim=1)
    lanes, n_query, n_memory = hidden.shape[0], hidden.shape[1], memory.shape[1]
    width = config.d_head
    out = []
    for lane in range(lanes):
        for i in range(n_query):
            for head in range(config.n_head):
                part = slice(head * width, (head + 1) * width)
                query = weights["q_proj.weight"][part] @ hidden[lane, i]
                scores, values = [], []
                for j in range(n_memory + i + 1):
                    key = weights["k_proj.weight"][part] @ context[lane, j]
                    vector = weights["distances"][min(n_memory + i - j, clip), head]
                    scores.append(query @ (key + vector) / math.sqrt(width))
                    values.append(weights["v_proj.weight"][part] @ context[lane, j])
                out.append(torch.stack(scores).softmax(0) @ torch.stack(values))
    return torch.stack(out).view(lanes, n_query, config.n_head * width)


def log_probs_by_the_equations(model: TransformerXL, segments: list[Tensor], mem_len: int) -> Tensor:
    """Compute the whole model segment by segment, with memory as in Section 3.2; log-probabilities [B,L,V]."""
    config, weights = model.config, dict(model.named_parameters())

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (config.d_model,), weights[f"{name}.norm.weight"], weights[f"{name}.norm.bias"], 1e-5)

    memories = [torch.zeros(B, 0, config.d_model, dtype=torch.float64) for _ in range(config.n_layer)]
    parts = []
    for tokens in segments:
        hidden = weights["embedding.tables.0"][tokens] * math.sqrt(config.d_model)
        for number in range(config.n_layer):
            prefix = f"layers.{number}.attention."
            own = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
            memory, entered = memories[number], hidden
            result = attended(own, hidden, memory, config, config.max_distance)
            hidden = norm(hidden + result @ own["o_proj.weight"].T, f"layers.{number}.attention")
            feed = f"layers.{number}.feed_forward"
            inner = (hidden @ weights[f"{feed}.inner.weight"].T + weights[f"{feed}.inner.bias"]).relu()
            hidden = norm(hidden + inner @ weights[f"{feed}.outer.weight"].T + weights[f"{feed}.outer.bias"], feed)
            both = torch.cat([memory, entered.detach()], dim=1)
            memories[number] = both[:, both.shape[1] - min(mem_len, both.shape[1]) :]
        logits = hidden @ weights["embedding.tables.0"].T + weights["softmax.bias"]
        parts.append(logits.log_softmax(-1))
    return torch.cat(parts, dim=1)


def text(length: int) -> tuple[Tensor, Tensor]:
    both = torch.randint(V, (B, length + 1), generator=torch.Generator().manual_seed(1))
    return both[:, :-1], both[:, 1:]


@pytest.mark.parametrize("attention", ["shifted", "reference"])
@pytest.mark.parametrize("max_distance", [0, 3, 10])
@pytest.mark.parametrize("mem_len", [0, 4])
def test_outputs_and_gradients_are_those_of_the_equations(attention, max_distance, mem_len):
    model = model_of(attention=attention, max_distance=max_distance, mem_len=mem_len)
    tokens, targets = text(13)
    segments = list(tokens.split(5, dim=1))
    expected = log_probs_by_the_equations(model, segments, mem_len)
    state, parts = model.init_state(B), []
    for segment in segments:
        log_probs, state = model.log_probs(segment, state)
        parts.append(log_probs)
    found = torch.cat(parts, dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    names = [name for name, _ in model.named_parameters()]
    both = [
        torch.autograd.grad(-each.gather(-1, targets[..., None]).mean(), list(model.parameters()))
        for each in (found, expected)
    ]
    for name, ours, theirs in zip(names, *both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def test_terms_c_and_d_and_the_projection_of_r_are_gone():
    for untied in (False, True):
        names = {name.rpartition(".")[2] for name, _ in model_of(untie_r=untied).named_parameters()}
        assert not {"u", "v"} & names
    assert not any("r_proj" in name for name, _ in model_of().named_parameters())
    parts = parameters_by_part(model_of())
    assert parts["positions"] == 2 * (5 + 1) * 3 * 5  # a vector for every layer, distance and head
    assert "u and v" not in parts


def test_distances_beyond_the_longest_share_its_vector():
    """With long memory, a model with more vectors, whose far vectors are all equal, gives the same losses."""
    short, long = model_of(max_distance=5), model_of(max_distance=30)
    weights = short.state_dict()
    for number in range(SHAW.n_layer):
        name = f"layers.{number}.attention.distances"
        weights[name] = torch.cat([weights[name], weights[name][-1:].expand(25, -1, -1)])
    long.load_state_dict(weights)
    tokens, targets = text(40)
    found, _ = short.nll(tokens, targets, short.init_state(B, mem_len=50))
    expected, _ = long.nll(tokens, targets, long.init_state(B, mem_len=50))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    clamped, _ = long.nll(tokens, targets, long.init_state(B, mem_len=50, clamp_len=5))
    torch.testing.assert_close(clamped, expected, rtol=0, atol=1e-12)


def test_bfloat16_trains_and_reads():
    model = model_of().float()
    tokens, targets = text(9)
    with torch.autocast("cpu", torch.bfloat16):
        loss, state = model.training_loss(tokens, targets, model.init_state(B))
        with torch.no_grad():
            model.eval().nll(tokens, targets, state)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_vectors_that_training_would_never_meet_are_refused():
    settings = {"model.encoding": "shaw", "model.mem_len": "16", "train.segment": "16"}
    validate(small_run("x", **settings, **{"model.max_distance": "31"}))
    for extra in ({"model.max_distance": "32"}, {"model.clamp_len": "9", "model.max_distance": "10"}):
        with pytest.raises(UserError, match=r"model\.max_distance is \d+, but training has no distance above"):
            validate(small_run("x", **settings, **extra))
    with pytest.raises(UserError, match=r"max_distance is -1"):
        build_model(dataclasses.replace(SHAW, max_distance=-1), V)


def test_evaluation_with_longer_memory_than_trained_and_without_any():
    model = model_of(mem_len=0)
    tokens = torch.randint(V, (200,))
    for mem_len in (0, 40):
        assert math.isfinite(txl.evaluate(model, tokens, segment=8, mem_len=mem_len, batch_size=2).nll)
