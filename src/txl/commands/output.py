"""Output of commands: lines, tables, JSON, progress, and events in a run's log."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from txl.errors import UserError
from txl.files import is_full, is_replaceable, remove_partials, replacing, with_null

if TYPE_CHECKING:
    from rich.measure import Measurement
    from rich.progress import Progress
    from rich.table import Table

    from txl.runs.directory import RunDirectory
    from txl.runs.events import EventName


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object on standard output; infinite numbers and NaN become null."""
    print(json.dumps(with_null(value), ensure_ascii=not _holds_all_characters(sys.stdout)))


def _holds_all_characters(stream: TextIO) -> bool:
    """Return whether the encoding of a stream has all characters of Unicode; that of a Windows pipe may not."""
    return str(getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def say(text: str) -> None:
    """Print a line on standard error; a path in it may hold line ends."""
    print(" ".join(text.splitlines()), file=sys.stderr)


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], text: Container[str] = ()) -> None:
    """Print a title and a table on standard output; markup in the table is printed unchanged.

    Numbers are never cut. On a terminal that is too narrow, text is wrapped; if that is not enough, lines run over the
    edge. In a file or a pipe, each row is one line.

    Args:
        title: title line, which may be long.
        headings: headings of the columns.
        rows: cells of each row.
        text: headings of the columns that hold text instead of numbers.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    rows, console = list(rows), Console()

    def made(roomy: bool) -> Table:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for place, heading in enumerate(headings):
            if heading in text:
                table.add_column(Text(heading), overflow="fold")
            else:
                words = [heading] if roomy else [word[:12] for word in heading.split()]
                width = max([*map(len, words), *(len(row[place]) for row in rows)], default=1)
                table.add_column(Text(heading), justify="right", overflow="fold", width=width)
        for row in rows:
            table.add_row(*map(Text, row))
        return table

    def measured(table: Table) -> Measurement:
        return Measurement.get(console, console.options.update(max_width=sys.maxsize), table)

    table, width = made(roomy=True), measured(made(roomy=True)).maximum
    if console.is_terminal and width > console.width:
        table = made(roomy=False)
        width = max(console.width, measured(table).minimum)
    print(title)
    sys.stdout.flush()
    Console(width=width).print(table)


def progress_bar(description: str, quiet: bool) -> tuple[Progress, Callable[[int, int], None]]:
    """Return a progress display on standard error (only on a terminal), and the function that moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )
    task = progress.add_task(description, total=None)

    def move(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)

    return progress, move


class ProgressByPart:
    """Progress display with one bar for each part of the work; a context manager."""

    def __init__(self, quiet: bool):
        self._quiet, self._what = quiet, ""
        self._bar: Progress | None = None
        self._move: Callable[[int, int], None] = lambda done, total: None

    def __enter__(self) -> ProgressByPart:
        return self

    def __call__(self, what: str, done: int, total: int) -> None:
        """Move the bar of part `what`; a new part ends the bar of the part before."""
        if what != self._what:
            self.__exit__()
            self._what = what
            bar, self._move = progress_bar(what, self._quiet)
            bar.start()
            self._bar = bar
        self._move(done, total)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def record(run: RunDirectory, event: EventName, checkpoint: Path, /, **fields: object) -> None:
    """Add an event to the run's log; if the log cannot be written, print a note instead."""
    from txl.runs.checkpoints import checkpoint_step

    try:
        run.append(event, checkpoint_step(checkpoint.name), **fields)
    except (OSError, UserError) as error:
        say(f"note: {error}; the result was not added")


@contextmanager
def output(out: str | None, binary: bool = False, like: os.stat_result | None = None) -> Iterator[IO[Any]]:
    """Open standard output, or a file that appears under its name when it is complete.

    A device or a named pipe (``/dev/null``, ``>(command)``) is opened directly: a file must not replace it. An
    incomplete file that a killed process has left is removed at the next call. `like` is that of `txl.files.replacing`.

    Raises:
        UserError: if the file cannot be written.
    """
    if out is None:
        if not binary and isinstance(sys.stdout, io.TextIOWrapper) and not _holds_all_characters(sys.stdout):
            sys.stdout.reconfigure(encoding="utf-8")  # as in a file
        yield sys.stdout.buffer if binary else sys.stdout
        return
    path = written = Path(out)
    try:
        whole = is_replaceable(path)
        if whole:
            for left in remove_partials(path):
                say(f"note: {left}, which a killed process had left, was removed")
        with replacing(path, like) if whole else nullcontext(path) as written:
            if binary:
                with open(written, "wb", opener=_private if like is not None and whole else None) as file:
                    yield file
            else:
                with open(written, "w", encoding="utf-8", newline="\n") as file:
                    yield file
    except OSError as error:
        if error.filename == str(written) or (error.filename is None and is_full(error)):
            problem = f"cannot be written ({error.strerror})"
            raise UserError(problem, field="out", value=out, remedy="give another file") from None
        raise


def _private(path: str, flags: int) -> int:
    """Open a file that nobody else may read until it has its permissions."""
    return os.open(path, flags, 0o600)
