"""The vanilla Transformer: its equations, its behaviour as a `LanguageModel`, and evaluation by a sliding window."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.conftest import small_run

import txl
from txl.attention.equations import sinusoid
from txl.config import TransformerXLConfig, VanillaConfig
from txl.errors import UserError
from txl.models import build_model
from txl.models.vanilla import NoMemory, VanillaTransformer
from txl.native.build import why_not

V, B, T = 17, 3, 9
LEARNED = VanillaConfig(
    encoding="learned", max_segment=12, n_layer=2, d_model=10, n_head=2, d_head=6, d_inner=14, dropout=0.2
)
VARIANTS = {
    "learned": LEARNED,
    "sinusoid": dataclasses.replace(LEARNED, encoding="sinusoid"),
    "pre-norm": dataclasses.replace(LEARNED, pre_norm=True),
    "adaptive": dataclasses.replace(LEARNED, cutoffs=(5, 9), div_val=2),
}


@pytest.fixture(params=VARIANTS, scope="module")
def model(request) -> VanillaTransformer:
    torch.manual_seed(0)
    made = build_model(VARIANTS[request.param], V).double().eval()
    assert isinstance(made, VanillaTransformer)
    for parameter in made.parameters():
        parameter.data.normal_(0.0, 0.3)
    return made


def text(length: int = T) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randint(V, (B, length + 1), generator=torch.Generator().manual_seed(1))
    return both[:, :-1], both[:, 1:]


def test_the_equations_written_out(model):
    """The expected values are computed query by query and head by head."""
    config, tokens = model.config, text()[0]
    weights = dict(model.named_parameters())
    hidden = model.embedding(tokens)
    if config.encoding == "sinusoid":
        hidden = hidden + sinusoid(torch.arange(T), config.d_model, torch.float64)
    for number in range(config.n_layer):
        layer = f"layers.{number}."
        if config.encoding == "learned":
            hidden = hidden + weights["positions"][number, :T]

        def norm(x, name, layer=layer):
            return torch.nn.functional.layer_norm(
                x, (config.d_model,), weights[f"{layer}{name}.norm.weight"], weights[f"{layer}{name}.norm.bias"], 1e-5
            )

        context = norm(hidden, "attention") if config.pre_norm else hidden
        q, k, v = (
            (context @ weights[f"{layer}attention.{name}_proj.weight"].T).view(B, T, config.n_head, config.d_head)
            for name in "qkv"
        )
        heads = torch.zeros(B, T, config.n_head, config.d_head, dtype=torch.float64)
        for head in range(config.n_head):
            for i in range(T):
                scores = (k[:, : i + 1, head] @ q[:, i, head, :, None]).squeeze(-1) / math.sqrt(config.d_head)
                heads[:, i, head] = (scores.softmax(-1)[..., None] * v[:, : i + 1, head]).sum(1)
        hidden = hidden + heads.flatten(2) @ weights[f"{layer}attention.o_proj.weight"].T
        hidden = hidden if config.pre_norm else norm(hidden, "attention")
        inner = norm(hidden, "feed_forward") if config.pre_norm else hidden
        inner = inner @ weights[f"{layer}feed_forward.inner.weight"].T + weights[f"{layer}feed_forward.inner.bias"]
        outer = inner.relu() @ weights[f"{layer}feed_forward.outer.weight"].T
        hidden = hidden + outer + weights[f"{layer}feed_forward.outer.bias"]
        hidden = hidden if config.pre_norm else norm(hidden, "feed_forward")
    found, _ = model.hidden_states(tokens, model.init_state(B))
    torch.testing.assert_close(found, hidden, rtol=0, atol=1e-10)


def test_the_state_is_a_value_without_memory(model):
    state = model.init_state(B, mem_len=0, window="none")
    assert state.select(torch.tensor([2, 0])) == NoMemory(2)
    assert state.reset(torch.tensor([True, False, True])) == state.detach() == state
    assert model.state_from_tensors(state.to_tensors()) == state
    with pytest.raises(IndexError):
        state.select(torch.tensor([3]))
    for lengths in ({"mem_len": 1}, {"window": 4}, {"clamp_len": 2}):
        with pytest.raises(UserError, match="no memory"):
            model.init_state(B, **lengths)
    with pytest.raises(UserError, match="another model"):
        model.nll(*text(), txl.build_model(TransformerXLConfig(n_layer=2, d_model=10), V).init_state(B))


def test_a_segment_beyond_the_positions_is_refused(model):
    tokens, targets = text(13)
    with pytest.raises(UserError, match=r"13 tokens.* 12"):
        model.nll(tokens, targets, model.init_state(B))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.mem_len": "4"}, r"model\.mem_len is 4.*Section 3\.3"),
        ({"eval.mem_len": "4"}, r"eval\.mem_len is 4"),
        ({"model.window": "1"}, r"model\.window"),
        ({"train.segment": "13"}, r"train\.segment is 13; expected at most model\.max_segment, 12"),
        ({"eval.segment": "13"}, r"eval\.segment"),
        ({"model.max_segment": "0"}, r"max_segment"),
        ({"model.attention": "shifted"}, r"model\.attention is shifted; expected auto or compiled"),
    ],
)
def test_configurations_that_cannot_work(changes, message):
    settings = {"model.encoding": "learned", "model.max_segment": "12", "model.mem_len": "0", "eval.mem_len": "0"}
    settings |= {"eval.window": "none", "eval.segment": "12", "train.segment": "12"}
    with pytest.raises(UserError, match=message):
        from txl.config import validate

        validate(small_run("x", **(settings | changes)))


@pytest.mark.skipif(why_not() is not None, reason=f"no compiled library: {why_not()}")
def test_compiled_attention_trains_the_same_model():
    tokens, targets = text()
    found = []
    for attention in ("compiled", "auto"):
        torch.manual_seed(0)
        model = build_model(dataclasses.replace(LEARNED, dropout=0.0, attention=attention), V).train()
        nll, _ = model.nll(tokens, targets, model.init_state(B))
        found.append([nll, *torch.autograd.grad(nll.mean(), list(model.parameters()))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_window_slides_by_one(model):
    tokens = torch.randint(V, (30,), generator=torch.Generator().manual_seed(2))
    result = txl.evaluate_sliding(model, tokens, context=8, batch_size=5)
    expected = []
    for target in range(1, 30):
        window = tokens[max(0, target - 8) : target][None]
        expected.append(-model.log_probs(window, model.init_state(1))[0][0, -1, tokens[target]].item())
    assert result.nll == pytest.approx(sum(expected) / 29, abs=1e-10)
    assert (result.tokens, result.dropped, result.segment, result.sliding) == (29, 0, 8, True)
    short = txl.evaluate_sliding(model, tokens, context=12, max_tokens=5)
    assert (short.tokens, short.nll) == (4, pytest.approx(sum(expected[:4]) / 4, abs=1e-10))


def test_a_sliding_window_at_a_temperature(model):
    tokens = torch.randint(V, (30,), generator=torch.Generator().manual_seed(3))
    cached = txl.ContinuousCache(model, 4, 0.3, 0.2).eval()
    for each in (model, cached):
        result = txl.evaluate_sliding(each, tokens, context=6, batch_size=5, temperature=1.4)
        total = 0.0
        for target in range(1, 30):
            window = tokens[max(0, target - 6) : target + 1][None]
            losses, _ = each.nll_at(window[:, :-1], window[:, 1:], each.init_state(1), 1.4)
            total += losses[0, -1].item()
        assert (result.nll, result.temperature) == (pytest.approx(total / 29, abs=1e-6), 1.4)
        assert result.nll != pytest.approx(txl.evaluate_sliding(each, tokens, context=6).nll, abs=1e-3)


def test_a_model_with_memory_slides_as_well():
    """The loss equals the loss of an evaluation in segments, with memory for the whole window."""
    torch.manual_seed(0)
    model = build_model(TransformerXLConfig(n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=9, mem_len=7), V).double()
    tokens = torch.randint(V, (40,))
    slid = txl.evaluate_sliding(model, tokens, context=8)
    read = txl.evaluate(model, tokens, segment=5, mem_len=7, window=8, batch_size=1)
    assert slid.nll == pytest.approx(read.nll, abs=1e-10)  # with one layer, the reach is the window


@pytest.mark.parametrize("arguments", [{"context": 0}, {"context": 3, "batch_size": 0}, {"context": 13}])
def test_windows_that_cannot_be(model, arguments):
    with pytest.raises(UserError):
        txl.evaluate_sliding(model, torch.randint(V, (40,)), **arguments)


def test_generation_reads_what_fits_anew_for_every_token(model, monkeypatch):
    prompt = [3, 1, 4, 1, 5]
    greedy = [
        int(step) for step in txl.generate_tokens(model, prompt, max_tokens=12, sampling=txl.Sampling(temperature=0))
    ]
    read = list(prompt)
    for token in greedy:
        log_probs, _ = model.log_probs(torch.tensor([read[-12:]]), model.init_state(1))
        assert token == int(log_probs[0, -1].argmax())
        read.append(token)
