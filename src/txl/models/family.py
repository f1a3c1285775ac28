"""Base class of all families of models: embedding, softmax, losses and initial weights. Subclasses add the layers.

Shapes: B lanes, T tokens of a segment, E width of the hidden states, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from txl.config import Lengths, Limit, LossName, ModelConfig
from txl.errors import UserError
from txl.models.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from txl.models.cross_entropy import nll_at_temperature
from txl.models.initial_weights import init_weights
from txl.models.language_model import LanguageModel, StateT
from txl.models.layers import make_dropout, use_compiled_layers, word_mask
from txl.models.loss import EVERY_TARGET, AuxiliaryHeads, Objective, TailRows, training_terms
from txl.models.mixture import MixtureOfSoftmaxes


class FamilyModel(LanguageModel[StateT]):
    """A language model built from a configuration, whose outputs depend on its final hidden states alone.

    A subclass builds its layers and then calls `_finish`.
    """

    config_class: ClassVar[type[ModelConfig]]
    """Configuration class of the family."""
    attention_name: str
    """Name of the attention that the model trains with, for logs; "no" for a model without attention."""
    attention_note: str | None = None
    """Message of one line about the choice of attention, shown at the start of training; None: no message."""
    layers: nn.ModuleList
    """The layers, lowest first."""
    config: ModelConfig
    compiles_any_length: bool | None = None
    """True: layers are compiled for any segment length from the start; None: once a second length occurs."""
    regularises_dropped = False
    """True: `activation_reg` squares the final hidden states after dropout; False: before dropout."""
    auxiliary: AuxiliaryHeads | None
    """Classifiers of auxiliary losses; None: there are none."""

    def __init__(
        self, config: ModelConfig, vocab_size: int, device: str | None = None, dtype: torch.dtype | None = None
    ):
        super().__init__()
        config.validate()
        if vocab_size < 1:
            raise UserError(f"the vocabulary has {vocab_size} tokens; a model needs at least 1")
        self.config = dataclasses.replace(config)  # a copy: changes of the caller's do not reach the model
        self.vocab_size = vocab_size
        self.embedding = AdaptiveEmbedding(vocab_size, config)
        self.context = config.context
        self.auxiliary = None

    @staticmethod
    def check_training(config: ModelConfig, device: str, dtype: torch.dtype) -> None:
        """Raise `AttentionRefused` if a configuration cannot train on a device with matrix products in a dtype."""

    @staticmethod
    def for_captured_steps(config: ModelConfig, device: str, dtype: torch.dtype) -> ModelConfig:
        """Return the configuration for steps that are recorded as CUDA graphs, where another attention may be best."""
        return config

    def layer_matrices(self) -> dict[str, tuple[int, int]]:
        """Return the parameters of the layers that are matrices, which map hidden states to hidden states.

        Embeddings, softmax tables, u and v, biases and norms are not included.

        Returns:
            For each parameter name, the numbers of matrices stacked in the parameter, vertically and horizontally.
        """
        layers = self.get_submodule("layers").named_modules(prefix="layers")
        return {f"{name}.weight": (1, 1) for name, module in layers if isinstance(module, nn.Linear)}

    def _finish(self, d_last: int | None = None) -> None:
        """Build the softmax and draw all initial weights; `d_last` is the width of h^N (None: d_model)."""
        config = self.config
        self.softmax = AdaptiveSoftmax(self.embedding, config)
        self.mixture = None
        if config.n_softmax > 1:
            dropout = self._dropout(config.dropout_latent)
            self.mixture = MixtureOfSoftmaxes(d_last or config.d_model, config.d_model, config.n_softmax, dropout)
        self.dropout_embed = self._dropout(self.config.dropout_embed)
        self.dropout_out = self._dropout(self.config.dropout_out)
        if self.attention_name == "compiled":
            use_compiled_layers(self)
            self.softmax.compiled = True
        self.init_weights()

    def _dropout(self, p: float | None) -> nn.Module:
        """Return a dropout layer of rate `p`; None: the configuration's general rate."""
        return make_dropout(self.config.dropout if p is None else p, self.config.locked_dropout)

    def init_weights(self) -> None:
        """Draw the initial weights (`txl.models.initial_weights`)."""
        init_weights(self.named_parameters(), self.config)

    def init_state(
        self, batch_size: int, mem_len: int | None = None, window: Limit = None, clamp_len: Limit = None
    ) -> StateT:
        """Return empty memory; see `LanguageModel.init_state`."""
        if batch_size < 1:
            raise UserError(field="batch_size", value=batch_size, expected="1 lane or more")
        return self.empty_state(batch_size, self.config.lengths(mem_len, window, clamp_len))

    @abstractmethod
    def empty_state(self, batch_size: int, lengths: Lengths) -> StateT:
        """Return empty memory for `batch_size` lanes, with `lengths` already completed and checked."""

    def _embedded(
        self,
        tokens: Int64[Tensor, "B T"],
        state: StateT,
        positions: Float[Tensor, "T E"] | None = None,
        begins: Bool[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B T E"]:
        """Return h^0.

        Args:
            tokens: tokens of the segment.
            state: memory before them.
            positions: vectors that are added before the dropout (Vaswani et al., Section 5.4).
            begins: lanes whose first token is not dropped by `dropout_words`; None: none.
        """
        if tokens.shape[0] != state.batch_size:
            raise UserError(f"tokens have {tokens.shape[0]} lanes, the state has {state.batch_size}; expected the same")
        if tokens.shape[1] == 0:
            raise UserError("tokens have no positions; expected at least one in each lane")
        hidden = self.embedding(tokens)
        if self.training and self.config.dropout_words > 0:
            factor = word_mask(self.vocab_size, self.config.dropout_words, tokens.device)[tokens]
            if begins is not None:
                factor[:, 0] = torch.where(begins, 1.0, factor[:, 0])
            # One draw for the whole vocabulary: a word is dropped at all of its positions.
            hidden = hidden * factor[..., None].to(hidden.dtype)
        return self.dropout_embed(hidden if positions is None else hidden + positions.to(hidden.dtype))

    def nll(
        self, tokens: Int64[Tensor, "B T"], targets: Int64[Tensor, "B T"], state: StateT
    ) -> tuple[Float[Tensor, "B T"], StateT]:
        """Return the negative log-likelihood of each target; see `LanguageModel.nll`."""
        check_targets(tokens, targets)
        hidden, state = self.hidden_states(tokens, state)
        return self.nll_of(hidden, targets), state

    def chosen_nll(
        self,
        tokens: Int64[Tensor, "B T"],
        at: Int64[Tensor, " P"],
        targets: Int64[Tensor, " P"],
        state: StateT,
        temperature: float = 1.0,
    ) -> Float[Tensor, " P"]:
        """Compute `LanguageModel.chosen_nll`; the softmax is computed only at the chosen positions."""
        hidden = self.hidden_states(tokens, state)[0].flatten(0, 1)[None, at]
        if temperature != 1:
            return nll_at_temperature(self.log_probs_of(hidden), targets[None], temperature)[0]
        return self.nll_of(hidden, targets[None])[0]

    def training_terms(
        self,
        tokens: Int64[Tensor, "B T"],
        targets: Int64[Tensor, "B T"],
        state: StateT,
        objective: Objective = EVERY_TARGET,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""], StateT]:
        """Return the mean loss, and the regularisers with the auxiliary losses; see `LanguageModel.training_terms`."""
        check_targets(tokens, targets)
        loss, penalty, state = self._terms(tokens, targets, state, objective)
        return loss, penalty, state.detach()

    def _terms(
        self, tokens: Tensor, targets: Tensor, state: StateT, objective: Objective
    ) -> tuple[Tensor, Tensor, StateT]:
        """Return the terms of one segment, and the next state, which gradients may flow through."""
        outputs, state = self.layer_outputs(tokens, state)
        dropped = self.dropout_out(outputs[-1])
        nll = partial(self._nll_of_dropped, tail_rows=objective.tail_rows)
        squares_dropped = self.regularises_dropped
        loss, penalty = training_terms(nll, outputs[-1], dropped, targets, objective, self.config, squares_dropped)
        if self.auxiliary is not None:
            penalty = penalty + self.auxiliary(outputs, targets, objective, self.dropout_out)
        return loss, penalty, state

    def layer_outputs(self, tokens: Int64[Tensor, "B T"], state: StateT) -> tuple[list[Float[Tensor, "B T E"]], StateT]:
        """Return the outputs of layers that the training loss depends on, h^N last, and the next state."""
        hidden, state = self.hidden_states(tokens, state)
        return [hidden], state

    def tail_rows(self, targets: Int64[Tensor, "B T"], loss: LossName) -> TailRows | None:
        """Return the number of counted targets in each tail cluster, for an `Objective`; `targets` is on a CPU."""
        if not self.config.cutoffs:
            return None
        return self.softmax.tail_rows(targets[:, -Objective(loss).counted(targets.shape[1]) :])

    def nll_of(self, hidden: Float[Tensor, "B T E"], targets: Int64[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Return the negative log-likelihood of each target; see `LanguageModel.nll_of`."""
        return self._nll_of_dropped(self.dropout_out(hidden), targets)

    def _nll_of_dropped(self, hidden: Tensor, targets: Tensor, tail_rows: TailRows | None = None) -> Tensor:
        """Compute `nll_of` from hidden states after dropout; `tail_rows` as in `Objective`."""
        if self.mixture is not None:
            return self.mixture.nll(hidden, targets, self.softmax, self.embedding, tail_rows)
        nll = self.softmax.nll(hidden.flatten(0, 1), targets.flatten(), self.embedding, tail_rows)
        return nll.view_as(targets)

    def log_probs(self, tokens: Int64[Tensor, "B T"], state: StateT) -> tuple[Float[Tensor, "B T V"], StateT]:
        """Return log-probabilities of the next token; see `LanguageModel.log_probs`."""
        hidden, state = self.hidden_states(tokens, state)
        return self.log_probs_of(hidden), state

    def log_probs_of(self, hidden: Float[Tensor, "B T E"]) -> Float[Tensor, "B T V"]:
        """Return log-probabilities of the next token; see `LanguageModel.log_probs_of`."""
        hidden = self.dropout_out(hidden)
        if self.mixture is not None:
            return self.mixture.log_probs(hidden, self.softmax, self.embedding)
        return self.softmax.log_probs(hidden.flatten(0, 1), self.embedding).unflatten(0, hidden.shape[:2])


def check_targets(tokens: Tensor, targets: Tensor) -> None:
    """Raise `UserError` if the shapes of targets and tokens differ."""
    if tokens.shape != targets.shape:
        raise UserError(
            f"tokens have shape {list(tokens.shape)}, targets {list(targets.shape)}; expected one target a token"
        )
