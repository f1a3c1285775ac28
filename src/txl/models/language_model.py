"""The one interface behind which every model stands: Transformer-XL, vanilla or recurrent.

Shapes: B lanes, T tokens of a segment, V vocabulary. Losses are in nats.

What of a segment training counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, Self, TypeVar

from torch import Tensor, nn

from txl.config import LossName
from txl.models.cross_entropy import nll_at_temperature


@dataclass(frozen=True)
class Objective:
    """Which positions of a segment have a loss, and how far training is: passed to a model in every step."""

    loss: LossName = "full"
    """full: every position's; half: that of the recent half (Section 4.2, Table 6); last: the last one's alone."""
    progress: float = 0.0
    """Fraction of all updates that are made, 0 to 1: what schedules of auxiliary losses go by."""

    def counted(self, n_position: int) -> int:
        """How many of a segment's positions count, the most recent ones; of an odd number the larger half."""
        return {"full": n_position, "half": n_position - n_position // 2, "last": 1}[self.loss]


EVERY_TARGET = Objective()
"""The full loss, at the beginning of training."""


class State(Protocol):
    """What a model carries from one segment to the next, for B lanes.

    A state is a value: no method changes it, and it stays valid after a step has been taken from it.
    """

    @property
    def batch_size(self) -> int:
        """Number of lanes B."""
        ...

    def detach(self) -> Self:
        """The same state, cut off from the graph that computed it."""
        ...

    def select(self, lanes: Tensor) -> Self:
        """The state of some lanes, in the order of the int64 indices `lanes` [B'] (repeats allowed)."""
        ...

    def reset(self, mask: Tensor) -> Self:
        """The state with empty memory in the lanes where the boolean `mask` [B] is true."""
        ...


StateT = TypeVar("StateT", bound=State)
Limit = int | Literal["none"] | None


class LanguageModel(nn.Module, ABC, Generic[StateT]):
    """A model of the next token. State goes in and comes out; nothing hides in the module.

    Given the same weights, a stream fed whole, in segments or token by token gives the same numbers:
    everywhere if the window is exact, else for the first ``mem_len + 1`` positions.
    """

    vocab_size: int
    context: int | None = None
    """Most tokens that a model without memory reads at once; None for a model whose state carries what it has read."""

    @abstractmethod
    def init_state(
        self, batch_size: int, mem_len: int | None = None, window: Limit = None, clamp_len: Limit = None
    ) -> StateT:
        """Empty memory for `batch_size` lanes.

        `mem_len`, `window` and `clamp_len` travel with the state; None takes the model's configuration, and
        ``"none"`` switches a window or clamp of the configuration off.

        Raises:
            UserError: for a negative length, or a window that needs more memory than `mem_len`.
        """

    @abstractmethod
    def nll(self, tokens: Tensor, targets: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Negative log-likelihood of each target: [B,T] int64 twice -> [B,T] nats, each in its own place.

        float32, or float64 for a float64 model.
        """

    @abstractmethod
    def log_probs(self, tokens: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Log-probabilities of the next token over the whole vocabulary: [B,T] int64 -> [B,T,V]."""

    def last_nll(self, tokens: Tensor, target: Tensor, state: StateT, temperature: float = 1.0) -> Tensor:
        """Negative log-likelihood of what follows each lane's last token: int64 [B,T] and [B] -> [B] nats.

        Cheaper than `nll` where no other position matters. With `temperature` X every probability p is replaced by
        p^(1/X), normalised.
        """
        log_probs, _ = self.log_probs(tokens, state)
        if temperature != 1:
            return nll_at_temperature(log_probs[:, -1:], target[:, None], temperature).squeeze(1)
        return -log_probs[:, -1].gather(-1, target[:, None]).squeeze(-1)

    def training_terms(
        self, tokens: Tensor, targets: Tensor, state: StateT, objective: Objective = EVERY_TARGET
    ) -> tuple[Tensor, Tensor, StateT]:
        """The mean loss in nats over the targets that count, and what a model adds to it while training (0 if nothing).

        Two scalars with gradient; the state that comes out is detached.
        """
        nll, state = self.nll(tokens, targets, state)
        counted = objective.counted(targets.shape[1])
        return nll[:, -counted:].mean(), nll.new_zeros(()), state.detach()

    def training_loss(
        self, tokens: Tensor, targets: Tensor, state: StateT, objective: Objective = EVERY_TARGET
    ) -> tuple[Tensor, StateT]:
        """What training minimises: the sum of `training_terms`, a scalar with gradient, and the detached state."""
        loss, penalty, state = self.training_terms(tokens, targets, state, objective)
        return loss + penalty, state
