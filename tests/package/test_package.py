"""The archives written by `make build`: their content, and the wheel in an otherwise empty environment.

The environment has no compiler on its path, no home folder and no extras, like that of a new user.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import txl
from txl.devices import cpu_flags
from txl.native.compiling import PROCESSORS, library_name
from txl.native.sources import cpp_sources

ROOT = Path(__file__).parent.parent.parent
DIST = ROOT / "dist"
HAS_LIBRARIES = (platform.system(), platform.machine()) == ("Linux", "x86_64")
SMALL = (
    "--n-layer 2 --d-model 16 --model.n-head 2 --model.d-head 8 --model.d-inner 24 --mem-len 8 --batch-size 4 "
    "--segment 8 --steps 6 --train.eval-every 3 --train.eval-tokens 400 --train.checkpoint-every 3 --eval.segment 8 "
    "--eval.mem-len 16 --eval.window 16 --eval.batch-size 4"
).split()

if not list(DIST.glob("*.whl")):
    pytest.skip("no wheel in dist/; run make build", allow_module_level=True)


@pytest.fixture(scope="module")
def wheel() -> Path:
    (found,) = DIST.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def archive() -> Path:
    (found,) = DIST.glob("*.tar.gz")
    return found


class Installed:
    """Environment with the wheel and its dependencies."""

    def __init__(self, folder: Path):
        self.python, self.work, self.temporary = folder / "env" / "bin" / "python", folder / "work", folder / "tmp"
        for each in (self.work, self.temporary):
            each.mkdir()
        (folder / "file").touch()
        # Without HOME, the home folder of the user database would be used; this HOME cannot be a folder.
        self.environment = {"PATH": str(self.python.parent), "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        self.environment["HOME"] = str(folder / "file" / "home")

    def run(self, *words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment; `code` is the expected exit code."""
        command = [str(self.python.parent / words[0]), *map(str, words[1:])]
        done = subprocess.run(command, env=self.environment, cwd=self.work, capture_output=True, text=True)
        assert done.returncode == code, (words, done.stdout[-2000:], done.stderr[-2000:])
        assert "Traceback" not in done.stderr, (words, done.stderr)
        return done


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    result = Installed(folder)
    pip = [
        result.python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints.txt",
    ]
    here = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([*pip, wheel], check=True, env=here)
    return result


def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if not name.endswith("/")}


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    found = members(wheel)
    source = ROOT / "src"
    endings = {".py", ".pyi", ".cpp", ".h", ".html", ".md", ".js", ".css", ".svg", ".toml"}
    houses = ("txl", "txl_lab")
    paths = [path for house in houses for path in (source / house).rglob("*")]
    ours = {path.relative_to(source).as_posix() for path in paths if path.suffix in endings}
    assert len(ours) > 150
    inside = {name for name in found if name.split("/")[0] in houses}
    libraries = {f"txl/native/{library_name(kind, cpp_sources())}" for kind in PROCESSORS} if HAS_LIBRARIES else set()
    assert inside == ours | libraries
    assert {name.split("/")[0] for name in found - inside} == {f"transformer_xl-{txl.__version__}.dist-info"}


def test_the_wheel_is_for_its_platform_and_any_python(wheel):
    _, version, python, abi, where = wheel.stem.split("-")
    assert (version, python, abi) == (txl.__version__, "py3", "none")
    if HAS_LIBRARIES:
        assert all(tag.startswith("manylinux") and tag.endswith("x86_64") for tag in where.split("."))
    else:
        assert where == "any"


def test_the_source_archive_can_be_tested_and_holds_nothing_that_was_made(archive):
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    needed = (
        "setup.py pyproject.toml constraints.txt Makefile README.md LICENSE CHANGELOG.md CONTRIBUTING.md SECURITY.md"
    )
    assert {*needed.split(), "CITATION.cff", "tests/conftest.py", "examples/train.py", "docs/index.md"} <= names
    assert {
        "src/txl/native/attend.cpp",
        "src/txl/native/vectors.h",
        "src/txl/serving/playground/index.html",
        "src/txl/reporting/templates/page.html",
    } <= names
    made = [
        name for name in names if name.endswith((".so", ".pyc", ".o")) or name.startswith(("dist", "runs", ".venv"))
    ]
    assert made == []
    assert archive.stat().st_size < 4_000_000


