"""The auxiliary losses of Al-Rfou et al. (2018, "Auxiliary Losses"), which train their deep Transformers.

Of their three kinds, that of intermediate positions is `train.loss full`, every position's own loss. The others need
classifiers that serve in training alone, each a logistic regression over the vocabulary:

- intermediate layers: layer l < n predicts as well, until l/(2n) of training is done,
- multiple targets: each layer that predicts also predicts the token k + 1 places on (k = 1 ...), with a weight of 0.5.

Shapes: B lanes, T tokens of a segment, E d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from txl.config import VanillaConfig
from txl.models.cross_entropy import linear_cross_entropy
from txl.models.linear import Linear
from txl.models.objective import Objective


def layer_counts(layer: int, n_layer: int, progress: float) -> bool:
    """Whether layer `layer` of 1 ... n still has a loss when `progress` of training, 0 to 1, is done.

    An intermediate layer's ends after l/(2n); none is left after half of the training.
    """
    return layer == n_layer or progress < layer / (2 * n_layer)


class AuxiliaryHeads(nn.Module):
    """The classifiers, and what they add to the loss."""

    def __init__(self, config: VanillaConfig, vocab_size: int):
        super().__init__()
        self.n_layer, self.weight = config.n_layer, config.extra_target_weight
        heads = {}
        for layer in range(1 if config.layer_losses else config.n_layer, config.n_layer + 1):
            # The last layer's first target is the model's own.
            for ahead in range(2 if layer == config.n_layer else 1, config.n_target + 1):
                heads[f"{layer}_{ahead}"] = Linear(config.d_model, vocab_size)
        self.heads = nn.ModuleDict(heads)

    def forward(self, hidden: Sequence[Tensor], targets: Tensor, objective: Objective, dropout: nn.Module) -> Tensor:
        """Sum over layers l and targets k of w_k times the mean loss, w_1 = 1 and w_k = `extra_target_weight`: nats.

        A target beyond the segment's last is not known there, and left out of its mean.

        Args:
            hidden: what comes out of each layer, [B,T,E], lowest first.
            targets: int64 [B,T], the next token of each position.
            objective: which positions count, and how far training is.
            dropout: of hidden states before a classifier.
        """
        n_position = targets.shape[1]
        first = n_position - objective.counted(n_position)
        total = hidden[-1].new_zeros((), dtype=torch.promote_types(hidden[-1].dtype, torch.float32))
        for name, head in self.heads.items():
            assert isinstance(head, Linear)
            layer, ahead = map(int, name.split("_"))
            end = n_position - (ahead - 1)  # position t's k-th target is the next token of position t + k - 1
            if end <= first or not layer_counts(layer, self.n_layer, objective.progress):
                continue
            states = dropout(hidden[layer - 1][:, first:end]).flatten(0, 1)
            nll = linear_cross_entropy(states, head.weight, head.bias, targets[:, first + ahead - 1 :].flatten())
            total = total + (1.0 if ahead == 1 else self.weight) * nll.mean()
        return total
