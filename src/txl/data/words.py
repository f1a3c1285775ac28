"""Rules for cutting a text into words, and for the spaces between words that are joined again.

There are two rules. "whitespace": words are separated by white space, as in the benchmarks. "punctuation": in addition,
every mark (Unicode's punctuation and symbols, except for `_`) is a word of its own. If no white space separates a mark
from its neighbour, the mark carries the joiner `￭` (U+FFED) on that side, as in OpenNMT's tokeniser. Example:
`"Well-known," he said.` is cut into `"￭ Well ￭-￭ known ￭, ￭" he said ￭.`. Between two adjacent marks, the second one
carries the joiner. Words that are not marks never carry a joiner, so that a word is the same token next to any mark.
Joining the words restores the text, except for the width of its white space.

`<eos>` and `<unk>` that stand alone in a text are read as these words under both rules (with "punctuation", also if a
mark follows).
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable

from txl.config import WordRule

EOS = "<eos>"
UNK = "<unk>"
JOINER = "\uffed"
_LAST_MARK = 0x1FFFF  # no higher code point is punctuation or a symbol


@functools.cache
def marks() -> str:
    """Return all marks as the content of a regular expression's character class, for Python and `tokenizers`."""
    codes = [code for code in range(_LAST_MARK + 1) if is_mark(chr(code))]
    ranges = ""
    for _, run in itertools.groupby(enumerate(codes), lambda place: place[1] - place[0]):
        within = [f"\\{chr(code)}" if code < 0x80 else chr(code) for _, code in run]
        ranges += f"{within[0]}-{within[-1]}"
    return ranges


@functools.cache
def _joining_rules() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return pairs of pattern and replacement that, applied in order, put white space between all words."""
    rules = (
        (f"(?<=[{marks()}])(?=[^\\s{marks()}])", f"{JOINER} "),
        (f"(?<=\\S)(?=[{marks()}])", f" {JOINER}"),
        *((f"(?<!\\S)<{JOINER} {word[1:-1]} {JOINER}>(?!\\S)", word) for word in (EOS, UNK)),
    )
    return tuple((re.compile(pattern), content) for pattern, content in rules)


class _Cut(dict[str, list[str]]):
    """Cache of the words in each string between white space, so that a repeated string is cut only once."""

    def __missing__(self, text: str) -> list[str]:
        joined = text
        if not text.isalnum():
            for pattern, content in _joining_rules():
                joined = pattern.sub(content, joined)
        words = self[text] = joined.split(" ")
        return words


def words_and_ends(text: str, eos: str | None = EOS, rule: WordRule = "whitespace") -> list[str]:
    """Return the words of a text, with `eos` (None: nothing) for each line end."""
    words = (text if eos is None else text.replace("\n", f" {eos} ")).split()
    return words if rule == "whitespace" else list(itertools.chain.from_iterable(map(_Cut().__getitem__, words)))


@functools.cache
def _pattern(rule: WordRule, with_ends: bool) -> re.Pattern[str]:
    if rule == "whitespace":
        return re.compile(r"\n|\S+" if with_ends else r"\S+")
    return re.compile(rf"\n|(?<!\S)(?:{EOS}|{UNK})(?=[\s{marks()}]|\Z)|[{marks()}]|[^\s{marks()}]+")


def word_spans(text: str, rule: WordRule = "whitespace", *, with_ends: bool = True) -> list[tuple[int, int]]:
    """Return start and end, in characters, of each word of `words_and_ends`; without line ends if not `with_ends`."""
    return [match.span() for match in _pattern(rule, with_ends).finditer(text)]


def unjoined(word: str) -> tuple[bool, str, bool]:
    """Return whether a word of the rule "punctuation" joins the previous word, its text, and if it joins the next."""
    bare = word.removeprefix(JOINER).removesuffix(JOINER)
    if bare == word or not is_mark(bare):
        return False, word, False
    return word.startswith(JOINER), bare, word.endswith(JOINER)


def is_mark(text: str) -> bool:
    """Return whether a text is a single mark."""
    return len(text) == 1 and text not in ("_", JOINER) and unicodedata.category(text)[0] in "PS"


def holds_word(blocks: Iterable[bytes], word: str) -> bool:
    """Return whether a word stands alone, between white space, anywhere in a text."""
    sought = word.encode()
    # White space is added at both ends of the text. The word may continue in the next block, so the end of each block
    # (as long as the word and the byte before it) is searched again together with the next block.
    alone, before = re.compile(rb"\s" + re.escape(sought) + rb"\s"), b"\n"
    for block in itertools.chain(blocks, [b"\n"]):
        read = before + block
        if alone.search(read):
            return True
        before = read[-len(sought) - 1 :]
    return False
