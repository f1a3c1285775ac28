"""A run's messages about its steps: on standard error, in log.jsonl (the source of truth), and for TensorBoard."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from txl.errors import Field, UserError
from txl.evaluation.stream import EvaluationResult
from txl.runs.directory import RunDirectory
from txl.runs.events import EventName
from txl.units import duration, metric


@dataclass(frozen=True)
class StepFigures:
    """Figures of a run after a step."""

    step: int
    loss: float  # mean nats per target since the last log line
    tokens_per_second: float
    learning_rate: float
    grad_norm: float
    seconds_left: float
    tokens: int  # number of targets trained on since the run began
    tokens_read: int  # number of tokens read since the run began
    elapsed: float  # seconds spent on the run since it began


class Display:
    """Lines on standard error; if the terminal or pipe is gone, the display becomes quiet, and training goes on."""

    def __init__(self, unit: str, steps: int, quiet: bool):
        self.quiet, self.steps, self._unit = quiet, steps, unit

    def message(self, text: str) -> None:
        """Print a line; a path in it may hold line ends."""
        try:
            if not self.quiet:
                print(" ".join(text.splitlines()), file=sys.stderr, flush=True)
        except OSError:
            self.quiet = True

    def line(self, figures: StepFigures) -> None:
        """Print figures that are also logged."""
        self.message(
            f"step {figures.step}/{self.steps} | loss {figures.loss:.4f} | {' '.join(metric(self._unit, figures.loss))}"
            f" | {figures.tokens_per_second:,.0f} tokens/s | lr {figures.learning_rate:.2e} | "
            f"grad norm {figures.grad_norm:.3f} | left {duration(figures.seconds_left)}"
        )

    def valid(self, step: int, nll: float, tokens: int, is_best: bool) -> None:
        """Report an evaluation on the validation split."""
        best = ", the best so far" if is_best else ""
        self.message(f"validation at step {step}: {' '.join(metric(self._unit, nll))} on {tokens:,} tokens{best}")


class LogWriter:
    """The log of a run; only process 0 `writes` to it.

    A line that cannot be written (a full disk) stops the run if it is `needed`; else `display` says so. With
    `tensorboard`, figures are also written to the folder of this name.
    """

    def __init__(self, directory: RunDirectory, display: Display, *, writes: bool, needed: bool, tensorboard: bool):
        self._directory, self._display, self._writes, self._needed = directory, display, writes, needed
        self._is_full, self._scalars = False, None
        if tensorboard and writes:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                install = "install it with pip install 'transformer-xl[tensorboard]', or set "
                remedy = (install, Field("train.tensorboard", False))
                but = "the package tensorboard is missing"
                raise UserError(field="train.tensorboard", value=True, but=but, remedy=remedy) from None
            self._scalars = SummaryWriter(str(directory.path / "tensorboard"))

    def record(self, event: EventName, step: int, **fields: object) -> None:
        """Append an event to the log; raises UserError if that fails and the log is needed."""
        if not self._writes:
            return
        try:
            self._directory.append(event, step, **fields)
            self._is_full = False
        except UserError as error:
            if self._needed:
                raise
            if not self._is_full:
                self._display.message(f"note: {error}; training goes on without it")
            self._is_full = True

    def training(self, figures: StepFigures) -> None:
        """Record the figures of the steps since the last log line."""
        names = ("loss", "learning_rate", "grad_norm", "tokens_per_second")
        measures = {name: getattr(figures, name) for name in names}
        counts = {name: getattr(figures, name) for name in ("tokens", "tokens_read", "elapsed")}
        self.record(EventName.TRAIN, figures.step, **measures, **counts)
        self._add_scalars("train", figures.step, measures)

    def validation(self, step: int, result: EvaluationResult, averaged: int | None) -> None:
        """Record the figures of an evaluation; `averaged` is the number of steps whose weights are averaged, if any."""
        self.record(EventName.VALID, step, averaged=averaged, **result.to_dict())
        self._add_scalars("valid", step, {"nll": result.nll, "bpc": result.bpc, "ppl": result.ppl})

    def _add_scalars(self, kind: str, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            if self._scalars is not None and math.isfinite(value):
                self._scalars.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Write the buffered TensorBoard figures."""
        if self._scalars is not None:
            self._scalars.close()
