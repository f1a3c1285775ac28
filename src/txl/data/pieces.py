"""Pieces of plain or compressed files, which make up the splits of a text, and their text block by block.

The functions that yield text give each block with the number of bytes that were read for it. Memory use does not grow
with the file.
"""

from __future__ import annotations

import codecs
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from txl.data.compressed import BLOCK, COMPRESSED, open_file
from txl.data.formats import bad_byte
from txl.errors import UserError

SPLITS = ("train", "valid", "test")
WHOLE = "all"  # the only split of a text that is read as a whole
TRAIN_END, VALID_END = 0.90, 0.95
BYTE_ORDER_MARK = "\ufeff"
LONGEST_WORD = 1 << 20  # characters of a word; a text with a longer word is refused in the unit word
Blocks = Iterator[tuple[str, int]]


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


Pieces = dict[str, list[Piece]]  # of each split, in order


def _next(file: IO[bytes], count: int) -> Iterator[bytes]:
    """Yield the next bytes of a file, `count` or as many as there are, in blocks."""
    while block := file.read(min(BLOCK, count)):
        count -= len(block)
        yield block


def content_size(path: Path) -> int:
    """Return the size in bytes of a file's decompressed content."""
    size = Piece(path).size
    return sum(len(block) for block in Piece(path).blocks()) if size is None else size


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
    pieces = cut(paths, sizes, position, min(position + 4, sum(sizes)))
    following = b"".join(block for piece in pieces for block in piece.blocks())
    for ahead, value in enumerate(following):
        if not 0x80 <= value <= 0xBF:
            return position + ahead
    # Four continuation bytes: the text is not UTF-8. Fewer: the text ends inside the character.
    return position + len(following) if len(following) < 4 else position


@contextmanager
def naming(piece: Piece) -> Iterator[None]:
    """Put the name of a piece's file before the message of a user error that lacks it."""
    try:
        yield
    except UserError as error:
        if str(piece.path) in str(error):
            raise
        raise UserError(f"{piece.path}: {error}") from None


def escaped(blocks: Iterable[bytes]) -> Blocks:
    """Yield the text of any bytes: those that are not UTF-8 become U+DC80 to U+DCFF ("surrogateescape")."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
    for block in blocks:
        yield decoder.decode(block), len(block)
    yield decoder.decode(b"", final=True), 0


def decoded(piece: Piece, blocks: Iterable[bytes]) -> Blocks:
    """Yield the text of a piece; a character that crosses the end of a block is yielded with the next block.

    Raises:
        UserError: if the text is not UTF-8 or holds NUL bytes; the message gives the offset.
    """
    offset, rest = piece.start, b""
    for block in blocks:
        data = rest + block
        zero = data.find(b"\0")
        if zero >= 0:
            raise bad_byte(piece.path, offset + zero, 0)
        try:
            text, rest = data.decode("utf-8"), b""
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                raise bad_byte(piece.path, offset + error.start, data[error.start]) from None
            text, rest = data[: error.start].decode("utf-8"), data[error.start :]
        offset += len(data) - len(rest)
        yield text, len(block)
    if rest:
        raise bad_byte(piece.path, offset, rest[0])


def whole_line_ends(piece: Piece, texts: Iterable[tuple[str, int]]) -> Blocks:
    """Yield the blocks of `decoded` so that none ends between \\r and \\n.

    If a \\r\\n is cut by the edge of two splits, the first split leaves out the \\r, and the second begins with \\n.
    """
    rest = ""
    for text, done in texts:
        text = rest + text
        rest = "\r" if text.endswith("\r") else ""
        yield text[: len(text) - len(rest)], done
    follows = None if piece.end is None else next(Piece(piece.path, piece.end, piece.end + 1).blocks(), b"")
    if rest and follows != b"\n":
        yield rest, 0


def whole_words(piece: Piece, blocks: Iterable[bytes]) -> Blocks:
    """Yield the text of a piece in blocks that end behind white space. If the last line has no end, one is added.

    A word that crosses the end of a block is yielded with the next block.

    Raises:
        UserError: as for `decoded`, or if a word is longer than `LONGEST_WORD`.
    """
    rest, ended = "", True
    for text, done in decoded(piece, blocks):
        if not text:
            yield "", done
            continue
        text = rest + text
        ended = text.endswith("\n")
        # No cut between \r and \n, which may be one line end.
        cut = max(*(text.rfind(space) for space in "\n \t"), text.rfind("\r", 0, len(text) - 1)) + 1
        rest = text[cut:]
        if len(rest) > LONGEST_WORD:
            raise UserError(
                f"{piece.path}: more than {LONGEST_WORD:,} characters without white space are too long for a word; "
                f"use the unit bpe, char or byte"
            )
        yield text[:cut], done
    if rest or not ended:
        yield rest + "\n", 0
