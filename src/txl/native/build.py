"""The shared library of the C++ sources here: compiled once a machine, for the processor at hand.

Without a C++ compiler there is none; one line says so, and PyTorch computes the same.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from txl.cache_folder import usable_cache
from txl.native.sources import cpp_sources

COMPILERS = ("c++", "g++", "clang++")
# What these drop of IEEE arithmetic is the error flags alone: not-a-number stays what it is, and no sum changes its
# order. -march=native: the library is for this machine.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")

_logger = logging.getLogger(__name__)
_wanted: ContextVar[bool] = ContextVar("compiled code is wanted", default=True)


@contextmanager
def compiled_code(wanted: bool) -> Iterator[None]:
    """Choose whether the compiled library may be used on a CPU, as it is by default, within this block."""
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


def library() -> ctypes.CDLL | None:
    """Return the library; None where it cannot be had (which has been said once), or is not wanted."""
    return _load()[0] if _wanted.get() else None


def why_not() -> str | None:
    """Return why there is no library; None if there is one."""
    return _load()[1]


def identity() -> dict[str, str]:
    """Return everything that the library's numbers depend on: the library in use, "none" without one, and the
    processor."""
    made = library()
    return {
        "library": "none" if made is None else Path(made._name).stem.removeprefix("txl-"),
        "processor": hashlib.sha256(_processor().encode()).hexdigest()[:12],
    }


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        return ctypes.CDLL(str(_built())), None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        _logger.warning("evaluation and generation run in PyTorch, without compiled code: %s", reason)
        return None, reason


def _built() -> Path:
    """Return the library's file, compiled if it is not there whole.

    Its name ends with the sha256 of its content, so a damaged file is noticed before it is loaded, whoever wrote it.

    Raises:
        ValueError, OSError, SubprocessError: if that is not possible; the message says why.
    """
    sources, compiler = cpp_sources(), _compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    told_apart = "\n".join([*sources.values(), *compiler, version, *FLAGS, _processor()])
    name = f"txl-{hashlib.sha256(told_apart.encode()).hexdigest()[:16]}"
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = usable_cache(Path(root) / "transformer-xl") / "native"
    for found in sorted(folder.glob(f"{name}-*.so")):
        if found.name == _full_name(name, found):
            return found
        # It stays: removed here, it might be the one that another process has compiled in its place by now.
        _logger.info("%s is damaged; it is compiled again", found)
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / f"{name}.so"
        _compile(compiler, sources, made)
        with open(made, "rb") as file:
            os.fsync(file.fileno())
        whole = folder / _full_name(name, made)
        os.replace(made, whole)  # at once, whoever else is compiling
    _logger.info("compiled %s in %.1f s", whole, time.perf_counter() - start)
    return whole


def _full_name(name: str, library: Path) -> str:
    with open(library, "rb") as file:
        return f"{name}-{hashlib.file_digest(file, 'sha256').hexdigest()}.so"


def _compiler() -> list[str]:
    """Return the words that call the C++ compiler: those of CXX, if it is set, else the first compiler that there is.

    Raises:
        ValueError: if there is none, or that of CXX cannot be run.
    """
    given = os.environ.get("CXX", "").strip()
    if not given:
        found = next((path for path in map(shutil.which, COMPILERS) if path), None)
        if found is None:
            raise ValueError(f"no C++ compiler found ({', '.join(COMPILERS)})")
        return [found]
    try:
        first, *others = shlex.split(given)
    except ValueError as error:
        raise ValueError(f"CXX is {given!r}, which is no command ({error})") from None
    found = shutil.which(first)
    if found is None:
        raise ValueError(f"CXX is {given!r}, and {first} cannot be run; set it to a C++ compiler, or unset it")
    return [found, *others]


def _compile(compiler: list[str], sources: dict[str, str], made: Path) -> None:
    """Write the library from sources by file name, which are laid beside it.

    Raises:
        ValueError, OSError, SubprocessError: if that fails; the message quotes the compiler.
    """
    for name, text in sources.items():
        made.with_name(name).write_text(text, encoding="utf-8")
    files = [str(made.with_name(name)) for name in sources if name.endswith(".cpp")]
    command = [*compiler, *FLAGS, *files, "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300, check=False)
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise ValueError(f"{shlex.join(compiler)}: {complaints[0]}")


def _processor() -> str:
    """Return what `-march=native` depends on; a home folder may be shared by machines of several kinds."""
    if sys.platform.startswith("linux"):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        kept = ("model name", "flags", "Features", "CPU part")
        return "\n".join(sorted({line for line in lines if line.startswith(kept)}))
    return f"{platform.machine()} {platform.processor()}"
