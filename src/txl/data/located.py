r"""Token ids of a text, with the byte offsets and the word number of each token.

The ids are the same as in a corpus prepared from the text, which is read block by block to keep memory use small. With
a vocabulary that normalises, a byte order mark belongs to no token, and \r\n is one character of two bytes; offsets are
those in the original text.

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

from txl.data.pieces import BYTE_ORDER_MARK, Piece, naming, whole_line_ends
from txl.data.vocabulary import Vocabulary, normalised

_WHITE = np.array([code for code in range(0x3001) if chr(code).isspace()], dtype=np.uint32)


class LocatedToken(NamedTuple):
    """A token and its place in a text."""

    id: int
    start: int  # offset in bytes at which the token begins in the text
    end: int  # offset in bytes behind the token; `start` for a boundary token, which the text does not contain
    word: int | None  # number of the token's word
    is_text: bool  # the token contains a character that is not white space
    text: bytes  # that the token stands for


def located_tokens(
    piece: Piece, blocks: Iterable[bytes], vocabulary: Vocabulary, normalise: bool | None = None
) -> Iterator[LocatedToken]:
    """Yield the tokens of a piece of text, whose bytes are `blocks`, in order.

    Characters and words that the vocabulary lacks become `<unk>`. `normalise` of None: as the vocabulary does.
    """
    marks = SentenceMarks(vocabulary)
    normalise = vocabulary.normalise if normalise is None else normalise and vocabulary.kind != "byte"
    first = n_read = piece.start
    n_words, after_white = 0, True
    with naming(piece):
        texts = vocabulary.texts(piece, blocks)
        for text, done in whole_line_ends(piece, texts) if normalise else texts:
            n_read += done
            block = _Block(text, normalise, begins=first == piece.start)
            ids = vocabulary.encode_block(block.text)
            starts, ends = vocabulary.places(block.text, ids, block.edges)

            white = block.white
            before = np.concatenate([[after_white], white])
            begun = n_words + np.cumsum(~white & before[:-1])  # words begun up to each byte, inclusive: [D]
            begun = np.append(begun, begun[-1] if len(white) else n_words)
            # For each byte, the first byte from there on that is not white space; the block's end if there is none.
            solid = np.append(np.where(white, len(white), np.arange(len(white))), len(white))
            solid = np.minimum.accumulate(solid[::-1])[::-1]
            is_text = solid[starts] < ends
            of_white = -1 if vocabulary.kind == "word" else begun[np.maximum(ends - 1, 0)]
            numbers = np.where(is_text, begun[solid[starts]] - 1, of_white)
            n_words, after_white = int(begun[-1]), bool(before[-1])

            # A boundary has no text: it stands where the next token begins, and belongs to no word.
            places = marks.places(ids)
            ends = np.insert(ends, places, starts[places])
            starts = np.insert(starts, places, starts[places])
            ids, numbers = np.insert(ids, places, marks.eos_id), np.insert(numbers, places, -1)
            is_text = np.insert(is_text, places, False)
            # The end that a word vocabulary adds to the last line lies behind the text.
            starts, ends = (np.minimum(block.places[edges] + first, n_read) for edges in (starts, ends))
            rows = zip(*(column.tolist() for column in (ids, starts, ends, numbers, is_text)), strict=True)
            for token, start, end, word, has_text in rows:
                part = block.whole[start - first : end - first]
                yield LocatedToken(token, start, end, None if word < 0 else word, has_text, part)
            first += len(block.whole)


class _Block:
    """A block of text, normalised if required, with the offsets of its characters and bytes.

    The text may have a byte order mark if it `begins` there.
    """

    def __init__(self, text: str, normalise: bool, begins: bool):
        # Bytes of the original text, and the offset there of each byte of the normalised text and of its end [D+1].
        self.whole = text.encode("utf-8", errors="surrogateescape")
        self.places = np.arange(len(self.whole) + 1)
        if normalise:
            mark = len(BYTE_ORDER_MARK.encode()) if begins and text.startswith(BYTE_ORDER_MARK) else 0
            returns = np.array([match.start() for match in re.finditer(b"\r\n", self.whole)], dtype=np.int64)
            self.places[returns + 1] = returns
            self.places = np.delete(self.places, np.concatenate([np.arange(mark), returns]))
            text = normalised(text) if mark else text.replace("\r\n", "\n")
        self.text = text
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
        lengths = 1 + sum((codes >= first).astype(np.int64) for first in (0x80, 0x800, 0x10000))
        # A byte that is not valid UTF-8 was decoded to one of these code points.
        lengths = np.where((codes >= 0xDC80) & (codes <= 0xDCFF), 1, lengths)
        # Offset in bytes of each character and of the end [C+1], and the mask of the bytes that are white space [D].
        self.edges = np.concatenate([[0], np.cumsum(lengths)])
        self.white = np.repeat(np.isin(codes, _WHITE), lengths)


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
            before[1:] = self._both & (ids[:-1] == self.eos_id)
            self._due = self._both and bool(ids[-1] == self.eos_id)
        return np.flatnonzero(before)
