"""Pictures of the documentation agree with the records in `results/`; a layer reaches one window less one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("benchmarks", reason="needs benchmarks/, which only the repository contains")
from benchmarks import pictures, reach, tables_page

from txl.config import TransformerXLConfig
from txl.models.transformer_xl import TransformerXL

ROOT = Path(__file__).parents[2]


def test_pictures_are_what_the_records_give():
    wrong = pictures.check_pictures(ROOT / "results", ROOT / "docs" / "images")
    assert not wrong, "run python -m benchmarks.pictures"


def test_tables_and_plots_are_what_the_records_give(tmp_path):
    assert not tables_page.check(ROOT / "results"), "run python -m benchmarks.tables_page"
    shutil.copytree(ROOT / "results", tmp_path / "results")
    record = tmp_path / "results" / "reproduce-table7-ptb.json"
    record.write_text(record.read_text().replace('"quality": [', '"quality": [1.5, '))
    assert tables_page.check(tmp_path / "results") == ["table7.svg"]
    record.write_text(re.sub('"outcome": "[a-z ]+"', '"outcome": "other"', record.read_text()))
    assert tables_page.check(tmp_path / "results") == ["README.md", "table7.svg"]
    record = tmp_path / "results" / "reproduce-table8-ptb.json"
    record.write_text(record.read_text().replace('"25": [', '"25": [4.0, ', 1))  # one more seed of the first row
    assert tables_page.check(tmp_path / "results") == ["README.md", "table7.svg", "figure4.svg"]
    tables_page.write(tmp_path / "results")
    assert tables_page.check(tmp_path / "results") == []


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        (("trained", "trained"), "no row made all steps"),
        (("hit the cap", "trained"), "`a` made all steps"),
        (("hit the cap", "hit the cap"), "all rows made all steps"),
        (("hit the cap, 1 of 2 seeds", "hit the cap"), "all rows made all steps"),
        (("hit the cap", "trained", "hit the cap"), "all rows but `b` made all steps"),
    ],
)
def test_a_table_says_which_rows_came_to_the_cap(statuses, said):
    rows = [
        {"row": key, "status": "done", "shown": {"status": each}, "seeds": {"1": {}}}
        for key, each in zip("abc", statuses, strict=False)
    ]
    scale = {"until_converged": {"patience": 4}, "steps": 4000, "eval_tokens": 100}
    output = {"what": "table7", "corpus": "ptb", "unit": "word", "seeds": 1, "scale": scale, "rows": rows}
    assert f"or 4,000 steps are made ({said}); 1 seed; 100 targets" in tables_page.budget(output)
    for row in rows[1:]:
        row["seeds"]["2"] = {}
    assert "; 2 seeds, but 1 of each of `a`; 100 targets" in tables_page.budget(output | {"seeds": 2})


def test_a_table_says_what_a_run_took_and_which_rates_were_tried():
    def tried(rate, nll):
        return {"factor": rate / 1e-3, "learning_rate": rate, "nll": nll, "tokens": 10, "seconds": 1.0}

    rates = {
        "recipe": "lstm-adam-0.001", "table": "table1", "row": "a", "steps": 800,
        "tried": [tried(1e-3, 5.0), tried(2e-3, 4.9)],
        "whole": [tried(2e-3, 4.7), tried(1e-3, 4.6)], "factor": 1.0, "at_edge": False,
    }  # fmt: skip
    runs = {"1": {"rates": rates, "training_seconds": 90, "tokens": 10**6}, "2": {"training_seconds": 150, "tokens": 1}}
    output = {"rows": [{"row": "a", "seeds": runs}, {"row": "b", "seeds": {}}]}
    [line] = tables_page.spent(output)
    assert line.startswith("A run took 1.5 to 2.5 minutes and up to 1.0 million tokens. Learning rates, ")
    assert (
        ": lstm 0.001 (800 steps of `a` of table1: 0.001 5.000, 0.002 4.900; to the end: 0.002 4.700, 0.001 4.600).\n"
        in line
    )
    del runs["1"]["rates"]
    assert tables_page.spent(output) == []


def test_pictures_follow_dark_mode(tmp_path):
    pictures.write_pictures(ROOT / "results", tmp_path)
    assert pictures.check_pictures(ROOT / "results", tmp_path) == []
    assert all("prefers-color-scheme: dark" in path.read_text() for path in tmp_path.glob("*.svg"))


def test_a_layer_reaches_a_window_less_one():
    shape = TransformerXLConfig(n_layer=3, d_model=16, n_head=2, d_head=8, d_inner=16, mem_len=8, window=9, dropout=0.0)
    torch.manual_seed(0)
    model = TransformerXL(shape, 256).eval()
    for parameter in model.parameters():  # large enough for every term of the attention to matter
        torch.nn.init.normal_(parameter, 0.0, 0.15)
    found = reach.measure(model, torch.randint(256, (200,)), window=5, targets=2)
    assert found["farthest"] == [12, 8, 4]
    assert all(max(row) == 1 for row in found["relative"])
