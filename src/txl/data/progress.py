"""Progress of preparing and downloading a corpus, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

StageProgress = Callable[[str, int, int | None], None]
"""Function that receives the name of the stage, the bytes of text newly processed, and all bytes (None: unknown)."""


def say(message: str, quiet: bool) -> None:
    """Print one line, unless quiet."""
    if not quiet:
        print(" ".join(message.splitlines()), file=sys.stderr)


@contextmanager
def preparing(name: str, unit: str, quiet: bool) -> Iterator[StageProgress]:
    """Show the progress of preparing a corpus: a bar on a terminal, else one line; nothing if quiet."""
    with progress_bar(quiet) as bar:
        if not bar.console.is_terminal:
            say(f"preparing {name} in {unit} tokens", quiet)
        name = name if len(name) <= 40 else f"...{name[-37:]}"
        task = bar.add_task("preparing", total=None, name=name, doing="reading")

        def progress(doing: str, done: int, total: int | None) -> None:
            if doing != bar.tasks[0].fields["doing"]:
                bar.reset(task, total=total, name=name, doing=doing)  # reset removes fields that are not passed
                bar.tasks[0].total = total  # reset takes None for no change
            bar.update(task, advance=done)

        yield progress


def progress_bar(quiet: bool) -> Progress:
    """Return a bar on standard error, which shows nothing if quiet or without a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.fields[name]}: {task.fields[doing]}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )
