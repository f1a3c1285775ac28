import json
import math
from typing import Any

import pytest
from tests.reporting.fake_run import CACHE, FakeRun, evaluation

from txl.reporting.findings import Findings, findings, scored_bytes
from txl.runs.events import Evaluation


@pytest.fixture
def run(tmp_path) -> FakeRun:
    run = FakeRun(tmp_path / "run")
    run.start()
    run.train(last=100)
    return run


def read(run: FakeRun) -> Findings:
    found = findings(run.directory.events())
    assert found is not None
    return found


def result(run: FakeRun) -> tuple[dict[str, Any], list[Evaluation]]:
    """Return the result of a run, and its other evaluations."""
    found = read(run)
    assert found.result is not None
    return dict(found.result), found.others


def test_a_log_without_a_beginning_says_nothing(tmp_path):
    run = FakeRun(tmp_path / "run")
    assert findings(run.directory.events()) is None
    run.train(last=20)
    assert findings(run.directory.events()) is None


def test_a_crash_makes_the_run_log_steps_twice_and_the_second_time_counts(run):
    run.start("resume", step=60)
    run.train(70, 70)
    found = read(run)
    assert [event["step"] for event in found.train] == [10, 20, 30, 40, 50, 60, 70]
    assert len(found.stretches) == 2


def test_steps_that_a_rollback_undid_do_not_count(run):
    run.log("valid", 90, averaged=None, **evaluation(0.1, 128))
    run.log("rollback", 60, from_step=100)
    found = read(run)
    assert [event["step"] for event in found.train] == [10, 20, 30, 40, 50, 60]
    assert found.valid == []


def test_the_result_is_that_of_the_default_checkpoint(run):
    for nll, name in ((1.4, "step-00000050"), (1.3, "step-00000100")):
        run.log("eval", 100, **evaluation(nll, 256, checkpoint=name))
    for checkpoint, nll in (("step-00000050", 1.4), ("step-00000100", 1.3), (None, 1.3), ("step-00000070", 1.3)):
        found = findings(run.directory.events(), checkpoint)
        assert found is not None
        assert found.result is not None
        assert found.result["nll"] == nll


def test_a_run_ends_before_its_last_step_if_it_has_converged(run):
    assert not read(run).ended
    run.log("end", 100, elapsed=1.0, converged=True)
    assert read(run).ended
    assert read(run).converged


def test_a_torn_line_is_passed_over(run):
    run.log("train", 105)
    with open(run.path / "log.jsonl", "a") as file:
        file.write('{"event": "train", "step": 110, "los')
    assert read(run).train[-1]["step"] == 100


def test_losses_that_are_not_finite_are_not_drawn(run):
    run.log("valid", 100, averaged=None, **evaluation(math.nan, 128))
    run.log("valid", 101, averaged=None, **evaluation(2.0, 128))
    assert [event["step"] for event in read(run).valid] == [101]


def test_the_result_has_the_memory_of_the_test_settings_even_if_another_was_better(run):
    for nll, mem_len in ((1.5, 0), (1.4, 256), (1.3, 128), (1.2, 512)):
        run.log("eval", 100, **evaluation(nll, mem_len))
    found = read(run)
    assert found.result is not None
    assert found.without_memory is not None
    assert (found.result["mem_len"], found.without_memory["mem_len"]) == (256, 0)
    assert [row["mem_len"] for row in found.others] == [512, 128]


def test_without_the_test_settings_the_longest_memory_is_the_result(run):
    run.sweep((0, 64, 512))
    assert result(run)[0]["mem_len"] == 512


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint": "step-00000100"}, {"tokens": 5000}, {"dropped": 3}, {"segment": 64}, {"batch_size": 1},
        {"corpus": "other.txt"}, {"split": "valid"}, {"clamp_len": 40}, {"dtype": "bfloat16"},
        CACHE, {"temperature": 1.5}, {"sliding": True}, {"exhaustive": True},
    ],
)  # fmt: skip
def test_what_was_measured_otherwise_is_no_pair(run, change):
    run.log("eval", 100, **evaluation(1.5, 0, **change))
    run.log("eval", 100, **evaluation(1.4, 256))
    found = read(run)
    assert found.without_memory is None
    assert len(found.others) == 1


def test_the_result_has_the_window_of_the_test_settings_even_if_another_is_newer(run):
    for nll, window in ((1.4, 256), (1.3, None)):
        run.log("eval", 100, **evaluation(nll, 256, window=window))
    found, others = result(run)
    assert (found["window"], [row["window"] for row in others]) == (256, [None])


