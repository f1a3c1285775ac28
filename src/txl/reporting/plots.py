"""Figures of a run, as SVG that can stand in a page (no fonts, scripts or files beside it), or as image files."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

INK, ACCENT, SECOND, FAINT = "#1d2733", "#b3452c", "#2f6690", "#c9d1d9"
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6eaee",
    "grid.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.direction": "out",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: it can be selected, and takes the page's font
    "svg.hashsalt": "txl",  # the same data give the same file
    "path.simplify": True,
}
_SIZE = (7.2, 3.1)
"""Inches."""


def is_character_unit(unit: str) -> bool:
    """Whether a unit is measured in bits per character (else in perplexity)."""
    return unit in ("byte", "char")


def quality(row: dict[str, Any], unit: str) -> float:
    """bpc for bytes and characters, perplexity for words and byte pairs, of a record that has `nll`."""
    return row["nll"] / math.log(2) if is_character_unit(unit) else math.exp(min(row["nll"], 700))


def quality_label(unit: str) -> str:
    """The axis label that belongs to `quality`."""
    return {"byte": "bits per byte", "char": "bits per character"}.get(unit, "perplexity a token")


def loss_figure(events: Sequence[dict[str, Any]], unit: str) -> str:
    """Training and validation quality against the step, as SVG."""
    train = [(event["step"], quality({"nll": event["loss"]}, unit)) for event in events if event["event"] == "train"]
    valid = [(event["step"], quality(event, unit)) for event in events if event["event"] == "valid"]

    def draw(axes: Axes) -> None:
        axes.plot(*zip(*train, strict=True), color=SECOND, linewidth=1.2, label="training (with dropout)")
        if valid:
            axes.plot(
                *zip(*valid, strict=True), color=ACCENT, marker="o", markersize=4, linewidth=1.4, label="validation"
            )
        # The first steps, from a model that knows nothing, would press everything else flat.
        values = [value for _, value in train]
        settled = values[len(values) // 10 :] + [value for _, value in valid]
        low, high = min(settled), max(settled)
        axes.set_ylim(low - 0.06 * (high - low + 1e-9), high + 0.12 * (high - low + 1e-9))
        axes.set_ylabel(quality_label(unit))
        axes.set_xlabel("step")
        axes.legend(loc="upper right")

    return svg(draw, "Loss while training")


def learning_rate_figure(events: Sequence[dict[str, Any]]) -> str:
    """Learning rate and gradient norm against the step, as SVG."""
    train = [event for event in events if event["event"] == "train"]
    steps = [event["step"] for event in train]

    def draw(axes: Axes) -> None:
        axes.plot(steps, [event["learning_rate"] for event in train], color=SECOND, linewidth=1.4)
        axes.set_ylabel("learning rate", color=SECOND)
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
        right = axes.twinx()
        right.plot(steps, [event["grad_norm"] for event in train], color=ACCENT, linewidth=1.0, alpha=0.8)
        right.set_ylabel("gradient norm, before clipping", color=ACCENT)
        right.set_ylim(bottom=0)
        right.grid(visible=False)
        right.spines["right"].set_visible(False)

    return svg(draw, "Learning rate and gradient norm")


def memory_figure(rows: Sequence[dict[str, Any]], unit: str) -> str:
    """Quality against memory length, as SVG."""
    return svg(lambda axes: draw_memory_curve(axes, rows, unit), "Quality against memory length")


def draw_memory_curve(axes: Axes, rows: Sequence[dict[str, Any]], unit: str) -> None:
    """Quality at each memory length, the figures written beside the points."""
    rows = sorted(rows, key=lambda row: row["mem_len"])
    lengths, values = [row["mem_len"] for row in rows], [quality(row, unit) for row in rows]
    axes.plot(lengths, values, color=ACCENT, marker="o", markersize=5, linewidth=1.6)
    spread = max(values) - min(values)
    for length, value in zip(lengths, values, strict=True):
        text = f"{value:.3f}" if is_character_unit(unit) else f"{value:.1f}"
        axes.annotate(text, (length, value), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=9)
    axes.set_ylim(min(values) - 0.12 * (spread + 1e-9), max(values) + 0.2 * (spread + 1e-9))
    if len(lengths) > 2 and max(lengths) > 8 * sorted(lengths)[1] > 0:
        axes.set_xscale("symlog", linthresh=sorted(lengths)[1], linscale=0.7)
    axes.set_xticks(lengths)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.margins(x=0.06)
    axes.set_xlabel("memory length, tokens")
    axes.set_ylabel(quality_label(unit))


def save_memory_curve(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the memory curve as an image; the name's ending, .svg or .png, decides the format.

    Args:
        rows: evaluation records; besides their figures `unit`, `corpus` and `split` are used.
        path: of the image.
    """
    first = rows[0]

    def draw(axes: Axes) -> None:
        draw_memory_curve(axes, rows, first["unit"])
        axes.set_title(
            f"{first['corpus']}, {first['split']} split, {first['tokens']:,} targets", fontsize=10, loc="left"
        )

    with mpl.rc_context(_STYLE):
        figure = _figure(draw)
        if path.suffix == ".png":
            FigureCanvasAgg(figure).print_figure(str(path), dpi=150)
        else:
            FigureCanvasSVG(figure).print_figure(str(path), metadata={"Date": None})


def svg(draw: Callable[[Axes], None], title: str) -> str:
    """A figure as an `<svg>` element with a title for screen readers; its ids are its own in a page of several."""
    with mpl.rc_context(_STYLE):
        buffer = io.StringIO()
        FigureCanvasSVG(_figure(draw)).print_figure(buffer, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    prefix = re.sub(r"\W+", "-", title.lower())
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    opening = text.index(">") + 1
    head = re.sub(r'\s(width|height)="[^"]*"', "", text[:opening])
    return f'{head[:-1]} role="img" aria-label="{title}"><title>{title}</title>{text[opening:]}'


def _figure(draw: Callable[[Axes], None]) -> Figure:
    figure = Figure(figsize=_SIZE, layout="constrained")
    draw(figure.add_subplot())
    return figure
