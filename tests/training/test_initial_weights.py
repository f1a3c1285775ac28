"""Start of a run from the weights of another run (`--init-from`): what is taken over and what is refused."""

from __future__ import annotations

import shutil
from contextlib import nullcontext

import pytest
import torch
from tests.conftest import small_run
from tests.training.test_trainer import assert_same_end, before_step, events, killed, train

import txl
from txl.cli import main
from txl.errors import UserError
from txl.runs.directory import RunDirectory
from txl.training.trainer import Trainer


def test_a_run_goes_on_with_its_own_weights_alone(trained, story, data_dir, tmp_path):
    run, out = small_run(str(story), **{"train.steps": "2"}), tmp_path / "run"
    train(run, out, data_dir, init_from=trained)
    train(run, out, data_dir, init_from=trained)  # the second time, nothing is left to do
    train(run, out, data_dir)
    resumed = events(out, "resume")
    assert {event["init_from"] for event in resumed} == {str(trained)}
    before = (out / "log.jsonl").read_bytes()
    with pytest.raises(UserError, match=f"other: the run in .*run began with {trained} and continues"):
        train(run, out, data_dir, init_from=tmp_path / "other")
    assert (out / "log.jsonl").read_bytes() == before
    train(run, tmp_path / "random", data_dir)
    with pytest.raises(UserError, match="began with random weights and continues with its own weights; leave it out"):
        train(run, tmp_path / "random", data_dir, init_from=trained)


def test_a_run_to_start_from_gives_its_configuration_unless_a_preset_is_named(
    trained, story, data_dir, tmp_path, capsys
):
    out, words = tmp_path / "run", ["--init-from", str(trained), "--steps", "2", "--data-dir", str(data_dir), "--quiet"]
    assert main(["train", "--out", str(out), *words]) == 0
    expected = RunDirectory(trained).config()
    expected.train.steps = 2
    assert RunDirectory(out).config() == expected
    assert (started := RunDirectory(out).log().started) is not None
    assert started["init_from"] == str(trained)
    assert main(["train", "--out", str(out), *words]) == 0, "the same command continues the run"
    other = ["train", "stdlib-tiny", "--out", str(tmp_path / "other"), *words]
    assert main([*other, "--corpus", str(story)]) == 2
    assert "its weights are of another model: " in capsys.readouterr().err
    assert main(["train", "--out", str(tmp_path / "other"), "--init-from", str(story)]) == 2
    assert f"--init-from {story}: a file; expected a run directory" in capsys.readouterr().err


def test_a_run_that_came_to_no_checkpoint_does_not_keep_the_weights_out(trained, story, data_dir, tmp_path):
    run = small_run(str(story), **{"train.learning_rate": "1e-30", "train.warmup_steps": "0"})
    (tmp_path / "run").mkdir()
    RunDirectory(tmp_path / "run").write_config(Trainer(run, tmp_path / "run").run)
    (tmp_path / "run" / ".lock").touch()
    with pytest.raises(UserError, match="no-such"):
        train(run, tmp_path / "run", data_dir, init_from=tmp_path / "no-such")
    assert RunDirectory(tmp_path / "run").config_path.is_file(), "nothing is removed for weights that are not there"
    train(run, tmp_path / "run", data_dir, init_from=trained)
    ours, theirs = txl.load(tmp_path / "run", checkpoint="latest")[0], txl.load(trained)[0]
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)


