"""Figures of a run, for a page (SVG without fonts, scripts or external files) or as image files.

This module does not use matplotlib's global figure state, and restores matplotlib's settings after each figure.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from txl.files import replacing
from txl.reporting.wording import arithmetic_words, manner_words, plain, split_text
from txl.runs.events import Evaluation, EvaluationFigures, TrainEvent, ValidEvent
from txl.units import quality, quality_label, quality_text

LIGHT = {
    "ink": "#1d2733", "soft": "#5b6774", "line": "#c9d1d9", "hair": "#e3e8ec", "wash": "#f4f6f7", "paper": "#ffffff",
    "accent": "#b3452c", "second": "#2f6690", "bar": "#b9c4ce",
}  # fmt: skip
"""Colours of figures and pages in light mode, by their names in `templates/page.css`."""
DARK = {
    "ink": "#e4e8ec", "soft": "#9ba7b3", "line": "#46515c", "hair": "#313a43", "wash": "#12171c", "paper": "#1a2027",
    "accent": "#ea8b6f", "second": "#74aede", "bar": "#4c5966",
}  # fmt: skip
INK, SOFT, LINE, ACCENT, SECOND = (LIGHT[name] for name in ("ink", "soft", "line", "accent", "second"))
WIDTH = 7.6
"""Width of a figure in inches: that of a page's column. A narrower window scrolls the figure."""
POINTS = 400
"""Largest number of points of a curve; a longer log is averaged down to this number."""

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
DARK_RULES = (
    "\n@media (prefers-color-scheme: dark) {\n"
    + "".join(
        f'[style*="{use}: {LIGHT[name]}"] {{ {use}: {DARK[name]} !important }}\n'
        for name in ("ink", "soft", "line", "accent", "second", "paper")
        for use in ("fill", "stroke")
    )
    + 'image, [id*="QuadMesh"], [id$="heat-end"] { filter: invert(.89) hue-rotate(180deg) }\n}\n'
)
"""Style rules that give an SVG the colours of dark mode; viewers that ignore the rules show the light ones.

In heat maps, and in the scales beside them, nothing is the page's colour and much stands out from it; hues stay."""
Draw = Callable[[Figure], None]


@dataclass(frozen=True)
class Plot:
    """A figure for a page or for a file of its own."""

    name: str
    """Name that is unique in the page."""
    title: str
    description: str
    """The figure's content in words."""
    height: float
    """Height in inches; the width is `WIDTH`."""
    draw: Draw
    """Function that draws the content on an empty figure."""

    def embedded(self) -> str:
        """Return the figure as an `<svg>` element for a page."""
        svg = _svg(self.draw, (WIDTH, self.height), {"Format": None, "Type": None})
        svg = re.sub(
            r"<style.*?</style>", "", svg[svg.index("<svg") :].strip(), flags=re.DOTALL
        )  # the page has its own
        svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{self.name}-", svg)  # ids are unique in a page
        label = escape(f"{self.title}. {self.description}")
        return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)

    def save(self, path: Path) -> None:
        """Write the figure as .svg or .png.

        Raises:
            OSError: if the file cannot be written.
        """
        save_figure(self.draw, path, (WIDTH, self.height), self.description)


