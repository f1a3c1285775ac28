"""Figures and text of `txl attention` from a record written by hand."""

from __future__ import annotations

import html
import json
import re
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from tests.reporting.fake_run import begun

from txl.analysis.attention_record import FORMAT
from txl.errors import UserError
from txl.reporting import attention_figures
from txl.reporting.attention_figures import HEAT, average_figure, close_figure
from txl.reporting.attention_page import attention_page, attention_section, read_record
from txl.reporting.context_figures import gains_plot
from txl.reporting.plots import LIGHT, WIDTH
from txl.reporting.report import write_report

N_KEY = 40
ONE_LARGE = np.array([[0.9 if key == 7 else 0.1 / (N_KEY - 1) for key in range(N_KEY)]])
"""Weights of which one is far beyond the others."""
WORDS = [" the", " law", "\n", "once", " again", " 's", "", "é", " <unk>", "\t"]


def a_record(n_row=4, min_keys=N_KEY, texts=None, marked=(), following=" risk", weights=None):
    """Return a record of two heads of one layer with equal weights for all 40 keys, and a close-up of head 2."""
    even = [1 / N_KEY] * N_KEY
    heads = [
        {"layer": 1, "head": head, "mean_distance": 19.5, "share_beyond": 0.5, "effective_keys": 40.0, "average": even}
        for head in (1, 2)
    ]
    n_column = N_KEY + n_row - 1
    rows = np.zeros((n_row, n_column))
    for row in range(n_row):
        rows[row, row : row + N_KEY] = 1 / N_KEY
    texts = texts or [WORDS[at % len(WORDS)] for at in range(n_column)]
    position = {
        "position": 5000, "first": 5000 - n_column + 1, "keys": [N_KEY] * n_row, "texts": texts, "next": following,
        "heads": [{"layer": 1, "head": 2, "weights": (rows if weights is None else weights).tolist(), "marked": marked}],
    }  # fmt: skip
    return {
        "format": 2,
        "settings": {
            "corpus": "/some/where/story.txt", "split": "valid", "unit": "word", "checkpoint": "step-00000012",
            "mem_len": 40, "window": 40, "clamp_len": None, "segment": 8, "batch_size": 1, "tokens": 6000,
            "queries": 5000, "min_keys": min_keys, "far": 20,
        },
        "heads": heads,
        "even": {"mean_distance": 19.5, "share_beyond": 0.5, "effective_keys": 40.0},
        "farthest": [[1, 2]],
        "terms": {},
        "positions": [position],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["settings", "heads", "even", "farthest", "terms", "positions"])
def test_a_record_changed_by_hand_leaves_the_rest_of_the_report(name, tmp_path):
    run = begun(tmp_path / "run")
    (run.path / "attention").mkdir()
    for value in ([], 5):
        (run.path / "attention" / "attention.json").write_text(json.dumps(a_record() | {name: value}))
        assert "Hardware, software, commands" in write_report(run.path).read_text(encoding="utf-8")


def drawn(plot):
    figure = Figure(figsize=(WIDTH, plot.height), layout="constrained")
    plot.draw(figure)
    FigureCanvasAgg(figure).draw()
    return figure


def close_up(weights):
    """Return the image of a close-up of these weights, and its values."""
    image = drawn(close_figure(a_record(len(weights), weights=weights), 0, 0)).axes[0].images[0]
    return image, np.ma.asarray(image.get_array())


def text_of(record):
    (text,) = re.findall(r'<pre class="attended">(.*?)</pre>', attention_section(record), flags=re.DOTALL)
    return text


@pytest.mark.parametrize("draw", [average_figure, lambda record: close_figure(record, 0, 0)])
def test_even_attention_is_drawn_light(draw):
    """Dark colours mean that a head attends to few keys; equal attention to all keys must not be dark."""
    image = drawn(draw(a_record())).axes[0].images[0]
    shade = np.ma.compressed(image.norm(np.ma.asarray(image.get_array())))
    assert shade.min() > 0.1
    assert shade.max() < 0.35


def test_the_scale_of_a_close_up_holds_all_but_the_largest_weights():
    image, _ = close_up(ONE_LARGE)
    assert image.norm.vmax == pytest.approx(np.quantile(ONE_LARGE, 0.995))
    assert image.norm.vmin == 0


