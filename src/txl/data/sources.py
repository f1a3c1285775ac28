"""Pieces of plain or compressed files, which make up the splits of a text."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import zstandard

from txl.errors import UserError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK = 1 << 20
"""Bytes read at a time."""
SPLITS = ("train", "valid", "test")
WHOLE = "all"
"""Name of the only split of a text that is read as a whole."""
TRAIN_END, VALID_END = 0.90, 0.95
COMPRESSED = (".gz", ".xz", ".zst")
_COMPRESSED_BLOCK = 1 << 10
"""Compressed bytes of a .zst file read at a time; repetitive text grows ten thousandfold when decompressed."""


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `end` (None: the file's end) of a file's decompressed content."""

    path: Path
    start: int = 0
    end: int | None = None

    @property
    def size(self) -> int | None:
        """Size in bytes; None if it is unknown without decompressing the file."""
        if self.end is not None:
            return self.end - self.start
        return None if self.path.suffix in COMPRESSED else self.path.stat().st_size - self.start

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes of the piece, at most a megabyte at a time."""
        with open_file(self.path) as file:
            try:
                self._skip(file)
                left = None if self.end is None else self.end - self.start
                while left is None or left > 0:
                    block = file.read(BLOCK if left is None else min(BLOCK, left))
                    if not block:
                        break
                    if left is not None:
                        left -= len(block)
                    yield block
            except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
                raise UserError(f"{self.path}: cannot be read ({error}); it may be incomplete") from None

    def _skip(self, file: IO[bytes]) -> None:
        """Move `file` to the start of the piece."""
        if self.path.suffix not in COMPRESSED:
            file.seek(self.start)
            return
        skipped = 0
        while skipped < self.start:
            part = file.read(min(BLOCK, self.start - skipped))
            if not part:
                break
            skipped += len(part)


Pieces = dict[str, list[Piece]]
"""The pieces of each split, in order."""


def open_file(path: Path) -> IO[bytes]:
    """Open a file's content for reading, decompressed if its name ends in .gz, .xz or .zst."""
    try:
        if path.suffix == ".gz":
            return cast(IO[bytes], gzip.open(path, "rb"))
        if path.suffix == ".xz":
            return lzma.open(path, "rb")
        if path.suffix == ".zst":
            return cast(IO[bytes], io.BufferedReader(_ZstdFile(path), BLOCK))
        return open(path, "rb")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


class _ZstdFile(io.RawIOBase):
    """Decompressed content of a .zst file. (The library's own reader does not detect a truncated file.)"""

    def __init__(self, path: Path):
        self._file = open(path, "rb")  # noqa: SIM115 (closed by close)
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._ready = memoryview(b"")
        self._in_frame = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while not self._ready:
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
                self._in_frame = False
            data = data or self._file.read(_COMPRESSED_BLOCK)
            if not data:
                if self._in_frame:
                    raise EOFError("the compressed file ends early")
                return 0
            self._in_frame = True
            self._ready = memoryview(self._frame.decompress(data))
        count = min(memoryview(buffer).nbytes, len(self._ready))
        memoryview(buffer).cast("B")[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def content_size(path: Path) -> int:
    """Return the size in bytes of a file's decompressed content."""
    if path.suffix not in COMPRESSED:
        return path.stat().st_size
    return sum(len(block) for block in Piece(path).blocks())


def cut(paths: list[Path], sizes: list[int], first: int, end: int) -> list[Piece]:
    """Return the pieces between two byte positions of the concatenated files."""
    pieces, start = [], 0
    for path, size in zip(paths, sizes, strict=True):
        inner_first, inner_end = max(first - start, 0), min(end - start, size)
        if inner_first < inner_end:
            pieces.append(Piece(path, inner_first, inner_end))
        start += size
    return pieces


def character_start(paths: list[Path], sizes: list[int], position: int) -> int:
    """Return `position`, or the next byte position (at most three further) outside of a UTF-8 character."""
    following = b"".join(
        block for piece in cut(paths, sizes, position, min(position + 4, sum(sizes))) for block in piece.blocks()
    )
    for ahead, value in enumerate(following):
        if not 0x80 <= value <= 0xBF:
            return position + ahead
    # Four continuation bytes: the text is not UTF-8. Fewer: the text ends inside the character.
    return position + len(following) if len(following) < 4 else position