def test_a_wheel_without_libraries_comes_from_the_source_archive(archive, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TXL_LIBRARIES"}
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    subprocess.run([*command, archive], check=True, env=environment)
    (made,) = tmp_path.glob("*.whl")
    assert made.name == f"transformer_xl-{txl.__version__}-py3-none-any.whl"
    assert not [name for name in members(made) if name.endswith(".so")]


def test_what_the_wheel_depends_on_is_complete(installed):
    installed.run("python", "-m", "pip", "check")
    listed = installed.run("python", "-m", "pip", "list", "--format", "json").stdout
    assert {"pytest", "starlette", "ruff"}.isdisjoint({each["name"].lower() for each in json.loads(listed)})


def test_every_command_explains_itself(installed):
    assert installed.run("txl", "--version").stdout == f"txl {txl.__version__}\n"
    home = installed.environment.pop("HOME")
    for words in (
        ["--help"],
        ["train", "--help"],
        ["presets"],
        ["bench", "--help"],
        ["data", "list"],
        ["completion", "bash"],
    ):
        assert installed.run("txl", *words).stdout
    installed.environment["HOME"] = home


def test_the_whole_way(installed, story):
    (installed.work / "my.txt").write_bytes(story.read_bytes())
    said = installed.run("txl", "train", "stdlib-tiny", "-o", "run", "--corpus", "my.txt", "--quiet", *SMALL).stderr
    said += installed.run("txl", "eval", "run", "--mem-lens", "0,16").stderr
    assert installed.run("txl", "generate", "run", "--prompt", "The ", "-n", "9").stdout.startswith("The ")
    said += installed.run("txl", "score", "run", "my.txt", "-o", "surprisal.tsv").stderr
    installed.run("txl", "status", "run")
    installed.run("txl", "report", "run")
    assert (installed.work / "run" / "report.html").stat().st_size > 10_000
    assert "compile" not in said  # no message: nothing is compiled, no compiler needed
    assert "cannot be made; the cache is" in said
    refused = installed.run("txl", "serve", "run", code=2).stderr
    assert "pip install 'transformer-xl[serve]'" in refused


def test_the_demo(installed):
    (installed.work / "tiny.txt").write_text("The river rose in the night.\n" * 800)
    small = [word.replace("--n-layer", "--model.n-layer") for word in SMALL]
    names = {
        "--d-model": "model",
        "--mem-len": "model",
        "--batch-size": "train",
        "--segment": "train",
        "--steps": "train",
    }
    small = [f"--{names[word]}.{word[2:]}" if word in names else word for word in small]
    words = ["--preset", "stdlib-tiny", "--data.corpus", "tiny.txt", "--test-tokens", "400", *small]
    assert "report.html" in installed.run("txl", "demo", "--out", "demo", *words).stdout


@pytest.mark.skipif(not HAS_LIBRARIES, reason="wheels of this platform carry no libraries")
def test_compiled_attention_without_a_compiler(installed, story):
    kinds = [kind for kind in PROCESSORS if kind.needs <= cpu_flags()]
    if not kinds:
        pytest.skip("this processor is older than those that libraries are made for")
    code = "from txl.native.build import library; print(library()._name)"
    assert Path(installed.run("python", "-c", code).stdout.strip()).name == library_name(kinds[0], cpp_sources())
    (installed.work / "my.txt").write_bytes(story.read_bytes())
    train = ["txl", "train", "stdlib-tiny", "--corpus", "my.txt", "--quiet", *SMALL, "--model.attention"]
    for attention in ("shifted", "compiled"):
        installed.run(*train, attention, "-o", attention)
    logs = [(installed.work / name / "log.jsonl").read_text().splitlines() for name in ("shifted", "compiled")]
    losses = [[each["loss"] for each in map(json.loads, log) if isinstance(each.get("loss"), float)] for log in logs]
    assert losses[0]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


@pytest.mark.skipif(not HAS_LIBRARIES, reason="wheels of this platform carry no libraries")
def test_every_library_that_this_processor_runs_gives_the_same_numbers(installed):
    code = (Path(__file__).parent / "compare.py").read_text()
    for kind in PROCESSORS:
        if kind.needs <= cpu_flags():
            assert installed.run("python", "-c", code, kind.name).stdout.strip() == "the same"


@pytest.mark.skipif(not HAS_LIBRARIES, reason="wheels of this platform carry no libraries")
def test_without_libraries_and_compiler_pytorch_computes(installed, story):
    """This test must be the last one, because it deletes the libraries."""
    for library in installed.python.parent.parent.glob("lib/python*/site-packages/txl/native/*.so"):
        library.unlink()
    (installed.work / "my.txt").write_bytes(story.read_bytes())
    said = installed.run("txl", "score", "run", "my.txt", "-o", "again.tsv").stderr
    assert "PyTorch is used instead: no C++ compiler found" in said
    bits = [
        [float(line.split("\t")[6]) for line in (installed.work / name).read_text().splitlines()[2:]]
        for name in ("surprisal.tsv", "again.tsv")
    ]
    assert bits[1] == pytest.approx(bits[0], abs=1e-3)
