"""`txl attention` on small runs: the files written, their part of the report, and refusals."""

from __future__ import annotations

import json
import shutil

import pytest
from tests.conftest import options_of, small_run

from txl.cli import main


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def attention(run, data_dir, *words):
    return main(["attention", str(run), "--tokens", "600", "--data-dir", str(data_dir), *words])


@pytest.fixture(scope="module")
def looked_at(trained, data_dir, tmp_path_factory):
    """A run whose attention was measured, with figures and record."""
    run = shutil.copytree(trained, tmp_path_factory.mktemp("attention") / "run")
    assert attention(run, data_dir) == 0
    return run


def test_figures_record_and_report(looked_at):
    run = looked_at
    folder = run / "attention"
    record = json.loads((folder / "attention.json").read_text(encoding="utf-8"))
    assert len(record["heads"]) == 4
    assert set(record["terms"]) == {"a", "b", "d"}
    for row in record["heads"]:
        assert sum(row["average"]) == pytest.approx(1, abs=1e-4)
    shown = record["positions"][0]["heads"]
    assert [[each["layer"], each["head"]] for each in shown] == record["farthest"]
    names = {path.stem for path in folder.glob("*.png")}
    assert names == {path.stem for path in folder.glob("*.svg")}
    assert {"figure5", "figure7"} < names
    assert len(names) == 2 + len(shown)
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Where the heads look" in page
    assert "<mark>" in page


def test_another_folder_and_heads(run, data_dir, tmp_path, capsys):
    out = tmp_path / "elsewhere"
    assert attention(run, data_dir, "--out", str(out), "--heads", "2:1", "--no-terms", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert [(each["layer"], each["head"]) for each in record["positions"][0]["heads"]] == [(2, 1)]
    assert not (out / "figure7.png").exists()
    assert not (run / "attention").exists()


def train(out, story, data_dir, **options):
    run = small_run(str(story), **options)
    preset = {"vanilla": "enwik8-vanilla-small", "recurrent": "ptb-lstm-small"}.get(run.model.family, "stdlib-tiny")
    assert main(["train", preset, "--out", str(out), "--data-dir", str(data_dir), *options_of(run)]) == 0
    return out


def test_the_vanilla_transformer_has_no_terms(story, data_dir, tmp_path, capsys):
    options = {"model.encoding": "learned", "model.mem_len": "0", "eval.mem_len": "0", "eval.window": "none"}
    run = train(tmp_path / "vanilla", story, data_dir, **options)
    assert attention(run, data_dir, "--terms") == 2
    assert "positions are absolute" in capsys.readouterr().err
    assert not (run / "attention").exists()
    assert attention(run, data_dir) == 0
    assert "figures 5 and 6" in capsys.readouterr().out


def test_a_model_without_attention_is_refused_in_one_line(story, data_dir, tmp_path, capsys):
    options = {"model.kind": "lstm", "model.mem_len": "0", "eval.mem_len": "0", "eval.window": "none"}
    options |= {"model.n_head": "8", "model.d_head": "64", "model.d_inner": "2048", "model.dropatt": "0.0"}
    run = train(tmp_path / "lstm", story, data_dir, **options)
    capsys.readouterr()
    assert attention(run, data_dir) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("txl: error")
    assert "has no attention to look at; expected a Transformer" in line
    assert not (run / "attention").exists()


def test_a_record_of_another_version_is_told_in_the_report(looked_at, tmp_path):
    run = shutil.copytree(looked_at, tmp_path / "run")
    path = run / "attention" / "attention.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"format": 1}), encoding="utf-8")
    assert main(["report", str(run)]) == 0
    assert "of format 1; run txl attention again" in (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--heads", "3:1"], "--heads is '3:1'; expected "),
        (["--heads", "1:5"], "layers 1 to 2 of 2 heads each"),
        (["--heads", "1:1", "--layers", "2"], "--heads is '1:1'"),
        (["--layers", "9"], "--layers is 9"),
        (["--checkpoint", "77"], "checkpoint is 77, but "),
        (["--tokens", "1"], "--tokens is 1"),
        (["--far", "999"], "--far is 999; expected 1 to"),
        (["--out", "FILE"], ": a file; expected a folder"),
        (["--out", "FILE/below"], "cannot be written (Not a directory)"),
        (["--out", "/proc/attention"], "cannot be written"),
    ],
)
def test_refusals_are_one_line_and_come_before_averaging(run, data_dir, tmp_path, monkeypatch, capsys, words, message):
    (tmp_path / "FILE").write_text("")
    monkeypatch.setattr("txl.evaluation.stream.Lanes.segments", None)  # called first when a text is read
    assert attention(run, data_dir, *[word.replace("FILE", str(tmp_path / "FILE")) for word in words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("txl: error")]
    assert message in line
    assert not (run / "attention").exists()
