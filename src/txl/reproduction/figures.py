"""Figures of a table's page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from txl.reporting.plots import ACCENT, INK, SECOND, SOFT, Drawing, drawing
from txl.reporting.wording import quality, quality_label
from txl.reproduction.outcome import GroupGains, Outcome

_LINES = (
    (ACCENT, "-", "o"), (SECOND, "-", "s"), (SOFT, "-", "^"), (INK, "-", "D"), (SECOND, "--", "o"), (SOFT, "--", "s"),
    (INK, "--", "^"), (ACCENT, "--", "D"), (SECOND, ":", "o"), (SOFT, ":", "s"), (INK, ":", "^"),
)  # fmt: skip
"""Colour, line and marker of the first, second ... row; the first is the paper's own model."""


_WASH = LinearSegmentedColormap.from_list("wash", ["#f4f6f7", ACCENT])


def quality_figure(outcome: Outcome) -> Drawing | None:
    """Every trained row's results, a dot a seed and a bar at their mean; the lower the better."""
    rows = [row for row in outcome.rows if outcome.values[row.row.key].get("quality")]
    if not rows:
        return None
    names = [row.row.key for row in rows]
    values = [outcome.values[name]["quality"] for name in names]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for place, (name, each) in enumerate(zip(names, values, strict=True)):
            color = ACCENT if name.startswith("xl") else SECOND
            mean = statistics.fmean(each)
            axes.plot(each, [place] * len(each), color=color, marker="o", markersize=4.5, linestyle="none", alpha=0.6)
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
        f"{name} {statistics.fmean(each):.4g}" for name, each in zip(names, values, strict=True)
    )  # fmt: skip
    height = 1.0 + 0.32 * len(names)
    return drawing(
        draw, "quality", "Results over seeds", f"Means: {text}.", wide=(7.6, height), narrow=(4.2, height)
    )  # fmt: skip


def length_figure(outcome: Outcome, keys: Sequence[str], name: str, label: str) -> Drawing | None:
    """Quality against attention or context length, means over seeds, one line a row."""
    shown = [key for key in keys if outcome.curves.get(key)]
    if not shown:
        return None
    points = {
        key: [(length, quality(statistics.fmean(each), outcome.unit)) for length, each in sorted(curve.items())]
        for key, curve in ((key, outcome.curves[key]) for key in shown)
    }

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for key, (color, line, marker) in zip(shown, cycle(_LINES), strict=False):
            lengths, values = zip(*points[key], strict=True)
            axes.plot(
                lengths, values, color=color, linestyle=line, marker=marker, markersize=3.5, linewidth=1.3, label=key
            )
        _length_axis(axes, label)
        axes.set_ylabel(quality_label(outcome.unit))
        figure.legend(loc="outside lower center", ncols=2 if figure.get_figwidth() < 5 else 4, fontsize=8.5)

    ends = "; ".join(f"{key} {values[0][1]:.4g} to {values[-1][1]:.4g}" for key, values in points.items())
    text = f"{label.capitalize()} from shortest to longest: {ends}."
    extra = 0.2 * math.ceil(len(shown) / 2)
    return drawing(draw, name, f"Quality against {label}", text, wide=(7.6, 3.5), narrow=(4.2, 3.2 + extra))


def speed_figure(outcome: Outcome) -> Drawing | None:
    """How much slower the vanilla Transformer is, measured and in the paper."""
    measured = sorted(
        (next(iter(row.by_seed.values()))["attention_length"], statistics.fmean(outcome.values[row.row.key]["slower"]))
        for row in outcome.rows
        if row.by_seed
    )
    if not measured:
        return None
    published = sorted(
        (row.row.length or 0, float(row.row.paper["slower"].rstrip("x").replace(",", ""))) for row in outcome.rows
    )

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        curves = ((measured, ACCENT, "o", "measured here"), (published, SECOND, "s", "the paper, one GPU"))
        for points, color, marker, name in curves:
            lengths, values = zip(*points, strict=True)
            axes.plot(lengths, values, color=color, marker=marker, markersize=4.5, linewidth=1.5, label=name)
        _length_axis(axes, "attention length")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("times slower a token")
        axes.legend(loc="upper left")

    text = "; ".join(f"{times:,.0f} times at attention length {length:,}" for length, times in measured)
    return drawing(draw, "speed", "Slowdown of the vanilla Transformer", f"{text}.", wide=(7.6, 3.2), narrow=(4.2, 3.2))


def gains_figure(gains: GroupGains, names: Sequence[str]) -> Drawing:
    """Figure 3: unnormalised relative perplexity gains of each model of a group, for every pair of lengths."""
    highest = max(max(each.values()) for each in gains.gains.values())
    lengths = sorted({length for each in gains.gains.values() for pair in each for length in pair})
    shown = [name for name in names if name in gains.gains]

    def draw(figure: Figure) -> None:
        across = min(len(shown), 2 if figure.get_figwidth() < 5 else 4)
        grid = figure.subplots(math.ceil(len(shown) / across), across, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flat[len(shown) :]:
            axes.set_visible(False)
        for axes, name in zip(grid.flat, shown, strict=False):
            matrix = [
                [gains.gains[name].get((short, long), math.nan) for long in lengths[1:]] for short in lengths[:-1]
            ]
            # Not imshow: the page's policy lets no image in.
            axes.grid(visible=False)
            axes.pcolormesh(np.array(matrix), cmap=_WASH, vmin=0, vmax=highest or 1)
            axes.set_title(f"{name}\nup to {max(gains.gains[name].values()):.3g}", fontsize=8.5)
            marks = sorted({0, (len(lengths) - 2) // 2, len(lengths) - 2})
            middles = [mark + 0.5 for mark in marks]
            axes.set_xticks(middles, [f"{lengths[mark + 1]:,}" for mark in marks])
            axes.set_yticks(middles, [f"{lengths[mark]:,}" for mark in marks])
            axes.tick_params(labelleft=True, labelbottom=True, labelsize=8)
        figure.supxlabel("long context c′", fontsize=9, color=SOFT)
        figure.supylabel("short context c", fontsize=9, color=SOFT)

    most = "; ".join(f"{name} up to {max(gains.gains[name].values()):.3g}" for name in shown)
    rows = math.ceil(len(shown) / 4)
    return drawing(
        draw,
        f"gains-{gains.group}-{gains.seed}",
        f"Relative perplexity gains, group {gains.group}",
        f"Gains: {most}.",
        wide=(7.6, 0.7 + 2.0 * rows),
        narrow=(4.2, 0.7 + 1.9 * math.ceil(len(shown) / 2)),
    )


def _length_axis(axes: Axes, label: str) -> None:
    axes.set_xlabel(f"{label}, tokens")
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
