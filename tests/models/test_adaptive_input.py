"""The Transformer of Baevski and Auli (2018) against a whole model built from PyTorch's own modules."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from txl.config import VanillaConfig
from txl.errors import UserError
from txl.models import build_model
from txl.models.vanilla import VanillaTransformer

V, B, T, E = 23, 2, 7, 8
CONFIG = VanillaConfig(
    encoding="sinusoid",
    max_segment=12,
    n_layer=2,
    d_model=E,
    n_head=2,
    d_head=4,
    d_inner=14,
    pre_norm=True,
    init="xavier",
    dropout=0.0,
    cutoffs=(6, 13),
    div_val=2,
    tie_projections="tails",
)


@pytest.fixture
def model() -> VanillaTransformer:
    torch.manual_seed(0)
    made = build_model(CONFIG, V).double().eval()
    assert isinstance(made, VanillaTransformer)
    for name, parameter in made.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data.normal_(0.5, 0.3)  # values that change the result, to show that they are used
    return made


def positions() -> torch.Tensor:
    """Return the sinusoid [T,E], computed position by position: all sines first, then all cosines."""
    rows = torch.zeros(T, E, dtype=torch.float64)
    for place in range(T):
        for pair in range(E // 2):
            angle = place / 10000 ** (2 * pair / E)
            rows[place, pair], rows[place, E // 2 + pair] = math.sin(angle), math.cos(angle)
    return rows


def adaptive_input(model, tokens: torch.Tensor) -> torch.Tensor:
    """Return embeddings [B,T,E]: a row of the band's own width, projected to E features, times sqrt(E)."""
    rows = torch.zeros(*tokens.shape, E, dtype=torch.float64)
    for lane in range(B):
        for place in range(T):
            token = int(tokens[lane, place])
            band = 0 if token < 6 else 1 if token < 13 else 2
            first = (0, 6, 13)[band]
            weight = model.embedding.tables[band][token - first]
            rows[lane, place] = model.embedding.projections[band] @ weight * math.sqrt(E)
    return rows


def layers(model, hidden: torch.Tensor) -> torch.Tensor:
    """Apply PyTorch's pre-norm encoder layers with a causal mask, without a LayerNorm after the last layer."""
    for layer in model.layers:
        theirs = nn.TransformerEncoderLayer(E, 2, 14, 0.0, batch_first=True, norm_first=True).double().eval()
        attention, feed_forward = layer.attention, layer.feed_forward
        with torch.no_grad():
            both = theirs.self_attn
            assert both.in_proj_weight is not None
            both.in_proj_weight.copy_(
                torch.cat([each.weight for each in (attention.q_proj, attention.k_proj, attention.v_proj)])
            )
            both.in_proj_bias.zero_()
            both.out_proj.weight.copy_(attention.o_proj.weight)
            both.out_proj.bias.zero_()
            for ours, named in (
                (attention.norm, theirs.norm1),
                (feed_forward.norm, theirs.norm2),
                (feed_forward.inner, theirs.linear1),
                (feed_forward.outer, theirs.linear2),
            ):
                named.load_state_dict(ours.state_dict())
        hidden = theirs(hidden, src_mask=nn.Transformer.generate_square_subsequent_mask(T).double(), is_causal=True)
    return hidden


def adaptive_softmax(model, hidden: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities [B,T,V]: the head has no projection; a tail uses the projection of its embedding."""
    softmax, embedding = model.softmax, model.embedding
    head_weight = torch.cat([embedding.tables[0], softmax.cluster_weight])
    head = (hidden @ head_weight.T + torch.cat([softmax.bias[:6], softmax.cluster_bias])).log_softmax(-1)
    parts = [head[..., :6]]
    for band, (first, end) in enumerate([(6, 13), (13, V)], start=1):
        logits = hidden @ embedding.projections[band] @ embedding.tables[band].T + softmax.bias[first:end]
        parts.append(head[..., 5 + band, None] + logits.log_softmax(-1))
    return torch.cat(parts, dim=-1)


def test_the_whole_model(model):
    tokens = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = adaptive_softmax(model, layers(model, adaptive_input(model, tokens) + positions()))
        found, _ = model.log_probs(tokens, model.init_state(B))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_the_head_has_no_projection_and_the_tails_have_the_embedding_s():
    names = {name for name, _ in build_model(CONFIG, V).named_parameters()}
    assert not any("own_projections" in name for name in names)
    assert sum("embedding.projections" in name for name in names) == 3


def test_the_first_weights():
    config = dataclasses.replace(CONFIG, d_model=64, d_head=32, d_inner=256)
    torch.manual_seed(0)
    model = build_model(config, 20_000)
    weights = dict(model.named_parameters())
    for name, std in {
        "embedding.tables.2": 16**-0.5,
        "embedding.projections.2": math.sqrt(2 / (64 + 16)),
        "layers.0.attention.q_proj.weight": math.sqrt(2 / (64 + 64)) / math.sqrt(2),
        "layers.0.attention.o_proj.weight": math.sqrt(2 / (64 + 64)),
        "layers.1.feed_forward.inner.weight": math.sqrt(2 / (64 + 256)),
    }.items():
        assert weights[name].std().item() == pytest.approx(std, rel=0.03), name
    assert (weights["layers.0.attention.norm.weight"] == 1).all()
    assert all((parameter == 0).all() for name, parameter in weights.items() if name.endswith("bias"))


def test_dropout_of_the_sum_and_of_the_tails():
    config = dataclasses.replace(CONFIG, dropout_embed=0.5, dropout_tail=0.5)
    model = build_model(config, V).train()
    entered, tails = [], []
    model.dropout_embed.register_forward_hook(lambda _, inputs, output: entered.append((inputs[0], output)))
    model.softmax.dropout_tail.register_forward_hook(lambda _, inputs, __: tails.append(inputs[0].shape[-1]))
    tokens = torch.randint(13, V, (B, T))
    model.nll(tokens, tokens, model.init_state(B))
    before, after = entered[0]
    torch.testing.assert_close(before[0] - model.embedding(tokens)[0], positions().float())
    assert len(entered) == 1
    assert 0.2 < (after == 0).float().mean() < 0.8
    assert tails == [2]  # all targets are in the last band
    eight = build_model(config, V).eval()
    assert torch.equal(*(eight.nll(tokens, tokens, eight.init_state(B))[0] for _ in range(2)))


def test_a_head_without_a_projection_needs_the_hidden_states_width():
    with pytest.raises(UserError, match=r"tie_projections is tails, but model\.d_embed is 6"):
        build_model(dataclasses.replace(CONFIG, d_embed=6), V)
