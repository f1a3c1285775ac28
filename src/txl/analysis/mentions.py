"""Find titles, names, dates and years of a context that a continuation mentions again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from txl.data.words import UNK

_BEFORE, _AFTER = "([{\"'“‘", ",.;:!?)]}\"'”’"
KINDS = ("headings", "names", "dates", "years")

_HEADING = re.compile(r"^[ \t]*(?:= ([^=\s].*?) =|(={2,6}) ?([^=\s].*?) ?\2)[ \t]*$", re.MULTILINE)
_YEAR = re.compile(r"(?<![\w.,$£€])(?:1[0-9]{3}|20[0-9]{2})(?:(?=s\b)|(?![\w%]|[.,][0-9]))")
_MONTHS = re.findall(r"\S+", "January February March April May June July August September October November December")
_MONTH = "|".join([*_MONTHS, r"Sept\.", *(f"{name[:3]}\\." for name in _MONTHS if name != "May")])
_DAY = r"(?<![\w.,$£€])(?:0?[1-9]|[12][0-9]|3[01])(?:st|nd|rd|th)?(?![\w%]|[.,][0-9]| @[.,]@)"
# Text between the parts of a date: a comma (a separate word before detokenising), "of", brackets of Wikipedia's links.
_BETWEEN = r"(?:\]\])?(?: ?,)? (?:of )?(?:\[\[)?"
_DATE = re.compile(
    rf"(?P<day>{_DAY}) (?:of )?(?P<month>{_MONTH})(?!\w)(?:{_BETWEEN}(?P<year>{_YEAR.pattern}))?"
    rf"|(?<!\w)(?P<month_first>{_MONTH}) (?P<day_second>{_DAY})(?:{_BETWEEN}(?P<year_third>{_YEAR.pattern}))?"
    rf"|(?<!\w)(?P<month_alone>{_MONTH}){_BETWEEN}(?P<year_second>{_YEAR.pattern})"
)
_TITLES = frozenset(re.findall(r"\S+", "Mr. Mrs. Ms. Dr. St. Jr. Sr. Lt. Gen. Col. Capt. Sgt. Rev. Prof. No."))
_NOT_A_NAME = frozenset(
    re.findall(
        r"\S+",
        """A After All Also Although An And Any As At Because Before But By During Each For From He Her His How However
        I If In It Its Many Most No Not Of On One Or Our Since She So Some Such That The Their Then There These They
        This Those Through To Two Under Until Was We Were What When Where Which While Who With You Your""",
    )
)


class Date(NamedTuple):
    """A month with a day, a year, or both."""

    day: int | None
    month: int
    """1 to 12."""
    year: int | None

    def is_part_of(self, other: Date) -> bool:
        """Return True if the other date has all parts of this date: July 1916 is part of 12 July 1916."""
        return all(mine is None or mine == theirs for mine, theirs in zip(self, other, strict=True))


@dataclass(frozen=True)
class Mentions:
    """Headings, names, dates and years that a text mentions, each once."""

    headings: frozenset[str]
    """Titles between `=`, as in Wikipedia; titles with `<unk>`, which can stand for any word, are left out."""
    names: frozenset[str]
    """Runs of two or more words that begin with a capital."""
    dates: frozenset[Date]
    """Dates in any form: 12 July 1916 equals July 12, 1916."""
    years: frozenset[str]
    """Years 1000 to 2099, including the years of dates."""


@dataclass(frozen=True)
class Shared:
    """Numbers of mentions of one kind in a context and in its continuation."""

    in_context: int
    """Number of different mentions in the context."""
    in_continuation: int
    """Number of different mentions in the continuation."""
    taken_up: int
    """Number of the context's mentions that occur in the continuation."""
    known: int
    """Number of the continuation's mentions that occur in the context."""


def mentions(text: str) -> Mentions:
    """Return the headings, names, dates and years of a text.

    The text is assumed to be detokenised; dates are also found in the tokenised form of WikiText.

    A name is a run of two or more words on one line that begin with a capital, without words such as The and In at its
    beginning, with which a sentence begins. The words of a heading count as a name too if they have this form.

    A date is an English month's name (or its first letters with a full stop) with a day, a year or both: 12 July 1916,
    12th of July, July 12, 1916, Sept. 1916.
    """
    titles = (match.group(1) or match.group(3) for match in _HEADING.finditer(text))
    headings = frozenset(title for title in titles if UNK not in title)
    names = frozenset(name for line in text.split("\n") for name in _names(line.split()))
    dates = frozenset(_date(match) for match in _DATE.finditer(text))
    return Mentions(headings, names, dates, frozenset(_YEAR.findall(text)))


def _date(match: re.Match[str]) -> Date:
    day, month, year = (
        next((match.group(name) for name in names if match.group(name)), None)
        for names in (
            ("day", "day_second"),
            ("month", "month_first", "month_alone"),
            ("year", "year_third", "year_second"),
        )
    )
    assert month is not None  # every form of a date has a month
    number = [name[:3] for name in _MONTHS].index(month[:3]) + 1
    return Date(None if day is None else int(day.rstrip("stndrh")), number, None if year is None else int(year))


def _names(words: list[str]) -> Iterator[str]:
    """Return the names in a line, in order."""
    run: list[str] = []
    for word in [*words, ""]:
        opened = word.strip(_BEFORE)
        bare = opened.rstrip(_AFTER)
        name = bare.removesuffix("'s").removesuffix("’s")
        is_last = name != opened and opened not in _TITLES and not (len(bare) == 1 and opened == f"{bare}.")
        if run and (word[:1] in _BEFORE or not bare[:1].isupper()):  # "", the end of the line, is in _BEFORE
            yield from _long_enough(run)
            run = []
        if bare[:1].isupper() and (run or bare not in _NOT_A_NAME):
            run.append(name if is_last else opened)
            if is_last:
                yield from _long_enough(run)
                run = []


def _long_enough(run: list[str]) -> list[str]:
    """Return the run as a name, or nothing if it is no name, such as initials alone or Penn Treebank's N N."""
    return [" ".join(run)] if len(run) > 1 and any(len(word.strip(".")) > 1 for word in run) else []


def shared_mentions(context: str, continuation: str) -> dict[str, Shared]:
    """Return, for each of `KINDS`, the numbers of mentions in the context and the continuation, and of shared mentions.

    A mention occurs in a text if the text contains it letter by letter, between other words: a name of the context also
    counts inside a longer name of the continuation. A date occurs in a text if one of the text's dates has the same
    day, month and year (as far as the first date has these), in any form.
    """
    before, after = mentions(context), mentions(continuation)
    found = {}
    for kind in KINDS:
        first, second = getattr(before, kind), getattr(after, kind)
        found[kind] = Shared(
            len(first),
            len(second),
            sum(_stands_in(each, continuation, after.dates) for each in first),
            sum(_stands_in(each, context, before.dates) for each in second),
        )
    return found


def _stands_in(mention: str | Date, text: str, dates: frozenset[Date]) -> bool:
    if isinstance(mention, Date):
        return any(mention.is_part_of(each) for each in dates)
    return re.search(rf"(?<!\w){re.escape(mention)}(?!\w)", text) is not None
