"""What all models of this project share but their layers: embedding, softmax, losses, initialisation, feed-forward.

Shapes: B lanes, T tokens of a segment, E d_model, V vocabulary, N tokens of all lanes.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl.config import ModelConfig, TrainConfig, TransformerConfig
from txl.errors import UserError
from txl.models.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from txl.models.costs import LayerCosts
from txl.models.cross_entropy import at_least_float32, nll_at_temperature
from txl.models.language_model import EVERY_TARGET, LanguageModel, Objective, StateT
from txl.models.layers import Linear, make_dropout, word_mask
from txl.models.mixture import MixtureOfSoftmaxes


class Decoder(LanguageModel[StateT]):
    """A language model that is given by its hidden states.

    A subclass builds its layers and then calls `_finish`.

    Raises:
        UserError: for a configuration that cannot be built.
    """

    config_class: ClassVar[type[ModelConfig]]
    """The configuration of its family."""
    attention_name: str
    attention_note: str | None = None
    """One line about the choice of attention that a user should read when training begins."""
    config: ModelConfig
    compiles_any_length: bool | None = None
    """Whether compiled layers are made for segments of any length from the first; None: when a second one comes."""
    regularises_dropped = False
    """Whether `activation_reg` squares the final hidden states after their dropout, or before it."""

    def __init__(self, config: ModelConfig, vocab_size: int, device: str | None = None):
        super().__init__()
        config.validate()
        if vocab_size < 1:
            raise UserError(f"the vocabulary has {vocab_size} tokens; a model needs at least 1")
        self.config = dataclasses.replace(config)
        self.vocab_size = vocab_size
        self.embedding = AdaptiveEmbedding(vocab_size, config)
        self.context = config.context

    @abstractmethod
    def layer_costs(self, train: TrainConfig) -> LayerCosts:
        """Bytes that the layers take while they train."""

    @staticmethod
    def check_device(config: ModelConfig, device: str) -> None:
        """Refuse a configuration that cannot train on a device.

        Raises:
            UserError: if it cannot.
        """

    def _finish(self, d_last: int | None = None) -> None:
        """What comes after the layers, and the first weights of everything; `d_last` is the width of h^N, E if None."""
        config = self.config
        self.softmax = AdaptiveSoftmax(self.embedding, config)
        self.mixture = None
        if config.n_softmax > 1:
            dropout = self._dropout(config.dropout_latent)
            self.mixture = MixtureOfSoftmaxes(d_last or config.d_model, config.d_model, config.n_softmax, dropout)
        self.dropout_embed = self._dropout(self.config.dropout_embed)
        self.dropout_out = self._dropout(self.config.dropout_out)
        self.init_weights()

    def _dropout(self, p: float | None) -> nn.Module:
        """Dropout of rate `p`, or of the configuration's general rate."""
        return make_dropout(self.config.dropout if p is None else p, self.config.locked_dropout)

    @torch.no_grad()
    def init_weights(self) -> None:
        """The first weights: the authors' (everything normal, biases 0, LayerNorm around 1), or `_init_xavier`."""
        if self.config.first_weights == "xavier":
            self._init_xavier()
            return
        std, proj_std = self.config.init_std, self.config.proj_init_std
        for name, parameter in self.named_parameters():
            parent = self.get_submodule(name.rpartition(".")[0])
            if isinstance(parent, nn.LayerNorm) and name.endswith("weight"):
                parameter.normal_(1.0, std)
            elif name.endswith("bias"):
                parameter.zero_()
            elif "projections" in name:
                parameter.normal_(0.0, proj_std)
            else:
                parameter.normal_(0.0, std)

    def _init_xavier(self) -> None:
        """As Baevski and Auli's code: Xavier-uniform matrices, embeddings N(0, 1/d_i), biases 0, LayerNorm 1.

        The queries', keys' and values' have a gain of 1/sqrt(2), as one matrix for all three would nearly give.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif ".norm." in name:
                parameter.fill_(1.0)
            elif "tables." in name or "positions" in name:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            else:
                in_attention = name.rpartition(".")[0].endswith(("q_proj", "k_proj", "v_proj"))
                nn.init.xavier_uniform_(parameter, gain=2**-0.5 if in_attention else 1.0)

    @abstractmethod
    def hidden_states(self, tokens: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """h^N, and the state for the next segment: [B,T] int64 -> [B,T,E].

        Raises:
            UserError: for tokens that do not fit the state, or a state of another model.
        """

    def _embedded(self, tokens: Tensor, state: StateT, positions: Tensor | None = None) -> Tensor:
        """h^0: [B,T] -> [B,T,E]; `positions` [T,E], if any, are added before the dropout (Vaswani et al., 5.4)."""
        if tokens.shape[0] != state.batch_size:
            raise UserError(f"tokens have {tokens.shape[0]} lanes, the state has {state.batch_size}; expected the same")
        if tokens.shape[1] == 0:
            raise UserError("tokens have no positions; expected at least one in each lane")
        hidden = self.embedding(tokens)
        if self.training and self.config.dropout_words > 0:
            mask = word_mask(self.vocab_size, self.config.dropout_words, tokens.device)
            hidden = hidden * mask[tokens][..., None].to(hidden.dtype)
        return self.dropout_embed(hidden if positions is None else hidden + positions.to(hidden.dtype))

    def nll(self, tokens: Tensor, targets: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Negative log-likelihood of each target; see `LanguageModel.nll`."""
        check_targets(tokens, targets)
        hidden, state = self.hidden_states(tokens, state)
        return self.nll_of(hidden, targets), state

    def last_nll(self, tokens: Tensor, target: Tensor, state: StateT, temperature: float = 1.0) -> Tensor:
        """See `LanguageModel.last_nll`; the softmax is that of the last position alone."""
        hidden, _ = self.hidden_states(tokens, state)
        if temperature != 1:
            return nll_at_temperature(self.log_probs_of(hidden[:, -1:]), target[:, None], temperature).squeeze(1)
        return self.nll_of(hidden[:, -1:], target[:, None]).squeeze(1)

    def training_terms(
        self, tokens: Tensor, targets: Tensor, state: StateT, objective: Objective = EVERY_TARGET
    ) -> tuple[Tensor, Tensor, StateT]:
        """Mean loss and the activation regularisers' part; see `LanguageModel.training_terms`.

        alpha * mean((m h)^2) + beta * mean((h_t - h_{t-1})^2) over the final hidden states h, where m is the mask of
        their dropout in a recurrent model (Merity et al. 2017, Section 4.5, and their code) and 1 in a Transformer (the
        authors' Penn Treebank code). All positions of the segment are regularised, those whose loss does not count
        included.
        """
        check_targets(tokens, targets)
        hidden, state = self.hidden_states(tokens, state)
        return *self._terms_of(hidden, targets, objective), state.detach()

    def _terms_of(self, hidden: Tensor, targets: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
        """The two terms of `training_terms` from h^N [B,T,E]; the softmax is that of the positions that count."""
        dropped, final = self.dropout_out(hidden), at_least_float32(hidden)
        penalty = final.new_zeros(())
        if self.config.activation_reg > 0:
            squared = at_least_float32(dropped) if self.regularises_dropped else final
            penalty = penalty + self.config.activation_reg * squared.square().mean()
        if self.config.temporal_reg > 0 and targets.shape[1] > 1:
            penalty = penalty + self.config.temporal_reg * final.diff(dim=1).square().mean()
        counted = objective.counted(targets.shape[1])
        return self._nll_of_dropped(dropped[:, -counted:], targets[:, -counted:]).mean(), penalty

    def nll_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of each target from h^N: [B,T,E] and int64 [B,T] -> [B,T] nats."""
        return self._nll_of_dropped(self.dropout_out(hidden), targets)

    def _nll_of_dropped(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """`nll_of`, from hidden states that had their dropout."""
        if self.mixture is not None:
            return self.mixture.nll(hidden, targets, self.softmax, self.embedding)
        return self.softmax.nll(hidden.flatten(0, 1), targets.flatten(), self.embedding).view_as(targets)

    def log_probs(self, tokens: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Log-probabilities of the next token; see `LanguageModel.log_probs`."""
        hidden, state = self.hidden_states(tokens, state)
        return self.log_probs_of(hidden), state

    def log_probs_of(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of the next token from h^N: [B,T,E] -> [B,T,V]."""
        hidden = self.dropout_out(hidden)
        if self.mixture is not None:
            return self.mixture.log_probs(hidden, self.softmax, self.embedding)
        return self.softmax.log_probs(hidden.flatten(0, 1), self.embedding).unflatten(0, hidden.shape[:2])


class PositionwiseFeedForward(nn.Module):
    """Linear, ReLU, Linear, with residual and LayerNorm: [B,T,E] -> [B,T,E]."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.pre_norm = config.pre_norm
        self.inner = Linear(config.d_model, config.d_inner)
        self.outer = Linear(config.d_inner, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = make_dropout(config.dropout, config.locked_dropout)
        inner = config.dropout if config.dropout_inner is None else config.dropout_inner
        self.dropout_inner = make_dropout(inner, config.locked_dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """One segment."""
        inner = self.inner(self.norm(hidden) if self.pre_norm else hidden)
        output = self.dropout(self.outer(self.dropout_inner(F.relu(inner))))
        return hidden + output if self.pre_norm else self.norm(hidden + output)


def check_targets(tokens: Tensor, targets: Tensor) -> None:
    """Every token has a target.

    Raises:
        UserError: if the shapes differ.
    """
    if tokens.shape != targets.shape:
        raise UserError(
            f"tokens have shape {list(tokens.shape)}, targets {list(targets.shape)}; expected one target a token"
        )
