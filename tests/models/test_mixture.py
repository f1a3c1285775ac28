"""The mixture of softmaxes against its equation, on recurrent models and on Transformers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from txl.config import RecurrentConfig, TransformerXLConfig
from txl.models import build_model
from txl.models.mixture import MixtureOfSoftmaxes

V, B, T = 17, 2, 5
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
    made = build_model(ON[request.param], V).double().eval()
    for parameter in made.parameters():
        parameter.data.normal_(0.0, 0.5)
    return made


def tokens() -> torch.Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


def test_the_equation_written_out(model):
    hidden, _ = model.hidden_states(tokens(), model.init_state(B))
    mixture, width = model.mixture, model.config.d_model
    assert isinstance(mixture, MixtureOfSoftmaxes)
    expected = torch.zeros(B, T, V, dtype=torch.float64)
    for lane in range(B):
        for place in range(T):
            h = hidden[lane, place]
            scores = [math.exp((mixture.prior.weight[k] @ h).item()) for k in range(3)]
            for k in range(3):
                rows = slice(k * width, (k + 1) * width)
                h_k = torch.tanh(mixture.latent.weight[rows] @ h + mixture.latent.bias[rows])
                part = model.softmax.log_probs(h_k[None], model.embedding)[0].exp()
                expected[lane, place] += scores[k] / sum(scores) * part
    log_probs, _ = model.log_probs(tokens(), model.init_state(B))
    torch.testing.assert_close(log_probs.exp(), expected, rtol=0, atol=1e-12)
    targets = tokens().flip(1)
    nll, _ = model.nll(tokens(), targets, model.init_state(B))
    torch.testing.assert_close(nll, -log_probs.gather(-1, targets[..., None]).squeeze(-1), rtol=0, atol=1e-12)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(B, T, dtype=torch.float64))


def test_it_is_of_a_higher_rank_than_one_softmax():
    """The purpose of the mixture: one softmax limits the matrix of log-probabilities to a rank of d_model + 2."""
    ranks = []
    for n_softmax in (1, 3):
        torch.manual_seed(0)
        config = dataclasses.replace(LSTM, d_model=3, d_last=3, d_hidden=3, n_softmax=n_softmax)
        model = build_model(config, V).double().eval()
        for parameter in model.parameters():
            parameter.data.normal_(0.0, 1.0)
        read = torch.randint(V, (B, 40), generator=torch.Generator().manual_seed(1))
        log_probs = model.log_probs(read, model.init_state(B))[0].flatten(0, 1)
        ranks.append(int(torch.linalg.matrix_rank(log_probs, atol=1e-6)))
    assert ranks[0] <= 3 + 2  # bias and normalisation add one each
    assert ranks[1] > 10


def test_every_weight_learns_and_dropout_of_the_parts_is_its_own():
    config = dataclasses.replace(LSTM, dropout_latent=0.5)
    model = build_model(config, V).double().train()
    loss, _ = model.training_loss(tokens(), tokens().flip(1), model.init_state(B))
    assert all(each.abs().sum() > 0 for each in torch.autograd.grad(loss, list(model.parameters())))
    losses = [model.training_loss(tokens(), tokens(), model.init_state(B))[0] for _ in range(2)]
    assert losses[0] != losses[1]
