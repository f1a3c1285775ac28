"""Plain and compressed files, opened for reading."""

from __future__ import annotations

import bz2
import functools
import io
import logging
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import zstandard

from txl.errors import UserError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK = 1 << 20
"""Bytes read at a time."""
LARGEST_WINDOW = 1 << 31
"""Largest distance in bytes over which a .zst file may repeat itself. To read such a file takes this much memory."""
_COMPRESSED_BLOCK = 1 << 10  # bytes read at a time: repetitive text grows ten thousandfold when decompressed
_ZSTD_CHECKSUM = 0b100  # bit of a frame's fifth byte: a checksum of the content follows the frame
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Compression:
    """A compressed format. A file holds one or more streams (.gz: members, .zst: frames).

    Args:
        tool: see `TOOLS`.
        begin: function that returns a decompressor of one stream.
        marks: first bytes of a stream.
        padding: the number of zero bytes that may follow a stream is a multiple of this; None: none may follow.
    """

    tool: str
    begin: Callable[[], Any]
    marks: tuple[bytes, ...]
    padding: int | None = None


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
COMPRESSED = tuple(_COMPRESSIONS)
"""Endings of the names of files that are decompressed while they are read."""
TOOLS = {ending: compression.tool for ending, compression in _COMPRESSIONS.items()}
"""Program for each of these endings, which decompresses a file with -d, and checks it with -t."""


def open_file(path: Path) -> IO[bytes]:
    """Open a file's content for reading, decompressed if its name has an ending of `COMPRESSED`, or .tgz.

    Raises:
        UserError: if the file cannot be opened. Reading raises it too: if the file cannot be read, or if compressed
            data are incomplete or damaged. A log message says so if they have no checksum, which shows damage.
    """
    try:
        file = _File(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    compression = _COMPRESSIONS.get(".gz" if path.suffix == ".tgz" else path.suffix)
    if compression is None:
        return cast(IO[bytes], io.BufferedReader(file, BLOCK))
    blocks = _decompressed(path, io.BufferedReader(file, BLOCK), compression)
    return cast(IO[bytes], io.BufferedReader(_Decompressed(file, blocks), BLOCK))


class _File(io.RawIOBase):
    """Content of a file; what cannot be read is the user's error."""

    def __init__(self, path: Path):
        self._file, self.name = io.FileIO(path), str(path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: WriteableBuffer) -> int:
        try:
            return self._file.readinto(buffer) or 0
        except OSError as error:
            raise UserError(f"{self.name}: cannot be read ({error.strerror})") from None

    def close(self) -> None:
        self._file.close()
        super().close()


class _Decompressed(io.RawIOBase):
    """Decompressed content of a file."""

    def __init__(self, file: _File, blocks: Iterator[bytes]):
        self._file, self._blocks, self.name = file, blocks, file.name
        self._ready = memoryview(b"")

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
            data = _behind_padding(data, file, compression.padding)


def _behind_padding(data: bytes, file: IO[bytes], multiple: int) -> bytes:
    """Return what follows a stream without its padding; zero bytes that are not padding are left, and no stream."""
    zeros = 0
    while data:
        rest = data.lstrip(b"\0")
        zeros += len(data) - len(rest)
        if rest:
            break
        data = file.read(_COMPRESSED_BLOCK)
    return bytes(zeros % multiple) + data.lstrip(b"\0")


@functools.cache  # so that it is said once for each file
def _note_unchecked(path: Path) -> None:
    _logger.warning("note: %s has no checksum of all its content; damage may go unnoticed", path)
