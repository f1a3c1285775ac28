"""Files are written completely or not at all, with the usual permissions."""

from __future__ import annotations

import json
import os
import platform
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import txl
from tests.conftest import small_run
from txl.cli import main
from txl.errors import UserError
from txl.files import absolute, file_sha256, parsed_json, read_json, remove_partials, replacing, write_whole
from txl.interop.export_run import export_run


def test_a_file_is_replaced_whole_or_stays(tmp_path):
    path = tmp_path / "text"
    write_whole(path, "old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half of what is ne")
        raise RuntimeError
    assert path.read_text() == "old"
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[" * 66 + "]" * 66, "nested too deeply"),
        ('{"a": [18446744073709551616]}', "beyond 64 bits"),
        ("[-9223372036854775809]", "beyond 64 bits"),
        ("1" * 5000, "Exceeds the limit"),
        ("{", "Expecting"),
    ],
)
def test_json_that_no_code_can_work_with_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parsed_json(text)


def test_json_within_the_limits_is_read():
    value = {"a": [1, -(2**63), 2**64 - 1, 0.5, None, True, "x"], "b": {}}
    for _ in range(62):
        value = {"inner": value}
    assert parsed_json(json.dumps(value)) == value


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_or_a_device_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    for path in (tmp_path / "config.json", Path("/dev/zero")):
        for read in (read_json, file_sha256):
            with pytest.raises(OSError, match="not a regular file"):
                read(path)


def test_a_message_from_a_file_is_one_bounded_line_without_control_characters(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"\x1b[2J" + "x" * 10_000: 1, "name": "a"}))
    assert main(["status", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert len(error) < 2100
    assert "\x1b" not in error
    assert error.endswith("not known to this version\n")


def test_writers_at_the_same_time_do_not_mix_their_files(tmp_path):
    """The processes of two containers that share a folder may have the same number, like these threads."""
    path = tmp_path / "text"
    with replacing(path) as one, replacing(path) as other:
        one.write_text("one, which is longer")
        other.write_text("other")
    assert path.read_text() == "one, which is longer"
    assert [each.name for each in tmp_path.iterdir()] == ["text"]


def test_files_of_killed_processes_of_this_machine_are_removed(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to("text")
    names = []
    for machine, process in (("here", 2**22 + 1), ("elsewhere", 2**22 + 1), ("here", os.getpid())):
        monkeypatch.setattr(platform, "node", lambda machine=machine: machine)
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        with replacing(tmp_path / "link") as temporary:
            names.append(temporary.name)
            temporary.touch()
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setattr(platform, "node", lambda: "here")
    assert remove_partials(tmp_path / "link") == [tmp_path.resolve() / names[0]]
    assert sorted(each.name for each in tmp_path.glob("*.partial")) == sorted(names[1:])


def test_a_link_stays_and_permissions_too(tmp_path):
    path, link = tmp_path / "text", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o600)
    link.symlink_to("text")
    write_whole(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_is_written_to(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(path, "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_name_that_is_not_utf_8_is_written_with_escapes(tmp_path):
    write_whole(tmp_path / "text", json.dumps(os.fsdecode(b"caf\xe9"), ensure_ascii=False))
    assert json.loads((tmp_path / "text").read_text()) == os.fsdecode(b"caf\xe9")


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    for path in (Path(""), Path("/"), tmp_path):
        with pytest.raises(UserError, match="cannot be written \\(Is a directory"):
            write_whole(path, "x")
    with pytest.raises(UserError, match="missing/text: cannot be written"):
        write_whole(tmp_path / "missing" / "text", "x")


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_a_run_and_its_export_have_the_permissions_of_any_new_file(umask, story, data_dir, tmp_path):
    run = small_run(str(story), **{"train.steps": "2", "train.eval_every": "0"})
    before = os.umask(umask)
    try:
        txl.Trainer(run, tmp_path / "run", data_dir=data_dir, quiet=True).fit()
        export_run(tmp_path / "run", tmp_path / "plain", "safetensors")
        export_run(tmp_path / "run", tmp_path / "huggingface", "huggingface")
    finally:
        os.umask(before)
    made = [each for each in tmp_path.rglob("*") if each.name not in ("run", "plain", "huggingface")]
    assert sum(each.suffix == ".safetensors" for each in made) == 4
    for each in made:
        expected = (0o777 if each.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(each.stat().st_mode) == expected, each


def test_a_current_directory_that_has_been_removed_is_named(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    said = "the current directory has been removed; change to another one"
    for path in ("./t.txt", "../t.txt", "texts/*.txt"):
        with pytest.raises(UserError, match=said):
            txl.open_corpus(path, data_dir=tmp_path)
    assert absolute(str(tmp_path)) == str(tmp_path)
    assert main(["presets"]) == 2
    assert capsys.readouterr().err == f"txl: error: {said} (cd ~)\n"
    # As a process: PyTorch's libraries end a process that has no current directory.
    ended = subprocess.run([sys.executable, "-m", "txl", "eval", "x"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, f"txl: error: {said} (cd ~)\n")
