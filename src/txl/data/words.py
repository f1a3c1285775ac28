"""Rules by which a text is cut into words, and what stands between two words when they are put together again.

Two rules. "whitespace": a word is what lies between white space; benchmarks are made so. "punctuation": every mark
(Unicode's punctuation and symbols, but for `_`) is a word of its own too. A mark then says at which of its sides the
text had no white space: there it carries the joiner `￭` (U+FFED), as in OpenNMT's tokeniser. `"Well-known," he said.`
is cut into `"￭ Well ￭-￭ known ￭, ￭" he said ￭.`. Between two marks the second one carries it. Other words carry none,
so that a word is the same one whatever stands beside it. The text comes back, but for the width of its white space.

`<eos>` and `<unk>` that stand alone in a text are those words, whatever the rule (with "punctuation", also where a mark
follows).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable
from itertools import chain

from txl.config import WordRule

EOS = "<eos>"
UNK = "<unk>"
JOINER = "\uffed"
_LAST_MARK = 0x1FFFF
"""No code point above it is punctuation or a symbol."""


@functools.cache
def marks() -> str:
    """Return all marks, as the inside of a regular expression's class that Python and `tokenizers` read alike."""
    is_mark = [unicodedata.category(chr(code))[0] in "PS" for code in range(_LAST_MARK + 1)]
    is_mark[ord("_")] = is_mark[ord(JOINER)] = False
    starts = [code for code, mark in enumerate(is_mark) if mark and not is_mark[code - 1]]
    ends = [code for code, mark in enumerate(is_mark) if mark and not (code < _LAST_MARK and is_mark[code + 1])]
    return "".join(f"{_in_class(first)}-{_in_class(last)}" for first, last in zip(starts, ends, strict=True))


def _in_class(code: int) -> str:
    return f"\\{chr(code)}" if code < 0x80 else chr(code)


@functools.cache
def joining_rules() -> tuple[tuple[str, str], ...]:
    """Return regular expressions and their replacements, to apply one after the other: afterwards white space cuts all
    words."""
    return (
        (f"(?<=[{marks()}])(?=[^\\s{marks()}])", f"{JOINER} "),
        (f"(?<=\\S)(?=[{marks()}])", f" {JOINER}"),
        *((f"(?<!\\S)<{JOINER} {each[1:-1]} {JOINER}>(?!\\S)", each) for each in (EOS, UNK)),
    )


@functools.cache
def _compiled() -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), content) for pattern, content in joining_rules())


@functools.cache
def _pieces(rule: WordRule) -> re.Pattern[str]:
    if rule == "whitespace":
        return re.compile(r"\n|\S+")
    return re.compile(rf"\n|(?<!\S)(?:{EOS}|{UNK})(?=[\s{marks()}]|\Z)|[{marks()}]|[^\s{marks()}]+")


class _Cut(dict[str, list[str]]):
    """The words of what lies between white space; what comes again is cut once."""

    def __missing__(self, text: str) -> list[str]:
        joined = text
        if not text.isalnum():
            for pattern, content in _compiled():
                joined = pattern.sub(content, joined)
        words = self[text] = joined.split(" ")
        return words


def words_and_ends(text: str, eos: str = EOS, rule: WordRule = "whitespace") -> list[str]:
    """Return the words of a text, with `<eos>` for each line's end."""
    words = text.replace("\n", f" {eos} ").split()
    return words if rule == "whitespace" else list(chain.from_iterable(map(_Cut().__getitem__, words)))


def word_spans(text: str, rule: WordRule = "whitespace") -> list[tuple[int, int]]:
    """Return the beginning and end in the text of each of `words_and_ends`, in characters."""
    return [match.span() for match in _pieces(rule).finditer(text)]


def unjoined(word: str) -> tuple[bool, str, bool]:
    """Return whether a word of the rule "punctuation" touches the one before it, its text, and whether it touches the
    next."""
    bare = word.removeprefix(JOINER).removesuffix(JOINER)
    if bare == word or not is_mark(bare):
        return False, word, False
    return word.startswith(JOINER), bare, word.endswith(JOINER)


def is_mark(text: str) -> bool:
    """Return whether a text is a single mark."""
    return len(text) == 1 and text not in ("_", JOINER) and unicodedata.category(text)[0] in "PS"


def holds_word(blocks: Iterable[bytes], word: str) -> bool:
    """Return whether a word stands alone somewhere in a text."""
    sought = word.encode()
    # White space is added at both ends of the text. At a block's end more of a longer word may be to come, so the word
    # and the byte before it are kept until the next block tells.
    alone, before = re.compile(rb"\s" + re.escape(sought) + rb"\s"), b"\n"
    for block in chain(blocks, [b"\n"]):
        read = before + block
        if alone.search(read):
            return True
        before = read[-len(sought) - 1 :]
    return False
