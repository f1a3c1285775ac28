"""Plain and compressed files, opened for reading, and archives, unpacked member by member.

Damaged files are refused, and so are members of archives that point out of the folder.
"""

from __future__ import annotations

import bz2
import functools
import io
import logging
import lzma
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import zstandard

from txl.errors import UserError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK = 1 << 20  # bytes read at a time
# Largest distance in bytes over which a .zst file may repeat itself. To read such a file takes this much memory.
LARGEST_WINDOW = 1 << 31
ARCHIVES = (".zip", ".tgz", ".tar.gz", ".tar", ".tar.xz", ".tar.bz2")  # that can be unpacked
_COMPRESSED_BLOCK = 1 << 10  # bytes read at a time: repetitive text grows ten thousandfold when decompressed
_ZSTD_CHECKSUM = 0b100  # bit of a frame's fifth byte: a checksum of the content follows the frame
_ZIP_END = 22 + 0xFFFF  # largest length in bytes of the last record of a .zip file, with its comment
_logger = logging.getLogger(__name__)
_Member = tuple[str, Callable[[], IO[bytes]]]


class _Compression(NamedTuple):
    """A compressed format. A file holds one or more streams (.gz: members, .zst: frames)."""

    tool: str  # program that decompresses a file with -d, and checks it with -t
    begin: Callable[[], Any]  # returns a decompressor of one stream
    marks: tuple[bytes, ...]  # first bytes of a stream
    padding: int | None = None  # of which the number of zero bytes behind a stream is a multiple; None: none may follow


_SKIPPED = tuple(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))  # of .zst frames without content
_COMPRESSIONS = {
    ".gz": _Compression("gzip", lambda: zlib.decompressobj(zlib.MAX_WBITS | 16), (b"\x1f\x8b",), padding=1),
    ".bz2": _Compression("bzip2", bz2.BZ2Decompressor, (b"BZh",)),
    ".xz": _Compression("xz", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), (b"\xfd7zXZ\0",), padding=4),
    ".zst": _Compression(
        "zstd",
        lambda: zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj(),
        (zstandard.FRAME_HEADER, *_SKIPPED),
    ),
}
COMPRESSED = tuple(_COMPRESSIONS)  # endings of the names of files that are decompressed while they are read
TOOLS = {ending: compression.tool for ending, compression in _COMPRESSIONS.items()}


def open_file(path: Path) -> IO[bytes]:
    """Open a file's content for reading, decompressed if its name has an ending of `COMPRESSED`, or .tgz.

    Raises:
        UserError: if the file cannot be opened. Reading raises it too: if the file cannot be read, or if compressed
            data are incomplete or damaged. A log message says so if they have no checksum, which shows damage.
    """
    try:
        file = io.BufferedReader(_File(path), BLOCK)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    compression = _COMPRESSIONS.get(".gz" if path.suffix == ".tgz" else path.suffix)
    return file if compression is None else cast(IO[bytes], io.BufferedReader(_Content(path, file, compression), BLOCK))


