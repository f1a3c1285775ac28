"""Outcome of a table: our numbers over seeds beside the paper's, and the judged claims; also as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from txl.files import JsonObject
from txl.units import is_character_unit
from txl_lab.paper.converging import Tried, Tuned
from txl_lab.paper.scales import Scale
from txl_lab.paper.schema import Definition, Outcome, RowResult


def gather(
    definition: Definition,
    scale: Scale,
    seeds: int,
    corpus: str,
    unit: str,
    rows: list[RowResult],
    changed_text: Sequence[str] = (),
) -> Outcome:
    """Return the outcome of a table from the measurements of its rows; arguments as for `Outcome`."""
    outcome = Outcome(definition, scale, seeds, corpus, unit, rows, {}, changed_text=tuple(changed_text))
    for result in rows:
        measured = [result.by_seed[seed] for seed in sorted(result.by_seed)]
        names = definition.measures if measured else ()
        outcome.values[result.row.key] = {name: [result_of_seed[name] for result_of_seed in measured] for name in names}
        for point in (point for result_of_seed in measured for point in result_of_seed.get("curve", ())):
            outcome.curves.setdefault(result.row.key, {}).setdefault(point["length"], []).append(point["nll"])
    definition.measurement.gather(outcome)
    return outcome


def cells(outcome: Outcome, result: RowResult) -> tuple[str, ...]:
    """Return our numbers for a row, as means with the spread over seeds, and its status."""
    status = "trained" if result.status == "done" else result.status
    if result.hit_cap:
        status = "hit the cap"
    if 0 < len(result.by_seed) < outcome.seeds:
        status += f", {len(result.by_seed)} of {outcome.seeds} seeds"
    return outcome.definition.measurement.cells(outcome, result, status)


def shown(outcome: Outcome, result: RowResult, name: str, digits: int | None = None) -> str:
    """Return a measure of a row as `spread_text`, by default with the digits of perplexity or bits per character."""
    if digits is None:
        digits = 3 if is_character_unit(outcome.unit) else 2
    return spread_text(outcome.values[result.row.key].get(name, ()), digits)


def group_distances(outcome: Outcome) -> dict[str, float]:
    """Return the relative difference in perplexity or bits between the worst and the best model of each group.

    The quality of a model is its mean over seeds, on the same targets at the longest context.
    """
    distances = {}
    for group in dict.fromkeys(gains.group for gains in outcome.gains):
        keys = [result.row.key for result in outcome.groups[group]]
        means = [statistics.fmean(values) for key in keys if (values := outcome.values[key].get("quality"))]
        distances[group] = max(means) / min(means) - 1
    return distances


def distances_text(outcome: Outcome) -> list[str]:
    """Return a line for each model group with the difference in quality between its models."""
    # The metric compares all models of a group with one baseline, the best of their losses. A model that is far worse
    # than the others beats this baseline only by chance.
    name = "bits" if is_character_unit(outcome.unit) else "perplexity"
    return [
        f"group {group}: {name} at the longest context differs by up to {100 * distance:.0f}%; the metric is fair "
        f"between models of about the same {name}"
        for group, distance in group_distances(outcome).items()
    ]


def rates_and_losses(tried: Sequence[Tried]) -> list[tuple[str, str]]:
    """Return each learning rate that was tried, and its validation loss or "diverged"."""
    return [
        (f"{rate['learning_rate']:g}", "diverged" if rate["nll"] is None else f"{rate['nll']:.3f}") for rate in tried
    ]


def chosen_rate(tuned: Tuned) -> float:
    """Return the learning rate that was chosen."""
    every = (*tuned["tried"], *tuned["whole"])
    return next(rate["learning_rate"] for rate in every if rate["factor"] == tuned["factor"])


def tuned_rates(outcome: Outcome) -> list[str]:
    """Return a line for each recipe whose learning rate was tuned."""
    lines = []
    for measured in (measured for result in outcome.rows for measured in result.by_seed.values()):
        if (tuned := measured.get("rates")) is not None:
            tried, whole = (
                ", ".join(f"{rate} ({loss})" for rate, loss in rates_and_losses(tuned[which]))
                for which in ("tried", "whole")
            )
            spent = sum(run["tokens"] for run in (*tuned["tried"], *tuned["whole"]))
            at_end = f" and {whole} at the end" if whole else ""
            edge = "; it lies at the end of what was tried" if tuned["at_edge"] else ""
            lines.append(
                f"{tuned['recipe']}: {chosen_rate(tuned):g}, of {tried} nats a token on the validation split after "
                f"{tuned['steps']:,} steps of {tuned['row']} of {tuned['table']}{at_end}, {spent:,} tokens in all{edge}"
            )
    return list(dict.fromkeys(lines))


def spread_text(values: Sequence[float], digits: int) -> str:
    """Return mean ± sample standard deviation; for one value the mean alone, without values a dash."""
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):,.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):,.{digits}f}"


def markdown(outcome: Outcome) -> str:
    """Return the outcome in Markdown: the paper's numbers beside ours, the claims, and failures."""
    definition = outcome.definition
    columns = [f"{column} (paper)" for column in definition.columns]
    head = ["row", "model", *columns, *definition.measurement.headings(outcome)]
    lines = [f"{definition.title}, scale {outcome.scale.name}, {repeats_text(outcome)}", ""]
    lines += [_line(head), _line(["---"] * len(head))]
    for result in outcome.rows:
        paper = [result.row.paper.get(column, "-") for column in definition.columns]
        lines.append(_line([result.row.key, result.row.name, *paper, *cells(outcome, result)]))
    lines.append("")
    for claim, verdict in outcome.verdicts():
        lines.append(f"{claim.key}: {verdict.outcome} - {claim.text} ({verdict.reason})")
    lines += distances_text(outcome)
    lines += [f"learning rate of {each}" for each in tuned_rates(outcome)]
    lines += [f"{result.row.key} failed: {result.reason}" for result in outcome.failed]
    return "\n".join(lines)


def repeats_text(outcome: Outcome) -> str:
    """Return the number of repeats in words: 1 seed, 3 seeds, or 3 measurements where nothing is trained."""
    return f"{outcome.seeds} {outcome.definition.measurement.repeat}{'' if outcome.seeds == 1 else 's'}"


def _line(fields: list[str]) -> str:
    return "| " + " | ".join(field.replace("|", "\\|") for field in fields) + " |"


def recorded_seeds(measured: Iterable[tuple[int, JsonObject]]) -> list[tuple[JsonObject, list[int]]]:
    """Return the origins of measurements (seed, result) that were taken from records, each with its seeds."""
    found = [(result["recorded"], seed) for seed, result in measured if "recorded" in result]
    origins: list[JsonObject] = []
    for origin, _ in found:
        if origin not in origins:
            origins.append(origin)
    return [(origin, sorted({seed for known, seed in found if known == origin})) for origin in origins]


def named_seeds(seeds: Sequence[int]) -> str:
    """Return seeds in words: seed 3, or seeds 1, 2."""
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"
