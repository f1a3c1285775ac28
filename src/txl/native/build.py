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
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_HERE = Path(__file__).parent
SOURCES = tuple(_HERE / name for name in ("decode.cpp", "attend.cpp", "attend_backward.cpp"))
HEADERS = tuple(_HERE / name for name in ("vectors.h", "panels.h", "attention.h"))
COMPILERS = ("c++", "g++", "clang++")
# What these drop of IEEE arithmetic is the error flags alone: not-a-number stays what it is, and no sum changes its
# order. -march=native: the library is for this machine.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")

_logger = logging.getLogger(__name__)
_wanted: ContextVar[bool] = ContextVar("compiled code is wanted", default=True)


@contextmanager
def compiled_code(wanted: bool) -> Iterator[None]:
    """Whether the compiled library may be used on a CPU, as it is by default, within this block."""
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


def library() -> ctypes.CDLL | None:
    """The library; None where it cannot be had (which has been said once), or is not wanted."""
    return _load()[0] if _wanted.get() else None


def why_not() -> str | None:
    """Why there is no library; None if there is one."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        return ctypes.CDLL(str(_built())), None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        _logger.warning("evaluation and generation run in PyTorch, without compiled code: %s", reason)
        return None, reason


def _built() -> Path:
    """The library's file, compiled if it is not there yet.

    Raises:
        ValueError, OSError, SubprocessError: if that is not possible; the message says why.
    """
    code = [path.read_text(encoding="utf-8") for path in (*SOURCES, *HEADERS)]
    names = [name for name in (os.environ.get("CXX"), *COMPILERS) if name]
    compiler = next((found for found in map(shutil.which, names) if found), None)
    if compiler is None:
        raise ValueError(f"no C++ compiler found ({', '.join(names)})")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    told_apart = "\n".join([*code, compiler, version, *FLAGS, _processor()])
    name = f"txl-{hashlib.sha256(told_apart.encode()).hexdigest()[:16]}.so"
    folder = cache_folder()
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / name
            done = subprocess.run(
                [compiler, *FLAGS, *map(str, SOURCES), "-o", str(made)],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if done.returncode:
                complaints = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
                raise ValueError(f"{compiler}: {complaints[0]}")
            os.replace(made, folder / name)  # at once, whoever else is compiling
        _logger.info("compiled %s in %.1f s", folder / name, time.perf_counter() - start)
    return folder / name


def cache_folder() -> Path:
    """Where libraries are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "transformer-xl" / "native"


def _processor() -> str:
    """What `-march=native` depends on; a home folder may be shared by machines of several kinds."""
    if sys.platform.startswith("linux"):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        kept = ("model name", "flags", "Features", "CPU part")
        return "\n".join(sorted({line for line in lines if line.startswith(kept)}))
    return f"{platform.machine()} {platform.processor()}"
