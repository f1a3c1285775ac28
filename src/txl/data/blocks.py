"""The bytes of a file as text, block by block, so that memory use does not grow with the file.

Each function yields blocks of text, each with the number of bytes that were read for it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from txl.data.formats import bad_byte
from txl.data.pieces import Piece
from txl.errors import UserError

BYTE_ORDER_MARK = "\ufeff"
LONGEST_WORD = 1 << 20
"""Largest number of characters of a word; a text with a longer word is refused in the unit word."""
Blocks = Iterator[tuple[str, int]]


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


class Normaliser:
    """Reader that removes byte order marks, replaces \\r\\n by \\n, and counts both changes."""

    def __init__(self) -> None:
        self.byte_order_marks = self.line_ends = 0

    def blocks(self, piece: Piece) -> Iterator[bytes]:
        """Yield the bytes of a piece, normalised."""
        begins = piece.start == 0
        for text, _ in whole_line_ends(piece, decoded(piece, piece.blocks())):
            if begins and text:
                begins = False
                self.byte_order_marks += text.startswith(BYTE_ORDER_MARK)
                text = text.removeprefix(BYTE_ORDER_MARK)
            self.line_ends += text.count("\r\n")
            yield text.replace("\r\n", "\n").encode()
