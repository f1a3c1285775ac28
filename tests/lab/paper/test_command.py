"""The command `txl reproduce`, with its options and messages."""

from __future__ import annotations

import json

import pytest

import txl_lab.paper.scales as scales
from txl.cli import main
from txl.config import DataConfig
from txl.presets import presets
from txl_lab.paper.catalogue import find_definition
from txl_lab.paper.configuring import configure, estimated_segment
from txl_lab.paper.measurements import Quality


@pytest.fixture
def quick(micro, monkeypatch):
    monkeypatch.setitem(scales.SCALES, "micro", micro)
    return ["--scale", "micro"]


def lines(text):
    return [line for line in text.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["table11"], "unknown table or figure 'table11'; did you mean"),
        (["everything"], "expected one of table1, table2"),
        (["table6", "--scale", "huge"], "unknown scale 'huge'; expected one of tiny, small, paper"),
        (["table6", "--seeds", "0"], "--seeds is 0; expected 1 or more"),
        (["table6", "--steps", "0"], "--steps is 0; expected 1 or more"),
        (["table6", "--eval-tokens", "0"], "--eval-tokens is 0; expected 2 or more"),
        (["table6", "--dtype", "float16"], "float16"),
        (["table6", "--scale", "paper", "--steps", "9"], "trains the published presets as they are"),
        (["table6", "--corpus", "ptb", "--data.corpus", "ptb"], "both given"),
        (["table6", "--corpus", "wikitxt-2", "--quiet"], "did you mean wikitext-2"),
        (["table6", "--reuse", "table6.json"], "copy the record to table6.json in an empty folder"),
        (["table6", "--data.unit", "syllable"], "expected one of byte, char, word, bpe"),
    ],
)
def test_mistakes_are_refused_in_one_line_and_write_nothing(words, said, tmp_path, data_dir, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = [] if "--dry-run" in words else ["--out", str(tmp_path / "out")]
    assert main(["reproduce", *words, *out, "--data-dir", str(data_dir)]) == 2
    (line,) = lines(capsys.readouterr().err)
    assert said in line
    assert not (tmp_path / "out" / "runs").exists()


def test_a_corpus_that_does_not_exist_leaves_no_folder(tmp_path, data_dir, capsys):
    words = ["reproduce", "table7", "--corpus", "nowhere.txt", "--out", str(tmp_path / "out")]
    assert main([*words, "--data-dir", str(data_dir)]) == 2
    assert len(lines(capsys.readouterr().err)) == 1
    assert not (tmp_path / "out").exists()


def test_a_table_from_the_command_line_goes_on_where_it_is_called_again(quick, story, tmp_path, data_dir, capsys):
    words = ["reproduce", "table7", *quick, "--corpus", str(story), "--out", str(tmp_path / "out")]
    words += ["--data-dir", str(data_dir), "--device", "cpu"]
    assert main([*words, "--seeds", "1", "--json"]) == 0, capsys.readouterr().err
    record = json.loads(capsys.readouterr().out)
    assert record["seeds"] == 1
    assert [row["row"] for row in record["rows"]] == ["xl", "xl-shaw", "no-recurrence"]
    assert main([*words, "--quiet"]) == 0
    shown = capsys.readouterr()
    assert "Table 7: ablation study on One Billion Word, scale micro, 2 seeds" in shown.out
    assert "| xl | Ours | 25.2 |" in shown.out
    assert "C7: not judged" in shown.out
    assert main([*words, "--corpus", "stdlib", "--quiet"]) == 2
    assert "data.corpus" in capsys.readouterr().err


def test_the_page_of_what_is_finished(quick, story, tmp_path, data_dir, capsys, monkeypatch):
    from txl_lab.paper.experiment import Experiment

    out = tmp_path / "out"
    words = ["reproduce", "table7", *quick, "--corpus", str(story), "--out", str(out), "--quiet", "--json"]
    words += ["--data-dir", str(data_dir), "--device", "cpu", "--seeds", "2"]
    assert main([*words, "--so-far"]) == 2
    assert "--so-far: " in capsys.readouterr().err
    assert not out.exists()
    assert main([*words, "--so-far", "--dry-run"]) == 2
    assert main(words) == 0
    whole = {row["row"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    for missing in ("xl-shaw-seed2", "no-recurrence-seed1", "no-recurrence-seed2"):
        (out / "results" / f"{missing}.json").unlink()
    monkeypatch.setattr(Experiment, "_measure", lambda *_: pytest.fail("something was trained"))
    assert main([*words, "--so-far"]) == 0
    rows = {row["row"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["xl"] == whole["xl"]
    assert rows["xl-shaw"]["values"]["quality"] == whole["xl-shaw"]["values"]["quality"][:1]
    assert rows["xl-shaw"]["shown"]["status"] == "trained, 1 of 2 seeds"
    assert (rows["no-recurrence"]["status"], rows["no-recurrence"]["seeds"]) == ("not finished", {})
    page = (out / "table7.html").read_text(encoding="utf-8")
    assert "trained, 1 of 2 seeds" in page
    assert "not finished" in page


def test_a_row_that_fails_gives_exit_code_1(quick, story, tmp_path, data_dir, capsys, monkeypatch):
    def broken(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(Quality, "measure", broken)
    words = ["reproduce", "table7", *quick, "--corpus", str(story), "--out", str(tmp_path / "out"), "--seeds", "1"]
    assert main([*words, "--quiet", "--data-dir", str(data_dir)]) == 1
    (line,) = [line for line in lines(capsys.readouterr().err) if "rows failed" in line]
    assert "the same command tries them again" in line
    assert (tmp_path / "out" / "table7.html").is_file()


def test_the_plan_of_the_published_presets(tmp_path, data_dir, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "table2", "--scale", "paper", "--dry-run", "--json", "--data-dir", str(data_dir)]
    assert main(words) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["xl-12L"]["preset"] == "enwik8-12L"
    assert rows["xl-12L"]["parameters"] == 41_055_436
    train = presets()["enwik8-12L"].make().train
    assert rows["xl-12L"]["steps"] == train.steps
    assert rows["xl-12L"]["tokens"] == train.steps * train.batch_size * train.segment
    assert rows["krause-et-al-2016-large-mlstm"]["status"] == "published only"
    assert list(tmp_path.iterdir()) == []


def test_the_plan_is_a_table(story, data_dir, capsys):
    assert main(["reproduce", "table7", "--dry-run", "--corpus", str(story), "--data-dir", str(data_dir)]) == 0
    shown = capsys.readouterr().out
    assert "| xl | Ours |" in shown
    assert "2 seeds" in shown
    assert main(["reproduce", "table9", "--dry-run"]) == 0
    assert "attention length 380" in capsys.readouterr().out


def test_steps_of_one_s_own_scale_the_schedule_and_are_part_of_the_experiment(story, tmp_path, data_dir, capsys):
    words = ["reproduce", "table7", "--corpus", str(story), "--data-dir", str(data_dir), "--device", "cpu"]
    assert main([*words, "--steps", "30", "--dry-run", "--json"]) == 0
    assert {row["steps"] for row in json.loads(capsys.readouterr().out)["rows"]} == {30}
    run = scales.TINY.changed(steps=30).base("word")
    assert (run.train.steps, run.train.warmup_steps, run.train.eval_every) == (30, 15, 7)
    small = scales.SMALL.changed(steps=1000).base("word").train
    assert (small.warmup_steps, small.eval_every, small.average_from) == (200, 250, 750)
    assert scales.TINY.changed(steps=30).to_dict() != scales.TINY.to_dict()


def test_tokens_that_are_evaluated_can_be_chosen():
    fewer, more = scales.TINY.changed(eval_tokens=70), scales.TINY.changed(eval_tokens=10**6)
    assert (fewer.eval_tokens, fewer.targets) == (70, 70)
    assert (more.eval_tokens, more.targets) == (10**6, scales.TINY.targets)
    assert fewer.to_dict() != scales.TINY.to_dict() == scales.TINY.changed(eval_tokens=None).to_dict()


@pytest.mark.parametrize("scale", [scales.TINY, scales.PAPER])
def test_another_arithmetic_is_that_of_every_row_and_part_of_the_experiment(scale):
    definition = find_definition("table6")
    half = scale.changed(dtype="bfloat16")
    runs = [
        configure(definition, row, half, DataConfig(), 10_000, estimated_segment)
        for row in definition.rows
        if row.trained
    ]
    assert {run.train.dtype for run in runs} == {"bfloat16"}
    assert half.to_dict() != scale.to_dict() == scale.changed(dtype=None).to_dict()
    assert "bfloat16" in half.about


def test_models_trained_in_another_arithmetic_have_a_folder_of_their_own(quick, story, tmp_path, data_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "table7", *quick, "--corpus", str(story), "--data-dir", str(data_dir), "--seeds", "1"]
    assert main([*words, "--dtype", "bfloat16", "--device", "cpu", "--quiet"]) == 0
    (page,) = (tmp_path / "runs" / "reproduce").glob("table7-micro-bfloat16-*/table7.json")
    assert {row["config"]["train"]["dtype"] for row in json.loads(page.read_text())["rows"]} == {"bfloat16"}


def test_table_9_is_timed_in_the_arithmetic_that_is_asked_for(quick, tmp_path, data_dir, capsys):
    words = ["reproduce", "table9", *quick, "--dtype", "bfloat16", "--seeds", "1", "--json"]
    assert main([*words, "--out", str(tmp_path / "out"), "--data-dir", str(data_dir), "--device", "cpu"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["seeds"]["1"]["dtype"] for row in rows} == {"bfloat16"}
