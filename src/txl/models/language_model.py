"""The interface of every model and its state: Transformer-XL, Transformers without memory, recurrent networks.

Evaluation, generation and analysis use a model through these two classes alone; training uses `FamilyModel`, which adds
to them. Every call takes a state and returns the next one:

    state = model.init_state(batch_size)
    nll, state = model.nll(tokens, targets, state)

Shapes: B lanes, T tokens of a segment, E width of the final hidden states, V vocabulary. Losses are in nats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, NoReturn, Protocol, Self, TypedDict, TypeVar

from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn

from txl.config import Lengths, Limit, ModelConfig
from txl.errors import UserError
from txl.models.loss import EVERY_TARGET, Objective, nll_at_temperature


class CacheSettings(TypedDict, total=False):
    """Pairs, theta and lambda of a continuous cache, as fields of an `EvaluationResult`; empty without a cache."""

    cache_size: int
    cache_theta: float
    cache_lambda: float


class State(Protocol):
    """The state that a model carries from one segment to the next, for B lanes.

    A state is a value: no method changes it, and it stays valid after a step has been taken from it. The only exception
    is training with `train.capture`, where the next step overwrites it. The defaults are those of an empty state.
    """

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Number of lanes B."""

    @property
    def lengths(self) -> Lengths:
        """Memory length, window and clamp, which are part of the state; 0, None and None for a model without memory."""
        return Lengths()

    @property
    def length(self) -> int | None:
        """Number of positions held in memory; None for a recurrent state, which has no positions."""
        return None

    def detach(self) -> Self:
        """Return the state, detached from the graph that computed it."""
        return self

    @abstractmethod
    def select(self, lanes: Int[Tensor, " lanes"]) -> Self:
        """Return the state of the lanes with indices `lanes`, in that order; indices may repeat."""

    def reset(self, mask: Bool[Tensor, " B"]) -> Self:
        """Return the state with empty memory in the lanes where `mask` is true."""
        return self

    @abstractmethod
    def to_tensors(self) -> dict[str, Tensor]:
        """Return the state as named tensors, lanes first; `LanguageModel.state_from_tensors` is the inverse."""

    def filled_with_noise(self) -> Self:
        """Return a state of maximal size that holds random numbers, for measurements of time and memory."""
        return self


StateT = TypeVar("StateT", bound=State)


