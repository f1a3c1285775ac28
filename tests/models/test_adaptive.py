"""The adaptive softmax against PyTorch's adaptive softmax, and the tables, projections and bounds of its clusters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from txl.config import TransformerXLConfig
from txl.errors import UserError
from txl.models.adaptive import AdaptiveEmbedding, AdaptiveSoftmax, cluster_bounds, cluster_widths

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


def test_bounds_and_widths():
    assert cluster_bounds(10, ()) == [(0, 10)]
    assert cluster_bounds(10, (3, 7)) == [(0, 3), (3, 7), (7, 10)]
    assert cluster_widths(16, 4, 3) == [16, 4, 1]
    for cutoffs in ((3, 3), (0, 5), (5, 3), (10,), (-1,)):
        with pytest.raises(UserError, match="increase strictly"):
            cluster_bounds(10, cutoffs)
