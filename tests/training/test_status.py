"""Commands `txl status` and `txl train --fork`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from tests.conftest import options_of, small_run
from tests.training.test_trainer import train, train_until

from txl.cli import main
from txl.errors import UserError
from txl.runs.directory import RunDirectory
from txl.runs.status import run_status
from txl.training.trainer import Trainer

FILES = ("manifest.json", "model.safetensors", "training_state.json")


@pytest.fixture
def copy(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_in_a_run_directory_is_not_waited_for(copy):
    """A process of its own has a time limit: in this one, a pipe would stop the tests for ever."""
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from txl.cli import main\n"
        "for name in sys.argv[2:]:\n"
        "    path = Path(sys.argv[1]) / name\n"
        "    content = path.read_bytes() if path.exists() else b''\n"
        "    path.unlink(missing_ok=True)\n"
        "    os.mkfifo(path)\n"
        "    assert main(['status', sys.argv[1]]) in (0, 2), name\n"
        "    path.unlink()\n"
        "    path.write_bytes(content)\n"
    )
    names = ["config.json", "log.jsonl", ".lock", "best", *(f"checkpoints/step-00000012/{name}" for name in FILES)]
    command = [sys.executable, "-c", program, str(copy), *names]
    ended = subprocess.run(command, timeout=100, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_finished_run(copy, capsys):
    assert main(["status", str(copy)]) == 0
    told = capsys.readouterr().out
    assert "finished" in told
    assert "12 of 12 (100.0%)" in told
    assert "step-00000012, verified now" in told
    assert main(["status", str(copy), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    valid = [event["nll"] for event in RunDirectory(copy).events() if event["event"] == "valid"]
    assert (status["step"], status["steps"], status["valid_nll"]) == (12, 12, valid[-1])
    assert status["restarts"] == status["skipped"] == status["torn_lines"] == 0
    assert status["tokens_per_second"] > 0


def test_damage_is_told(copy):
    weights = copy / "checkpoints" / "step-00000012" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with open(copy / "log.jsonl", "a") as log:
        log.write('{"event": "train", "step": 13, "lo')
    status = run_status(copy)
    assert status.last_good_checkpoint == "step-00000008"
    assert "altered" in status.refused[0]
    assert status.torn_lines == 1
    assert any("refused" in line and "altered" in line for line in status.lines())


def test_restarts_and_stops_are_counted(story, data_dir, tmp_path, monkeypatch):

    run, out = small_run(str(story)), tmp_path / "run"
    train_until(5, monkeypatch, run, out, data_dir)
    assert run_status(out).state.startswith("stopped (SIGINT)")
    assert run_status(out).step == 5
    with RunDirectory(out).locked():
        assert run_status(out).state == "training"
    train(run, out, data_dir)
    assert run_status(out).restarts == 1
    assert run_status(out).state == "finished"


def test_a_killed_run_says_so(copy):
    log = copy / "log.jsonl"
    lines = [line for line in log.read_text().splitlines() if '"event": "end"' not in line]
    log.write_text("\n".join(lines) + "\n")
    assert run_status(copy).state == "ended unexpectedly (killed?); the same command continues"
    shutil.rmtree(copy / "checkpoints")
    begins_again = "ended unexpectedly (killed?) before its first checkpoint; the same command begins again"
    assert run_status(copy).state == begins_again


@pytest.mark.parametrize("left", ["missing", "cut", "without a start"])
def test_a_log_that_is_missing_or_incomplete_is_told(left, copy, data_dir, capsys):
    log = copy / "log.jsonl"
    text = log.read_text()
    log.unlink()
    if left != "missing":
        log.write_text(text[:40] if left == "cut" else '{"event": "start", "step": 0}\n')
    assert run_status(copy).state == "unknown (log.jsonl is missing or incomplete)"
    assert main(["report", str(copy)]) == 2
    refusal = f"{log}: missing or incomplete, and a report is made from it; restore it from a copy"
    assert refusal in capsys.readouterr().err
    assert main(["eval", str(copy), "--max-tokens", "200", "--data-dir", str(data_dir)]) == 0
    note = f"note: the log of {copy} does not say which text the model was trained on\n"
    assert capsys.readouterr().err == note
    assert run_status(copy).state == "unknown (log.jsonl is missing or incomplete)"


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main(["status", str(tmp_path / "nothing")]) == 2
    (tmp_path / "log.jsonl").write_text("")
    assert main(["status", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("txl: error:") == 2


def arguments(run, out, data_dir, *more):
    given = options_of(run)
    return ["train", "stdlib-tiny", "--out", str(out), "--data-dir", str(data_dir), "--quiet", *given, *more]


def test_fork_starts_a_new_run_from_the_old_weights_and_goes_on_with_it(copy, story, data_dir, capsys):
    changed = small_run(str(story), **{"train.learning_rate": "0.001", "train.checkpoint_every": "5"})
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert main(arguments(changed, copy, data_dir)) == 2
    refusal = capsys.readouterr().err
    assert "train.learning_rate 0.01 -> 0.001" in refusal
    assert "--fork" in refusal
    assert main(arguments(changed, copy, data_dir, "--fork")) == 0
    fork = copy.with_name("copy-fork-1")
    starts = [event for event in RunDirectory(fork).events() if event["event"] == "start"]
    assert starts[0]["init_from"] == str(copy)
    assert main(arguments(changed, copy, data_dir, "--fork")) == 0  # the second time, the command continues the fork
    assert not copy.with_name("copy-fork-2").exists()
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    again = small_run(str(story), **{"train.learning_rate": "0.002"})
    assert main(arguments(again, copy, data_dir, "--fork")) == 0
    assert copy.with_name("copy-fork-2").is_dir()


def test_the_fork_of_the_folder_that_one_is_in_lies_beside_it(copy, story, data_dir, monkeypatch):
    monkeypatch.chdir(copy)
    changed = small_run(str(story), **{"train.learning_rate": "0.001"})
    assert main(arguments(changed, ".", data_dir, "--fork")) == 0
    assert (copy.parent / "copy-fork-1" / "config.json").is_file()
    (copy / "inside").mkdir()
    monkeypatch.chdir(copy / "inside")
    assert main(arguments(changed, "..", data_dir, "--fork")) == 0
    assert not (copy.parent / "copy-fork-2").exists()


def test_fork_takes_a_changed_text(data_dir, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("The river rose in the night.\n" * 300)
    assert main(arguments(small_run(str(text)), out, data_dir)) == 0
    text.write_text("The river fell in the morning.\n" * 300)
    with pytest.raises(UserError, match=r"not the text that .* was trained on \(its hash was .*now it is"):
        Trainer(small_run(str(text)), out, data_dir=data_dir, quiet=True).fit()
    assert main(arguments(small_run(str(text)), out, data_dir, "--fork")) == 0
    assert (tmp_path / "run-fork-1").is_dir()


def test_fork_without_a_run_or_with_other_weights_is_refused(copy, story, data_dir, tmp_path, capsys):
    run = small_run(str(story))
    assert main(arguments(run, tmp_path / "new", data_dir, "--fork")) == 2
    assert main(arguments(run, copy, data_dir, "--fork", "--init-from", str(copy))) == 2
    narrow = small_run(str(story), **{"model.d_inner": "8"})
    assert main([each for each in arguments(narrow, copy, data_dir, "--fork") if each != "--quiet"]) == 2
    errors = capsys.readouterr().err
    assert "note: --fork" not in errors
    assert f"--fork {copy}: its weights are of another model: model.d_inner 24 -> 8; set these fields" in errors
    assert "holds no run to take the weights of" in errors
    assert "--init-from" in errors
