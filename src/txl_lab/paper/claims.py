"""Judge the paper's claims by results over seeds.

A difference of two means counts if it is larger than its margin, half the width of a 95% confidence interval over the
seeds (Student's t with the pooled variance of both rows). With one seed there is no spread, so nothing is decided. If a
measure is one of a few lengths, neighbouring lengths do not count as different: all seeds may agree on one length by
chance, without any spread.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

Judgement = Literal["holds", "does not hold", "undecided", "not judged"]
Results = Mapping[str, Mapping[str, Sequence[float]]]  # values by row key and measure, one per seed
Grids = Mapping[str, Sequence[float]]  # possible values by measure, for measures with few possible values

# Quantile 0.975 of Student's t for 1, 2, ... degrees of freedom; the last value serves for more degrees.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


class Verdict(NamedTuple):
    """Judgement of a claim, with the reason."""

    outcome: Judgement
    reason: str


_ONE_SEED = Verdict("undecided", "one seed has no spread to judge by")
# Function that judges a claim by results, and by the grids of those measures that are lengths.
Judge = Callable[[Results, Grids], Verdict]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, or the part of a claim that a table can test."""

    key: str  # C1 to C7, or a name for a claim of the table itself
    text: str  # the claim as it is judged here
    paper: str  # the paper's numbers for the claim
    judge: Judge
    at_full_size: bool = False  # a claim about the published model on the paper's corpus, not about smaller models


class Difference(NamedTuple):
    """Mean of the second row minus mean of the first, and the margin that the difference must exceed to count."""

    value: float
    margin: float


