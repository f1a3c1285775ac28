"""Detokenisers from the words of a benchmark to normally written text: they remove only spaces and tokeniser marks.

Information that a benchmark's tokenisation has removed is not restored: `<unk>` and Penn Treebank's `N` for numbers are
kept, and Penn Treebank's punctuation and capitals stay missing.
"""

from __future__ import annotations

import re
from typing import Literal, cast, get_args

from txl.data.vocabulary import Decoder, Vocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.data.words import UNK
from txl.errors import UserError

Convention = Literal["wikitext", "ptb", "lm1b"]
"""Conventions by which the texts of benchmarks were cut into words.

wikitext: Moses' tokeniser, with `@-@`, `@,@` and `@.@` inside words and numbers, and headings between `=`.
ptb: Mikolov's Penn Treebank: `n't`, `'s`, `\\/`; no punctuation, so every `'` is a possessive.
lm1b: One Billion Word: punctuation separated from words, hyphens kept inside words.
"""
CONVENTIONS: tuple[str, ...] = get_args(Convention)

_JOINED = {"@-@": "-", "@,@": ",", "@.@": "."}
_CLOSING = frozenset([",", ".", ";", ":", "!", "?", ")", "]", "}", "%", "...", "°", "′", "″", "”", "’"])
_OPENING = frozenset(["(", "[", "{", "$", "£", "€", "¥", "#", "“", "‘"])
_APART = frozenset(["'em", "'til", "'cause", "'n'"])
_DEGREES = frozenset("CFNESW")
_ENDINGS = frozenset(["s", "t", "re", "ve", "ll", "m", "d"])
_CURRENCIES = frozenset(["US", "NZ", "HK", "AU"])


def check_convention(name: str) -> Convention:
    """Return `name` as a convention; refuse an unknown name."""
    if name not in CONVENTIONS:
        raise UserError(f"unknown way of tokenising {name!r}; expected one of {', '.join(CONVENTIONS)}")
    return cast(Convention, name)


def convention_of(vocabulary: Vocabulary | None) -> Convention | None:
    """Return the convention of a word vocabulary, recognised by its words; None if there is none.

    Only WikiText has the word `@-@`. Penn Treebank has the word `n't`, but no comma. One Billion Word has the comma as
    a word of its own, and hardly any word that ends in a comma.
    """
    if not isinstance(vocabulary, WordVocabulary) or vocabulary.rule == "punctuation":
        return None  # the decoder of this vocabulary joins words itself
    words = vocabulary.ids
    if "@-@" in words:
        return "wikitext"
    if "n't" in words and "," not in words:
        return "ptb"
    with_comma = sum(len(word) > 1 and word.endswith(",") for word in vocabulary.words)
    if {",", ".", "'s"} <= words.keys() and with_comma <= 0.01 * len(vocabulary):
        return "lm1b"
    return None


def detokenise(text: str, convention: Convention = "wikitext") -> str:
    """Return a text of words separated by spaces as normally written text; each line is detokenised by itself."""
    words = Detokeniser(convention)
    return "\n".join("".join(words.push(word) for word in line.split()) + words.end_line() for line in text.split("\n"))


class Detokeniser:
    """Detokeniser that joins words one at a time; the space between two words does not depend on later words.

    Quotation marks open and close alternately, starting with an opening mark in each line.
    """

    def __init__(self, convention: Convention = "wikitext"):
        self.convention: Convention = check_convention(convention)
        self.end_line()

    def end_line(self) -> str:
        """Begin a new line, and return an empty string."""
        self._before: list[str] = []  # the last two words
        self._glue = True
        self._quotes: set[str] = set()  # the open quotation marks
        self._heading: Literal["", "opening", "title", "closing"] = ""
        return ""

    def push(self, word: str) -> str:
        """Return the word in its written form, preceded by a space if there is one."""
        left, right = self._attached(word)
        space = "" if self._glue or left else " "
        self._glue = right
        self._before = [*self._before[-1:], word]
        if self.convention == "ptb":
            word = word.replace("\\/", "/").replace("\\*", "*")
        return space + (_JOINED.get(word, word) if self.convention == "wikitext" else word)

    def _attached(self, word: str) -> tuple[bool, bool]:
        """Return whether a word is joined to the previous word, and whether it is joined to the next word."""
        last = self._before[-1] if self._before else ""
        if self.convention == "wikitext" and (word in _JOINED or self._in_heading(word)):
            return True, word in _JOINED
        if word == "'" and (self.convention == "ptb" or ("'" not in self._quotes and last[-1:] in ("s", "z", "x"))):
            return True, False  # a possessive: the boys ' room
        if word in ('"', "'"):
            closes = word in self._quotes
            self._quotes ^= {word}
            return closes, not closes
        if self.convention == "ptb":
            return word == "n't" or _is_clitic(word, last), word.endswith("$")
        if word == "/":
            return True, True
        if last == "°":
            continues = word in _DEGREES
        elif last == "’":
            continues = word in _ENDINGS  # women ’ s
        elif word == "$":
            continues = last in _CURRENCIES
        else:  # 10 : 30
            continues = last == ":" and re.fullmatch(r"\d{1,2}:\d\d", "".join([*self._before, word])) is not None
        return continues or word in _CLOSING or _is_clitic(word, last), word in _OPENING

    def _in_heading(self, word: str) -> bool:
        """Return whether a word is an `=` of a heading, but not the first `=` on its side of the title."""
        if word == "=":
            if not self._before:
                self._heading = "opening"
            elif self._heading == "title":
                self._heading = "closing"
            else:
                return self._heading != ""
        elif self._heading:
            self._heading = "title"
        return False


def _is_clitic(word: str, last: str) -> bool:
    """Return whether a word begins with an apostrophe inside a written word: 's, 't, 're after anything, or the 'Neill
    of O'Neill."""
    if word[:1] != "'" or not last:
        return False
    inside = word[1:2].isalpha() and (last[-1:].isalnum() or last == UNK) and word not in _APART
    return word[1:] in _ENDINGS or inside


class _Decoder(Decoder):
    """Decoder from the token ids of a word vocabulary to normally written text."""

    def __init__(self, vocabulary: WordVocabulary, convention: Convention, after: str = ""):
        self._words, self._eos = vocabulary.words, vocabulary.eos
        self._detokeniser = Detokeniser(convention)
        for word in after.rpartition("\n")[2].split():
            self._detokeniser.push(word)

    def push(self, token: int) -> str:
        """Return the token's word, preceded by a space if there is one; return \\n for the end of a line."""
        word = self._words[token]
        if word == self._eos:
            return self._detokeniser.end_line() + "\n"
        return self._detokeniser.push(word)


def text_decoder(vocabulary: Vocabulary, convention: Convention | None, after: str = "") -> Decoder:
    """Return a decoder for tokens that follow the tokenised text `after`, detokenising if a convention is given.

    Raises:
        UserError: if a convention is given for a vocabulary that does not consist of words, or that has the rule
            "punctuation", where joiners determine the spaces.
    """
    if convention is None:
        return vocabulary.decoder(after=after)
    if not isinstance(vocabulary, WordVocabulary):
        raise UserError(f"only words can be detokenised; this vocabulary's tokens are of the kind {vocabulary.kind!r}")
    if vocabulary.rule == "punctuation":
        but = "this vocabulary already marks which words are joined"
        raise UserError(field="detokenise", value=convention, but=but, remedy="leave it out")
    return _Decoder(vocabulary, convention, after)
