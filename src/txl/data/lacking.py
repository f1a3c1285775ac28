"""Tally of what a text has and a model's vocabulary or training text lacks, and of the likely causes, for notes."""

from __future__ import annotations

import codecs
import functools
import re
import unicodedata
from collections import Counter
from typing import Literal

from txl.data.detokenise import convention_of
from txl.data.vocabulary import BpeVocabulary, ByteVocabulary, CharVocabulary, Vocabulary, WordVocabulary
from txl.data.words import JOINER, marks
from txl.errors import named

_SHARE = 0.1
"""Smallest share of the tally for which a cause is named."""
_UNDIVIDED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff].{7}|.{30}"
)
"""Words that are probably several: eight characters of a script written without spaces, or thirty of another."""
_ALIKE = ("'‘’‚‛′`´", '"“”„‟«»″', "-‐‑–—―−", " \u00a0\u2002\u2003\u2009\u202f")
"""Characters that are written for one another."""
_TOKENISED: dict[str | None, str] = {
    "wikitext": "`game .`, `1 @,@ 000`, `well @-@ known`, `didn 't`",
    "ptb": "no punctuation, `did n't`, numbers as `N`, all in lower case",
    "lm1b": "`game .`, `did n't`",
    None: "`game .`",
}


class Lacking:
    """Tally of a text's words or characters that are unknown, or (bytes and BPE) not in the training text.

    Args:
        vocabulary: vocabulary of the model. With bytes or BPE tokens, nothing is tallied unless it has `seen`.
        normalise: True if \\r\\n in the text is read as \\n; None: as the vocabulary does.
    """

    def __init__(self, vocabulary: Vocabulary, normalise: bool | None = None):
        self._vocabulary = vocabulary
        self._normalise = vocabulary.normalise if normalise is None else normalise
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        self.is_word = isinstance(vocabulary, WordVocabulary)
        """True if words are tallied, False if characters are."""
        self._is_complete = isinstance(vocabulary, ByteVocabulary | BpeVocabulary)
        self.total = 0
        self._symbols: dict[str, None] = {}
        self._causes: Counter[str] = Counter()
        self._examples: dict[str, dict[str, str]] = {}

    def read(self, token: bytes, unknown: bool) -> None:
        """Tally the next token of a text if it is lacking.

        Args:
            token: the token's bytes in the text.
            unknown: True if the token is `<unk>`.
        """
        text = self._decoder.decode(token)
        text = text.replace("\r\n", "\n") if self._normalise else text
        if not self._is_complete:
            if unknown:
                self.add(text)
        elif self._vocabulary.seen is not None:
            for character in text:
                if not self.knows(character):
                    self.add(character)

    def knows(self, symbol: str) -> bool:
        """Return whether a word or character is not lacking."""
        vocabulary = self._vocabulary
        if isinstance(vocabulary, WordVocabulary):
            return (symbol.lower() if vocabulary.lower else symbol) in vocabulary.ids
        if self._is_complete:
            return vocabulary.seen is None or ord(symbol) in vocabulary.seen
        return not vocabulary.lacking(symbol)

    def add(self, symbol: str, times: int = 1) -> None:
        """Tally a word or character that is lacking, which occurs `times` times."""
        self.total += times
        if len(self._symbols) < 1000:
            self._symbols[symbol] = None
        cause, remedy = self._cause(symbol)
        self._causes[cause] += times
        examples = self._examples.setdefault(cause, {})
        if len(examples) < 5:
            examples[symbol] = remedy

    def notes(self, where: str) -> list[str]:
        """Return notes: on characters of bytes or BPE tokens that training never saw, and on causes of all kinds.

        A cause of few words or characters is left out.
        """
        found = []
        if self._is_complete and self.total:
            found.append(
                f"{self.total:,} character{'s' * (self.total > 1)} of {where} never occurred in the training text "
                f"({named(self._symbols)}): the model's probabilities there are noise; replace them, or train on text "
                f"that has them"
            )
        causes = [(cause, count) for cause, count in self._causes.most_common() if count >= _SHARE * self.total]
        return found + [self._told(cause, count) for cause, count in causes if cause]

    def names(self) -> str:
        """Return the first words or characters of the tally, for a message."""
        return named(self._symbols)

    def _cause(self, symbol: str) -> tuple[str, str]:
        """Return the likely cause why a word or character is lacking, "" for none, and what would not be lacking."""
        for cause in ("NFC", "NFD"):
            other = unicodedata.normalize(cause, symbol)
            if other != symbol and all(map(self.knows, [other] if self.is_word else other)):
                return cause, other
        if not self.is_word and unicodedata.combining(symbol):
            return "NFC", ""
        if self._is_small and self.knows(symbol.lower()):
            return "case", symbol.lower()
        for group in _ALIKE if len(symbol) == 1 else ():
            for other in group if symbol in group else ():
                if other != symbol and (self.knows(other) or (self.is_word and self._is_joined_mark(other))):
                    return "alike", other
        if not self.is_word:
            return "", ""
        if self._convention is not False and self._is_joined(symbol):
            return "punctuation", ""
        return ("undivided", "") if _UNDIVIDED.match(symbol) else ("", "")

    def _is_joined_mark(self, mark: str) -> bool:
        """Return whether the vocabulary has a mark with joiners."""
        return any(map(self.knows, (f"{JOINER}{mark}", f"{mark}{JOINER}", f"{JOINER}{mark}{JOINER}")))

    def _is_joined(self, word: str) -> bool:
        """Return whether punctuation touches a word whose parts are known."""
        parts = [each for each in _marks().split(word.removesuffix("n't")) if each]
        known = all(each.isdecimal() or any(map(self.knows, (each, each.lower(), f"'{each}"))) for each in parts)
        return parts != [word] and known and parts != []

    @functools.cached_property
    def _is_small(self) -> bool:
        """True if the training text is in lower case, as far as the vocabulary tells."""
        vocabulary = self._vocabulary
        if isinstance(vocabulary, WordVocabulary):
            return sum(word != word.lower() for word in vocabulary.words) <= 0.01 * len(vocabulary)
        if isinstance(vocabulary, CharVocabulary):
            return not any(map(str.isupper, vocabulary.characters))
        return not any(chr(code).isupper() for code in vocabulary.seen or ())

    @functools.cached_property
    def _convention(self) -> str | Literal[False] | None:
        """Convention by which the training text was tokenised; None: an unknown one; False: it was not tokenised."""
        vocabulary = self._vocabulary
        assert isinstance(vocabulary, WordVocabulary)
        if vocabulary.rule == "punctuation":
            return False
        with_comma = sum(len(word) > 1 and word.endswith(",") for word in vocabulary.words)
        is_apart = "," in vocabulary.ids and with_comma <= 0.01 * len(vocabulary)
        return convention_of(vocabulary) or (None if is_apart else False)

    def _told(self, cause: str, count: int) -> str:
        """Return a cause, with examples and what to do, as a note."""
        kind = "word" if self.is_word else "character"
        examples = self._examples[cause]
        which = f"{count:,} of the {self.total:,} {kind}s that {'training' if self._is_complete else 'the vocabulary'} "
        which += f"{'never saw' if self._is_complete else 'lacks'}"
        such = f"such as {next(iter(examples))[:40]}"
        if cause == "NFC":
            such = f", {such}" if self.is_word else ""
            return f"{which} are accents apart from their letters (NFD){such}: convert the text to NFC"
        if cause == "NFD":
            return f"{which} are accents in one with their letters (NFC), {such}: convert the text to NFD"
        if cause == "case":
            return f"{which} are known in lower case, {such}: the training text is in lower case; convert the text"
        if cause == "alike":
            pairs = ", ".join(f"{other} for {symbol}" for symbol, other in examples.items())
            return f"the training text has other characters of the same kind: {pairs}"
        if cause == "punctuation":
            return (
                f"{which} are known without the punctuation that touches them, {such}: the training text is tokenised "
                f"({_TOKENISED[self._convention or None]}); tokenise this text in the same way"
            )
        assert isinstance(self._vocabulary, WordVocabulary)
        own = (self._vocabulary.eos, self._vocabulary.unk)
        if {len(word) for word in self._vocabulary.words if word not in own} == {1}:
            return f"{which} are several characters, {such}: put spaces between them, as in the training text"
        return f"{which} are long, {such}: for a text without spaces between words, use the unit char or bpe"


@functools.cache
def _marks() -> re.Pattern[str]:
    return re.compile(f"[{marks()}]+")
