"""Vocabularies built by counting the symbols of a training text, block by block."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from txl.config import WordRule
from txl.data.bpe import BPE_CHUNK, BpeVocabulary
from txl.data.pieces import Piece, content_size
from txl.data.word_vocabulary import WordVocabulary
from txl.data.words import EOS, UNK
from txl.errors import UserError

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
        """Add words to the counts, and return the provisional number of each: uint32 [N].

        Raises:
            UserError: if there are more than `MOST_WORDS` different words.
        """
        numbers = np.fromiter(map(self._numbers.__getitem__, words), dtype=np.uint32, count=len(words))
        known = len(self._numbers)
        if known > MOST_WORDS:
            raise UserError(
                f"the training text has more than {MOST_WORDS:,} different words; use the unit bpe or char for it"
            )
        if known > len(self._counts):
            self._counts = np.concatenate([self._counts, np.zeros(known, dtype=np.int64)])
        counts = np.bincount(numbers)
        self._counts[: len(counts)] += counts
        return numbers

    def vocabulary(
        self, min_count: int, max_words: int | None, rule: WordRule, normalise: bool
    ) -> tuple[WordVocabulary, np.ndarray]:
        """Return the vocabulary, and the id for each provisional number: int64 [words].

        The arguments are those of `word_vocabulary`. The counter cannot be used afterwards.
        """
        words, self._numbers = list(self._numbers), _Numbers()
        return word_vocabulary(words, self._counts[: len(words)], min_count, max_words, rule, normalise)


def word_vocabulary(
    words: list[str],
    counts: np.ndarray,
    min_count: int,
    max_words: int | None,
    rule: WordRule = "whitespace",
    normalise: bool = False,
) -> tuple[WordVocabulary, np.ndarray]:
    """Build a vocabulary: `<eos>` first, as in the authors' code, then words by descending count; equal counts in the
    order of first occurrence.

    `<unk>` is placed by its count: the number of its own occurrences and those of all words left out.

    Args:
        words: all words that occurred, in the order of first occurrence.
        counts: number of occurrences of each word: int64 [words].
        min_count: smallest number of occurrences of a word that stays in the vocabulary.
        max_words: largest number of words in the vocabulary, not counting `<eos>` and `<unk>`; None: all.
        rule: rule for cutting a text into words.
        normalise: see `Vocabulary.normalise`.

    Returns:
        The vocabulary, and its id for each of `words`: int64 [words].
    """
    eos_number, unk_number = (words.index(symbol) if symbol in words else None for symbol in (EOS, UNK))
    enough = counts >= min_count
    enough[[number for number in (eos_number, unk_number) if number is not None]] = False
    candidates = np.flatnonzero(enough)
    chosen = candidates[np.argsort(-counts[candidates], kind="stable")][:max_words]
    left_out = int(counts.sum() - counts[chosen].sum()) - (0 if eos_number is None else int(counts[eos_number]))
    before = counts[chosen] > left_out
    before |= (counts[chosen] == left_out) & (chosen < (len(words) if unk_number is None else unk_number))
    place = int(before.sum())
    names = [words[number] for number in chosen]
    vocabulary = WordVocabulary([EOS, *names[:place], UNK, *names[place:]], rule=rule, normalise=normalise)
    return vocabulary, vocabulary.encode_words(words)


def bpe_vocabulary(pieces: list[Piece], vocab_size: int, texts: Iterable[str], normalise: bool) -> BpeVocabulary:
    """Learn BPE merges from the text of the pieces, in blocks; from every k-th chunk of the text if it is long."""
    total = sum((content_size(piece.path) if piece.end is None else piece.end) - piece.start for piece in pieces)
    every = max(1, math.ceil(total / BPE_TRAINING_BYTES))

    def chunks() -> Iterator[str]:
        for text in texts:
            yield from (text[start : start + BPE_CHUNK] for start in range(0, len(text), BPE_CHUNK))

    return BpeVocabulary.train(itertools.islice(chunks(), 0, None, every), vocab_size, normalise=normalise)
