"""The command line as a process: imports, Ctrl-C at any moment, and readers that close a pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from txl.runs.directory import RunDirectory


def test_python_m_txl_is_the_same_command():
    for words in (["--version"], ["--help"], ["train", "--help"]):
        done = subprocess.run([sys.executable, "-m", "txl", *words], capture_output=True, text=True, check=True)
        assert "txl" in done.stdout


def test_what_needs_no_torch_does_not_load_it(trained, tmp_path):
    """Importing torch takes seconds. One process runs all commands; its error names the first that imports torch."""
    no_torch = [
        ["--help"], ["--version"], ["presets"], ["presets", "--json"], ["data", "list"], ["data", "--help"],
        ["status", str(trained)], ["status", "no-run"], ["evel"], ["train", "--help"], ["train", "stdlib-tinny"],
        ["train", "stdlib-tiny"], ["train", "stdlib-tiny", "--out", "x", "--model.n-layer", "0"],
        ["train", "stdlib-tiny", "--out", "x", "--train.steps", "many"],
        ["train", "stdlib-tiny", "--out", "x", "--data.corpus", "no-text"],
        ["train", "stdlib-tiny", "--out", "x", "--init-from", "no-run"],
        ["train", "stdlib-tiny", "--out", "x", "--fork"],
        *([name, "no-run"] for name in ("eval", "cache", "recl", "attention", "samples", "report")),
        ["score", "no-run", "text"], ["export", "no-run", "--out", "x"], ["generate", "no-run", "--prompt", "a"],
        ["generate", str(trained), "--prompt", "a", "--top-p", "7"], ["samples", str(trained), "--temperature", "-1"],
        ["eval", str(trained), "--checkpoint", "77"], ["eval", str(trained), "--data.corpus", "no-text"],
        ["cache", str(trained), "--tune-on", "test"], ["data", "info", "no-text"],
        ["bench", "train", "--steps", "0"], ["bench", "table9", "--lengths", "0"], ["bench", "budget", "stdlib-tiny"],
    ]  # fmt: skip
    code = """
import json, sys, txl, txl.cli
txl.presets(), txl.preset("ptb")
for words in json.loads(sys.argv[1]):
    try:
        txl.cli.main(words)
    except SystemExit:
        pass
    assert "torch" not in sys.modules, words
"""
    command = [sys.executable, "-c", code, json.dumps(no_torch)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


INTERRUPTED_IMPORT = """
import os, signal, sys, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
except BaseException:
    pass  # as C extensions do, whose import asks for a module that may be missing
sys.exit(7)
"""


def command_with(module: str, folder: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m txl` with a module whose import sends SIGINT, swallows the exception and exits with code 7."""
    (folder / f"{module}.py").write_text(INTERRUPTED_IMPORT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "txl", *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, **options)


