"""The vanilla Transformer that the paper compares with: segments are independent, positions are absolute.

Al-Rfou et al. (2018) add a learned vector for each position to the input of every layer; Vaswani et al. (2017) add
sinusoids only to the embedding. In evaluation Al-Rfou et al. predict only the last position of a window that slides by
one token (`txl.evaluate_sliding`).

Shapes: B lanes, T tokens of a segment, H heads, D width of a head, E d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn

from txl.attention.backends import causal_attention, check_compiled
from txl.attention.equations import sinusoid
from txl.config import Lengths, ModelConfig, VanillaConfig
from txl.errors import UserError
from txl.models.family import FamilyModel
from txl.models.language_model import State, check_targets
from txl.models.layers import Linear, PositionwiseFeedForward, make_dropout
from txl.models.loss import EVERY_TARGET, Objective, at_least_float32, linear_cross_entropy


@dataclass(frozen=True)
class NoMemory(State):
    """The state of a model without memory: only the number of lanes."""

    n_lane: int

    @property
    def batch_size(self) -> int:
        """Number of lanes B."""
        return self.n_lane

    @property
    def length(self) -> int:
        """0: the state has no positions."""
        return 0

    def select(self, lanes: Int[Tensor, " lanes"]) -> NoMemory:
        """Return a state with as many lanes as `lanes` has indices."""
        chosen = lanes.tolist()
        if any(not -self.n_lane <= lane < self.n_lane for lane in chosen):
            raise IndexError(f"lanes are {chosen}, but the state has {self.n_lane}")
        return NoMemory(len(chosen))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return a tensor of zeros, one for each lane, which records the number of lanes."""
        return {"lanes": torch.zeros(self.n_lane, dtype=torch.uint8)}


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
        context = self.norm(hidden) if self.pre_norm else hidden  # no memory: keys are those of the segment
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


def layer_counts(layer: int, n_layer: int, progress: float) -> bool:
    """Return whether layer l of 1 ... n has a loss at `progress`, the fraction of training done: until l/(2n)."""
    return layer == n_layer or progress < layer / (2 * n_layer)


class AuxiliaryHeads(nn.Module):
    """Classifiers of the auxiliary losses of Al-Rfou et al. (2018, "Auxiliary Losses"), one for each layer and target.

    Off by default as in the paper's own baselines, and used only in training. Layer l < n also predicts, for the first
    l/(2n) of training; each predicting layer also predicts the token k + 1 places ahead (k = 1 ...), with a weight of
    0.5 (`extra_target_weight`). The losses of intermediate positions are those of `train.loss full`.
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
        """Return the sum over layers and targets of a weight times the mean loss, from each layer's output.

        Targets after the segment's end do not enter the mean; `dropout` applies before each classifier.
        """
        n_position = targets.shape[1]
        first = n_position - objective.counted(n_position)
        total = at_least_float32(hidden[-1].new_zeros(()))
        for name, head in self.heads.items():
            assert isinstance(head, Linear)
            layer, ahead = map(int, name.split("_"))
            end = n_position - (ahead - 1)  # the k-th target of position t is targets[t + k - 1]
            if end <= first or not layer_counts(layer, self.n_layer, objective.progress):
                continue
            states = dropout(hidden[layer - 1][:, first:end]).flatten(0, 1)
            wanted = targets[:, first + ahead - 1 :].flatten()
            nll = linear_cross_entropy(states, head.weight, head.bias, wanted, compiled=False)
            total = total + (1.0 if ahead == 1 else self.weight) * nll.mean()
        return total


class VanillaTransformer(FamilyModel[NoMemory]):
    """The vanilla Transformer language model: each call of `nll` or `log_probs` reads one segment on its own."""

    config_class = VanillaConfig
    config: VanillaConfig  # pyright: ignore[reportIncompatibleVariableOverride] (never assigned)
    attention_name = "scaled_dot_product_attention"

    @staticmethod
    def check_training(config: ModelConfig, device: str, dtype: torch.dtype) -> None:
        """Raise `AttentionRefused` if the compiled attention does not support the device, the dtype or this machine."""
        assert isinstance(config, VanillaConfig)
        if config.attention == "compiled":
            check_compiled(device, dtype)

    def __init__(
        self, config: VanillaConfig, vocab_size: int, device: str | None = None, dtype: torch.dtype | None = None
    ):
        super().__init__(config, vocab_size)
        if config.attention == "compiled":
            self.attention_name = config.attention
        self.layers = nn.ModuleList(VanillaLayer(config) for _ in range(config.n_layer))
        if config.encoding == "learned":
            self.positions = nn.Parameter(torch.empty(config.n_layer, config.max_segment, config.d_model))
        self.auxiliary = AuxiliaryHeads(config, vocab_size) if config.n_auxiliary else None
        self._finish()

    def empty_state(self, batch_size: int, lengths: Lengths) -> NoMemory:
        """Return a state for `batch_size` lanes."""
        return NoMemory(batch_size)

    def state_from_tensors(self, tensors: dict[str, Tensor]) -> NoMemory:
        """Return the state from the tensors of `NoMemory.to_tensors`."""
        return NoMemory(len(tensors["lanes"]))

    def hidden_states(self, tokens: Int64[Tensor, "B T"], state: NoMemory) -> tuple[Float[Tensor, "B T E"], NoMemory]:
        """Return h^N of one independent segment; see `LanguageModel.hidden_states`."""
        return self._layer_outputs(tokens, state, all_layers=False)[-1], state

    def training_terms(
        self, tokens: Tensor, targets: Tensor, state: NoMemory, objective: Objective = EVERY_TARGET
    ) -> tuple[Tensor, Tensor, NoMemory]:
        """Return the mean loss, and the regularisers with the auxiliary losses; see `LanguageModel.training_terms`."""
        if self.auxiliary is None:
            return super().training_terms(tokens, targets, state, objective)
        check_targets(tokens, targets)
        outputs = self._layer_outputs(tokens, state, all_layers=True)
        loss, penalty = self._terms(outputs[-1], targets, objective)
        return loss, penalty + self.auxiliary(outputs, targets, objective, self.dropout_out), state

    def _layer_outputs(self, tokens: Tensor, state: NoMemory, all_layers: bool) -> list[Tensor]:
        """Return the outputs [B,T,E] of all layers, which auxiliary losses need, or of the last alone."""
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
        hidden, outputs = self._embedded(tokens, state, rows), []
        for number, layer in enumerate(self.layers):
            if self.config.encoding == "learned":  # Al-Rfou et al. 2018: added to the input of every layer
                hidden = hidden + self.positions[number, :n_token]
            hidden = layer(hidden)
            if all_layers or number == len(self.layers) - 1:
                outputs.append(hidden)
        return outputs
