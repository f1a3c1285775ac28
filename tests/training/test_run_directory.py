"""Log, pointers and checkpoints of a run directory after a crash, on a full disk, or changed by another program."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import portalocker
import pytest
import safetensors.torch
import torch
from tests.conftest import small_run

import txl
from txl.config import RunConfig
from txl.errors import UserError
from txl.runs import checkpoints
from txl.runs.checkpoints import (
    Contents,
    VerifiedCheckpoint,
    _own_sha256,
    checkpoint_names,
    prune,
    remove_later,
    remove_partial,
    write_checkpoint,
)
from txl.runs.directory import RunDirectory
from txl.runs.events import EventName
from txl.training.trainer import Trainer

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(0, 4)}


def write(folder: Path, step: int, weights: dict[str, torch.Tensor] = WEIGHTS) -> Path:
    tensors = {"random.cpu": torch.ones(5, dtype=torch.uint8)}
    return write_checkpoint(folder, step, Contents(weights, tensors, {"step": step}))


def test_events_come_back_as_they_were_written(tmp_path):
    run = RunDirectory(tmp_path)
    text = "line\u2028separator, \x85 next line, \n newline, “quotes”, \ud800 half a pair"
    run.append(EventName.END, 3, elapsed=0.1, diverged=text)
    run.append(EventName.AVERAGE, 4)
    first, second = run.events()
    assert first["diverged"] == text.replace("\ud800", "?")
    assert (first["event"], first["step"], first["elapsed"]) == ("end", 3, 0.1)
    assert second["time"] >= first["time"] > 1.7e9
    assert (tmp_path / "log.jsonl").read_bytes().count(b"\n") == 2


def test_numbers_that_json_has_no_name_for_are_null_in_the_log(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.append(EventName.SPIKE, 3, loss=math.inf, grad_norm=2.0, recent_mean=1.0)
    line = (tmp_path / "log.jsonl").read_text()
    found = json.loads(line, parse_constant=pytest.fail)
    assert (found["loss"], found["grad_norm"], found["recent_mean"]) == (None, 2.0, 1.0)
    (event,) = directory.events()
    assert math.isnan(event["loss"])
    assert event["grad_norm"] == 2.0


def test_a_torn_last_line_is_left_out_and_not_glued_to_the_next(tmp_path):
    run = RunDirectory(tmp_path)
    run.append(EventName.AVERAGE, 1)
    with open(tmp_path / "log.jsonl", "ab") as file:
        file.write(b'{"event": "train", "st')
    assert [event["step"] for event in run.events()] == [1]
    run.append(EventName.AVERAGE, 3)
    assert [event["step"] for event in run.events()] == [1, 3]


def test_two_processes_append_whole_lines(tmp_path):
    program = textwrap.dedent("""
        import sys
        from txl.runs.directory import RunDirectory
        from txl.runs.events import EventName
        for step in range(50):
            RunDirectory(sys.argv[1]).append(EventName.STOP, step, reason=sys.argv[2] * 20_000)
    """)
    processes = [subprocess.Popen([sys.executable, "-c", program, tmp_path, name]) for name in "ab"]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    events = RunDirectory(tmp_path).events()
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == len(events) == 100
    for name in "ab":
        assert [event["step"] for event in events if event["reason"] == name * 20_000] == list(range(50))


def test_a_log_that_cannot_be_written_is_the_user_s_to_mend(tmp_path):
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"log.jsonl: the log cannot be written \(No space left on device\)"):
        RunDirectory(tmp_path).append(EventName.TRAIN, 1)


def test_a_log_is_written_where_a_file_system_has_no_locks(tmp_path, monkeypatch):
    def without(*_: object) -> None:
        raise portalocker.LockException(OSError(37, "No locks available"))

    monkeypatch.setattr(portalocker, "lock", without)
    RunDirectory(tmp_path).append(EventName.STOP, 3, reason="no locks")
    assert [event["step"] for event in RunDirectory(tmp_path).events()] == [3]


def test_small_files_are_the_old_or_the_new_one(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path)
    run.set_pointer("best", "step-00000001")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"best: cannot be written \(No space left on device\)"):
        run.set_pointer("best", "step-00000002")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert (tmp_path / "best").read_text() == "step-00000001\n"


def test_a_configuration_is_read_back_or_refused_with_its_name(tmp_path):
    run = RunDirectory(tmp_path)
    with pytest.raises(UserError, match=r"not a run directory \(it has no config.json\)"):
        run.config()
    config = small_run("x.txt", **{"model.cutoffs": "3,5", "model.window": "4"})
    run.write_config(config)
    assert run.config() == config
    (tmp_path / "config.json").write_text('{"model": {"n_layers": 3}}')
    with pytest.raises(UserError, match=r"config.json: model.n_layers: not known"):
        run.config()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json: not JSON"):
        run.config()


def test_checkpoints_by_name_and_by_number(tmp_path):
    run = RunDirectory(tmp_path)
    with pytest.raises(UserError, match="has no checkpoint; restore its folder checkpoints"):
        run.checkpoint()
    for step in (5, 10):
        write(run.checkpoints, step)
    run.set_pointer("latest", "step-00000010")
    assert run.checkpoint().name == "step-00000010"
    run.set_pointer("best", "step-00000005")
    assert run.checkpoint().name == run.checkpoint("best").name == run.checkpoint("5").name == "step-00000005"
    with pytest.raises(UserError, match="checkpoint is 7, but .* has the steps 5, 10"):
        run.checkpoint("7")
    with pytest.raises(UserError, match="checkpoint is newest; expected best, latest or the number of a step"):
        run.checkpoint("newest")
    for target in ("garbage", "step-00000007"):
        run.set_pointer("best", target)
        with pytest.raises(UserError, match=r"best: names no checkpoint; choose a step with checkpoint \(5, 10\)"):
            run.checkpoint()


def test_a_checkpoint_holds_tensors_and_numbers_and_a_manifest(tmp_path):
    written = write(tmp_path, 7)
    manifest = json.loads((written / "manifest.json").read_text())
    assert {path.name for path in written.iterdir()} == {*manifest["files"], "manifest.json"}
    for name, record in manifest["files"].items():
        assert record["bytes"] == (written / name).stat().st_size
    assert {key: value.tolist() for key, value in VerifiedCheckpoint(written).tensors("model.safetensors").items()} == {
        "a": [[0, 1, 2], [3, 4, 5]],
        "b": [],
    }
    assert VerifiedCheckpoint(written).state() == {"step": 7}


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    write(tmp_path, 7)
    written = write(tmp_path, 7, {"a": torch.ones(1)})
    assert VerifiedCheckpoint(written).tensors("model.safetensors").keys() == {"a"}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


@pytest.mark.parametrize("failing", ["model", "state", "sync", "rename", "crash"])
def test_a_write_that_fails_leaves_what_was_there(failing, tmp_path, monkeypatch):
    before = write(tmp_path, 7)
    content = {path.name: path.read_bytes() for path in before.iterdir()}

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def crash(*args, **kwargs):
        raise KeyboardInterrupt

    real_rename = os.rename

    def rename(old, new):
        if Path(old).suffix == ".partial" and Path(new).name == "step-00000007" and "replaced" not in str(old):
            full()
        real_rename(old, new)

    if failing == "model":
        monkeypatch.setattr(safetensors.torch, "save_file", full)
    elif failing == "state":
        monkeypatch.setattr(Path, "write_text", full)
    elif failing == "rename":
        monkeypatch.setattr(os, "rename", rename)
    else:
        monkeypatch.setattr(os, "fsync", full if failing == "sync" else crash)
    for step in (7, 8):
        if failing == "rename" and step == 8:
            continue
        with pytest.raises(KeyboardInterrupt if failing == "crash" else UserError) as raised:
            write(tmp_path, step)
        if failing != "crash":
            assert f"step-{step:08d}: the checkpoint could not be written (No space left on device)" in str(
                raised.value
            )
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    assert {path.name: path.read_bytes() for path in before.iterdir()} == content


def test_what_a_killed_process_left_half_written_is_cleared_away(tmp_path):
    (tmp_path / ".step-00000003.partial").mkdir(parents=True)
    (tmp_path / ".step-00000003.partial" / "model.safetensors").touch()
    (tmp_path / ".step-00000002.deleted.partial").mkdir()
    assert checkpoint_names(tmp_path) == []
    write(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_a_later_checkpoint_that_cannot_be_deleted_is_not_resumed_from(tmp_path, monkeypatch):
    for step in (4, 6, 8):
        write(tmp_path, step)
    monkeypatch.setattr(checkpoints, "_deleted", lambda checkpoint: False)
    remove_later(tmp_path, 4)
    assert checkpoint_names(tmp_path) == ["step-00000004"]
    assert (tmp_path / "refused-step-00000006").is_dir()
    write(tmp_path, 6)

    def refused(*_: object) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(checkpoints.os, "rename", refused)
    with pytest.raises(UserError, match="step-00000006: cannot be set aside"):
        remove_later(tmp_path, 4)


def test_pruning_keeps_the_newest_and_the_protected(tmp_path):
    for step in range(1, 7):
        write(tmp_path, step)
    prune(tmp_path, 2, {"step-00000003"})
    assert checkpoint_names(tmp_path) == ["step-00000003", "step-00000005", "step-00000006"]


def _manifest(step: int, *names: str) -> str:
    """Return a manifest that lists files of 0 bytes."""
    files = {name: {"bytes": 0, "sha256": ""} for name in names}
    manifest = {"format": 2, "step": step, "files": files}
    return json.dumps(manifest | {"sha256": _own_sha256(manifest)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), r"not a whole checkpoint \(manifest.json is missing\)"),
        (lambda path: path.write_text("{"), "manifest.json: not JSON"),
        (lambda path: path.write_text("[]"), "manifest.json: damaged"),
        (lambda path: path.write_text('{"format": 99, "files": {}}'), "of format 99; this version reads format 2"),
        (lambda path: path.write_text('{"format": 2, "step": "7", "files": {}}'), "damaged .its step is '7'"),
        (lambda path: path.write_text(_manifest(8)), "altered, or of another step"),
        (lambda path: path.write_text('{"format": 2, "step": 7, "files": {}}'), "altered, or of another step"),
        (lambda path: path.write_text('{"format": 2, "step": 7, "files": []}'), "damaged .its files is"),
        (lambda path: path.write_text('{"format": 2, "step": 7}'), "damaged .its files is None"),
        (lambda path: path.write_text('{"format": 2, "step": 7, "files": {}, "model": 5}'), "damaged .its model is 5"),
        (lambda path: path.write_text(_manifest(7)), "does not list model.safetensors"),
        (lambda path: path.write_text(_manifest(7, "/dev/zero")), "names a file outside of its directory"),
        (lambda path: path.write_text(_manifest(7, "x/../../y")), "names a file outside of its directory"),
    ],
)
def test_a_damaged_manifest_is_refused(damage, message, tmp_path):
    written = write(tmp_path, 7)
    damage(written / "manifest.json")
    with pytest.raises(UserError, match=message):
        VerifiedCheckpoint(written).tensors("model.safetensors")


def test_weights_and_configuration_that_do_not_belong_together_are_refused(trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    config = RunDirectory(copy).config()
    config.model.n_head, config.model.d_head = 1, 16
    RunDirectory(copy).write_config(config)
    with pytest.raises(UserError, match=r"config.json: model.n_head is 1, but step-00000012 was written with 2"):
        txl.load(copy)
    # If the manifest does not describe the model, the shapes of the weights show that they do not fit.
    for path in (copy / "checkpoints").glob("*/manifest.json"):
        manifest = json.loads(path.read_text()) | {"model": {}}
        path.write_text(json.dumps(manifest | {"sha256": checkpoints._own_sha256(manifest)}))
    with pytest.raises(UserError, match=r"u has the shape \(2, 8\).*\(1, 16\)"):
        txl.load(copy)
    config.model.n_head, config.model.d_head, config.model.n_layer = 2, 8, 1
    RunDirectory(copy).write_config(config)
    with pytest.raises(UserError, match=r"layers\.1\..* describes none"):
        txl.load(copy)


def test_another_vocabulary_than_the_weights_were_trained_with_is_refused(trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    path = copy / "vocabulary.json"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(UserError, match=r"vocabulary.json: altered"):
        txl.load(copy)


def refused_training(out: Path, story: Path, data_dir: Path, config: RunConfig | None = None) -> str:
    with pytest.raises(UserError) as refused:
        Trainer(config or small_run(str(story)), out, data_dir=data_dir, quiet=True).fit()
    return str(refused.value)


def test_a_full_disk_when_the_log_is_written_keeps_the_last_checkpoint(trained, story, data_dir, tmp_path):
    """A limit on file sizes simulates the full disk: the real system call writes only part of the line."""
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    events = RunDirectory(copy).events()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((copy / "log.jsonl").stat().st_size + 10, hard))
    try:
        message = refused_training(copy, story, data_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "the log cannot be written (File too large)" in message
    assert RunDirectory(copy).events() == events
    txl.load(copy, checkpoint="latest")
    Trainer(small_run(str(story)), copy, data_dir=data_dir, quiet=True).fit()
    assert [event["event"] for event in RunDirectory(copy).events()[len(events) :]] == ["resume", "end"]


def test_a_failed_start_leaves_the_directory_as_it_was(story, data_dir, tmp_path):
    missing = tmp_path / "no such text.txt"
    refused_training(tmp_path / "new" / "run", missing, data_dir)
    assert not (tmp_path / "new").exists()
    there = tmp_path / "there"
    there.mkdir()
    refused_training(there, missing, data_dir)
    assert not list(there.iterdir())
    (there / "checkpoints").mkdir()
    write(there / "checkpoints", 4)  # a run that has lost its config.json is not overwritten
    assert "not empty and not a run directory (it contains checkpoints)" in refused_training(there, story, data_dir)
    assert checkpoint_names(there / "checkpoints") == ["step-00000004"]


def test_training_goes_on_from_the_newest_if_a_crash_came_before_it_was_named(tmp_path):
    run = RunDirectory(tmp_path)
    assert run.newest() is None
    for step in (5, 10):
        write(run.checkpoints, step)
    newest = run.newest()
    assert newest is not None
    assert newest.name == "step-00000010"
    run.set_pointer("latest", "step-00000005")
    newest = run.newest()
    assert newest is not None
    assert newest.name == "step-00000010"


def test_what_was_being_replaced_when_the_process_was_killed_takes_its_name_again(tmp_path):
    content = {path.name: path.read_bytes() for path in write(tmp_path, 4).iterdir()}
    (tmp_path / "step-00000004").rename(tmp_path / ".step-00000004.replaced.partial")
    remove_partial(tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-00000004").iterdir()} == content
