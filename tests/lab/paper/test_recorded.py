"""Results of a record are taken as they are; only what the record lacks is trained."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from tests.lab.paper.conftest import experiment, gathered
from tests.lab.paper.test_reusing import RULES, rows, trained

from txl.errors import UserError
from txl_lab.paper.experiment import circumstances
from txl_lab.paper.outcome import markdown, named_seeds, recorded_seeds
from txl_lab.paper.page import write_outcome

ROWS = {"table6": ("xl", "no-recurrence"), "table8": ("xl-128M", "transformer")}


def made(table, scale, words, out, data_dir, seeds, **options):
    """Return an experiment, its outcome, and the path of its record."""
    it = experiment(table, scale, words, out, data_dir, seeds=seeds, rows=rows(table, *ROWS[table]))
    it = dataclasses.replace(it, **options)
    outcome = gathered(it, it.run())
    write_outcome(outcome, out, ["txl", "reproduce", table, "--out", out.name], circumstances(out, "cpu"))
    return it, outcome, out / f"{table}.json"


def numbers(outcome):
    """Return all numbers of an outcome except times."""
    gains = [(each.group, each.seed, each.gains) for each in outcome.gains]
    return outcome.values, outcome.curves, gains, [verdict for _, verdict in outcome.verdicts()]


def origins(outcome):
    return recorded_seeds(each for result in outcome.rows for each in result.by_seed.items())


@pytest.mark.parametrize("table", ["table6", "table8"])
def test_a_further_seed_gives_what_one_folder_gives(table, micro, words, tmp_path, data_dir, monkeypatch):
    scale = dataclasses.replace(micro, judged=True)
    _, whole, _ = made(table, scale, words, tmp_path / "whole", data_dir, 2)
    _, _, record = made(table, scale, words, tmp_path / "first", data_dir, 1)
    new = trained(monkeypatch)
    _, joined, path = made(table, scale, words, tmp_path / "second", data_dir, 2, reuse=(record,))
    assert len(new) == 2
    assert not list((tmp_path / "second" / "runs").glob("*-seed1"))
    assert numbers(joined) == numbers(whole)
    assert markdown(joined) == markdown(whole)
    [(origin, seeds)] = origins(joined)
    assert named_seeds(seeds) == "seed 1"
    assert origin["command"][-1] == "first"
    assert "Measured before, and taken from a record: seed 1" in (tmp_path / "second" / f"{table}.html").read_text()
    # A record of taken results can be taken again, and still names where each seed was measured.
    _, again, _ = made(table, scale, words, tmp_path / "third", data_dir, 2, reuse=(path,))
    assert len(new) == 2
    assert numbers(again) == numbers(whole)
    assert [named_seeds(seeds) for _, seeds in origins(again)] == ["seed 1", "seed 2"]


def test_what_is_in_the_folder_already_is_kept(micro, words, tmp_path, data_dir):
    it, _, record = made("table6", micro, words, tmp_path / "first", data_dir, 1)
    kept = [path.read_text() for path in sorted((it.out / "results").glob("*.json"))]
    dataclasses.replace(it, reuse=(record,)).run()
    assert [path.read_text() for path in sorted((it.out / "results").glob("*.json"))] == kept


def test_rows_that_a_record_lacks_are_trained(micro, words, tmp_path, data_dir, monkeypatch):
    it, _, record = made("table8", micro, words, tmp_path / "first", data_dir, 1)
    stored = json.loads(record.read_text())
    stored["rows"] = [row for row in stored["rows"] if row["row"] != "transformer"]
    record.write_text(json.dumps({"commit": "0" * 40, "date": "2026-01-01", "output": stored}))
    new = trained(monkeypatch)
    again = dataclasses.replace(it, out=tmp_path / "second", reuse=(record,))
    assert [each.status for each in again.run()] == ["done", "done"]
    # The group of a seed is measured together, because its models share a baseline.
    assert new == ["context-xl-128M", "context-transformer"]


def test_learning_rates_are_taken_too(micro, words, tmp_path, data_dir, monkeypatch):
    scale = dataclasses.replace(micro.with_steps(8), until_converged=RULES)
    _, first, record = made("table6", scale, words, tmp_path / "first", data_dir, 1)
    new = trained(monkeypatch)
    _, second, _ = made("table6", scale, words, tmp_path / "second", data_dir, 2, reuse=(record,))
    assert new == ["table6-xl", "table6-no-recurrence"]
    for one, other in zip(first.rows, second.rows, strict=True):
        assert one.by_seed[1]["rates"] == other.by_seed[2]["rates"]


def test_another_machine_may_train_in_other_arithmetic(micro, words, tmp_path, data_dir):
    _, _, record = made("table6", micro.with_dtype("bfloat16"), words, tmp_path / "first", data_dir, 1)
    _, joined, _ = made("table6", micro, words, tmp_path / "second", data_dir, 2, reuse=(record,))
    [(origin, _)] = origins(joined)
    assert origin["dtype"] == "bfloat16"
    assert "(bfloat16), txl reproduce table6" in (tmp_path / "second" / "table6.html").read_text()


def test_records_of_something_else_are_refused_and_nothing_is_written(micro, words, tmp_path, data_dir, story):
    _, _, record = made("table6", micro, words, tmp_path / "first", data_dir, 1)
    other = tmp_path / "other.txt"
    other.write_text(story.read_text() + "One more line.\n")
    stored = json.loads(record.read_text())
    named = tmp_path / "named.json"  # as earlier versions wrote it, without the text's identity
    named.write_text(json.dumps({name: value for name, value in stored.items() if name != "text"} | {"corpus": "ptb"}))
    for name, text in (("list.json", "[]"), ("empty.json", "{}"), ("broken.json", "{")):
        (tmp_path / name).write_text(text)
    changed = dataclasses.replace(words, corpus=str(other))
    for table, scale, data, path, said in (
        ("table8", micro, words, record, "a record of table6; give one of table8, or a folder"),
        ("table6", micro, words, tmp_path / "none.json", "no such file or folder"),
        ("table6", micro.with_steps(7), words, record, "is of another reproduction: scale.steps None -> 7"),
        ("table6", micro, changed, record, "is of another reproduction: text "),
        ("table6", micro, words, named, "is of another reproduction: text ptb -> "),
        ("table6", micro, words, tmp_path / "list.json", "not a record of a reproduction"),
        ("table6", micro, words, tmp_path / "empty.json", "not a record of a reproduction"),
        ("table6", micro, words, tmp_path / "broken.json", "not JSON"),
    ):
        with pytest.raises(UserError, match=said):
            made(table, scale, data, tmp_path / "second", data_dir, 1, reuse=(path,))
        assert not (tmp_path / "second").exists()


def test_a_result_of_another_configuration_is_refused(micro, words, tmp_path, data_dir):
    _, _, record = made("table6", micro, words, tmp_path / "first", data_dir, 1)
    stored = json.loads(record.read_text())
    stored["rows"][0]["config"]["model"]["n_layer"] = 3
    record.write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"--reuse .*is of another configuration: .*n_layer 3 -> 1"):
        made("table6", micro, words, tmp_path / "second", data_dir, 1, reuse=(record,))
    assert not (tmp_path / "second" / "results").exists()  # the folder can be used without the record


@pytest.mark.parametrize(
    ("table", "damage"),
    [
        ("table6", lambda record: record.update(scale=None)),
        ("table6", lambda record: record.update(rows=None)),
        ("table6", lambda record: record.update(rows=["xl"])),
        ("table6", lambda record: record.update(hardware={})),
        ("table6", lambda record: record["rows"][1].pop("config")),
        ("table6", lambda record: record["rows"][1].update(config=None)),
        ("table6", lambda record: record["rows"][1]["seeds"]["1"].pop("init")),
        ("table6", lambda record: record["rows"][1]["seeds"]["1"].update(quality=None)),
        ("table6", lambda record: record["rows"][1]["seeds"]["1"].update(rates=None)),
        ("table6", lambda record: record["rows"][1].update(seeds={"one": {}})),
        ("table6", lambda record: record["rows"][1]["seeds"]["1"].update(rates={"factor": 1.0})),
        ("table6", lambda record: record["rows"][1]["seeds"]["1"]["curve"][0].pop("nll")),
        ("table8", lambda record: record.update(gains=[])),
        ("table8", lambda record: record["gains"][0]["gains"][0].pop("short")),
        ("table8", lambda record: record["rows"][0]["seeds"]["1"].pop("targets")),
        ("table8", lambda record: record["rows"][0]["values"].update({"r = 0.1": [None]})),
        ("table8", lambda record: record["rows"][0].update(values={"r = 0.1": []})),
    ],
)
def test_a_damaged_record_is_refused_and_nothing_is_written(table, damage, records, micro, words, tmp_path, data_dir):
    stored = json.loads(records[table].read_text())
    damage(stored)
    (tmp_path / "damaged.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"damaged.json: damaged(?! \(\w*Error)[^;]*; give another record"):
        made(table, micro, words, tmp_path / "out", data_dir, 1, reuse=(tmp_path / "damaged.json",))
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def records(micro, words, tmp_path_factory, data_dir):
    """Records of one seed, by table."""
    folder = tmp_path_factory.mktemp("records")
    return {table: made(table, micro, words, folder / table, data_dir, 1)[2] for table in ROWS}


@pytest.mark.parametrize(
    ("table", "damage"),
    [
        ("table6", lambda stored: stored.clear()),
        ("table6", lambda stored: stored.pop("config")),
        ("table6", lambda stored: stored.pop("quality")),
        ("table6", lambda stored: stored.update(quality="good")),
        ("table6", lambda stored: stored.update(quality=float("nan"))),
        ("table6", lambda stored: stored.update(steps="six")),
        ("table6", lambda stored: stored.update(training_seconds=None)),
        ("table6", lambda stored: stored.update(files=5)),
        ("table6", lambda stored: stored["curve"][0].pop("length")),
        ("table8", lambda stored: next(iter(stored["losses"].values())).pop()),
        ("table8", lambda stored: next(iter(stored["losses"].values())).append(None)),
        ("table8", lambda stored: stored.update(losses={"x": []})),
    ],
)
def test_a_damaged_result_is_refused(table, damage, records, micro, words, tmp_path, data_dir):
    shutil.copytree(records[table].parent, tmp_path / "out")
    path = tmp_path / "out" / "results" / f"{ROWS[table][0]}-seed1.json"
    stored = json.loads(path.read_text())
    damage(stored)
    path.write_text(json.dumps(stored))
    for so_far in (False, True):
        with pytest.raises(UserError, match=rf"{path.name}: damaged(?! \(\w*Error)[^;]*; .*delete it"):
            made(table, micro, words, tmp_path / "out", data_dir, 1, so_far=so_far)


def test_a_group_that_was_measured_here_in_part_is_measured_here(
    records, micro, words, tmp_path, data_dir, monkeypatch
):
    """Losses of single targets and recorded lengths of one group would not fit together."""
    out = tmp_path / "half"
    it, _, _ = made("table8", micro, words, out, data_dir, 1)
    (out / "results" / "transformer-seed1.json").unlink()
    again = dataclasses.replace(it, reuse=(records["table8"],))
    gathered(again, again.run())
    assert '"losses"' in (out / "results" / "transformer-seed1.json").read_text()
    # The other way round: one recorded result was deleted.
    taken = dataclasses.replace(it, out=tmp_path / "taken", reuse=(records["table8"],))
    taken.run()
    (taken.out / "results" / "transformer-seed1.json").unlink()
    with pytest.raises(UserError, match=r"xl-128M-seed1.json: from a record, .* delete these results"):
        dataclasses.replace(taken, reuse=()).run()
    taken.run()  # the record has it still


def test_seeds_share_their_learning_rate(micro, words, tmp_path, data_dir):
    scale = dataclasses.replace(micro.with_steps(8), until_converged=RULES)
    it, _, record = made("table6", scale, words, tmp_path / "first", data_dir, 1)
    stored = json.loads(record.read_text())
    for row in stored["rows"]:
        row["seeds"]["1"]["rates"]["factor"] = 2.0
    record.write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"was trained at 2 times its learning rate, the other seeds at 1 times"):
        dataclasses.replace(it, reuse=(record,)).run()


def test_a_model_whose_cache_is_not_recorded_is_trained(micro, words, tmp_path, data_dir, monkeypatch):
    monkeypatch.setitem(ROWS, "table1", ("xl-standard", "lstm", "lstm-cache"))
    scale = dataclasses.replace(micro, eval_tokens=None)
    it, _, record = made("table1", scale, words, tmp_path / "first", data_dir, 1)
    stored = json.loads(record.read_text())
    stored["rows"][2]["seeds"] = {}
    record.write_text(json.dumps(stored))
    new = trained(monkeypatch)
    again = dataclasses.replace(it, out=tmp_path / "second", reuse=(record,)).run()
    assert [(each.status, each.reason) for each in again] == [("done", "")] * 3
    assert new == ["table1-lstm"]
