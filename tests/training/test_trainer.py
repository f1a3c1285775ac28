"""Whole runs, uninterrupted or stopped and continued; final states are compared bit for bit."""

from __future__ import annotations

import json
import math
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import options_of, small_run

import txl
from txl.errors import STOP_SIGNALS, RunInterrupted, TrainingDiverged, UserError
from txl.runs.checkpoints import VerifiedCheckpoint
from txl.runs.directory import RunDirectory
from txl.training import loop as loop_module
from txl.training import saver as saver_module
from txl.training import trainer as trainer_module
from txl.training.trainer import Trainer


def train(run, out, data_dir, **kwargs):
    return Trainer(run, out, data_dir=data_dir, quiet=True, **kwargs).fit()


def events(out, name: str) -> list[dict[str, Any]]:
    return [event for event in RunDirectory(out).events() if event["event"] == name]


def before_step(monkeypatch, step: int, action: Callable[..., object]) -> None:
    """Call `action` with the arguments of step `step`, counted from this call, before the step is made."""
    real, calls = loop_module.training_step, []

    def counting(*args):
        calls.append(1)
        if len(calls) == step:
            action(*args)
        return real(*args)

    monkeypatch.setattr(loop_module, "training_step", counting)


def stop_after(monkeypatch, step: int) -> None:
    """Send SIGINT (Ctrl-C) to this process in step `step`, counted from this call."""
    before_step(monkeypatch, step, lambda *_: os.kill(os.getpid(), signal.SIGINT))


def killed(*_: object) -> None:
    raise MemoryError  # stands for whatever ends a process


def train_until(step: int, monkeypatch, run, out: Path, data_dir: Path, **kwargs) -> None:
    """Train, and stop by SIGINT in step `step`, counted from this call."""
    with monkeypatch.context() as patch:
        stop_after(patch, step)
        with pytest.raises(RunInterrupted):
            train(run, out, data_dir, **kwargs)


def watch_steps(monkeypatch, seen_by: Callable[..., object]) -> list[Any]:
    """Return the list to which every step adds what a function of model, optimiser and inputs returns before it."""
    seen: list[Any] = []
    real = loop_module.training_step

    def watched(trained, optimizer, inputs, *rest):
        seen.append(seen_by(trained, optimizer, inputs))
        return real(trained, optimizer, inputs, *rest)

    monkeypatch.setattr(loop_module, "training_step", watched)
    return seen


def final_state(out: Path) -> dict[str, torch.Tensor]:
    checkpoint = RunDirectory(out).checkpoint("latest")
    return load_file(checkpoint / "model.safetensors") | load_file(checkpoint / "training_state.safetensors")


def assert_same_end(one: Path, other: Path) -> None:
    ours, theirs = final_state(one), final_state(other)
    assert ours.keys() == theirs.keys()
    assert {key.split(".")[0] for key in ours} >= {"optimizer", "memory", "random", "layers"}
    for key in ours:
        assert torch.equal(ours[key], theirs[key]), key
    numbers = [
        json.loads((RunDirectory(out).checkpoint("latest") / "training_state.json").read_text()) for out in (one, other)
    ]
    for number in numbers:
        number["progress"].pop("seconds")
    assert numbers[0] == numbers[1]


def assert_continues_exactly(run, tmp_path: Path, data_dir: Path, monkeypatch) -> None:
    """Check that a run that is stopped in its fifth step and resumed ends like a run that was never stopped."""
    train(run, tmp_path / "whole", data_dir)
    train_until(5, monkeypatch, run, tmp_path / "run", data_dir)
    train(run, tmp_path / "run", data_dir)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_a_run_leaves_what_the_contract_says(trained):
    names = {path.name for path in trained.iterdir()}
    assert {"config.json", "vocabulary.json", "log.jsonl", "best", "latest", "checkpoints"} <= names
    assert (trained / "latest").read_text() == "step-00000012\n"
    checkpoint = trained / "checkpoints" / "step-00000012"
    VerifiedCheckpoint(checkpoint).verify()
    events = RunDirectory(trained).events()
    assert events[0]["event"] == "start"
    of_training = ("start", "train", "valid", "checkpoint", "end")  # other tests add measurements
    assert [event["event"] for event in events if event["event"] in of_training][-1] == "end"
    assert [event["step"] for event in events if event["event"] == "train"] == [3, 6, 9, 12]
    assert [event["step"] for event in events if event["event"] == "valid"] == [6, 12]
    for event in events:
        if event["event"] == "train":
            assert {"loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second"} <= event.keys()
    valid = next(event for event in events if event["event"] == "valid")
    assert (valid["segment"], valid["mem_len"], valid["window"]) == (8, 8, None)


