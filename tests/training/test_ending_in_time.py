"""Runs of `--minutes` on a machine that has become slower: fewer steps, and still exact after a stop."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import small_run
from tests.training.test_trainer import assert_same_end, stop_after, train

from txl.config import RunConfig
from txl.errors import RunInterrupted, UserError
from txl.runs.directory import RunDirectory
from txl.training import saver
from txl.training.pace import Pace
from txl.training.schedule import learning_rate


def planned(story: Path, **options: str) -> RunConfig:
    """Return a run of 12 steps, planned for 600 seconds, with a checkpoint every two steps."""
    run = small_run(
        str(story),
        **{
            "train.planned_minutes": "10",
            "train.schedule": "linear",
            "train.log_every": "1",
            "train.checkpoint_every": "2",
        }
        | options,
    )
    run.name = "10-minutes"
    return run


def steps_take(monkeypatch, *seconds: float) -> None:
    """Let the steps of a process take so many seconds, and the steps after them one second."""
    counted: set[tuple[int, int]] = set()

    def tick(self: Pace) -> float:
        if (id(self), self.steps) in counted:
            return 0.0
        counted.add((id(self), self.steps))
        return (*seconds, 1.0)[min(self.steps - 1, len(seconds))]

    monkeypatch.setattr(Pace, "tick", tick)


def changes(out: Path) -> list[tuple[int, int, int]]:
    events = [each for each in RunDirectory(out).events() if each["event"] == "extend"]
    return [(each["step"], each["from_steps"], each["to_steps"]) for each in events]


SLOWER = (50, 50, 100, 100, 100, 100, 100)


def test_a_run_on_a_slower_machine_makes_fewer_steps(story, data_dir, tmp_path, monkeypatch):
    out = tmp_path / "run"
    steps_take(monkeypatch, *SLOWER)
    assert train(planned(story), out, data_dir)["step"] == 7
    assert changes(out) == [(4, 12, 7)]
    assert (out / "latest").read_text() == "step-00000007\n"
    events, config = RunDirectory(out).events(), RunDirectory(out).config().train
    assert config.steps == 7
    before = planned(story).train
    rates = [learning_rate(step, before if step < 4 else config) for step in range(7)]
    assert [each["learning_rate"] for each in events if each["event"] == "train"] == pytest.approx(rates)
    assert [each["step"] for each in events if each["event"] == "valid"] == [6, 7]
    assert train(RunDirectory(out).config(), out, data_dir)["step"] == 7, "the run is complete"


def test_a_stopped_run_keeps_its_number_of_steps(story, data_dir, tmp_path, monkeypatch):
    steps_take(monkeypatch, *SLOWER)
    train(planned(story), tmp_path / "whole", data_dir)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(RunInterrupted, match="at step 5 of 7"):
            train(planned(story), tmp_path / "run", data_dir)
    train(RunDirectory(tmp_path / "run").config(), tmp_path / "run", data_dir)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_a_run_killed_while_it_changes_its_steps_goes_on_with_the_old_number(story, data_dir, tmp_path, monkeypatch):
    out, real = tmp_path / "run", RunDirectory.write_config

    def killed(self: RunDirectory, config: RunConfig) -> None:
        if config.train.steps != 12:
            raise RuntimeError("killed")
        real(self, config)

    steps_take(monkeypatch, *SLOWER)
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "write_config", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(planned(story), out, data_dir)
    assert ((out / "latest").read_text(), RunDirectory(out).config().train.steps) == ("step-00000004\n", 12)
    assert train(RunDirectory(out).config(), out, data_dir)["step"] == 9
    assert changes(out) == [(8, 12, 9)], "at step 8, 600 seconds are over"


def test_a_machine_that_is_faster_again_makes_the_first_number_of_steps(story, data_dir, tmp_path, monkeypatch):
    steps_take(monkeypatch, *SLOWER[:4])
    assert train(planned(story), tmp_path / "run", data_dir)["step"] == 12
    assert changes(tmp_path / "run") == [(4, 12, 7), (6, 7, 11), (8, 11, 12)]


@pytest.mark.parametrize(
    "options", [{"train.average_from": "8"}, {"train.patience": "9"}, {"train.planned_minutes": "none"}]
)
def test_other_runs_keep_their_steps(options, story, data_dir, tmp_path, monkeypatch):
    steps_take(monkeypatch, *SLOWER)
    assert train(planned(story, **options), tmp_path / "run", data_dir)["step"] == 12
    assert changes(tmp_path / "run") == []


def test_a_full_disk_that_does_not_stop_the_run_keeps_its_steps(story, data_dir, tmp_path, monkeypatch):
    """The number changes at the next checkpoint: with `train.on_save_error continue` the run goes on without one."""
    real = saver.write_checkpoint

    def full(folder, step, contents):
        if step == 4:
            raise UserError("No space left on device")
        return real(folder, step, contents)

    monkeypatch.setattr(saver, "write_checkpoint", full)
    steps_take(monkeypatch, *SLOWER)
    run = planned(story, **{"train.on_save_error": "continue"})
    assert train(run, tmp_path / "run", data_dir)["step"] == 7
    assert changes(tmp_path / "run") == [(6, 12, 7)]
