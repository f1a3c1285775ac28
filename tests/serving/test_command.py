"""The command `txl serve` as a process."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.conftest import small_run
from txl.cli import main
from txl.training.trainer import Trainer

TEXT = "12. The river rose in the night — and by morning."


@contextmanager
def process(trained, *words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "txl", "serve", str(trained), "--port", "0", *words]
    pipes: Any = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": os.environ | environment}
    with subprocess.Popen(command, **pipes) as started:
        try:
            assert started.stderr is not None
            said, match = "", None
            while match is None:
                said += (line := started.stderr.readline())
                assert line, said
                match = re.search(r"memory 16, window 16, .* at (http://\S+);", line)  # as `txl eval` prints them
            yield started, match[1]
        finally:
            started.kill()


def ends(started: subprocess.Popen[str], by: int) -> str:
    started.send_signal(by)
    out, rest = started.communicate(timeout=30)
    assert started.returncode == 0, rest
    assert out == ""
    return rest


def test_a_stream_moves_from_one_process_to_another_that_wants_a_key(trained, tmp_path):
    folder = tmp_path / "streams"
    key = {"authorization": "Bearer secret"}
    with (
        process(trained, "--streams", str(folder), "--max-streams", "3") as (first, here),
        process(trained, "--name", "replica", TXL_API_KEY="secret") as (second, there),
    ):
        assert httpx.get(f"{there}/v1/models").status_code == 401
        assert httpx.get(f"{there}/v1/models", headers=key).json()["data"][0]["id"] == "replica"
        made = httpx.post(f"{here}/v1/streams", json={"text": TEXT, "seed": 3}, timeout=30).json()["stream"]
        url = f"{here}/v1/streams/{made['id']}"
        httpx.post(f"{url}/generate", json={"max_tokens": 20}, timeout=30)
        data = httpx.get(f"{url}/snapshot").content
        octets = {"content-type": "application/octet-stream"}
        moved = httpx.post(f"{there}/v1/streams", content=data, headers=key | octets).json()
        asked = {"max_tokens": 40, "logprobs": 2}
        ours = httpx.post(f"{url}/generate", json=asked, timeout=30).json()
        theirs = httpx.post(f"{there}/v1/streams/{moved['id']}/generate", json=asked, headers=key, timeout=30).json()
        assert ours["tokens"] == theirs["tokens"]
        assert "stopped; streams lost: 1 (" in ends(second, signal.SIGINT)
        assert f"stopped; streams saved in {folder}: 1" in ends(first, signal.SIGTERM)
    assert (folder / f"{made['id']}.safetensors").is_file()


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_signals_that_end_a_program_save_the_streams_first_unless_they_are_ignored(trained, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; the process inherits it
    try:
        with process(trained, "--streams", str(tmp_path)) as (started, url):
            started.send_signal(signal.SIGHUP)
            httpx.post(f"{url}/v1/streams", json={"text": TEXT}, timeout=30).raise_for_status()
            assert f"stopped; streams saved in {tmp_path}: 1" in ends(started, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGHUP, before)
    with process(trained, "--streams", str(tmp_path)) as (started, url):
        assert f"stopped; streams saved in {tmp_path}: 1" in ends(started, signal.SIGHUP)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--port", "70000"), ("--host", "no.such.host.invalid"), ("--host", "203.0.113.7"), ("--max-streams", "0"),
        ("--max-queue", "-1"), ("--idle", "0"), ("--api-key", ""), ("--api-key", " "), ("--api-key", "schl\u00fcssel"),
        ("--mem-len", "-5"), ("--checkpoint", "9999"), ("--dtype", "int8"), ("--allow-host", "example.org:443"),
        ("--allow-host", "https://example.org"), ("--allow-host", "*"), ("--allow-host", "a b"), ("--streams", ""),
        ("--name", ""), ("--name", "x\ny"), ("--name", "x\udcff"), ("--allow-origin", "example.org"),
        ("--allow-origin", "https://example.org/"), ("--allow-origin", "https://Example.org"),
        ("--allow-origin", "https://example.org:443"), ("--max-streams", str(2**53)),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(trained, option, value, capsys):
    assert main(["serve", str(trained), "--port", "0", option, value]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert option.removeprefix("--" if option == "--checkpoint" else "") in line


def test_what_is_not_there_or_taken(trained, tmp_path, capsys):
    assert main(["serve", str(tmp_path / "nothing")]) == 2
    assert "no such directory" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(trained), "--port", str(port)]) == 2
    assert f"port {port}" in capsys.readouterr().err
    file = tmp_path / "file"
    file.write_text("not a folder")
    assert main(["serve", str(trained), "--port", "0", "--streams", str(file)]) == 2
    assert f"--streams {file}: a file; expected a folder" in capsys.readouterr().err


def test_without_the_extra(trained, monkeypatch, capsys):
    monkeypatch.setattr("txl.commands.serve.find_spec", lambda name: None if name == "uvicorn" else name)
    assert main(["serve", str(trained)]) == 2
    assert "pip install 'transformer-xl[serve]'" in capsys.readouterr().err


def test_a_model_of_another_family(story, data_dir, tmp_path, capsys):
    options = {"model.family": "vanilla", "model.mem_len": "0", "eval.mem_len": "0", "eval.window": "none"}
    run = small_run(str(story), **options, **{"model.max_segment": "8", "train.steps": "1"})
    Trainer(run, tmp_path / "run", data_dir=data_dir, quiet=True).fit()
    capsys.readouterr()
    assert main(["serve", str(tmp_path / "run"), "--port", "0", "--mem-len", "0"]) == 2
    assert "Transformer-XL" in capsys.readouterr().err


def test_what_differs_from_txl_score_is_said_at_the_start(trained, story, data_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("txl.serving.app.serve", lambda app, service, listening, ready: ready(lambda: None))
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)  # it would hold for the tests that follow
    run = small_run(str(story), **{"eval.temperature": "1.3", "eval.window": "none", "eval.segment": "256"})
    run.train.steps = 1
    Trainer(run, tmp_path / "run", data_dir=data_dir, quiet=True).fit()
    capsys.readouterr()
    said = []
    for directory in (trained, tmp_path / "run"):
        assert main(["serve", str(directory), "--port", "0"]) == 0
        said.append([line for line in capsys.readouterr().err.splitlines() if line.startswith("note:")])
    assert said[0] == []
    temperature, segments = said[1]
    assert "txl score uses the run's, 1.3" in temperature
    assert "texts are read in segments of 128 tokens; txl score uses the run's, 256" in segments
