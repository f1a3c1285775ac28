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

    An existing `out` is kept, as a process may work in it, or another file system may be mounted there. If an error
    occurs, only what this call wrote is removed.

    Args:
        out: directory that is missing or empty.
        fill: function that writes into the directory that it is given.

    Returns:
        The result of `fill`.

    Raises:
        UserError: if the directory cannot be written.
    """
    out = Path(absolute(str(out)))
    temporary, made = None, [each for each in (out.parent, *out.parent.parents) if not each.exists()]
    moved: list[Path] = []
    try:
        exists = out.is_dir()
        if not exists:
            out.parent.mkdir(parents=True, exist_ok=True)
        temporary = make_scratch(out if exists else out.parent, out.name)
        result = fill(temporary)
        if exists:
            # config.json, which makes the directory a run or a model, comes last.
            for each in sorted(temporary.iterdir(), key=lambda path: (path.name == "config.json", path)):
                os.rename(each, out / each.name)
                moved.append(out / each.name)
        else:
            os.rename(temporary, out)
        return result
    except BaseException as error:
        for each in moved:
            with suppress(OSError):
                shutil.rmtree(each) if each.is_dir() else each.unlink(missing_ok=True)
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        raise UserError(
            f"--out {out}: cannot be written ({reason_of(error)}); give a directory that can be written"
        ) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if not out.exists():
            for each in made:
                with suppress(OSError):
                    each.rmdir()
