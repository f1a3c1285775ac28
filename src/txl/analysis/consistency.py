"""Which titles, names and years of a context a continuation takes up again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from txl.data.vocabulary import UNK

_BEFORE, _AFTER = "([{\"'“‘", ",.;:!?)]}\"'”’"
KINDS = ("headings", "names", "years")

_HEADING = re.compile(r"^[ \t]*(?:= ([^=\s].*?) =|(={2,6}) ?([^=\s].*?) ?\2)[ \t]*$", re.MULTILINE)
_YEAR = re.compile(r"(?<![\w.,$£€])(?:1[0-9]{3}|20[0-9]{2})(?:(?=s\b)|(?![\w%]|[.,][0-9]))")
_TITLES = frozenset(re.findall(r"\S+", "Mr. Mrs. Ms. Dr. St. Jr. Sr. Lt. Gen. Col. Capt. Sgt. Rev. Prof. No."))
_NOT_A_NAME = frozenset(
    re.findall(
        r"\S+",
        """A After All Also Although An And Any As At Because Before But By During Each For From He Her His How However
        I If In It Its Many Most No Not Of On One Or Our Since She So Some Such That The Their Then There These They
        This Those Through To Two Under Until Was We Were What When Where Which While Who With You Your""",
    )
)


@dataclass(frozen=True)
class Mentions:
    """What one text mentions, each thing once."""

    headings: frozenset[str]
    """Titles between `=`, as Wikipedia writes them, that are known words throughout (`<unk>` is like any other)."""
    names: frozenset[str]
    """Two or more words in a row that begin with a capital."""
    years: frozenset[str]
    """1000 to 2099."""


@dataclass(frozen=True)
class Shared:
    """What of a context stands in its continuation."""

    in_context: int
    """Different things that the context mentions."""
    in_continuation: int
    """Different things that the continuation mentions."""
    taken_up: int
    """Those of the context that stand in the continuation."""
    known: int
    """Those of the continuation that stand in the context."""


def mentions(text: str) -> Mentions:
    """The headings, names and years of a detokenised text.

    A name is a run of two or more words that begin with a capital, on one line; words such as The and In, with which a
    sentence begins, are taken off its front. A heading's words count as names too where they look like one.
    """
    titles = (match.group(1) or match.group(3) for match in _HEADING.finditer(text))
    headings = frozenset(title for title in titles if UNK not in title)
    names = frozenset(name for line in text.split("\n") for name in _names(line.split()))
    return Mentions(headings, names, frozenset(_YEAR.findall(text)))


def _names(words: list[str]) -> Iterator[str]:
    """The names in a line, in order."""
    run: list[str] = []
    for word in [*words, ""]:
        opened = word.strip(_BEFORE)
        bare = opened.rstrip(_AFTER)
        name = bare.removesuffix("'s").removesuffix("’s")
        is_last = name != opened and opened not in _TITLES and not (len(bare) == 1 and opened == f"{bare}.")
        if run and (word[:1] in _BEFORE or not bare[:1].isupper()):  # "" is in it: the line's end
            yield from _long_enough(run)
            run = []
        if bare[:1].isupper() and (run or bare not in _NOT_A_NAME):
            run.append(name if is_last else opened)
            if is_last:
                yield from _long_enough(run)
                run = []


def _long_enough(run: list[str]) -> list[str]:
    """The run as a name, if it is one: initials alone are none, and neither is Penn Treebank's N N."""
    return [" ".join(run)] if len(run) > 1 and any(len(word.strip(".")) > 1 for word in run) else []


def shared_mentions(context: str, continuation: str) -> dict[str, Shared]:
    """For each of `KINDS`, what of the context the continuation takes up, and what of its own the context has.

    To stand in a text is to be found there letter by letter, between other words: a name of the context also counts
    where the continuation has it inside a longer one.
    """
    before, after = mentions(context), mentions(continuation)
    found = {}
    for kind in KINDS:
        first, second = getattr(before, kind), getattr(after, kind)
        found[kind] = Shared(
            len(first),
            len(second),
            sum(_stands_in(each, continuation) for each in first),
            sum(_stands_in(each, context) for each in second),
        )
    return found


def _stands_in(words: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None
