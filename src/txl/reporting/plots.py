"""Figures of a run, as SVG to embed in a page (without fonts, scripts or external files), or as image files.

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
from txl.reporting.style import DARK, LIGHT
from txl.reporting.wording import arithmetic_words, manner_words, plain, split_text
from txl.runs.events import Evaluation, EvaluationFigures, TrainEvent, ValidEvent
from txl.units import quality, quality_label, quality_text

INK, SOFT, LINE, ACCENT, SECOND = (LIGHT[name] for name in ("ink", "soft", "line", "accent", "second"))
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
_DARK_RULES = (
    "\n@media (prefers-color-scheme: dark) {\n"
    + "".join(
        f'[style*="{use}: {LIGHT[name]}"] {{ {use}: {DARK[name]} !important }}\n'
        for name in ("ink", "soft", "line", "accent", "second", "paper")
        for use in ("fill", "stroke")
    )
    + 'image, [id*="QuadMesh"], [id$="heat-end"] { filter: invert(.89) hue-rotate(180deg) }\n}\n'  # as in `style.STYLE`
)
"""Style rules that give an SVG file the colours of dark mode; viewers that ignore the rules show the light ones."""
Draw = Callable[[Figure], None]


@dataclass(frozen=True)
class Drawing:
    """A figure for a page, drawn twice: for a wide and for a narrow column."""

    wide: str
    narrow: str


def loss_figure(train: Sequence[TrainEvent], valid: Sequence[ValidEvent], unit: str) -> Drawing:
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
    return drawing(draw, "loss", "Loss while training", f"{last}.", wide=(7.6, 3.3), narrow=(4.2, 3.2))


def loss_limits(training: Sequence[float], validation: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper limit of the loss axis.

    The first tenth of the training values may exceed the upper limit: the high losses of the untrained model would
    flatten the rest of the curve.
    """
    settled = [*training[len(training) // 10 :], *validation]
    low, high = min(settled), max(settled)
    spread = (high - low) or abs(high) * 0.1 or 1.0
    return low - 0.08 * spread, high + 0.15 * spread


def schedule_figure(train: Sequence[TrainEvent], clip: float) -> Drawing:
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
    return drawing(draw, "schedule", "Learning rate and gradient norm", text, wide=(7.6, 3.4), narrow=(4.2, 3.8))


def memory_figure(rows: Sequence[EvaluationFigures], unit: str, training_memory: int | None = None) -> Drawing:
    """Draw quality against memory length.

    Args:
        rows: evaluations at two memory lengths or more.
        unit: unit of the corpus.
        training_memory: memory length of training, marked in the figure; None: no mark.
    """
    ordered = sorted(rows, key=lambda row: row["mem_len"])
    points = ", ".join(f"{quality_text(row['nll'], unit)} at memory {row['mem_len']:,}" for row in ordered)
    return drawing(
        lambda figure: draw_memory_curve(figure.add_subplot(), rows, unit, training_memory),
        "memory",
        "Quality against memory length",
        f"{quality_label(unit).capitalize()}: {points}.",
        wide=(7.6, 3.3),
        narrow=(4.2, 3.2),
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
    kept = _with_room(axes, lengths)
    axes.set_xticks(kept)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    for row, length, value in zip(rows, lengths, values, strict=True):
        if length in kept:
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

    save_figure(draw, path, (7.6, 3.5))


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
    buffer = io.BytesIO()
    with _style():
        # The background is drawn too: a viewer's own background may suit neither the light nor the dark colours.
        figure = _figure(draw, size)
        figure.set_facecolor("white")
        if path.suffix == ".png":
            FigureCanvasAgg(figure).print_figure(buffer, dpi=150, metadata={"Software": None})
        else:
            metadata = {"Date": None, "Creator": None, "Description": description}
            FigureCanvasSVG(figure).print_figure(buffer, metadata=metadata)
    content = buffer.getvalue()
    if path.suffix != ".png":
        content = content.replace(b"</style>", f"{_DARK_RULES}</style>".encode(), 1)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def drawing(
    draw: Draw, name: str, title: str, description: str, *, wide: tuple[float, float], narrow: tuple[float, float]
) -> Drawing:
    """Draw a figure as two `<svg>` elements.

    Args:
        draw: function that draws the content on an empty figure.
        name: prefix of all element ids; must be unique in the page.
        title: title for screen readers.
        description: content of the figure in words, for screen readers.
        wide: width and height in inches for a wide column; one inch is about 96 pixels of the page.
        narrow: width and height in inches for a narrow column.
    """
    return Drawing(
        _svg(draw, f"{name}-wide", title, description, wide), _svg(draw, f"{name}-narrow", title, description, narrow)
    )


def _svg(draw: Draw, name: str, title: str, description: str, size: tuple[float, float]) -> str:
    buffer = io.StringIO()
    with _style():
        figure = _figure(draw, size)
        for axes in figure.axes:
            axes.set_facecolor("none")  # the page's background shows through
        FigureCanvasSVG(figure).print_figure(buffer, facecolor="none", metadata={"Date": None, "Creator": None})
    width, height = (72 * length for length in size)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>\n'
        f"{_embedded(buffer.getvalue(), name)}"
    )


def _embedded(svg: str, name: str) -> str:
    """Return the content of an SVG file, including the closing tag, in a form that a page can embed.

    Args:
        svg: SVG file as matplotlib writes it.
        name: prefix of all ids.
    """
    body = svg[svg.index(">", svg.index("<svg")) + 1 :].strip()
    # A <style> element would apply to the whole page.
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", body)  # the page sets the font family
    for variable in ("ink", "soft", "line", "accent", "second", "paper"):  # CSS variables follow dark mode
        body = body.replace(LIGHT[variable], f"var(--{variable}, {LIGHT[variable]})")
    return re.sub(r"\n\s*", "\n", body)


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
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    return figure


def _superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _step_axis(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.set_xlim(left=0)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


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
    kept, last = [lengths[-1]], None
    for length, place in zip(lengths[:-1], places, strict=False):
        clear = (places[-1] - place) / (high - low) >= room
        if clear and (last is None or (place - last) / (high - low) >= room):
            kept.append(length)
            last = place
    return sorted(kept)