def test_what_a_token_does_not_see_is_masked_and_what_it_ignores_is_not():
    weights = np.zeros((2, N_KEY + 1))
    weights[0, 3] = weights[1, 4] = 1
    expected = np.zeros((2, N_KEY + 1), dtype=bool)
    expected[0, -1] = expected[1, 0] = True
    np.testing.assert_array_equal(np.ma.getmaskarray(close_up(weights)[1]), expected)


def test_no_end_of_the_scale_changes_its_colour_in_dark_mode():
    red, green, blue, _ = HEAT.get_bad()
    assert not {to_hex(each) for each in (HEAT(1.0), (red, green, blue))} & set(LIGHT.values())


def test_heat_maps_are_selected_by_the_rules_of_dark_mode():
    record = a_record(1, weights=ONE_LARGE)  # the end of the scale is then drawn with a triangle
    record["heads"] += [head | {"layer": 2} for head in record["heads"]]  # draws a line between the layers
    drawn = attention_section(record)
    assert 'image, [id*="QuadMesh"], [id$="heat-end"] { filter: invert' in attention_page(record, "a")
    assert re.search(r'<g id="[^"]*-heat-end">', drawn)
    assert "<image" in drawn
    rest = re.sub(r'<g id="[^"]*-heat-end">.*?</g>', "", drawn, flags=re.DOTALL)
    assert set(re.findall(r'style="[^"]*(?:fill|stroke): (#[0-9a-f]{6})', rest)) <= set(LIGHT.values())


def test_the_gains_of_longer_contexts_are_selected_too():
    plot = gains_plot({"A": {(1, 2): 0.5, (1, 3): 0.7, (2, 3): 1.0}}, "gains", "Gains").embedded()
    assert re.search(r'id="[^"]*QuadMesh', plot)
    assert f'style="fill: {LIGHT["accent"]}' not in plot


@pytest.mark.parametrize(
    ("text", "label"), [("\x1b[31m", "\\x1b[31m"), ("a\x00b", "a\\x00b"), (" of", "of"), ("\n", "⏎")]
)
def test_labels_have_no_characters_that_xml_forbids(text, label):
    assert attention_figures.label(text) == label


def test_a_record_without_a_part_is_damaged(tmp_path):
    (tmp_path / "attention.json").write_text(json.dumps({"format": FORMAT, "settings": {}, "heads": []}))
    with pytest.raises(UserError, match=r"attention.json: damaged \(no even\); run txl attention again"):
        read_record(tmp_path / "attention.json")


@pytest.mark.parametrize("n_row", [1, 16, 48, 49, 130])
def test_labels_of_rows_do_not_touch(n_row):
    figure = drawn(close_figure(a_record(n_row), 0, 0))
    labels = [label for label in figure.axes[0].get_yticklabels() if label.get_text()]
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 + 1 for low, high in pairwise(boxes))
    assert figure.axes[0].get_yticks()[-1] == n_row - 1


@pytest.mark.parametrize(
    ("following", "box"), [(" risk", "␣risk"), ("\n", "⏎"), ("e", "e"), ("<", "&lt;"), ("\x07", r"\x07")]
)
def test_the_text_that_a_token_sees_is_marked_and_what_follows_stands_in_a_box(following, box):
    texts = ["x"] * 37 + [" of", "\n", " law", "<", " be", " zero"]
    text = text_of(a_record(4, texts=texts, marked=[37, 38, 40], following=following))
    marks = "<mark> of</mark><mark>⏎\n</mark> law<mark>&lt;</mark> be"
    target = '<span class="target"> zero</span>'
    assert text.startswith(f"{'x' * 34}{marks}{target}")
    assert re.sub("</?span[^>]*>", "", text).endswith(box)


@pytest.mark.parametrize(
    ("min_keys", "said"),
    [
        (N_KEY, None),
        (30, "Beyond the dotted line not every token"),
        (1, "Fewer tokens have a key at greater distances"),
    ],
)
def test_distances_that_not_every_token_reaches_are_told(min_keys, said):
    record = a_record(min_keys=min_keys)
    lines = drawn(average_figure(record)).axes[0].lines
    assert [np.asarray(line.get_xdata())[0] for line in lines] == ([-29.5] if min_keys == 30 else [])
    page = attention_section(record)
    assert ("weights decrease there for every head" in page) == (said is not None)
    assert said is None or said in page


def test_the_page_has_a_heading_and_names_the_corpus_by_its_last_part():
    page = attention_page(a_record(), "runs/<mine>")
    assert "<h1>Attention of runs/&lt;mine&gt;</h1>" in page
    assert "valid split of story.txt" in html.unescape(page)
    assert "/some/where" not in page
