"""Archives, unpacked member by member; damaged ones and members that point out of the folder are refused."""

from __future__ import annotations

import lzma
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from txl.data.compressed import open_file
from txl.errors import UserError

ARCHIVES = (".zip", ".tgz", ".tar.gz", ".tar", ".tar.xz", ".tar.bz2")
"""File name endings of the archives that can be unpacked."""
_ZIP_END = 22 + 0xFFFF  # largest length in bytes of the last record of a .zip file, with its comment
Member = tuple[str, Callable[[], IO[bytes]]]


def unpack(archive: Path, folder: Path, wanted: Callable[[str], bool]) -> None:
    """Unpack the wanted members of an archive into a folder, under their own paths.

    The archive is read to its end, because compressed formats store a checksum of the content there.

    Args:
        archive: zip or tar file.
        folder: existing target folder.
        wanted: function that receives a member's path, with "/" between its parts, and returns True to unpack it.

    Raises:
        UserError: if the archive is damaged or cannot be read.
        OSError: if the disk is full.
    """
    members = _zip_members(archive) if archive.suffix == ".zip" else _tar_members(archive)
    try:
        for name, content in members:
            path = PurePosixPath(name)
            # No member may be written outside of the folder.
            if path.is_absolute() or ".." in path.parts or not wanted(str(path)):
                continue
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with content() as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    except RuntimeError as error:  # encrypted, or compressed in an unknown way (NotImplementedError)
        raise UserError(f"{archive}: cannot be read ({error})") from None
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{archive}: damaged ({error or type(error).__name__})") from None


def _zip_members(archive: Path) -> Iterator[Member]:
    with open(archive, "rb") as content, zipfile.ZipFile(content) as file:
        content.seek(max(0, content.seek(0, os.SEEK_END) - _ZIP_END))
        count = int.from_bytes(content.read().rpartition(b"PK\5\6")[2][6:8], "little")
        if len(file.infolist()) != count != 0xFFFF:  # which zipfile does not compare
            raise zipfile.BadZipFile(f"its directory has {len(file.infolist())} of {count} members")
        for member in file.infolist():
            if not member.is_dir():
                yield member.filename, lambda member=member: _opened_member(file, member)


def _opened_member(file: zipfile.ZipFile, member: zipfile.ZipInfo) -> IO[bytes]:
    try:
        return file.open(member)
    except OSError as error:  # a damaged offset
        raise zipfile.BadZipFile(f"{member.filename}: {error.strerror}") from None


def _tar_members(archive: Path) -> Iterator[Member]:
    # Stream mode reads a compressed archive only once, from beginning to end.
    with open_file(archive) as content, tarfile.open(fileobj=content, mode="r|") as file:
        for member in file:
            if member.isfile() and (file_of_member := file.extractfile(member)) is not None:
                yield member.name, lambda content=file_of_member: content
        # tarfile takes a damaged header for the end of the archive, behind which there are only zeros.
        while rest := file.fileobj.read(1 << 20):
            if rest.strip(b"\0"):
                raise tarfile.TarError("more follows the end of the archive, or the header of a member is damaged")
