"""The training state, which every step changes, and the training setup, which stays the same."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from txl.config import RunConfig
from txl.config.values import checked, from_plain
from txl.data.corpora import Corpus
from txl.data.lanes import LaneStream, StreamPosition
from txl.devices import runs_ahead
from txl.errors import UserError
from txl.files import JsonObject
from txl.models.family import FamilyModel
from txl.models.language_model import State
from txl.runs.directory import RunDirectory
from txl.training.display import Display, LogWriter
from txl.training.optimisers import Optimizer
from txl.training.parallel import TrainedModel

_RECENT = 100  # updates for the mean and deviation of the loss; before so many updates no loss is a spike


@dataclass
class LossWatch:
    """Running mean and variance of the loss over recent updates, for the detection of spikes."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    in_spike: bool = False

    def limit(self, threshold: float) -> float:
        """Return the limit above which a loss is a spike: `threshold` standard deviations above the mean."""
        return math.inf if self.count < _RECENT else self.mean + threshold * math.sqrt(self.variance)

    def sees(self, loss: float, threshold: float) -> bool:
        """Add a finite loss, in nats, to the statistics, and return whether a spike begins with this loss."""
        limit = self.limit(threshold)
        begins = loss > limit and not self.in_spike
        self.in_spike = loss > limit
        # A spike counts as the limit: it does not hide the next one, and a loss that stays high becomes the new mean.
        loss = min(loss, limit)
        self.count += 1
        weight = max(1 / self.count, 1 / _RECENT)
        distance = loss - self.mean
        self.mean += weight * distance
        self.variance = (1 - weight) * (self.variance + weight * distance**2)
        return begins


@dataclass
class Counters:
    """Counts since the first step of a run, across all interruptions; a checkpoint stores them as JSON."""

    step: int = 0  # number of steps made, including skipped updates: the position in every schedule
    tokens: int = 0  # number of targets that had a loss
    tokens_read: int = 0  # number of tokens read, in all segments; above `tokens` if not every position has a loss
    seconds: float = 0.0  # time spent training, evaluating and saving
    best_nll: float | None = None  # lowest validation loss in nats per token
    best_step: int | None = None  # step that reached it
    loss_sum: float = 0.0  # sum of the losses since the last log line, in nats
    loss_count: int = 0  # number of targets in the sum
    validation_losses: list[float] = field(default_factory=list)  # of all evaluations, in nats per token, oldest first
    validation_due: bool = False  # True if the run was stopped during the evaluation after this step
    skipped: int = 0  # number of updates skipped because the loss or the gradient was not finite
    skipped_in_a_row: int = 0
    scheduled_step: int | None = None  # step of the newest scheduled checkpoint; those of an interruption do not count
    scheduled_best: int | None = None  # `best_step` at that checkpoint, which a run that goes back to it restores
    rollbacks: int = 0  # number of times that the run went back to a checkpoint because of a spike of the loss
    watch: LossWatch = field(default_factory=LossWatch)
    first_loss: float | None = None  # loss of the first update that was not skipped, in nats per target
    last_loss: float | None = None  # loss of the last update that was not skipped; None after a loss that is not finite
    last_norm: float | None = None  # gradient norm before clipping of the last update that was not skipped

    @classmethod
    def from_dict(cls, values: JsonObject) -> Counters:
        """Build counters from the result of `dataclasses.asdict`; a value of another type raises UserError."""

        def losses(value: object) -> list[float]:
            if not isinstance(value, list):
                raise UserError("progress.validation_losses is no list")
            return [checked(float, loss, "progress.validation_losses") for loss in value]

        return from_plain(cls, values, "progress.", {list[float]: losses})


