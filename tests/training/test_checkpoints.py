"""Checkpoints of a run: which ones stay, which one training goes on from, and which are refused."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys

import pytest
from tests.conftest import options_of, small_run
from tests.training.test_trainer import assert_same_end, train

import txl
from txl.errors import UserError
from txl.files import file_sha256
from txl.runs import checkpoints
from txl.runs.directory import RunDirectory
from txl.training.saver import newest_good
from txl.training.trainer import Trainer


def test_old_checkpoints_go_the_best_and_the_newest_stay(story, data_dir, tmp_path):
    options = {"train.checkpoint_every": "1", "train.eval_every": "5", "train.keep_checkpoints": "2"}
    outcome = train(small_run(str(story), **options), tmp_path / "run", data_dir)
    left = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert left == {"step-00000011", "step-00000012", f"step-{outcome['best_step']:08d}"}


@pytest.mark.parametrize(
    "name", ["model.safetensors", "training_state.safetensors", "training_state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["truncated", "altered", "missing"])
def test_the_checkpoint_before_a_damaged_one_is_the_newest_good_one(name, damage, trained, tmp_path):
    run = RunDirectory(shutil.copytree(trained, tmp_path / "copy"))
    path = run.checkpoint("latest") / name
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "missing":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    if name in ("model.safetensors", "manifest.json"):
        with pytest.raises(UserError, match=r"step-00000012"):
            run.load(run.checkpoint("latest"))
    checkpoint, refused = newest_good(run, run.log().run_id)
    assert checkpoint is not None
    assert checkpoint.path.name == "step-00000008"
    assert "step-00000012" in refused[0]
    assert (run.checkpoints / "refused-step-00000012").is_dir()


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(trained, story, data_dir, tmp_path, capsys):
    copy = shutil.copytree(trained, tmp_path / "copy")
    (RunDirectory(copy).checkpoint("latest") / "training_state.json").write_text("{}")
    Trainer(small_run(str(story)), copy, data_dir=data_dir).fit()
    printed = capsys.readouterr().err
    assert "going on from step 8" in printed
    assert "set aside as refused-step-00000012" in printed
    assert_same_end(copy, trained)


def test_each_file_of_a_checkpoint_is_hashed_once_when_a_run_goes_on(trained, story, data_dir, tmp_path, monkeypatch):
    copy, hashed = shutil.copytree(trained, tmp_path / "copy"), []

    def noted(path):
        hashed.append(path.name)
        return file_sha256(path)

    monkeypatch.setattr(checkpoints, "file_sha256", noted)
    train(small_run(str(story)), copy, data_dir)
    assert sorted(set(hashed) - {"vocabulary.json"}) == sorted(name for name in hashed if name != "vocabulary.json")


def test_a_run_without_any_good_checkpoint_is_refused_and_left_as_it_is(trained, story, data_dir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    for path in (copy / "checkpoints").glob("*/training_state.json"):
        path.write_text("{}")
    before = sorted(path.name for path in (copy / "checkpoints").iterdir())
    with pytest.raises(
        UserError, match=r"step-00000012/training_state.json: truncated.*step-00000008/training_state.json"
    ):
        train(small_run(str(story)), copy, data_dir)
    for path in (copy / "checkpoints").glob("*/manifest.json"):
        path.unlink()
    with pytest.raises(UserError, match=r"step-00000012: not a whole checkpoint .manifest.json is missing"):
        train(small_run(str(story)), copy, data_dir)
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == before


def test_a_checkpoint_of_another_run_is_refused_and_one_s_own_gone_on_from(trained, story, data_dir, tmp_path, capsys):
    other = small_run(str(story), **{"train.seed": "2", "train.steps": "16"})
    train(other, tmp_path / "other", data_dir)
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-00000016", copy / "checkpoints" / "step-00000016")
    Trainer(small_run(str(story)), copy, data_dir=data_dir).fit()
    said = capsys.readouterr().err
    assert "step-00000016: a checkpoint of another run" in said
    assert "going on from step 12" in said
    assert_same_end(copy, trained)


def test_a_full_disk_leaves_the_last_good_checkpoint(story, data_dir, tmp_path, trained):
    """A limit on file sizes simulates a full disk: the real system call fails within the weights."""
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    (out / "latest").write_text("step-00000008\n")
    shutil.rmtree(out / "checkpoints" / "step-00000012")
    before = {path.name for path in (out / "checkpoints").iterdir()}
    # Other tests evaluate this model, which lengthens its log; the limit must stop the weights, not the log.
    log = out / "log.jsonl"
    log.write_text(log.read_text().splitlines(keepends=True)[0])

    def limit() -> None:
        size = (out / "checkpoints" / "step-00000008" / "model.safetensors").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size * 3 // 4, size * 3 // 4))

    run = small_run(str(story))
    options = options_of(run)
    done = subprocess.run(
        [sys.executable, "-m", "txl", "train", "stdlib-tiny", "--out", str(out), "--data-dir", str(data_dir), *options],
        stderr=subprocess.PIPE, text=True, preexec_fn=limit,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "the checkpoint could not be written" in last
    assert "File too large" in last
    assert "Traceback" not in done.stderr
    assert {path.name for path in (out / "checkpoints").iterdir()} == before
    txl.load(out, checkpoint="latest")
