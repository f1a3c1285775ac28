"""Vocabularies of the most frequent words, and of byte pairs learnt from a training text."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator

from txl.config import WordRule
from txl.data.bpe import BPE_CHUNK, BpeVocabulary
from txl.data.pieces import Piece, content_size
from txl.data.word_vocabulary import WordVocabulary
from txl.data.words import EOS, UNK

BPE_TRAINING_BYTES = 100_000_000
"""Approximate number of bytes from which BPE merges are learnt, spread evenly over the training text."""


def word_vocabulary(
    counts: Counter[str],
    min_count: int,
    max_words: int | None,
    rule: WordRule = "whitespace",
    normalise: bool = False,
) -> WordVocabulary:
    """Return a vocabulary: `<eos>` first, as in the authors' code, then words by descending count; equal counts in the
    order of first occurrence.

    `<unk>` is placed by its count: the number of its own occurrences and those of all words left out.

    Args:
        counts: number of occurrences of each word, in the order of first occurrence.
        min_count: smallest number of occurrences of a word that stays in the vocabulary.
        max_words: largest number of words in the vocabulary, not counting `<eos>` and `<unk>`; None: all.
        rule: rule for cutting a text into words.
        normalise: see `Vocabulary.normalise`.
    """
    frequent = [word for word, count in counts.most_common() if count >= min_count and word not in (EOS, UNK)]
    chosen = frequent[:max_words]
    left_out = counts.total() - counts[EOS] - sum(counts[word] for word in chosen)
    order = {word: place for place, word in enumerate(counts)}
    first = order.get(UNK, len(order))  # a text without it would have it last
    place = sum((counts[word], -order[word]) > (left_out, -first) for word in chosen)
    return WordVocabulary([EOS, *chosen[:place], UNK, *chosen[place:]], rule=rule, normalise=normalise)


def bpe_vocabulary(pieces: list[Piece], vocab_size: int, texts: Iterable[str], normalise: bool) -> BpeVocabulary:
    """Learn BPE merges from the text of the pieces, in blocks; from every k-th chunk of the text if it is long."""
    total = sum((content_size(piece.path) if piece.end is None else piece.end) - piece.start for piece in pieces)
    every = max(1, math.ceil(total / BPE_TRAINING_BYTES))

    def chunks() -> Iterator[str]:
        for text in texts:
            yield from (text[start : start + BPE_CHUNK] for start in range(0, len(text), BPE_CHUNK))

    return BpeVocabulary.train(itertools.islice(chunks(), 0, None, every), vocab_size, normalise=normalise)
