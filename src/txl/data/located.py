r"""Token ids of a text, with the byte offsets and the word number of each token.

The ids are the same as in a corpus prepared from the text. The text is read block by block, to keep memory use small.

With a vocabulary that normalises, the text is normalised here too: a byte order mark belongs to no token, and \r\n is
one character of two bytes. Offsets are those in the original text.

Words are the runs of characters between white space (`str.isspace`), numbered from 0. A token belongs to the word of
its first character that is not white space. A token of white space alone belongs to the following word, like the space
at the beginning of a BPE token. A byte belongs to the same word as its character; a byte that is not valid UTF-8 is not
white space. The line ends and boundary tokens of a word vocabulary belong to no word.

Shapes: N tokens, C characters and D bytes of a block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from txl.data.blocks import BYTE_ORDER_MARK, naming, whole_line_ends
from txl.data.pieces import Piece
from txl.data.vocabulary import Vocabulary, normalised

_WHITE = np.array([code for code in range(0x3001) if chr(code).isspace()], dtype=np.uint32)


class LocatedToken(NamedTuple):
    """A token and its place in a text."""

    id: int
    start: int
    """Offset in bytes at which the token begins in the text."""
    end: int
    """Offset in bytes behind the token; `start` for a boundary token, which the text does not contain."""
    word: int | None
    """Number of the token's word; None: the token belongs to no word."""
    is_text: bool
    """True if the token contains a character that is not white space."""
    text: bytes
    """Part of the text that the token stands for."""


def located_tokens(
    piece: Piece, blocks: Iterable[bytes], vocabulary: Vocabulary, normalise: bool | None = None
) -> Iterator[LocatedToken]:
    """Yield the tokens of a piece of text, in order.

    Args:
        piece: piece of text; error messages name its file.
        blocks: bytes of the piece.
        vocabulary: vocabulary to encode with; characters and words that it lacks become `<unk>`.
        normalise: True to normalise the text; None: as the vocabulary does.
    """
    words, marks = _WordCounter(), SentenceMarks(vocabulary)
    normalise = vocabulary.normalise if normalise is None else normalise and vocabulary.kind != "byte"
    first = n_read = piece.start
    with naming(piece):
        texts = vocabulary.texts(piece, blocks)
        for text, done in whole_line_ends(piece, texts) if normalise else texts:
            n_read += done
            block = _Block(text, normalise, begins=first == piece.start)
            ids = vocabulary.encode_block(block.text)
            starts, ends = vocabulary.places(block.text, ids, block.edges)
            numbers, is_text = words.number(block.white(), starts, ends)
            if vocabulary.kind == "word":
                numbers = np.where(is_text, numbers, -1)
            # A boundary has no text: it stands where the next token begins, and belongs to no word.
            places = marks.places(ids)
            ends = np.insert(ends, places, starts[places])
            starts = np.insert(starts, places, starts[places])
            ids, numbers = np.insert(ids, places, marks.eos_id), np.insert(numbers, places, -1)
            is_text = np.insert(is_text, places, False)
            # The end that a word vocabulary adds to the last line lies behind the text.
            starts, ends = (np.minimum(block.places[edges] + first, n_read) for edges in (starts, ends))
            rows = zip(*(column.tolist() for column in (ids, starts, ends, numbers, is_text)), strict=True)
            for token, start, end, word, solid in rows:
                part = block.whole[start - first : end - first]
                yield LocatedToken(token, start, end, None if word < 0 else word, solid, part)
            first += len(block.whole)


def bytes_before(ids: np.ndarray, tokens: Iterable[LocatedToken]) -> int | None:
    """Return the byte offset at which the token after the first N tokens of a text, `ids` [N], begins.

    Return None if the text does not begin with these tokens, or has no further token.
    """
    expected = ids.tolist()
    for place, token in enumerate(tokens):
        if place == len(expected):
            return token.start
        if token.id != expected[place]:
            return None
    return None


class _Block:
    """A block of text, normalised if required, with the offsets of its characters and bytes.

    Args:
        text: original text.
        normalise: True to normalise the text.
        begins: True if the text may begin with a byte order mark.
    """

    def __init__(self, text: str, normalise: bool, begins: bool):
        self.whole = text.encode("utf-8", errors="surrogateescape")
        """Bytes of the original text."""
        self.places = np.arange(len(self.whole) + 1)
        """Offset in `whole` of each byte of the normalised text, and of its end: int64 [D+1]."""
        if normalise:
            mark = len(BYTE_ORDER_MARK.encode()) if begins and text.startswith(BYTE_ORDER_MARK) else 0
            returns = np.array([match.start() for match in re.finditer(b"\r\n", self.whole)], dtype=np.int64)
            self.places[returns + 1] = returns
            self.places = np.delete(self.places, np.concatenate([np.arange(mark), returns]))
            text = normalised(text) if mark else text.replace("\r\n", "\n")
        self.text, self.data = text, text.encode("utf-8", errors="surrogateescape")
        self._codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
        lengths = 1 + sum((self._codes >= first).astype(np.int64) for first in (0x80, 0x800, 0x10000))
        # A byte that is not valid UTF-8 was decoded to one of these code points.
        self._lengths = np.where((self._codes >= 0xDC80) & (self._codes <= 0xDCFF), 1, lengths)
        self.edges = np.concatenate([[0], np.cumsum(self._lengths)])
        """Offset in bytes of each character, and of the end: int64 [C+1]."""

    def white(self) -> np.ndarray:
        """Return the mask of the bytes that are white space: bool [D]."""
        return np.repeat(np.isin(self._codes, _WHITE), self._lengths)


class _WordCounter:
    """Counter that numbers the words of a text across blocks."""

    def __init__(self) -> None:
        self._words, self._after_white = 0, True

    def number(self, white: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the word number of each token [N], and the mask of the tokens that are not only white space [N].

        Args:
            white: mask of the bytes of the block that are white space: bool [D].
            starts, ends: byte offsets in the block at which each token starts and ends: int64 [N].
        """
        before = np.concatenate([[self._after_white], white[:-1]])
        begun = self._words + np.cumsum(~white & before[: len(white)])  # words begun up to each byte, inclusive
        # For each byte, the first byte from there on that is not white space; the end of the block if there is none.
        solid = np.minimum.accumulate(np.where(white, len(white), np.arange(len(white)))[::-1])[::-1]
        solid = np.append(solid, len(white))
        is_text = solid[starts] < ends
        begun = np.append(begun, self._words if len(white) == 0 else begun[-1])
        numbers = np.where(is_text, begun[solid[starts]] - 1, begun[np.maximum(ends - 1, 0)])
        if len(white):
            self._words, self._after_white = int(begun[-1]), bool(white[-1])
        return numbers, is_text


class SentenceMarks:
    """Places of the boundary tokens that a text of separate sentences does not contain (see `WordVocabulary`)."""

    def __init__(self, vocabulary: Vocabulary):
        self.eos_id = vocabulary.eos_id or 0  # a vocabulary with boundaries has one
        self._both = vocabulary.boundary == "both"
        self._due = vocabulary.boundary is not None

    def places(self, ids: np.ndarray) -> np.ndarray:
        """Return the indices before which a boundary token belongs among the tokens of the next block [N].

        A boundary token that begins a sentence stands before its first token, so that none ends the text.
        """
        before = np.zeros(len(ids), dtype=bool)
        if len(ids):
            before[0] = self._due
            if self._both:
                before[1:] = ids[:-1] == self.eos_id
            self._due = self._both and bool(ids[-1] == self.eos_id)
        return np.flatnonzero(before)
