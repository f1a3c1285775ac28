"""Display of a run on standard error: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from txl.training.pace import StepFigures
from txl.units import duration, metric


class Display:
    """Output of figures and messages; a context manager, because a live panel has to be closed.

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
        self._figures: StepFigures | None = None
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

    def show(self, figures: StepFigures) -> None:
        """Show the figures of a step in the live panel, if there is one."""
        self._figures = figures
        if self._live:
            self._live.update(self._panel(figures))

    def line(self, figures: StepFigures) -> None:
        """Print figures that are also logged, unless there is a live panel."""
        if self._live or self.quiet:
            return
        name, value = metric(self._unit, figures.loss)
        self.message(
            f"step {figures.step}/{self._steps} | loss {figures.loss:.4f} | {name} {value} | "
            f"{figures.tokens_per_second:,.0f} tokens/s | lr {figures.learning_rate:.2e} | "
            f"grad norm {figures.grad_norm:.3f} | left {duration(figures.seconds_left)}"
        )

    def valid(self, step: int, nll: float, tokens: int, is_best: bool) -> None:
        """Report an evaluation on the validation split."""
        name, value = metric(self._unit, nll)
        self._valid = f"{name} {value} at step {step}"
        best = ", the best so far" if is_best else ""
        self.message(f"validation at step {step}: {name} {value} on {tokens:,} tokens{best}")
        if self._figures is not None:
            self.show(self._figures)

    def _panel(self, figures: StepFigures) -> Table:
        name, value = metric(self._unit, figures.loss)
        self._bar.update(self._task, completed=figures.step)
        rows = Table.grid(padding=(0, 2))
        for label, text in (
            ("loss", f"{figures.loss:.4f} nats"),
            (name, value),
            ("validation", self._valid),
            ("speed", f"{figures.tokens_per_second:,.0f} tokens/s"),
            ("learning rate", f"{figures.learning_rate:.2e}"),
            ("gradient norm", f"{figures.grad_norm:.3f}"),
            ("time left", duration(figures.seconds_left)),
        ):
            rows.add_row(f"  {label}", text)
        panel = Table.grid()
        panel.add_row(self._bar)
        panel.add_row(rows)
        return panel
