"""Display of training: lines on standard error, and TensorBoard."""

from __future__ import annotations

import math
import sys

import pytest
from tests.conftest import small_run
from tests.training.test_trainer import events, stop_after, train

from txl.errors import RunInterrupted, UserError
from txl.training.display import Display, StepFigures

FIGURES = StepFigures(
    step=40, loss=math.log(2), tokens_per_second=12345.6, learning_rate=2.5e-4, grad_norm=0.5, seconds_left=3723.4,
    tokens=40_000, tokens_read=40_000, elapsed=3.3,
)  # fmt: skip


def test_lines_go_to_standard_error_unless_quiet(capsys):
    for quiet in (True, False):
        display = Display("byte", 100, quiet)
        display.message("[weights] of a/b\nin two lines")
        display.line(FIGURES)
        display.valid(40, math.log(4), 5000, is_best=True)
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.splitlines() == ([] if quiet else [
            "[weights] of a/b in two lines",
            "step 40/100 | loss 0.6931 | bpc 1.0000 | 12,346 tokens/s | lr 2.50e-04 | grad norm 0.500 | left 1:02:03",
            "validation at step 40: bpc 2.0000 on 5,000 tokens, the best so far",
        ])  # fmt: skip


def test_figures_for_tensorboard(story, data_dir, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(small_run(str(story), **{"train.tensorboard": "true"}), tmp_path / "run", data_dir)
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    logged = {event["step"]: event["loss"] for event in events(tmp_path / "run", "train")}
    shown = {point.step: point.value for point in read.Scalars("train/loss")}
    assert shown == pytest.approx(logged)
    assert [point.step for point in read.Scalars("valid/bpc")] == [6, 12]


def test_a_run_that_is_stopped_has_written_its_figures_for_tensorboard(story, data_dir, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stop_after(monkeypatch, 3)
    with pytest.raises(RunInterrupted):
        train(
            small_run(str(story), **{"train.tensorboard": "true", "train.log_every": "1"}), tmp_path / "run", data_dir
        )
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert [point.step for point in read.Scalars("train/loss")] == [1, 2, 3]


def test_without_tensorboard_one_line_says_what_to_install(story, data_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="the package tensorboard is missing"):
        train(small_run(str(story), **{"train.tensorboard": "true"}), tmp_path / "run", data_dir)
    assert not (tmp_path / "run").exists()
