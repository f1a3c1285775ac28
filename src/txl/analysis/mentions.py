"""Find titles, names, dates and years of a context that a continuation mentions again."""

from __future__ import annotations

import re
from dataclasses import dataclass

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


Date = tuple[int | None, int, int | None]  # day, month (1 to 12) and year; a date has a day, a year or both


@dataclass(frozen=True)
class Shared:
    """Numbers of different mentions of one kind in a context and in its continuation."""

    in_context: int
    in_continuation: int
    taken_up: int  # number of the context's mentions that occur in the continuation
    known: int  # number of the continuation's mentions that occur in the context


def mentions(text: str) -> dict[str, set[str] | set[Date]]:
    """Return the headings, names, dates and years (`KINDS`) of a text, each once.

    The text is assumed to be detokenised; dates are also found in the tokenised form of WikiText.

    A heading is a title between `=`, as in Wikipedia; one with `<unk>`, which can stand for any word, does not count. A
    name is a run of two or more words on one line that begin with a capital, without words such as The and In at its
    beginning, with which a sentence begins; words of a heading count too. A date is an English month's name (or its
    first letters with a full stop) with a day, a year or both: 12 July 1916 equals July 12, 1916. A year is 1000 to
    2099, also in a date.
    """
    titles = {match.group(1) or match.group(3) for match in _HEADING.finditer(text)}
    dates: set[Date] = set()
    for match in _DATE.finditer(text):
        # Each form of a date has its own groups; every form has a month.
        found = {name.partition("_")[0]: value for name, value in match.groupdict().items() if value}
        month = [name[:3] for name in _MONTHS].index(found["month"][:3]) + 1
        day, year = found.get("day"), found.get("year")
        dates.add((int(day.rstrip("stndrh")) if day else None, month, int(year) if year else None))
    return {
        "headings": {title for title in titles if UNK not in title},
        "names": {name for line in text.split("\n") for name in _names(line.split())},
        "dates": dates,
        "years": set(_YEAR.findall(text)),
    }


def _names(words: list[str]) -> list[str]:
    """Return the names in a line."""
    runs: list[list[str]] = [[]]
    for word in [*words, ""]:
        opened = word.strip(_BEFORE)
        bare = opened.rstrip(_AFTER)
        name = bare.removesuffix("'s").removesuffix("’s")
        if word[:1] in _BEFORE or not bare[:1].isupper():  # "", the end of the line, is in _BEFORE
            runs.append([])
        if bare[:1].isupper() and (runs[-1] or bare not in _NOT_A_NAME):
            is_last = name != opened and opened not in _TITLES and not (len(bare) == 1 and opened == f"{bare}.")
            runs[-1].append(name if is_last else opened)
            if is_last:
                runs.append([])
    # Initials alone, or Penn Treebank's N N, are no name.
    return [" ".join(run) for run in runs if len(run) > 1 and any(len(word.strip(".")) > 1 for word in run)]


def shared_mentions(context: str, continuation: str) -> dict[str, Shared]:
    """Return, for each of `KINDS`, the numbers of mentions in the context and the continuation, and of shared mentions.

    A mention occurs in a text if the text contains it letter by letter, between other words: a name of the context also
    counts inside a longer name of the continuation. A date occurs in a text if one of the text's dates has the same
    day, month and year (as far as the first date has these), in any form.
    """
    before, after = mentions(context), mentions(continuation)

    def count(mentioned: set[str] | set[Date], text: str, dates: set[str] | set[Date]) -> int:
        return sum(
            re.search(rf"(?<!\w){re.escape(mention)}(?!\w)", text) is not None
            if isinstance(mention, str)
            else any(all(mine in (None, theirs) for mine, theirs in zip(mention, date, strict=True)) for date in dates)
            for mention in mentioned
        )

    return {
        kind: Shared(
            len(before[kind]),
            len(after[kind]),
            count(before[kind], continuation, after["dates"]),
            count(after[kind], context, before["dates"]),
        )
        for kind in KINDS
    }