def loss_figure(train: Sequence[TrainEvent], valid: Sequence[ValidEvent], unit: str) -> Plot:
    """Draw training and validation quality against the step.

    Args:
        train: events with `step` and `loss`; at least one.
        valid: events with `step` and `nll`; may be empty.
        unit: unit of the corpus.
    """
    steps, losses = _thinned([event["step"] for event in train], [event["loss"] for event in train])
    training = [quality(loss, unit) for loss in losses]
    validation = [quality(event["nll"], unit) for event in valid]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        smooth = _smoothed(losses)
        if smooth is None:
            axes.plot(steps, training, color=SECOND, linewidth=1.5, label="training")
        else:
            axes.plot(steps, training, color=SECOND, linewidth=0.8, alpha=0.35)
            axes.plot(steps, [quality(loss, unit) for loss in smooth], color=SECOND, linewidth=1.5, label="training")
        if validation:
            axes.plot(
                [event["step"] for event in valid],
                validation,
                color=ACCENT,
                marker="o",
                markersize=4,
                linewidth=1.5,
                label="validation",
            )
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
    """Draw learning rate and gradient norm against the step, one above the other.

    Args:
        train: events with `step`, `learning_rate` and `grad_norm`; at least one.
        clip: norm above which the gradient is scaled down; 0: no clipping.
    """
    all_steps = [event["step"] for event in train]
    steps, rates = _thinned(all_steps, [event["learning_rate"] for event in train])
    _, norms = _thinned(all_steps, [event["grad_norm"] for event in train])
    exponent = math.floor(math.log10(max(rates))) if max(rates) > 0 else 0

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        above.plot(steps, rates, color=SECOND, linewidth=1.5)
        above.set_ylabel(f"learning rate, 10{_superscript(exponent)}")
        above.set_ylim(0, max(rates) * 1.08 or 1)
        above.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 10.0**exponent:g}"))
        below.plot(steps, norms, color=SECOND, linewidth=0.9)
        below.set_ylabel("gradient norm")
        finite = [norm for norm in norms if math.isfinite(norm)]
        top = max(float(np.quantile(finite or [0.0], 0.98)) * 1.25, 1.2 * clip)
        below.set_ylim(0, top or 1)
        below.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        if clip:
            below.axhline(clip, color=ACCENT, linewidth=1.2, dashes=(4, 2), label=f"clipped above {clip:g}")
            below.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)  # not over a line
        _step_axis(below)
        figure.align_ylabels()

    text = f"The learning rate peaks at {max(rates):.3g} and ends at {rates[-1]:.3g}."
    return Plot("schedule", "Learning rate and gradient norm", text, 3.4, draw)


def memory_figure(rows: Sequence[EvaluationFigures], unit: str, training_memory: int | None = None) -> Plot:
    """Draw quality against memory length.

    Args:
        rows: evaluations at two memory lengths or more.
        unit: unit of the corpus.
        training_memory: memory length of training, marked in the figure; None: no mark.
    """
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
    """Draw quality against memory length, with the value beside each point that has room for the text."""
    rows = sorted(rows, key=lambda row: row["mem_len"])
    lengths, values = [row["mem_len"] for row in rows], [quality(row["nll"], unit) for row in rows]
    axes.plot(lengths, values, color=ACCENT, marker="o", markersize=5, linewidth=1.6)
    spread = (max(values) - min(values)) or abs(max(values)) * 0.1 or 1.0
    axes.set_ylim(min(values) - 0.15 * spread, max(values) + 0.25 * spread)
    positive = [length for length in lengths if length > 0]
    if len(positive) > 1 and max(positive) >= 4 * min(positive):
        axes.set_xscale("symlog", base=2, linthresh=min(positive), linscale=1)
    axes.margins(x=0.07)
    labelled = _with_room(axes, lengths)
    axes.set_xticks(labelled)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:,.0f}")
    for row, length, value in zip(rows, lengths, values, strict=True):
        if length in labelled:
            axes.annotate(
                quality_text(row["nll"], unit), (length, value), xytext=(5, 8), textcoords="offset points",
                ha="center", fontsize=8.5,
            )  # fmt: skip
    if training_memory is not None and min(lengths) <= training_memory <= max(lengths):
        _mark_training(axes, training_memory, lengths, values)
    axes.set_xlabel("memory length, tokens")
    axes.set_ylabel(quality_label(unit))


def _mark_training(axes: Axes, length: int, lengths: Sequence[int], values: Sequence[float]) -> None:
    """Mark a memory length by a dotted line from the axis up to the curve, labelled on the side with more room."""

    def places(positions: Sequence[float]) -> list[float]:
        return [float(axes.transScale.transform((position, 1.0))[0]) for position in positions]

    left, at, right = places([axes.get_xlim()[0], length, axes.get_xlim()[1]])
    value = float(np.interp(at, places(lengths), values))  # on the axis's scale the curve is straight between points
    axes.vlines(length, axes.get_ylim()[0], value, color=SOFT, linewidth=1, linestyles=(0, (2, 2)), zorder=0)
    before = at - left > right - at
    axes.annotate(
        "memory in training", (length, 0), xycoords=("data", "axes fraction"), xytext=(-4 if before else 4, 4),
        textcoords="offset points", ha="right" if before else "left", fontsize=8.5, color=SOFT,
    )  # fmt: skip


