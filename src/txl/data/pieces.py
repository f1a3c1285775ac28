"""Pieces of plain or compressed files, which make up the splits of a text."""

from __future__ import annotations

import sys
from collections import deque
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
            if self.path.suffix in COMPRESSED:
                deque(_next(file, self.start), maxlen=0)
            else:
                file.seek(self.start)
            yield from _next(file, sys.maxsize if self.end is None else self.end - self.start)


def _next(file: IO[bytes], count: int) -> Iterator[bytes]:
    """Yield the next bytes of a file, `count` or as many as there are, in blocks."""
    while block := file.read(min(BLOCK, count)):
        count -= len(block)
        yield block


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
