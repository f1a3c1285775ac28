"""The vocabulary of words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import get_args

import numpy as np

from txl.config import WordRule
from txl.data.pieces import Blocks, Piece, whole_words
from txl.data.vocabulary import Decoder, Vocabulary, check_symbols
from txl.data.words import EOS, UNK, unjoined, word_spans, words_and_ends
from txl.errors import UserError, named
from txl.files import JsonObject


class _WordIds(dict[str, int]):
    """Ids of words, and the id of `<unk>` for all others (runs in C; a `get` method would take twice the time)."""

    unknown = -1

    def __missing__(self, word: str) -> int:
        return self.unknown


class WordVocabulary(Vocabulary):
    """Vocabulary of words (see `txl.data.words`), with `<eos>` for line ends and `<unk>` for all other words.

    Args:
        words: words in the order of their ids.
        eos: word that stands for the end of a line; None: line ends are white space like any other.
        unk: word that stands for all words that the vocabulary lacks; None: a text with such words is refused.
        boundary: boundaries in a corpus of separate sentences, one per line, each with `eos` (`<S>`) at both ends.
            "end": one `eos` between two sentences, so that the beginning of a sentence is given and its end is
            predicted; "both": two, so that the beginning of the next sentence is predicted too. None: running text,
            `eos` after each line.
        rule: rule for cutting a text into words.
    """

    kind = "word"
    border = re.compile(r"\s")

    def __init__(
        self,
        words: Sequence[str],
        *,
        eos: str | None = EOS,
        unk: str | None = UNK,
        boundary: str | None = None,
        rule: WordRule = "whitespace",
        lower: bool = False,
        normalise: bool = False,
    ):
        self.words = list(words)
        self.rule: WordRule = rule
        self.lower, self.normalise = lower, normalise
        check_symbols(self.words, "word")
        self.ids = _WordIds(zip(self.words, range(len(self.words)), strict=True))
        for symbol in (eos, unk):
            if symbol is not None and symbol not in self.ids:
                raise UserError(f"a word vocabulary needs {symbol}")
        if boundary not in (None, "end", "both") or (boundary is not None and eos is None):
            raise UserError(f"a word vocabulary's boundary is {boundary!r}; expected end or both, and a word for it")
        if rule not in get_args(WordRule):
            raise UserError(f"a word vocabulary's rule is {rule!r}; expected one of {', '.join(get_args(WordRule))}")
        if rule == "punctuation" and (eos, unk) != (EOS, UNK):
            raise UserError(f"a word vocabulary of the rule punctuation has {EOS} and {UNK}, not {eos} and {unk}")
        self.eos, self.unk, self.boundary = eos, unk, boundary
        self.draws_unknown = rule == "whitespace"
        self.eos_id = None if eos is None else self.ids[eos]
        if unk is not None:
            self.unk_id = self.ids.unknown = self.ids[unk]

    @staticmethod
    def of_counts(
        counts: Counter[str],
        min_count: int,
        max_words: int | None,
        rule: WordRule = "whitespace",
        normalise: bool = False,
    ) -> WordVocabulary:
        """Return a vocabulary: `<eos>` first, as in the authors' code, then words by descending count; equal counts in
        the order of first occurrence, which is that of `counts`.

        `<unk>` is placed by its count: the number of its own occurrences and those of all words left out, which occur
        less often than `min_count` or are not among the `max_words` (None: all) most frequent ones.
        """
        frequent = [word for word, count in counts.most_common() if count >= min_count and word not in (EOS, UNK)]
        chosen = frequent[:max_words]
        left_out = counts.total() - counts[EOS] - sum(counts[word] for word in chosen)
        order = {word: place for place, word in enumerate(counts)}
        first = order.get(UNK, len(order))  # a text without it would have it last
        place = sum((counts[word], -order[word]) > (left_out, -first) for word in chosen)
        return WordVocabulary([EOS, *chosen[:place], UNK, *chosen[place:]], rule=rule, normalise=normalise)

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> np.ndarray:
        """Return one token id per word and line end (`<eos>`), with the boundaries of separate sentences: int64 [N].

        Raises:
            UserError: if a vocabulary without `<unk>` lacks words of the text, which the message names.
        """
        parts = [self.encode_block(part) for part in self._parts(self.read(text))]
        ids = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        if self.boundary is None:
            return ids
        if self.boundary == "both":
            ids = np.repeat(ids, np.where(ids == self.eos_id, 2, 1))
        return np.concatenate([np.array([self.eos_id], dtype=np.int64), ids])

    def encode_block(self, text: str) -> np.ndarray:
        """Return one token id per word and line end, without boundaries; see `Vocabulary.encode_block`."""
        words = self.cut(text)
        ids = np.fromiter(map(self.ids.__getitem__, words), dtype=np.int64, count=len(words))
        if self.unk_id is None and (ids < 0).any():
            lacking = dict.fromkeys(words[place] for place in np.flatnonzero(ids < 0))
            raise UserError(f"the text has words that the vocabulary lacks: {named(lacking)}; leave them out")
        return ids

    def texts(self, piece: Piece, blocks: Iterable[bytes]) -> Blocks:
        """See `Vocabulary.texts`; the last line of a piece has an end, even if the text has none."""
        return whole_words(piece, blocks)

    def places(self, text: str, ids: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Vocabulary.places`."""
        spans = np.array(word_spans(text, self.rule, with_ends=self.eos is not None), dtype=np.int64).reshape(-1, 2)
        return edges[spans[:, 0]], edges[spans[:, 1]]

    def cut(self, text: str) -> list[str]:
        """Return the words of a text, in lower case if `lower` is True, with `eos` for each line end."""
        return words_and_ends(text.lower() if self.lower else text, self.eos, self.rule)

    def knows(self, symbol: str) -> bool:
        """See `Vocabulary.knows`."""
        return (symbol.lower() if self.lower else symbol) in self.ids

    def lacking(self, text: str) -> list[str]:
        """Return the words of a text that the vocabulary lacks, without the joiners of marks."""
        if self.unk_id is None:
            return []
        words = dict.fromkeys(word for word in self.cut(self.read(text)) if word not in self.ids)
        return [unjoined(word)[1] if self.rule == "punctuation" else word for word in words]

    def decoder(self, after: str = "") -> Decoder:
        """Return a decoder that joins words by spaces, and marks by their joiners; `<eos>` becomes a line end."""
        return _WordDecoder(self, after)

    def to_json(self) -> JsonObject:
        """Return the words in the order of their ids."""
        values: JsonObject = {"words": self.words}
        if (self.eos, self.unk, self.boundary) != (EOS, UNK, None):
            values |= {"eos": self.eos, "unk": self.unk, "boundary": self.boundary}
        if self.rule != "whitespace":
            values |= {"rule": self.rule}
        return self._as_json(**values)


class _WordDecoder(Decoder):
    """Decoder that joins words after the text `after` by spaces, except at joiners; the word `eos` is a line end."""

    def __init__(self, vocabulary: WordVocabulary, after: str):
        self._words, self._eos, self._rule = vocabulary.words, vocabulary.eos, vocabulary.rule
        self._space = "" if not after or after[-1].isspace() else " "

    def push(self, token: int) -> str:
        """Return the token's word, preceded by a space if there is one."""
        word = self._words[token]
        if word == self._eos:
            self._space = ""
            return "\n"
        joins_before, word, joins_after = unjoined(word) if self._rule == "punctuation" else (False, word, False)
        text = word if joins_before else self._space + word
        self._space = "" if joins_after else " "
        return text
