"""Figures of a run, for a page (SVG without fonts, scripts or external files) or as image files.

matplotlib's global state of figures is not used, and its settings are restored after each figure.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from txl.files import replacing
from txl.reporting.wording import arithmetic_words, manner_words, plain, split_text
from txl.runs.events import Evaluation, EvaluationFigures, TrainEvent, ValidEvent
from txl.units import quality, quality_label, quality_text

# Colours of figures and pages in light and in dark mode, by their names in `templates/page.css`.
LIGHT = {
    "ink": "#1d2733", "soft": "#5b6774", "line": "#c9d1d9", "hair": "#e3e8ec", "wash": "#f4f6f7", "paper": "#ffffff",
    "accent": "#b3452c", "second": "#2f6690", "bar": "#b9c4ce",
}  # fmt: skip
DARK = {
    "ink": "#e4e8ec", "soft": "#9ba7b3", "line": "#46515c", "hair": "#313a43", "wash": "#12171c", "paper": "#1a2027",
    "accent": "#ea8b6f", "second": "#74aede", "bar": "#4c5966",
}  # fmt: skip
INK, SOFT, LINE, ACCENT, SECOND = (LIGHT[name] for name in ("ink", "soft", "line", "accent", "second"))
WIDTH = 7.6  # of a figure in inches: that of a page's column; a narrower window scrolls the figure
POINTS = 400  # largest number of points of a curve; a longer log is averaged down to this number
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": LINE,
    "grid.linewidth": 0.5,
    "text.color": INK,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # text stays text: it can be selected and follows the page's font
    "svg.hashsalt": "txl",  # the same data give the same file
}
# Style rules that give an SVG the colours of dark mode; viewers that ignore them show the light ones. In heat maps, and
# in the scales beside them, nothing is the page's colour and much stands out from it; hues stay.
DARK_RULES = (
    "\n@media (prefers-color-scheme: dark) {\n"
    + "".join(
        f'[style*="{use}: {LIGHT[name]}"] {{ {use}: {DARK[name]} !important }}\n'
        for name in ("ink", "soft", "line", "accent", "second", "paper")
        for use in ("fill", "stroke")
    )
    + 'image, [id*="QuadMesh"], [id$="heat-end"] { filter: invert(.89) hue-rotate(180deg) }\n}\n'
)
Draw = Callable[[Figure], None]


@dataclass(frozen=True)
class Plot:
    """A figure for a page or for a file of its own."""

    name: str  # name that is unique in the page
    title: str
    description: str  # the figure's content in words
    height: float  # height in inches; the width is `WIDTH`
    draw: Draw  # function that draws the content on an empty figure

    def embedded(self) -> str:
        """Return the figure as an `<svg>` element for a page."""
        svg = _image(self.draw, "svg", (WIDTH, self.height), {"Format": None, "Type": None}).decode()
        svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{self.name}-", svg[svg.index("<svg") :])  # unique in a page
        label = escape(f"{self.title}. {self.description}")
        return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)

    def save(self, path: Path) -> None:
        """Write the figure as .svg or .png, as `save_figure` does."""
        save_figure(self.draw, path, (WIDTH, self.height), self.description)


def save_figure(draw: Draw, path: Path, size: tuple[float, float], description: str | None = None) -> None:
    """Write a figure as an image; the suffix of `path`, .svg or .png, selects the format.

    The size is width and height in inches; the description goes into the metadata of an SVG.

    Raises:
        OSError: if the image cannot be written. An old image is then unchanged.
    """
    if path.suffix == ".png":
        content = _image(draw, "png", size, {"Software": None})
    else:
        content = _image(draw, "svg", size, {"Description": description})
        content = content.replace(b"</style>", f"{DARK_RULES}</style>".encode(), 1)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def _image(draw: Draw, kind: str, size: tuple[float, float], metadata: dict[str, str | None]) -> bytes:
    """Return a figure in this module's style over matplotlib's defaults, without the user's matplotlibrc."""
    buffer = io.BytesIO()
    with mpl.rc_context(), warnings.catch_warnings():
        # Token texts can be in any script: an SVG leaves the glyphs to the viewer's fonts, a PNG shows boxes.
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        # The background is drawn too: a viewer's own background may suit neither the light nor the dark colours.
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        draw(figure)
        dates = {} if kind == "png" else {"Date": None, "Creator": None}
        figure.savefig(buffer, format=kind, dpi=150 if kind == "png" else "figure", metadata=dates | metadata)
    return buffer.getvalue()