@contextmanager
def _reading(path: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


class _File(io.FileIO):
    """Content of a file; what cannot be read is the user's error."""

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        with _reading(self.name):
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with _reading(self.name):
            return super().readall() or b""


class _Content(io.RawIOBase):
    """Decompressed content of a file."""

    def __init__(self, path: Path, file: IO[bytes], compression: _Compression):
        self._file, self.name = file, str(path)
        self._blocks, self._ready = _decompressed(path, file, compression), memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: WriteableBuffer) -> int:
        self._ready = self._ready or memoryview(next(self._blocks, b""))
        count = min(memoryview(buffer).nbytes, len(self._ready))
        memoryview(buffer).cast("B")[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _decompressed(path: Path, file: IO[bytes], compression: _Compression) -> Iterator[bytes]:
    """Yield the content of all streams of a file, to the file's last byte.

    The readers of Python's library take a damaged later stream for something else, and leave it out. Here everything
    that follows a stream, except for its padding, must be another stream.
    """
    data, begins = file.read(_COMPRESSED_BLOCK), True
    tool = compression.tool
    while data or begins:
        if not any(mark.startswith(data[: len(mark)]) for mark in compression.marks):
            if begins:
                raise UserError(f"{path}: no {tool} data, though its name ends in {path.suffix}; rename it")
            raise UserError(f"{path}: cannot be read (after {tool} data comes something else); get it again")
        stream = compression.begin()
        if tool == "zstd":
            while 0 < len(data) < 5 and (more := file.read(_COMPRESSED_BLOCK)):
                data += more
            if not (data.startswith(zstandard.FRAME_HEADER) and data[4:5] and data[4] & _ZSTD_CHECKSUM):
                _note_unchecked(path)  # a skippable frame has none either
        while not stream.eof:
            if not data:
                raise UserError(f"{path}: cannot be read (the compressed data end early); it may be incomplete")
            try:
                content = stream.decompress(data)
            except (OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError, MemoryError) as error:
                reason = str(error) or "out of memory"
                raise UserError(f"{path}: cannot be read ({reason}); {tool} -t tells whether it is damaged") from None
            if content:
                yield content
            data = stream.unused_data if stream.eof else file.read(_COMPRESSED_BLOCK)
        if getattr(stream, "check", None) == lzma.CHECK_NONE:
            _note_unchecked(path)
        data, begins = data or file.read(_COMPRESSED_BLOCK), False
        if compression.padding is not None:
            zeros = len(data) - len(data.lstrip(b"\0"))
            while zeros and not data.strip(b"\0") and (data := file.read(_COMPRESSED_BLOCK)):
                zeros += len(data) - len(data.lstrip(b"\0"))
            # Zero bytes that are not padding are left, and are no stream.
            data = bytes(zeros % compression.padding) + data.lstrip(b"\0")


@functools.cache  # so that it is said once for each file
def _note_unchecked(path: Path) -> None:
    _logger.warning("note: %s has no checksum of all its content; damage may go unnoticed", path)


def unpack(archive: Path, folder: Path, wanted: Callable[[str], bool]) -> None:
    """Unpack the wanted members of an archive into a folder, under their own paths.

    The archive, whose name has an ending of `ARCHIVES`, is read to its end, because compressed formats store a checksum
    of the content there. `wanted` receives a member's path, with "/" between its parts.

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
            try:
                source = content()
            except OSError as error:  # a damaged offset
                raise zipfile.BadZipFile(error.strerror) from None
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with source, open(target, "wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    except RuntimeError as error:  # encrypted, or compressed in an unknown way (NotImplementedError)
        raise UserError(f"{archive}: cannot be read ({error})") from None
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{archive}: damaged ({error or type(error).__name__})") from None


def _zip_members(archive: Path) -> Iterator[_Member]:
    with open(archive, "rb") as content, zipfile.ZipFile(content) as file:
        content.seek(max(0, content.seek(0, os.SEEK_END) - _ZIP_END))
        count = int.from_bytes(content.read().rpartition(b"PK\5\6")[2][6:8], "little")
        if len(file.infolist()) != count != 0xFFFF:  # which zipfile does not compare
            raise zipfile.BadZipFile(f"its directory has {len(file.infolist())} of {count} members")
        for member in file.infolist():
            if not member.is_dir():
                yield member.filename, lambda member=member: file.open(member)


def _tar_members(archive: Path) -> Iterator[_Member]:
    # Stream mode reads a compressed archive only once, from beginning to end.
    with open_file(archive) as content, tarfile.open(fileobj=content, mode="r|") as file:
        for member in file:
            if member.isfile() and (file_of_member := file.extractfile(member)) is not None:
                yield member.name, lambda content=file_of_member: content
        # tarfile takes a damaged header for the end of the archive, behind which there are only zeros.
        while rest := file.fileobj.read(1 << 20):
            if rest.strip(b"\0"):
                raise tarfile.TarError("more follows the end of the archive, or the header of a member is damaged")
