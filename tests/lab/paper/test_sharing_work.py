"""Processes of one reproduction: each works on free parts, and all report the results of all processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.lab.paper.conftest import experiment, gathered

import txl
import txl_lab.paper.experiment as module
from txl_lab.paper.catalogue import definitions
from txl_lab.paper.configuring import configure
from txl_lab.paper.converging import UntilConverged, recipe_of
from txl_lab.paper.folder import Busy
from txl_lab.paper.one_row import RowMaker


def starts(run):
    lines = (run / "log.jsonl").read_text().splitlines()
    return sum(json.loads(line)["event"] == "start" for line in lines)


@pytest.fixture
def it(micro, words, tmp_path, data_dir):
    rows = tuple(definitions()["table7"].row(key) for key in ("xl", "no-recurrence"))
    return experiment("table7", micro, words, tmp_path / "out", data_dir, seeds=1, rows=rows)


def test_what_another_process_works_on_comes_last(it, monkeypatch):
    other, done = it._folder.working_on("xl-seed1"), []
    other.__enter__()
    monkeypatch.setattr(module.time, "sleep", lambda _: other.__exit__(None, None, None))  # ends without a result
    real = RowMaker.fit
    monkeypatch.setattr(RowMaker, "fit", lambda self, run, at: done.append(at.name) or real(self, run, at))
    rows = it.run()
    assert done == ["no-recurrence-seed1", "xl-seed1"]
    assert [set(row.by_seed) for row in rows] == [{1}, {1}]


def test_the_result_of_another_process_is_taken(it, monkeypatch):
    [first, _] = it.run()
    path = it.out / "results" / "xl-seed1.json"
    stored = path.read_text()
    path.unlink()
    other = it._folder.working_on("xl-seed1")
    other.__enter__()

    def finish(_):
        path.write_text(stored)
        other.__exit__(None, None, None)

    monkeypatch.setattr(module.time, "sleep", finish)
    monkeypatch.setattr(module.Experiment, "_do", lambda *_: pytest.fail("it was measured already"))
    [again, _] = it.run()
    assert again.by_seed == first.by_seed
    assert gathered(it, [again]).values["xl"] == gathered(it, [first]).values["xl"]


def test_a_cache_waits_for_the_model_that_another_process_trains(micro, words, tmp_path, data_dir, monkeypatch):
    rows = tuple(definitions()["table1"].row(key) for key in ("lstm", "lstm-cache", "xl-standard"))
    it = experiment("table1", micro, words, tmp_path / "out", data_dir, seeds=1, rows=rows)
    other = it._folder.working_on("lstm-seed1")
    other.__enter__()
    monkeypatch.setattr(module.time, "sleep", lambda _: other.__exit__(None, None, None))
    rows = it.run()
    assert [(row.status, set(row.by_seed)) for row in rows] == [("done", {1})] * 3


def test_a_cache_waits_while_its_model_waits_for_a_rate(micro, words, tmp_path, data_dir, monkeypatch):
    rows = tuple(definitions()["table1"].row(key) for key in ("lstm", "lstm-cache", "xl-standard"))
    scale = micro.with_until_converged(UntilConverged(factors=(1.0,), furthest=1.0, halvings=0))
    it = experiment("table1", scale, words, tmp_path / "out", data_dir, seeds=2, rows=rows)
    it.out.mkdir()
    [lstm] = [f"rates-{recipe_of(configured(it, 'lstm'))}"]
    other = it._folder.working_on(lstm)
    other.__enter__()
    monkeypatch.setattr(module.time, "sleep", lambda _: other.__exit__(None, None, None))
    rows = it.run()
    assert [(row.status, set(row.by_seed)) for row in rows] == [("done", {1, 2})] * 3


def configured(it, key):
    corpus = txl.open_corpus(it.data.corpus, it.data.unit, data_dir=it.data_dir)
    return configure(it.definition, it.definition.row(key), it.scale, it.data, len(corpus.vocabulary), lambda *_: 8)


def test_a_row_that_failed_here_is_taken_from_the_process_that_finished_it(it, monkeypatch):
    rows = it.run()
    stored = {path: path.read_text() for path in (it.out / "results").iterdir()}
    for path in stored:
        path.unlink()

    def fail(self, run, directory):
        for path, text in stored.items():  # meanwhile, the other process ends
            path.write_text(text)
        raise RuntimeError("no memory")

    monkeypatch.setattr(RowMaker, "fit", fail)
    again = it.run()
    assert [(row.status, row.reason) for row in again] == [("done", "")] * 2
    assert [row.by_seed for row in again] == [row.by_seed for row in rows]


def test_rows_that_are_timed_are_one_part(micro, words, tmp_path, data_dir, monkeypatch):
    it = experiment("table9", micro, words, tmp_path / "out", data_dir, seeds=1)
    it.out.mkdir()
    other, waited = it._folder.working_on("timing"), []
    other.__enter__()
    monkeypatch.setattr(
        module, "measure_speed", lambda *_: {"slower": 1.0, "attention_length": 1, "waited": bool(waited)}
    )
    monkeypatch.setattr(module.time, "sleep", lambda _: waited.append(1) or other.__exit__(None, None, None))
    assert all(row.by_seed[1]["waited"] for row in it.run())


def test_a_part_belongs_to_one_process_at_a_time(it):
    with it._folder.working_on("rates"):
        with pytest.raises(Busy), it._folder.working_on("rates"):
            pass
        with it._folder.working_on("something else"):
            pass
    with it._folder.working_on("rates"):
        pass


def test_two_processes_train_every_model_once(story, tmp_path, data_dir):
    command = [sys.executable, "-m", "txl", "reproduce", "table7", "--until-converged", "--steps", "25", "--seeds", "2"]
    command += ["--corpus", str(story), "--eval-tokens", "500"]
    command += ["--data-dir", str(data_dir), "--out", str(tmp_path / "out")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], printed
    assert printed[0][0] == printed[1][0]
    for row in ("xl", "xl-shaw", "no-recurrence"):  # printed once, by the process that trained the row
        for seed in (1, 2):
            assert sum(said.count(f"{row}, seed {seed} of 2\n") for _, said in printed) == 1
    runs = sorted((tmp_path / "out" / "runs").iterdir())
    assert len(runs) == 6
    assert [starts(run) for run in runs] == [1] * 6
    rates = sorted((tmp_path / "out" / "rates").glob("*/*/*"))
    assert len(rates) >= 3
    assert [starts(rate) for rate in rates] == [1] * len(rates)
