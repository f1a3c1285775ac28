"""The state that the steps of training change, and the setup that they leave as it is.

`TrainingState` is everything that the next step depends on: `snapshot` copies it into a checkpoint and puts it back.
`TrainingSetup` is what stays the same from the first step to the last.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import torch

from txl.config import RunConfig
from txl.data.corpora import Corpus
from txl.data.streams import LaneStream, SentenceStream, StreamPosition
from txl.errors import UserError
from txl.files import JsonObject
from txl.models.family import FamilyModel
from txl.models.language_model import State
from txl.runs.directory import RunDirectory
from txl.training.display import Display
from txl.training.optimisers import WeightAverage
from txl.training.parallel import TrainedModel
from txl.training.run_log import RunLog

_RECENT = 100
"""Updates over which the mean and the deviation of the loss are taken, and before which no loss is called a spike."""


@dataclass
class LossWatch:
    """Running mean and variance of the loss of the recent updates, by which a spike is told from noise."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    in_spike: bool = False

    def limit(self, threshold: float) -> float:
        """Return the loss above which it is a spike: `threshold` standard deviations above the mean."""
        return math.inf if self.count < _RECENT else self.mean + threshold * math.sqrt(self.variance)

    def sees(self, loss: float, threshold: float) -> bool:
        """Take in a finite loss, in nats, and return whether a spike begins with it.

        A loss above the limit counts as the limit: a spike does not hide the next one, and a loss that stays high
        becomes the new mean in time.
        """
        limit = self.limit(threshold)
        begins = loss > limit and not self.in_spike
        self.in_spike = loss > limit
        value = min(loss, limit)
        self.count += 1
        weight = max(1 / self.count, 1 / _RECENT)
        distance = value - self.mean
        self.mean += weight * distance
        self.variance = (1 - weight) * (self.variance + weight * distance**2)
        return begins


@dataclass
class Counters:
    """Numbers counted since the first step, over all interruptions; a checkpoint has them as JSON."""

    step: int = 0
    """Steps made, skipped updates included: the position in every schedule."""
    tokens: int = 0
    """Targets that had a loss."""
    tokens_read: int = 0
    """Tokens of all segments; more than `tokens` where not every position has a loss."""
    seconds: float = 0.0
    """Time spent training, evaluating and saving."""
    best_nll: float | None = None
    """Lowest validation loss in nats a token, and the step that reached it."""
    best_step: int | None = None
    loss_sum: float = 0.0
    """Nats of all targets since the last line of the log, and the number of these targets."""
    loss_count: int = 0
    validation_losses: list[float] = field(default_factory=list)
    """Nats a token of all evaluations so far, oldest first."""
    validation_due: bool = False
    """True if the run was stopped in the middle of this step's evaluation."""
    skipped: int = 0
    """Updates skipped because the loss or the gradient was not finite."""
    skipped_in_a_row: int = 0
    scheduled_step: int | None = None
    """Step of the newest checkpoint that was written because it was due; those of an interruption do not count."""
    scheduled_best: int | None = None
    """The best step when that checkpoint was due: a run that goes back to it has that best again."""
    rollbacks: int = 0
    """Times that the run went back to a checkpoint because of a spike of the loss."""
    watch: LossWatch = field(default_factory=LossWatch)
    first_loss: float | None = None
    """Nats a target of the first update that was not skipped, and of the last."""
    last_loss: float | None = None

    @classmethod
    def from_dict(cls, values: JsonObject) -> Counters:
        """Build the counters from `dataclasses.asdict` of them."""
        try:
            fields: JsonObject = values | {"watch": LossWatch(**values["watch"])}
            counters = cls(**fields)
        except (TypeError, KeyError) as error:
            raise UserError(f"training state: damaged ({error})") from None
        for item in dataclasses.fields(counters):
            value, default = getattr(counters, item.name), getattr(cls(), item.name)
            if default is not None and not isinstance(value, (int, float) if type(default) is float else type(default)):
                raise UserError(f"training state: damaged ({item.name} is {value!r})")
        return counters


@dataclass
class TrainingState:
    """Everything that the next step depends on, so that a run that goes on from it is as if it had never stopped.

    The state of PyTorch's global random generators belongs to it too; `snapshot` reads and sets them.
    """

    model: FamilyModel
    """The model that trains; its state of memory is of a type of its own in every family."""
    optimizer: torch.optim.Optimizer
    memory: list[State]
    """The memory of each part of this process's lanes: states of `model`."""
    position: StreamPosition
    """The next segment to read."""
    counters: Counters = field(default_factory=Counters)
    average: WeightAverage[FamilyModel] | None = None
    """The average of the weights, once it has begun."""

    @property
    def best_model(self) -> FamilyModel:
        """The model to evaluate and to save: that of the averaged weights, if there is one."""
        return self.model if self.average is None else self.average.model


@dataclass(frozen=True)
class TrainingSetup:
    """Everything that a run trains with and that no step changes."""

    run: RunConfig
    directory: RunDirectory
    corpus: Corpus
    device: str
    trained: TrainedModel
    """The model and the engine that keeps the processes' copies of it in step."""
    stream: LaneStream | SentenceStream
    display: Display
    log: RunLog

    def first_state(self, optimizer: torch.optim.Optimizer) -> TrainingState:
        """Return the state at the beginning of the text."""
        return TrainingState(self.trained.model, optimizer, self.empty_memory(), self.stream.start())

    def empty_memory(self) -> list[State]:
        """Return the memory of each part of the lanes at the beginning of a text."""
        train = self.run.train
        lanes = len(self.trained.processes.share(train.batch_size)) // train.micro_batches
        return [self.trained.model.init_state(lanes) for _ in range(train.micro_batches)]
