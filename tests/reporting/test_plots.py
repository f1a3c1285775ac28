import itertools
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from tests.reporting.fake_run import LENGTHS, evaluation

from txl.reporting import plots
from txl.reporting.plots import loss_figure, loss_limits, memory_figure, save_memory_curve, schedule_figure

SVG = "{http://www.w3.org/2000/svg}"


def lines(steps, loss=2.0) -> list[Any]:
    return [
        {"event": "train", "step": step, "loss": loss + 3 / step, "learning_rate": 1e-3 / step, "grad_norm": 0.3}
        for step in steps
    ]


def rows(unit="byte", lengths=LENGTHS) -> list[Any]:
    return [evaluation(1.4 + 0.2 / (1 + length), length, unit=unit) for length in lengths]


def texts(svg: str) -> list[str]:
    return ["".join(text.itertext()).strip() for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_figures_are_well_formed_with_units_and_unique_ids():
    valid: list[Any] = [{"event": "valid", "step": 30, "nll": 1.9}]
    train = lines(range(1, 60))
    for unit, measure in (("byte", "bits per byte"), ("word", "perplexity per word")):
        made = [loss_figure(train, valid, unit), schedule_figure(train, 0.25), memory_figure(rows(unit), unit, 128)]
        for plot in made:
            root = ElementTree.fromstring(plot.embedded())
            assert root.get("role") == "img"
            assert re.search(r"\d", root.get("aria-label") or "")
        loss, schedule, memory = (texts(plot.embedded()) for plot in made)
        assert all([*loss, *schedule, *memory])  # labels are text, not outlines
        assert {"step", measure, "training", "validation"} <= set(loss)
        assert {"learning rate", "gradient norm", "step"} <= set(schedule)
        assert {"memory length, tokens", measure, "memory in training"} <= set(memory)
        everything = "".join(plot.embedded() for plot in made)
        ids = re.findall(r'\bid="([^"]+)"', everything)
        assert len(ids) == len(set(ids)) > 50
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', everything)) <= set(ids)


@pytest.mark.parametrize("train", [lines([1]), lines([5, 10]), lines(range(10, 5000), loss=1e-9), lines(range(1, 9))])
@pytest.mark.parametrize("valid", [[], [{"step": 4, "nll": 2.0}]])
def test_short_and_flat_logs_are_drawn(train, valid):
    assert {"training", "step"} <= set(texts(loss_figure(train, valid, "byte").embedded()))
    assert "gradient norm" in texts(schedule_figure(train, 0.0).embedded())


def test_a_learning_rate_of_zero_is_drawn():
    event: Any = {"step": 1, "loss": 2.0, "learning_rate": 0.0, "grad_norm": 0.0}
    assert "learning rate" in texts(schedule_figure([event], 0.0).embedded())


def test_the_marker_of_training_ends_on_the_curve():
    axes = Figure().add_subplot()
    plots.draw_memory_curve(axes, [evaluation(2.0, 0), evaluation(1.5, 64), evaluation(1.0, 256)], "byte", 64)
    line = axes.collections[0]
    assert isinstance(line, LineCollection)
    assert axes.get_xscale() == "symlog"
    assert line.get_segments()[0][-1][1] == pytest.approx(1.5 / math.log(2))


def test_a_long_log_does_not_make_a_large_page():
    short, long = (len(loss_figure(lines(range(1, n)), [], "byte").embedded()) for n in (400, 10_000))
    assert long < 1.5 * short


def test_thinning_keeps_the_mean():
    assert plots._thinned([float(step % 10) for step in range(4000)]) == pytest.approx([4.5] * plots.POINTS)
    assert plots._thinned([1, 5]) == [1.0, 5.0]


def test_only_the_first_tenth_may_leave_the_frame():
    training = [8.0, 5.0, *(2.0 - 0.01 * at for at in range(40))]
    low, high = loss_limits(training, [2.4])
    assert low < min(training)
    assert max([*training[4:], 2.4]) < high < 5.0


@pytest.mark.parametrize(
    "lengths", [(0, 128, 256, 512, 2100), (0, 1000, 1024, 3800), (64, 66), (0, 1), tuple(range(0, 2000, 100))]
)
def test_labels_of_memory_lengths_do_not_touch(lengths):
    figure = Figure(figsize=(4.2, 3.2), layout="constrained")
    axes = figure.add_subplot()
    plots.draw_memory_curve(axes, rows(lengths=lengths), "byte")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for labels in (
        axes.get_xticklabels(),
        sorted(axes.texts, key=lambda note: note.get_window_extent(canvas.get_renderer()).x0),
    ):
        boxes = [label.get_window_extent(canvas.get_renderer()) for label in labels]
        assert boxes
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert axes.get_xticks()[-1] == max(lengths)


@pytest.mark.parametrize("norm", [0.3, 5.0])
def test_the_label_of_the_clip_lies_on_no_line(norm):
    train: list[Any] = [{**event, "grad_norm": norm} for event in lines((10, 20, 30))]
    plot = schedule_figure(train, clip=1.0)
    figure = Figure(figsize=(plots.WIDTH, plot.height), layout="constrained")
    plot.draw(figure)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    legend = figure.axes[1].get_legend()
    assert legend is not None
    label = legend.get_window_extent(canvas.get_renderer())
    assert label.y0 >= figure.axes[1].get_window_extent().y1 - 1
    assert label.y1 <= figure.axes[0].get_window_extent().y0


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_curve_as_a_file_is_the_same_each_time(tmp_path, ending):
    first, second = tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"
    for path in (first, second):
        save_memory_curve(rows(), path)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert sorted(path.name for path in tmp_path.iterdir()) == [first.name, second.name]


def test_the_curve_as_svg_stands_alone(tmp_path):
    save_memory_curve(rows(), tmp_path / "curve.svg")
    text = (tmp_path / "curve.svg").read_text()
    assert "var(--" not in text
    assert "stdlib, test split, 640,400 targets, step-00004000" in texts(text)
    save_memory_curve([row | {"temperature": 1.5, "dtype": "bfloat16"} for row in rows()], tmp_path / "curve.svg")
    assert "temperature 1.5, computed in bfloat16" in texts((tmp_path / "curve.svg").read_text())


@pytest.mark.parametrize(
    ("name", "shown"), [("a$b$_c {x", "a$b$_c {x"), ("<a>&b", "<a>&b"), ("a\x00b\udcff\u202ec", r"a\x00b\udcff\u202ec")]
)
def test_a_name_is_neither_formula_nor_markup(tmp_path, name, shown):
    named = [row | {"corpus": name} for row in rows()]
    for ending in ("svg", "png"):
        save_memory_curve(named, tmp_path / f"curve.{ending}")
    assert f"{shown}, test split, 640,400 targets, step-00004000" in texts((tmp_path / "curve.svg").read_text())


def test_a_curve_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "curve.svg"
    path.write_text("old")

    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        save_memory_curve(rows(), path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("curve.svg", "old")]


def test_settings_of_the_users_neither_come_in_nor_are_changed():
    plain = memory_figure(rows(), "byte").embedded()
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "black", "svg.fonttype": "path"}):
        before = dict(mpl.rcParams)
        assert memory_figure(rows(), "byte").embedded() == plain
        assert dict(mpl.rcParams) == before


def test_no_global_figures_are_used():
    code = (
        "import sys; from txl.reporting import plots; "
        "plots.memory_figure([dict(mem_len=m, nll=1.0 + m) for m in (0, 1)], 'byte'); "
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
