"""Continuing in an output folder, and refusals: another text, times of another machine, unfinished models."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tests.lab.paper.conftest import experiment, files, gathered

import txl_lab.paper.experiment as experiment_module
from txl.config import DataConfig
from txl.errors import UserError
from txl_lab.paper.catalogue import definitions
from txl_lab.paper.measurements import Quality


@pytest.mark.parametrize("name", ["table5", "table7"])
def test_a_corpus_whose_text_has_changed_is_refused(name, micro, story, tmp_path, data_dir):
    rows = tuple(row for row in definitions()[name].rows if row.trained)[-1:]
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_bytes(story.read_bytes())
    data = DataConfig(corpus=str(text), unit="word")
    experiment(name, micro, data, out, data_dir, seeds=1, rows=rows).run()
    before = files(out)
    text.write_bytes(story.read_bytes() + b"\nThe end.\n")
    for seeds in (1, 2):
        with pytest.raises(UserError, match=r"text [0-9a-f]{64} -> [0-9a-f]{64}"):
            experiment(name, micro, data, out, data_dir, seeds=seeds, rows=rows).run()
    assert files(out) == before


def test_a_folder_that_was_moved_goes_on(micro, words, tmp_path, data_dir):
    rows = definitions()["table7"].rows[:1]
    first = experiment("table7", micro, words, tmp_path / "out", data_dir, seeds=1, rows=rows).run()[0]
    (tmp_path / "out").rename(tmp_path / "moved")
    again = experiment("table7", micro, words, tmp_path / "moved", data_dir, seeds=2, rows=rows).run()[0]
    assert again.by_seed[1] == first.by_seed[1]
    assert sorted(again.by_seed) == [1, 2]


def test_times_of_another_machine_are_refused(micro, tmp_path, data_dir, monkeypatch):
    out = tmp_path / "out"
    experiment("table9", micro, DataConfig(corpus="enwik8"), out, data_dir, seeds=1).run()
    before = files(out)
    again = experiment("table9", micro, DataConfig(corpus="enwik8"), out, data_dir, seeds=1)
    again.run()
    assert files(out) == before
    there = experiment_module.describe_hardware("cpu")
    monkeypatch.setattr(experiment_module, "describe_hardware", lambda device: there | {"cpu": "another"})
    with pytest.raises(UserError, match=r"hardware\.cpu .* -> another"):
        again.run()


def test_a_cache_waits_for_a_finished_model(micro, words, tmp_path, data_dir, monkeypatch):
    def broken(*_):
        raise RuntimeError("no")

    rows = tuple(definitions()["table1"].row(key) for key in ("lstm", "xl-standard", "lstm-cache"))
    it = experiment("table1", micro, words, tmp_path / "out", data_dir, seeds=1, rows=rows)
    monkeypatch.setattr(Quality, "measure", broken)
    failed = {each.row.key: each.reason for each in gathered(it, it.run()).failed}
    assert failed["lstm-cache"] == "seed 1: lstm has no finished model of this seed, which the cache needs"
    monkeypatch.undo()
    assert gathered(it, it.run()).failed == []
    # A cache row with another dropout is another configuration than the stored result of the cache.
    other = dataclasses.replace(rows[2], overrides={**(rows[2].overrides or {}), "model.dropout": "0.3"})
    (tmp_path / "out" / "results" / "lstm-seed1.json").unlink()
    with pytest.raises(UserError, match=r"lstm-cache-seed1.json: of another configuration: model.dropout"):
        experiment("table1", micro, words, tmp_path / "out", data_dir, seeds=1, rows=(*rows[:2], other)).run()


@pytest.mark.parametrize(("name", "split"), [("samples", "test"), ("figure5", "valid")])
def test_text_too_short_for_a_command_is_refused_before_training(name, split, micro, tmp_path, data_dir):
    folder = tmp_path / "text"
    folder.mkdir()
    for each, sentences in (("train", 200), ("valid", 40), ("test", 40)):
        (folder / f"{each}.txt").write_text("the cat sat .\n" * sentences)
    (folder / f"{split}.txt").write_text("the cat sat .\n" * 3)
    run = dataclasses.replace(micro, eval_tokens=None)
    with pytest.raises(UserError, match=rf"the {split} split of .* has 1\d tokens, but {name} reads"):
        experiment(name, run, DataConfig(corpus=str(folder), unit="word"), tmp_path / "out", data_dir).run()
    assert not (tmp_path / "out" / "runs").exists()


def test_too_few_tokens_for_a_full_memory_are_refused_before_training(micro, words, tmp_path, data_dir):
    few = dataclasses.replace(micro, eval_tokens=16)
    with pytest.raises(UserError) as caught:
        experiment("figure5", few, words, tmp_path / "out", data_dir).run()
    assert (caught.value.field, caught.value.value, caught.value.expected) == ("eval_tokens", 16, "17 or more")
    enough = dataclasses.replace(micro, eval_tokens=17)
    it = experiment("figure5", enough, words, tmp_path / "out", data_dir, seeds=1)
    outcome = gathered(it, it.run())
    assert outcome.failed == []
    (name,) = (name for name in outcome.rows[0].by_seed[1]["files"] if name.endswith("attention.json"))
    assert json.loads((it.out / name).read_text())["settings"]["split"] == "valid"


def test_a_training_split_too_short_for_the_lanes_is_refused(micro, tmp_path, data_dir):
    folder = tmp_path / "text"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text("the cat sat .\n" * 3)
    data = DataConfig(corpus=str(folder), unit="word")
    with pytest.raises(UserError, match=r"no row of table5 can be trained; .*: the train split has \d+ tokens"):
        experiment("table5", micro, data, tmp_path / "out", data_dir).run()
    assert not (tmp_path / "out" / "runs").exists()


def test_the_papers_threshold_is_judged_of_its_own_corpus_alone():
    from txl_lab.paper.scales import PAPER
    from txl_lab.paper.schema import Outcome

    definition = definitions()["table2"]
    values = {row.key: {"quality": [0.5, 0.51]} for row in definition.rows}

    def threshold(corpus, scale=PAPER, changed_text=()):
        outcome = Outcome(definition, scale, 2, corpus, "byte", [], values, changed_text=changed_text)
        return next(verdict.outcome for claim, verdict in outcome.verdicts() if claim.key == "C1, threshold")

    assert (threshold("enwik8"), threshold("other.txt")) == ("holds", "not judged")
    assert threshold("enwik8", PAPER.changed(eval_tokens=2000)) == "not judged"
    assert threshold("enwik8", changed_text=("whole has 5 bytes",)) == "not judged"
