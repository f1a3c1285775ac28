"""The adaptive softmax against PyTorch's, its clusters, and the mixture of softmaxes against its equation."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from txl.config import RecurrentConfig, TransformerXLConfig
from txl.errors import UserError
from txl.models import build_model
from txl.models.adaptive import AdaptiveEmbedding, AdaptiveSoftmax, MixtureOfSoftmaxes, cluster_bounds

V, E = 31, 12


def build(**changes) -> tuple[AdaptiveEmbedding, AdaptiveSoftmax]:
    torch.manual_seed(0)
    config = TransformerXLConfig(d_model=E, **changes)
    embedding = AdaptiveEmbedding(V, config)
    softmax = AdaptiveSoftmax(embedding, config)
    for module in (embedding, softmax):
        module.double()
        for parameter in module.parameters():
            parameter.data.normal_(0, 0.5)
    return embedding, softmax


@pytest.mark.parametrize("tied", ["all", "all_but_first", "none"])
def test_equals_pytorch_s_adaptive_softmax(tied):
    """AdaptiveLogSoftmaxWithLoss has no tail biases (0 in this test) and no head projection (folded into weights)."""
    embedding, softmax = build(cutoffs=(7, 15), div_val=2, tie_projections=tied)
    softmax.bias.data[7:] = 0
    other = nn.AdaptiveLogSoftmaxWithLoss(E, V, [7, 15], div_value=2.0, head_bias=True).double()

    def projection(cluster: int) -> torch.Tensor:
        own = str(cluster) in softmax.own_projections
        return softmax.own_projections[str(cluster)] if own else embedding.projections[cluster]

    with torch.no_grad():
        head = torch.cat([embedding.tables[0], softmax.cluster_weight])
        other.head.weight.copy_(head @ projection(0).t())
        other.head.bias.copy_(torch.cat([softmax.bias[:7], softmax.cluster_bias]))
        for tail in (1, 2):
            down, out = other.tail[tail - 1].children()
            down.get_parameter("weight").copy_(projection(tail).t())
            out.get_parameter("weight").copy_(embedding.tables[tail])
    hidden = torch.randn(40, E, dtype=torch.float64)
    targets = torch.arange(40) % V
    torch.testing.assert_close(softmax.log_probs(hidden, embedding), other.log_prob(hidden), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        softmax.nll(hidden, targets, embedding), -other(hidden, targets).output, rtol=0, atol=1e-12
    )


def test_own_projections_are_made_only_where_they_are_asked_for():
    assert set(build(cutoffs=(7, 15), div_val=2)[1].own_projections) == set()
    assert set(build(cutoffs=(7, 15), div_val=2, tie_projections="all_but_first")[1].own_projections) == {"0"}
    assert set(build(cutoffs=(7, 15), div_val=2, tie_projections="none")[1].own_projections) == {"0", "1", "2"}
    assert set(build(cutoffs=(7, 15), tie_projections="none")[1].own_projections) == set()  # nothing to project


def test_cluster_i_has_row_i_minus_one_of_the_cluster_weights():
    embedding, softmax = build(cutoffs=(7, 15))
    softmax.cluster_weight.data.zero_()
    softmax.cluster_bias.data[:] = torch.tensor([math.log(3.0), -1e9])
    probs = softmax.log_probs(torch.zeros(1, E, dtype=torch.float64), embedding).exp()[0]
    assert probs[7:15].sum() > 0.05
    assert probs[15:].sum() == 0


@pytest.mark.parametrize("changes", [{}, {"cutoffs": (7, 15)}, {"cutoffs": (7, 15), "div_val": 2}, {"d_embed": 5}])
def test_embedding_is_the_projected_row_times_sqrt_d_model(changes):
    embedding, _ = build(**changes)
    tokens = torch.arange(V).view(1, V)
    for token in range(V):
        cluster = sum(token >= first for first, _ in embedding.bounds[1:])
        row = embedding.cluster_tables()[cluster][token - embedding.bounds[cluster][0]]
        projection = embedding.projection(cluster)
        expected = (row if projection is None else projection @ row) * math.sqrt(E)
        torch.testing.assert_close(embedding(tokens)[0, token], expected, rtol=0, atol=1e-13)


def test_losses_stay_in_their_places_whatever_the_order_of_targets():
    embedding, softmax = build(cutoffs=(7, 15), div_val=2)
    hidden, targets = torch.randn(50, E, dtype=torch.float64), torch.randint(V, (50,))
    order = torch.randperm(50)
    shuffled = softmax.nll(hidden[order], targets[order], embedding)
    torch.testing.assert_close(shuffled, softmax.nll(hidden, targets, embedding)[order], rtol=0, atol=1e-13)


def test_bounds():
    assert cluster_bounds(10, ()) == [(0, 10)]
    assert cluster_bounds(10, (3, 7)) == [(0, 3), (3, 7), (7, 10)]
    for cutoffs in ((3, 3), (0, 5), (5, 3), (10,), (-1,)):
        with pytest.raises(UserError, match="increasing numbers"):
            cluster_bounds(10, cutoffs)


WORDS, LANES, TOKENS = 17, 2, 5
LSTM = RecurrentConfig(kind="lstm", n_layer=2, d_model=6, d_hidden=10, d_last=8, dropout=0.0, n_softmax=3)
ON = {
    "lstm": LSTM,
    "transformer-xl": TransformerXLConfig(
        n_layer=1, d_model=6, n_head=2, d_head=3, d_inner=7, dropout=0.0, n_softmax=3
    ),
    "adaptive": dataclasses.replace(LSTM, cutoffs=(4, 9), div_val=2),
}


@pytest.fixture(params=ON)
def model(request):
    torch.manual_seed(0)
    made = build_model(ON[request.param], WORDS).double().eval()
    for parameter in made.parameters():
        parameter.data.normal_(0.0, 0.5)
    return made


def tokens() -> torch.Tensor:
    return torch.randint(WORDS, (LANES, TOKENS), generator=torch.Generator().manual_seed(1))


def test_the_equation_written_out(model):
    hidden, _ = model.hidden_states(tokens(), model.init_state(LANES))
    mixture, width = model.mixture, model.config.d_model
    assert isinstance(mixture, MixtureOfSoftmaxes)
    expected = torch.zeros(LANES, TOKENS, WORDS, dtype=torch.float64)
    for lane in range(LANES):
        for place in range(TOKENS):
            h = hidden[lane, place]
            scores = [math.exp((mixture.prior.weight[k] @ h).item()) for k in range(3)]
            for k in range(3):
                rows = slice(k * width, (k + 1) * width)
                h_k = torch.tanh(mixture.latent.weight[rows] @ h + mixture.latent.bias[rows])
                part = model.softmax.log_probs(h_k[None], model.embedding)[0].exp()
                expected[lane, place] += scores[k] / sum(scores) * part
    log_probs, _ = model.log_probs(tokens(), model.init_state(LANES))
    torch.testing.assert_close(log_probs.exp(), expected, rtol=0, atol=1e-12)
    targets = tokens().flip(1)
    nll, _ = model.nll(tokens(), targets, model.init_state(LANES))
    torch.testing.assert_close(nll, -log_probs.gather(-1, targets[..., None]).squeeze(-1), rtol=0, atol=1e-12)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(LANES, TOKENS, dtype=torch.float64))


def test_every_weight_learns_and_dropout_of_the_parts_is_its_own():
    config = dataclasses.replace(LSTM, dropout_latent=0.5)
    model = build_model(config, WORDS).double().train()
    loss, _ = model.training_loss(tokens(), tokens().flip(1), model.init_state(LANES))
    assert all(each.abs().sum() > 0 for each in torch.autograd.grad(loss, list(model.parameters())))
    losses = [model.training_loss(tokens(), tokens(), model.init_state(LANES))[0] for _ in range(2)]
    assert losses[0] != losses[1]
