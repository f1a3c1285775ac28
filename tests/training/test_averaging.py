"""Averaged weights: the arithmetic, the first averaged step, and their use in evaluation and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import small_run
from tests.training.test_trainer import assert_same_end, events, train, train_until
from torch import nn

import txl
from txl.config import TrainConfig
from txl.runs.directory import RunDirectory
from txl.training import loop as loop_module
from txl.training.schedule import average_begins
from txl.training.state import WeightAverage


def averaged(values: list[float], mu: float | None = None) -> float:
    """Return the average of a model's only weight over these values."""
    model: Any = nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(100.0)  # the initial weight is not part of the average
    average = WeightAverage(model, mu)
    for value in values:
        model.weight.data.fill_(value)
        average.prepare()
        average.update(model)
    assert average.count == len(values)
    return average.model.get_parameter("weight").item()


def test_without_mu_it_is_the_plain_mean_of_all():
    values = [float(n * n % 17) for n in range(40)]
    assert averaged(values) == pytest.approx(sum(values) / 40, rel=1e-13)


def test_with_mu_it_is_the_moving_average():
    expected = 1.0
    for value in (5.0, 2.0, 8.0):
        expected = 0.75 * expected + 0.25 * value
    assert averaged([1.0, 5.0, 2.0, 8.0], mu=0.25) == pytest.approx(expected, rel=1e-14)


def test_the_model_goes_on_from_its_own_weights():
    model: Any = nn.Linear(2, 2)
    average = WeightAverage(model)
    before = model.weight.detach().clone()
    average.prepare()
    average.update(model)
    model.weight.data.add_(2.0)
    average.prepare()
    average.update(model)
    torch.testing.assert_close(model.weight.detach(), before + 2)
    torch.testing.assert_close(average.model.get_parameter("weight").detach(), before + 1)
    assert not average.model.training
    assert not any(parameter.requires_grad for parameter in average.model.parameters())


def test_it_begins_at_its_step():
    config = TrainConfig(average_from=7)
    assert [average_begins(step, [], config) for step in (0, 6, 7, 8)] == [False, False, True, True]
    assert not average_begins(10**6, [1.0, 2.0, 3.0], TrainConfig())


@pytest.mark.parametrize(
    ("losses", "begins"),
    [
        ([5.0, 4.0, 3.0], False),  # too few evaluations
        ([5.0, 4.0, 3.0, 2.0], False),  # still improving
        ([2.0, 4.0, 3.0, 3.5], True),  # above the best loss of more than two evaluations before
        ([3.0, 1.0, 2.0, 2.5], False),  # the lower loss is only two evaluations older
        ([3.0, 1.0, 2.0, 3.0], False),  # an equal loss is not worse
    ],
)
def test_or_when_the_validation_stops_improving(losses, begins):
    assert average_begins(0, losses, TrainConfig(average_patience=2)) is begins


AVERAGED = {"train.average_from": "5", "train.average_lr_factor": "0.5", "train.schedule": "constant"}


def test_evaluation_and_checkpoints_use_the_mean_of_the_later_steps(story, data_dir, tmp_path, monkeypatch):
    """The expected mean is computed from the trained weights after each step, which the checkpoint also holds."""
    real, weights = loop_module.training_step, []

    def recording(trained, *args):
        result = real(trained, *args)
        weights.append({name: parameter.detach().clone() for name, parameter in trained.model.named_parameters()})
        return result

    monkeypatch.setattr(loop_module, "training_step", recording)
    train(small_run(str(story), **AVERAGED), tmp_path / "run", data_dir)
    directory = RunDirectory(tmp_path / "run")
    latest = directory.checkpoint("latest")
    mean = {name: torch.stack([each[name] for each in weights[5:]]).mean(dim=0) for name in weights[0]}
    saved = load_file(latest / "model.safetensors")
    torch.testing.assert_close(saved, mean, rtol=1e-5, atol=1e-7)
    raw = load_file(latest / "training_state.safetensors")
    assert all(torch.equal(raw[f"weights.{name}"], value) for name, value in weights[-1].items())

    events = directory.events()
    assert [event["step"] for event in events if event["event"] == "average"] == [5]
    valid = [event for event in events if event["event"] == "valid"]
    assert [(event["step"], event["averaged"]) for event in valid] == [(6, 1), (12, 7)]
    rates = {event["step"]: event["learning_rate"] for event in events if event["event"] == "train"}
    assert rates[12] == pytest.approx(rates[3] / 2)

    model, _ = txl.load(tmp_path / "run", checkpoint="latest")
    tokens = txl.open_corpus(str(story), config=directory.config().data, data_dir=data_dir, quiet=True).tokens("valid")
    found = txl.evaluate(model, tokens, segment=8, mem_len=8, window="none", batch_size=4, max_tokens=400)
    assert found.nll == pytest.approx(valid[-1]["nll"], abs=1e-6)


@pytest.mark.parametrize(
    ("step", "begins"),
    [(5, {"train.average_from": "5"}), (2, {"train.average_patience": "1"}), (9, {"train.average_patience": "1"})],
)
def test_a_stopped_run_goes_on_averaging_exactly(step, begins, story, data_dir, tmp_path, monkeypatch):
    # At this learning rate the validation loss soon rises.
    run = small_run(str(story), **{"train.eval_every": "1", "train.learning_rate": "1", "train.clip": "0"} | begins)
    train(run, tmp_path / "whole", data_dir)
    (began,) = events(tmp_path / "whole", "average")
    assert 3 <= began["step"] <= 6
    train_until(step, monkeypatch, run, tmp_path / "stopped", data_dir)
    train(run, tmp_path / "stopped", data_dir)
    assert_same_end(tmp_path / "whole", tmp_path / "stopped")


def test_another_run_starts_from_the_averaged_weights(story, data_dir, tmp_path):
    train(small_run(str(story), **AVERAGED), tmp_path / "first", data_dir)
    run = small_run(str(story), **{"train.steps": "1", "train.learning_rate": "1e-30"})
    train(run, tmp_path / "second", data_dir, init_from=tmp_path / "first")
    first, _ = txl.load(tmp_path / "first")
    second, _ = txl.load(tmp_path / "second")
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, other)
