"""Vocabularies built by counting the symbols of a training text.

The bytes of a piece are decoded and checked, and the text is cut into words, block by block, to keep memory use small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from txl.config import WordRule
from txl.data.formats import bad_byte
from txl.data.sources import Piece, content_size
from txl.data.vocabulary import BPE_CHUNK, BYTE_ORDER_MARK, BpeVocabulary, WordVocabulary
from txl.data.words import EOS, UNK, words_and_ends
from txl.errors import UserError

LONGEST_WORD = 1 << 20
"""Largest number of characters of a word; a text with a longer word is refused in the unit word."""


def decoded(piece: Piece, blocks: Iterable[bytes]) -> Iterator[tuple[str, int]]:
    """Yield the text of a piece block by block, each with the number of bytes read for it.

    A character that crosses the end of a block is yielded with the next block.

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


def whole_line_ends(piece: Piece, blocks: Iterable[bytes]) -> Iterator[tuple[str, int]]:
    """Yield the text of a piece like `decoded`, but never end a block between \\r and \\n.

    If a \\r\\n is cut by the edge of two splits, the first split leaves out the \\r, and the second begins with \\n.
    """
    rest = ""
    for text, done in decoded(piece, blocks):
        text = rest + text
        rest = "\r" if text.endswith("\r") else ""
        yield text[: len(text) - len(rest)], done
    if rest and not _newline_follows(piece):
        yield rest, 0


class Normaliser:
    """Reader that removes byte order marks, replaces \\r\\n by \\n, and counts both changes."""

    def __init__(self) -> None:
        self.byte_order_marks = self.line_ends = 0

    def blocks(self, piece: Piece) -> Iterator[bytes]:
        """Yield the bytes of a piece, normalised."""
        begins = piece.start == 0
        for text, _ in whole_line_ends(piece, piece.blocks()):
            if begins and text:
                begins = False
                self.byte_order_marks += text.startswith(BYTE_ORDER_MARK)
                text = text.removeprefix(BYTE_ORDER_MARK)
            self.line_ends += text.count("\r\n")
            yield text.replace("\r\n", "\n").encode()


def _newline_follows(piece: Piece) -> bool:
    """Return whether the byte that follows a piece in its file is \\n."""
    return piece.end is not None and next(Piece(piece.path, piece.end, piece.end + 1).blocks(), b"") == b"\n"


def whole_words(piece: Piece, blocks: Iterable[bytes]) -> Iterator[tuple[str, int]]:
    """Yield the text of a piece in blocks that end behind white space, each with the number of bytes read for it.

    A word that crosses the end of a block is yielded with the next block. If the last line has no end, one is added.

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


def words(piece: Piece, blocks: Iterable[bytes], rule: WordRule = "whitespace") -> Iterator[tuple[list[str], int]]:
    """Yield the words of a piece in blocks, `<eos>` for each line end, with the number of bytes read for each block."""
    for text, done in whole_words(piece, blocks):
        yield words_and_ends(text, EOS, rule), done


BPE_TRAINING_BYTES = 100_000_000
"""Approximate number of bytes from which BPE merges are learnt, spread evenly over the training text."""
MOST_WORDS = 16_000_000
"""Largest number of different words that are held in memory (about 2 GB)."""


class SymbolCounter:
    """Counts of bytes or code points, and the position where each of them first occurs."""

    def __init__(self, size: int):
        self._counts = np.zeros(size, dtype=np.int64)
        self._first = np.full(size, np.iinfo(np.int64).max)
        self._total = 0

    def add(self, codes: np.ndarray) -> None:
        """Add the symbols in `codes` to the counts."""
        counts = np.bincount(codes)
        known = self._counts[: len(counts)]
        for value in np.flatnonzero((counts > 0) & (known == 0)).tolist():
            self._first[value] = self._total + int(np.argmax(codes == value))
        known += counts
        self._total += len(codes)

    def sorted(self) -> list[int]:
        """Return the values that occurred, in ascending order."""
        return np.flatnonzero(self._counts).tolist()

    def most_frequent_first(self) -> list[int]:
        """Return the values that occurred, by descending count; equal counts in the order of first occurrence."""
        order = np.lexsort((self._first, -self._counts))
        return order[self._counts[order] > 0].tolist()


class _Numbers(dict[str, int]):
    """Consecutive numbers of words, in the order of first occurrence."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


