"""Base class of all families of models: embedding, softmax, losses and initial weights. Subclasses add the layers.

Shapes: B lanes, T tokens of a segment, E width of the hidden states, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from txl.config import Lengths, Limit, LossName, ModelConfig
from txl.errors import UserError
from txl.models.adaptive import AdaptiveEmbedding, AdaptiveSoftmax, MixtureOfSoftmaxes
from txl.models.initial_weights import init_weights
from txl.models.language_model import LanguageModel, StateT, check_targets
from txl.models.layers import Dropout, HeadNorm, LockedDropout, make_dropout
from txl.models.loss import EVERY_TARGET, Objective, TailRows, at_least_float32, fused_dtype, nll_at_temperature
from txl.models.structure import outsider


class FamilyModel(LanguageModel[StateT]):
    """A language model built from a configuration, whose outputs depend on its final hidden states alone.

    A subclass builds its layers and then calls `_finish`.
    """

    config_class: ClassVar[type[ModelConfig]]
    config: ModelConfig
    layers: nn.ModuleList  # lowest first
    attention_name: str  # the attention that the model trains with, for logs; "no" for a model without attention
    attention_note: str | None = None  # a line about the choice of attention, shown at the start of training
    compiles_any_length: bool | None = None  # True: from the start; None: once a second segment length occurs
    regularises_dropped = False  # whether `activation_reg` squares the final hidden states after dropout or before

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
        self._shares_table = False  # within `training_terms`

    @staticmethod
    def check_training(config: ModelConfig, device: str, dtype: torch.dtype) -> None:
        """Raise `AttentionRefused` if a configuration cannot train on a device with matrix products in a dtype."""

    def layer_matrices(self) -> dict[str, tuple[int, int]]:
        """Return the parameters of the layers that are matrices, which map hidden states to hidden states.

        Each name has the numbers of matrices stacked in the parameter, vertically and horizontally. Embeddings, softmax
        tables, u and v, biases and norms are not included.
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
        self.dropout_embed = self._dropout(config.dropout_embed)
        self.dropout_out = self._dropout(config.dropout_out)
        if self.attention_name == "compiled":
            # A resumed run uses the attention that it has recorded, and so draws and rounds in the same way as before.
            for module in self.modules():
                if isinstance(module, Dropout | HeadNorm | AdaptiveSoftmax):
                    module.compiled = True
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
            positions: vectors that are added before the dropout (Vaswani et al., Section 5.4).
            begins: lanes whose first token is not dropped by `dropout_words`; None: none.
        """
        if tokens.shape[0] != state.batch_size:
            raise UserError(f"tokens have {tokens.shape[0]} lanes, the state has {state.batch_size}; expected the same")
        if tokens.shape[1] == 0:
            raise UserError("tokens have no positions; expected at least one in each lane")
        if self.training and (fused := self._fused_embedded(tokens, positions, begins)) is not None:
            return fused
        hidden = self.embedding(tokens)
        if self.training and self.config.dropout_words > 0:
            # One draw for the whole vocabulary: a word is dropped at all of its positions (Gal and Ghahramani 2016,
            # Section 4.2; Merity et al. 2017, Section 4.3).
            ones = torch.ones(self.vocab_size, device=tokens.device)
            factor = F.dropout(ones, self.config.dropout_words)[tokens]
            if begins is not None:
                factor[:, 0] = torch.where(begins, 1.0, factor[:, 0])
            hidden = hidden * factor[..., None].to(hidden.dtype)
        return self.dropout_embed(hidden if positions is None else hidden + positions.to(hidden.dtype))

    def _fused_embedded(
        self, tokens: Tensor, positions: Tensor | None, begins: Tensor | None
    ) -> Float[Tensor, "B T E"] | None:
        """Compute `_embedded` on a GPU with one kernel; None for a split or projected table, or with hooks."""
        embedding, p, n_lane = self.embedding, self.config.dropout_words, len(tokens)
        table = embedding.tables[0]
        if embedding.split or len(embedding.projections) or table.dtype != torch.float32 or fused_dtype(table) is None:
            return None
        if not _is_plain(embedding, AdaptiveEmbedding):
            return None
        from txl.models.fused_ends import LookUp, looked_up

        words = table.new_empty(self.vocab_size).bernoulli_(1 - p) if p > 0 else None
        locked = positions is None and _is_plain(self.dropout_embed, LockedDropout)
        lanes, factor = _locked_mask(self.dropout_embed, n_lane, table) if locked else (None, 1.0)
        drops = LookUp(embedding.scale, words, 1 / (1 - p), begins, lanes, factor)
        hidden, shared = looked_up(table, tokens, drops)
        if self._shares_table:
            embedding.shared = shared
        hidden = hidden if positions is None else hidden + positions.to(hidden.dtype)
        return hidden if locked else self.dropout_embed(hidden)

    def chosen_nll(
        self, tokens: Tensor, at: Tensor, targets: Tensor, state: StateT, temperature: float = 1.0
    ) -> Tensor:
        """Compute `LanguageModel.chosen_nll`; the softmax is computed only at the chosen positions."""
        hidden = self.hidden_states(tokens, state)[0].flatten(0, 1)[None, at]
        if temperature != 1:
            return nll_at_temperature(self.log_probs_of(hidden), targets[None], temperature)[0]
        return self.nll_of(hidden, targets[None])[0]

    def training_terms(
        self, tokens: Tensor, targets: Tensor, state: StateT, objective: Objective = EVERY_TARGET
    ) -> tuple[Tensor, Tensor, StateT]:
        """Return the mean loss, and the regularisers with the auxiliary losses; see `LanguageModel.training_terms`."""
        check_targets(tokens, targets)
        try:
            self._shares_table = True
            hidden, state = self.hidden_states(tokens, state)
            return *self._terms(hidden, targets, objective), state.detach()
        finally:
            self._shares_table, self.embedding.shared = False, None

    def _terms(self, hidden: Tensor, targets: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
        """Return the mean loss over the targets that count, and the sum of the regularisers, from h^N [B,T,E].

        The regularisers are alpha * mean((m h)^2) + beta * mean((h_t - h_{t-1})^2) over all positions, including those
        whose loss does not count. m is the dropout mask of h in a recurrent model (Merity et al. 2017, Section 4.5, and
        their code) and 1 in a Transformer (the authors' Penn Treebank code).
        """
        dropped, penalty = self._regularised(hidden)
        # The softmax is the largest product of a small model: it is computed only where the loss counts.
        if (counted := objective.counted(targets.shape[1])) < targets.shape[1]:
            dropped, targets = dropped[:, -counted:], targets[:, -counted:]
        nll = self._nll_of_dropped(dropped, targets, objective.tail_rows)
        return nll.mean(), penalty

    def _regularised(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return h^N after dropout, and the sum of the regularisers; on a GPU with locked dropout by one kernel."""
        config, dropout = self.config, self.dropout_out
        plain = hidden.dtype == torch.float32 and fused_dtype(hidden) is not None
        if self.training and plain and _is_plain(dropout, LockedDropout):
            from txl.models.fused_ends import Regularisers, regularised

            mask = _locked_mask(dropout, len(hidden), hidden)
            factors = config.activation_reg, config.temporal_reg
            return regularised(hidden, Regularisers(*mask, *factors, of_dropped=self.regularises_dropped))
        dropped, final = dropout(hidden), at_least_float32(hidden)
        penalty = final.new_zeros(())
        if config.activation_reg > 0:
            squared = at_least_float32(dropped) if self.regularises_dropped else final
            penalty = penalty + config.activation_reg * squared.square().mean()
        if config.temporal_reg > 0 and hidden.shape[1] > 1:
            penalty = penalty + config.temporal_reg * final.diff(dim=1).square().mean()
        return dropped, penalty

    def tail_rows(self, targets: Int64[Tensor, "B T"], loss: LossName) -> TailRows | None:
        """Return the number of counted targets in each tail cluster, for an `Objective`; `targets` is on a CPU."""
        if not self.config.cutoffs:
            return None
        bounds, counted = self.softmax.bounds, targets[:, -Objective(loss).counted(targets.shape[1]) :]
        cluster = torch.bucketize(counted.flatten(), torch.tensor([first for first, _ in bounds[1:]]), right=True)
        return tuple(cluster.bincount(minlength=len(bounds))[1:].tolist())

    def nll_of(self, hidden: Float[Tensor, "B T E"], targets: Int64[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Return the negative log-likelihood of each target; see `LanguageModel.nll_of`."""
        return self._nll_of_dropped(self.dropout_out(hidden), targets)

    def _nll_of_dropped(self, hidden: Tensor, targets: Tensor, tail_rows: TailRows | None = None) -> Tensor:
        """Compute `nll_of` from hidden states after dropout; `tail_rows` as in `Objective`."""
        if self.mixture is not None:
            return self.mixture.nll(hidden, targets, self.softmax, self.embedding, tail_rows)
        # Time-major results of kernels for GPUs are not copied to be batch-major.
        turned = fused_dtype(hidden) is not None and hidden.stride(0) < hidden.stride(1)
        if turned:
            hidden, targets = hidden.transpose(0, 1), targets.t()
        nll = self.softmax.nll(hidden.flatten(0, 1), targets.flatten(), self.embedding, tail_rows)
        nll = nll.view(targets.shape)
        return nll.t() if turned else nll

    def log_probs_of(self, hidden: Float[Tensor, "B T E"]) -> Float[Tensor, "B T V"]:
        """Return log-probabilities of the next token; see `LanguageModel.log_probs_of`."""
        hidden = self.dropout_out(hidden)
        if self.mixture is not None:
            return self.mixture.log_probs(hidden, self.softmax, self.embedding)
        return self.softmax.log_probs(hidden.flatten(0, 1), self.embedding).unflatten(0, hidden.shape[:2])


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module is of this class and has no hooks, so that a kernel may compute what it computes."""
    return type(module) is kind and outsider(module, frozenset({kind, nn.Module}), backward=True) is None


def _locked_mask(dropout: nn.Module, n_lane: int, like: Tensor) -> tuple[Tensor | None, float]:
    """Draw the mask [B,E] of a locked dropout, 1 where a feature is kept, and its factor; None without dropout."""
    assert isinstance(dropout, LockedDropout)
    if not dropout.training or dropout.p == 0:
        return None, 1.0
    return like.new_empty(n_lane, like.shape[-1]).bernoulli_(1 - dropout.p), 1 / (1 - dropout.p)
