"""The directory of `--out` at the start of training: what is refused, and what a failed start leaves."""

from __future__ import annotations

import shutil

import pytest
from tests.conftest import options_of, small_run

from txl.cli import main
from txl.errors import UserError
from txl.interop.export_run import export_run
from txl.interop.import_run import import_run
from txl.runs.directory import RunDirectory
from txl.training.trainer import Trainer


def train(run, out, data_dir):
    return Trainer(run, out, device="cpu", data_dir=data_dir, quiet=True).fit()


def test_a_directory_that_is_something_else_is_refused(story, data_dir, tmp_path):
    (tmp_path / "thesis.doc").touch()
    with pytest.raises(UserError, match=r"not empty and not a run directory \(it contains thesis.doc\)"):
        train(small_run(str(story)), tmp_path, data_dir)
    with pytest.raises(UserError, match="out .*thesis.doc/run: Not a directory"):
        train(small_run(str(story)), tmp_path / "thesis.doc" / "run", data_dir)


def test_a_refused_directory_stays_refused_and_keeps_its_files(story, data_dir, tmp_path):
    """Names that a run uses too do not make files of others those of a run, however often the command is repeated."""
    mine = {"log.jsonl": "precious", "vocabulary.json": "{}", "movie.partial": "half"}
    for name, text in mine.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "checkpoints").mkdir()
    for _ in range(2):
        with pytest.raises(UserError, match="not empty and not a run directory"):
            train(small_run(str(story)), tmp_path, data_dir)
    assert {path.name for path in tmp_path.iterdir()} == {*mine, "checkpoints"}
    assert {name: (tmp_path / name).read_text() for name in mine} == mine


def test_a_start_that_fails_late_leaves_nothing_that_stands_in_the_way(story, data_dir, tmp_path):
    options = {"train.tensorboard": "true", "train.eval_every": "4"}
    refused = small_run(str(story), **options | {"eval.batch_size": "100000"})
    with pytest.raises(UserError, match="validation split"):
        train(refused, tmp_path, data_dir)
    assert not list(tmp_path.iterdir())
    for name in ("tensorboard", "not-finite.json"):  # as a killed start leaves it
        (tmp_path / ".lock").touch()
        (tmp_path / name).touch()
    train(small_run(str(story)), tmp_path, data_dir)


def test_an_imported_model_is_not_said_to_be_damaged(trained, story, data_dir, tmp_path, capsys):
    export_run(trained, tmp_path / "exported", "safetensors")
    import_run(tmp_path / "exported", tmp_path / "imported")
    run = RunDirectory(tmp_path / "imported").config()
    run.data.corpus = str(story)
    with pytest.raises(UserError, match="imported is an imported model, which has no training to continue; give"):
        train(run, tmp_path / "imported", data_dir)
    for more in ((), ("--corpus", str(story))):  # without a text, too, which would be needed only to train
        assert main(["train", "--out", str(tmp_path / "imported"), *more]) == 2
        assert "imported is an imported model, which has no training to continue; give" in capsys.readouterr().err


def test_remedies_for_another_configuration_are_those_that_would_work(trained, story, data_dir, tmp_path, capsys):
    """The weights are offered only to a model that can take them, and --extend only to a run that is only longer."""
    out = shutil.copytree(trained, tmp_path / "a run")
    weights = f"with --init-from '{out}' to start from its weights, or --fork to do so beside it"
    itself = f"or go on with this run by giving --out '{out}' alone"
    for options, said in (
        (
            {"train.steps": "24"},
            f"train.steps 12 -> 24; add --extend to train this one longer, or give another --out, {weights}",
        ),
        (
            {"train.steps": "24", "train.seed": "2"},
            f"train.steps 12 -> 24, train.seed 1 -> 2; give another --out, {weights}",
        ),
        ({"train.steps": "6"}, f"train.steps 12 -> 6; give another --out, {weights}"),
        ({"model.d_inner": "8"}, f"model.d_inner 24 -> 8; give another --out, {itself}"),
        ({"data.unit": "char"}, f"data.unit byte -> char; give another --out, {itself}"),
    ):
        words = ["train", "stdlib-tiny", "--data-dir", str(data_dir), *options_of(small_run(str(story), **options))]
        assert main([*words, "--out", str(out)]) == 2
        assert capsys.readouterr().err.endswith(f"holds a different run: {said}\n")


def test_a_run_that_goes_on_names_the_command_that_follows(trained, data_dir, tmp_path, capsys):
    out = shutil.copytree(trained, tmp_path / "a run")
    assert main(["train", "--out", str(out), "--data-dir", str(data_dir)]) == 0
    assert f"done: step 12 of 12 in {out}; next: txl eval '{out}'\n" in capsys.readouterr().err


def test_two_trainers_do_not_share_a_directory(story, data_dir, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    with RunDirectory(out).locked(), pytest.raises(UserError, match="another process is training here"):
        train(small_run(str(story)), out, data_dir)
    assert (out / ".lock").exists(), "it is the other process's"


def test_splits_that_are_too_short_are_refused_before_anything_is_written(tmp_path, data_dir):
    text = tmp_path / "short.txt"
    text.write_text("too short for this\n" * 3)
    with pytest.raises(UserError, match=r"train split has 51 tokens: 4 lanes of 12.*needs lanes of 33"):
        train(small_run(str(text), **{"train.segment": "32"}), tmp_path / "run", data_dir)
    with pytest.raises(UserError, match=r"validation split: 3 tokens in 4 lanes.*eval.batch_size"):
        train(small_run(str(text)), tmp_path / "new" / "run", data_dir)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "new").exists()
