"""Figures of a table's page: results over seeds, cost, attention and context lengths, slowdown, perplexity gains."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from txl.reporting.context_figures import gains_plot, length_axis, length_plot
from txl.reporting.plots import ACCENT, INK, SECOND, Plot
from txl.units import quality, quality_label
from txl_lab.paper.schema import GroupGains, Outcome


def quality_figure(outcome: Outcome) -> Plot | None:
    """Draw the results of every trained row: a dot for each seed and a bar at the mean; lower is better."""
    rows = [row for row in outcome.rows if outcome.values[row.row.key].get("quality")]
    if not rows:
        return None
    names = [row.row.key for row in rows]
    values = [outcome.values[name]["quality"] for name in names]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for place, (name, seeds) in enumerate(zip(names, values, strict=True)):
            color = ACCENT if name.startswith("xl") else SECOND
            mean = statistics.fmean(seeds)
            axes.plot(seeds, [place] * len(seeds), color=color, marker="o", markersize=4.5, linestyle="none", alpha=0.6)
            axes.plot([mean, mean], [place - 0.28, place + 0.28], color=color, linewidth=2)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", labelcolor=INK)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.margins(x=0.06)
        axes.set_xlabel(f"{quality_label(outcome.unit)}, test split")

    text = "; ".join(
        f"{name} {statistics.fmean(seeds):.4g}" for name, seeds in zip(names, values, strict=True)
    )  # fmt: skip
    height = 1.0 + 0.32 * len(names)
    return Plot("quality", "Results over seeds", f"Means: {text}.", height, draw)


def cost_figure(outcome: Outcome) -> Plot | None:
    """Draw quality against training time per token, as means over seeds with one line per group of rows."""
    points: dict[str, list[tuple[float, float, str]]] = {}
    for row in outcome.definition.rows:
        found = outcome.values[row.key]
        if found.get("time"):
            mean = statistics.fmean(found["time"]), statistics.fmean(found["quality"])
            points.setdefault(row.group, []).append((*mean, row.name.removeprefix(f"{row.group}, ")))
    if not points:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for number, (group, group_points) in enumerate(points.items()):
            times, values, names = zip(*group_points, strict=True)
            color, line = (ACCENT, SECOND)[number % 2], "-" if group else "none"
            axes.plot(times, values, color=color, marker="o", markersize=4.5, linestyle=line, label=group or None)
            for index, (place, name) in enumerate(zip(zip(times, values, strict=True), names, strict=True)):
                # Alternately above and below, because neighbouring points may be close together.
                axes.annotate(
                    name, place, textcoords="offset points", xytext=(0, -13 if index % 2 else 7), ha="center",
                    color=INK, fontsize="small",
                )  # fmt: skip
        axes.margins(x=0.12, y=0.2)
        axes.set_xlabel("training time a token")
        axes.set_ylabel(f"{quality_label(outcome.unit)}, test split")
        if len(points) > 1:
            axes.legend(loc="best")

    text = "; ".join(
        f"{name} {value:.4g} at {time:.2f}" for group_points in points.values() for time, value, name in group_points
    )
    title = "Results against training time a token"
    return Plot("cost", title, f"{text}.", 3.6, draw)


def length_figure(outcome: Outcome, keys: Sequence[str], name: str, label: str) -> Plot | None:
    """Draw quality against attention or context length, as means over seeds with one line per row."""
    shown = [key for key in keys if outcome.curves.get(key)]
    if not shown:
        return None
    points = {
        key: [
            (length, statistics.fmean(quality(nll, outcome.unit) for nll in losses))
            for length, losses in sorted(outcome.curves[key].items())
        ]
        for key in shown
    }
    return length_plot(points, name, label, quality_label(outcome.unit))


def speed_figure(outcome: Outcome) -> Plot | None:
    """Draw the slowdown of the vanilla Transformer by attention length, as measured and as published."""
    measured = sorted(
        (next(iter(row.by_seed.values()))["attention_length"], statistics.fmean(outcome.values[row.row.key]["slower"]))
        for row in outcome.rows
        if row.by_seed
    )
    if not measured:
        return None
    published = sorted(
        (row.row.length, float(row.row.paper["slower"].rstrip("x").replace(",", ""))) for row in outcome.rows
    )

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        curves = ((measured, ACCENT, "o", "measured here"), (published, SECOND, "s", "the paper, one GPU"))
        for points, color, marker, name in curves:
            lengths, values = zip(*points, strict=True)
            axes.plot(lengths, values, color=color, marker=marker, markersize=4.5, linewidth=1.5, label=name)
        length_axis(axes, "attention length")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("times slower a token")
        axes.legend(loc="upper left")

    text = "; ".join(f"{times:,.0f} times at attention length {length:,}" for length, times in measured)
    return Plot("speed", "Slowdown of the vanilla Transformer", f"{text}.", 3.2, draw)


def gains_figure(gains: GroupGains, names: Sequence[str]) -> Plot:
    """Draw Figure 3: unnormalised relative perplexity gains of each model of a group, for every pair of lengths."""
    shown = {name: gains.gains[name] for name in names if name in gains.gains}
    title = f"Relative perplexity gains, group {gains.group}"
    return gains_plot(shown, f"gains-{gains.group}-{gains.seed}", title)
