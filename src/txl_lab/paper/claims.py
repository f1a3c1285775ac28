"""Judge the paper's claims by results over seeds.

A difference of two means counts if it is larger than its margin, half the width of a 95% confidence interval over the
seeds (Student's t with the pooled variance of both rows). With one seed there is no spread, so nothing is decided. If a
measure is one of a few lengths, neighbouring lengths do not count as different: all seeds may agree on one length by
chance, without any spread.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

Judgement = Literal["holds", "does not hold", "undecided", "not judged"]
Results = Mapping[str, Mapping[str, Sequence[float]]]  # values by row key and measure, one per seed
Grids = Mapping[str, Sequence[float]]  # possible values by measure, for measures with few possible values

# Quantile 0.975 of Student's t for 1, 2, ... degrees of freedom; the last value serves for more degrees.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True)
class Verdict:
    """Judgement of a claim, with the reason."""

    outcome: Judgement
    reason: str


class Judge(Protocol):
    """A function that judges a claim by results, and by the grids of those measures that are lengths."""

    def __call__(self, results: Results, grids: Grids) -> Verdict:
        """Return the verdict."""
        ...


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, or the part of a claim that a table can test."""

    key: str  # c1 to C7, or a name for a claim of the table itself
    text: str  # claim as it is judged here
    paper: str  # the paper's numbers for the claim
    judge: Judge
    # True if the claim is about the published model on the paper's corpus, and not about smaller models
    at_full_size: bool = False


@dataclass(frozen=True)
class Difference:
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


def lower(ours: str, *others: str, measure: str = "quality") -> Judge:
    """Return a judge of the claim that the measure of row `ours` is below that of every other row."""

    return lambda results, grids: _each(results, grids.get(measure), ours, others, measure, sign=1)


def higher(ours: str, *others: str, measure: str) -> Judge:
    """Return a judge of the claim that the measure of row `ours` is above that of every other row."""

    return lambda results, grids: _each(results, grids.get(measure), ours, others, measure, sign=-1)


def no_worse(ours: str, other: str, tolerance: float, measure: str = "quality") -> Judge:
    """Return a judge of the claim that the measure of `ours` is at most 1 + `tolerance` times that of `other`."""

    def judge(results: Results, grids: Grids) -> Verdict:
        missing = _missing(results, (ours, other), measure)
        if missing is not None:
            return missing
        theirs = results[other][measure]
        found = difference(theirs, results[ours][measure])
        if found is None:
            return _ONE_SEED
        allowed = tolerance * statistics.fmean(theirs)
        words = f"{ours} − {other} = {_shown(found.value, 3, '+')} ± {_shown(found.margin)}, allowed {_shown(allowed)}"
        if found.value + found.margin <= allowed:
            return Verdict("holds", words)
        return Verdict("does not hold" if found.value - found.margin > allowed else "undecided", words)

    return judge


def lower_at_equal_time(ours: str, *others: str) -> Judge:
    """Return a judge of the claim that the quality of `ours` is below that of the others at equal time.

    The quality of the others at that time is interpolated linearly between the two rows that take less and more time.
    """

    def judge(results: Results, grids: Grids) -> Verdict:
        missing = _missing(results, (ours, *others), "quality") or _missing(results, (ours, *others), "time")
        if missing is not None:
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
        line = [(1 - share) * first + share * second for first, second in both]
        found = difference(results[ours]["quality"], line)
        if found is None:
            return _ONE_SEED
        words = f"between {below} and {beyond}, at {_shown(times[ours], 3)} of time: "
        words += f"they − {ours} = {_shown(found.value, 3, '+')} ± {_shown(found.margin)}"
        return Verdict(_judged(found.value, found.margin), words)

    return judge


def above(row: str, threshold: float | str, measure: str) -> Judge:
    """Return a judge of the claim that a row's measure is above a number, or above another measure of the row."""
    return lambda results, grids: _beyond(results, grids.get(measure), row, threshold, measure, sign=1)


