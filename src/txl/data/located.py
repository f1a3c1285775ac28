r"""Token ids of a text with the place of each: byte offsets and words.

The ids are those of a corpus made from the same text (`encode_piece`), block by block, so that memory stays small.

A vocabulary that normalises reads its text so here too: a byte order mark is in no token, and \\r\\n is one character
of two bytes. Offsets are those of the text as it is.

Words are the runs of characters between white space (`str.isspace`), numbered from 0. A token belongs to the word of
its first character that is not white space; white space alone belongs to the word that follows it, as the space at a
BPE token's beginning does. A byte belongs to where its character does; one that is no UTF-8 is no white space. The
line ends and sentence marks of a word vocabulary belong to no word.

Shapes: N tokens, C characters and D bytes of a block.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from txl.data.counting import whole_line_ends, whole_words
from txl.data.sources import Piece
from txl.data.vocabulary import (
    BYTE_ORDER_MARK,
    BpeVocabulary,
    ByteVocabulary,
    CharVocabulary,
    Vocabulary,
    WordVocabulary,
    normalised,
)
from txl.data.words import word_spans
from txl.errors import UserError

_WHITE = np.array([code for code in range(0x3001) if chr(code).isspace()], dtype=np.uint32)


class LocatedToken(NamedTuple):
    """A token of a text."""

    id: int
    start: int
    """Byte of the text at which it begins."""
    end: int
    """Byte behind its last; `start` for a mark that the text does not hold."""
    word: int | None
    """Number of its word; None: it belongs to none."""
    is_text: bool
    """True if it holds anything but white space."""
    text: bytes
    """Its part of the text."""


def located_tokens(
    piece: Piece, blocks: Iterable[bytes], vocabulary: Vocabulary, normalise: bool | None = None
) -> Iterator[LocatedToken]:
    """Yield the tokens of a piece of text, in order.

    Args:
        piece: names the text in errors.
        blocks: its bytes.
        vocabulary: to encode with; characters and words that it lacks become `<unk>`.
        normalise: whether the text is normalised; None: as the vocabulary says.
    """
    words = _WordCounter()
    normalise = vocabulary.normalise if normalise is None else normalise and vocabulary.kind != "byte"
    try:
        by_word = vocabulary if isinstance(vocabulary, WordVocabulary) else None
        marks = None if by_word is None or by_word.boundary is None else _SentenceMarks(by_word)
        first = piece.start
        for text, n_read in _texts(piece, blocks, vocabulary):
            block = _Block(text, normalise, begins=first == piece.start)
            ids, starts, ends = _encode(block, vocabulary)
            numbers, is_text = words.number(block.white(), starts, ends)
            if by_word is not None:
                numbers = np.where(is_text, numbers, -1)
            if marks is not None:
                ids, starts, ends, numbers, is_text = marks.added(ids, starts, ends, numbers, is_text)
            starts, ends = (np.minimum(block.places[each] + first, n_read) for each in (starts, ends))
            rows = zip(*(each.tolist() for each in (ids, starts, ends, numbers, is_text)), strict=True)
            for token, start, end, word, solid in rows:
                place = None if word < 0 else word
                yield LocatedToken(token, start, end, place, solid, block.whole[start - first : end - first])
            first += len(block.whole)
    except UserError as error:
        if str(piece.path) in str(error):
            raise
        raise UserError(f"{piece.path}: {error}") from None


def bytes_before(ids: np.ndarray, tokens: Iterable[LocatedToken]) -> int | None:
    """Return the byte of a text at which the token that follows the first ones, `ids` [N], begins.

    None if the text's tokens are others, or end there.
    """
    expected = ids.tolist()
    for place, token in enumerate(tokens):
        if place == len(expected):
            return token.start
        if token.id != expected[place]:
            return None
    return None


def _texts(piece: Piece, blocks: Iterable[bytes], vocabulary: Vocabulary) -> Iterator[tuple[str, int]]:
    """Yield the text in blocks that no token crosses, and the place in the piece's bytes after each."""
    n_read = piece.start
    if isinstance(vocabulary, ByteVocabulary):
        decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        for block in blocks:
            n_read += len(block)
            yield decoder.decode(block), n_read
        yield decoder.decode(b"", final=True), n_read
        return
    for text, done in (whole_words if isinstance(vocabulary, WordVocabulary) else whole_line_ends)(piece, blocks):
        n_read += done
        yield text, n_read


