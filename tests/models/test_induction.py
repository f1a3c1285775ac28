"""`model.init induction`: what the two heads do before training, what else is drawn, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from txl.attention.equations import sinusoid
from txl.config import TransformerXLConfig, VanillaConfig
from txl.errors import UserError
from txl.models import build_model
from txl.models.initial_weights import previous_token_bias
from txl.models.transformer_xl import RelativeMultiHeadAttention

CONFIG = TransformerXLConfig(
    n_layer=3, d_model=96, n_head=3, d_head=32, d_inner=96, mem_len=64, dropout=0.0, dropatt=0.0,
    pre_norm=True, qk_norm=True, init="induction",
)  # fmt: skip
VOCABULARY = 500


def drawn(seed=0, **changes):
    torch.manual_seed(seed)
    return build_model(dataclasses.replace(CONFIG, **changes), VOCABULARY).eval()


def gain_of_repetition(model):
    """Return by how many nats a token costs less in a second copy of random tokens than in the first."""
    text = torch.randint(VOCABULARY, (8, 48), generator=torch.Generator().manual_seed(3))
    ids = torch.cat([text, text], 1)
    with torch.no_grad():
        nll, _ = model.nll(ids[:, :-1], ids[:, 1:], model.init_state(8))
    return (nll[:, :47].mean() - nll[:, 48:].mean()).item()


@pytest.mark.parametrize(
    ("d_model", "d_head", "least"),
    [(96, 32, 0.8), (128, 32, 0.8), (512, 32, 0.8), (512, 64, 0.8), (64, 16, 0.8), (1024, 16, 0.7), (256, 256, 0.6)],
)
def test_the_bias_attends_to_the_previous_token_and_is_the_minimum(d_model, d_head, least):
    half = d_head // 2
    columns = [*range(half), *range(d_model // 2, d_model // 2 + half)]
    rows = sinusoid(torch.arange(1024), d_model, torch.float64)[:, columns] * 2**0.5
    bias = previous_token_bias(rows).requires_grad_()
    weights = torch.softmax(rows @ bias / d_head**0.5, 0)
    assert weights[1] > least
    (-weights[1].log() + 1e-3 * bias.square().sum()).backward()
    assert bias.grad is not None
    assert bias.grad.abs().max() < 1e-6


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"n_layer": 2, "d_model": 128, "n_head": 4},
        {"d_model": 64, "n_head": 2},
        {"cutoffs": (100,)},
        {"untie_r": True},
    ],
)
def test_a_model_copies_before_any_training(seed, shape):
    gain = gain_of_repetition(drawn(seed, **shape))
    assert gain > 0.05
    assert abs(gain_of_repetition(drawn(seed, init="normal", **shape))) < 0.1 * gain


@pytest.mark.parametrize("untie_r", [False, True])
def test_the_first_head_attends_to_the_previous_token_whatever_the_words(untie_r):
    model, seen = drawn(untie_r=untie_r), []
    first = model.get_submodule("layers.0.attention")
    assert isinstance(first, RelativeMultiHeadAttention)
    real = first.attend

    def attend(operands, scope, dropout=0.0):
        # The value of a key is its position, so that the output is the mean position attended to.
        value = operands.value
        places = torch.arange(value.shape[1], dtype=value.dtype)[None, :, None, None].expand_as(value)
        seen.append(real(operands._replace(value=places), scope, dropout)[..., 0])
        return real(operands, scope, dropout)

    first.attend = attend
    with torch.no_grad():
        model.log_probs(torch.randint(VOCABULARY, (4, 60)), model.init_state(4))
    expected = torch.arange(60.0)[10:] - 1
    assert (seen[0][:, 10:, 0] - expected).abs().mean() < 1
    assert (seen[0][:, 10:, 1] - expected).abs().mean() > 5  # other heads are as drawn


@pytest.mark.parametrize("untie_r", [False, True])
def test_all_other_weights_are_those_of_the_usual_draw(untie_r):
    usual, given = (drawn(init=init, untie_r=untie_r).state_dict() for init in ("normal", "induction"))
    changed = {name for name in usual if not torch.equal(usual[name], given[name])}
    first, second, third = (f"layers.{layer}.attention." for layer in (0, 1, 2))
    v = first + "v" if untie_r else "v"
    shared = set() if untie_r else {second + "r_proj.weight", third + "r_proj.weight"}
    assert changed == shared | {
        v,
        *(first + name for name in ("r_proj.weight", "v_proj.weight", "o_proj.weight")),
        *(second + name for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")),
    }
    for name in changed:
        across = name.endswith("o_proj.weight")
        rest = (slice(None), slice(32, None)) if across else slice(1 if name == v else 32, None)
        assert torch.equal(usual[name][rest], given[name][rest])


def test_the_shared_v_prefers_no_distance_in_the_other_layers():
    model = drawn()
    rows = sinusoid(torch.arange(200), CONFIG.d_model, torch.float32)
    spread = []
    for layer in range(CONFIG.n_layer):
        attention = model.get_submodule(f"layers.{layer}.attention")
        assert isinstance(attention, RelativeMultiHeadAttention)
        with torch.no_grad():
            scores = attention.position(rows)[:, 0] @ model.get_parameter("v")[0] / CONFIG.d_head**0.5
        spread.append((scores.max() - scores.min()).item())
    assert spread[0] > 10
    assert max(spread[1:]) < 0.5


def test_a_seed_gives_the_same_weights_and_a_model_without_memory_is_built():
    for name, value in drawn(5).state_dict().items():
        assert torch.equal(value, drawn(5).state_dict()[name])
    with torch.device("meta"):
        assert all(each.is_meta for each in build_model(CONFIG, VOCABULARY).parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre_norm": False}, "model.pre_norm is false; expected true, or model.init normal"),
        ({"qk_norm": False}, "model.qk_norm is false; expected true, or model.init normal"),
        ({"n_layer": 1}, "model.n_layer is 1; expected 2 or more, or model.init normal"),
        ({"d_head": 31}, "model.d_head is 31; expected an even number from 16 to model.d_model, or model.init normal"),
        ({"d_head": 128}, "model.d_head is 128; expected an even number"),
        ({"d_head": 8}, "model.d_head is 8; expected an even number"),
        ({"tie_embeddings": False}, "model.tie_embeddings is false; expected true, or model.init normal"),
        ({"d_embed": 64}, "model.d_embed is 64; expected model.d_model, or model.init normal"),
        ({"n_softmax": 3}, "model.n_softmax is 3; expected 1, or model.init normal"),
        ({"cutoffs": (100,), "div_val": 2}, "model.div_val is 2; expected 1, or model.init normal"),
        ({"window": 4}, "model.window is 4; expected 16 or more, or model.init normal"),
        ({"clamp_len": 1}, "model.clamp_len is 1; expected 16 or more, or model.init normal"),
    ],
)
def test_what_the_heads_need_is_said(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, **changes).validate()


def test_a_model_without_memory_has_no_such_heads():
    with pytest.raises(UserError, match="model.init is induction; expected normal or xavier without memory"):
        VanillaConfig(init="induction").validate()