@pytest.mark.parametrize("module", ["difflib", "torch"])  # imported by the command line, and by the command
def test_ctrl_c_while_modules_are_imported_ends_the_command_quietly(module, tmp_path):
    done = command_with(module, tmp_path, "train", "stdlib-tiny", "--out", "x")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "txl: interrupted\n")


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None")]
)
def test_how_long_threads_wait_awake_is_set_before_pytorch_is_loaded(given, expected, tmp_path):
    (tmp_path / "torch.py").write_text("import os\nprint(os.environ.get('GOMP_SPINCOUNT'))\nos._exit(0)\n")
    env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    env |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])} | given
    command = [sys.executable, "-u", "-m", "txl", "train", "stdlib-tiny", "--out", "x"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.stdout == f"{expected}\n"


def test_a_background_job_goes_on_ignoring_ctrl_c(tmp_path):
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    done = command_with("torch", tmp_path, "train", "stdlib-tiny", "--out", "x", **ignore)
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.parametrize("seconds", [0.3, 1.0, 2.0])
def test_ctrl_c_at_any_moment_of_a_start(seconds, tmp_path):
    code = "import runpy, sys; print(flush=True); sys.argv = ['txl', *sys.argv[1:]]; runpy.run_module('txl', run_name='__main__')"
    words = ["train", "stdlib-tiny", "--out", "x", "--train.steps", "99999", "--data-dir", "data"]
    command = [sys.executable, "-c", code, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()  # from here on, the code of txl runs
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "Error" not in said


def test_ctrl_c_while_a_command_waits(trained):
    command = [sys.executable, "-m", "txl", "generate", str(trained), "--prompt-file", "-"]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        time.sleep(1.5)  # until the command reads standard input
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr is not None
        assert process.stderr.read() == "txl: interrupted\n"


def test_a_prompt_of_standard_input_is_read_as_a_file_is(trained, tmp_path):
    prompt = "é\r\nb\rc\n".encode()
    (tmp_path / "prompt").write_bytes(prompt)
    words = ["generate", str(trained), "--max-tokens", "30", "--seed", "1", "--prompt-file"]
    command = [sys.executable, "-m", "txl", *words]
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = [
        subprocess.run([*command, name], input=prompt, capture_output=True, env=environment, check=True).stdout
        for name in ("-", str(tmp_path / "prompt"))
    ]
    assert done[0] == done[1] != b""


def test_a_reader_that_leaves_early_is_no_error(trained):
    command = f"{sys.executable} -m txl generate {trained} --prompt The --max-tokens 3000 --seed 1 | head -c 20"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"], ["presets"], ["presets", "--json"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_standard_output_that_is_full(words, unbuffered):
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "txl", *words], stdout=full, stderr=subprocess.PIPE, env=env)
    said = b"txl: error: standard output: No space left on device; make room, or write elsewhere\n"
    assert (done.returncode, done.stderr) == (2, said)


SMALL = (
    "--model.n-layer 1 --model.d-model 16 --model.n-head 2 --model.d-head 8 --model.d-inner 24 --model.mem-len 8 "
    "--train.batch-size 4 --train.segment 8 --train.log-every 5 --train.eval-every 100000 --train.checkpoint-every 100000"
).split()


def test_training_goes_on_and_saves_when_its_messages_have_no_reader(story, tmp_path):
    """As with `txl train ... 2>&1 | tee log`: Ctrl-C ends tee too, before the run has saved its state."""
    words = ["--corpus", str(story), "--data-dir", str(tmp_path / "data"), "--train.steps", "100000", *SMALL]
    command = [sys.executable, "-m", "txl", "train", "stdlib-tiny", "--out", str(tmp_path / "run"), *words]
    read, write = os.pipe()
    with subprocess.Popen(command, stdout=write, stderr=write) as process:
        os.close(write)
        with os.fdopen(read, "rb") as messages:
            while b"step 5/" not in messages.readline():
                pass
        before = RunDirectory(tmp_path / "run").events()[-1]
        while RunDirectory(tmp_path / "run").events()[-1]["step"] < before["step"] + 20:
            assert process.poll() is None, "training ended with its reader"
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    stopped = RunDirectory(tmp_path / "run").events()[-1]
    assert stopped["event"] == "stop"
    assert RunDirectory(tmp_path / "run").newest() is not None


@pytest.mark.parametrize(
    ("command", "code"),
    [("raise UserError('no such run')", 2), ("raise RunInterrupted('saved', 143)", 143), ("say('a note')", 1)],
)
def test_a_command_whose_standard_error_has_no_reader_has_its_exit_code(command, code, tmp_path):
    """The reader of standard output alone may leave early without an error."""
    script = f"""
import sys
from txl import cli
from txl.commands.output import say
from txl.commands.parser import Parser
from txl.errors import RunInterrupted, UserError

def run(arguments):
    {command}

parser = Parser(prog="txl")
parser.set_defaults(run=run)
cli.build_parser = lambda: parser
sys.exit(cli.main([]))
"""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=write, check=False)
    os.close(write)
    assert (done.returncode, done.stdout) == (code, b"")
