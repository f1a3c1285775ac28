"""Folder of a reproduction: the record of its experiment, locks on parts of the work, and stored JSON files."""

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
    """Exception for a part that another process of the same reproduction works on."""


@dataclass(frozen=True)
class Folder:
    """Folder of a reproduction, with the record experiment.json.

    Args:
        path: path of the folder, which may be missing.
        about: required entries of the record, as far as they are known before the corpus is opened.
    """

    path: Path
    about: JsonObject

    @property
    def is_begun(self) -> bool:
        """True if the folder has the record of an experiment."""
        return self._record.is_file()

    def check(self) -> None:
        """Refuse a folder with other files or the results of another experiment."""
        # Listed before the record is read, because another process may write the record at any time.
        is_other = self.path.exists() and (not self.path.is_dir() or any(map(_is_foreign, self.path.iterdir())))
        there = stored_json(self._record)
        if there is not None:
            self._agrees(there, self.about)
        elif is_other:
            raise UserError(f"--out {self.path}: not empty and not a reproduction; give another directory")

    def claim(self, found: JsonObject) -> None:
        """Create the folder and its record, unless the record agrees already.

        Args:
            found: further entries of the record: the identity of the text, or the hardware whose times are stored.
        """
        there, about = stored_json(self._record), self.about | found
        if there is not None and self._agrees(there, about):
            return
        for leftover in ("corpus", "memory"):  # left by an experiment without results
            shutil.rmtree(self.path / leftover, ignore_errors=True)
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self._record, json.dumps(about, indent=1) + "\n")

    @contextmanager
    def working_on(self, part: str) -> Iterator[None]:
        """Lock a part of the experiment within the block, against other processes.

        On a file system without locks the part stays unlocked, and a note is printed.

        Raises:
            Busy: if another process works on the part.
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
        """Return True if the record has the entries `asked`; refuse a folder that has results of another experiment."""
        there = of_today(there)
        changed = changes({name: there.get(name) for name in asked}, asked)
        if changed and any((self.path / name).exists() for name in ("rates", "runs", "results")):
            raise UserError(f"--out {self.path} holds another reproduction: {', '.join(changed)}; give another --out")
        return not changed


def _is_foreign(path: Path) -> bool:
    """Return True if a file or folder is not one that a reproduction writes first."""
    return path.name != "locks" and not path.name.startswith("experiment.json")


def stored_json(path: Path) -> Any:
    """Return the object in a JSON file; None if the file is missing."""
    try:
        found = read_json(path, "delete it to measure anew")
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(found, dict):
        raise UserError(f"{path}: damaged (no JSON object); delete it to measure anew")
    return found


def changes(old: JsonObject, new: JsonObject, prefix: str = "") -> list[str]:
    """Return the differences between two records, each as in "data.corpus stdlib -> ptb"."""
    changed = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            changed += changes(before, after, f"{prefix}{name}.")
        elif before != after:
            changed.append(f"{prefix}{name} {before} -> {after}")
    return changed
