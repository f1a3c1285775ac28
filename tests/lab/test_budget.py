"""Peak memory measured in training, and the longest segment that fits into a memory budget (Table 10)."""

from __future__ import annotations

import json

import pytest
import torch
from tests.conftest import small_run
from torch.profiler import ProfilerActivity, profile

import txl_lab.speed.budget as budget
from txl.cli import main
from txl.config import RunConfig, validate
from txl.errors import UserError
from txl_lab.speed.budget import LiveBytes, longest_segment, peak_bytes, with_segment

V = 97
NO_MEMORY = {"model.mem_len": "0", "eval.mem_len": "0", "eval.window": "none"}
LEARNED = NO_MEMORY | {"model.encoding": "learned", "model.max_segment": "8"}
RUNS = {
    "memory": {},
    "parts, bfloat16": {"train.micro_batches": "2", "train.dtype": "bfloat16"},
    "half loss": {"train.loss": "half"},
    "shaw": {"model.encoding": "shaw", "model.max_distance": "15"},
    "auxiliary": LEARNED | {"model.layer_losses": "true", "model.n_target": "2"},
}


def a_run(**changes: str) -> RunConfig:
    return small_run("x", **changes)


def test_bytes_alive_counted_by_hand():
    with LiveBytes() as live:
        a = torch.zeros(1000)  # 4,000 bytes
        b = a + 1  # 8,000
        view = b[10:].view(-1, 10)  # the same storage
        del b
        assert live.now == 8000
        c = view.sum()  # 4 more
        del view
        assert live.now == 4004
        a.add_(1)
        d = torch.zeros(500, dtype=torch.float64)  # 4,000
        assert (live.now, live.peak) == (8004, 8004)
        del a, c, d
    assert (live.now, live.peak) == (0, 8004)


@pytest.mark.parametrize("name", RUNS)
def test_the_peak_is_what_the_allocator_saw(name, tmp_path):
    """PyTorch's profiler independently counts every allocation, including the small ones inside operations."""
    run = a_run(**RUNS[name])
    measured = peak_bytes(run, V)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        budget._train(run, V, "cpu")
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    peak = max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")
    assert measured == pytest.approx(peak, rel=0.05)


def test_made_up_tokens_have_the_proportions_of_zipf_s_law():
    tokens = budget.ranked_tokens(10_000, 20, 50)
    assert (tokens.shape, tokens.dtype) == ((20, 50), torch.int64)
    assert (int(tokens.min()), int(tokens.max())) == (0, 9_953)  # 10,000^0.9995 - 1
    for share in (0.25, 0.5, 0.75):
        assert (tokens < 10_000**share - 1).double().mean() == pytest.approx(share, abs=0.075 if share < 0.5 else 0.01)
    assert not torch.equal(tokens.flatten(), tokens.flatten().sort().values)


def test_measured_again_it_is_the_same_and_random_numbers_are_untouched():
    before = torch.get_rng_state()
    assert peak_bytes(a_run(), V) == peak_bytes(a_run(), V)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_ought_to_take_more_does():
    base = peak_bytes(a_run(), V)
    assert peak_bytes(a_run(**{"train.segment": "16"}), V) > base
    assert peak_bytes(a_run(**NO_MEMORY), V) < base
    assert peak_bytes(a_run(**{"train.loss": "half"}), V) < base
    assert peak_bytes(a_run(**{"train.average_from": "0"}), V) > base
    assert peak_bytes(a_run(**{"train.dtype": "float64"}), V) > 1.8 * base


@pytest.mark.parametrize("changes", [NO_MEMORY, NO_MEMORY | {"train.loss": "half"}, LEARNED], ids=["a", "b", "c"])
def test_the_longest_segment_fits_and_the_next_one_does_not(changes):
    allowed = peak_bytes(a_run(), V)
    run = a_run(**changes)
    seen: list[int] = []
    fit = longest_segment(run, allowed, V, on_measured=lambda segment, _: seen.append(segment))
    assert fit.segment > 8  # without memory, a longer segment fits
    assert fit.peak_bytes == peak_bytes(with_segment(run, fit.segment), V) <= allowed
    assert peak_bytes(with_segment(run, fit.segment + 1), V) > allowed
    assert fit.measured.keys() == set(seen)
    assert len(seen) == len(set(seen)) <= 12
    validate(with_segment(run, fit.segment))


def test_a_shift_of_the_passes_does_not_stand_in_the_way():
    assert longest_segment(a_run(**{"train.epoch_shift": "3"}), 10**12, V, at_most=9).segment == 9


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 9, 16, 100])
def test_every_limit_is_found(limit, monkeypatch):
    """Only the search is tested: a segment of T tokens needs T bytes."""
    monkeypatch.setattr(budget, "peak_bytes", lambda run, *_: run.train.segment)
    assert longest_segment(a_run(), limit, V).segment == limit
    assert longest_segment(a_run(), limit, V, at_most=7).segment == min(limit, 7)
    assert longest_segment(a_run(), limit, V, at_most=1).segment == 1


def test_a_budget_too_small_for_one_token_is_refused():
    with pytest.raises(UserError, match=r"custom takes [\d,]+ bytes with segments of 1 token, more than the 1,000"):
        longest_segment(a_run(), 1000, V)


def test_with_a_segment_the_rest_of_the_configuration_agrees():
    assert with_segment(a_run(**LEARNED), 3).model.context == 3
    assert with_segment(a_run(**RUNS["shaw"]), 3).to_dict()["model"]["max_distance"] == 10
    for changes in (LEARNED, RUNS["shaw"], LEARNED | {"model.max_segment": "60", "train.random_segments": "true"}):
        for segment in (1, 8, 30):
            validate(with_segment(a_run(**changes), segment))


SMALL = [
    *("--model.n-layer", "1", "--model.d-model", "16", "--model.n-head", "2", "--model.d-head", "8"),
    *("--model.d-inner", "16", "--train.batch-size", "2", "--vocabulary", "50", "--device", "cpu"),
]


def test_the_command_finds_it(capsys):
    words = ["bench", "budget", "stdlib-ablation-learned-half", "--like", "stdlib-ablation", *SMALL]
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["peak_bytes"] <= found["budget_bytes"] < found["measured"][str(found["segment"] + 1)]
    assert found["config"]["train"]["segment"] == found["segment"] > 128
    assert found["reference"] == {"name": "stdlib-ablation", "segment": 128}
    assert "segments of 128" in captured.err
    assert main(["bench", "budget", "stdlib-ablation", "--bytes", str(found["budget_bytes"]), *SMALL]) == 0
    assert "stdlib-ablation: segments of 128 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stdlib-ablation"], "expected one of --like and --bytes"),
        (["stdlib-ablation", "--like", "stdlib-ablation", "--bytes", "5"], "expected one of --like"),
        (["stdlib-ablation", "--bytes", "0"], "--bytes: expected 1 or more"),
        (["stdlib-ablation", "--bytes", "10"], "more than the 10 allowed"),
        (["stdlib-ablation", "--like", "nothing-like-it"], "unknown preset"),
        (["stdlib-ablation", "--bytes", "10", "--train.batch-size", "0"], "--train.batch-size is 0"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert main(["bench", "budget", *SMALL, *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert len([line for line in lines if line.startswith("txl: error")]) == 1