class WordCounter:
    """Counter that numbers words in the order of first occurrence.

    The vocabulary is complete only after the last word. To cut a text into words only once, the text is stored as these
    provisional numbers, which are then replaced by the ids of the vocabulary.
    """

    def __init__(self) -> None:
        self._numbers = _Numbers()
        self._counts = np.zeros(1 << 16, dtype=np.int64)

    def add(self, words: list[str]) -> np.ndarray:
        """Add words to the counts.

        Returns:
            The provisional number of each word: uint32 [N].

        Raises:
            UserError: if there are more than `MOST_WORDS` different words.
        """
        ids = np.fromiter(map(self._numbers.__getitem__, words), dtype=np.uint32, count=len(words))
        known = len(self._numbers)
        if known > MOST_WORDS:
            raise UserError(
                f"the training text has more than {MOST_WORDS:,} different words; use the unit bpe or char for it"
            )
        if known > len(self._counts):
            self._counts = np.concatenate([self._counts, np.zeros(known, dtype=np.int64)])
        if len(ids):
            counts = np.bincount(ids)
            self._counts[: len(counts)] += counts
        return ids

    def vocabulary(self, min_count: int, max_words: int | None, **how_read: Any) -> tuple[WordVocabulary, np.ndarray]:
        """Return the vocabulary, and the id for each provisional number: int64 [words].

        See `word_vocabulary` for the order. The counter cannot be used afterwards.
        """
        words, self._numbers = list(self._numbers), _Numbers()
        return word_vocabulary(words, self._counts[: len(words)], min_count, max_words, **how_read)


def word_vocabulary(
    words: list[str], counts: np.ndarray, min_count: int, max_words: int | None, **how_read: Any
) -> tuple[WordVocabulary, np.ndarray]:
    """Build a vocabulary: `<eos>` first, as in the authors' code, then words by descending count; equal counts in the
    order of first occurrence.

    `<unk>` is placed by its count: the number of its own occurrences and those of all words left out.

    Args:
        words: all words that occurred, in the order of first occurrence.
        counts: number of occurrences of each word: int64 [words].
        min_count: smallest number of occurrences of a word that is kept.
        max_words: largest number of words that are kept, not counting `<eos>` and `<unk>`; None: all.
        how_read: `rule` and `normalise` of the vocabulary.

    Returns:
        The vocabulary, and its id for each of `words`: int64 [words].
    """
    eos_number, unk_number = (words.index(symbol) if symbol in words else None for symbol in (EOS, UNK))
    enough = counts >= min_count
    left_out = int(counts.sum())
    for number in (eos_number, unk_number):
        if number is not None:
            enough[number] = False
    candidates = np.flatnonzero(enough)
    kept = candidates[np.argsort(-counts[candidates], kind="stable")][:max_words]
    left_out -= int(counts[kept].sum()) + (0 if eos_number is None else int(counts[eos_number]))
    before = counts[kept] > left_out
    before |= (counts[kept] == left_out) & (kept < (len(words) if unk_number is None else unk_number))
    place = int(before.sum())
    names = [words[number] for number in kept]
    vocabulary = WordVocabulary([EOS, *names[:place], UNK, *names[place:]], **how_read)
    ids = np.full(len(words), vocabulary.unk_id, dtype=np.int64)
    if eos_number is not None:
        ids[eos_number] = vocabulary.ids[EOS]
    ids[kept] = np.arange(1, len(kept) + 1) + (np.arange(len(kept)) >= place)
    return vocabulary, ids


def bpe_vocabulary(
    pieces: list[Piece], vocab_size: int, blocks: Iterable[tuple[str, int]], normalise: bool
) -> BpeVocabulary:
    """Learn BPE merges from `blocks`, the text of the pieces; from every k-th chunk of the text if it is long."""
    total = sum((content_size(each.path) if each.end is None else each.end) - each.start for each in pieces)
    every = max(1, math.ceil(total / BPE_TRAINING_BYTES))

    def chunks() -> Iterator[str]:
        number = 0
        for text, _ in blocks:
            for start in range(0, len(text), BPE_CHUNK):
                if number % every == 0:
                    yield text[start : start + BPE_CHUNK]
                number += 1

    return BpeVocabulary.train(chunks(), vocab_size, normalise=normalise)
