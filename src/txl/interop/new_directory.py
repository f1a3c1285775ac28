"""Directories that appear whole, with all of their files, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from txl.errors import UserError
from txl.files import absolute, make_scratch, reason_of

ResultT = TypeVar("ResultT")


def write_directory(out: Path, fill: Callable[[Path], ResultT]) -> ResultT:
    """Fill a temporary directory beside `out` and rename it; if `out` exists, inside it, and move what it holds.

    An existing `out` stays, as a process may work in it, or another file system may be mounted there. If an error
    occurs, only what this call wrote is removed.

    Args:
        out: directory that is missing or empty.
        fill: function that writes into the directory that it gets.

    Returns:
        The result of `fill`.

    Raises:
        UserError: if the directory cannot be written.
    """
    out = Path(absolute(str(out)))
    temporary, made = None, [folder for folder in (out.parent, *out.parent.parents) if not folder.exists()]
    moved: list[Path] = []
    try:
        exists = out.is_dir()
        if not exists:
            out.parent.mkdir(parents=True, exist_ok=True)
        temporary = make_scratch(out if exists else out.parent, out.name)
        result = fill(temporary)
        if exists:
            # config.json, which makes the directory a run or a model, comes last.
            for path in sorted(temporary.iterdir(), key=lambda path: (path.name == "config.json", path)):
                os.rename(path, out / path.name)
                moved.append(out / path.name)
        else:
            os.rename(temporary, out)
        return result
    except BaseException as error:
        for path in moved:
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        problem, remedy = f"cannot be written ({reason_of(error)})", "give a directory that can be written"
        raise UserError(problem, field="out", value=str(out), remedy=remedy) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if not out.exists():
            for folder in made:
                with suppress(OSError):
                    folder.rmdir()