RECURRENT = {
    "model.mem_len": "0",
    "model.n_head": "8",
    "model.d_head": "64",
    "model.d_inner": "2048",
    "model.dropatt": "0",
    "eval.mem_len": "0",
    "eval.window": "none",
}
"""Fields that `small_run` sets for a Transformer, at the default values that a recurrent model requires."""


def test_training_learns(story, data_dir, tmp_path):
    run = small_run(str(story), **{"train.steps": "300", "model.dropout": "0", "model.dropatt": "0"})
    train(run, tmp_path / "run", data_dir)
    share = torch.bincount(torch.tensor(list(story.read_bytes()))).double() / story.stat().st_size
    of_frequencies = -(share * share.clamp(min=1e-12).log()).sum().item()
    losses = [event["loss"] for event in RunDirectory(tmp_path / "run").events() if event["event"] == "train"]
    assert losses[0] > 4.5
    assert losses[-1] < of_frequencies - 0.5  # half a nat below a model of byte frequencies


def test_validation_sees_as_far_as_training(story, data_dir, tmp_path):
    run = small_run(str(story), **{"eval.segment": "3", "model.mem_len": "11"})
    train(run, tmp_path / "run", data_dir)
    valid = next(event for event in RunDirectory(tmp_path / "run").events() if event["event"] == "valid")
    assert valid["segment"] + valid["mem_len"] == 8 + 11


@pytest.mark.parametrize("step", [1, 6, 11])
def test_a_stopped_run_continues_exactly(step, story, data_dir, trained, tmp_path, monkeypatch):
    run = small_run(str(story))
    with monkeypatch.context() as patch:
        stop_after(patch, step)
        with pytest.raises(RunInterrupted, match=rf"stopped by SIGINT at step {step} of 12.*same command") as stop:
            train(run, tmp_path / "run", data_dir)
    assert stop.value.exit_code == 130
    outcome = train(run, tmp_path / "run", data_dir)
    assert outcome["step"] == 12
    assert_same_end(tmp_path / "run", trained)


@pytest.mark.parametrize("step", [6, 12])
def test_a_run_stopped_in_the_middle_of_an_evaluation_makes_it_up(
    step, story, data_dir, trained, tmp_path, monkeypatch
):
    """This includes the evaluation of the last step, which is then the only work left."""
    run, real = small_run(str(story)), loop_module.evaluate_with

    def stopped(model, tokens, settings, progress, *others):
        def first(done, total):
            assert done < total
            os.kill(os.getpid(), signal.SIGINT)
            progress(done, total)

        mine = first if loop.state.counters.step == step else progress
        return real(model, tokens, settings, mine, *others)

    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "evaluate_with", stopped)
        real_train = loop_module.TrainingLoop.train

        def remembered(self):
            nonlocal loop
            loop = self
            real_train(self)

        loop: loop_module.TrainingLoop
        patch.setattr(loop_module.TrainingLoop, "train", remembered)
        with pytest.raises(RunInterrupted, match=rf"stopped by SIGINT at step {step} of 12"):
            train(run, tmp_path / "run", data_dir)
    assert step not in [event["step"] for event in RunDirectory(tmp_path / "run").events() if event["event"] == "valid"]
    outcome = train(run, tmp_path / "run", data_dir)
    assert_same_end(tmp_path / "run", trained)
    assert (tmp_path / "run" / "best").read_text() == f"step-{outcome['best_step']:08d}\n"
    assert (tmp_path / "run" / "best").read_text() == (trained / "best").read_text()
    ours, theirs = (
        [(event["step"], event["nll"]) for event in RunDirectory(out).events() if event["event"] == "valid"]
        for out in (tmp_path / "run", trained)
    )
    assert ours == theirs


