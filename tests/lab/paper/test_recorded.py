"""A table goes on from its record: what the record has is taken as it is, and only what it lacks is trained."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from tests.lab.paper.conftest import experiment, gathered

import txl_lab.paper.experiment as module
from txl.errors import UserError
from txl_lab.paper.catalogue import definitions
from txl_lab.paper.converging import UntilConverged
from txl_lab.paper.experiment import circumstances
from txl_lab.paper.outcome import markdown, named_seeds, recorded_seeds
from txl_lab.paper.page import write_outcome

ROWS = {
    "table1": ("xl-standard", "lstm", "lstm-cache"),
    "table6": ("xl", "no-recurrence"),
    "table8": ("xl-128M", "transformer"),
}
RULES = UntilConverged(patience=2, evaluations=4, factors=(1.0,), furthest=1.0, tuning_share=0.5, halvings=0)


def made(table, scale, words, out, data_dir, seeds, record=None):
    """Return the outcome of a table whose folder begins with `record`, and the path of its own record."""
    rows = tuple(definitions()[table].row(key) for key in ROWS[table])
    if record is not None:
        out.mkdir()
        (out / f"{table}.json").write_text(record if isinstance(record, str) else json.dumps(record))
    it = experiment(table, scale, words, out, data_dir, seeds=seeds, rows=rows)
    outcome = gathered(it, it.run())
    write_outcome(outcome, out, ["txl", "reproduce", table, "--out", out.name], circumstances(out, "cpu"))
    return outcome, out / f"{table}.json"


def read(path):
    return json.loads(path.read_text())


@pytest.fixture
def trained(monkeypatch):
    """Names of the runs that are trained from now on."""
    names, real = [], module.Trainer

    def noted(run, directory, **settings):
        names.append(run.name)
        return real(run, directory, **settings)

    monkeypatch.setattr(module, "Trainer", noted)
    return names


@pytest.fixture(scope="module")
def records(micro, words, tmp_path_factory, data_dir):
    """Records of one seed, by table."""
    folder = tmp_path_factory.mktemp("records")
    return {table: read(made(table, micro, words, folder / table, data_dir, 1)[1]) for table in ("table6", "table8")}


def numbers(outcome):
    """Return all numbers of an outcome except times."""
    gains = [(each.group, each.seed, each.gains) for each in outcome.gains]
    return outcome.values, outcome.curves, gains, [verdict for _, verdict in outcome.verdicts()]


def origins(outcome):
    return recorded_seeds(each for result in outcome.rows for each in result.by_seed.items())


@pytest.mark.parametrize("table", ["table6", "table8"])
def test_a_further_seed_gives_what_one_folder_gives(table, micro, words, tmp_path, data_dir, records, trained):
    scale = dataclasses.replace(micro, judged=True)
    whole, _ = made(table, scale, words, tmp_path / "whole", data_dir, 2)
    trained.clear()
    joined, path = made(table, scale, words, tmp_path / "second", data_dir, 2, records[table])
    assert len(trained) == 2
    assert not list((tmp_path / "second" / "runs").glob("*-seed1"))
    assert numbers(joined) == numbers(whole)
    assert markdown(joined) == markdown(whole)
    [(origin, seeds)] = origins(joined)
    assert (named_seeds(seeds), origin["command"][-1]) == ("seed 1", table)
    assert "Measured before, and taken from a record: seed 1" in (tmp_path / "second" / f"{table}.html").read_text()
    # A record of taken results can be taken again, and still names where each seed was measured.
    again, _ = made(table, scale, words, tmp_path / "third", data_dir, 2, {"commit": "0" * 40, "output": read(path)})
    assert len(trained) == 2
    assert numbers(again) == numbers(whole)
    assert [named_seeds(seeds) for _, seeds in origins(again)] == ["seed 1", "seed 2"]


def test_a_folder_that_was_begun_goes_on_from_its_results(micro, words, tmp_path, data_dir, records, trained):
    out = tmp_path / "out"
    made("table6", micro, words, out, data_dir, 1, records["table6"])
    (out / "results" / "xl-seed1.json").unlink()
    made("table6", micro, words, out, data_dir, 1)
    assert trained == ["table6-xl"]


def test_a_group_that_a_record_lacks_in_part_is_trained(micro, words, tmp_path, data_dir, records, trained):
    """The group of a seed is measured together, because its models share a baseline."""
    rows = [row for row in records["table8"]["rows"] if row["row"] != "transformer"]
    outcome, _ = made("table8", micro, words, tmp_path / "out", data_dir, 1, records["table8"] | {"rows": rows})
    assert [each.status for each in outcome.rows] == ["done", "done"]
    assert trained == ["context-xl-128M", "context-transformer"]


def test_learning_rates_are_taken_too(micro, words, tmp_path, data_dir, trained):
    scale = dataclasses.replace(micro.changed(steps=8), until_converged=RULES)
    first, record = made("table6", scale, words, tmp_path / "first", data_dir, 1)
    trained.clear()
    second, _ = made("table6", scale, words, tmp_path / "second", data_dir, 2, read(record))
    assert trained == ["table6-xl", "table6-no-recurrence"]
    for one, other in zip(first.rows, second.rows, strict=True):
        assert one.by_seed[1]["rates"] == other.by_seed[2]["rates"]


def test_another_machine_may_train_in_other_arithmetic(micro, words, tmp_path, data_dir, records):
    half = micro.changed(dtype="bfloat16")
    joined, _ = made("table6", half, words, tmp_path / "second", data_dir, 2, records["table6"])
    [(origin, _)] = origins(joined)
    assert origin["dtype"] is None
    assert "(float32), txl reproduce table6" in (tmp_path / "second" / "table6.html").read_text()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda record: record.update(what="table8"), "not a record of table6"),
        (lambda record: record["scale"].update(steps=7), r"is of another reproduction: scale\.steps 7 -> None"),
        (lambda record: record.update(text="0"), "is of another reproduction: text 0 -> "),
        (lambda record: record.update(rows=None), "damaged"),
        (lambda record: record.pop("hardware"), "damaged"),
        (lambda record: record["rows"][1].pop("config"), "damaged"),
    ],
)
def test_records_of_something_else_are_refused_and_nothing_is_written(
    damage, said, micro, words, tmp_path, data_dir, records
):
    record = json.loads(json.dumps(records["table6"]))
    damage(record)
    with pytest.raises(UserError, match=said):
        made("table6", micro, words, tmp_path / "out", data_dir, 1, record)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["table6.json"]


def test_a_result_of_another_configuration_or_without_a_number_is_refused(micro, words, tmp_path, data_dir, records):
    record = json.loads(json.dumps(records["table6"]))
    record["rows"][0]["config"]["model"]["n_layer"] = 3
    with pytest.raises(UserError, match=r"of another configuration: .*n_layer 3 -> 1"):
        made("table6", micro, words, tmp_path / "out", data_dir, 1, record)
    record = json.loads(json.dumps(records["table6"]))
    del record["rows"][0]["seeds"]["1"]["init"]
    with pytest.raises(UserError, match=r"xl-seed1.json: damaged \(no number in init\)"):
        made("table6", micro, words, tmp_path / "other", data_dir, 1, record)


def test_a_model_whose_cache_is_not_recorded_is_trained(micro, words, tmp_path, data_dir, trained):
    scale = dataclasses.replace(micro, eval_tokens=None)
    _, path = made("table1", scale, words, tmp_path / "first", data_dir, 1)
    record = read(path)
    record["rows"][2]["seeds"] = {}
    trained.clear()
    again, _ = made("table1", scale, words, tmp_path / "second", data_dir, 1, record)
    assert [(each.status, each.reason) for each in again.rows] == [("done", "")] * 3
    assert trained == ["table1-lstm"]


def test_a_record_of_the_project_can_be_gone_on_with(tmp_path, micro, words, data_dir):
    """The records of `results/` are whole, with the command that made them around the output."""
    record = tmp_path / "first" / "table6.json"
    made("table6", micro, words, tmp_path / "first", data_dir, 1)
    wrapped = {"command": "txl reproduce", "commit": "1" * 40, "date": "2026-01-01", "output": read(record)}
    joined, _ = made("table6", micro, words, tmp_path / "second", data_dir, 1, wrapped)
    [(origin, _)] = origins(joined)
    assert (origin["commit"], origin["date"]) == ("1" * 40, "2026-01-01")
    shutil.rmtree(tmp_path / "first")