def below(row: str, threshold: float, measure: str = "quality") -> Judge:
    """Return a judge of the claim that a row's measure is below a number."""
    return lambda results, grids: _beyond(results, grids.get(measure), row, threshold, measure, sign=-1)


def _beyond(
    results: Results, grid: Sequence[float] | None, row: str, threshold: float | str, measure: str, sign: int
) -> Verdict:
    missing = _missing(results, (row,), measure)
    if missing is not None:
        return missing
    limit = results[row][threshold][0] if isinstance(threshold, str) else threshold
    values = results[row][measure]
    if len(values) < 2:
        return _ONE_SEED
    quantile = _STUDENT[min(len(values) - 1, len(_STUDENT)) - 1]
    margin = quantile * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    words = f"{row}: {_shown(mean, 4)} ± {_shown(margin)}, compared with {_shown(limit, 4)}"
    if _neighbours(mean, limit, grid):
        return Verdict("undecided", f"{words}; no length between them was tried")
    return Verdict(_judged(sign * (mean - limit), margin), words)


def _judged(gain: float, margin: float) -> Judgement:
    """Return what a gain says about a claim, if it counts only beyond its margin."""
    if abs(gain) <= margin:
        return "undecided"
    return "holds" if gain > 0 else "does not hold"


def _neighbours(first: float, second: float, grid: Sequence[float] | None) -> bool:
    """Return True if no possible value of the measure lies between two means."""
    low, high = sorted((first, second))
    return grid is not None and not any(low < value < high for value in grid)


def all_of(*judges: Judge) -> Judge:
    """Return a judge of the claim that every part holds."""

    def judge(results: Results, grids: Grids) -> Verdict:
        verdicts = [each(results, grids) for each in judges]
        return Verdict(_weakest([verdict.outcome for verdict in verdicts]), "; ".join(v.reason for v in verdicts))

    return judge


_ONE_SEED = Verdict("undecided", "one seed has no spread to judge by")


def _each(
    results: Results, grid: Sequence[float] | None, ours: str, others: Sequence[str], measure: str, sign: int
) -> Verdict:
    """Compare with every other row.

    A row without results, or with one seed, leaves the claim undecided unless another row refutes it.
    """
    absent = _missing(results, (ours,), measure)
    if absent is not None:
        return absent
    outcomes: list[Judgement] = []
    reasons = []
    for other in others:
        missing = _missing(results, (other,), measure)
        found = None if missing else difference(results[ours][measure], results[other][measure])
        if missing is not None:
            outcomes.append("undecided")
            reasons.append(missing.reason)
        elif found is None:
            outcomes.append("undecided")
            single = [row for row in (other, ours) if len(results[row][measure]) == 1]
            reasons.append(f"{', '.join(single)}: {_ONE_SEED.reason}")
        else:
            mean = statistics.fmean(results[ours][measure])
            near = _neighbours(mean, mean + found.value, grid)
            outcomes.append("undecided" if near else _judged(sign * found.value, found.margin))
            between = ", no length between them was tried" if near else ""
            reasons.append(f"{other} − {ours} = {_shown(found.value, 3, '+')} ± {_shown(found.margin)}{between}")
    return Verdict(_weakest(outcomes), "; ".join(reasons))


def _shown(value: float, digits: int = 2, sign: str = "") -> str:
    """Return a number with `digits` significant digits, or as an integer if that has more digits: 0.043, 2.5, 215."""
    return f"{value:{sign},.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:{sign}.{digits}g}"


def _missing(results: Results, rows: Sequence[str], measure: str) -> Verdict | None:
    absent = [row for row in rows if not results.get(row, {}).get(measure)]
    return Verdict("undecided", f"no result for {', '.join(absent)}") if absent else None


def _weakest(outcomes: Sequence[Judgement]) -> Judgement:
    if "does not hold" in outcomes:
        return "does not hold"
    return "holds" if outcomes and "undecided" not in outcomes else "undecided"
