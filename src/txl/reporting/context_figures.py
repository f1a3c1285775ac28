"""Figures 4 and 3 of the paper: quality by context length, and gains from longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter

from txl.reporting.plots import ACCENT, INK, SECOND, SOFT, Plot
from txl.reporting.wording import plain

Points = Mapping[str, Sequence[tuple[int, float]]]  # pairs of length and value by model, in ascending order of length
# exp f(c,c) - exp f(c,c') by model, for each pair of a short and a long context length.
Gains = Mapping[str, Mapping[tuple[int, int], float]]

# Colour, line style and marker of the first, second ... model; in the paper's tables the first is the paper's own.
_LINES = (
    (ACCENT, "-", "o"), (SECOND, "-", "s"), (SOFT, "-", "^"), (INK, "-", "D"), (SECOND, "--", "o"), (SOFT, "--", "s"),
    (INK, "--", "^"), (ACCENT, "--", "D"), (SECOND, ":", "o"), (SOFT, ":", "s"), (INK, ":", "^"),
)  # fmt: skip
# The last colour differs from ACCENT by one: dark mode replaces ACCENT, but inverts this map as a whole.
_WASH = LinearSegmentedColormap.from_list("wash", ["#f4f6f7", "#b3452d"])


def length_plot(points: Points, name: str, label: str, measure: str) -> Plot:
    """Return Figure 4: a measure against attention or context length (`label`), one line per model.

    The name of a plot is unique in its page.
    """

    def draw(figure: Figure) -> None:
        _lines(figure, points, label).set_ylabel(measure)

    ends = "; ".join(f"{key} {values[0][1]:.4g} to {values[-1][1]:.4g}" for key, values in points.items())
    text = f"{label.capitalize()} from shortest to longest: {ends}."
    return Plot(name, f"Quality against {label}", text, 3.5, draw)


def steps_plot(points: Points, threshold: float, name: str, title: str) -> Plot:
    """Return a plot of g(c,c') of each step from a context length c to the next, with the threshold that ends RECL."""

    def draw(figure: Figure) -> None:
        axes = _lines(figure, points, "short context c")
        axes.axhline(threshold, color=INK, linewidth=1, dashes=(4, 2))
        axes.annotate(
            f"threshold {100 * threshold:g}%", (1, threshold), xycoords=("axes fraction", "data"), xytext=(0, 3),
            textcoords="offset points", ha="right", fontsize=8.5,
        )  # fmt: skip
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        axes.set_ylabel("relative gain of one step")

    ends = "; ".join(f"{key} {values[0][1]:.2%} to {values[-1][1]:.2%}" for key, values in points.items())
    return Plot(name, title, f"From the shortest context to the longest: {ends}.", 3.5, draw)


def gains_plot(gains: Gains, name: str, title: str) -> Plot:
    """Return Figure 3: unnormalised relative perplexity gains of each model of a group, for every pair of lengths."""
    most = {model: max(by_pair.values()) for model, by_pair in gains.items()}
    names = {model: f"up to {gain:,.0f}" if gain >= 100 else f"up to {gain:.3g}" for model, gain in most.items()}
    lengths = sorted({length for by_pair in gains.values() for pair in by_pair for length in pair})

    def draw(figure: Figure) -> None:
        across = min(len(gains), 4)
        grid = figure.subplots(math.ceil(len(gains) / across), across, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flat[len(gains) :]:
            axes.set_visible(False)
        for axes, (model, pairs) in zip(grid.flat, gains.items(), strict=False):
            matrix = [[pairs.get((short, long), math.nan) for long in lengths[1:]] for short in lengths[:-1]]
            # pcolormesh, unlike imshow, draws the cells as vector shapes.
            axes.grid(visible=False)
            axes.pcolormesh(np.array(matrix), cmap=_WASH, vmin=0, vmax=max(most.values()) or 1)
            axes.set_title(f"{plain(model)}\n{names[model]}", fontsize=8.5, parse_math=False)
            marks = sorted({0, (len(lengths) - 2) // 2, len(lengths) - 2})
            middles = [mark + 0.5 for mark in marks]
            axes.set_xticks(middles, [f"{lengths[mark + 1]:,}" for mark in marks])
            axes.set_yticks(middles, [f"{lengths[mark]:,}" for mark in marks])
            axes.tick_params(labelleft=True, labelbottom=True, labelsize=8)
        figure.supxlabel("long context c′", fontsize=9, color=SOFT)
        figure.supylabel("short context c", fontsize=9, color=SOFT)

    text = "; ".join(f"{model} {words}" for model, words in names.items())
    return Plot(name, title, f"Gains: {text}.", 0.7 + 2.0 * math.ceil(len(gains) / 4), draw)


def length_axis(axes: Axes, label: str) -> None:
    """Set label and ticks of the horizontal axis, in tokens."""
    axes.set_xlabel(f"{label}, tokens")
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _lines(figure: Figure, points: Points, label: str) -> Axes:
    """Draw a line per model, with a legend below the axes."""
    axes = figure.add_subplot()
    for (key, curve), (color, line, marker) in zip(points.items(), cycle(_LINES), strict=False):
        lengths, values = zip(*curve, strict=True)
        named = plain(key).replace("$", r"\$")  # $ would begin a formula; a leading _ would hide the label
        axes.plot(
            lengths, values, color=color, linestyle=line, marker=marker, markersize=3.5, linewidth=1.3,
            label=f"\u200b{named}" if named.startswith("_") else named,
        )  # fmt: skip
    length_axis(axes, label)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8.5)
    return axes
