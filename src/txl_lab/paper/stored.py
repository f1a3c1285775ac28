"""Objects in JSON files, and the differences between two of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from txl.errors import UserError
from txl.files import JsonObject, read_json, write_whole


def write_json(path: Path, value: JsonObject, indent: int | None = None) -> None:
    """Write an object into a file, whose folder is created if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, indent=indent) + "\n")


def stored_json(path: Path) -> Any:
    """Return the object in a JSON file; None if the file is missing."""
    try:
        stored = read_json(path, "delete it to measure anew")
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(stored, dict):
        raise UserError(f"{path}: damaged (no JSON object); delete it to measure anew")
    return stored


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
