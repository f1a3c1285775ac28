"""Pieces of plain or compressed files, which make up the splits of a text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from txl.data.compressed import BLOCK, COMPRESSED, open_file

SPLITS = ("train", "valid", "test")
WHOLE = "all"
"""Name of the only split of a text that is read as a whole."""
TRAIN_END, VALID_END = 0.90, 0.95


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
            self._skip(file)
            left = None if self.end is None else self.end - self.start
            while left is None or left > 0:
                block = file.read(BLOCK if left is None else min(BLOCK, left))
                if not block:
                    break
                if left is not None:
                    left -= len(block)
                yield block

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
