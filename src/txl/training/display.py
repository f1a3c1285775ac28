"""What a person sees while a model trains: a live panel on a terminal, plain lines elsewhere; all on standard error."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from txl.units import duration, metric


@dataclass
class Reading:
    """The figures of one moment."""

    step: int
    loss: float
    tokens_per_second: float
    learning_rate: float
    grad_norm: float
    seconds_left: float


class Display:
    """Shows readings and messages; a context manager, because a live panel has to be put away."""

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
            self._live.stop()

    def message(self, text: str) -> None:
        """A line that stays."""
        if self.quiet:
            return
        if self._live:
            self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def show(self, reading: Reading) -> None:
        """The reading of every step; only a live panel has a place for it."""
        self._reading = reading
        if self._live:
            self._live.update(self._panel(reading))

    def line(self, reading: Reading) -> None:
        """A reading that is also in the log: a line where there is no live panel."""
        if self._live or self.quiet:
            return
        name, value = metric(self._unit, reading.loss)
        self.message(
            f"step {reading.step}/{self._steps} | loss {reading.loss:.4f} | {name} {value} | "
            f"{reading.tokens_per_second:,.0f} tokens/s | lr {reading.learning_rate:.2e} | "
            f"grad norm {reading.grad_norm:.3f} | left {duration(reading.seconds_left)}"
        )

    def valid(self, step: int, result: dict[str, Any], is_best: bool) -> None:
        """A new evaluation on the validation split."""
        name, value = metric(self._unit, result["nll"])
        self._valid = f"{name} {value} at step {step}"
        best = ", the best so far" if is_best else ""
        self.message(f"validation at step {step}: {name} {value} on {result['tokens']:,} tokens{best}")
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
