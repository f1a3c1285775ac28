"""Where files are kept that can be made again: prepared corpora and compiled code, which an export has too."""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

_logger = logging.getLogger(__name__)


def usable_cache(folder: Path) -> Path:
    """The folder, or one below the system's temporary folder, which is said, where there is no home to have it in.

    Args:
        folder: need not be there yet; not absolute ("~/...") if nobody knows where the user's home is.
    """
    if folder.is_absolute() and (folder.exists() or _can_be_made(folder)):
        return folder
    instead = _temporary_folder()
    _say(f"{folder} cannot be made" if folder.is_absolute() else "no home folder is known", instead)
    return instead


@functools.cache  # once is enough
def _say(reason: str, instead: Path) -> None:
    _logger.warning("note: %s; the cache is %s, which may be emptied any time", reason, instead)


def _can_be_made(folder: Path) -> bool:
    there = next(each for each in folder.parents if each.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _temporary_folder() -> Path:
    """A folder of this user's alone: compiled code is loaded from it, and anybody can write beside it."""
    user = os.geteuid() if hasattr(os, "geteuid") else None
    folder = Path(tempfile.gettempdir()) / f"transformer-xl-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and (user is None or (found.st_uid == user and not found.st_mode & 0o022)):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="transformer-xl-"))  # the name is somebody else's
