"""The vanilla Transformer that the paper compares with: segments are independent, positions are absolute.

Al-Rfou et al. (2018) add a learned vector for each position to the input of every layer; Vaswani et al. (2017) add
sinusoids only to the embedding. Al-Rfou et al. train on all positions of a segment. In evaluation they predict only the
last position of a window that slides by one token (`txl.evaluate_sliding`). Every prediction then has a full context,
but the whole window is recomputed for each token.

Auxiliary losses (Al-Rfou et al., "Auxiliary Losses") are options, off by default as in the paper's own baselines. There
are three kinds. The losses of intermediate positions are `train.loss full`: the loss of every position. The other two
need classifiers, used only in training, each a logistic regression over the vocabulary:

- intermediate layers: layer l < n also predicts, for the first l/(2n) of training,
- multiple targets: each predicting layer also predicts the token k + 1 places ahead (k = 1 ...), with a weight of 0.5.

Shapes: B lanes, T tokens of a segment, H heads, D width of a head, E d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn

from txl.attention.backends import causal_attention
from txl.attention.equations import sinusoid
from txl.attention.refused import AttentionRefused
from txl.config import Lengths, ModelConfig, TrainConfig, VanillaConfig
from txl.errors import UserError
from txl.models.costs import LayerCosts, transformer_costs
from txl.models.cross_entropy import linear_cross_entropy
from txl.models.family import FamilyModel, check_targets
from txl.models.language_model import EVERY_TARGET, Objective
from txl.models.layers import Linear, PositionwiseFeedForward, make_dropout
from txl.native.attention import why_not_training


def layer_counts(layer: int, n_layer: int, progress: float) -> bool:
    """Return whether layer `layer` of 1 ... n has a loss at `progress`, the fraction of training done, 0 to 1.

    The loss of an intermediate layer l ends after l/(2n) of training; all have ended after half of the training.
    """
    return layer == n_layer or progress < layer / (2 * n_layer)


class AuxiliaryHeads(nn.Module):
    """Classifiers of the auxiliary losses, one for each layer and target."""

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


@dataclass(frozen=True)
class NoMemory:
    """The state of a model without memory: only the number of lanes."""

    batch_size: int

    @property
    def lengths(self) -> Lengths:
        """Lengths of an empty memory, without window and clamp."""
        return Lengths()

    @property
    def length(self) -> int:
        """0: the state has no positions."""
        return 0

    def detach(self) -> NoMemory:
        """Return the state as it is."""
        return self

    def select(self, lanes: Int[Tensor, " lanes"]) -> NoMemory:
        """Return a state with as many lanes as `lanes` has indices."""
        chosen = lanes.tolist()
        if any(not -self.batch_size <= lane < self.batch_size for lane in chosen):
            raise IndexError(f"lanes are {chosen}, but the state has {self.batch_size}")
        return NoMemory(len(chosen))

    def reset(self, mask: Bool[Tensor, " B"]) -> NoMemory:
        """Return the state itself: it holds nothing to reset."""
        return self

    def filled_with_noise(self) -> NoMemory:
        """Return the state as it is."""
        return self

    def to_tensors(self) -> dict[str, Tensor]:
        """Return a tensor of zeros, one for each lane, which records the number of lanes."""
        return {"lanes": torch.zeros(self.batch_size, dtype=torch.uint8)}


class CausalSelfAttention(nn.Module):
    """Attention sub-layer: scaled dot-product attention in the segment, output projection, residual, LayerNorm."""

    def __init__(self, config: VanillaConfig):
        super().__init__()
        d_attention = config.n_head * config.d_head
        self.n_head, self.d_head = config.n_head, config.d_head
        self.pre_norm, self.dropatt = config.pre_norm, config.dropatt
        self.compiled = config.attention == "compiled"
        self.q_proj = Linear(config.d_model, d_attention, bias=False)
        self.k_proj = Linear(config.d_model, d_attention, bias=False)
        self.v_proj = Linear(config.d_model, d_attention, bias=False)
        self.o_proj = Linear(d_attention, config.d_model, bias=False)
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = make_dropout(config.dropout, config.locked_dropout)
        self.dropout_qkv = make_dropout(config.dropout_qkv, config.locked_dropout)

    def forward(self, hidden: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        """Compute the sub-layer for one segment."""
        context = self.norm(hidden) if self.pre_norm else hidden
        query, key, value = (
            self.dropout_qkv(project(context)).unflatten(-1, (self.n_head, self.d_head))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = causal_attention(query, key, value, self.dropatt if self.training else 0.0, self.compiled)
        output = self.dropout(self.o_proj(attended.flatten(-2)))
        return hidden + output if self.pre_norm else self.norm(hidden + output)


class VanillaLayer(nn.Module):
    """A layer of the vanilla Transformer: attention and feed-forward."""

    def __init__(self, config: VanillaConfig):
        super().__init__()
        self.attention = CausalSelfAttention(config)
        self.feed_forward = PositionwiseFeedForward(config)

    def forward(self, hidden: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        """Compute the layer for one segment."""
        return self.feed_forward(self.attention(hidden))


class VanillaTransformer(FamilyModel[NoMemory]):
    """The vanilla Transformer language model. It has no memory: each call of `nll` or `log_probs` reads one segment."""

    config_class = VanillaConfig
    config: VanillaConfig  # pyright: ignore[reportIncompatibleVariableOverride] (never assigned)
    attention_name = "scaled_dot_product_attention"

    @staticmethod
    def check_training(config: ModelConfig, device: str, dtype: torch.dtype) -> None:
        """Raise `AttentionRefused` if the compiled attention does not support the device, the dtype or this machine."""
        assert isinstance(config, VanillaConfig)
        if config.attention == "compiled" and (reason := why_not_training(device, dtype)):
            raise AttentionRefused("compiled", reason, "auto")

    def __init__(
        self, config: VanillaConfig, vocab_size: int, device: str | None = None, dtype: torch.dtype | None = None
    ):
        super().__init__(config, vocab_size)
        if config.attention == "compiled":
            self.attention_name = config.attention
        self.layers = nn.ModuleList(VanillaLayer(config) for _ in range(config.n_layer))
        if config.encoding == "learned":
            self.positions = nn.Parameter(torch.empty(config.n_layer, config.max_segment, config.d_model))
        if config.n_auxiliary:
            self.auxiliary = AuxiliaryHeads(config, vocab_size)
        self._finish()

    def layer_costs(self, train: TrainConfig) -> LayerCosts:
        """Return `transformer_costs`; compiled attention, and fused attention without `dropatt`, keep no
        probabilities."""
        keeps_scores = self.config.dropatt > 0 and self.attention_name != "compiled"
        return transformer_costs(self.config, train, n_memory=0, queries=2, keeps_scores=keeps_scores)

    def empty_state(self, batch_size: int, lengths: Lengths) -> NoMemory:
        """Return a state for `batch_size` lanes."""
        return NoMemory(batch_size)

    def state_from_tensors(self, tensors: dict[str, Tensor]) -> NoMemory:
        """Return the state from the tensors of `NoMemory.to_tensors`."""
        return NoMemory(len(tensors["lanes"]))

    def hidden_states(self, tokens: Int64[Tensor, "B T"], state: NoMemory) -> tuple[Float[Tensor, "B T E"], NoMemory]:
        """Return h^N of one independent segment; see `LanguageModel.hidden_states`."""
        hidden = self._input(tokens, state)
        for number in range(len(self.layers)):
            hidden = self._layer(number, hidden)
        return hidden, state

    def training_terms(
        self,
        tokens: Int64[Tensor, "B T"],
        targets: Int64[Tensor, "B T"],
        state: NoMemory,
        objective: Objective = EVERY_TARGET,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""], NoMemory]:
        """Return `FamilyModel.training_terms`, with the auxiliary losses added to the second term."""
        if not self.config.n_auxiliary:
            return super().training_terms(tokens, targets, state, objective)
        check_targets(tokens, targets)
        hidden = [self._layer(0, self._input(tokens, state))]
        for number in range(1, len(self.layers)):
            hidden.append(self._layer(number, hidden[-1]))
        loss, penalty = self._terms_of(hidden[-1], targets, objective)
        return loss, penalty + self.auxiliary(hidden, targets, objective, self.dropout_out), state

    def _input(self, tokens: Tensor, state: NoMemory) -> Tensor:
        """Return h^0 [B,T,E]."""
        if not isinstance(state, NoMemory):
            raise UserError("the state belongs to another model; expected one that this model's init_state made")
        n_token = tokens.shape[1]
        if n_token > self.config.max_segment:
            raise UserError(
                f"the segment has {n_token} tokens, but this model's positions end at model.max_segment, "
                f"{self.config.max_segment}; use segments of at most that"
            )
        rows = None
        if self.config.encoding == "sinusoid":  # Vaswani et al. 2017, Sections 3.4, 3.5 and 5.4
            places = torch.arange(n_token, device=tokens.device)
            rows = sinusoid(places, self.config.d_model, self.softmax.bias.dtype)
        return self._embedded(tokens, state, rows)

    def _layer(self, number: int, hidden: Tensor) -> Tensor:
        """Return h^{n+1} from h^n for n = `number`, [B,T,E] each; learned positions are added to the input."""
        if self.config.encoding == "learned":
            hidden = hidden + self.positions[number, : hidden.shape[1]]
        return self.layers[number](hidden)