def test_a_stop_while_the_compiler_runs_is_a_stop(story, data_dir, tmp_path, monkeypatch):
    """The terminal sends Ctrl-C to the compiler too, whose failure PyTorch raises."""

    class CompileError(RuntimeError):
        __module__ = "torch._inductor.exc"

    run = small_run(str(story))
    train(run, tmp_path / "whole", data_dir)

    def interrupted(*_):
        torch.rand(3)  # dropout was drawn before
        os.kill(os.getpid(), signal.SIGINT)
        raise CompileError("C++ compile error")

    with monkeypatch.context() as patch, pytest.raises(RunInterrupted):
        before_step(patch, 5, interrupted)
        train(run, tmp_path / "run", data_dir)
    train(run, tmp_path / "run", data_dir)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    "options",
    [
        {"model.mem_len": "0", "train.clip": "0", "train.eval_every": "0"},
        {"train.dtype": "bfloat16", "model.window": "6", "model.pre_norm": "true"},
        {"data.unit": "word", "model.cutoffs": "9,20", "model.div_val": "2", "train.batch_size": "2"},
        RECURRENT | {"model.kind": "lstm", "model.weight_drop": "0.3", "train.average_patience": "1"},
        RECURRENT | {"model.kind": "qrnn", "model.zoneout": "0.2", "train.dtype": "bfloat16"},
        {"model.encoding": "shaw", "model.max_distance": "9", "train.loss": "half"},
        {"model.encoding": "learned", "model.mem_len": "0", "model.layer_losses": "true", "model.n_target": "2",
         "eval.mem_len": "0", "eval.window": "none"},
        {"model.n_softmax": "2", "train.optimizer": "sgd", "train.momentum": "0.9", "train.micro_batches": "2"},
    ],
)  # fmt: skip
def test_models_of_other_kinds_stop_and_continue(options, story, data_dir, tmp_path, monkeypatch):
    run = small_run(str(story), **options)
    assert_continues_exactly(run, tmp_path, data_dir, monkeypatch)


@pytest.mark.parametrize("disabled", [torch.no_grad, torch.inference_mode])
def test_a_caller_that_has_disabled_gradients_can_train(disabled, story, trained, data_dir, tmp_path):
    with disabled():
        train(small_run(str(story)), tmp_path / "run", data_dir)
        assert not torch.is_grad_enabled()
    assert_same_end(tmp_path / "run", trained)


def test_another_number_of_threads_is_reported_on_resuming(story, data_dir, tmp_path, monkeypatch, capsys):
    def go_on(threads: int) -> str:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        Trainer(small_run(str(story)), tmp_path / "run", device="cpu", data_dir=data_dir).fit()
        return capsys.readouterr().err

    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(RunInterrupted):
            go_on(2)
    assert "OMP_NUM_THREADS" not in go_on(2)
    assert "note: the run was computed in 2 threads, now in 1, which round differently; set OMP_NUM_THREADS=2" in go_on(
        1
    )
    assert "OMP_NUM_THREADS" not in go_on(1)


def test_short_segments_take_shorter_steps_if_lengths_are_random(story, data_dir, tmp_path, monkeypatch):
    taken = watch_steps(
        monkeypatch, lambda trained, optimizer, inputs: (inputs.tokens.shape[1], optimizer.groups[0].rate)
    )
    options = {"train.random_segments": "true", "train.schedule": "constant", "train.warmup_steps": "0"}
    train(small_run(str(story), **options, **{"train.segment": "20"}), tmp_path / "run", data_dir)
    assert len({width for width, _ in taken}) > 3
    assert [rate for _, rate in taken] == pytest.approx([0.01 * width / 20 for width, _ in taken])
    logged = [event["learning_rate"] for event in RunDirectory(tmp_path / "run").events() if event["event"] == "train"]
    assert logged == [0.01] * 4  # the rate of the schedule, not scaled


