"""Saving to full and slow disks, and after signals."""

from __future__ import annotations

import dataclasses
import time

import pytest
from tests.conftest import small_run
from tests.training.test_trainer import assert_same_end, events, stop_after, train

from txl.errors import RunInterrupted, UserError
from txl.runs.directory import RunDirectory
from txl.training import loop, saver
from txl.training import loop as loop_module


def test_a_full_disk_need_not_end_a_run(story, data_dir, tmp_path, monkeypatch, capsys):
    from txl.runs import checkpoints
    from txl.training.trainer import Trainer

    real, calls = checkpoints._write_tensors, []

    def full(path, tensors):
        calls.append(path)
        if "step-00000004" in str(path) or "step-00000008" in str(path):
            raise OSError(28, "No space left on device")
        real(path, tensors)

    monkeypatch.setattr(checkpoints, "_write_tensors", full)
    run = small_run(str(story), **{"train.eval_every": "0"})
    with pytest.raises(UserError, match="step-00000004: the checkpoint could not be written .No space left"):
        train(run, tmp_path / "stops", data_dir)
    run.train.on_save_error = "continue"
    Trainer(run, tmp_path / "run", data_dir=data_dir).fit()
    assert "No space left on device" in capsys.readouterr().err
    assert len(events(tmp_path / "run", "save failed")) == 2
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000012"]


@pytest.mark.parametrize("in_background", ["true", "false"])
def test_a_last_checkpoint_that_cannot_be_written_is_an_error(in_background, story, data_dir, tmp_path, monkeypatch):
    """This holds even if `train.on_save_error` is `continue`: otherwise the run's result would be lost silently."""

    def full(path, tensors):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("txl.runs.checkpoints._write_tensors", full)
    run = small_run(str(story), **{"train.on_save_error": "continue", "train.async_checkpoints": in_background})
    with pytest.raises(UserError, match="step-00000012: the checkpoint could not be written"):
        train(run, tmp_path / "run", data_dir)
    assert not events(tmp_path / "run", "end")
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        with pytest.raises(UserError, match="step-00000006: the checkpoint could not be written"):
            train(run, tmp_path / "stopped", data_dir)


def test_a_log_that_cannot_be_written_need_not_end_a_run(story, data_dir, tmp_path, monkeypatch, capsys):
    from txl.training.trainer import Trainer

    real = RunDirectory.append

    def full(self, event, step, **fields):
        if event in ("train", "checkpoint"):
            raise UserError("log.jsonl: the log cannot be written (No space left on device)")
        real(self, event, step, **fields)

    monkeypatch.setattr(RunDirectory, "append", full)
    run = small_run(str(story), **{"train.eval_every": "0"})
    with pytest.raises(UserError, match="the log cannot be written"):
        train(run, tmp_path / "stops", data_dir)
    run.train.on_save_error = "continue"
    Trainer(run, tmp_path / "run", data_dir=data_dir).fit()
    assert "No space left on device" in capsys.readouterr().err
    assert (tmp_path / "run" / "latest").read_text() == "step-00000012\n"


@pytest.mark.parametrize("evaluated", ["0", "4"])
def test_training_does_not_wait_for_the_disk(evaluated, story, data_dir, tmp_path, monkeypatch):
    """Steps continue while a slow disk writes a checkpoint, and the checkpoint holds the state of its own step.

    This holds too if the checkpoint is due after an evaluation that has just saved it as the best.
    """
    real, began, written = saver.write_checkpoint, {}, {}

    def slow(folder, step, contents):
        began[step] = time.monotonic()
        time.sleep(0.3)
        written[step] = time.monotonic()
        return real(folder, step, contents)

    steps, real_step = [], loop_module.training_step

    def timed(*args):
        result = real_step(*args)
        steps.append(time.monotonic())
        return result

    monkeypatch.setattr(saver, "write_checkpoint", slow)
    monkeypatch.setattr(loop_module, "training_step", timed)
    options = {"train.eval_every": evaluated, "train.checkpoint_every": "4"}
    train(small_run(str(story), **options), tmp_path / "run", data_dir)
    assert any(began[4] < moment < written[4] for moment in steps)
    monkeypatch.undo()
    train(small_run(str(story), **options | {"train.async_checkpoints": "false"}), tmp_path / "sync", data_dir)
    assert_same_end(tmp_path / "run", tmp_path / "sync")


def test_a_stop_between_two_parts_gives_the_step_up(story, data_dir, tmp_path, monkeypatch):
    import os
    import signal

    run = small_run(str(story), **{"train.micro_batches": "4"})
    train(run, tmp_path / "whole", data_dir)
    from txl.training.parallel import TrainedModel

    real, calls = TrainedModel.training_terms, []

    def interrupted(self, *args):
        calls.append(1)
        if len(calls) == 4 * 6 + 2:  # the second part of step 7
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(TrainedModel, "training_terms", interrupted)
        with pytest.raises(RunInterrupted, match="stopped by SIGTERM at step 6 of 12"):
            train(run, tmp_path / "run", data_dir)
    assert len(calls) == 4 * 6 + 2
    train(run, tmp_path / "run", data_dir)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_a_second_signal_ends_the_program_at_once(story, data_dir, tmp_path):
    """This holds even while a slow disk writes a checkpoint."""
    from tests.training.test_kills import SERVER

    process = SERVER.Process(target=_signalled_twice, args=(str(story), str(tmp_path / "run"), str(data_dir)))
    process.start()
    began = time.monotonic()
    process.join(60)
    assert process.exitcode == 143
    assert time.monotonic() - began < 50


def _signalled_twice(corpus: str, out: str, data_dir: str) -> None:
    import os
    import signal

    real, calls = loop_module.training_step, []

    def slow(path, tensors):
        time.sleep(600)

    def twice(*args):
        calls.append(1)
        if len(calls) == 6:  # the checkpoint of step 4 is being written
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    from txl.runs import checkpoints

    checkpoints._write_tensors, loop_module.training_step = slow, twice
    train(small_run(corpus), out, data_dir)


def test_the_best_checkpoint_stays_until_a_better_one_stands(story, data_dir, tmp_path, monkeypatch):
    from txl.runs import checkpoints

    real = checkpoints._write_tensors

    def full(path, tensors):
        if "step-00000012" in str(path):
            raise OSError(28, "No space left on device")
        real(path, tensors)

    monkeypatch.setattr(checkpoints, "_write_tensors", full)
    losses = iter([4.0, 3.0, 3.5, 3.5])
    real_evaluate = loop.evaluate_with
    monkeypatch.setattr(
        loop,
        "evaluate_with",
        lambda *args, **settings: dataclasses.replace(real_evaluate(*args, **settings), nll=next(losses)),
    )
    options = {"train.on_save_error": "continue", "train.keep_checkpoints": "1", "train.steps": "24"}
    train(small_run(str(story), **options), tmp_path / "run", data_dir)
    assert RunDirectory(tmp_path / "run").checkpoint().name == "step-00000006"
    RunDirectory(tmp_path / "run").load()