def difference(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """Return the mean of the second row minus that of the first; None if a row has fewer than two values."""
    degrees = len(first) + len(second) - 2
    if min(len(first), len(second)) < 2:
        return None
    squares = sum((value - statistics.fmean(values)) ** 2 for values in (first, second) for value in values)
    error = math.sqrt(squares / degrees * (1 / len(first) + 1 / len(second)))
    quantile = _STUDENT[min(degrees, len(_STUDENT)) - 1]
    return Difference(statistics.fmean(second) - statistics.fmean(first), quantile * error)


def lower(ours: str, *others: str, measure: str = "quality", sign: int = 1) -> Judge:
    """Return a judge of the claim that the measure of row `ours` is below that of every other row."""

    def judge(results: Results, grids: Grids) -> Verdict:
        # A row without results, or with one seed, leaves the claim undecided unless another row refutes it.
        if absent := _missing(results, (ours,), measure):
            return absent
        verdicts: list[Verdict] = []
        mean = statistics.fmean(results[ours][measure])
        for other in others:
            missing = _missing(results, (other,), measure)
            found = None if missing else difference(results[ours][measure], results[other][measure])
            if missing is not None:
                verdicts.append(missing)
            elif found is None:
                single = [row for row in (other, ours) if len(results[row][measure]) == 1]
                verdicts.append(Verdict("undecided", f"{', '.join(single)}: {_ONE_SEED.reason}"))
            else:
                near = _neighbours(mean, mean + found.value, grids.get(measure))
                between = ", no length between them was tried" if near else ""
                outcome = "undecided" if near else _judged(sign * found.value, found.margin)
                verdicts.append(Verdict(outcome, f"{_beside(other, ours, found)}{between}"))
        return _weakest(verdicts)

    return judge


def higher(ours: str, *others: str, measure: str) -> Judge:
    """Return a judge of the claim that the measure of row `ours` is above that of every other row."""
    return lower(ours, *others, measure=measure, sign=-1)


def no_worse(ours: str, other: str, tolerance: float, measure: str = "quality") -> Judge:
    """Return a judge of the claim that the measure of `ours` is at most 1 + `tolerance` times that of `other`."""

    def judge(results: Results, grids: Grids) -> Verdict:
        if missing := _missing(results, (ours, other), measure):
            return missing
        theirs = results[other][measure]
        found = difference(theirs, results[ours][measure])
        if found is None:
            return _ONE_SEED
        allowed = tolerance * statistics.fmean(theirs)
        words = f"{_beside(ours, other, found)}, allowed {_shown(allowed)}"
        if found.value + found.margin <= allowed:
            return Verdict("holds", words)
        return Verdict("does not hold" if found.value - found.margin > allowed else "undecided", words)

    return judge


def lower_at_equal_time(ours: str, *others: str) -> Judge:
    """Return a judge of the claim that the quality of `ours` is below that of the others at equal time.

    The quality of the others at that time is interpolated linearly between the two rows that take less and more time.
    """

    def judge(results: Results, grids: Grids) -> Verdict:
        if missing := _missing(results, (ours, *others), "quality") or _missing(results, (ours, *others), "time"):
            return missing
        times = {row: statistics.fmean(results[row]["time"]) for row in (ours, *others)}
        ordered = sorted(others, key=lambda row: times[row])
        pairs = [(a, b) for a, b in pairwise(ordered) if times[a] <= times[ours] <= times[b]]
        if not pairs:
            spent = ", ".join(f"{row} {_shown(times[row], 3)}" for row in ordered)
            return Verdict("undecided", f"{ours} takes {_shown(times[ours], 3)} of time, outside of {spent}")
        below, beyond = pairs[0]
        share = (times[ours] - times[below]) / ((times[beyond] - times[below]) or 1.0)
        both = zip(results[below]["quality"], results[beyond]["quality"], strict=False)
        found = difference(results[ours]["quality"], [(1 - share) * first + share * second for first, second in both])
        if found is None:
            return _ONE_SEED
        words = f"between {below} and {beyond}, at {_shown(times[ours], 3)} of time: {_beside('they', ours, found)}"
        return Verdict(_judged(found.value, found.margin), words)

    return judge


def above(row: str, threshold: float | str, measure: str, sign: int = 1) -> Judge:
    """Return a judge of the claim that a row's measure is above a number, or above another measure of the row."""

    def judge(results: Results, grids: Grids) -> Verdict:
        if missing := _missing(results, (row,), measure):
            return missing
        limit = results[row][threshold][0] if isinstance(threshold, str) else threshold
        values = results[row][measure]
        if len(values) < 2:
            return _ONE_SEED
        quantile = _STUDENT[min(len(values) - 1, len(_STUDENT)) - 1]
        margin, mean = quantile * statistics.stdev(values) / math.sqrt(len(values)), statistics.fmean(values)
        words = f"{row}: {_shown(mean, 4)} ± {_shown(margin)}, compared with {_shown(limit, 4)}"
        if _neighbours(mean, limit, grids.get(measure)):
            return Verdict("undecided", f"{words}; no length between them was tried")
        return Verdict(_judged(sign * (mean - limit), margin), words)

    return judge


def below(row: str, threshold: float, measure: str = "quality") -> Judge:
    """Return a judge of the claim that a row's measure is below a number."""
    return above(row, threshold, measure, sign=-1)


def all_of(*judges: Judge) -> Judge:
    """Return a judge of the claim that every part holds."""
    return lambda results, grids: _weakest([judge(results, grids) for judge in judges])


def _judged(gain: float, margin: float) -> Judgement:
    if abs(gain) <= margin:
        return "undecided"
    return "holds" if gain > 0 else "does not hold"


def _neighbours(first: float, second: float, grid: Sequence[float] | None) -> bool:
    """Return True if no possible value of the measure lies between two means."""
    low, high = sorted((first, second))
    return grid is not None and not any(low < value < high for value in grid)


def _beside(first: str, second: str, found: Difference) -> str:
    return f"{first} − {second} = {_shown(found.value, 3, '+')} ± {_shown(found.margin)}"


def _shown(value: float, digits: int = 2, sign: str = "") -> str:
    """Return a number with `digits` significant digits, or as an integer if that has more digits: 0.043, 2.5, 215."""
    return f"{value:{sign},.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:{sign}.{digits}g}"


def _missing(results: Results, rows: Sequence[str], measure: str) -> Verdict | None:
    absent = [row for row in rows if not results.get(row, {}).get(measure)]
    return Verdict("undecided", f"no result for {', '.join(absent)}") if absent else None


def _weakest(verdicts: Sequence[Verdict]) -> Verdict:
    outcomes = [verdict.outcome for verdict in verdicts]
    holds = bool(outcomes) and all(outcome == "holds" for outcome in outcomes)
    outcome = "does not hold" if "does not hold" in outcomes else "holds" if holds else "undecided"
    return Verdict(outcome, "; ".join(verdict.reason for verdict in verdicts))
