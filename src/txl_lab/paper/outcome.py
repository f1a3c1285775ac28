"""Outcome of a table: our numbers over seeds beside the paper's, and the judged claims; also as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from txl.config import model_from_dict
from txl.evaluation.effective_context import effective_context
from txl.files import JsonObject
from txl.units import is_character_unit, measure_name, quality
from txl_lab.paper.claims import Claim, Verdict
from txl_lab.paper.converging import Tried, Tuned
from txl_lab.paper.experiment import RowResult
from txl_lab.paper.scales import Scale
from txl_lab.paper.schema import COSTS, Definition

FRACTIONS = (0.1, 0.5, 1.0)
"""The values of r in Table 8."""


@dataclass(frozen=True)
class GroupGains:
    """Data of Figure 3 for one model group and seed: exp f(c,c) - exp f(c,c') of each model."""

    group: str
    seed: int
    gains: dict[str, dict[tuple[int, int], float]]
    """Gains by row and pair of context lengths (c, c')."""


@dataclass(frozen=True)
class Outcome:
    """Contents of a table's page."""

    definition: Definition
    scale: Scale
    seeds: int
    corpus: str
    """Name or path of our corpus."""
    unit: str
    rows: list[RowResult]
    values: dict[str, dict[str, list[float]]]
    """Values by row and measure, one per seed."""
    curves: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    """Mean loss in nats by row and attention or context length, one value per seed."""
    changed_text: tuple[str, ...] = ()
    """Differences of our corpus from the published one."""
    gains: list[GroupGains] = field(default_factory=list)
    grids: dict[str, list[float]] = field(default_factory=dict)
    """Possible values by measure, for measures that are lengths."""

    @property
    def failed(self) -> list[RowResult]:
        """Rows that failed."""
        return [row for row in self.rows if row.status == "failed"]

    @property
    def compares_with_paper(self) -> bool:
        """True if published models were trained on the paper's corpus and tested on its whole test split."""
        is_the_papers = self.corpus == self.definition.corpus and not self.changed_text
        return self.scale.is_published and is_the_papers and self.scale.eval_tokens is None

    def verdicts(self) -> list[tuple[Claim, Verdict]]:
        """Return every claim of the table with its verdict; some scales judge no claims."""
        if not self.scale.judged:
            verdict = Verdict("not judged", f"the scale {self.scale.name} tests the machinery")
            return [(claim, verdict) for claim in self.definition.claims]
        full = Verdict("not judged", "a claim about the published model on the paper's corpus")
        return [
            (
                claim,
                full if claim.at_full_size and not self.compares_with_paper else claim.judge(self.values, self.grids),
            )
            for claim in self.definition.claims
        ]


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
    values: dict[str, dict[str, list[float]]] = {}
    curves: dict[str, dict[int, list[float]]] = {}
    for result in rows:
        by_seed = [result.by_seed[seed] for seed in sorted(result.by_seed)]
        values[result.row.key] = {name: [each[name] for each in by_seed] for name in definition.measures if by_seed}
        for each in by_seed:
            for point in each.get("curve", ()):
                curves.setdefault(result.row.key, {}).setdefault(point["length"], []).append(point["nll"])
        if definition.kind == "attention" and result.config is not None:
            reach = model_from_dict(result.config["model"]).mem_len + result.config["train"]["segment"]
            values[result.row.key]["training reach"] = [float(reach)] * len(by_seed)
    gains: list[GroupGains] = []
    grids: dict[str, list[float]] = {}
    if definition.kind == "context":
        gains = _effective_contexts(definition, rows, unit, values, curves, scale.context_step)
    lengths = sorted({float(length) for curve in curves.values() for length in curve})
    if definition.kind == "attention":
        grids["attention"] = lengths
    if definition.kind == "context":
        grids = {f"r = {r:.1f}": lengths for r in FRACTIONS}
    return Outcome(definition, scale, seeds, corpus, unit, rows, values, curves, tuple(changed_text), gains, grids)


def _effective_contexts(
    definition: Definition,
    rows: list[RowResult],
    unit: str,
    values: dict[str, dict[str, list[float]]],
    curves: dict[str, dict[int, list[float]]],
    step: int,
) -> list[GroupGains]:
    """Add the RECL, quality and loss by context length of each model to `values` and `curves`; return the gains.

    The models of a group with the same seed share a baseline. A seed counts only if every model of the group has
    results for the seed, because a missing model would change the baseline and so the values of the other models.

    The quality of each model is that on the same targets at the longest context.
    """
    found = []
    for group in dict.fromkeys(row.group for row in definition.rows):
        members = [result for result in rows if result.row.group == group and result.row.trained]
        for seed in sorted(set.intersection(*(set(member.by_seed) for member in members))):
            if all("effective context" in member.by_seed[seed] for member in members):
                found.append(_recorded_contexts(members, group, seed, values, curves))
                continue
            losses = {member.row.key: _losses(member.by_seed[seed]) for member in members}
            longest = {member.row.key: member.by_seed[seed].get("longest_context") for member in members}
            context = effective_context(losses, FRACTIONS, longest=longest, step=step)
            for r, by_model in context.recl.items():
                for key, length in by_model.items():
                    values[key].setdefault(f"r = {r:.1f}", []).append(length)
            for key, by_length in losses.items():
                for length, each in by_length.items():
                    curves.setdefault(key, {}).setdefault(length, []).append(each.mean().item())
                at_longest = by_length[max(by_length)].mean().item()
                values[key].setdefault("quality", []).append(quality(at_longest, unit))
            by_pair = context.perplexity_gains[FRACTIONS[0]]
            gains = {key: {pair: each[key] for pair, each in by_pair.items()} for key in losses}
            found.append(GroupGains(group, seed, gains))
    return found


def _recorded_contexts(
    members: list[RowResult],
    group: str,
    seed: int,
    values: dict[str, dict[str, list[float]]],
    curves: dict[str, dict[int, list[float]]],
) -> GroupGains:
    """Do as `_effective_contexts` for a group and seed from a record, which has no losses of single targets."""
    gains = {}
    for member in members:
        key, recorded = member.row.key, member.by_seed[seed]["effective context"]
        for name, value in recorded["values"].items():
            values[key].setdefault(name, []).append(value)
        for length, loss in recorded["curve"].items():
            curves.setdefault(key, {}).setdefault(int(length), []).append(loss)
        gains[key] = {(each["short"], each["long"]): each["gain"] for each in recorded["gains"]}
    return GroupGains(group, seed, gains)


def _losses(measured: JsonObject) -> dict[int, torch.Tensor]:
    return {
        int(length): torch.tensor(values, dtype=torch.float64) for length, values in measured["losses"].items()
    }  # fmt: skip


def headings(outcome: Outcome) -> tuple[str, ...]:
    """Return the headings of `cells`."""
    measure = measure_name(outcome.unit)
    if outcome.definition.kind == "attention":
        return ("parameters", "backprop len", f"{measure} init", f"{measure} best", "attn len", "status")
    if outcome.definition.kind == "context":
        return ("parameters", measure, *(f"r = {r:.1f}" for r in FRACTIONS), "status")
    if outcome.definition.kind == "speed":
        return ("attn len", "slower", "status")
    if outcome.definition.kind == "quality":
        return ("parameters", measure, *(COSTS.values() if outcome.definition.cost_beside else ()), "status")
    return ("parameters", "status")


def cells(outcome: Outcome, result: RowResult) -> tuple[str, ...]:
    """Return our numbers for a row, as means with the spread over seeds, and its status."""
    kind, values = outcome.definition.kind, outcome.values[result.row.key]
    digits = 3 if is_character_unit(outcome.unit) else 2
    parameters = "-" if result.parameters is None else f"{result.parameters:,}"

    def shown(name: str, digits: int = digits) -> str:
        return spread_text(values.get(name, ()), digits)

    status = "trained" if result.status == "done" else result.status
    if hit_cap(result):
        status = "hit the cap"
    if 0 < len(result.by_seed) < outcome.seeds:
        status += f", {len(result.by_seed)} of {outcome.seeds} seeds"
    if kind == "attention":
        backprop = spread_text(values.get("training length", ())[:1], 0)  # equal for all seeds
        return (parameters, backprop, shown("init"), shown("quality"), shown("attention", 0), status)
    if kind == "context":
        return (parameters, shown("quality"), *(shown(f"r = {r:.1f}", 0) for r in FRACTIONS), status)
    if kind == "speed":
        lengths = {each["attention_length"] for each in result.by_seed.values()}
        times = f"{shown('slower', 0)}x" if values.get("slower") else "-"
        return (", ".join(f"{each:,}" for each in lengths) or "-", times, "measured" if lengths else status)
    if kind == "quality":
        names = COSTS if outcome.definition.cost_beside else ()
        costs = [f"{shown(name, 2)}x" if values.get(name) else "-" for name in names]
        return (parameters, shown("quality"), *costs, status)
    return (parameters, status)


def group_distances(outcome: Outcome) -> dict[str, float]:
    """Return the relative difference in perplexity or bits between the worst and the best model of each group.

    The quality of a model is its mean over seeds, on the same targets at the longest context.
    """
    found = {}
    for group in dict.fromkeys(gains.group for gains in outcome.gains):
        keys = [row.key for row in outcome.definition.rows if row.group == group]
        means = [statistics.fmean(values) for key in keys if (values := outcome.values[key].get("quality"))]
        found[group] = max(means) / min(means) - 1
    return found


def distances_text(outcome: Outcome) -> list[str]:
    """Return a line for each model group with the difference in quality between its models.

    The metric compares all models of a group with one baseline, the best of their losses. A model that is far worse
    than the others beats this baseline only by chance.
    """
    name = "bits" if is_character_unit(outcome.unit) else "perplexity"
    return [
        f"group {group}: {name} at the longest context differs by up to {100 * distance:.0f}%; the metric is fair "
        f"between models of about the same {name}"
        for group, distance in group_distances(outcome).items()
    ]


def hit_cap(result: RowResult) -> bool:
    """Return True if a row that trains until convergence made all of its steps with some seed."""
    if result.config is None or result.config["train"].get("patience") is None:
        return False
    return any(each.get("steps") == result.config["train"]["steps"] for each in result.by_seed.values())


def rates_and_losses(tried: Sequence[Tried]) -> list[tuple[str, str]]:
    """Return each learning rate that was tried, and its validation loss or "diverged"."""
    return [
        (f"{each['learning_rate']:g}", "diverged" if each["nll"] is None else f"{each['nll']:.3f}") for each in tried
    ]


def chosen_rate(tuned: Tuned) -> float:
    """Return the learning rate that was chosen."""
    every = (*tuned["tried"], *tuned["whole"])
    return next(each["learning_rate"] for each in every if each["factor"] == tuned["factor"])


def rates_text(tuned: Tuned) -> str:
    """Return a line with the learning rates that were tried and the chosen one."""

    def losses(tried: Sequence[Tried]) -> str:
        return ", ".join(f"{rate} ({loss})" for rate, loss in rates_and_losses(tried))

    whole = f" and {losses(tuned['whole'])} at the end" if tuned["whole"] else ""
    spent = sum(each["tokens"] for each in (*tuned["tried"], *tuned["whole"]))
    edge = "; it lies at the end of what was tried" if tuned["at_edge"] else ""
    return (
        f"{tuned['recipe']}: {chosen_rate(tuned):g}, of {losses(tuned['tried'])} nats a token on the validation split "
        f"after {tuned['steps']:,} steps of {tuned['row']} of {tuned['table']}{whole}, {spent:,} tokens in all{edge}"
    )


def tuned_rates(outcome: Outcome) -> list[str]:
    """Return a line for each recipe whose learning rate was tuned."""
    found = [each["rates"] for result in outcome.rows for each in result.by_seed.values() if "rates" in each]
    return list(dict.fromkeys(rates_text(each) for each in found))


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
    head = ["row", "model", *(f"{column} (paper)" for column in definition.columns), *headings(outcome)]
    lines = [f"{definition.title}, scale {outcome.scale.name}, {repeats_text(outcome)}", ""]
    lines += [_line(head), _line(["---"] * len(head))]
    for result in outcome.rows:
        row = result.row
        paper = [row.paper.get(column, "-") for column in definition.columns]
        lines.append(_line([row.key, row.name, *paper, *cells(outcome, result)]))
    lines.append("")
    for claim, verdict in outcome.verdicts():
        lines.append(f"{claim.key}: {verdict.outcome} - {claim.text} ({verdict.reason})")
    lines += distances_text(outcome)
    lines += [f"learning rate of {each}" for each in tuned_rates(outcome)]
    lines += [f"{each.row.key} failed: {each.reason}" for each in outcome.failed]
    return "\n".join(lines)


def repeats_text(outcome: Outcome) -> str:
    """Return the number of repeats in words: 1 seed, 3 seeds, or 3 measurements where nothing is trained."""
    word = "measurement" if outcome.definition.kind == "speed" else "seed"
    return f"{outcome.seeds} {word}{'' if outcome.seeds == 1 else 's'}"


def _line(fields: list[str]) -> str:
    return "| " + " | ".join(each.replace("|", "\\|") for each in fields) + " |"


def recorded_seeds(measured: Iterable[tuple[int, JsonObject]]) -> list[tuple[JsonObject, list[int]]]:
    """Return the origins of the measurements that were taken from records, each with its seeds.

    Args:
        measured: seeds with the measurements of any rows.
    """
    found: list[tuple[JsonObject, set[int]]] = []
    for seed, each in measured:
        if (origin := each.get("recorded")) is None:
            continue
        seeds = next((seeds for known, seeds in found if known == origin), None)
        if seeds is None:
            found.append((origin, seeds := set()))
        seeds.add(seed)
    return [(origin, sorted(seeds)) for origin, seeds in found]


def named_seeds(seeds: Sequence[int]) -> str:
    """Return seeds in words: seed 3, or seeds 1, 2."""
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"
