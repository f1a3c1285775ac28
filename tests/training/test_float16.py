"""Training in float16: the loss is scaled, the scale follows overflows, and belongs to the state of a run.

A CPU computes the arithmetic here; training refuses it there (`check_trainable`).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.conftest import small_run
from tests.training.test_running_ahead import reading_later, recording  # noqa: F401 (fixtures)
from tests.training.test_trainer import assert_continues_exactly, assert_same_end, events, train

import txl
from txl.config import TrainConfig
from txl.errors import UserError
from txl.models import build_model
from txl.runs.checkpoints import VerifiedCheckpoint
from txl.training import compilation, trainer
from txl.training import loop as loop_module
from txl.training.optimisers import LossScale, build_optimizer
from txl.training.step import StepInputs, training_step
from txl.training.trainer import Trainer

START = 2.0**16


def test_the_scale_is_halved_at_once_doubled_after_2000_updates_and_never_below_1():
    scale, good, bad = LossScale(torch.device("cpu")), torch.tensor(False), torch.tensor(True)
    assert bool(scale.update(bad, None))
    assert (scale.factor.item(), scale.n_finite.item()) == (START / 2, 0)
    for _ in range(1999):
        assert not scale.update(good, None)
    assert (scale.factor.item(), scale.n_finite.item()) == (START / 2, 1999)
    # An update that is void counts for nothing, whatever came out of it.
    assert not scale.update(bad, torch.tensor(True))
    assert not scale.update(good, torch.tensor(True))
    assert (scale.factor.item(), scale.n_finite.item()) == (START / 2, 1999)
    scale.update(good, torch.tensor(False))
    assert (scale.factor.item(), scale.n_finite.item()) == (START, 0)
    halvings = [bool(scale.update(bad, None)) for _ in range(20)]
    assert halvings == [True] * 16 + [False] * 4  # at 1 an update that is not finite is what it is elsewhere
    assert scale.factor.item() == 1.0


@pytest.mark.parametrize("divides", [False, True], ids=["CPU's way", "GPU's way"])
def test_updates_are_those_of_float32_within_rounding(divides, monkeypatch):
    results = []
    for dtype in ("float32", "float16"):
        config: Any = TrainConfig(dtype=dtype, learning_rate=0.01, clip=0.05)
        torch.manual_seed(3)
        model: Any = build_model(txl.preset("stdlib-tiny").model, 20).train()
        optimizer = build_optimizer(model, config)
        monkeypatch.setattr(optimizer, "_divides", divides)
        states: Any = [model.init_state(2)]
        made, generator = [], torch.Generator().manual_seed(5)
        for _ in range(3):
            tokens = torch.randint(20, (2, 8), generator=generator)
            torch.manual_seed(7)
            output = training_step(model, optimizer, StepInputs(tokens, tokens, states), config)
            states = output.states
            made.append(output.numbers)
        results.append(torch.stack(made))
    assert not results[1][:, 2].any()
    torch.testing.assert_close(results[1], results[0], rtol=0.02, atol=0)


@pytest.fixture
def allowed(monkeypatch):
    monkeypatch.setattr(trainer, "check_trainable", lambda *_: None)


def overflow(monkeypatch, at: dict[int, float]) -> None:
    """Let the loss of some steps, counted from 1, overflow as long as its scale is at least the number given."""
    real, texts = loop_module.training_step, []

    def spoiled(trained, optimizer, inputs, *args):
        tokens = inputs.tokens.clone()
        if not any(torch.equal(tokens, text) for text in texts):
            texts.append(tokens)
        number = 1 + next(place for place, text in enumerate(texts) if torch.equal(tokens, text))
        if optimizer.loss_scale.factor >= at.get(number, math.inf):
            with monkeypatch.context() as patch:
                clip = optimizer.clip

                def spoils(parameters, largest):
                    parameters = list(parameters)
                    parameters[0].grad.fill_(math.inf)
                    return clip(parameters, largest)

                patch.setattr(optimizer, "clip", spoils)
                return real(trained, optimizer, inputs, *args)
        return real(trained, optimizer, inputs, *args)

    monkeypatch.setattr(loop_module, "training_step", spoiled)
    monkeypatch.setattr(compilation, "training_step", spoiled)


FLOAT16 = {"train.dtype": "float16", "train.steps": "20", "train.eval_every": "0", "train.checkpoint_every": "0"}


def test_an_overflow_is_no_bad_update_unless_the_scale_is_1(story, data_dir, tmp_path, monkeypatch, allowed):
    overflow(monkeypatch, {2: START, 4: START / 2, 9: START / 2})
    train(small_run(str(story), **FLOAT16), tmp_path / "run", data_dir)
    assert events(tmp_path / "run", "skipped") == []
    with monkeypatch.context() as patch:
        overflow(patch, {5: 1.0})
        patch.setattr(LossScale, "update", lambda self, bad, void: bad & (self.factor.fill_(1.0) > 1))
        train(small_run(str(story), **FLOAT16), tmp_path / "at-1", data_dir)
    assert [event["step"] for event in events(tmp_path / "at-1", "skipped")] == [5]


def test_a_stopped_run_goes_on_exactly_with_its_scale(story, data_dir, tmp_path, monkeypatch, allowed):
    """The scale was halved before the stop; with the scale of the beginning, step 8 would overflow."""
    overflow(monkeypatch, {2: START, 8: START})
    run = small_run(str(story), **FLOAT16)
    assert_continues_exactly(run, tmp_path, data_dir, monkeypatch)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000020"
    state = VerifiedCheckpoint(checkpoint).tensors("training_state.safetensors")
    assert state["loss_scale.factor"].item() == START / 2
    assert state["loss_scale.n_finite"].item() == 18


@pytest.mark.usefixtures("allowed", "recording", "reading_later")
def test_a_recorded_run_is_the_same_run(story, data_dir, tmp_path, monkeypatch):
    run = small_run(str(story), **FLOAT16, **{"train.capture": "true", "train.log_every": "50"})
    for name in ("recorded", "eager"):
        with monkeypatch.context() as patch:
            overflow(patch, {2: START, 9: START / 2, 12: START / 4})
            if name == "eager":
                patch.setattr(loop_module, "CapturedStep", lambda: loop_module.training_step)
            train(run, tmp_path / name, data_dir)
    assert_same_end(tmp_path / "recorded", tmp_path / "eager")


def test_a_cpu_does_not_train_in_float16(tmp_path):
    run = small_run("stdlib", **{"train.dtype": "float16"})
    with pytest.raises(UserError, match="this run trains on cpu, and float16 needs an NVIDIA GPU") as refused:
        Trainer(run, tmp_path / "run", device="cpu")
    assert refused.value.field == "train.dtype"


@pytest.mark.parametrize(("capability", "refuses"), [((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_bfloat16_is_refused_where_a_gpu_has_none(capability, refuses, monkeypatch):
    monkeypatch.setattr(compilation, "compute_capability", lambda device: capability)
    run = small_run("stdlib", **{"train.dtype": "bfloat16"})
    if not refuses:
        compilation.check_trainable(run, "cuda")
        return
    with pytest.raises(UserError, match="use train.dtype float16"):
        compilation.check_trainable(run, "cuda")
    run.train.dtype = "float16"
    compilation.check_trainable(run, "cuda")