def save_memory_curve(rows: Sequence[Evaluation], path: Path) -> None:
    """Write the memory curve as an image; the suffix of `path`, .svg or .png, selects the format.

    Args:
        rows: evaluations at two memory lengths or more.
        path: path of the image. An error leaves an old image unchanged.

    Raises:
        OSError: if the image cannot be written.
    """
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


def save_figure(draw: Draw, path: Path, size: tuple[float, float], description: str | None = None) -> None:
    """Write a figure as an image; the suffix of `path`, .svg or .png, selects the format.

    Args:
        draw: function that draws the content on an empty figure.
        path: path of the image. An error leaves an old image unchanged.
        size: width and height in inches.
        description: description for the metadata of an SVG; None: none.

    Raises:
        OSError: if the image cannot be written.
    """
    if path.suffix == ".png":
        buffer = io.BytesIO()
        with _style():
            FigureCanvasAgg(_figure(draw, size)).print_figure(buffer, dpi=150, metadata={"Software": None})
        content = buffer.getvalue()
    else:
        svg = _svg(draw, size, {"Description": description})
        content = svg.replace("</style>", f"{DARK_RULES}</style>", 1).encode()
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def _svg(draw: Draw, size: tuple[float, float], metadata: dict[str, str | None]) -> str:
    """Return a figure as the text of an SVG file."""
    buffer = io.StringIO()
    with _style():
        canvas = FigureCanvasSVG(_figure(draw, size))
        canvas.print_figure(buffer, metadata={"Date": None, "Creator": None, **metadata})
    return buffer.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    """Set this module's style over matplotlib's defaults, without the user's matplotlibrc, for a `with` block."""
    with mpl.rc_context(), warnings.catch_warnings():
        # Token texts can be in any script: an SVG leaves the glyphs to the viewer's fonts, a PNG shows boxes.
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def _figure(draw: Draw, size: tuple[float, float]) -> Figure:
    # The background is drawn too: a viewer's own background may suit neither the light nor the dark colours.
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    draw(figure)
    return figure


def _superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _step_axis(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.set_xlim(left=0)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _thinned(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return a curve of at most `POINTS` points, each the mean of a group of neighbouring points."""
    if len(steps) <= POINTS:
        return list(steps), list(values)
    parts = np.array_split(np.arange(len(steps)), POINTS)
    return (
        [float(np.mean(np.take(steps, part))) for part in parts],
        [float(np.mean(np.take(values, part))) for part in parts],
    )


def _smoothed(values: Sequence[float]) -> list[float] | None:
    """Return the running mean over a thirtieth of the curve; None for a curve that is too short for smoothing."""
    reach = len(values) // 60
    if reach < 1:
        return None
    return [float(np.mean(values[max(0, at - reach) : at + reach + 1])) for at in range(len(values))]


def _with_room(axes: Axes, lengths: Sequence[int]) -> list[int]:
    """Return memory lengths whose labels do not overlap: the longest, then the others from the shortest upwards.

    Args:
        axes: axes whose scale and margins are set.
        lengths: memory lengths in ascending order.
    """
    figure = axes.figure
    assert isinstance(figure, Figure)
    # `label` is in inches, like the figure's width; the axes take at least 0.8 of that width.
    label = 0.08 * max(5, len(f"{lengths[-1]:,}")) + 0.08
    room = label / (0.8 * figure.get_figwidth())
    axes.autoscale_view()
    transform = axes.transScale.transform
    places = [float(transform((length, 1.0))[0]) for length in lengths]
    low, high = (float(transform((edge, 1.0))[0]) for edge in axes.get_xlim())
    labelled, last = [lengths[-1]], None
    for length, place in zip(lengths[:-1], places, strict=False):
        clear = (places[-1] - place) / (high - low) >= room
        if clear and (last is None or (place - last) / (high - low) >= room):
            labelled.append(length)
            last = place
    return sorted(labelled)
