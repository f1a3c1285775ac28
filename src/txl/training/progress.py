"""How far a run is: the numbers that a checkpoint carries, beside the tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from txl.errors import UserError
from txl.training.guards import LossWatch


@dataclass
class Progress:
    """Counts since the beginning, over all stretches."""

    step: int = 0
    tokens: int = 0
    """Targets trained on, those that count alone."""
    tokens_read: int = 0
    """Tokens of all segments; more than `tokens` where not every position has a loss."""
    seconds: float = 0.0
    best_nll: float | None = None
    best_step: int | None = None
    loss_sum: float = 0.0
    """Sum of the nats of all targets since the last line of the log, and their number."""
    loss_count: int = 0
    validation_losses: list[float] = field(default_factory=list)
    """Of all evaluations so far, oldest first."""
    validation_due: bool = False
    """Whether the run was stopped in the middle of this step's evaluation."""
    skipped: int = 0
    """Updates that were skipped, because the loss or the gradient was not finite."""
    skipped_in_a_row: int = 0
    scheduled_step: int | None = None
    """Step of the last checkpoint that was due; those of an interruption do not count."""
    scheduled_best: int | None = None
    """The best step when that checkpoint was due: a run that goes back to it has that best again."""
    rollbacks: int = 0
    """Times that the run went back to a checkpoint because of a spike of the loss."""
    watch: LossWatch = field(default_factory=LossWatch)
    first_loss: float | None = None
    """Nats a target of the first update, and of the last one, that was not skipped."""
    last_loss: float | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        """The inverse of `dataclasses.asdict`.

        Raises:
            UserError: for fields that are not known, or values that are no numbers.
        """
        try:
            fields: dict[str, Any] = values | {"watch": LossWatch(**values["watch"])}
            progress = cls(**fields)
        except (TypeError, KeyError) as error:
            raise UserError(f"training state: damaged ({error})") from None
        for item in dataclasses.fields(progress):
            value, default = getattr(progress, item.name), getattr(cls(), item.name)
            if default is not None and not isinstance(value, (int, float) if type(default) is float else type(default)):
                raise UserError(f"training state: damaged ({item.name} is {value!r})")
        return progress
