"""Progress of preparing a corpus, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


def say(message: str, quiet: bool) -> None:
    """Print one line, unless quiet."""
    if not quiet:
        print(message, file=sys.stderr)


@contextmanager
def preparing(name: str, unit: str, quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a bar on a terminal, one line elsewhere, nothing if quiet; gives the function that `prepare` calls with
    bytes done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        say(f"preparing {name} in {unit} tokens", quiet)
    name = name if len(name) <= 40 else f"...{name[-37:]}"
    with _bar(console, quiet) as bar:
        task = bar.add_task("preparing", total=None, name=name, doing="reading")
        stage = ""

        def progress(doing: str, done: int, total: int | None) -> None:
            nonlocal stage
            if doing != stage:
                bar.reset(task, total=total, name=name, doing=doing)  # fields that are not given would go
                stage = doing
            bar.update(task, advance=done)

        yield progress


class DownloadBar:
    """The progress bar of a download, as pooch drives it: `total` is set, then `update`, `reset` and `close`."""

    def __init__(self, name: str, quiet: bool):
        self._name, self._quiet = name, quiet
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self.total = 0

    def update(self, done: int) -> None:
        """Count bytes that have arrived."""
        if self._bar is None:
            self._bar = _bar(self._console, self._quiet)
            self._bar.start()
            self._bar.add_task("download", total=self.total or None, name=self._name, doing="downloading")
        self._bar.update(self._bar.task_ids[0], advance=done)

    def reset(self) -> None:
        """Begin again."""
        if self._bar is not None:
            self._bar.reset(self._bar.task_ids[0], total=self.total or None, name=self._name, doing="downloading")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar(console: Console, quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.fields[name]}: {task.fields[doing]}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )
