"""Notes on a text: what a model's vocabulary or training text lacks of it, the likely causes, the share of `<unk>`."""

from __future__ import annotations

import codecs
import functools
import re
import unicodedata
from collections import Counter
from typing import Literal

from txl.data.detokenise import convention_of
from txl.data.vocabulary import Vocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.data.words import JOINER, marks, unjoined
from txl.errors import named

_SHARE = 0.1  # smallest share of the tally for which a cause is named
# Words that are probably several: eight characters of a script written without spaces, or thirty of another.
_UNDIVIDED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff].{7}|.{30}"
)
# Characters that are written for one another.
_ALIKE = ("'‘’‚‛′`´", '"“”„‟«»″', "-‐‑–—―−", " \u00a0\u2002\u2003\u2009\u202f")
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
        self._words = vocabulary if isinstance(vocabulary, WordVocabulary) else None
        self.is_word = self._words is not None
        """True if words are tallied, False if characters are."""
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
        if unknown:
            self.add(text)
        elif self._vocabulary.reads_all:
            for character in text:
                if not self._vocabulary.knows(character):
                    self.add(character)

    def add_words(self, text: str) -> None:
        """Tally the words of a text that a word vocabulary lacks."""
        for word in self._words.cut(text) if self._words is not None else ():
            if not self._vocabulary.knows(word):
                self.add(unjoined(word)[1])

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
        notes = []
        if self._vocabulary.reads_all and self.total:
            notes.append(
                f"{self.total:,} character{'s' * (self.total > 1)} of {where} never occurred in the training text "
                f"({named(self._symbols)}): the model's probabilities there are noise; replace them, or train on text "
                f"that has them"
            )
        causes = [(cause, count) for cause, count in self._causes.most_common() if count >= _SHARE * self.total]
        return notes + [self._note(cause, count) for cause, count in causes if cause]

    def names(self) -> str:
        """Return the first words or characters of the tally, for a message."""
        return named(self._symbols)

    def _cause(self, symbol: str) -> tuple[str, str]:
        """Return the likely cause why a word or character is lacking, "" for none, and what would not be lacking."""
        for cause in ("NFC", "NFD"):
            other = unicodedata.normalize(cause, symbol)
            if other != symbol and all(map(self._vocabulary.knows, [other] if self.is_word else other)):
                return cause, other
        if not self.is_word and unicodedata.combining(symbol):
            return "NFC", ""
        if self._is_small and self._vocabulary.knows(symbol.lower()):
            return "case", symbol.lower()
        alike = next((group for group in _ALIKE if len(symbol) == 1 and symbol in group), "").replace(symbol, "")
        for other in alike:
            if self._vocabulary.knows(other) or (self.is_word and self._is_joined_mark(other)):
                return "alike", other
        if not self.is_word:
            return "", ""
        if self._convention is not False and self._is_joined(symbol):
            return "punctuation", ""
        return ("undivided", "") if _UNDIVIDED.match(symbol) else ("", "")

    def _is_joined_mark(self, mark: str) -> bool:
        """Return whether the vocabulary has a mark with joiners."""
        return any(map(self._vocabulary.knows, (f"{JOINER}{mark}", f"{mark}{JOINER}", f"{JOINER}{mark}{JOINER}")))

    def _is_joined(self, word: str) -> bool:
        """Return whether punctuation touches a word whose parts are known."""
        parts = [part for part in _marks().split(word.removesuffix("n't")) if part]
        known = self._vocabulary.knows
        all_known = all(part.isdecimal() or any(map(known, (part, part.lower(), f"'{part}"))) for part in parts)
        return all_known and parts not in ([word], [])

    @functools.cached_property
    def _is_small(self) -> bool:
        """True if the training text is in lower case, as far as the vocabulary tells."""
        if self._words is not None:
            return sum(word != word.lower() for word in self._words.words) <= 0.01 * len(self._words)
        characters = getattr(self._vocabulary, "characters", None)
        return not any(map(str.isupper, map(chr, self._vocabulary.seen or ()) if characters is None else characters))

    @functools.cached_property
    def _convention(self) -> str | Literal[False] | None:
        """Convention by which the training text was tokenised; None: an unknown one; False: it was not tokenised."""
        words = self._words
        if words is None or words.rule == "punctuation":
            return False
        with_comma = sum(len(word) > 1 and word.endswith(",") for word in words.words)
        is_apart = "," in words.ids and with_comma <= 0.01 * len(words)
        return convention_of(words) or (None if is_apart else False)

    def _note(self, cause: str, count: int) -> str:
        """Return a cause, with examples and what to do, as a note."""
        examples = self._examples[cause]
        lacks = "training never saw" if self._vocabulary.reads_all else "the vocabulary lacks"
        which = f"{count:,} of the {self.total:,} {'word' if self.is_word else 'character'}s that {lacks}"
        such = f"such as {next(iter(examples))[:40]}"
        if cause == "alike":
            pairs = ", ".join(f"{other} for {symbol}" for symbol, other in examples.items())
            return f"the training text has other characters of the same kind: {pairs}"
        if cause == "undivided" and self._words is not None:
            own = (self._words.eos, self._words.unk)
            if {len(word) for word in self._words.words if word not in own} == {1}:
                cause = "characters"
        return {
            "NFC": f"{which} are accents apart from their letters (NFD){f', {such}' if self.is_word else ''}: convert "
            f"the text to NFC",
            "NFD": f"{which} are accents in one with their letters (NFC), {such}: convert the text to NFD",
            "case": f"{which} are known in lower case, {such}: the training text is in lower case; convert the text",
            "punctuation": f"{which} are known without the punctuation that touches them, {such}: the training text is "
            f"tokenised ({_TOKENISED[self._convention or None]}); tokenise this text in the same way",
            "characters": f"{which} are several characters, {such}: put spaces between them, as in the training text",
            "undivided": f"{which} are long, {such}: for a text without spaces between words, use the unit char or bpe",
        }[cause]


@functools.cache
def _marks() -> re.Pattern[str]:
    return re.compile(f"[{marks()}]+")


def normalised_note(name: str, byte_order_marks: int, line_ends: int) -> str | None:
    """Return a note on what normalising changed in a text; None if nothing was changed."""
    marks = "a byte order mark" if byte_order_marks == 1 else f"{byte_order_marks:,} byte order marks"
    parts = [f"without {marks}"] * (byte_order_marks > 0)
    parts += [f"with \\n for {line_ends:,} line ends \\r\\n"] * (line_ends > 0)
    return f"{name} is read {' and '.join(parts)}" if parts else None


def unknown_note(lacking: Lacking, unknown: int, tokens: int, where: str, trained: float | None) -> str | None:
    """Return a note on the share of `<unk>` in a text and its effect on results; None if there is no `<unk>`.

    Args:
        lacking: tally of the unknown words or characters.
        unknown: number of `<unk>` tokens.
        tokens: number of all tokens.
        where: description of the text, such as "the valid split".
        trained: share of `<unk>` in the model's training text; None: unknown.
    """
    if not unknown:
        return None
    symbol = "word" if lacking.is_word else "character"
    found = f"{unknown:,} of {tokens:,} {symbol}s of {where} ({_percent(unknown / tokens)}) are <unk>"
    if trained == 0:
        remedy = "data.min_count 2 would train it"
        if not lacking.is_word:
            found, remedy = f"{found} ({lacking.names()})", "replace them, or train on text that has them"
        return f"{found}, which training never saw: their losses are noise, also in every average; {remedy}"
    seen = "" if trained is None else f" (in training {_percent(trained)})"
    return (
        f"{found}{seen}: they count as one and the same {symbol}, whose spelling costs nothing, so the loss is lower "
        f"than with a full vocabulary; compare it only with models of this vocabulary"
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0005 else "below 0.1%"
