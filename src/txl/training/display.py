"""Display of a run on standard error: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from txl.units import duration, metric


@dataclass
class Reading:
    """Figures of a run after a step."""

    step: int
    loss: float
    tokens_per_second: float
    learning_rate: float
    grad_norm: float
    seconds_left: float
    tokens: int
    """Number of targets trained on since the run began."""
    tokens_read: int
    """Number of tokens read since the run began."""
    elapsed: float
    """Seconds spent on the run since it began."""


class Pace:
    """Timer of the steps. Work between steps (evaluation, saving) counts only in the estimate of the time left.

    Args:
        tokens_read: number of tokens that the run has read so far.
    """

    def __init__(self, tokens_read: int):
        self._began = self._ticked = self._step_began = time.perf_counter()
        self.steps = 0
        """Number of steps that this process has made."""
        self.new_line(tokens_read)

    def tick(self) -> float:
        """Return the seconds since the last call."""
        before, self._ticked = self._ticked, time.perf_counter()
        return self._ticked - before

    def begin_step(self) -> None:
        """Record the beginning of a step."""
        self._step_began = time.perf_counter()

    def end_step(self) -> None:
        """Record the end of a step."""
        self._line_seconds += time.perf_counter() - self._step_began
        self.steps += 1

    def new_line(self, tokens_read: int) -> None:
        """Restart the measurement of the speed, as a log line has been written."""
        self._line_seconds, self._line_tokens = 0.0, tokens_read

    def tokens_per_second(self, tokens_read: int) -> float:
        """Return the speed of the steps since the last log line; 0 if the run went back to a step before that line."""
        return max(0, tokens_read - self._line_tokens) / self._line_seconds

    def seconds_left(self, steps: int) -> float:
        """Estimate the seconds that `steps` more steps will take, including the work between them."""
        return steps * (time.perf_counter() - self._began) / self.steps


class Display:
    """Output of readings and messages; a context manager, because a live panel has to be closed.

    A display whose terminal or pipe is gone becomes quiet: training goes on, and the log has everything.
    """

    def __init__(self, name: str, unit: str, steps: int, quiet: bool):
        self.quiet = quiet
        self._unit, self._steps = unit, steps
        console = Console(stderr=True)
        self._live: Live | None = None
        if console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), TextColumn("step {task.completed}/{task.total}")
            )
            self._task = self._bar.add_task(escape(name), total=steps)
            self._live = Live(console=console, refresh_per_second=4)
        self._reading: Reading | None = None
        self._valid = "not yet"

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            with suppress(OSError):
                self._live.stop()

    def message(self, text: str) -> None:
        """Print a line that stays on the screen; a path in it may hold line ends."""
        if self.quiet:
            return
        text = " ".join(text.splitlines())
        try:
            if self._live:
                self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)
            else:
                print(text, file=sys.stderr, flush=True)
        except OSError:
            self.quiet = True

    def set_steps(self, steps: int) -> None:
        """Change the number of steps of the run."""
        self._steps = steps
        if self._live:
            self._bar.update(self._task, total=steps)

    def show(self, reading: Reading) -> None:
        """Show the reading of a step in the live panel, if there is one."""
        self._reading = reading
        if self._live:
            self._live.update(self._panel(reading))

    def line(self, reading: Reading) -> None:
        """Print a reading that is also logged, unless there is a live panel."""
        if self._live or self.quiet:
            return
        name, value = metric(self._unit, reading.loss)
        self.message(
            f"step {reading.step}/{self._steps} | loss {reading.loss:.4f} | {name} {value} | "
            f"{reading.tokens_per_second:,.0f} tokens/s | lr {reading.learning_rate:.2e} | "
            f"grad norm {reading.grad_norm:.3f} | left {duration(reading.seconds_left)}"
        )

    def valid(self, step: int, nll: float, tokens: int, is_best: bool) -> None:
        """Report an evaluation on the validation split."""
        name, value = metric(self._unit, nll)
        self._valid = f"{name} {value} at step {step}"
        best = ", the best so far" if is_best else ""
        self.message(f"validation at step {step}: {name} {value} on {tokens:,} tokens{best}")
        if self._reading is not None:
            self.show(self._reading)

    def _panel(self, reading: Reading) -> Table:
        name, value = metric(self._unit, reading.loss)
        self._bar.update(self._task, completed=reading.step)
        figures = Table.grid(padding=(0, 2))
        for label, text in (
            ("loss", f"{reading.loss:.4f} nats"),
            (name, value),
            ("validation", self._valid),
            ("speed", f"{reading.tokens_per_second:,.0f} tokens/s"),
            ("learning rate", f"{reading.learning_rate:.2e}"),
            ("gradient norm", f"{reading.grad_norm:.3f}"),
            ("time left", duration(reading.seconds_left)),
        ):
            figures.add_row(f"  {label}", text)
        panel = Table.grid()
        panel.add_row(self._bar)
        panel.add_row(figures)
        return panel
