"""Files that are written whole or not at all, with the permissions of any new file; and the folder for caches."""

from __future__ import annotations

import errno
import functools
import glob
import hashlib
import json
import logging
import math
import os
import platform
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

from txl.errors import UserError, brief

JsonObject = dict[str, Any]  # code that reads a JSON object checks the values that it uses
_DEEPEST = 64  # greatest depth of nested JSON values that is read
_logger = logging.getLogger(__name__)


@contextmanager
def replacing(path: Path, like: os.stat_result | None = None) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to; at the end, sync the written file and rename it to `path`.

    If the block fails, `path` stays as it was and the temporary file is removed. A link stays a link, to the new file,
    and a new file has the permissions of the one that it replaces. With `like`, it has owner, group, permissions
    and time of change from this status, as far as this user may set them.

    Raises:
        OSError: if the file cannot be written.
    """
    if path.is_symlink():
        path = path.resolve()
    temporary = path.with_name(f"{path.name}.{_machine()}-{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        yield temporary
        if path.exists() and like is None:
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        sync(temporary)
        if like is not None:
            mode = stat.S_IMODE(like.st_mode) & 0o777
            try:
                os.chown(temporary, -1, like.st_gid)
            except (OSError, AttributeError):  # not a member of this group, which then gets no rights; or Windows
                mode &= ~0o070
            with suppress(OSError, AttributeError):  # root alone may
                os.chown(temporary, like.st_uid, -1)
            temporary.chmod(mode)
            os.utime(temporary, ns=(like.st_atime_ns, like.st_mtime_ns))
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def absolute(path: str) -> str:
    """Return the absolute path; `..` behind a link leads to the parent of what the link names, as in the system."""
    if not os.path.isabs(path):
        check_current_directory()
    parts = Path(path).parts
    if ".." not in parts:
        return os.path.abspath(path)
    last = len(parts) - parts[::-1].index("..")
    return os.path.join(os.path.realpath(os.path.join(*parts[:last])), *parts[last:])


def check_current_directory() -> None:
    """Refuse a current directory that has been removed; nothing can be read or written there."""
    try:
        os.getcwd()
    except OSError:
        raise UserError("the current directory has been removed; change to another one (cd ~)") from None


def check_utf8(out: Path) -> None:
    """Refuse a path for a result that is not UTF-8: the safetensors library writes there, but does not read from it."""
    if not is_utf8(str(out)):
        problem = "the path is not valid UTF-8, and tensors could not be read from it again"
        raise UserError(problem, field="out", value=out, remedy="give another directory")


def is_utf8(text: str) -> bool:
    """Return whether a word of the command line was valid UTF-8; Python keeps other bytes as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_new_directory(out: Path) -> None:
    """Refuse a directory for a result that is not empty, or whose path is not UTF-8 or that of a file."""
    check_utf8(out)
    refuse_file(out, "out")
    if out.exists() and any(out.iterdir()):
        raise UserError("not empty", field="out", value=out, remedy="give another directory")


def is_replaceable(path: Path) -> bool:
    """Return whether a new file may take this path: a device or a named pipe must be written to instead."""
    return path.is_file() or not path.exists()


def remove_partials(path: Path) -> list[Path]:
    """Remove, and return, the temporary files of `replacing` that killed processes of this machine left at `path`."""
    path, removed = path.resolve(), []
    for left in path.parent.glob(f"{glob.escape(path.name)}.{_machine()}-*-*.partial"):
        process = left.name[len(path.name) + 1 :].split("-")[1]
        if process.isdecimal() and not _runs(int(process)):
            with suppress(OSError):
                left.unlink()
                removed.append(left)
    return removed


def _machine() -> str:
    # Other machines or containers may write to the same folder.
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _runs(process: int) -> bool:
    if sys.platform == "win32":
        return False  # Windows itself refuses to remove an open file
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that `path` holds either the old or the new text, even after a crash.

    A device or a named pipe is written to, not replaced. Bytes of a file's name that are not UTF-8 become escapes.
    """
    try:
        with replacing(path) if is_replaceable(path) else nullcontext(path) as written:
            written.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def parsed_json(text: str) -> Any:
    """Parse JSON that may come from anybody: every use of the value can then recurse, print it and compute with it.

    Raises:
        ValueError: if the text is not JSON, is nested more than 64 deep, or has a whole number beyond 64 bits.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level, depth = [value], 0
    while level:
        if depth > _DEEPEST:
            raise ValueError("nested too deeply")
        if large := [number for number in level if type(number) is int and not -(2**63) <= number < 2**64]:
            raise ValueError(f"{brief(large[0])} is beyond 64 bits")
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list)))
        level, depth = list(chain.from_iterable(parts)), depth + 1
    return value


