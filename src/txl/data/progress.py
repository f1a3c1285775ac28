"""Progress of preparing a corpus, on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

_LINE_EVERY = 10.0  # seconds between two lines about a preparation that takes long


def say(message: str, quiet: bool) -> None:
    """Print one line, unless quiet."""
    if not quiet:
        print(" ".join(message.splitlines()), file=sys.stderr)


@contextmanager
def preparing(name: str, unit: str, quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show the progress of preparing a corpus: a bar on a terminal, else a line every few seconds; nothing if quiet.

    Yields:
        The function that `prepare` calls with its progress (`StageProgress`).
    """
    console, began = Console(stderr=True), time.monotonic()
    if not console.is_terminal:
        say(f"preparing {name} in {unit} tokens", quiet)
    name = name if len(name) <= 40 else f"...{name[-37:]}"
    with _bar(console, quiet) as bar:
        task = bar.add_task("preparing", total=None, name=name, doing="reading")

        def line() -> str:
            state = bar.tasks[0]
            share = f", {state.percentage:.0f}%" if state.total else ""
            return f"preparing {name}: {state.fields['doing']}{share}, {time.monotonic() - began:.0f} s so far"

        def progress(doing: str, done: int, total: int | None) -> None:
            if doing != bar.tasks[0].fields["doing"]:
                bar.reset(task, total=total, name=name, doing=doing)  # reset removes fields that are not passed
                bar.tasks[0].total = total  # reset takes None for no change
            bar.update(task, advance=done)

        with nullcontext() if quiet or console.is_terminal else _repeated(line):
            yield progress


@contextmanager
def _repeated(line: Callable[[], str]) -> Iterator[None]:
    """Print a line again and again, also while a library works and reports nothing."""
    over = threading.Event()

    def print_lines() -> None:
        while not over.wait(_LINE_EVERY):
            say(line(), quiet=False)

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class DownloadBar:
    """Progress bar of a download, with the interface that pooch uses: `total`, `update`, `reset` and `close`."""

    def __init__(self, name: str, quiet: bool):
        self.total = 0
        self._bar = _bar(Console(stderr=True), quiet)
        self._task = self._bar.add_task("download", total=None, name=name, doing="downloading")
        self._bar.start()

    def update(self, done: int) -> None:
        """Add a number of received bytes."""
        self._bar.update(self._task, advance=done, total=self.total or None)

    def reset(self) -> None:
        """Set the progress back to zero."""
        self._bar.update(self._task, completed=0)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        self._bar.stop()


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
