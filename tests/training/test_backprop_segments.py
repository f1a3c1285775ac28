"""Steps of several segments, with gradients through the memory between the segments (`train.backprop_segments`)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.conftest import small_run
from tests.models.test_contract import SMALL, B, lively, stream
from tests.training.test_trainer import assert_continues_exactly, train, watch_steps
from torch import Tensor

from txl.config import TrainConfig, validate
from txl.data.lanes import LaneStream
from txl.errors import UserError
from txl.models.loss import Objective
from txl.models.transformer_xl import TransformerXL
from txl.native import build
from txl.presets import preset
from txl.runs.directory import RunDirectory
from txl.training.optimisers import build_optimizer
from txl.training.step import StepInputs, training_step

PLAIN = dataclasses.replace(SMALL, dropout=0.0, dropatt=0.0)


def gradients(loss: Tensor, model: TransformerXL) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def test_no_gradient_reaches_what_earlier_steps_left_in_memory():
    model = lively(PLAIN).train()
    tokens, targets = stream()
    _, state = model.training_loss(tokens[:, :5], targets[:, :5], model.init_state(B))
    watched = dataclasses.replace(state, hidden=tuple(each.clone().requires_grad_() for each in state.hidden))
    loss, after = model.training_loss(tokens[:, 5:11], targets[:, 5:11], watched, Objective(lengths=(3, 3)))
    loss.backward()
    assert all(each.grad is None for each in watched.hidden)
    _, expected = model.training_loss(tokens[:, 5:8], targets[:, 5:8], state)
    _, expected = model.training_loss(tokens[:, 8:11], targets[:, 8:11], expected)
    for ours, theirs in zip(after.hidden, expected.hidden, strict=True):
        assert not ours.requires_grad
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("lengths", [(4, 4, 4), (5, 3, 4)])
def test_with_a_window_several_segments_have_the_gradient_of_one_as_long_as_all(lengths):
    model = lively(dataclasses.replace(PLAIN, mem_len=6, window=7)).train()
    tokens, targets = (each[:, :12] for each in stream())
    several, state = model.training_loss(tokens, targets, model.init_state(B), Objective(lengths=lengths))
    assert not any(hidden.requires_grad for hidden in state.hidden)
    one, _ = model.training_loss(tokens, targets, model.init_state(B))
    found, expected = gradients(several, model), gradients(one, model)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("backend", ["compiled", "reference"])
def test_every_attention_has_them(backend):
    if backend == "compiled" and build.library() is None:
        pytest.skip(str(build.why_not()))
    tokens, targets = (each[:, :14] for each in stream())
    found = []
    for name in ("shifted", backend):
        model = lively(dataclasses.replace(PLAIN, d_model=12, attention=name), torch.float32).train()
        loss, _ = model.training_loss(tokens, targets, model.init_state(B), Objective(lengths=(7, 7)))
        found.append(gradients(loss, model))
    for name, each in found[0].items():
        torch.testing.assert_close(found[1][name], each, rtol=1e-3, atol=2e-5, msg=name)


def test_a_step_in_parts_is_the_step_and_counts_its_targets():
    config = TrainConfig(loss="half", backprop_segments=2)
    weights = []
    for parts in (1, 3):
        model = lively(PLAIN).train()
        optimizer = build_optimizer(model, config)
        tokens, targets = (each[:, :14] for each in stream())
        states = [model.init_state(B // parts) for _ in range(parts)]
        inputs = StepInputs(tokens, targets, states, lengths=(7, 7))
        result = training_step(model, optimizer, inputs, config)
        assert result.n_target == B * (4 + 4)
        weights.append([result.result().loss, *(each.detach() for each in model.parameters())])
    assert weights[0][0] == pytest.approx(weights[1][0], abs=1e-12)
    for one, other in zip(weights[0][1:], weights[1][1:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_a_step_ends_where_the_text_does():
    tokens = LaneStream(torch.arange(2 * 23).numpy(), 2, 5)
    position, read = tokens.start(), []
    while position.epoch < 1:
        segment = tokens.read_several(position, 2)
        assert segment.starts_epoch == (not read)
        read.append(segment)
        position = segment.next
    assert [each.lengths for each in read] == [(5, 5), (5, 5), (2,)]
    assert torch.cat([each.targets for each in read], dim=1).tolist() == [[*range(1, 23)], [*range(24, 46)]]


STOPPED = {
    "average": {"train.average_from": "4"},
    "parts, random lengths, adaptive softmax": {
        "train.micro_batches": "2", "train.random_segments": "true", "model.cutoffs": "20,40", "train.segment": "20",
    },
    "bfloat16 and the compiled attention": {"train.dtype": "bfloat16", "model.attention": "fastest"},
}  # fmt: skip


@pytest.mark.parametrize("options", STOPPED.values(), ids=STOPPED)
def test_a_stopped_run_continues_exactly(options, story, data_dir, tmp_path, monkeypatch):
    run = small_run(str(story), **options, **{"train.backprop_segments": "2", "train.steps": "8"})
    assert_continues_exactly(run, tmp_path, data_dir, monkeypatch)


def test_a_step_s_tokens_are_those_of_all_its_segments(story, data_dir, tmp_path, monkeypatch):
    """The learning rate is scaled by the length of the whole step, and the log counts the tokens of all segments."""
    taken = watch_steps(
        monkeypatch, lambda trained, optimizer, inputs: (inputs.tokens.shape[1], optimizer.groups[0].rate)
    )
    options = {"train.backprop_segments": "2", "train.schedule": "constant", "train.warmup_steps": "0"}
    run = small_run(str(story), **options, **{"train.random_segments": "true", "train.segment": "20"})
    outcome = train(run, tmp_path / "run", data_dir)
    assert [rate for _, rate in taken] == pytest.approx([0.01 * width / 40 for width, _ in taken])
    assert outcome["tokens"] == 4 * sum(width for width, _ in taken)
    assert run.train.tokens_per_step == 4 * 40
    plain = small_run(str(story), **options, **{"train.steps": "3"})
    train(plain, tmp_path / "plain", data_dir)
    logged = [each for each in RunDirectory(tmp_path / "plain").events() if each["event"] == "train"]
    assert [each["tokens_read"] for each in logged] == [3 * 4 * 16]


def test_recurrent_networks_are_told_to_read_longer_segments():
    run = preset("ptb-lstm-small")
    run.train.backprop_segments = 2
    with pytest.raises(UserError, match=r"train.backprop_segments is 2, but .* use a longer train.segment"):
        validate(run)