WAYS = [
    {"temperature": 1.5},
    {"clamp_len": 3},
    {"sliding": True, "exhaustive": True, "mem_len": 0},
    {"exhaustive": True},
]


@pytest.mark.parametrize("change", [*WAYS, CACHE])
def test_what_was_measured_in_another_way_does_not_replace_the_result(run, change):
    run.log("eval", 100, **(evaluation(1.3, 256) | change))
    if change is not CACHE:  # a run that was only measured in another way reports that
        assert (result(run)[0]["nll"], result(run)[1]) == (1.3, [])
    run.log("eval", 100, **evaluation(1.4, 256))
    run.log("eval", 100, **(evaluation(1.3, 256) | change))
    found, others = result(run)
    assert found["nll"] == 1.4
    assert [row["nll"] for row in others] == [1.3]


def test_a_temperature_of_the_run_s_own_makes_the_result(tmp_path):
    run = FakeRun(tmp_path / "run", options={"eval.temperature": "1.08"})
    run.start()
    for nll, temperature in ((1.3, 1.08), (1.4, 1.0)):
        run.log("eval", 100, **evaluation(nll, 256, temperature=temperature))
    found, others = result(run)
    assert (found["temperature"], [row["temperature"] for row in others]) == (1.08, [1.0])


def test_the_curve_is_the_run_s_own_way_and_never_a_cache_s(run):
    run.sweep((0, 64), **CACHE)
    found = read(run)
    assert (found.result, found.curve, len(found.others)) == (None, [], 2)
    run.sweep((0, 64), temperature=1.5)
    assert [row["temperature"] for row in read(run).curve] == [1.5, 1.5]
    run.sweep((0, 128))
    run.sweep((0, 256), temperature=2.0)
    assert [(row["mem_len"], row["temperature"]) for row in read(run).curve] == [(0, 1.0), (128, 1.0)]


def test_the_newest_of_equal_measurements_counts(run):
    for nll in (1.5, 1.4):
        run.log("eval", 100, **evaluation(nll, 256))
    assert (result(run)[0]["nll"], result(run)[1]) == (1.4, [])


def test_a_text_of_the_users_does_not_replace_the_corpus_that_was_trained_on(run):
    run.log("eval", 100, **evaluation(2.5, 256, corpus="letters.txt"))
    found = read(run)
    assert found.result is not None
    assert found.result["corpus"] == "letters.txt"  # the only text that was tested
    assert found.split_of(found.result) is None
    run.sweep()
    assert result(run)[0]["corpus"] == "stdlib"
    assert [row["corpus"] for row in result(run)[1]] == ["letters.txt"]


def test_memory_zero_alone_is_a_result_without_a_pair(run):
    run.log("eval", 100, **evaluation(2.5, 0))
    assert (result(run)[0]["mem_len"], read(run).without_memory) == (0, None)


def test_the_validation_split_is_never_the_result(run):
    run.log("eval", 100, **evaluation(1.0, 256, split="valid"))
    run.sweep(split="valid")
    found = read(run)
    assert found.result is None
    assert found.curve == []


def test_compressors_count_only_for_the_same_bytes_and_settings(run):
    run.log("eval", 100, **evaluation(1.4, 256, tokens=1000, dropped=9))
    run.compression(640_413, 100, 90)
    assert read(run).compression is None
    run.compression(1010, 200, 190)
    assert (read(run).compression or {}).get("zlib") == 200
    run.log("eval", 100, **evaluation(1.4, 256))
    assert (read(run).compression or {}).get("zlib") == 100
    text = (run.path / "log.jsonl").read_text().replace("xz preset 9", "xz preset 1")
    events = [json.loads(line) for line in text.splitlines()]
    assert findings(events).compression is None  # pyright: ignore[reportOptionalMemberAccess]


def test_bytes_read_include_those_that_are_no_targets():
    assert scored_bytes(evaluation(1.0, 0, tokens=990, dropped=9)) == 1000
    assert scored_bytes(evaluation(1.0, 0, tokens=990, dropped=9, bytes_per_token=2.5)) == 2500
    assert scored_bytes(evaluation(1.0, 0, bytes_per_token=None)) is None


def test_a_stop_counts_until_the_run_goes_on(run):
    run.log("stop", 100, reason="SIGINT")
    stopped = read(run).stopped
    assert stopped is not None
    assert stopped["reason"] == "SIGINT"
    run.start("resume", step=100)
    assert read(run).stopped is None


def test_speed_is_the_median_of_the_lines(run):
    speeds = sorted(event["tokens_per_second"] for event in read(run).train)
    assert read(run).speed == pytest.approx((speeds[4] + speeds[5]) / 2)
