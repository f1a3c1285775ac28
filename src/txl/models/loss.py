"""The loss of a training step, from final hidden states to the number that is minimised.

`training_terms` is the mean over the targets that count, plus regularisers, plus auxiliary losses. The loss of a single
target comes from the model's softmax (`adaptive.py`), from a mixture of softmaxes (`mixture.py`), and in both from
`linear_cross_entropy` (`cross_entropy.py`).

Shapes: B lanes, T tokens of a segment, E d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from txl.config import LossName, ModelConfig, VanillaConfig
from txl.models.cross_entropy import at_least_float32, linear_cross_entropy
from txl.models.layers import Linear

# Number of rows for the targets of each tail cluster of an adaptive softmax.
TailRows = tuple[int, ...]


@dataclass(frozen=True)
class Objective:
    """Arguments of a training step: positions of a segment whose loss counts, progress of training, and sizes."""

    loss: LossName = "full"
    """Positions that count. full: all; half: the more recent half (Section 4.2, Table 6); last: only the last."""
    progress: float = 0.0
    """Fraction of all updates already made, 0 to 1, for schedules of auxiliary losses."""
    tail_rows: TailRows | None = None
    """Number of rows to reserve for the targets of each tail cluster, at least the number of targets there; None: the
    model counts the targets, which waits for the device."""
    lengths: tuple[int, ...] | None = None
    """Lengths of the consecutive segments that the tokens consist of; gradients flow through the memory from each
    segment to the one before (`train.backprop_segments`). None: one segment."""

    def counted(self, n_position: int) -> int:
        """Return the number of most recent positions that count; half of an odd number is rounded up."""
        return {"full": n_position, "half": n_position - n_position // 2, "last": 1}[self.loss]


# Full loss, at the beginning of training.
EVERY_TARGET = Objective()


def training_terms(
    nll: Callable[[Tensor, Tensor], Float[Tensor, "B t"]],
    hidden: Float[Tensor, "B T E"],
    dropped: Float[Tensor, "B T E"],
    targets: Int64[Tensor, "B T"],
    objective: Objective,
    config: ModelConfig,
    squares_dropped: bool,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the mean loss over the targets that count, in nats, and the sum of the regularisers.

    The regularisers are alpha * mean((m h)^2) + beta * mean((h_t - h_{t-1})^2) over the final hidden states h of all
    positions, including positions whose loss does not count. m is the dropout mask of h in a recurrent model (Merity et
    al. 2017, Section 4.5, and their code) and 1 in a Transformer (the authors' Penn Treebank code).

    Args:
        nll: function of final hidden states after dropout and of their targets; it returns the loss of each target.
        hidden, dropped: final hidden states before and after dropout.
        targets: next token of each position.
        objective: positions that count.
        config: configuration with the rates alpha and beta.
        squares_dropped: True if m is the dropout mask.
    """
    final = at_least_float32(hidden)
    penalty = final.new_zeros(())
    if config.activation_reg > 0:
        squared = at_least_float32(dropped) if squares_dropped else final
        penalty = penalty + config.activation_reg * squared.square().mean()
    if config.temporal_reg > 0 and targets.shape[1] > 1:
        penalty = penalty + config.temporal_reg * final.diff(dim=1).square().mean()
    # The softmax is the largest product of a small model: it is computed only where the loss counts.
    counted = objective.counted(targets.shape[1])
    return nll(dropped[:, -counted:], targets[:, -counted:]).mean(), penalty


def layer_counts(layer: int, n_layer: int, progress: float) -> bool:
    """Return whether layer `layer` of 1 ... n has a loss at `progress`, the fraction of training done, 0 to 1.

    The loss of an intermediate layer l ends after l/(2n) of training; all have ended after half of the training.
    """
    return layer == n_layer or progress < layer / (2 * n_layer)


class AuxiliaryHeads(nn.Module):
    """Classifiers of the auxiliary losses of Al-Rfou et al. (2018, "Auxiliary Losses"), one for each layer and target.

    They are options, off by default as in the paper's own baselines. There are three kinds. The losses of intermediate
    positions are `train.loss full`: the loss of every position. The other two need classifiers, used only in training,
    each a logistic regression over the vocabulary:

    - intermediate layers: layer l < n also predicts, for the first l/(2n) of training,
    - multiple targets: each predicting layer also predicts the token k + 1 places ahead (k = 1 ...), with a weight of
      0.5.
    """

    def __init__(self, config: VanillaConfig, vocab_size: int):
        super().__init__()
        self.n_layer, self.weight = config.n_layer, config.extra_target_weight
        heads = {}
        for layer in range(1 if config.layer_losses else config.n_layer, config.n_layer + 1):
            # The model's own softmax predicts the last layer's first target.
            for ahead in range(2 if layer == config.n_layer else 1, config.n_target + 1):
                heads[f"{layer}_{ahead}"] = Linear(config.d_model, vocab_size)
        self.heads = nn.ModuleDict(heads)

    def forward(
        self,
        hidden: Sequence[Float[Tensor, "B T E"]],
        targets: Int64[Tensor, "B T"],
        objective: Objective,
        dropout: nn.Module,
    ) -> Float[Tensor, ""]:
        """Return the sum over layers l and targets k of w_k times the mean loss, in nats.

        w_1 is 1 and the other w_k are `extra_target_weight`. Targets after the segment's end do not enter the mean.

        Args:
            hidden: output of each layer, lowest first.
            targets: the next token of each position.
            objective: positions that count, and the progress of training.
            dropout: dropout applied to hidden states before a classifier.
        """
        n_position = targets.shape[1]
        first = n_position - objective.counted(n_position)
        total = hidden[-1].new_zeros((), dtype=torch.promote_types(hidden[-1].dtype, torch.float32))
        for name, head in self.heads.items():
            assert isinstance(head, Linear)
            layer, ahead = map(int, name.split("_"))
            end = n_position - (ahead - 1)  # the k-th target of position t is targets[t + k - 1]
            if end <= first or not layer_counts(layer, self.n_layer, objective.progress):
                continue
            states = dropout(hidden[layer - 1][:, first:end]).flatten(0, 1)
            nll = linear_cross_entropy(
                states, head.weight, head.bias, targets[:, first + ahead - 1 :].flatten(), compiled=False
            )
            total = total + (1.0 if ahead == 1 else self.weight) * nll.mean()
        return total