def loss_figure(train: Sequence[TrainEvent], valid: Sequence[ValidEvent], unit: str) -> Plot:
    """Draw training and validation quality against the step; of `train` at least one event is needed."""
    steps = _thinned([event["step"] for event in train])
    losses = _thinned([event["loss"] for event in train])
    training = [quality(loss, unit) for loss in losses]
    validation = [quality(event["nll"], unit) for event in valid]
    window = np.ones(2 * (len(losses) // 60) + 1)  # a thirtieth of the curve
    smooth = np.convolve(losses, window)[len(window) // 2 :][: len(losses)]
    smooth /= np.convolve(np.ones(len(losses)), window)[len(window) // 2 :][: len(losses)]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.plot(steps, training, color=SECOND, linewidth=0.8, alpha=0.35)
        axes.plot(steps, [quality(loss, unit) for loss in smooth], color=SECOND, linewidth=1.5, label="training")
        if validation:
            places = [event["step"] for event in valid]
            axes.plot(places, validation, "o-", color=ACCENT, markersize=4, linewidth=1.5, label="validation")
        axes.set_ylim(*loss_limits(training, validation))
        axes.set_ylabel(quality_label(unit))
        _step_axis(axes)
        axes.legend(loc="upper right")

    last = f"Training ends at {training[-1]:.3f} {quality_label(unit)} at step {steps[-1]:,.0f}"
    if valid:
        low = min(valid, key=lambda event: event["nll"])
        last += f"; the lowest validation is {quality(low['nll'], unit):.3f} at step {low['step']:,}"
    return Plot("loss", "Loss while training", f"{last}.", 3.3, draw)


def loss_limits(training: Sequence[float], validation: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper limit of the loss axis.

    The first tenth of the training values may exceed the upper limit: the high losses of the untrained model would
    flatten the rest of the curve.
    """
    settled = [*training[len(training) // 10 :], *validation]
    low, high = min(settled), max(settled)
    spread = (high - low) or abs(high) * 0.1 or 1.0
    return low - 0.08 * spread, high + 0.15 * spread


def schedule_figure(train: Sequence[TrainEvent], clip: float) -> Plot:
    """Draw learning rate and gradient norm against the step; a `clip` of 0 means that the gradient is not clipped."""
    steps, rates, norms = (
        _thinned([event[name] for event in train]) for name in ("step", "learning_rate", "grad_norm")
    )

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        above.plot(steps, rates, color=SECOND, linewidth=1.5)
        above.set_ylabel("learning rate")
        above.set_ylim(0, max(rates) * 1.08 or 1)
        above.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        below.plot(steps, norms, color=SECOND, linewidth=0.9)
        below.set_ylabel("gradient norm")
        finite = [norm for norm in norms if math.isfinite(norm)]
        below.set_ylim(0, max(float(np.quantile(finite or [0.0], 0.98)) * 1.25, 1.2 * clip) or 1)
        if clip:
            below.axhline(clip, color=ACCENT, linewidth=1.2, dashes=(4, 2), label=f"clipped above {clip:g}")
            below.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)  # not over a line
        for axes in (above, below):
            axes.locator_params(axis="y", nbins=4, steps=[1, 2, 5, 10])
        _step_axis(below)
        figure.align_ylabels()

    text = f"The learning rate peaks at {max(rates):.3g} and ends at {rates[-1]:.3g}."
    return Plot("schedule", "Learning rate and gradient norm", text, 3.4, draw)


def _step_axis(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.set_xlim(left=0)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _thinned(values: Sequence[float]) -> list[float]:
    """Return a curve of at most `POINTS` points, each the mean of a group of neighbouring points."""
    parts = np.array_split(np.asarray(values, dtype=float), min(POINTS, len(values)))
    return [float(part.mean()) for part in parts]


def memory_figure(rows: Sequence[EvaluationFigures], unit: str, training_memory: int | None = None) -> Plot:
    """Draw quality against memory length; arguments as in `draw_memory_curve`."""
    ordered = sorted(rows, key=lambda row: row["mem_len"])
    points = ", ".join(f"{quality_text(row['nll'], unit)} at memory {row['mem_len']:,}" for row in ordered)
    return Plot(
        "memory",
        "Quality against memory length",
        f"{quality_label(unit).capitalize()}: {points}.",
        3.3,
        lambda figure: draw_memory_curve(figure.add_subplot(), rows, unit, training_memory),
    )


def draw_memory_curve(
    axes: Axes, rows: Sequence[EvaluationFigures], unit: str, training_memory: int | None = None
) -> None:
    """Draw quality against memory length, with the value beside each point that has room for the text.

    There are evaluations at two memory lengths or more; that of training is marked, if it is given.
    """
    rows = sorted(rows, key=lambda row: row["mem_len"])
    lengths, values = [row["mem_len"] for row in rows], [quality(row["nll"], unit) for row in rows]
    axes.plot(lengths, values, color=ACCENT, marker="o", markersize=5, linewidth=1.6)
    spread = (max(values) - min(values)) or abs(max(values)) * 0.1 or 1.0
    axes.set_ylim(min(values) - 0.15 * spread, max(values) + 0.25 * spread)
    positive = [length for length in lengths if length > 0]
    if len(positive) > 1 and max(positive) >= 4 * min(positive):
        axes.set_xscale("symlog", base=2, linthresh=min(positive), linscale=1)
    axes.margins(x=0.07)
    places = axes.transScale.transform(np.column_stack((lengths, np.ones(len(lengths)))))[:, 0]
    places = (places - places[0]) / ((places[-1] - places[0]) or 1.0)
    # Labels that do not overlap: of the longest, then of the others from the shortest upwards. The axes take at least
    # 0.65 of the figure's width from the first to the last point.
    assert isinstance(axes.figure, Figure)
    room = (0.08 * max(5, len(f"{lengths[-1]:,}")) + 0.08) / (0.65 * axes.figure.get_figwidth())
    labelled, last = [len(rows) - 1], -1.0
    for index, place in enumerate(places[:-1]):
        if place - last >= room and places[-1] - place >= room:
            labelled.append(index)
            last = place
    for index in labelled:
        axes.annotate(
            quality_text(rows[index]["nll"], unit), (lengths[index], values[index]), xytext=(5, 8),
            textcoords="offset points", ha="center", fontsize=8.5,
        )  # fmt: skip
    axes.set_xticks(sorted(lengths[index] for index in labelled))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if training_memory is not None and min(lengths) <= training_memory <= max(lengths):
        at = axes.transScale.transform((training_memory, 1.0))[0]
        ends = axes.transScale.transform([(lengths[0], 1.0), (lengths[-1], 1.0)])[:, 0]
        place = (at - ends[0]) / ((ends[1] - ends[0]) or 1.0)
        top = float(np.interp(place, places, values))  # where the drawn line is
        bottom = axes.get_ylim()[0]
        axes.vlines(training_memory, bottom, top, color=SOFT, linewidth=1, linestyles=(0, (2, 2)), zorder=0)
        right = place > 0.5  # on the side with more room
        axes.annotate(
            "memory in training", (training_memory, 0), xycoords=("data", "axes fraction"),
            xytext=(-4 if right else 4, 4), textcoords="offset points", ha="right" if right else "left", fontsize=8.5,
            color=SOFT,
        )  # fmt: skip
    axes.set_xlabel("memory length, tokens")
    axes.set_ylabel(quality_label(unit))


def save_memory_curve(rows: Sequence[Evaluation], path: Path) -> None:
    """Write the memory curve of evaluations at two memory lengths or more, as `save_figure` does."""
    first = rows[0]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        draw_memory_curve(axes, rows, first["unit"])
        manner = ", ".join([*manner_words(first), *arithmetic_words(first)])
        axes.set_title(
            f"{plain(first['corpus'])}, {split_text(first['split'])}, {first['tokens']:,} targets, "
            f"{first['checkpoint']}" + (f"\n{manner}" if manner else ""),
            fontsize=9.5,
            loc="left",
            parse_math=False,
        )

    save_figure(draw, path, (WIDTH, 3.5))
