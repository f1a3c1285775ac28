"""Runs that are killed without a chance to save, at random moments and at the worst moments (`kill -9`)."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.conftest import small_run
from tests.forking import SERVER
from tests.training.test_trainer import assert_same_end

from txl.runs import checkpoints
from txl.runs.directory import RunDirectory
from txl.training import loop as loop_module
from txl.training import saver, snapshot
from txl.training.trainer import Trainer

OPTIONS = {
    "train.steps": "40",
    "train.checkpoint_every": "3",
    "train.eval_every": "4",
    "train.micro_batches": "2",
    "train.random_segments": "true",
    "train.log_every": "1",
    "train.average_from": "14",
}
MUON = OPTIONS | {"train.optimizer": "muon", "train.schedule": "linear", "train.dtype": "bfloat16"}


def _train(corpus: str, out: str, data_dir: str, options: dict[str, str], kill_at: tuple[str, int] | None = None):
    """Train in a separate process, which kills itself at the n-th call of a function if `kill_at` names one."""
    if kill_at is not None:
        _kill_at(*kill_at)
    Trainer(small_run(corpus, **options), out, data_dir=data_dir, quiet=True).fit()


def _kill_at(moment: str, number: int) -> None:
    module, name, before = MOMENTS[moment]
    real, calls = getattr(module, name), []

    def deadly(*args, **kwargs):
        calls.append(1)
        if len(calls) == number and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, deadly)


MOMENTS = {
    "between two parts of the lanes": (loop_module.TrainingLoop, "_stop_signal", True),
    "at a step's end": (loop_module, "training_step", False),
    "during an evaluation": (loop_module, "evaluate_with", True),
    "after an evaluation": (loop_module, "evaluate_with", False),
    "while the state is copied": (snapshot, "_joined", True),
    "before a checkpoint's files": (checkpoints, "_write_tensors", True),
    "between a checkpoint's files": (checkpoints, "_write_tensors", False),
    "before a checkpoint's name": (checkpoints.os, "rename", True),
    "before `latest` is moved": (RunDirectory, "set_pointer", True),
    "before `best` is moved": (saver, "point_at_best", True),
    "while old checkpoints are deleted": (checkpoints.shutil, "rmtree", True),
}


def start(
    corpus: Path, out: Path, data_dir: Path, kill_at: tuple[str, int] | None = None, options: dict[str, str] = OPTIONS
):
    arguments = (str(corpus), str(out), str(data_dir), options, kill_at)
    process = SERVER.Process(target=_train, args=arguments)
    process.start()
    return process


def assert_as_uninterrupted(out: Path, whole: Path) -> None:
    assert_same_end(out, whole)
    assert losses(out) == losses(whole)
    assert (out / "best").read_text() == (whole / "best").read_text()
    assert not list((out / "checkpoints").glob(".*"))
    events = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines() if line]
    assert events[-1]["event"] == "end"


@pytest.fixture(scope="module")
def uninterrupted(story, data_dir, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    Trainer(small_run(str(story), **OPTIONS), out, data_dir=data_dir, quiet=True).fit()
    return out


def losses(out: Path) -> dict[int, float]:
    """Return the loss of each step; of repeated steps, the one logged last."""
    return {event["step"]: event["loss"] for event in RunDirectory(out).events() if event["event"] == "train"}


def test_killed_at_random_moments_a_run_ends_as_if_nothing_had_happened(uninterrupted, story, data_dir, tmp_path):
    out, draw = tmp_path / "run", random.Random(1)
    for _ in range(6):
        process = start(story, out, data_dir)
        log = out / "log.jsonl"
        before = len(log.read_bytes()) if log.exists() else 0
        while process.is_alive() and not (log.exists() and len(log.read_bytes()) > before):
            time.sleep(0.005)
        time.sleep(draw.random() * 0.1)
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
    process = start(story, out, data_dir)
    process.join()
    assert process.exitcode == 0
    assert_as_uninterrupted(out, uninterrupted)


def test_killed_at_each_of_the_worst_moments_a_run_ends_as_if_nothing_had_happened(
    uninterrupted, story, data_dir, tmp_path
):
    """One run is killed at one moment after another; each start goes on from what the kill before has left."""
    out = tmp_path / "run"
    for moment in MOMENTS:
        process = start(story, out, data_dir, (moment, 2))
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"{moment} did not come twice before the run's end"
    process = start(story, out, data_dir)
    process.join()
    assert process.exitcode == 0
    assert_as_uninterrupted(out, uninterrupted)


def test_killed_with_muon_a_run_ends_as_if_nothing_had_happened(story, data_dir, tmp_path):
    Trainer(small_run(str(story), **MUON), tmp_path / "whole", data_dir=data_dir, quiet=True).fit()
    for kill_at in (("at a step's end", 8), ("between a checkpoint's files", 12), None):  # the second is after step 14
        process = start(story, tmp_path / "run", data_dir, kill_at, MUON)
        process.join()
        assert process.exitcode == (0 if kill_at is None else -signal.SIGKILL)
    assert_same_end(tmp_path / "run", tmp_path / "whole")
