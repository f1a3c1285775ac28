"""Packaging: one version, complete pins, documented extras, and no imports that another system may lack."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import txl

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

ELSEWHERE = """
import importlib, os, pkgutil, signal, sys
from pathlib import Path

# Once as they are: libraries of others may import what their system has.
def names():
    import txl, txl_lab
    found = [each.name for house in (txl, txl_lab) for each in pkgutil.walk_packages(house.__path__, f"{house.__name__}.")]
    assert len(found) > 150
    return [name for name in found if name != "txl.huggingface" and not name.endswith(("_kernels", ".fused_ends"))]

for name in names():
    importlib.import_module(name)
import torch._dynamo  # an optimiser asks for it
for name in [each for each in sys.modules if each.split(".")[0] in ("txl", "txl_lab")]:
    del sys.modules[name]

sys.platform = "win32"
for module in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog", "triton"):
    sys.modules[module] = None
windows = {"SIGABRT", "SIGBREAK", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}
lacking = {"pthread_sigmask", "setitimer", "alarm", "pause", "siginterrupt", "sigwait", "set_wakeup_fd"}
for name in dir(signal):
    if (name.startswith("SIG") and name not in windows | {"SIG_DFL", "SIG_IGN"}) or name in lacking:
        delattr(signal, name)
gone = "sched_getaffinity O_DIRECTORY O_NOFOLLOW posix_fadvise posix_fallocate memfd_create sendfile geteuid getuid getgid "
gone += "getegid fork killpg getpgid setsid sysconf uname chown fchmod fchown mkfifo"
for name in gone.split():
    delattr(os, name)

# Windows opens no folders, and syncs no file that is only read.
really_open, really_sync, readable = os.open, os.fsync, set()

def open_file(path, flags, *more, **settings):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    descriptor = really_open(path, flags, *more, **settings)
    (readable.discard if flags & (os.O_WRONLY | os.O_RDWR) else readable.add)(descriptor)
    return descriptor

def sync(descriptor):
    if descriptor in readable:
        raise OSError(9, "Bad file descriptor")
    really_sync(descriptor)

os.open, os.fsync = open_file, sync

for name in names():
    importlib.import_module(name)
import txl
from txl.config import with_options
run = with_options(txl.preset("stdlib-tiny"), {
    "data.corpus": sys.argv[1], "model.n_layer": "1", "model.d_model": "16", "model.n_head": "2", "model.d_head": "8",
    "model.d_inner": "16", "model.mem_len": "8", "train.steps": "3", "train.batch_size": "2", "train.segment": "8",
    "train.checkpoint_every": "2", "train.eval_every": "2", "train.eval_tokens": "100", "eval.mem_len": "8",
    "eval.window": "8", "eval.segment": "8", "eval.batch_size": "2",
})
txl.Trainer(run, out=sys.argv[2], data_dir=sys.argv[2] + "-data").fit()
model, vocabulary = txl.load(sys.argv[2])
print("".join(txl.generate(model, vocabulary, "The ", max_tokens=5, seed=1)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are imitated on Linux")
def test_what_other_systems_lack_is_not_needed(story, tmp_path):
    """Import all modules and train, in an interpreter without the functions that macOS and Windows lack."""
    command = [sys.executable, "-c", ELSEWHERE, story, tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "best").is_file()
    assert done.stdout.strip()


def test_the_version_stands_in_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "txl.__version__"}
    assert re.search(r"^version:", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE) is None
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", txl.__version__)


def name_of(requirement: str) -> str:
    found = re.match(r"[\w-]+", requirement)
    assert found is not None
    return found[0].lower().replace("_", "-")


def test_everything_that_is_installed_has_a_pin():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {name_of(line) for line in lines if not line.startswith("#")}
    extras = PROJECT["project"]["optional-dependencies"]
    needed = [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["serve"], *extras["tensorboard"]]
    assert {name_of(each) for each in needed} - pinned == {"transformer-xl"}


def test_every_extra_is_documented_and_no_other():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE))
    assert named == set(PROJECT["project"]["optional-dependencies"])


def test_classifiers_name_the_pythons_that_the_workflow_tests():
    named = [each.rpartition(" ")[2] for each in PROJECT["project"]["classifiers"] if "Python :: 3." in each]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    (first,), (others,) = (
        re.findall(pattern, workflow) for pattern in (r'python-version: "(.+)"', r"python: \[(.+)\]")
    )
    assert named == [first, *re.findall(r'"(.+?)"', others)]
    assert PROJECT["project"]["requires-python"] == f">={first}"
