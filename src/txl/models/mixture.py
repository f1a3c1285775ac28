"""The mixture of softmaxes (Yang et al. 2017), an output layer for any model.

P(x | h) = sum_k pi_k softmax(W h_k)_x with h_k = tanh(W_k h) and pi = softmax(W_pi h): Equation 3 of the paper. All K
softmaxes share the output tables, which may be those of a plain or an adaptive softmax.

Shapes: N tokens, E_h width of a model's hidden states, E d_model, K softmaxes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from txl.models.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from txl.models.cross_entropy import at_least_float32


class MixtureOfSoftmaxes(nn.Module):
    """The weights pi of the K softmaxes in a mixture, and their hidden states h_k."""

    def __init__(self, d_hidden: int, d_model: int, n_softmax: int, dropout: nn.Module):
        super().__init__()
        self.prior = nn.Linear(d_hidden, n_softmax, bias=False)
        self.latent = nn.Linear(d_hidden, n_softmax * d_model)
        self.n_softmax, self.dropout = n_softmax, dropout

    def nll(
        self,
        hidden: Float[Tensor, "B T E_h"],
        targets: Int64[Tensor, "B T"],
        softmax: AdaptiveSoftmax,
        embedding: AdaptiveEmbedding,
        tail_rows: Sequence[int] | None = None,
    ) -> Float[Tensor, "B T"]:
        """Return the negative log-likelihood of each target in nats; `tail_rows` as in `Objective`."""
        # The K softmaxes are K times as many rows of one softmax; then -log sum_k exp(log pi_k - nll_k).
        repeated = targets[..., None].expand(*targets.shape, self.n_softmax)
        rows = None if tail_rows is None else [self.n_softmax * count for count in tail_rows]
        nll = softmax.nll(self._parts(hidden).flatten(0, -2), repeated.flatten(), embedding, rows)
        return -(self._log_prior(hidden) - nll.view_as(repeated)).logsumexp(dim=-1)

    def log_probs(
        self, hidden: Float[Tensor, "B T E_h"], softmax: AdaptiveSoftmax, embedding: AdaptiveEmbedding
    ) -> Float[Tensor, "B T V"]:
        """Return log-probabilities over the whole vocabulary, computed one softmax at a time."""
        log_prior, mixed = self._log_prior(hidden), None
        for part, log_weight in zip(self._parts(hidden).unbind(-2), log_prior.unbind(-1), strict=True):
            log_probs = softmax.log_probs(part.flatten(0, 1), embedding).unflatten(0, part.shape[:2])
            log_probs = log_probs + log_weight[..., None]
            mixed = log_probs if mixed is None else torch.logaddexp(mixed, log_probs)
        assert mixed is not None  # n_softmax is 1 or more
        return mixed

    def _log_prior(self, hidden: Tensor) -> Tensor:
        """Return log pi: [B,T,E_h] -> [B,T,K]."""
        return at_least_float32(self.prior(hidden)).log_softmax(dim=-1)

    def _parts(self, hidden: Tensor) -> Tensor:
        """Return h_k: [B,T,E_h] -> [B,T,K,E]."""
        return self.dropout(torch.tanh(self.latent(hidden))).unflatten(-1, (self.n_softmax, -1))
