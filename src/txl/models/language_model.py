"""The interface of every model and of its state: Transformer-XL, Transformers without memory, recurrent networks.

Whoever trains, evaluates, generates or analyses uses a model through these two classes alone. State goes in and comes
out:

    state = model.init_state(batch_size)
    nll, state = model.nll(tokens, targets, state)

Shapes: B lanes, T tokens of a segment, E width of the final hidden states, V vocabulary. Losses are in nats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol, Self, TypedDict, TypeVar

from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn

from txl.config import Lengths, Limit, LossName, ModelConfig
from txl.errors import UserError
from txl.models.cross_entropy import nll_at_temperature

TailRows = tuple[int, ...]
"""Rows for the targets of each tail cluster of an adaptive softmax."""


@dataclass(frozen=True)
class Objective:
    """Positions of a segment that have a loss, and the progress of training: given to the model in every step."""

    loss: LossName = "full"
    """full: every position's; half: that of the recent half (Section 4.2, Table 6); last: the last one's alone."""
    progress: float = 0.0
    """Fraction of all updates made so far, 0 to 1, for schedules of auxiliary losses."""
    tail_rows: TailRows | None = None
    """Room for as many targets of each tail cluster as there are, or more, if the caller knows; None: they are counted,
    for which a device has to be waited for."""
    lengths: tuple[int, ...] | None = None
    """Lengths of the consecutive segments that the tokens consist of, where gradients flow through the memory from each
    to the one before (`train.backprop_segments`); None: one segment."""

    def counted(self, n_position: int) -> int:
        """Return how many of a segment's positions count, the most recent ones; of an odd number the larger half."""
        return {"full": n_position, "half": n_position - n_position // 2, "last": 1}[self.loss]


EVERY_TARGET = Objective()
"""The full loss, at the beginning of training."""


class CacheSettings(TypedDict, total=False):
    """Pairs, theta and lambda of a continuous cache, as fields of an `EvaluationResult`; empty for a model without."""

    cache_size: int
    cache_theta: float
    cache_lambda: float


class State(Protocol):
    """The state that a model carries from one segment to the next, for B lanes.

    A state is a value: no method changes it, and it stays valid after a step has been taken from it.
    """

    @property
    def batch_size(self) -> int:
        """Number of lanes B."""
        ...

    @property
    def lengths(self) -> Lengths:
        """Memory length, window and clamp that travel with the state; zero and none for a model without memory."""
        ...

    @property
    def length(self) -> int | None:
        """Positions of memory held now; None for a recurrent state, which has none and carries all that was read."""
        ...

    def detach(self) -> Self:
        """Return the state cut off from the graph that computed it."""
        ...

    def select(self, lanes: Int[Tensor, " lanes"]) -> Self:
        """Return the state of some lanes, in the order of the indices `lanes`; repeats are allowed."""
        ...

    def reset(self, mask: Bool[Tensor, " B"]) -> Self:
        """Return the state with empty memory in the lanes where `mask` is true."""
        ...

    def to_tensors(self) -> dict[str, Tensor]:
        """Return everything as named tensors, lanes first where a tensor has lanes.

        `LanguageModel.state_from_tensors` is the inverse.
        """
        ...

    def filled_with_noise(self) -> Self:
        """Return a state of the greatest size, of random numbers, to measure time and memory with."""
        ...


StateT = TypeVar("StateT", bound=State)


class LanguageModel(nn.Module, ABC, Generic[StateT]):
    """A model of the next token. State goes in and comes out; nothing hides in the module.

    Given the same weights, a stream fed whole, in segments or token by token gives the same numbers:
    everywhere if the window is exact, else for the first ``mem_len + 1`` positions.

    A subclass needs `init_state`, `nll` and `log_probs`; all else has a default. Where any model will do, code writes
    `LanguageModel` without its state's class: a state goes back only into the model that it came from.
    """

    vocab_size: int
    config: ModelConfig
    context: int | None = None
    """Most tokens that a model without memory reads at once; None for a model whose state carries what it has read."""

    @abstractmethod
    def init_state(
        self, batch_size: int, mem_len: int | None = None, window: Limit = None, clamp_len: Limit = None
    ) -> StateT:
        """Return empty memory for `batch_size` lanes.

        `mem_len`, `window` and `clamp_len` travel with the state; None takes the model's configuration, and
        ``"none"`` switches a window or clamp of the configuration off.

        Raises:
            UserError: for a negative length, or a window that needs more memory than `mem_len`.
        """

    @abstractmethod
    def nll(
        self, tokens: Int64[Tensor, "B T"], targets: Int64[Tensor, "B T"], state: StateT
    ) -> tuple[Float[Tensor, "B T"], StateT]:
        """Return the negative log-likelihood of each target in nats, each in its own place, and the next state.

        float32, or float64 for a float64 model.
        """

    @abstractmethod
    def log_probs(self, tokens: Int64[Tensor, "B T"], state: StateT) -> tuple[Float[Tensor, "B T V"], StateT]:
        """Return log-probabilities of the next token over the whole vocabulary, and the next state."""

    def state_from_tensors(self, tensors: dict[str, Tensor]) -> StateT:
        """Return the state that `State.to_tensors` described."""
        self._lacks("states that can be saved")

    def hidden_states(self, tokens: Int64[Tensor, "B T"], state: StateT) -> tuple[Float[Tensor, "B T E"], StateT]:
        """Return the final hidden states h^N, from which `nll_of` and `log_probs_of` compute, and the next state.

        Raises:
            UserError: for tokens that do not fit the state, a state of another model, or a model that is more than a
                function of its hidden states (a continuous cache).
        """
        self._lacks("hidden states that its losses follow from")

    def nll_of(self, hidden: Float[Tensor, "B T E"], targets: Int64[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Return the negative log-likelihood of each target from h^N, in nats."""
        self._lacks("hidden states that its losses follow from")

    def log_probs_of(self, hidden: Float[Tensor, "B T E"]) -> Float[Tensor, "B T V"]:
        """Return log-probabilities of the next token from h^N."""
        self._lacks("hidden states that its losses follow from")

    def nll_at(
        self, tokens: Int64[Tensor, "B T"], targets: Int64[Tensor, "B T"], state: StateT, temperature: float
    ) -> tuple[Float[Tensor, "B T"], StateT]:
        """Return `nll` with every probability p of the softmax replaced by p^(1/temperature), normalised.

        Other than 1, this takes the probabilities of the whole vocabulary.
        """
        if temperature == 1:
            return self.nll(tokens, targets, state)
        log_probs, state = self.log_probs(tokens, state)
        return nll_at_temperature(log_probs, targets, temperature), state

    def nll_and_own(
        self, tokens: Int64[Tensor, "B T"], targets: Int64[Tensor, "B T"], state: StateT, temperature: float
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"], StateT]:
        """Return `nll_at`, and the loss whose gradient the weights can follow: the same but for a continuous cache."""
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
        """Return the negative log-likelihood of what follows some of the tokens, in nats.

        Args:
            tokens: what is read.
            at: P indices among the B*T tokens, lane after lane; one may repeat, with the same target.
            targets: the tokens that follow them.
            state: memory before the tokens.
            temperature: as in `nll_at`.
        """
        following = tokens.new_zeros(tokens.numel()).index_copy(0, at, targets).view_as(tokens)
        return self.nll_at(tokens, following, state, temperature)[0].flatten()[at]

    def training_terms(
        self,
        tokens: Int64[Tensor, "B T"],
        targets: Int64[Tensor, "B T"],
        state: StateT,
        objective: Objective = EVERY_TARGET,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""], StateT]:
        """Return the mean loss in nats over the targets that count, the regularisers' sum (or 0), and the next state.

        Two scalars with gradient; the state is detached.
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
        """The model that has the weights: this one, or the one inside a continuous cache."""
        return self

    @property
    def cache_settings(self) -> CacheSettings:
        """Settings of the model's continuous cache."""
        return {}

    def _lacks(self, what: str) -> NoReturn:
        raise UserError(f"a {type(self).__name__} has no {what}; use one of the models that txl.build_model makes")
