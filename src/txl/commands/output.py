"""Output of commands: lines, tables, JSON, progress, and events in a run's log."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any, TextIO

from txl.errors import UserError
from txl.files import is_full, is_replaceable, remove_partials, replacing, with_null
from txl.runs.checkpoints import checkpoint_step
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
    edge. In a file or a pipe, each row is one line. `text` has the headings of columns that hold text, not numbers.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    rows, console = list(rows), Console()
    table, width = Table(), 0
    for roomy in (True, False):  # the second is only for a terminal that is too narrow
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for place, heading in enumerate(headings):
            if heading in text:
                table.add_column(Text(heading), overflow="fold")
                continue
            words = [heading] if roomy else [word[:12] for word in heading.split()]
            widest = max([*map(len, words), *(len(row[place]) for row in rows)], default=1)
            table.add_column(Text(heading), justify="right", overflow="fold", width=widest)
        for row in rows:
            table.add_row(*map(Text, row))
        least, width = Measurement.get(console, console.options.update(max_width=sys.maxsize), table)
        if not console.is_terminal or width <= console.width:
            break
        width = max(console.width, least)
    print(title)
    sys.stdout.flush()
    Console(width=width).print(table)


@contextmanager
def progress_by_part(quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show progress on standard error (only on a terminal); yield the function that moves the bar.

    It takes the name of a part of the work, how much of it is done, and of how much; a new part ends the bar before.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console, parts = Console(stderr=True), dict[str, Any]()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:

        def show(part: str, done: int, total: int | None) -> None:
            if part not in parts:
                for task in parts.values():
                    progress.update(task, visible=False)
                parts[part] = progress.add_task(part, total=None)
            progress.update(parts[part], completed=done, total=total)

        yield show


@contextmanager
def progress_bar(description: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show progress as `progress_by_part` does, with one part; the function takes how much is done, and of how much."""
    with progress_by_part(quiet) as show:
        show(description, 0, None)
        yield partial(show, description)


def record(run: RunDirectory, event: EventName, checkpoint: Path, /, **fields: object) -> None:
    """Add an event to the run's log; if the log cannot be written, print a note instead."""
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
        for left in remove_partials(path) if whole else ():
            say(f"note: {left}, which a killed process had left, was removed")
        # Nobody else may read the copy of a private file until it has that file's permissions.
        access = 0o600 if like is not None and whole else 0o666
        encoding, newline = (None, None) if binary else ("utf-8", "\n")
        with (
            replacing(path, like) if whole else nullcontext(path) as written,
            open(
                written,
                "wb" if binary else "w",
                encoding=encoding,
                newline=newline,
                opener=lambda name, flags: os.open(name, flags, access),
            ) as file,
        ):
            yield file
    except OSError as error:
        if error.filename == str(written) or (error.filename is None and is_full(error)):
            problem = f"cannot be written ({error.strerror})"
            raise UserError(problem, field="out", value=out, remedy="give another file") from None
        raise
