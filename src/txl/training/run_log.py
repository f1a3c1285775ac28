"""The log of a run, written during training: events in log.jsonl, the source of truth, and figures for TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from txl.errors import Field, UserError
from txl.evaluation.stream import EvaluationResult
from txl.runs.directory import RunDirectory
from txl.runs.events import EventName
from txl.training.pace import StepFigures


class Scalars:
    """Writer of figures by step for TensorBoard.

    Args:
        directory: run directory, in which the folder `tensorboard` is created; None: nothing is written.
    """

    def __init__(self, directory: Path | None):
        self._writer = None
        if directory is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                install = "install it with pip install 'transformer-xl[tensorboard]', or set "
                remedy = (install, Field("train.tensorboard", False))
                but = "the package tensorboard is missing"
                raise UserError(field="train.tensorboard", value=True, but=but, remedy=remedy) from None
            self._writer = SummaryWriter(str(directory / "tensorboard"))

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Write the figures of a step; figures that are not finite are left out."""
        if self._writer is not None:
            for name, value in figures.items():
                if math.isfinite(value):
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write the buffered figures and close the writer."""
        if self._writer is not None:
            self._writer.close()


class LogWriter:
    """The log of a run; only process 0 writes to it.

    Args:
        directory: run directory.
        writes: True in process 0; the other processes write nothing.
        needed: True if a line that cannot be written (a full disk) stops the run.
        tensorboard: True if the figures are also written for TensorBoard.
        say: function that shows a line to the user.
    """

    def __init__(
        self, directory: RunDirectory, *, writes: bool, needed: bool, tensorboard: bool, say: Callable[[str], None]
    ):
        self._directory, self._writes, self._needed, self._say = directory, writes, needed, say
        self._scalars = Scalars(directory.path if tensorboard and writes else None)
        self._is_full = False

    def record(self, event: EventName, step: int, **fields: object) -> None:
        """Append an event to the log.

        Raises:
            UserError: if the event cannot be written and the log is needed.
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

    def training(self, figures: StepFigures) -> None:
        """Record the figures of the steps since the last log line."""
        names = ("loss", "learning_rate", "grad_norm", "tokens_per_second")
        measures = {name: getattr(figures, name) for name in names}
        counts = {name: getattr(figures, name) for name in ("tokens", "tokens_read", "elapsed")}
        self.record(EventName.TRAIN, figures.step, **measures, **counts)
        self._scalars.add(figures.step, {f"train/{name}": value for name, value in measures.items()})

    def validation(self, step: int, result: EvaluationResult, averaged: int | None) -> None:
        """Record the figures of an evaluation; `averaged` is the number of steps whose weights are averaged, if any."""
        self.record(EventName.VALID, step, averaged=averaged, **result.to_dict())
        self._scalars.add(step, {f"valid/{name}": getattr(result, name) for name in ("nll", "bpc", "ppl")})

    def close(self) -> None:
        """Write the buffered TensorBoard figures."""
        self._scalars.close()