def test_fine_tuning_takes_over_the_vocabulary(story, data_dir, tmp_path):
    first = small_run(str(story), **{"data.unit": "char"})
    train(first, tmp_path / "first", data_dir)
    other = tmp_path / "other.txt"
    other.write_text("Another text, with characters such as Ω that the first lacks.\n" * 80, encoding="utf-8")
    second = small_run(str(other), **{"data.unit": "char"})
    train(second, tmp_path / "second", data_dir, init_from=tmp_path / "first")
    assert RunDirectory(tmp_path / "second").vocabulary() == RunDirectory(tmp_path / "first").vocabulary()
    with pytest.raises(UserError, match="data.unit is word, but .* reads char tokens"):
        third = small_run(str(other), **{"data.unit": "word"})
        train(third, tmp_path / "third", data_dir, init_from=tmp_path / "first")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model.n_layer": "3"}, "model.n_layer 2 -> 3"),
        # These numbers of heads change only the shapes of u and v; pre-norm changes no shape.
        ({"model.n_head": "4", "model.d_head": "4"}, "model.n_head 2 -> 4, model.d_head 8 -> 4"),
        ({"model.pre_norm": "true"}, "model.pre_norm False -> True"),
        ({"model.d_embed": "12"}, "model.d_embed 16 -> 12"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(options, named, trained, story, data_dir, tmp_path):
    with pytest.raises(UserError, match=f"init_from {trained}: its weights are of another model: {named};"):
        train(small_run(str(story), **options), tmp_path / "run", data_dir, init_from=trained)
    assert not (tmp_path / "run").exists()


VANILLA = {"model.encoding": "learned", "model.max_segment": "8", "model.mem_len": "0", "train.steps": "2"}
VANILLA |= {"eval.mem_len": "0", "eval.window": "none", "train.warmup_steps": "0"}


@pytest.mark.parametrize(
    ("encoding", "changed", "named"),
    [
        ("learned", {"model.max_segment": "16"}, r"model\.max_segment 8 -> 16;"),
        ("sinusoid", {"model.max_segment": "16"}, None),
        ("shaw", {"model.max_distance": "5"}, r"model\.max_distance 7 -> 5;"),
        (
            "shaw",
            {"model.encoding": "learned"},
            r"another model: model\.family transformer-xl -> vanilla, model\.encoding shaw -> learned; set",
        ),
    ],
)
def test_as_many_positions_or_distances_as_the_weights_have(encoding, changed, named, story, data_dir, tmp_path):
    options = VANILLA | {"model.encoding": encoding}
    if encoding == "shaw":
        options["model.max_distance"] = "7"
        del options["model.max_segment"]
    train(small_run(str(story), **options), tmp_path / "first", data_dir)
    second = small_run(str(story), **(VANILLA if "model.encoding" in changed else options) | changed)
    with nullcontext() if named is None else pytest.raises(UserError, match=named):
        train(second, tmp_path / "second", data_dir, init_from=tmp_path / "first")


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        # Two layers with two targets each: three classifiers, as the softmax predicts the last layer's first target.
        ({"layer_losses": "true", "n_target": "2"}, {}, "classifiers of auxiliary losses left out: 3"),
        ({}, {"layer_losses": "true", "n_target": "2"}, "classifiers of auxiliary losses newly initialised: 3"),
        (
            {"layer_losses": "true"},
            {"n_target": "2"},
            "classifiers of auxiliary losses left out: 1, classifiers of auxiliary losses newly initialised: 1",
        ),
        ({"layer_losses": "true"}, {"layer_losses": "true"}, None),
    ],
)
def test_classifiers_of_auxiliary_losses_are_no_part_of_the_weights(
    theirs, ours, said, story, data_dir, tmp_path, capsys
):
    first, second = (VANILLA | {f"model.{name}": value for name, value in each.items()} for each in (theirs, ours))
    train(small_run(str(story), **first), tmp_path / "first", data_dir)
    run = small_run(str(story), **second | {"train.learning_rate": "1e-30"})
    out = tmp_path / "second"
    Trainer(run, out, data_dir=data_dir, init_from=tmp_path / "first").fit()
    note = "" if said is None else f" ({said})"
    assert f"starting from {tmp_path / 'first'}{note}\n" in capsys.readouterr().err
    assert next(iter(RunDirectory(out).events()))["init_note"] == said
    before, after = (txl.load(each)[0].state_dict() for each in (tmp_path / "first", out))
    common = before.keys() & after.keys()
    assert common >= {name for name in before if not name.startswith("auxiliary.")}
    for name in common:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-12)
    fresh = [tensor for name, tensor in after.items() if name not in before and name.endswith("weight")]
    assert all(tensor.std() > 0.01 for tensor in fresh)


def test_a_run_no_longer_needs_the_weights_it_started_from(trained, story, data_dir, tmp_path, monkeypatch):
    source = tmp_path / "source"
    shutil.copytree(trained, source)
    run = small_run(str(story))
    train(run, tmp_path / "whole", data_dir, init_from=source)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        before_step(patch, 1, killed)
        train(run, tmp_path / "run", data_dir, init_from=source)
    shutil.rmtree(source)
    train(run, tmp_path / "run", data_dir, init_from=source)
    assert_same_end(tmp_path / "run", tmp_path / "whole")
