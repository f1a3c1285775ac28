"""The log of a run, log.jsonl: events appended as lines, and the whole log read at once."""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import portalocker
from portalocker import LockFlags

from txl.errors import UserError
from txl.files import JsonObject, opened, parsed_json, with_null
from txl.runs.events import EventName, ImportEvent, StartEvent, fields_of, is_complete, select

# Fields in which null stands for infinity or NaN, which JSON cannot represent.
_FIGURES = ("loss", "grad_norm", "nll", "ppl", "bpc")


@dataclass(frozen=True)
class RunLog:
    """The lines of a run's log."""

    events: list[JsonObject]  # in order, with NaN for null in `_FIGURES`
    torn: int  # number of lines that are left out: cut off by a crash, or without fields of their event

    @classmethod
    def read(cls, path: Path) -> RunLog:
        """Read a log; a missing file is an empty log."""
        try:
            with opened(path) as file:
                text = file.read().decode("utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return cls([], 0)
        except OSError as error:
            raise UserError(f"{path}: the log cannot be read ({error.strerror})") from None
        # Not splitlines, which would also split at U+2028 and similar characters that a logged text may hold.
        lines = [line for line in text.split("\n") if line.strip()]
        events = [event for event in map(_parsed, lines) if is_complete(event)]
        return cls(events, len(lines) - len(events))

    @property
    def started(self) -> StartEvent | None:
        """The newest `start` event; None for an imported model."""
        starts = select(self.events, StartEvent, EventName.START)
        return starts[-1] if starts else None

    @property
    def resumed(self) -> StartEvent | None:
        """The newest `start` or `resume` event."""
        starts = select(self.events, StartEvent)
        return starts[-1] if starts else None

    @property
    def is_import(self) -> bool:
        """True for an imported model that was not trained here."""
        return self.started is None and bool(select(self.events, ImportEvent))

    @property
    def run_id(self) -> str | None:
        """Unique identifier of the run; None for an imported model."""
        return None if self.started is None else self.started["run"]

    @property
    def trained_on(self) -> JsonObject:
        """Record of the training corpus (`Corpus.info`); empty for an imported model."""
        return {} if self.started is None else cast("JsonObject", self.started["corpus"])


def _parsed(line: str) -> JsonObject:
    try:
        event = parsed_json(line)
    except ValueError:
        return {}
    return _with_nan(event) if isinstance(event, dict) else {}


def _with_nan(event: JsonObject) -> JsonObject:
    """Return an event, or a row of a sweep, with NaN for null in `_FIGURES`."""
    rows = event.get("rows")
    if isinstance(rows, list):
        event = event | {"rows": [_with_nan(row) if isinstance(row, dict) else row for row in rows]}
    return event | {name: math.nan for name in _FIGURES if event.get(name, 0) is None}


def append_event(path: Path, event: EventName, step: int, **fields: object) -> None:
    """Append an event to a log, as one line; `fields` must be declared for the event in `EVENTS`."""
    assert fields.keys() <= fields_of(event), f"{event}: {fields.keys() - fields_of(event)} are not declared"
    values = {"event": event, "step": step, "time": time.time(), **fields}
    line = json.dumps(with_null(values), ensure_ascii=False) + "\n"
    try:
        with open(path, "ab+") as file:
            # `txl eval` may write while the run trains; some network file systems have no locks.
            with suppress(portalocker.LockException):
                portalocker.lock(file, LockFlags.EXCLUSIVE)
            # A crash may have torn the last line: the next event begins on a line of its own.
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = "\n" + line
            file.write(line.encode("utf-8", errors="replace"))
    except OSError as error:
        raise UserError(f"{path}: the log cannot be written ({error.strerror})") from None
