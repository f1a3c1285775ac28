"""The scripts for a GPU: a run ends in time and keeps its shares, and each kernel is counted once."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from benchmarks import gpu_profile, gpu_ptb
from benchmarks.gpu import OLD_SHARES, first_rows, page, rows, summary

import txl
from txl.training.schedule import learning_rate
from txl_lab.records import RESULTS

PASSES, AVERAGED = 175, 50


class Simulated:
    """A training loop whose steps and evaluations take the seconds of a simulated clock."""

    def __init__(self, monkeypatch, minutes, step, averaged, evaluation=0.5, graphs=0.3):
        run = txl.preset("ptb")
        run.train.eval_every *= 7
        self.now, self.state = 0.0, SimpleNamespace(average=None)
        monkeypatch.setattr(gpu_ptb.time, "monotonic", lambda: self.now)
        report = SimpleNamespace(add=lambda **values: None)
        monkeypatch.setattr(gpu_ptb, "curves", lambda folder: {})
        directory = SimpleNamespace(write_config=lambda run: None)
        self.setup = SimpleNamespace(run=run, directory=directory, display=SimpleNamespace(steps=0))
        self.most, self.rates, train = run.train.steps, list[float](), run.train
        watch, number = gpu_ptb.Ending(run, 60 * minutes, cast(Any, report), Path()), 0
        while number < train.steps:
            if self.state.average is None and number >= (train.average_from or 0):
                self.state.average = object()
            self.rates.append(learning_rate(number, train))
            self.now += step if self.state.average is None else averaged
            number += 1
            self.now += graphs if number % 4 == 0 and number < 160 else 0  # 40 graphs are recorded
            if number % train.eval_every == 0:
                self.now += evaluation
            watch(cast(Any, self), number)
        self.decisions, self.steps = watch.decisions, number


@pytest.mark.parametrize(("step", "averaged"), [(0.004, 0.0044), (0.004, 0.008), (0.010, 0.010), (0.0035, 0.003)])
def test_a_run_ends_in_time_with_the_share_of_averaged_weights(monkeypatch, step, averaged):
    found = Simulated(monkeypatch, 7.5, step, averaged)
    assert 0.97 * 450 < found.now < 450 + 2
    train = found.setup.run.train
    share = (found.steps - train.average_from) / found.steps
    assert share == pytest.approx(AVERAGED / PASSES, abs=0.15 if averaged > 1.5 * step else 0.06)
    # The rate falls without a jump to the lowest one, where the average begins.
    assert (
        max(abs(after - before) for before, after in zip(found.rates[3000:], found.rates[3001:], strict=False)) < 5e-6
    )
    assert found.rates[train.average_from] == pytest.approx(train.min_learning_rate, rel=0.02)


def test_a_run_that_fits_is_the_preset_s(monkeypatch):
    found = Simulated(monkeypatch, 30, 0.004, 0.0042)
    assert (found.steps, found.decisions) == (found.most, [])


def test_a_run_whose_steps_become_slow_still_ends(monkeypatch):
    found = Simulated(monkeypatch, 1.0, 0.01, 0.5)
    assert found.now < 60 + 51  # a decision after a hundred averaged steps at the latest, else the clock


def test_lanes_change_steps_and_not_passes():
    words = {"preset": "ptb", "lanes": 20, "rate_factor": 1.4, "eval_passes": 7.0, "source": None, "set": []}
    given = Namespace(**words, rehearse=False)
    train, own = gpu_ptb.recipe(given).train, txl.preset("ptb").train
    assert (train.steps, train.average_from, train.warmup_steps) == (175 * 681, 125 * 681, 1500)
    assert train.steps * train.batch_size == own.steps * own.batch_size
    assert (train.learning_rate, train.min_learning_rate) == pytest.approx((4.2e-4, 1.4e-4))
    assert (train.dtype, train.capture, train.eval_every) == ("bfloat16", True, 7 * 681)


def test_each_kernel_is_counted_once(monkeypatch):
    """The trace holds ranges of annotations, and operators of the host, beside the kernels."""
    events = [
        {"cat": "kernel", "name": "nvjet_tst_128x64", "dur": 5},
        {"cat": "kernel", "name": "nvjet_tst_128x64", "dur": 7.5},
        {"cat": "kernel", "name": "forward_kernel", "dur": 3},
        {"cat": "gpu_memset", "name": "Memset (Device)", "dur": 1},
        {"cat": "gpu_user_annotation", "name": "Optimizer.step#Adam.step", "dur": 100},
        {"cat": "cpu_op", "name": "aten::mm", "dur": 50},
        {"ph": "M", "name": "process_name"},
    ]

    class Profiler:
        def __enter__(self):
            return self

        def __exit__(self, *raised):
            return None

        def export_chrome_trace(self, path):
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"traceEvents": events}, file)

    monkeypatch.setattr(gpu_profile, "profile", lambda activities: Profiler())
    monkeypatch.setattr(gpu_profile, "synchronize", lambda device: None)
    table = gpu_profile.table_of(gpu_profile.kernels_of(lambda: None, "cuda"))
    assert (table["launches"], table["microseconds"]) == (4, 16.5)
    assert table["kernels"][0] == {"name": "nvjet_tst_128x64", "launches": 2, "microseconds": 12.5}
    classes = {row["class"]: (row["launches"], row["microseconds"]) for row in table["classes"]}
    assert classes == {"matrix products": (2, 12.5), "triton_kernels": (1, 3), "fills": (1, 1)}


def test_every_row_is_a_function_with_columns():
    from benchmarks import gpu_checks, gpu_rows
    from benchmarks.gpu import COLUMNS, ITEMS

    together, alone = first_rows()
    for row in [*rows(), *together, *alone]:
        assert hasattr(gpu_checks if row.item in (9, 11) else gpu_rows, row.function)
        assert row.function in COLUMNS
        assert row.item in ITEMS


def test_old_records_say_how_their_shares_were_computed():
    for path in RESULTS.glob("gpu-nvidia-h200*.json"):
        record = json.loads(path.read_text())
        if "rehearsed" in record:
            assert (OLD_SHARES in page(record)) == ("began" not in record)
            assert page(record) == path.with_suffix(".md").read_text()
            assert OLD_SHARES not in page(record | {"began": 0.0})


def test_the_summary_has_a_line_for_each_row():
    given = {"preset": "ptb", "attention": "triton"}
    done = {
        "function": "training",
        "given": given,
        "ended": 61.2,
        "status": "done",
        "figures": {"step_seconds": 0.0031},
    }
    failed = {"function": "gradients", "given": {"shape": "ptb"}, "ended": 9.0, "status": "failed", "error": "boom"}
    assert summary([done, failed]) == [
        "   61 s  done     training ptb triton: 3.10 ms",
        "    9 s  failed   gradients ptb: boom",
    ]
