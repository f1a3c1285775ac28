"""A reproduction's folder: the experiment that it holds, and JSON files that are read again."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import portalocker
from portalocker import LockFlags

from txl.errors import UserError
from txl.files import JsonObject, read_json, write_whole
from txl.runs.directory import of_today


class Busy(Exception):
    """Another process of the same reproduction works on this part."""


@dataclass(frozen=True)
class Folder:
    """A reproduction's folder, with its experiment.json.

    Args:
        path: the folder; it need not be there.
        about: what it must be about, as far as that is known before the corpus is opened.
    """

    path: Path
    about: JsonObject

    def check(self) -> None:
        """Refuse a folder that is known to be something else's."""
        # Listed before the record is read: another process may be writing it.
        is_other = self.path.exists() and (not self.path.is_dir() or any(map(_is_foreign, self.path.iterdir())))
        there = stored_json(self._record)
        if there is not None:
            self._agrees(there, self.about)
        elif is_other:
            raise UserError(f"--out {self.path}: not empty and not a reproduction; give another directory")

    def claim(self, found: JsonObject) -> None:
        """Make the folder this experiment's.

        Args:
            found: what it must be about too: the identity of its text, or the machine whose times it holds.
        """
        there, about = stored_json(self._record), self.about | found
        if there is not None and self._agrees(there, about):
            return
        for leftover in ("corpus", "memory"):  # of an experiment that came to nothing
            shutil.rmtree(self.path / leftover, ignore_errors=True)
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self._record, json.dumps(about, indent=1) + "\n")

    @contextmanager
    def working_on(self, part: str) -> Iterator[None]:
        """Keep other processes from a part of the experiment within the block.

        On a file system without locks it keeps nobody from it, and a note says so.

        Raises:
            Busy: if another process works on it.
        """
        path = self.path / "locks" / f"{part}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            try:
                portalocker.lock(file, LockFlags.EXCLUSIVE | LockFlags.NON_BLOCKING)
            except portalocker.AlreadyLocked:
                raise Busy from None
            except (OSError, portalocker.LockException) as error:
                print(f"note: {path}: no lock ({error}); start no second process here", file=sys.stderr)
            yield

    @property
    def _record(self) -> Path:
        return self.path / "experiment.json"

    def _agrees(self, there: JsonObject, asked: JsonObject) -> bool:
        """Return whether the folder holds what is asked for; refuse another experiment that has results."""
        there = of_today(there)
        changed = changes({name: there.get(name) for name in asked}, asked)
        if changed and any((self.path / name).exists() for name in ("rates", "runs", "results")):
            raise UserError(f"--out {self.path} holds another reproduction: {', '.join(changed)}; give another --out")
        return not changed


def _is_foreign(path: Path) -> bool:
    """Return whether a file or folder is none that a reproduction begins with."""
    return path.name != "locks" and not path.name.startswith("experiment.json")


def stored_json(path: Path) -> Any:
    """Return a JSON file's content; None if there is no such file."""
    try:
        return read_json(path, "delete it to measure anew")
    except (FileNotFoundError, NotADirectoryError):
        return None


def changes(old: JsonObject, new: JsonObject, prefix: str = "") -> list[str]:
    """Return the entries in which two records differ, as "data.corpus stdlib -> ptb"."""
    changed = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            changed += changes(before, after, f"{prefix}{name}.")
        elif before != after:
            changed.append(f"{prefix}{name} {before} -> {after}")
    return changed
