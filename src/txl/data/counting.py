"""Vocabularies of a training text, by counting its symbols.

A piece's bytes become checked text, and text becomes words, block by block, so that memory stays small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from txl.config import WordRule
from txl.data.sources import Piece, content_size
from txl.data.vocabulary import BPE_CHUNK, BYTE_ORDER_MARK, BpeVocabulary, WordVocabulary
from txl.data.words import EOS, UNK, words_and_ends
from txl.errors import UserError

LONGEST_WORD = 1 << 20
"""Characters of a word above which a text is not taken to be made of words."""


def decoded(piece: Piece, blocks: Iterable[bytes]) -> Iterator[tuple[str, int]]:
    """Yield the text of a piece, block by block, with the bytes that each took.

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
    """Yield the text of a piece as `decoded` gives it, but with no \\r\\n cut by a block's end.

    Where the cut between two splits goes through one, the first split is without it, and the second begins with \\n.
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
    """Return whether a cut between two pieces of a file stands before a line's end."""
    return piece.end is not None and next(Piece(piece.path, piece.end, piece.end + 1).blocks(), b"") == b"\n"


def whole_words(piece: Piece, blocks: Iterable[bytes]) -> Iterator[tuple[str, int]]:
    """Yield the text of a piece, cut behind white space, with the bytes that each block took.

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
    """Yield the words of a piece, with `<eos>` for each line's end, block by block, with the bytes that each block
    took.
    """
    for text, done in whole_words(piece, blocks):
        yield words_and_ends(text, eos, rule), done


BPE_TRAINING_BYTES = 100_000_000
"""Byte pairs are learnt from about this much text, taken evenly from all of the training text."""
MOST_WORDS = 16_000_000
"""Different words that are held in memory (about 2 GB)."""


class SymbolCounter:
    """Counts of bytes or code points, and the place of each one's first appearance."""

    def __init__(self, size: int):
        self._counts = np.zeros(size, dtype=np.int64)
        self._first = np.full(size, np.iinfo(np.int64).max)
        self._total = 0

    def add(self, codes: np.ndarray) -> None:
        """Count some more."""
        counts = np.bincount(codes)
        known = self._counts[: len(counts)]
        for value in np.flatnonzero((counts > 0) & (known == 0)).tolist():
            self._first[value] = self._total + int(np.argmax(codes == value))
        known += counts
        self._total += len(codes)

    def sorted(self) -> list[int]:
        """Return the values that appeared, in their order."""
        return np.flatnonzero(self._counts).tolist()

    def most_frequent_first(self) -> list[int]:
        """Return the values that appeared, by falling count, equal counts in the order of appearance."""
        order = np.lexsort((self._first, -self._counts))
        return order[self._counts[order] > 0].tolist()


class _Numbers(dict[str, int]):
    """A number for every word, in the order of appearance."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


class WordCounter:
    """Numbers words in the order of their appearance and counts them; the vocabulary is known only after the last one.

    So a text is split into words only once: it is written down in these numbers, which the vocabulary then replaces.
    """

    def __init__(self) -> None:
        self._numbers = _Numbers()
        self._counts = np.zeros(1 << 16, dtype=np.int64)

    def add(self, words: list[str]) -> np.ndarray:
        """Count some words.

        Returns:
            Their numbers: uint32 [N].

        Raises:
            UserError: if there are more different words than memory holds.
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
        """Return the vocabulary, and its id for each number: int64 [words]. The counter is used up.

        See `word_vocabulary` for the order.
        """
        words, self._numbers = list(self._numbers), _Numbers()
        return word_vocabulary(words, self._counts[: len(words)], min_count, max_words, **how_read)


def word_vocabulary(
    words: list[str], counts: np.ndarray, min_count: int, max_words: int | None, **how_read: Any
) -> tuple[WordVocabulary, np.ndarray]:
    """Build a vocabulary: `<eos>` first, as in the authors' code, then words by falling count; equal counts in the
    order of appearance.

    `<unk>` takes the place that its count gives it: its own occurrences and those of all words left out.

    Args:
        words: all that appeared, in the order of their first appearance.
        counts: how often each did: int64 [words].
        min_count: those seen less often are left out.
        max_words: no more than this many, `<eos>` and `<unk>` not counted, are kept; None: all.
        how_read: `rule` and `normalise` of the vocabulary.

    Returns:
        The vocabulary, and the id of each of `words` in it: int64 [words].
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
    """Learn byte pairs from the blocks of some pieces' text, or from every k-th part of it if it is long."""
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
