"""Several processes: equal results, checkpoints for any number of processes, killed processes, torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import forking
from tests.conftest import options_of, small_run
from tests.training.test_trainer import stop_after

import txl
from txl.errors import RunInterrupted, UserError
from txl.processes import Processes, process_count, processes_of
from txl.runs.directory import RunDirectory
from txl.training.display import Display
from txl.training.snapshot import _restore_generators
from txl.training.trainer import Trainer, _check_processes

EXACT = {
    "train.steps": "40",
    "train.batch_size": "8",
    "train.dtype": "float64",
    "train.learning_rate": "0.0003",
    "train.log_every": "1",
    "train.eval_every": "20",
    "train.checkpoint_every": "8",
    "eval.batch_size": "3",
    "model.dropout": "0",
    "model.dropatt": "0",
}


def command(out: Path, corpus: Path, data_dir: Path, options: dict[str, str]) -> list[str]:
    run = small_run(str(corpus), **options)
    given = options_of(run)
    preset = {"vanilla": "enwik8-vanilla-small", "recurrent": "ptb-lstm-small"}.get(run.model.family, "stdlib-tiny")
    return ["train", preset, "--out", str(out), "--data-dir", str(data_dir), *given]


def launch(
    out: Path, corpus: Path, data_dir: Path, processes: int, options: dict[str, str]
) -> subprocess.CompletedProcess:
    return forking.run(command(out, corpus, data_dir, options), out.with_suffix(".errors"), processes)


def torchrun(out: Path, corpus: Path, data_dir: Path, options: dict[str, str], *given: str) -> subprocess.Popen:
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *given, "-m", "txl"]
    words = [*program, *command(out, corpus, data_dir, options)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)


def values(out: Path, event: str, field: str) -> dict[int, float]:
    return {each["step"]: each[field] for each in RunDirectory(out).events() if each["event"] == event}


def assert_same_numbers(out: Path, expected: Path, within: float) -> None:
    for event, field in (("train", "loss"), ("valid", "nll")):
        ours, theirs = values(out, event, field), values(expected, event, field)
        assert ours.keys() == theirs.keys()
        assert max(abs(ours[step] - theirs[step]) for step in ours) < within


def wait_for_step(out: Path, step: int, alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while step not in (values(out, "train", "loss") if out.exists() else {}):
        assert alive()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def alone(story, data_dir, tmp_path_factory) -> Path:
    """Provide the directory of a run that one process trained."""
    out = tmp_path_factory.mktemp("alone") / "run"
    Trainer(small_run(str(story), **EXACT), out, data_dir=data_dir, quiet=True).fit()
    return out


@pytest.mark.parametrize(("text", "count"), [("", 1), ("3", 3)])
def test_the_number_of_processes_is_that_of_the_environment(text, count, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", text)
    assert process_count() == count
    monkeypatch.setenv("WORLD_SIZE", "x")
    with pytest.raises(UserError, match="environment variable WORLD_SIZE is 'x'; expected a number of processes"):
        process_count()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MASTER_ADDR", ""),
        ("MASTER_PORT", ""),
        ("RANK", "x"),
        ("RANK", "2"),
        ("MASTER_PORT", "x"),
        ("MASTER_PORT", "70000"),
    ],
)
def test_an_environment_that_torchrun_did_not_set_is_refused(name, value, monkeypatch):
    for each in (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(*each)
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"environment variable {name} is {value!r}; expected"), processes_of("cpu"):
        pass


def test_one_gpu_for_several_processes_is_refused(monkeypatch):
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refused = pytest.raises(UserError, match="device cuda:1: one GPU, and 2 processes run here")
    with refused, processes_of("cuda:1"):
        pass


@pytest.mark.parametrize(
    ("processes", "options"),
    [(4, {"train.micro_batches": "2"}), (2, {"train.parallel": "fsdp", "train.micro_batches": "2"})],
)
def test_several_processes_compute_what_one_does(processes, options, alone, story, data_dir, tmp_path):
    done = launch(tmp_path / "run", story, data_dir, processes, EXACT | options)
    assert done.returncode == 0, done.stderr
    assert_same_numbers(tmp_path / "run", alone, 1e-9)
    ours, theirs = txl.load(tmp_path / "run")[0], txl.load(alone)[0]
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (one - other).abs().max() < 1e-9, name
    events = RunDirectory(tmp_path / "run").events()
    assert [each["event"] for each in events].count("start") == 1  # only one process writes the log
    assert done.stderr.count("done: step 40") == 1  # and only one prints


@pytest.mark.parametrize(
    "options",
    [
        {"model.kind": "lstm", "model.mem_len": "0", "model.n_head": "8", "model.d_head": "64", "model.d_inner": "2048",
         "model.weight_drop": "0", "eval.mem_len": "0", "eval.window": "none"},
        {"train.optimizer": "sgd", "train.momentum": "0.9", "train.learning_rate": "0.01"},
        {"model.cutoffs": "40,100", "model.div_val": "2", "train.loss": "half"},
    ],
    ids=["recurrent", "sgd", "adaptive"],
)  # fmt: skip
def test_other_models_and_optimisers_are_sharded_too(options, story, data_dir, tmp_path):
    options = EXACT | {"train.steps": "10", "train.eval_every": "5"} | options
    Trainer(small_run(str(story), **options), tmp_path / "one", data_dir=data_dir, quiet=True).fit()
    done = launch(tmp_path / "two", story, data_dir, 2, options | {"train.parallel": "fsdp"})
    assert done.returncode == 0, done.stderr
    assert_same_numbers(tmp_path / "two", tmp_path / "one", 1e-9)


def test_emptied_lanes_and_steps_of_several_segments_go_on_in_two_processes(story, data_dir, tmp_path, monkeypatch):
    """One process stops in step 3, and two processes continue; each of them empties the drawn lanes that it holds."""
    steps = {"train.steps": "8", "train.eval_every": "4", "train.reset_memory": "0.4", "train.backprop_segments": "2"}
    run = small_run(str(story), **EXACT | steps)
    Trainer(run, tmp_path / "one", data_dir=data_dir, quiet=True).fit()
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(RunInterrupted):
            Trainer(run, tmp_path / "run", data_dir=data_dir, quiet=True).fit()
    done = launch(tmp_path / "run", story, data_dir, 2, EXACT | steps)
    assert done.returncode == 0, done.stderr
    assert "going on from step 3" in done.stderr
    assert_same_numbers(tmp_path / "run", tmp_path / "one", 1e-9)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_process_whose_lanes_are_all_emptied_saves_with_the_others(parallel, story, data_dir, tmp_path):
    steps = {"train.steps": "6", "train.eval_every": "3", "train.reset_memory": "0.3", "train.checkpoint_every": "1"}
    options = EXACT | steps | {"train.batch_size": "2", "model.mem_len": "32"}
    Trainer(small_run(str(story), **options), tmp_path / "one", data_dir=data_dir, quiet=True).fit()
    done = launch(tmp_path / "two", story, data_dir, 2, options | {"train.parallel": parallel})
    assert done.returncode == 0, done.stderr
    assert_same_numbers(tmp_path / "two", tmp_path / "one", 1e-9)


def test_with_muon_two_processes_compute_what_one_does(story, data_dir, tmp_path):
    options = {"train.optimizer": "muon", "train.schedule": "linear", "train.average_from": "8"}
    options |= EXACT | {"train.steps": "10", "train.eval_every": "5", "train.learning_rate": "0.01"}
    Trainer(small_run(str(story), **options), tmp_path / "one", data_dir=data_dir, quiet=True).fit()
    done = launch(tmp_path / "two", story, data_dir, 2, options)
    assert done.returncode == 0, done.stderr
    assert_same_numbers(tmp_path / "two", tmp_path / "one", 1e-9)


@pytest.mark.parametrize(
    ("first", "then"), [((2, "ddp"), (1, "ddp")), ((1, "ddp"), (2, "fsdp")), ((4, "fsdp"), (1, "ddp"))]
)
def test_a_run_goes_on_with_another_number_of_processes(first, then, alone, story, data_dir, tmp_path):
    out = tmp_path / "run"
    before = command(out, story, data_dir, EXACT | {"train.parallel": first[1]})
    processes = forking.start(before, tmp_path / "errors", first[0])
    wait_for_step(out, 18, lambda: all(each.is_alive() for each in processes))
    forking.kill(processes)
    done = launch(out, story, data_dir, then[0], EXACT | {"train.parallel": then[1]})
    assert done.returncode == 0, done.stderr
    assert "going on from step" in done.stderr
    assert_same_numbers(out, alone, 1e-9)


def test_a_process_that_dies_ends_the_run_and_the_next_start_goes_on(alone, story, data_dir, tmp_path):
    out = tmp_path / "run"
    process = torchrun(out, story, data_dir, EXACT)
    wait_for_step(out, 10, lambda: process.poll() is None)
    os.kill(_process_of_rank(1, out), signal.SIGKILL)
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - began < 60
    assert "Traceback" not in errors.split("torch/distributed/elastic", 1)[0]  # torchrun prints a traceback of its own
    done = launch(out, story, data_dir, 2, EXACT)
    assert done.returncode == 0, done.stderr
    assert_same_numbers(out, alone, 1e-9)


@pytest.mark.parametrize("sent", [signal.SIGUSR1])
def test_a_signal_saves_in_all_processes_alike(sent, alone, story, data_dir, tmp_path):
    out = tmp_path / "run"
    process = torchrun(out, story, data_dir, EXACT, "--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGUSR1")
    wait_for_step(out, 10, lambda: process.poll() is None)
    process.send_signal(sent)
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert errors.count("everything is saved") == 1
    stop = next(event for event in RunDirectory(out).events() if event["event"] == "stop")
    assert stop["reason"] == sent.name
    assert (out / "latest").read_text() == f"step-{stop['step']:08d}\n"
    assert launch(out, story, data_dir, 2, EXACT).returncode == 0
    assert_same_numbers(out, alone, 1e-9)


def test_a_second_run_in_the_same_processes_does_not_take_the_answers_of_the_first(tmp_path):
    """The first of three runs ends with an exception in both processes."""
    program = tmp_path / "program.py"
    program.write_text(
        "import time\n"
        "from txl.processes import processes_of\n"
        "def slow(number):\n"
        "    time.sleep(0.5)\n"
        "    return number\n"
        "for number in (0, 1, 2):\n"
        "    try:\n"
        "        with processes_of('cpu') as (processes, _):\n"
        "            answer = processes.first_does('which run is it', lambda: slow(number))\n"
        "            assert number > 0\n"
        "    except AssertionError:\n"
        "        assert number == 0\n"
        "    assert answer == number, (processes.rank, answer, number)\n"
    )
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    made = subprocess.run(words, timeout=240, capture_output=True)
    assert made.returncode == 0, made.stderr


def test_mistakes_are_told_once(story, data_dir, tmp_path):
    process = torchrun(tmp_path / "run", tmp_path / "missing.txt", data_dir, EXACT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert errors.count("txl: error: ") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"train.batch_size": "6", "train.micro_batches": "2"}, "train.batch_size"),
        ({"train.parallel": "fsdp", "train.average_from": "3"}, "train.parallel"),
        ({"train.parallel": "fsdp", "train.optimizer": "muon"}, "train.parallel"),
    ],
)
def test_what_does_not_work_with_several_processes_is_refused(options, field):
    run = small_run("stdlib", **options)
    with pytest.raises(UserError) as refused:
        _check_processes(run, Processes(0, 2))
    assert refused.value.field == field
    _check_processes(run, Processes())  # a single process has nothing to divide


def test_with_another_number_of_processes_each_process_draws_its_own_numbers():
    def drawn(rank: int, step: int) -> list[float]:
        setup: Any = SimpleNamespace(
            trained=SimpleNamespace(processes=Processes(rank, 2)), run=small_run("stdlib"), display=Display("", 1, True)
        )
        with torch.random.fork_rng(devices=[]):
            _restore_generators({"cpu": torch.get_rng_state()[None]}, setup, 1, step)
            return torch.rand(3).tolist()

    assert drawn(0, 7) == drawn(0, 7)
    assert len({tuple(drawn(rank, step)) for rank in (0, 1) for step in (7, 8)}) == 4


def test_sharded_checkpoints_need_no_pickle(story, data_dir, tmp_path):
    options = EXACT | {"train.steps": "3", "train.parallel": "fsdp"}
    assert launch(tmp_path / "run", story, data_dir, 2, options).returncode == 0
    checkpoint = RunDirectory(tmp_path / "run").checkpoint("latest")
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    assert len([path for path in files if path.parent.name == "training_state"]) == 2
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
    assert set(listed) == {path.relative_to(checkpoint).as_posix() for path in files} - {"manifest.json"}


def _process_of_rank(rank: int, out: Path) -> int:
    found = subprocess.run(["pgrep", "-f", str(out)], capture_output=True, text=True).stdout.split()
    for each in found:
        try:
            environment = Path(f"/proc/{each}/environ").read_text(errors="replace").split("\0")
        except OSError:
            continue
        if f"RANK={rank}" in environment and "WORLD_SIZE=2" in environment:
            return int(each)
    raise AssertionError(f"no process of rank {rank} among {found}")


@pytest.mark.parametrize("options", [{"train.micro_batches": "2"}, {"train.parallel": "fsdp"}], ids=["ddp", "fsdp"])
def test_gradients_flow_into_memory_in_two_processes_too(options, story, data_dir, tmp_path):
    steps = EXACT | {"train.steps": "4", "train.eval_every": "2", "train.backprop_segments": "2"}
    Trainer(small_run(str(story), **steps), tmp_path / "one", data_dir=data_dir, quiet=True).fit()
    done = launch(tmp_path / "two", story, data_dir, 2, steps | options)
    assert done.returncode == 0, done.stderr
    assert_same_numbers(tmp_path / "two", tmp_path / "one", 1e-9)
