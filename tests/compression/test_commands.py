"""Commands `txl compress` and `txl decompress`, in part as separate processes."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from txl.cli import main
from txl.compression.compressor import VerifiedSink
from txl.compression.container import MAGIC
from txl.errors import STOP_SIGNALS, CommandFailed

TEXT = b"All happy families are alike; every unhappy family is unhappy in its own way.\n" * 4


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_bytes(TEXT * 10)
    out = folder / "run"
    small = "--train.steps 2 --train.eval-every 0 --model.n-layer 1 --model.d-model 16 --model.d-inner 16".split()
    where = ["--out", str(out), "--data-dir", str(folder / "data"), "--data.corpus", str(folder / "text.txt")]
    assert main(["train", "stdlib-tiny", *where, *small]) == 0
    return out


def test_there_and_back_through_pipes_in_other_processes(run, tmp_path):
    """The name of the model begins like an option, which the process that verifies must not take it for."""
    shutil.copytree(run, tmp_path / "-m")

    def txl(command: str, source: bytes, threads: int) -> tuple[bytes, bytes]:
        words = [sys.executable, "-m", "txl", command, "-", "--model=-m", "-o", "-"]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(words, input=source, capture_output=True, env=environment, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    file, messages = txl("compress", TEXT, 1)
    assert b"decoded and compared" in messages
    assert txl("decompress", file, 2)[0] == TEXT


def test_online_and_dynamic_files(run, tmp_path, capsys):
    text, file, back = tmp_path / "text", tmp_path / "text.txl", tmp_path / "back"
    text.write_bytes(TEXT)
    for options in (["--online", "--seed", "3"], ["--model", str(run), "--dynamic"]):
        assert main(["compress", str(text), *options, "--no-verify", "--force", "-o", str(file), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["bytes"] == len(TEXT)
        assert told["compressed_bytes"] == file.stat().st_size
        assert not told["verified"]
        model = options[:2] if options[0] == "--model" else []
        assert main(["decompress", str(file), *model, "--force", "-o", str(back)]) == 0
        assert back.read_bytes() == TEXT
        assert f"-> {len(TEXT)} bytes" in capsys.readouterr().err


def test_damaged_settings_of_dynamic_evaluation_are_refused(run, tmp_path, capsys):
    copy, text = tmp_path / "run", tmp_path / "text"
    shutil.copytree(run, copy)
    text.write_bytes(TEXT)
    few = ("--max-tokens", "200", "--data-dir", str(tmp_path / "data"))
    assert main(["eval", str(copy), *few, "--dynamic", "sgd", "--dynamic-learning-rate", "0.1"]) == 0
    log = copy / "log.jsonl"
    lines = log.read_text().splitlines()
    for change in ({"learning_rate": "x"}, {"rule": "x"}, {"decay": []}, {"statistics_segments": "x"}, None):
        event = json.loads(lines[-1])
        event["dynamic"] = event["dynamic"] | change if change else {"rule": "sgd"}  # None: fields are missing
        log.write_text("\n".join([*lines, json.dumps(event)]) + "\n")
        capsys.readouterr()
        assert main(["compress", str(text), "--model", str(copy), "--dynamic", "-o", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert str(log) in error
        assert "--dynamic sgd" in error
        assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.name == "nt", reason="there are no permissions here")
@pytest.mark.parametrize("mode", [0o440, 0o664])
def test_permissions_and_time_stay_those_of_the_text(mode, tmp_path, monkeypatch):
    text, file, back = tmp_path / "text", tmp_path / "text.txl", tmp_path / "back"
    text.write_bytes(TEXT)
    text.chmod(mode)
    os.utime(text, ns=(1, 1234567890_123456789))
    seen: list[int] = []
    monkeypatch.setattr("txl.files.sync", lambda path: seen.append(path.stat().st_mode & 0o777))
    for words in (["compress", text, "--online", "--no-verify", "-o", file], ["decompress", file, "-o", back]):
        assert main([str(word) for word in words]) == 0
    for path in (file, back):
        assert (path.stat().st_mode & 0o777, path.stat().st_mtime_ns) == (mode, 1234567890_123456789)
    assert seen == [0o600, 0o600], "others could read a file while it was written"


@pytest.mark.skipif(os.name == "nt", reason="there are no groups here")
def test_a_group_that_cannot_be_kept_gives_its_rights_to_no_other(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    text, file = tmp_path / "text", tmp_path / "text.txl"
    text.write_bytes(TEXT)
    text.chmod(0o664)
    monkeypatch.setattr(os, "chown", refuse)
    assert main(["compress", str(text), "--online", "--no-verify", "-o", str(file)]) == 0
    assert file.stat().st_mode & 0o777 == 0o604


@pytest.mark.parametrize("command", [["compress", "text", "--online", "--no-verify"], ["decompress", "file"]])
def test_an_existing_file_is_replaced_only_by_force(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(TEXT)
    assert main(["compress", "text", "--online", "--no-verify", "-o", "file"]) == 0
    Path("mine").write_bytes(b"mine")
    Path("link").symlink_to("mine")
    capsys.readouterr()
    for out in ("mine", "link"):
        assert main([*command, "-o", out]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert f"--out {out}" in line
        assert "--force" in line
    assert Path("mine").read_bytes() == b"mine"
    assert main([*command, "--force", "-o", "mine"]) == 0
    assert Path("mine").read_bytes() == {"compress": Path("file").read_bytes(), "decompress": TEXT}[command[0]]


def test_a_damaged_file_leaves_nothing(tmp_path, capsys):
    text, file, back = tmp_path / "text", tmp_path / "text.txl", tmp_path / "back"
    text.write_bytes(TEXT)
    assert main(["compress", str(text), "--online", "--no-verify", "-o", str(file)]) == 0
    data = bytearray(file.read_bytes())
    data[-30] ^= 16
    file.write_bytes(data)
    assert main(["decompress", str(file), "-o", str(back)]) == 2
    assert "damaged" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text", "text.txl"]


def test_nothing_half_written_is_left_by_signals(tmp_path, capsys):
    kinds = {number: 128 + number for number in STOP_SIGNALS[1:3]} | {signal.SIGKILL: -signal.SIGKILL}
    started = {}
    for kind in kinds:
        words = ["compress", "-", "--online", "--no-verify", "-o", str(tmp_path / kind.name)]
        started[kind] = subprocess.Popen(
            [sys.executable, "-m", "txl", *words], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
    for kind, process in started.items():
        with process:
            while not list(tmp_path.glob(f"{kind.name}.*")):  # the command then waits for its text
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.05)
            process.send_signal(kind)
            if kind not in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
                process.send_signal(kind)  # as a shell and the system may do when a terminal is closed
            _, said = process.communicate(timeout=60)
        assert process.returncode == kinds[kind], said
        assert b"Traceback" not in said
    (left,) = tmp_path.iterdir()  # left by SIGKILL, which no process can handle
    text = tmp_path / "text"
    text.write_bytes(TEXT)
    assert main(["compress", str(text), "--online", "--no-verify", "-o", str(tmp_path / "SIGKILL")]) == 0
    assert f"note: {left}, which a killed process had left, was removed" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["SIGKILL", "text"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("compress TEXT -o OUT", ("--model", "--online")),
        ("compress TEXT --model RUN --online -o OUT", ("--model", "--online")),
        ("compress TEXT --online --mem-len 3 -o OUT", ("--mem-len", "--online")),
        ("compress TEXT --online --data-dir RUN -o OUT", ("--data-dir", "--online")),
        ("compress TEXT --online --dynamic -o OUT", ("--dynamic", "--online")),
        ("compress TEXT --model RUN --seed 3 -o OUT", ("--seed", "--online")),
        ("compress TEXT --model RUN --dynamic sgd -o OUT", ("--dynamic", "--dynamic-learning-rate")),
        ("compress TEXT --model RUN --dynamic-decay 1 -o OUT", ("--dynamic-decay", "--dynamic")),
        ("compress TEXT --online -o TEXT", ("--out",)),
        ("compress TEXT --online --json -o -", ("--out", "--json")),
        ("compress NOWHERE --online -o OUT", ("nowhere",)),
        ("decompress TEXT -o OUT", ("text",)),
        ("decompress TEXT --checkpoint best -o OUT", ("--checkpoint", "--model")),
        ("decompress TEXT --data-dir RUN -o OUT", ("--data-dir", "--model")),
    ],
)
def test_mistakes_in_one_line(run, tmp_path, capsys, words, named):
    names = {"TEXT": tmp_path / "text", "OUT": tmp_path / "out", "RUN": run, "NOWHERE": tmp_path / "nowhere"}
    names["TEXT"].write_bytes(TEXT)
    assert main([str(names.get(word, word)) for word in words.split()]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert all(name in line for name in named)
    assert not names["OUT"].exists()


def test_a_text_that_does_not_come_back_is_not_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("secrets", "queue", "txl"):  # the user's files in the working folder, not to be imported
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')\n")
    written = io.BytesIO()
    with closing(VerifiedSink(written, [], 1)) as sink:
        sink.write(b"no such file, and long enough to be one", b"text")
        with pytest.raises(CommandFailed, match="cannot be decoded: error: standard input is not a file of txl comp"):
            sink.finish(b"end")
    assert written.getvalue() == b""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_pipe_and_a_device_are_written_to_and_stay(tmp_path):
    pipe, device, text = tmp_path / "pipe", tmp_path / "device", tmp_path / "text"
    os.mkfifo(pipe)
    device.symlink_to(os.devnull)
    text.write_bytes(TEXT)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    for out in (pipe, device):
        assert main(["compress", str(text), "--online", "--no-verify", "-o", str(out)]) == 0
    reader.join()
    assert found[0].startswith(MAGIC)
    assert pipe.is_fifo()
    assert device.is_symlink()
