"""Runs whose validation losses determine the learning rate and the end of training."""

from __future__ import annotations

import pytest
from tests.conftest import small_run
from tests.training.test_trainer import assert_same_end, events, train, train_until

from txl.config import TrainConfig
from txl.errors import UserError
from txl.runs.directory import RunDirectory
from txl.runs.status import run_status
from txl.training.schedule import has_converged, learning_rate
from txl.training.trainer import Trainer

PLATEAU = {"train.schedule": "plateau", "train.patience": "3", "train.eval_every": "1", "train.steps": "40"}


@pytest.mark.parametrize(
    ("losses", "divisor", "ends"),
    [
        ([], 1, False),
        ([3.0, 2.0], 1, False),
        ([3.0, 2.0, 2.0], 4, False),  # an equal loss is no improvement
        ([3.0, 2.0, 2.5, 1.9], 4, False),
        ([3.0, 2.0, 2.5, 1.9, 1.95, 1.9], 64, True),
        ([float("nan"), float("nan")], 16, True),
    ],
)
def test_the_rate_falls_and_training_ends_where_evaluations_get_no_better(losses, divisor, ends):
    config = TrainConfig(schedule="plateau", patience=2, learning_rate=1.0)
    assert learning_rate(1000, config, losses) == 1 / divisor
    assert has_converged(losses, config) is ends
    assert learning_rate(1000, TrainConfig(schedule="plateau", learning_rate=1.0, min_learning_rate=0.3), losses) >= 0.3
    assert not has_converged(losses, TrainConfig())


def test_a_plateau_that_comes_to_the_last_step_ends_at_a_low_rate():
    config = TrainConfig(schedule="plateau", steps=100, decay_share=0.25, learning_rate=1.0)
    assert [learning_rate(step, config) for step in (0, 74, 75, 80, 90, 100)] == pytest.approx([1, 1, 1, 0.8, 0.4, 0])
    assert learning_rate(90, config, [3.0, 3.0]) == pytest.approx(0.1)
    config.min_learning_rate = 0.2
    assert learning_rate(100, config) == learning_rate(90, config, [3.0, 3.0]) == pytest.approx(0.2)


def test_a_run_that_gets_no_better_ends(story, data_dir, tmp_path, capsys):
    run = small_run(str(story), **PLATEAU | {"train.learning_rate": "1e-30", "train.log_every": "3"})
    for _ in range(2):  # the second time, nothing is left to do
        Trainer(run, tmp_path / "run", device="cpu", data_dir=data_dir).fit()
        directory = RunDirectory(tmp_path / "run")
        assert directory.checkpoint("latest").name == "step-00000004"
        events = directory.events()
        assert [event["step"] for event in events if event["event"] == "valid"] == [1, 2, 3, 4]
        assert [event["step"] for event in events if event["event"] == "train"] == [3, 4]
        assert events[-1]["event"] == "end"
        assert events[-1]["converged"] is True
        assert run_status(tmp_path / "run").state == "finished"
        assert "done: step 4 of 40 (no new best in 3 evaluations)" in capsys.readouterr().err


@pytest.mark.parametrize("step", [2, 5, 6])
def test_a_stopped_run_goes_on_exactly(step, story, data_dir, tmp_path, monkeypatch):
    # At this learning rate the validation loss soon rises.
    run = small_run(str(story), **PLATEAU | {"train.learning_rate": "0.1", "train.clip": "0", "train.log_every": "1"})
    train(run, tmp_path / "whole", data_dir)
    logged = events(tmp_path / "whole", "train")
    assert step < logged[-1]["step"] < 40
    assert logged[-1]["learning_rate"] < logged[step]["learning_rate"]
    train_until(step, monkeypatch, run, tmp_path / "stopped", data_dir)
    train(run, tmp_path / "stopped", data_dir)
    assert_same_end(tmp_path / "whole", tmp_path / "stopped")


def test_when_it_is_evaluated_is_part_of_such_a_run(story, data_dir, tmp_path):
    run = small_run(str(story), **PLATEAU | {"train.learning_rate": "1e-30"})
    train(run, tmp_path / "run", data_dir)
    run.train.eval_every = 2
    with pytest.raises(UserError, match="eval_every 1 -> 2"):
        train(run, tmp_path / "run", data_dir)