class LanguageModel(nn.Module, ABC, Generic[StateT]):
    """A model of the next token. Calls take and return the state; the module itself keeps none.

    With the same weights, the results for a text do not depend on whether it is read at once, in segments or token by
    token: at all positions if the window is exact, else at the first ``mem_len + 1`` positions.

    A subclass must define `init_state`, and `hidden_states`, `nll_of` and `log_probs_of` or else `nll` and `log_probs`.
    Code for arbitrary models writes `LanguageModel` without the class of the state, because it only passes a state back
    to the model that returned it.
    """

    vocab_size: int
    config: ModelConfig
    context: int | None = None  # largest number of tokens that a Transformer without memory reads at once

    @abstractmethod
    def init_state(
        self, batch_size: int, mem_len: int | None = None, window: Limit = None, clamp_len: Limit = None
    ) -> StateT:
        """Return empty memory for `batch_size` lanes.

        `mem_len`, `window` and `clamp_len` become part of the state. None stands for the value in the model's
        configuration, and ``"none"`` for no window or no clamp.

        Raises:
            UserError: for a negative length, or a window that needs more memory than `mem_len`.
        """

    def nll(
        self, tokens: Int64[Tensor, "B T"], targets: Int64[Tensor, "B T"], state: StateT
    ) -> tuple[Float[Tensor, "B T"], StateT]:
        """Return the negative log-likelihood of each target, float32 (float64 for such a model), and the next state."""
        check_targets(tokens, targets)
        hidden, state = self.hidden_states(tokens, state)
        return self.nll_of(hidden, targets), state

    def log_probs(self, tokens: Int64[Tensor, "B T"], state: StateT) -> tuple[Float[Tensor, "B T V"], StateT]:
        """Return log-probabilities of the next token over the whole vocabulary, and the next state."""
        hidden, state = self.hidden_states(tokens, state)
        return self.log_probs_of(hidden), state

    def state_from_tensors(self, tensors: dict[str, Tensor]) -> StateT:
        """Return the state that `State.to_tensors` described."""
        self._lacks("states that can be saved")

    def hidden_states(self, tokens: Int64[Tensor, "B T"], state: StateT) -> tuple[Float[Tensor, "B T E"], StateT]:
        """Return the final hidden states h^N, the input of `nll_of` and `log_probs_of`, and the next state.

        Raises:
            UserError: for tokens that do not fit the state, a state of another model, or a model whose losses do not
                follow from its hidden states alone (a continuous cache).
        """
        self._lacks("final hidden states to compute losses from")

    def nll_of(self, hidden: Float[Tensor, "B T E"], targets: Int64[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Return the negative log-likelihood of each target, computed from h^N."""
        self._lacks("final hidden states to compute losses from")

    def log_probs_of(self, hidden: Float[Tensor, "B T E"]) -> Float[Tensor, "B T V"]:
        """Return log-probabilities of the next token, computed from h^N."""
        self._lacks("final hidden states to compute losses from")

    def _lacks(self, what: str) -> NoReturn:
        raise UserError(f"a {type(self).__name__} has no {what}; use one of the models that txl.build_model makes")

    def nll_at(
        self, tokens: Int64[Tensor, "B T"], targets: Int64[Tensor, "B T"], state: StateT, temperature: float
    ) -> tuple[Float[Tensor, "B T"], StateT]:
        """Return `nll` with every probability p of the softmax replaced by p^(1/temperature), normalised.

        A temperature other than 1 requires the probabilities of the whole vocabulary.
        """
        if temperature == 1:
            return self.nll(tokens, targets, state)
        log_probs, state = self.log_probs(tokens, state)
        return nll_at_temperature(log_probs, targets, temperature), state

    def nll_and_own(
        self, tokens: Int64[Tensor, "B T"], targets: Int64[Tensor, "B T"], state: StateT, temperature: float
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"], StateT]:
        """Return the losses of `nll_at`, the model's own losses with gradients, and the next state.

        The two losses are equal, except for a continuous cache.
        """
        nll, state = self.nll_at(tokens, targets, state, temperature)
        return nll, nll, state

    def chosen_nll(
        self,
        tokens: Int64[Tensor, "B T"],
        at: Int64[Tensor, " P"],
        targets: Int64[Tensor, " P"],
        state: StateT,
        temperature: float = 1.0,
    ) -> Float[Tensor, " P"]:
        """Return the negative log-likelihood of the targets of selected tokens; temperature as in `nll_at`.

        `at` has the indices of the selected tokens among the B*T tokens, lane after lane; a repeated index must have
        the same target.
        """
        # Unselected positions get the target 0, and their losses are not returned.
        following = tokens.new_zeros(tokens.numel()).index_copy(0, at, targets).view_as(tokens)
        return self.nll_at(tokens, following, state, temperature)[0].flatten()[at]

    def training_terms(
        self,
        tokens: Int64[Tensor, "B T"],
        targets: Int64[Tensor, "B T"],
        state: StateT,
        objective: Objective = EVERY_TARGET,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""], StateT]:
        """Return the mean loss over the targets that count, the sum of the regularisers (or 0), and the state.

        Both scalars have gradients; the next state is detached.
        """
        nll, state = self.nll(tokens, targets, state)
        counted = objective.counted(targets.shape[1])
        return nll[:, -counted:].mean(), nll.new_zeros(()), state.detach()

    def training_loss(
        self,
        tokens: Int64[Tensor, "B T"],
        targets: Int64[Tensor, "B T"],
        state: StateT,
        objective: Objective = EVERY_TARGET,
    ) -> tuple[Float[Tensor, ""], StateT]:
        """Return the loss to minimise (the sum of `training_terms`, with gradient) and the detached state."""
        loss, penalty, state = self.training_terms(tokens, targets, state, objective)
        return loss + penalty, state

    @property
    def own_model(self) -> LanguageModel:
        """The model that holds the weights: this model itself, or the model inside a continuous cache."""
        return self

    @property
    def cache_settings(self) -> CacheSettings:
        """Settings of the continuous cache; empty for a model without one."""
        return {}


def check_targets(tokens: Tensor, targets: Tensor) -> None:
    """Raise `UserError` if the shapes of targets and tokens differ."""
    if tokens.shape != targets.shape:
        raise UserError(
            f"tokens have shape {list(tokens.shape)}, targets {list(targets.shape)}; expected one target a token"
        )
