"""The figures of `docs/explanation/performance.md`, in the style of the reports' figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from txl.reporting.plots import ACCENT, INK, SECOND, SOFT
from txl_lab.pages import Record

NAMES = {"segment": "T", "memory": "M", "layers": "layers", "batch": "B", "vocabulary": "V"}


def _doubling_axis(axis: Any, values: Sequence[float]) -> None:
    """Set the ticks of a logarithmic axis at the given values."""
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def draw_roofline(figure: Figure, record: Record) -> None:
    """Draw rate against intensity: the two bounds, and the workloads of enwik8-12L."""
    machine = record["roofline"]
    bandwidth, top = machine["bandwidth"], max(machine["matmul_rate"]["float32"].values())
    points = [
        (work["name"], work["operations"] / work["bytes_read_once"], work["operations"] / work["seconds"])
        for work in record["workloads"]
    ]
    low, high = min(point[1] for point in points) / 3, max(point[1] for point in points) * 4
    ridge = top / bandwidth
    axes = figure.add_subplot()
    axes.loglog([low, ridge, high], [low * bandwidth / 1e9, top / 1e9, top / 1e9], color=SECOND, linewidth=1.5)
    middle = (low * ridge) ** 0.5
    axes.annotate(
        f"{bandwidth / 1e9:.0f} GB/s",
        (middle, middle * bandwidth / 1e9),
        xytext=(-6, 4),
        textcoords="offset points",
        ha="right",
        color=SECOND,
    )
    axes.annotate(
        f"{top / 1e9:,.0f} GFLOP/s",
        (high, top / 1e9),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right",
        color=SECOND,
    )
    for name, intensity, rate in points:
        axes.plot(intensity, rate / 1e9, marker="o", markersize=5, color=ACCENT)
        axes.annotate(
            name,
            (intensity, rate / 1e9),
            xytext=(0, -14),
            textcoords="offset points",
            ha="center",
            color=INK,
            fontsize=8.5,
        )
    axes.set_ylim(min(point[2] for point in points) / 1e9 / 3, top / 1e9 * 2.2)
    axes.set_xlabel("operations a byte that must be read")
    axes.set_ylabel("GFLOP/s, float32")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def draw_growth(figure: Figure, record: Record) -> None:
    """Draw a small plot per axis: time of a training step and of an evaluation, relative to the first point."""
    frames: Any = figure.subplots(1, len(record["axes"]), squeeze=False)[0]
    for frame, (axis, rows) in zip(frames, record["axes"].items(), strict=True):
        _draw_axis(frame, axis, rows)
    frames[0].set_ylabel("time, relative to the first")
    handles, labels = frames[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3)


def _draw_axis(axes: Axes, axis: str, rows: list[Record]) -> None:
    values = [row["value"] for row in rows]
    for kind, color in (("training step", ACCENT), ("evaluation", SECOND)):
        for what, style in (("seconds", "-"), ("operations", ":")):
            ratios = [row[kind][what] / rows[0][kind][what] for row in rows]
            shown = what == "seconds"
            axes.plot(
                values,
                ratios,
                style,
                color=color,
                marker="o" if shown else None,
                markersize=3.5,
                linewidth=1.5 if shown else 1,
                label=kind if shown else ("counted operations" if kind == "training step" else None),
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    shown = values if len(values) <= 4 else values[::2] if len(values) % 2 else values[1::2]
    _doubling_axis(axes.xaxis, shown)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.set_ylim(0.5, None)
    bottom, top = axes.get_ylim()
    _doubling_axis(
        axes.yaxis, [2.0**power for power in range(0, 16, 1 if top < 40 else 2) if bottom <= 2**power <= top]
    )
    axes.set_xlabel(NAMES[axis])


def _short(value: float) -> str:
    """Return a short form of a number: 2k for 2000."""
    return f"{value:g}" if value % 1000 else f"{value / 1000:g}k"


def draw_training_memory(figure: Figure, record: Record) -> None:
    """Draw peak memory against T = M, for the peer and for our model."""
    axes = figure.add_subplot()
    lengths = [row["length"] for row in record["rows"]]
    ways = (
        ("peer", "Hugging Face, float32", SOFT, "-"),
        ("shifted", "shifted, float32", SECOND, "-"),
        ("factorised", "factorised, float32", SECOND, ":"),
        ("compiled", "compiled, float32", ACCENT, "-"),
        ("compiled, bfloat16", "compiled, bfloat16", ACCENT, ":"),
    )
    measured = record["rows"][0]["peak_bytes"]
    for way, label, color, style in (way for way in ways if way[0] in measured):
        sizes = [row["peak_bytes"][way] / 2**20 for row in record["rows"]]
        axes.loglog(lengths, sizes, style, color=color, marker="o", markersize=4, linewidth=1.5, label=label)
    _doubling_axis(axes.xaxis, lengths)
    low, high = axes.get_ylim()
    _doubling_axis(axes.yaxis, [4.0**power for power in range(20) if low <= 4**power <= high])
    axes.set_xlabel("T = M, tokens")
    axes.set_ylabel("MiB over what is held between steps")
    axes.legend(loc="upper left")


def draw_quality(figure: Figure, record: Record) -> None:
    """Draw validation loss against training time: one run of the authors' recipe, and whole runs of ours."""
    texts = record["texts"]
    for axes, text in zip(figure.subplots(1, len(texts), squeeze=False)[0], texts, strict=True):
        (authors,) = (curve for curve in text["curves"] if curve["recipe"] == "authors")
        counted = text["settings"]["peer_ratio"]  # the record's seconds of the authors' recipe over those measured
        points = [(point["seconds"] / counted, point["nll"]) for point in authors["points"] if point["seconds"] > 0]
        axes.plot(*zip(*points, strict=True), color=SOFT, linewidth=1.5)
        target = text["target_nll"]
        axes.axhline(target, color=SOFT, linewidth=0.8, linestyle=":")
        axes.annotate(
            "authors'", points[len(points) // 3], xytext=(6, 6), textcoords="offset points", fontsize=8.5, color=SOFT
        )
        ends: list[tuple[float, float]] = []
        for recipe, color, below in (("adam", SECOND, False), ("muon", ACCENT, True)):
            runs = [curve for curve in text["curves"] if curve["recipe"] == recipe]
            if not runs:
                continue  # not measured
            ends = [(curve["steps"] * curve["step_seconds"], curve["points"][-1]["nll"]) for curve in runs]
            axes.plot(*zip(*ends, strict=True), color=color, marker="o", markersize=4, linewidth=1.5)
            shift = (-4, -10) if below else (4, 4)
            axes.annotate(
                NAMED_RECIPES[recipe], ends[0], xytext=shift, textcoords="offset points", fontsize=8.5, color=color,
                ha="right" if below else "left",
            )  # fmt: skip
        axes.set_xscale("log")
        _doubling_axis(axes.xaxis, [each for each in (15, 30, 60, 120, 300, 600) if each <= points[-1][0]])
        axes.set_xlim(left=15)
        shown = [nll for _, nll in ends] + [target]
        axes.set_ylim(min(shown) - 0.15, max(shown) + 0.6)
        axes.set_xlabel("seconds of training, as measured")
        axes.set_title(text["text"], fontsize=9.5, loc="left")
    figure.axes[0].set_ylabel("validation loss, nats a token")


NAMED_RECIPES = {"adam": "Adam, tuned", "muon": "Muon"}  # labels of our recipes, by their names in the record
# Title of each figure of the page, its size in inches, and the function that draws it
FIGURES: dict[str, tuple[str, tuple[float, float], Callable[..., None]]] = {
    "quality": ("Validation loss against the time of training", (9.4, 3.3), draw_quality),
    "roofline": ("Rate against operations a byte, below the machine's roofline", (7.6, 3.6), draw_roofline),
    "growth": ("Time against T, M, layers, B and V, relative to the first", (9.4, 3.2), draw_growth),
    "training-memory": ("Peak memory of a training step against T = M", (7.6, 3.5), draw_training_memory),
}