class _Block:
    """Some text as it is read, its bytes, and how the two go together.

    Args:
        text: as it is.
        normalise: whether it is read normalised.
        begins: whether a byte order mark may stand at its beginning.
    """

    def __init__(self, text: str, normalise: bool, begins: bool):
        self.whole = text.encode("utf-8", errors="surrogateescape")
        """Its bytes as they are."""
        self.places = np.arange(len(self.whole) + 1)
        """Places in `whole` at which each byte that is read begins, and the end: int64 [D+1]."""
        if normalise:
            mark = len(BYTE_ORDER_MARK.encode()) if begins and text.startswith(BYTE_ORDER_MARK) else 0
            returns = np.array([match.start() for match in re.finditer(b"\r\n", self.whole)], dtype=np.int64)
            self.places[returns + 1] = returns
            self.places = np.delete(self.places, np.concatenate([np.arange(mark), returns]))
            text = normalised(text) if mark else text.replace("\r\n", "\n")
        self.text, self.data = text, text.encode("utf-8", errors="surrogateescape")
        self._codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
        lengths = 1 + sum((self._codes >= first).astype(np.int64) for first in (0x80, 0x800, 0x10000))
        # A byte that is no UTF-8 was read as one of these.
        self._lengths = np.where((self._codes >= 0xDC80) & (self._codes <= 0xDCFF), 1, lengths)
        self.edges = np.concatenate([[0], np.cumsum(self._lengths)])
        """The byte at which each character begins, and the end: int64 [C+1]."""

    def white(self) -> np.ndarray:
        """Return whether each byte is white space: bool [D]."""
        return np.repeat(np.isin(self._codes, _WHITE), self._lengths)


def _encode(block: _Block, vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids of a block, and the bytes of it at which each token starts and ends: int64 [N] each."""
    edges = np.arange(len(block.data) + 1)
    if isinstance(vocabulary, ByteVocabulary):
        ids = vocabulary.encode_bytes(block.data)
    elif isinstance(vocabulary, CharVocabulary):
        ids, edges = vocabulary.encode_text(block.text), block.edges
    elif isinstance(vocabulary, WordVocabulary):
        spans = np.array(word_spans(block.text, vocabulary.rule), dtype=np.int64).reshape(-1, 2)
        return vocabulary.encode_words(vocabulary.cut(block.text)), block.edges[spans[:, 0]], block.edges[spans[:, 1]]
    elif isinstance(vocabulary, BpeVocabulary):
        ids = vocabulary.encode_block(block.text).astype(np.int64)
        edges = np.concatenate([[0], np.cumsum(vocabulary.n_bytes(ids))])
        if edges[-1] != len(block.data):
            raise UserError("the vocabulary's tokens do not spell the text, so their places in it are not known")
    else:
        raise TypeError(f"no encoding for a {type(vocabulary).__name__}")
    return ids, edges[:-1], edges[1:]


class _WordCounter:
    """Numbers the words of a text that comes in blocks."""

    def __init__(self) -> None:
        self._words, self._after_white = 0, True

    def number(self, white: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the word of each token [N], and whether it holds anything but white space [N].

        Args:
            white: whether each byte of the block is white space, [D].
            starts, ends: bytes of the block between which each token lies, [N].
        """
        before = np.concatenate([[self._after_white], white[:-1]])
        begun = self._words + np.cumsum(~white & before[: len(white)])  # words, up to and with each byte
        # The next byte from each on that is no white space; behind the last one, the block's end.
        solid = np.minimum.accumulate(np.where(white, len(white), np.arange(len(white)))[::-1])[::-1]
        solid = np.append(solid, len(white))
        is_text = solid[starts] < ends
        begun = np.append(begun, self._words if len(white) == 0 else begun[-1])
        numbers = np.where(is_text, begun[solid[starts]] - 1, begun[np.maximum(ends - 1, 0)])
        if len(white):
            self._words, self._after_white = int(begun[-1]), bool(white[-1])
        return numbers, is_text


class _SentenceMarks:
    """Adds the marks at sentences' ends that the text does not hold (see `WordVocabulary.boundary`)."""

    def __init__(self, vocabulary: WordVocabulary):
        self._eos, self._both, self._due = vocabulary.ids[vocabulary.eos], vocabulary.boundary == "both", True

    def added(
        self, ids: np.ndarray, starts: np.ndarray, ends: np.ndarray, numbers: np.ndarray, is_text: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Return all arguments [N] with the marks; a sentence's beginning is due when the sentence follows."""
        if len(ids) == 0:
            return ids, starts, ends, numbers, is_text
        before = np.zeros(len(ids), dtype=bool)
        before[0] = self._due
        if self._both:
            before[1:] = ids[:-1] == self._eos
        self._due = self._both and bool(ids[-1] == self._eos)
        places = np.flatnonzero(before)
        return (
            np.insert(ids, places, self._eos),
            np.insert(starts, places, starts[places]),
            np.insert(ends, places, starts[places]),
            np.insert(numbers, places, -1),
            np.insert(is_text, places, False),
        )
