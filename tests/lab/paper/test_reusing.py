"""Models in the folder of another table are copied; all other models are trained."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tests.lab.paper.conftest import experiment, files

import txl_lab.paper.one_row as module
from txl.errors import UserError
from txl.runs.directory import RunDirectory
from txl_lab.paper.catalogue import definitions
from txl_lab.paper.converging import UntilConverged

RULES = UntilConverged(patience=2, evaluations=4, factors=(1.0,), furthest=1.0, tuning_share=0.5, halvings=0)


def rows(table, *keys):
    return tuple(definitions()[table].row(key) for key in keys)


@pytest.fixture
def source(micro, words, tmp_path, data_dir):
    """Output folder of Table 8 with models that Table 6 also has."""
    wanted = rows("table8", "xl-128M", "no-recurrence", "xl-shaw")
    it = experiment("table8", micro, words, tmp_path / "table8", data_dir, seeds=1, rows=wanted)
    assert [each.status for each in it.run()] == ["done"] * 3
    return it.out


def table6(micro, words, tmp_path, data_dir, *keys, **options):
    keys = keys or ("xl", "no-recurrence", "xl-half")
    it = experiment("table6", micro, words, tmp_path / "table6", data_dir, seeds=1, rows=rows("table6", *keys))
    return dataclasses.replace(it, **options)


def trained(monkeypatch):
    """Return a list that collects the names of runs that train at least one step."""
    made = []
    real = module.RowMaker.fit

    def fit(self, run, directory):
        before = RunDirectory(directory).newest()
        outcome = real(self, run, directory)
        made.extend([run.name] if RunDirectory(directory).newest() != before else [])
        return outcome

    monkeypatch.setattr(module.RowMaker, "fit", fit)
    return made


def test_the_same_models_are_copied_and_give_the_same_results(micro, words, tmp_path, data_dir, source, monkeypatch):
    before, made = files(source), trained(monkeypatch)
    it = table6(micro, words, tmp_path, data_dir, reuse=(source,))
    reused = it.run()
    assert made == ["table6-xl-half"]
    assert files(source) == before
    anew = dataclasses.replace(it, reuse=(), out=tmp_path / "anew").run()
    assert len(made) == 4
    for one, other in zip(reused, anew, strict=True):
        assert one.by_seed[1]["config"] == other.by_seed[1]["config"]
        assert one.by_seed[1]["curve"] == other.by_seed[1]["curve"]
        assert one.by_seed[1]["tokens"] == other.by_seed[1]["tokens"] > 0
    assert RunDirectory(it.out / "runs" / "xl-seed1").config().name == "table6-xl"


def test_seeds_that_the_other_folder_lacks_are_trained(micro, words, tmp_path, data_dir, source, monkeypatch):
    made = trained(monkeypatch)
    table6(micro, words, tmp_path, data_dir, "xl", reuse=(source,), seeds=2).run()
    assert made == ["table6-xl"]
    [second] = (tmp_path / "table6" / "runs" / "xl-seed2").glob("log.jsonl")
    assert '"event": "train"' in second.read_text()


def test_what_is_not_finished_is_trained(micro, words, tmp_path, data_dir, source, monkeypatch):
    (source / "results" / "xl-128M-seed1.json").unlink()
    made = trained(monkeypatch)
    table6(micro, words, tmp_path, data_dir, "xl", "no-recurrence", reuse=(source,)).run()
    assert made == ["table6-xl"]


def test_a_model_is_taken_by_a_table_that_tests_with_another_attention(
    micro, words, tmp_path, data_dir, source, monkeypatch
):
    """Table 1 tests with the attention of training; Table 8 chooses lengths of its own."""
    made = trained(monkeypatch)
    there = RunDirectory(source / "runs" / "xl-128M-seed1").config().eval
    it = experiment("table1", micro, words, tmp_path / "t", data_dir, seeds=1, rows=rows("table1", "xl-standard"))
    [row] = dataclasses.replace(it, reuse=(source,)).run()
    here = RunDirectory(it.out / "runs" / "xl-standard-seed1").config().eval
    assert (made, row.status, there.mem_len, here.mem_len) == ([], "done", 16, 15)
    assert row.by_seed[1]["config"]["eval"]["mem_len"] == 15


def test_a_run_of_another_configuration_or_text_is_not_taken(micro, words, tmp_path, data_dir, source, monkeypatch):
    made = trained(monkeypatch)
    config = source / "runs" / "xl-128M-seed1" / "config.json"
    stored = json.loads(config.read_text())
    stored["train"]["learning_rate"] *= 2
    config.write_text(json.dumps(stored))
    log = source / "runs" / "no-recurrence-seed1" / "log.jsonl"
    identity = RunDirectory(log.parent).trained_on()["identity"]
    log.write_text(log.read_text().replace(identity, "0" * 64))
    table6(micro, words, tmp_path, data_dir, "xl", "no-recurrence", reuse=(source,)).run()
    assert made == ["table6-xl", "table6-no-recurrence"]


def test_sentences_in_random_order_are_another_text(micro, words, tmp_path, data_dir, source, monkeypatch):
    made = trained(monkeypatch)
    it = experiment("table7", micro, words, tmp_path / "table7", data_dir, seeds=1, rows=rows("table7", "xl"))
    with pytest.raises(UserError, match="Tables 4 and 7 have text and segments of their own"):
        dataclasses.replace(it, reuse=(source,)).run()
    it.run()
    with pytest.raises(UserError, match="is of table7; Tables 4 and 7"):
        table6(micro, words, tmp_path, data_dir, "xl", reuse=(it.out,)).run()
    assert made == ["table7-xl"]


def test_what_a_killed_copy_left_is_replaced(micro, words, tmp_path, data_dir, source, monkeypatch):
    made = trained(monkeypatch)
    partial = tmp_path / "table6" / "runs" / "xl-seed1.partial"
    it = table6(micro, words, tmp_path, data_dir, "xl", reuse=(source,))
    real = module.take_run

    def killed(*given):
        partial.mkdir(parents=True)
        (partial / "config.json").write_text("{")
        return real(*given)

    monkeypatch.setattr(module, "take_run", killed)
    assert [each.status for each in it.run()] == ["done"]
    assert (made, partial.exists()) == ([], False)


def test_the_learning_rate_is_taken_too(micro, words, tmp_path, data_dir, monkeypatch):
    scale = dataclasses.replace(micro.with_steps(8), until_converged=RULES)
    first = experiment("table8", scale, words, tmp_path / "table8", data_dir, seeds=1, rows=rows("table8", "xl-128M"))
    [there] = first.run()
    made = trained(monkeypatch)
    [here] = table6(scale, words, tmp_path, data_dir, "xl", reuse=(first.out,)).run()
    assert made == []
    assert here.by_seed[1]["rates"] == there.by_seed[1]["rates"]


def test_folders_of_another_training_are_refused_and_nothing_is_written(
    micro, words, tmp_path, data_dir, source, story
):
    other = tmp_path / "other.txt"
    other.write_text(story.read_text() + "One more line.\n")
    for options, said in (
        ({"scale": micro.with_steps(7)}, r"has models of another training: scale.steps None -> 7"),
        ({"data": dataclasses.replace(words, corpus=str(other))}, r"has models of another training: text "),
        ({"reuse": (tmp_path / "none",)}, "no such file or folder"),
    ):
        with pytest.raises(UserError, match=said):
            table6(micro, words, tmp_path, data_dir, "xl", **({"reuse": (source,)} | options)).run()
        assert not (tmp_path / "table6").exists()


def test_a_table_without_training_is_refused(micro, words, tmp_path, data_dir, source):
    it = experiment("table9", micro, words, tmp_path / "table9", data_dir, seeds=1)
    with pytest.raises(UserError, match="--reuse: table9 trains no models"):
        dataclasses.replace(it, reuse=(source,)).run()
    assert not it.out.exists()
