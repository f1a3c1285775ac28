"""From a piece's bytes to checked text, and from text to words: block by block, so that memory stays small."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from txl.config import WordRule
from txl.data.sources import Piece
from txl.data.vocabulary import BYTE_ORDER_MARK
from txl.data.words import EOS, words_and_ends
from txl.errors import UserError

LONGEST_WORD = 1 << 20
"""Characters of a word above which a text is not taken to be made of words."""


def decoded(piece: Piece, blocks: Iterable[bytes]) -> Iterator[tuple[str, int]]:
    """Text of a piece, block by block, with the bytes that each took.

    A character that is cut by a block's end goes to the next block.

    Raises:
        UserError: for text that is not UTF-8, or holds NUL bytes, with the place.
    """
    offset, rest = piece.start, b""
    for block in blocks:
        data = rest + block
        zero = data.find(b"\0")
        if zero >= 0:
            raise UserError(
                f"{piece.path}: binary (a NUL byte at offset {offset + zero}); use the unit byte, or give a text"
            )
        try:
            text, rest = data.decode("utf-8"), b""
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                raise _not_utf8(piece, offset + error.start, data[error.start]) from None
            text, rest = data[: error.start].decode("utf-8"), data[error.start :]
        offset += len(data) - len(rest)
        yield text, len(block)
    if rest:
        raise _not_utf8(piece, offset, rest[0])


def _not_utf8(piece: Piece, offset: int, value: int) -> UserError:
    return UserError(
        f"{piece.path}: not UTF-8 (byte 0x{value:02X} at offset {offset}); convert it to UTF-8 or use the unit byte"
    )


def whole_line_ends(piece: Piece, blocks: Iterable[bytes]) -> Iterator[tuple[str, int]]:
    """Text of a piece as `decoded` gives it, but with no \\r\\n cut by a block's end.

    Where the cut between two splits goes through one, the first split is without it, and the second begins with \\n.

    Raises:
        UserError: as for `decoded`.
    """
    rest = ""
    for text, done in decoded(piece, blocks):
        text = rest + text
        rest = "\r" if text.endswith("\r") else ""
        yield text[: len(text) - len(rest)], done
    if rest and not _newline_follows(piece):
        yield rest, 0


class Normaliser:
    """Reads pieces without byte order marks and with \\n for \\r\\n, and counts both."""

    def __init__(self) -> None:
        self.byte_order_marks = self.line_ends = 0

    def blocks(self, piece: Piece) -> Iterator[bytes]:
        """The bytes of a piece, normalised.

        Raises:
            UserError: as for `decoded`.
        """
        begins = piece.start == 0
        for text, _ in whole_line_ends(piece, piece.blocks()):
            if begins and text:
                begins = False
                self.byte_order_marks += text.startswith(BYTE_ORDER_MARK)
                text = text.removeprefix(BYTE_ORDER_MARK)
            self.line_ends += text.count("\r\n")
            yield text.replace("\r\n", "\n").encode()


def _newline_follows(piece: Piece) -> bool:
    """Whether a cut between two pieces of a file stands before a line's end."""
    return piece.end is not None and next(Piece(piece.path, piece.end, piece.end + 1).blocks(), b"") == b"\n"


def whole_words(piece: Piece, blocks: Iterable[bytes]) -> Iterator[tuple[str, int]]:
    """Text of a piece, cut behind white space, with the bytes that each block took.

    A word that is cut by a block's end goes to the next block; a piece's last line has an end even if nothing ends it.

    Raises:
        UserError: as for `decoded`, or if something is too long to be a word.
    """
    rest, ended = "", True
    for text, done in decoded(piece, blocks):
        if not text:
            yield "", done
            continue
        text = rest + text
        ended = text.endswith("\n")
        # Not between \r and \n: the two may be one line's end.
        cut = max(*(text.rfind(space) for space in "\n \t"), text.rfind("\r", 0, len(text) - 1)) + 1
        rest = text[cut:]
        if len(rest) > LONGEST_WORD:
            raise UserError(
                f"{piece.path}: more than {LONGEST_WORD:,} characters without white space are no word; use the unit "
                f"bpe, char or byte"
            )
        yield text[:cut], done
    if rest or not ended:
        yield rest + "\n", 0


def words(
    piece: Piece, blocks: Iterable[bytes], eos: str = EOS, rule: WordRule = "whitespace"
) -> Iterator[tuple[list[str], int]]:
    """Words of a piece, with `<eos>` for each line's end, block by block, with the bytes that each block took.

    Raises:
        UserError: as for `whole_words`.
    """
    for text, done in whole_words(piece, blocks):
        yield words_and_ends(text, eos, rule), done
