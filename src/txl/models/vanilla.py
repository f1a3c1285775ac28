"""The vanilla Transformer that the paper compares with: every segment on its own, absolute positions.

Al-Rfou et al. (2018) add a learned vector for each position at the input of every layer; Vaswani et al. (2017) add
sinusoids to the embedding alone. The auxiliary losses of Al-Rfou et al. are options (`auxiliary.py`), off by default as
in the paper's own baselines. They predict all positions of a training segment and, when they test, only the last one of
a window that slides by one (`txl.evaluate_sliding`): what a position can see is never cut short there, at the price of
recomputing everything.

Shapes: B lanes, T tokens of a segment, H heads, D width of a head, E d_model.

The auxiliary losses of Al-Rfou et al. (2018, "Auxiliary Losses"), which train their deep Transformers.

Of their three kinds, that of intermediate positions is `train.loss full`, every position's own loss. The others need
classifiers that serve in training alone, each a logistic regression over the vocabulary:

- intermediate layers: layer l < n predicts as well, until l/(2n) of training is done,
- multiple targets: each layer that predicts also predicts the token k + 1 places on (k = 1 ...), with a weight of 0.5.

Shapes: B lanes, T tokens of a segment, E d_model, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl.attention.compiled import compiled_attention
from txl.attention.equations import KeyScope, sinusoid
from txl.config import ModelConfig, TrainConfig, VanillaConfig
from txl.errors import UserError
from txl.models.costs import LayerCosts, transformer_costs
from txl.models.cross_entropy import linear_cross_entropy
from txl.models.decoder import Decoder, PositionwiseFeedForward, check_targets
from txl.models.language_model import EVERY_TARGET, Limit, Objective
from txl.models.layers import Linear, make_dropout
from txl.native.attention import fused_attention
from txl.native.training_attention import why_not_training


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


@dataclass(frozen=True)
class NoMemory:
    """The state of a model that carries nothing from segment to segment: its number of lanes."""

    batch_size: int

    def detach(self) -> NoMemory:
        """Itself."""
        return self

    def select(self, lanes: Tensor) -> NoMemory:
        """As many lanes as `lanes` [B'] has."""
        chosen = lanes.tolist()
        if any(not -self.batch_size <= lane < self.batch_size for lane in chosen):
            raise IndexError(f"lanes {chosen} of a state with {self.batch_size}")
        return NoMemory(len(chosen))

    def reset(self, mask: Tensor) -> NoMemory:
        """Itself: nothing to forget."""
        return self

    def to_tensors(self) -> dict[str, Tensor]:
        """Everything as named tensors, to be saved: a number a lane, which says nothing."""
        return {"lanes": torch.zeros(self.batch_size, dtype=torch.uint8)}


def causal_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float, compiled: bool = False) -> Tensor:
    """Softmax attention to what came before: [B,T,H,D] three times -> [B,T,H,D].

    Args:
        query, key, value: of one segment.
        dropout: probability with which an attention weight is dropped.
        compiled: whether gradients go through the compiled library.
    """
    if dropout == 0 and (fused := fused_attention(query, key, value, None, None, None)) is not None:
        return fused
    if compiled and (dropout > 0 or torch.is_grad_enabled()):
        return compiled_attention(query, key, value, None, None, None, KeyScope(0), dropout)
    heads = (each.transpose(1, 2) for each in (query, key, value))
    return F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=dropout).transpose(1, 2)


class CausalSelfAttention(nn.Module):
    """Scaled dot-product attention within the segment, output projection, residual, LayerNorm."""

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

    def forward(self, hidden: Tensor) -> Tensor:
        """[B,T,E] -> [B,T,E]."""
        context = self.norm(hidden) if self.pre_norm else hidden
        query, key, value = (
            self.dropout_qkv(project(context)).unflatten(-1, (self.n_head, self.d_head))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = causal_attention(query, key, value, self.dropatt if self.training else 0.0, self.compiled)
        output = self.dropout(self.o_proj(attended.flatten(-2)))
        return hidden + output if self.pre_norm else self.norm(hidden + output)


class VanillaLayer(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, config: VanillaConfig):
        super().__init__()
        self.attention = CausalSelfAttention(config)
        self.feed_forward = PositionwiseFeedForward(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B,T,E] -> [B,T,E]."""
        return self.feed_forward(self.attention(hidden))


class VanillaTransformer(Decoder[NoMemory]):
    """The language model. Its state holds nothing; each call of `nll` or `log_probs` is a segment of its own.

    Raises:
        UserError: for a configuration that cannot be built.
    """

    config_class = VanillaConfig
    config: VanillaConfig  # pyright: ignore[reportIncompatibleVariableOverride] (nobody assigns it)
    attention_name = "scaled_dot_product_attention"

    @staticmethod
    def check_device(config: ModelConfig, device: str) -> None:
        """See `Decoder.check_device`: the compiled attention trains on a CPU with a compiler alone."""
        assert isinstance(config, VanillaConfig)
        if config.attention == "compiled" and (reason := why_not_training(device, torch.float32)):
            raise UserError(f"model.attention compiled {reason}, or use --model.attention auto")

    def __init__(self, config: VanillaConfig, vocab_size: int, device: str | None = None):
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
        """See `Decoder.layer_costs`; without dropout on them, the fused attention keeps no probabilities."""
        return transformer_costs(self.config, train, n_memory=0, queries=2, keeps_scores=self.config.dropatt > 0)

    def init_state(
        self, batch_size: int, mem_len: int | None = None, window: Limit = None, clamp_len: Limit = None
    ) -> NoMemory:
        """Nothing, for `batch_size` lanes; see `LanguageModel.init_state`."""
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; expected 1 lane or more")
        self.config.refuse_lengths({"mem_len": mem_len, "window": window, "clamp_len": clamp_len})
        return NoMemory(batch_size)

    def state_from_tensors(self, tensors: dict[str, Tensor]) -> NoMemory:
        """The state that `NoMemory.to_tensors` described."""
        return NoMemory(len(tensors["lanes"]))

    def hidden_states(self, tokens: Tensor, state: NoMemory) -> tuple[Tensor, NoMemory]:
        """h^N of a segment on its own; see `Decoder.hidden_states`."""
        return deque(self._layer_outputs(tokens, state), maxlen=1).pop(), state

    def training_terms(
        self, tokens: Tensor, targets: Tensor, state: NoMemory, objective: Objective = EVERY_TARGET
    ) -> tuple[Tensor, Tensor, NoMemory]:
        """As `Decoder.training_terms`; auxiliary losses are in the second term."""
        if not self.config.n_auxiliary:
            return super().training_terms(tokens, targets, state, objective)
        check_targets(tokens, targets)
        hidden = list(self._layer_outputs(tokens, state))
        loss, penalty = self._terms_of(hidden[-1], targets, objective)
        return loss, penalty + self.auxiliary(hidden, targets, objective, self.dropout_out), state

    def _layer_outputs(self, tokens: Tensor, state: NoMemory) -> Iterator[Tensor]:
        """h^1 ... h^N, [B,T,E] each.

        Raises:
            UserError: as `hidden_states`.
        """
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
        hidden = self._embedded(tokens, state, rows)
        for number, layer in enumerate(self.layers):
            if self.config.encoding == "learned":
                hidden = hidden + self.positions[number, :n_token]
            hidden = layer(hidden)
            yield hidden