@pytest.mark.parametrize(("options", "shift"), [({}, 0), ({"train.epoch_shift": "3"}, 3), ({"train.loss": "half"}, 4)])
def test_passes_over_the_text_begin_later_if_they_shall(options, shift, story, data_dir, tmp_path, monkeypatch):
    streams, real = [], trainer_module.LaneStream
    monkeypatch.setattr(
        trainer_module, "LaneStream", lambda *args, **kw: streams.append(real(*args, **kw)) or streams[0]
    )
    train(small_run(str(story), **{"train.segment": "8", "train.steps": "1"}, **options), tmp_path / "run", data_dir)
    assert [streams[0]._begin(epoch) for epoch in range(3)] == [0, shift, 2 * shift % 8]


def test_a_run_stopped_twice_over_several_epochs_with_parts_and_random_segments(story, data_dir, tmp_path, monkeypatch):
    options = {
        "train.steps": "28", "train.segment": "500", "train.micro_batches": "2", "train.random_segments": "true",
        "train.optimizer": "muon", "train.weight_decay": "0.01", "model.untie_r": "true", "train.eval_every": "0",
    }  # fmt: skip
    run = small_run(str(story), **options)
    train(run, tmp_path / "whole", data_dir)
    for step in (13, 9):
        train_until(step, monkeypatch, run, tmp_path / "parts", data_dir)
    train(run, tmp_path / "parts", data_dir)
    position = json.loads((RunDirectory(tmp_path / "parts").checkpoint("latest") / "training_state.json").read_text())
    assert position["position"]["epoch"] >= 2
    assert_same_end(tmp_path / "parts", tmp_path / "whole")


def test_evaluating_logging_and_saving_more_often_change_nothing(story, data_dir, trained, tmp_path):
    options = {"train.eval_every": "1", "train.log_every": "1", "train.checkpoint_every": "2"}
    train(small_run(str(story), **options), tmp_path / "run", data_dir)
    ours, theirs = final_state(tmp_path / "run"), final_state(trained)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_the_caller_s_random_numbers_are_left_alone(story, data_dir, tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    train(small_run(str(story)), tmp_path / "run", data_dir)
    assert torch.equal(torch.rand(3), expected)


def test_what_does_not_change_the_computation_may_change_on_continuing(story, data_dir, tmp_path, monkeypatch):
    train_until(5, monkeypatch, small_run(str(story)), tmp_path / "run", data_dir)
    train(small_run(str(story), **{"train.log_every": "1"}), tmp_path / "run", data_dir)
    with pytest.raises(
        UserError, match=r"holds a different run: model.n_layer 2 -> 3, train.seed 1 -> 2; give another"
    ):
        train(small_run(str(story), **{"train.seed": "2", "model.n_layer": "3"}), tmp_path / "run", data_dir)


def test_a_run_killed_before_its_first_checkpoint_begins_again(trained, story, data_dir, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        before_step(patch, 1, killed)
        train(small_run(str(story)), tmp_path / "run", data_dir)
    train(small_run(str(story)), tmp_path / "run", data_dir)
    assert_same_end(tmp_path / "run", trained)


def test_a_diverging_run_stops_and_keeps_its_last_good_checkpoint(story, data_dir, tmp_path, monkeypatch):
    before_step(monkeypatch, 6, lambda trained, *_: next(trained.model.parameters()).data.fill_(math.nan))
    with pytest.raises(
        TrainingDiverged, match=r"step 6: the loss \(nan\).*nor are the weights.*step-00000004.*learning_rate"
    ):
        train(small_run(str(story)), tmp_path / "run", data_dir)
    model, _ = txl.load(tmp_path / "run", checkpoint="latest")
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def command(out: Path, story: Path, data_dir: Path) -> list[str]:
    words = [sys.executable, "-m", "txl", "train", "stdlib-tiny", "--out", str(out), "--data-dir", str(data_dir)]
    return [*words, *options_of(small_run(str(story), **{"train.steps": "100"}))]


def wait_until_it_trains(process: subprocess.Popen, out: Path) -> None:
    while not (out / "log.jsonl").exists() or '"event": "train"' not in (out / "log.jsonl").read_text():
        assert process.poll() is None
        time.sleep(0.05)


def assert_saved_when_stopped(out: Path, by: signal.Signals) -> None:
    stop = next(event for event in RunDirectory(out).events() if event["event"] == "stop")
    assert (stop["reason"], (out / "latest").read_text()) == (by.name, f"step-{stop['step']:08d}\n")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGUSR1])