class WeightAverage:
    """The running average of a model's weights, while the model itself continues training.

    It begins as a copy of the weights; mu is the weight of the newest ones, and None means 1/n at the n-th update: the
    plain mean, as in averaged SGD (Polyak and Juditsky 1992). The authors' moving average for Penn Treebank, mu =
    1/step counted from the beginning of the average, equals this plain mean.
    """

    def __init__(self, model: FamilyModel, mu: float | None = None):
        self.model = copy.deepcopy(model).requires_grad_(False).eval()  # averaged weights, to evaluate and to save
        self.count = 0  # number of updates averaged so far; 0: the average is the initial copy
        self._mu = mu
        newest = next(model.parameters()).detach()
        # Weight of the newest weights. A GPU's kernel reads a float32.
        self._weight = newest.new_ones((), dtype=torch.float32 if runs_ahead(newest) else newest.dtype)

    def prepare(self) -> None:
        """Count the next update, and set its weight where a recorded step reads it, too."""
        # The copy made at the beginning is no weight of a step.
        self._weight.fill_(1 / (self.count + 1) if self._mu is None or self.count == 0 else self._mu)
        self.count += 1

    @torch.no_grad()
    def update(self, model: FamilyModel, skipped: Tensor | None = None) -> None:
        """Add the weights after a step, prepared by `prepare`, to the average: average + mu (newest - average).

        If `skipped`, a bool on the device that the host does not read, is true, the averaged weights stay unchanged,
        and the caller has to set `count` back.
        """
        average_weights(list(self.model.parameters()), list(model.parameters()), self._weight, skipped)
        for average, newest in zip(self.model.buffers(), model.buffers(), strict=True):
            average.copy_(newest)


def average_weights(
    averages: list[Tensor], newest: list[Tensor], weight: Tensor, skipped: Tensor | None = None
) -> None:
    """Set each average to average + weight (newest - average), unless `skipped` (a bool without dimension) is true.

    All are on one device, also `weight`, which has no dimension.
    """
    if not runs_ahead(weight):
        used = weight if skipped is None else torch.where(skipped, 0.0, weight)
        torch._foreach_lerp_(averages, newest, [used] * len(averages))  # pyright: ignore[reportPrivateImportUsage]
        return
    # On a GPU, PyTorch's joint kernel of `lerp` takes a Python number, which a recorded step could not change. That
    # of SGD reads the rate from the device: rate `weight`, gradient -newest (`maximize`), and weight decay 1.
    torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage]
        averages,
        newest,
        [],
        lr=weight,
        weight_decay=1.0,
        momentum=0.0,
        dampening=0.0,
        nesterov=False,
        maximize=True,
        is_first_step=False,
        found_inf=None if skipped is None else skipped.float(),
    )


@dataclass
class TrainingState:
    """Everything that the next step depends on, except PyTorch's random generators (`snapshot`).

    A run resumed from it continues as if it had never stopped.
    """

    model: FamilyModel  # the model that is trained; the class of its state depends on the family
    optimizer: Optimizer
    memory: list[State]  # state of `model` for each part of this process's lanes
    position: StreamPosition  # position of the next segment to read
    counters: Counters = field(default_factory=Counters)
    average: WeightAverage | None = None  # the average of the weights, once it has begun

    @property
    def best_model(self) -> FamilyModel:
        """The model to evaluate and to save: the average of the weights if there is one, else `model`."""
        return self.model if self.average is None else self.average.model


@dataclass(frozen=True)
class TrainingSetup:
    """The objects that a run trains with. No step replaces them; steps change the weights of the model in `trained`."""

    run: RunConfig
    directory: RunDirectory
    corpus: Corpus
    device: str
    trained: TrainedModel  # the model, with the engine that synchronises it between processes
    stream: LaneStream
    display: Display
    log: LogWriter
    belongs: JsonObject  # what the weights of a checkpoint belong to (`checkpoints.weights_identity`)

    def empty_memory(self) -> list[State]:
        """Return empty memory for each part of this process's lanes."""
        train = self.run.train
        lanes = len(self.trained.processes.share(train.batch_size)) // train.micro_batches
        return [self.trained.model.init_state(lanes) for _ in range(train.micro_batches)]
