"""Notes on a text: what a model's vocabulary or training text lacks of it, and the share of `<unk>`."""

from __future__ import annotations

import codecs
import functools
import unicodedata
from collections import Counter

from txl.data.vocabulary import Vocabulary
from txl.data.words import is_mark
from txl.errors import named

_SHARE = 0.1  # smallest share of the tally for which a cause is named
_CAUSES = {
    "NFC": "written with accents apart from their letters (NFD): convert the text to NFC",
    "NFD": "written with accents in one with their letters (NFC): convert the text to NFD",
    "case": "known in lower case, as the training text is: convert the text",
    "marks": "known without the mark at their end, which the training text has apart: write the text in the same way",
}


class Lacking:
    """Tally of a text's words or characters that are unknown, or (bytes and BPE with `seen`) not in the training text.

    `normalise` tells whether the text's \\r\\n is read as \\n; None: as the vocabulary does.
    """

    def __init__(self, vocabulary: Vocabulary, normalise: bool | None = None):
        self._vocabulary = vocabulary
        self._normalise = vocabulary.normalise if normalise is None else normalise
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        self.symbol = "word" if vocabulary.kind == "word" else "character"
        self.total = 0
        self._symbols: dict[str, None] = {}
        self._causes: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def read(self, token: bytes, unknown: bool) -> None:
        """Tally the next token of a text, of these bytes, if it is `<unk>` or has characters that training lacked."""
        text = self._decoder.decode(token)
        text = text.replace("\r\n", "\n") if self._normalise else text
        if unknown:
            self.add(text)
        elif self._vocabulary.reads_all:
            for character in text:
                if not self._vocabulary.knows(character):
                    self.add(character)

    def add(self, symbol: str, times: int = 1) -> None:
        """Tally a word or character that is lacking, which occurs `times` times."""
        self.total += times
        if len(self._symbols) < 1000:
            self._symbols[symbol] = None
        cause = self._cause(symbol)
        self._causes[cause] += times
        self._examples.setdefault(cause, symbol)

    def notes(self, where: str) -> list[str]:
        """Return notes: on characters of bytes or BPE tokens that training never saw, and on the frequent causes."""
        notes = []
        if self._vocabulary.reads_all and self.total:
            notes.append(
                f"{self.total:,} character{'s' * (self.total > 1)} of {where} never occurred in the training text "
                f"({self.names()}): the model's probabilities there are noise; replace them, or train on text with them"
            )
        lacks = "training never saw" if self._vocabulary.reads_all else "the vocabulary lacks"
        for cause, count in self._causes.most_common():
            if cause and count >= _SHARE * self.total:
                which = f"{count:,} of the {self.total:,} {self.symbol}s that {lacks}, such as"
                notes.append(f"{which} {named([self._examples[cause][:40]])}, are {_CAUSES[cause]}")
        return notes

    def names(self) -> str:
        """Return the first words or characters of the tally, for a message."""
        return named(self._symbols)

    def _cause(self, symbol: str) -> str:
        """Return the likely cause why a word or character is lacking, "" for none."""
        knows, is_word = self._vocabulary.knows, self.symbol == "word"
        for form in ("NFC", "NFD"):
            other = unicodedata.normalize(form, symbol)
            if other != symbol and all(map(knows, [other] if is_word else other)):
                return form
        if not is_word and unicodedata.combining(symbol):
            return "NFC"
        if self._is_small and knows(symbol.lower()):
            return "case"
        return "marks" if is_word and is_mark(symbol[-1:]) and knows(symbol[:-1]) and knows(symbol[-1]) else ""

    @functools.cached_property
    def _is_small(self) -> bool:
        """True if the training text is in lower case, as far as the vocabulary tells."""
        known = getattr(self._vocabulary, "words", None) or getattr(self._vocabulary, "characters", None)
        known = known or list(map(chr, self._vocabulary.seen or ()))
        return sum(symbol != symbol.lower() for symbol in known) <= 0.01 * len(known)


def normalised_note(name: str, byte_order_marks: int, line_ends: int) -> str | None:
    """Return a note on what normalising changed in a text; None if nothing was changed."""
    parts = [f"without byte order marks ({byte_order_marks:,})"] * (byte_order_marks > 0)
    parts += [f"with \\n for {line_ends:,} line ends \\r\\n"] * (line_ends > 0)
    return f"{name} is read {' and '.join(parts)}" if parts else None


def unknown_note(lacking: Lacking, unknown: int, tokens: int, where: str, trained: float | None) -> str | None:
    """Return a note on the numbers of `<unk>` and of all tokens in a text; None if there is no `<unk>`.

    `where` describes the text, `trained` is the share of `<unk>` in the model's training text (None: unknown).
    """
    if not unknown:
        return None
    found = f"{unknown:,} of {tokens:,} {lacking.symbol}s of {where} ({_percent(unknown / tokens)}) are <unk>"
    if trained == 0:
        remedy = "data.min_count 2 would train it" if lacking.symbol == "word" else "train on text that has them"
        examples = f" ({lacking.names()})" if lacking.total else ""
        return f"{found}{examples}, which training never saw: their losses are noise, also in every average; {remedy}"
    seen = "" if trained is None else f" (in training {_percent(trained)})"
    return (
        f"{found}{seen}: they count as one and the same {lacking.symbol}, whose spelling costs nothing, so the loss is "
        f"lower than with a full vocabulary; compare it only with models of this vocabulary"
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0005 else "below 0.1%"