def test_the_command_stopped_by_a_signal_goes_on(sent, story, data_dir, tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen(command(out, story, data_dir), stderr=subprocess.PIPE, text=True)
    wait_until_it_trains(process, out)
    process.send_signal(sent)
    if sent not in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(sent)  # as a shell and the system may do when a terminal is closed
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + sent
    again = "; interrupt again to stop without saving" if sent in (signal.SIGINT, signal.SIGTERM) else ""
    assert f"stopping after this step{again}" in errors.splitlines()
    assert f"stopped by {sent.name}" in errors.splitlines()[-1]
    assert_saved_when_stopped(out, sent)
    again = subprocess.run(command(out, story, data_dir), stderr=subprocess.PIPE, text=True, timeout=120)
    assert again.returncode == 0
    assert "going on from step" in again.stderr
    assert (out / "latest").read_text() == "step-00000100\n"


def test_a_run_whose_terminal_is_closed_is_saved(story, data_dir, tmp_path):
    """The terminal is gone when the signal arrives, so that nothing can be written to it."""
    out, (terminal, its) = tmp_path / "run", pty.openpty()
    words = command(out, story, data_dir)
    code = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(2, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdin=its, stdout=its, stderr=its)
    os.close(its)
    wait_until_it_trains(process, out)
    os.close(terminal)
    assert process.wait(timeout=60) == 128 + signal.SIGHUP
    assert_saved_when_stopped(out, signal.SIGHUP)


def test_ignored_signals_do_not_stop_a_run(story, data_dir, tmp_path):
    """`nohup` ignores SIGHUP."""
    out = tmp_path / "run"
    words = ["sh", "-c", "trap '' HUP USR1 USR2; exec \"$@\"", "sh", *command(out, story, data_dir)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    wait_until_it_trains(process, out)
    for each in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        process.send_signal(each)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert (out / "latest").read_text() == "step-00000100\n"


def test_a_second_ctrl_c_in_a_notebook_raises_keyboard_interrupt(story, trained, data_dir, tmp_path, monkeypatch):
    """The process lives, the checkpoint that is being written gets whole, and the run can go on in the process."""
    write = saver_module.write_checkpoint

    def twice(*_):  # the checkpoint of step 4 is being written
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    def slow(*args):
        time.sleep(0.5)
        return write(*args)

    handlers = [signal.getsignal(each) for each in STOP_SIGNALS]
    with monkeypatch.context() as patch:
        before_step(patch, 6, twice)
        patch.setattr(saver_module, "write_checkpoint", slow)
        with pytest.raises(KeyboardInterrupt):
            train(small_run(str(story)), tmp_path / "run", data_dir)
    assert (tmp_path / "run" / "latest").read_text() == "step-00000004\n"
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == handlers
    train(small_run(str(story)), tmp_path / "run", data_dir)
    assert_same_end(tmp_path / "run", trained)


def test_a_signal_that_the_caller_handles_is_the_callers(story, data_dir, tmp_path, monkeypatch):
    received, before = [], signal.signal(signal.SIGUSR2, lambda number, _: received.append(number))
    real = loop_module.training_step

    def signalled(*args):
        os.kill(os.getpid(), signal.SIGUSR2)
        return real(*args)

    monkeypatch.setattr(loop_module, "training_step", signalled)
    try:
        assert train(small_run(str(story)), tmp_path / "run", data_dir)["step"] == 12
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert received == [signal.SIGUSR2] * 12


def test_a_device_that_cannot_be_used_is_refused(story, data_dir, tmp_path):
    assert Trainer(small_run(str(story)), tmp_path / "run", device="cpu:0", data_dir=data_dir).device == "cpu"
    with pytest.raises(UserError, match="device cuda:99: cannot be used here: "):
        Trainer(small_run(str(story)), tmp_path / "run", device="cuda:99", data_dir=data_dir)


def test_a_changed_text_is_refused_on_continuing(story, data_dir, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_bytes(story.read_bytes())
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(RunInterrupted):
            train(small_run(str(text)), tmp_path / "run", data_dir)
    text.write_bytes(story.read_bytes().replace(b"river", b"brook"))
    with pytest.raises(UserError, match="is not the text that .* was trained on"):
        train(small_run(str(text)), tmp_path / "run", data_dir)
