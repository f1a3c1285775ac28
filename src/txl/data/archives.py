"""Unpacking the files that are wanted from zip and tar archives."""

from __future__ import annotations

import lzma
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from txl.errors import UserError

ARCHIVES = (".zip", ".tgz", ".tar.gz", ".tar", ".tar.xz", ".tar.bz2")
"""Endings of the archives that can be unpacked."""


def is_archive(path: Path) -> bool:
    """Whether a file's name is an archive's."""
    return path.name.endswith(ARCHIVES)


def unpack(archive: Path, folder: Path, wanted: Callable[[str], bool]) -> None:
    """Unpack the members that are wanted, under their own paths.

    Args:
        archive: zip or tar.
        folder: where to; exists.
        wanted: is asked with each member's path, "/" between its parts.

    Raises:
        UserError: if the archive is damaged or cannot be read.
        OSError: if the disk is full.
    """
    members = _zip_members(archive) if archive.suffix == ".zip" else _tar_members(archive)
    try:
        for name, content in members:
            path = PurePosixPath(name)
            # A path that leads out of the folder is nobody's text.
            if path.is_absolute() or ".." in path.parts or not wanted(str(path)):
                continue
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with content() as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, NotImplementedError) as error:
        raise UserError(f"{archive}: damaged ({error or type(error).__name__})") from None


Member = tuple[str, Callable[[], IO[bytes]]]


def _zip_members(archive: Path) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            if not member.is_dir():
                yield member.filename, lambda member=member: file.open(member)


def _tar_members(archive: Path) -> Iterator[Member]:
    # As a stream: a compressed archive is read once, from its beginning to its end.
    with tarfile.open(archive, "r|*") as file:
        for member in file:
            if member.isfile():
                yield member.name, lambda member=member: _opened(file, member)


def _opened(file: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = file.extractfile(member)
    if content is None:
        raise tarfile.TarError(f"{member.name} has no content")
    return content
