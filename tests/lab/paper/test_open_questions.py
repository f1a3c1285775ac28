"""The two open questions of the paper, as answered by `txl reproduce`, with training of seconds."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from tests.lab.paper.conftest import experiment, files, gathered, micro_run

from txl.cli import main
from txl.errors import UserError
from txl.runs.directory import RunDirectory
from txl_lab.paper.catalogue import definitions
from txl_lab.paper.claims import lower_at_equal_time
from txl_lab.paper.converging import UntilConverged
from txl_lab.paper.outcome import markdown
from txl_lab.paper.page import write_outcome
from txl_lab.paper.scales import PAPER
from txl_lab.speed.budget import peak_bytes
from txl_lab.speed.workloads import measure_cost

CIRCUMSTANCES = {"hardware": {"cpu": "a processor", "cores": 2, "device": "cpu"}, "software": {"torch": "2"}}


def test_the_grid_is_trained_and_shown_against_its_time(micro, words, tmp_path, data_dir):
    table = definitions()["memory-depth"]
    rows = tuple(table.row(f"depth-{depth}-memory-{memory}") for depth, memory in ((1, 1), (1, 8), (2, 1)))
    it = experiment("memory-depth", micro, words, tmp_path / "out", data_dir, seeds=1, rows=rows)
    outcome = gathered(it, it.run())
    found = {result.row.key: result.by_seed[1] for result in outcome.rows}
    shapes = {key: each["config"]["model"] for key, each in found.items()}
    assert [(shape["n_layer"], shape["mem_len"]) for shape in shapes.values()] == [(1, 8), (1, 64), (2, 8)]
    assert [each["test"]["mem_len"] for each in found.values()] == [15, 71, 15]  # evaluated as trained
    assert found["depth-1-memory-1"]["memory"] == 1
    assert min(found[key]["memory"] for key in ("depth-1-memory-8", "depth-2-memory-1")) > 1
    for each in found.values():
        for name in ("time", "reading"):
            assert each[name] > 0
            assert each[f"{name}, seconds a token"] > 0
    write_outcome(outcome, tmp_path / "out", ["txl"], CIRCUMSTANCES)
    page = (tmp_path / "out" / "memory-depth.html").read_text()
    for said in ("Against time", "Results against training time a token", "memory × 8", "2 times the depth"):
        assert said in page
    assert "not comparable" not in page  # the paper has no numbers to compare with
    record = json.loads((tmp_path / "out" / "memory-depth.json").read_text())
    shown = record["rows"][0]["shown"]
    assert shown["training memory"] == "1.00x"
    assert {"training time", "reading time"} < set(shown)
    assert "| training memory | status |" in markdown(outcome)


def test_gradients_into_memory_are_trained_until_converged_on_equal_tokens(micro, words, tmp_path, data_dir):
    rules = UntilConverged(patience=2, evaluations=2, tuning_share=0.5, factors=(1.0,), furthest=1.0, halvings=0)
    scale = dataclasses.replace(micro.changed(steps=4), until_converged=rules)
    it = experiment("gradients-into-memory", scale, words, tmp_path / "out", data_dir, seeds=1)
    outcome = gathered(it, it.run())
    read = {}
    for result in outcome.rows:
        assert result.status == "done", result.reason
        directory = RunDirectory(tmp_path / "out" / "runs" / f"{result.row.key}-seed1")
        [read[result.row.key]] = [event["tokens_read"] for event in directory.events() if event["event"] == "train"][
            -1:
        ]
        assert result.by_seed[1]["rates"]["row"] == "one-segment"
    assert set(read.values()) == {4 * 2 * 8}
    before = files(tmp_path / "out")
    again = gathered(it, it.run())
    assert files(tmp_path / "out") == before
    write_outcome(again, tmp_path / "out", ["txl"], CIRCUMSTANCES)
    page = (tmp_path / "out" / "gradients-into-memory.html").read_text()
    assert "1 × 8 × 2" in page
    assert "train.backprop_segments 2" in page
    assert "not judged" in page


def test_cost_is_measured_beside_a_peer_and_draws_no_random_numbers():
    run, peer = micro_run(), micro_run()
    run.train.backprop_segments = 2
    before = torch.get_rng_state()
    found = measure_cost(run, peer, 50, 1, "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert found["memory"] == peak_bytes(run, 50) / peak_bytes(peer, 50) > 1
    # With one pair of measurements, the ratio is that of the two times per token.
    for name in ("time", "reading"):
        ours, theirs = found[f"{name}, seconds a token"], found[f"{name}, seconds a token beside"]
        assert found[name] == pytest.approx(ours / theirs)


def results(**rows):
    return {key: {"time": [time] * len(values), "quality": values} for key, (time, values) in rows.items()}


@pytest.mark.parametrize(
    ("deeper", "expected"),
    [
        ((2.0, [16.9, 17.1]), "holds"),  # the line between short and long is at 18 here
        ((2.0, [18.9, 19.1]), "does not hold"),
        ((2.0, [17.9, 18.0]), "undecided"),
        ((1.5, [18.4, 18.6]), "holds"),  # here the line is at 19
        ((3.5, [1.0, 1.1]), "undecided"),  # no other row takes as much time
        ((2.0, [17.0]), "undecided"),
    ],
)
def test_rows_are_compared_at_equal_time(deeper, expected):
    arm = {"short": (1.0, [20.0, 20.1]), "long": (2.5, [17.0, 17.1]), "longest": (3.0, [14.0, 14.1])}
    found = lower_at_equal_time("deeper", *arm)(results(deeper=deeper, **arm), {})
    assert found.outcome == expected, found.reason
    if deeper[0] == 2.0 and len(deeper[1]) == 2:
        assert "between short and long" in found.reason


def test_what_is_missing_is_named():
    found = lower_at_equal_time("deeper", "short", "long")(results(deeper=(1.0, [1.0, 2.0]), short=(1.0, [1.0])), {})
    assert "no result for long" in found.reason


def test_there_are_no_published_presets_of_them(words, tmp_path, data_dir, capsys):
    with pytest.raises(UserError) as caught:
        experiment("memory-depth", PAPER, words, tmp_path / "out", data_dir).run()
    assert (caught.value.field, caught.value.value) == ("scale", "paper")
    assert not (tmp_path / "out").exists()
    assert main(["reproduce", "memory-depht", "--out", str(tmp_path / "out")]) == 2
    assert "did you mean memory-depth" in capsys.readouterr().err
