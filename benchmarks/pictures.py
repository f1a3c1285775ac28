"""Draw the pictures of the README and of the site from the records in `results/`.

python -m benchmarks.pictures            # writes docs/images/*.svg
python -m benchmarks.pictures --check    # exit code 1 if a picture does not match its records
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from txl.reporting.plots import ACCENT, INK, LINE, SECOND, SOFT, draw_memory_curve
from txl_lab.pages import DOCS, Record, RecordedPlot, read_record, write_or_check
from txl_lab.records import RESULTS


def draw_reach(record: Record, figure: Figure) -> None:
    axes = figure.add_subplot()
    window, segment, rows = record["window"], record["segment"], record["relative"]
    length = len(rows[0])
    for start in range(segment, length, 2 * segment):
        axes.axvspan(start, min(start + segment, length), color=LINE, alpha=0.35, linewidth=0)
    for number, row in enumerate(rows, start=1):
        reach = record["farthest"][number - 1]
        color = ACCENT if number == 1 else SECOND if number == len(rows) else SOFT
        axes.plot(range(reach + 1), row[: reach + 1], color=color, linewidth=1.1)
        axes.plot(reach, row[reach], marker="o", markersize=4, color=color)
        axes.annotate(
            f"layer {number}: {reach} tokens", (reach, row[reach]), xytext=(3, -11), textcoords="offset points",
            ha="left", fontsize=8.5, color=color,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(min(row[reach] for row, reach in zip(rows, record["farthest"], strict=True)) / 12, 2)
    axes.set_xlim(length, 0)
    axes.set_xticks(range(0, length, segment))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"tokens back from the prediction; bands are segments of {segment}, the newest at the right")
    axes.set_ylabel("gradient, relative")
    axes.set_title(f"Reach of each layer's input, window of {window} keys", fontsize=9.5, loc="left")


def draw_memory(record: Record, figure: Figure) -> None:
    axes = figure.add_subplot()
    sweep = next(event for event in record["measurements"] if event["event"] == "sweep")
    training = record["start"]["config"]["model"]["mem_len"]
    draw_memory_curve(axes, sweep["rows"], "byte", training)
    axes.set_title("More memory, fewer bits", fontsize=9.5, loc="left")


def draw_speed(record: Record, figure: Figure) -> None:
    axes = figure.add_subplot()
    works: dict[str, dict[str, float]] = {}
    for row in record["rows"]:
        if row.get("ours") is None:  # the same segment on both sides
            lengths = f"T {row['segment']:,}, M {row['memory']:,}"
            works.setdefault(f"{row['name']}\n{row['preset']}, {lengths}", {})[row["dtype"]] = row["ratio"]
    places = list(range(len(works)))[::-1]
    for shift, (dtype, color) in zip((0.19, -0.19), (("float32", SECOND), ("bfloat16", ACCENT)), strict=True):
        ratios = [each[dtype] for each in works.values()]
        axes.barh([place + shift for place in places], ratios, height=0.36, color=color, label=f"ours in {dtype}")
        for place, ratio in zip(places, ratios, strict=True):
            axes.annotate(
                f"{ratio:.1f}", (ratio, place + shift), xytext=(3, 0), textcoords="offset points", va="center",
                fontsize=8, color=INK,
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(1, max(max(each.values()) for each in works.values()) * 1.5)
    axes.set_xticks([1, 3, 10, 30])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_yticks(places, list(works), fontsize=7.5)
    axes.grid(False)
    figure.legend(loc="outside lower right", ncols=2)
    axes.set_title("Times faster than transformers 4.37.2", fontsize=9.5, loc="right")


BESIDE = (3.6, 3.2)  # size in inches of two pictures that fit beside each other, and on a phone below each other
# Record that each picture shows, size of the picture in inches, and function that draws it
PICTURES: dict[str, tuple[str, tuple[float, float], Callable[[Record, Figure], None]]] = {
    "memory-reach": ("memory-reach", (7.6, 3.4), draw_reach),
    "memory-curve": ("enwik8-head", BESIDE, draw_memory),
    "speed": ("bench-peers", BESIDE, draw_speed),
}


def plots(results: Path, folder: Path) -> list[RecordedPlot]:
    found = []
    for name, (record, size, draw) in PICTURES.items():
        output = read_record(results, record)["output"]
        found.append(RecordedPlot(folder / f"{name}.svg", [name, output], size, partial(draw, output)))
    return found


def write_pictures(results: Path = RESULTS, folder: Path = DOCS / "images") -> None:
    for plot in plots(results, folder):
        plot.write()


def check_pictures(results: Path = RESULTS, folder: Path = DOCS / "images") -> list[str]:
    """Return the names of the pictures that do not match their records."""
    return [plot.path.stem for plot in plots(results, folder) if not plot.is_current]


if __name__ == "__main__":
    write_or_check("pictures", write_pictures, check_pictures)
