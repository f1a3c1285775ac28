"""Emptying the memory of some lanes before a step (`train.reset_memory`)."""

from __future__ import annotations

import dataclasses

import pytest
from tests.conftest import small_run
from tests.training.test_trainer import assert_continues_exactly, train, watch_steps

from txl.presets import preset
from txl.training import loop as loop_module


@pytest.mark.parametrize("parts", ["1", "2"])
def test_lanes_are_emptied_before_a_step_and_fill_again(parts, story, data_dir, tmp_path, monkeypatch):
    before = watch_steps(
        monkeypatch,
        lambda trained, optimizer, inputs: [
            count for each in inputs.states for count in each.filled or (each.length,) * each.batch_size
        ],
    )
    run = small_run(str(story), **{"train.reset_memory": "0.4", "train.micro_batches": parts})
    train(run, tmp_path / "run", data_dir)
    drawn = [loop_module.emptied_lanes(run.train, step).tolist() for step in range(12)]
    full = [0 if step == 0 else 8 for step in range(12)]
    assert before == [[0 if clear else full[step] for clear in drawn[step]] for step in range(12)]
    assert 0 < sum(map(sum, drawn)) < 48


def test_an_emptied_lane_does_not_see_what_came_before(story, data_dir, tmp_path, monkeypatch):
    """With every lane emptied before every step, losses equal those of steps that begin with the initial state."""
    losses, real = {}, loop_module.training_step

    def run_with(name: str, options: dict[str, str], fresh: bool) -> None:
        def noted(trained, optimizer, inputs, *rest):
            if fresh:
                states = [trained.model.init_state(each.batch_size) for each in inputs.states]
                inputs = dataclasses.replace(inputs, states=states)
            result = real(trained, optimizer, inputs, *rest)
            losses.setdefault(name, []).append(result.result().loss)
            return result

        monkeypatch.setattr(loop_module, "training_step", noted)
        still = {"model.dropout": "0", "model.dropatt": "0", "train.steps": "5"}
        train(small_run(str(story), **still | options), tmp_path / name, data_dir)

    run_with("emptied", {"train.reset_memory": "0.9999999"}, fresh=False)
    run_with("never held", {}, fresh=True)
    run_with("kept", {}, fresh=False)
    assert losses["emptied"] == pytest.approx(losses["never held"], abs=1e-6)
    assert losses["kept"] != pytest.approx(losses["never held"], abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"train.dtype": "bfloat16"},
        {"train.micro_batches": "2", "train.backprop_segments": "2", "train.steps": "8"},
        {"train.micro_batches": "4", "model.mem_len": "32"},  # parts hold memories of different lengths
    ],
    ids=["bfloat16", "parts of several segments", "parts of a lane"],
)
def test_a_stopped_run_draws_the_same_lanes(options, story, data_dir, tmp_path, monkeypatch):
    run = small_run(str(story), **options, **{"train.reset_memory": "0.4"})
    assert_continues_exactly(run, tmp_path, data_dir, monkeypatch)


def test_recurrent_states_are_emptied_too(data_dir, story, tmp_path, monkeypatch):
    before, real = [], loop_module.training_step

    def noted(trained, optimizer, inputs, *rest):
        (state,) = inputs.states
        before.append([[not bool(each[lane].any()) for each in _by_lane(state)] for lane in range(4)])
        return real(trained, optimizer, inputs, *rest)

    def _by_lane(state):
        return [each.movedim(each.shape.index(4), 0) for each in state.to_tensors().values() if 4 in each.shape]

    monkeypatch.setattr(loop_module, "training_step", noted)
    run = preset("ptb-lstm-small")
    run.data.corpus, run.data.unit = str(story), "byte"
    run.model.cutoffs = ()
    run.train.batch_size, run.train.segment, run.train.steps = 4, 8, 4
    run.train.random_segments, run.train.average_from, run.train.average_patience = False, None, None
    run.train.eval_every, run.train.warmup_steps, run.train.reset_memory = 0, 0, 0.5
    train(run, tmp_path / "run", data_dir)
    drawn = [loop_module.emptied_lanes(run.train, step).tolist() for step in range(4)]
    assert [[all(lane) for lane in lanes] for lanes in before[1:]] == drawn[1:]
