"""The record of a run while it trains: events in log.jsonl, the source of truth, and figures for TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from txl.errors import UserError
from txl.evaluation.perplexity import EvaluationResult
from txl.runs.directory import RunDirectory
from txl.runs.events import EventName
from txl.training.display import Reading


class Scalars:
    """Writes figures by step.

    Args:
        directory: the run's, in which the folder `tensorboard` is made; None: writes nothing.
    """

    def __init__(self, directory: Path | None):
        self._writer = None
        if directory is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError(
                    "train.tensorboard needs the package tensorboard; install it with pip install "
                    "'transformer-xl[tensorboard]', or set --train.tensorboard false"
                ) from None
            self._writer = SummaryWriter(str(directory / "tensorboard"))

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Write figures of a step; those that are not finite are left out."""
        if self._writer is not None:
            for name, value in figures.items():
                if math.isfinite(value):
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is still buffered."""
        if self._writer is not None:
            self._writer.close()


class RunLog:
    """The log of a run, which process 0 alone writes.

    Args:
        directory: the run's.
        writes: False for every process but the first; nothing is then written.
        needed: whether a line that cannot be written (a full disk) stops the run.
        tensorboard: whether TensorBoard gets the figures too.
        say: shows a line to the user.
    """

    def __init__(
        self, directory: RunDirectory, *, writes: bool, needed: bool, tensorboard: bool, say: Callable[[str], None]
    ):
        self._directory, self._writes, self._needed, self._say = directory, writes, needed, say
        self._scalars = Scalars(directory.path if tensorboard and writes else None)
        self._is_full = False

    def record(self, event: EventName, step: int, **fields: Any) -> None:
        """Add an event.

        Raises:
            UserError: if it cannot be written and is needed.
        """
        if not self._writes:
            return
        try:
            self._directory.append(event, step, **fields)
            self._is_full = False
        except UserError as error:
            if self._needed:
                raise
            if not self._is_full:
                self._say(f"note: {error}; training goes on without it")
            self._is_full = True

    def training(self, reading: Reading) -> None:
        """Add the figures of the steps since the last line."""
        figures = {name: getattr(reading, name) for name in ("loss", "learning_rate", "grad_norm", "tokens_per_second")}
        counts = {name: getattr(reading, name) for name in ("tokens", "tokens_read", "elapsed")}
        self.record(EventName.TRAIN, reading.step, **figures, **counts)
        self._scalars.add(reading.step, {f"train/{name}": value for name, value in figures.items()})

    def validation(self, step: int, result: EvaluationResult, averaged: int | None) -> None:
        """Add an evaluation's figures; `averaged` is the number of steps whose weights are averaged."""
        self.record(EventName.VALID, step, averaged=averaged, **result.to_dict())
        self._scalars.add(step, {f"valid/{name}": getattr(result, name) for name in ("nll", "bpc", "ppl")})

    def close(self) -> None:
        """Write what is still buffered."""
        self._scalars.close()
