"""Figures about context: their text, their curves, and names that could break a figure."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

import numpy as np
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from txl.reporting.context_figures import gains_plot, length_plot, steps_plot

LENGTHS: tuple[int, ...] = (8, 16, 24)
NAMES = ("xl", "_hidden $x$ <b>", "third")
POINTS = {name: [(length, 9.0 - at - length / 8) for length in LENGTHS] for at, name in enumerate(NAMES)}
GAINS: dict[str, dict[tuple[int, int], float]] = {
    name: {pair: at + pair[0] for pair in itertools.combinations(LENGTHS, 2)} for at, name in enumerate(NAMES)
}


def drawn(plot) -> Figure:
    figure = Figure()
    plot.draw(figure)
    return figure


def test_figure_4_has_a_line_a_model():
    figure = drawn(length_plot(POINTS, "p", "context length", "perplexity per word"))
    lines = figure.axes[0].get_lines()
    assert [list(map(float, np.asarray(line.get_ydata()))) for line in lines] == [
        [value for _, value in POINTS[name]] for name in NAMES
    ]
    assert [text.get_text().lstrip("\u200b").replace("\\", "") for text in figure.legends[0].get_texts()] == list(NAMES)


def test_steps_show_the_threshold():
    figure = drawn(steps_plot({name: [(8, 0.2), (16, -0.1)] for name in NAMES}, 0.01, "s", "steps"))
    assert np.asarray(figure.axes[0].get_lines()[-1].get_ydata()).tolist() == [0.01, 0.01]
    assert [text.get_text() for text in figure.axes[0].texts] == ["threshold 1%"]


def test_figure_3_has_short_contexts_up_and_long_ones_to_the_right():
    figure = drawn(gains_plot(GAINS, "g", "gains"))
    meshes = [mesh for axes in figure.axes for mesh in axes.collections if isinstance(mesh, QuadMesh)]
    assert len(meshes) == len(NAMES)
    for at, mesh in enumerate(meshes):
        np.testing.assert_array_equal(
            np.ma.filled(np.ma.asarray(mesh.get_array()), np.nan), [[at + 8, at + 8], [np.nan, at + 16]]
        )
        assert mesh.get_clim() == (0, 18)  # one scale for all models


def test_they_stand_in_a_page_and_in_files(tmp_path):
    for plot in (
        length_plot(POINTS, "p", "context length", "perplexity"),
        steps_plot(POINTS, 0.01, "s", "steps"),
        gains_plot(GAINS, "g", "gains"),
    ):
        root = ElementTree.fromstring(plot.embedded())
        assert "_hidden $x$ <b>" in "".join(root.itertext())
        assert plot.title in (root.get("aria-label") or "")
        for ending in ("svg", "png"):
            plot.save(tmp_path / f"{plot.name}.{ending}")
            assert (tmp_path / f"{plot.name}.{ending}").stat().st_size > 1000
