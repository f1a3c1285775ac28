"""Handling of losses that are not finite, and of spikes of the loss."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import options_of, small_run
from tests.training.test_trainer import assert_same_end, events, stop_after, train, train_until, watch_steps

from txl.cli import main
from txl.errors import RunInterrupted, TrainingDiverged
from txl.models.memory import Memory
from txl.runs.checkpoints import MANIFEST_FILE, MODEL_FILE, Contents, write_checkpoint
from txl.runs.directory import RunDirectory
from txl.runs.status import run_status
from txl.training import loop as loop_module
from txl.training import recovery
from txl.training.recovery import uselessness
from txl.training.state import LossWatch
from txl.training.step import StepOutput


def spoil_gradients(monkeypatch, at: set[int]) -> None:
    """Make the gradients of the steps `at` infinite; steps are counted from 1 after this call."""
    real, calls = torch.nn.utils.clip_grad_norm_, []

    def spoiled(parameters, largest):
        parameters = list(parameters)
        calls.append(1)
        if len(calls) in at:
            parameters[0].grad.fill_(math.inf)
        return real(parameters, largest)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spoiled)


def test_an_update_that_is_not_finite_is_skipped_and_counted(story, data_dir, tmp_path, monkeypatch):
    weights, real = [], loop_module.training_step

    def noted(trained, *args):
        result = real(trained, *args)
        weights.append([parameter.detach().clone() for parameter in trained.model.parameters()])
        return result

    monkeypatch.setattr(loop_module, "training_step", noted)
    spoil_gradients(monkeypatch, {5, 6})
    outcome = train(small_run(str(story), **{"train.log_every": "1"}), tmp_path / "run", data_dir)
    assert outcome["step"] == 12
    for one, other in zip(weights[3], weights[5], strict=True):
        assert torch.equal(one, other)
    assert any(not torch.equal(one, other) for one, other in zip(weights[5], weights[6], strict=True))
    skipped = events(tmp_path / "run", "skipped")
    assert [(each["step"], each["in_a_row"], each["grad_norm"]) for each in skipped] == [(5, 1, "inf"), (6, 2, "inf")]
    assert skipped[0]["offset"] == 4 * 8
    assert [each["step"] for each in events(tmp_path / "run", "train")] == [1, 2, 3, 4, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("options", "later"),
    [
        ({}, {1}),
        ({"train.reset_memory": "0.4"}, {1}),
        # The step of two parts is interrupted between the parts and repeated after resuming.
        ({"train.reset_memory": "0.4", "train.micro_batches": "2"}, {1, 2}),
    ],
    ids=str,
)
def test_a_run_that_skips_goes_on_exactly(options, later, story, data_dir, tmp_path, monkeypatch):
    run = small_run(str(story), **options)
    with monkeypatch.context() as patch:
        spoil_gradients(patch, {5, 6})
        train(run, tmp_path / "whole", data_dir)
    with monkeypatch.context() as patch:
        spoil_gradients(patch, {5})
        stop_after(patch, 5)
        with pytest.raises(RunInterrupted):
            train(run, tmp_path / "run", data_dir)
    spoil_gradients(monkeypatch, later)
    train(run, tmp_path / "run", data_dir)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_too_many_in_a_row_stop_the_run_with_the_batch_saved(story, data_dir, tmp_path, monkeypatch):
    spoil_gradients(monkeypatch, set(range(6, 13)))
    out = tmp_path / "run"
    with pytest.raises(
        TrainingDiverged, match=r"step 8: .*norm \(inf\) is not finite, for 3 steps in a row.*step-00000006"
    ):
        train(small_run(str(story), **{"train.max_skipped": "2"}), out, data_dir)
    saved = json.loads((out / "not-finite.json").read_text())
    assert (saved["step"], saved["epoch"], saved["offset"]) == (8, 0, 7 * 8)
    assert torch.tensor(saved["batch"]).shape == (4, 8)
    assert events(out, "stop")[-1]["reason"] == "not finite"


@pytest.mark.parametrize("evaluated", ["0", "6"])
def test_a_run_that_came_to_nothing_does_not_end_as_if_it_were_done(evaluated, story, data_dir, tmp_path, capsys):
    """A model is useless if its loss is not finite or far above guessing; a second start of the run changes nothing."""
    out = tmp_path / "run"
    for rate, reason in (("1e9", "is nan nats"), ("1000", "where guessing evenly costs 5.545")):
        changes = {"train.learning_rate": rate, "train.eval_every": evaluated, "train.warmup_steps": "0"}
        words = ["train", "stdlib-tiny", "--out", f"{out}{rate}", "--data-dir", str(data_dir)]
        words += options_of(small_run(str(story), **changes, **{"train.max_skipped": "100"}))
        for _ in range(2):
            capsys.readouterr()
            assert main(words) == 1
            printed = capsys.readouterr().err
            assert "training diverged" in printed
            assert reason in printed
            assert "done:" not in printed
        status = run_status(Path(f"{out}{rate}")).state
        assert status.startswith("finished, but the model is of no use: the last")


def test_a_good_model_is_of_use_if_its_last_update_was_skipped(story, data_dir, tmp_path, monkeypatch):
    run = small_run(str(story), **{"train.eval_every": "0"})
    with monkeypatch.context() as patch:
        spoil_gradients(patch, {12})
        assert train(run, tmp_path / "run", data_dir)["step"] == 12
    spoil_gradients(monkeypatch, set(range(1, 13)))
    with pytest.raises(TrainingDiverged, match=r"the last loss is nan nats \(updates skipped: 12\)"):
        train(
            small_run(str(story), **{"train.eval_every": "0", "train.max_skipped": "20"}), tmp_path / "lost", data_dir
        )


def test_no_use_is_told_by_the_loss():
    assert uselessness(5.6, 5.55, 256) is None  # hardly trained
    assert uselessness(11.0, 5.55, 256) is None
    assert uselessness(11.2, 5.55, 256) == "11.200 nats, where guessing evenly costs 5.545"
    assert uselessness(20.0, 30.0, 256) is None  # the first loss was higher, so the model learns
    assert uselessness(math.inf, None, 256) == "inf nats"
    assert uselessness(None, None, 256) is None


def test_weights_that_are_not_finite_never_get_into_a_checkpoint(story, data_dir, tmp_path, monkeypatch):
    real = loop_module.training_step

    def overflown(trained, *args):
        result = real(trained, *args)
        next(trained.model.parameters()).data[0] = math.inf
        return result

    monkeypatch.setattr(loop_module, "training_step", overflown)
    run = small_run(str(story), **{"train.eval_every": "0", "train.steps": "1"})
    with pytest.raises(TrainingDiverged, match="step 1: the weights are not finite and were not saved"):
        train(run, tmp_path / "run", data_dir)
    assert RunDirectory(tmp_path / "run").newest() is None


def test_weights_that_are_not_finite_are_refused(trained, tmp_path, capsys):
    """Earlier versions may have saved weights that are not finite."""
    run = shutil.copytree(trained, tmp_path / "run")
    checkpoint = RunDirectory(run).checkpoint()
    weights = load_file(checkpoint / MODEL_FILE)
    weights["softmax.bias"][3] = math.nan
    manifest = json.loads((checkpoint / MANIFEST_FILE).read_text())
    contents = Contents(weights, {}, {}, {"model": manifest["model"], "vocabulary_sha256": None, "run": None})
    write_checkpoint(checkpoint.parent, manifest["step"], contents)
    assert main(["eval", str(run)]) == 2
    assert "softmax.bias is not finite: the training diverged" in capsys.readouterr().err


def test_memory_that_is_not_finite_is_emptied(story, data_dir, tmp_path, monkeypatch):
    """A loss that overflows fills memory with NaN; the next segment must not read this memory."""
    real, calls = loop_module.training_step, []

    def overflown(*args):
        calls.append(1)
        result = real(*args)
        if len(calls) != 5:
            assert result.result().updated
            return result
        poisoned: list = [Memory.from_tensors(
            {name: tensor * math.nan if tensor.is_floating_point() else tensor for name, tensor in state.to_tensors().items()}
        ) for state in result.states]  # fmt: skip
        return StepOutput(torch.tensor([math.nan, math.nan, 1.0]), torch.tensor(True), poisoned, result.n_target)

    monkeypatch.setattr(loop_module, "training_step", overflown)
    outcome = train(small_run(str(story)), tmp_path / "run", data_dir)
    assert math.isfinite(outcome["best_nll"])
    assert len(events(tmp_path / "run", "skipped")) == 1


def test_a_spike_is_told_from_noise():
    draw = random.Random(0)
    watch = LossWatch()
    noise = [draw.gauss(3, 0.1) for _ in range(2000)]
    assert not any(watch.sees(loss, 6) for loss in noise)
    assert watch.mean == pytest.approx(3, abs=0.05)
    assert math.sqrt(watch.variance) == pytest.approx(0.1, rel=0.3)
    assert [watch.sees(loss, 6) for loss in (3.1, 4.0, 4.1, 3.0, 5.0)] == [False, True, False, False, True]
    later = [watch.sees(6, 6) for _ in range(500)]
    assert not any(later)  # the spike was reported when it began
    assert not watch.in_spike  # and the high loss is now the usual one


def test_no_spike_is_seen_before_there_is_a_mean():
    watch = LossWatch()
    assert not any(watch.sees(loss, 1) for loss in [1.0] * 50 + [100.0] + [1.0] * 49)


@pytest.fixture
def leaping(monkeypatch):
    """Provide a function that adds 100 to the loss of the step with the given tokens, and changes nothing else."""
    real = loop_module.training_step
    monkeypatch.setattr(LossWatch, "limit", lambda self, threshold: math.inf if self.count < 3 else self.mean + 5)

    def leap_at(position_tokens):
        def leaping_step(trained, optimizer, inputs, *args):
            result = real(trained, optimizer, inputs, *args)
            if torch.equal(inputs.tokens, position_tokens):
                numbers = result.numbers + torch.tensor([100.0, 0.0, 0.0], dtype=torch.float64)
                return StepOutput(numbers, result.skipped, result.states, result.n_target)
            return result

        monkeypatch.setattr(loop_module, "training_step", leaping_step)

    return leap_at


def tokens_of_step(story, data_dir, number):
    import txl
    from txl.data.lanes import LaneStream

    corpus = txl.open_corpus(str(story), data_dir=data_dir)
    stream = LaneStream(corpus.tokens("train"), 4, 8)
    position = stream.start()
    for _ in range(number - 1):
        position = stream.read(position).next
    return stream.read(position).tokens


def test_a_spike_is_reported(leaping, story, data_dir, tmp_path):
    leaping(tokens_of_step(story, data_dir, 7))
    train(small_run(str(story)), tmp_path / "run", data_dir)
    (spike,) = events(tmp_path / "run", "spike")
    assert spike["step"] == 7
    assert spike["loss"] > spike["recent_mean"] + 90
    assert not events(tmp_path / "run", "rollback")


def test_a_run_can_go_back_behind_a_spike(leaping, story, data_dir, tmp_path, monkeypatch):
    run = small_run(str(story), **{"train.on_spike": "rollback", "train.eval_every": "4"})
    leaping(tokens_of_step(story, data_dir, 7))
    seen = watch_steps(
        monkeypatch,
        lambda trained, optimizer, inputs: (next(trained.model.parameters()).detach().clone(), inputs.tokens),
    )
    train(run, tmp_path / "run", data_dir)
    (back,) = events(tmp_path / "run", "rollback")
    assert (back["from_step"], back["step"]) == (7, 4)
    assert torch.equal(seen[7][0], seen[4][0])  # the weights after step 4
    assert torch.equal(seen[7][1], tokens_of_step(story, data_dir, 8))  # the text after the spike
    assert len(seen) == 12 + 3
    assert [each["step"] for each in events(tmp_path / "run", "valid")] == [4, 8, 12]  # step 4 is evaluated once

    with monkeypatch.context() as patch:  # interruptions before and after the spike change nothing
        stop_after(patch, 6)
        with pytest.raises(RunInterrupted):
            train(run, tmp_path / "stopped", data_dir)
    train_until(3, monkeypatch, run, tmp_path / "stopped", data_dir)
    train(run, tmp_path / "stopped", data_dir)
    assert_same_end(tmp_path / "stopped", tmp_path / "run")


def test_a_damaged_checkpoint_is_not_gone_back_to(leaping, story, data_dir, tmp_path, monkeypatch, capsys):
    from txl.training.trainer import Trainer

    leaping(tokens_of_step(story, data_dir, 7))
    real = recovery.roll_back

    def damaged(state, setup, saver):
        saver.wait()
        (tmp_path / "run" / "checkpoints" / "step-00000004" / "model.safetensors").write_bytes(b"")
        return real(state, setup, saver)

    monkeypatch.setattr(recovery, "roll_back", damaged)
    run = small_run(str(story), **{"train.on_spike": "rollback"})
    outcome = Trainer(run, tmp_path / "run", data_dir=data_dir).fit()
    assert outcome["step"] == 12
    assert "the checkpoint of step 4 is damaged" in capsys.readouterr().err
    assert not events(tmp_path / "run", "rollback")