def read_json(path: Path, remedy: str = "") -> Any:
    """Read a JSON file, see `parsed_json`; what is not JSON is a UserError with a remedy."""
    with opened(path) as file:
        content = file.read()
    try:
        return parsed_json(content.decode("utf-8"))
    except ValueError as error:
        what = f"not JSON ({error})" if content else "empty"
        raise UserError(f"{path}: {what}" + (f"; {remedy}" if remedy else "")) from None


def opened(path: Path) -> BufferedReader:
    """Open a file for reading bytes; a named pipe or a device, whose reading may never end, is an OSError."""
    # Opening a named pipe would wait; Windows has neither the flag nor such pipes.
    flag = getattr(os, "O_NONBLOCK", 0)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | flag))  # noqa: SIM115 (closed by the caller)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def with_null(value: object) -> Any:
    """Return a JSON value with null for infinite numbers and NaN, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: with_null(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_null(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk (Windows: no folders, and only files opened for writing)."""
    windows = sys.platform == "win32"
    if windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def follow_umask(path: Path) -> None:
    """Give a file that a library made readable for its owner alone the permissions of any new file beside it.

    Reading the process's umask would change it for all threads. So a new file is made, and its permissions are read.
    """
    probe = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        os.chmod(path, os.fstat(descriptor).st_mode & 0o777)
    finally:
        os.close(descriptor)
        probe.unlink()


def make_scratch(folder: Path, name: str) -> Path:
    """Make a folder `.NAME.partial-...` inside `folder`, with a name that no other process uses; follow the umask."""
    scratch = folder / f".{name}.partial-{secrets.token_hex(4)}"
    scratch.mkdir()
    return scratch


def refuse_file(path: Path, field: str = "", expected: str = "a directory") -> None:
    """Refuse a path for a directory if a file or a broken link has it; `field` is the setting that it was given to."""
    if os.path.lexists(path) and not path.is_dir():
        kind = "a file" if path.exists() else "a broken link"
        raise UserError(kind, field=field, value=path, expected=expected)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's content, in hexadecimal digits."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reason_of(error: Exception) -> str:
    """Return the system's or the library's reason why a file could not be read or written, without the file's name."""
    return getattr(error, "strerror", None) or str(error)


def is_full(error: Exception) -> bool:
    """Return whether a write failed because the disk or quota is full; safetensors reports this only as text."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)


def cache_folder() -> Path:
    """Return the folder for caches (prepared corpora, compiled code): transformer-xl in $XDG_CACHE_HOME or ~/.cache.

    If it cannot be made, return a folder below the system's temporary folder, and log a warning once.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "transformer-xl"
    if folder.is_absolute():  # `~` stays without HOME and without an entry in the system's user database
        # Not Path.exists, which raises an error for a folder that may not be looked into.
        there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        effective = os.access in os.supports_effective_ids
        if there == folder or (there.is_dir() and os.access(there, os.W_OK | os.X_OK, effective_ids=effective)):
            return folder
    # Code is loaded from the folder, and its parent is open to everybody: only this user may write to it.
    user = os.geteuid() if hasattr(os, "geteuid") else None
    instead = Path(tempfile.gettempdir()) / f"transformer-xl-{user}"
    is_own = False
    with suppress(OSError):
        instead.mkdir(mode=0o700, exist_ok=True)
        status = instead.lstat()
        is_own = stat.S_ISDIR(status.st_mode) and (
            user is None or (status.st_uid == user and not status.st_mode & 0o022)
        )
    if not is_own:  # another user owns the folder of this name
        instead = Path(tempfile.mkdtemp(prefix="transformer-xl-"))
    _warn(folder, instead)
    return instead


@functools.cache  # so that each warning is logged once
def _warn(folder: Path, instead: Path) -> None:
    _logger.warning("note: %s cannot be made; the cache is %s, which the system may empty", folder, instead)
