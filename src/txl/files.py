"""Files that are whole or not there, with the permissions that any new file has; and the folder of those that can be
made again."""

from __future__ import annotations

import errno
import functools
import glob
import hashlib
import json
import logging
import math
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from txl.errors import UserError

JsonObject = dict[str, Any]
"""An object of JSON; whoever reads one checks the values that it uses."""
_logger = logging.getLogger(__name__)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a name beside `path` to write to; what is there at the end takes the place of `path`, synced.

    If the block fails, `path` is as it was and what was written is removed.

    Raises:
        OSError: if it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def remove_partials(path: Path) -> list[Path]:
    """Remove what `replacing` left beside `path` in processes that were killed, and return it."""
    removed = []
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        process = left.name[len(path.name) + 1 : -len(".partial")]
        if process.isdecimal() and not _runs(int(process)):
            with suppress(OSError):
                left.unlink()
                removed.append(left)
    return removed


def _runs(process: int) -> bool:
    if sys.platform == "win32":
        return False  # a file that is open cannot be removed there
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is either the old or the new one, also after a crash."""
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def read_json(path: Path, remedy: str = "") -> Any:
    """Read a JSON file.

    Args:
        path: the file.
        remedy: what a user can do about a damaged file; the end of the error's message.

    Raises:
        OSError: if it cannot be read.
        UserError: if it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # a number may have too many digits
        raise UserError(f"{path}: not JSON ({error})" + (f"; {remedy}" if remedy else "")) from None


def with_null(value: object) -> Any:
    """Return a JSON value with null for numbers that JSON has no name for: infinite ones, and those that are none."""
    if isinstance(value, dict):
        return {key: with_null(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_null(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk. Windows opens files alone, and syncs those that may be written."""
    windows = sys.platform == "win32"
    if windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def follow_umask(path: Path) -> None:
    """Give a file that a library made for its owner alone the permissions that any new file beside it has.

    The process's umask cannot be read without changing it for all threads, so that a new file is looked at.
    """
    probe = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        os.chmod(path, os.fstat(descriptor).st_mode & 0o777)
    finally:
        os.close(descriptor)
        probe.unlink()


def make_scratch(folder: Path, name: str) -> Path:
    """Make a folder `.NAME.partial-...` in a folder, which no other process has; it follows the umask."""
    scratch = folder / f".{name}.partial-{secrets.token_hex(4)}"
    scratch.mkdir()
    return scratch


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's content, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reason_of(error: Exception) -> str:
    """Return why a file could not be read or written, without its name; libraries say it in words of their own."""
    return getattr(error, "strerror", None) or str(error)


def is_full(error: Exception) -> bool:
    """Return whether something could not be written for want of room; the safetensors library says so in words
    alone."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)


def usable_cache(folder: Path) -> Path:
    """Return the folder of a cache: prepared corpora, compiled code.

    Where it cannot be made it is one below the system's temporary folder, which is said once.

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
    """Return a folder of this user's alone: compiled code is loaded from it, and anybody can write beside it."""
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
