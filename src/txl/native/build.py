"""The shared library of the C++ sources here: one that the wheel brought, else compiled once, for this processor.

Where there is neither that nor a C++ compiler, one line says so, and PyTorch computes the same.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from txl.files import usable_cache
from txl.native.compiling import compile_library, compiler_flags, find_compiler
from txl.native.prebuilt import find_prebuilt
from txl.native.sources import cpp_sources

_FLAGS = compiler_flags("-march=native")

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
    # PyTorch first: a library of a wheel takes OpenMP's functions from those that PyTorch has loaded.
    import torch  # noqa: F401

    brought = find_prebuilt(Path(__file__).parent, cpp_sources(), _flags())
    if brought is not None:
        try:
            return ctypes.CDLL(str(brought)), None
        except OSError as error:
            _logger.warning("%s cannot be loaded (%s); it is compiled instead", brought, error)
    try:
        return ctypes.CDLL(str(_built())), None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        _logger.warning("PyTorch computes everything, without compiled code: %s", reason)
        return None, reason


def _built() -> Path:
    """Return the library's file, compiled if it is not there whole.

    Its name ends with the sha256 of its content, so a damaged file is noticed before it is loaded, whoever wrote it.

    Raises:
        ValueError, OSError, SubprocessError: if that is not possible; the message says why.
    """
    sources, compiler = cpp_sources(), find_compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    told_apart = "\n".join([*sources.values(), *compiler, version, *_FLAGS, _processor()])
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
        compile_library(compiler, _FLAGS, sources, made)
        with open(made, "rb") as file:
            os.fsync(file.fileno())
        whole = folder / _full_name(name, made)
        os.replace(made, whole)  # at once, whoever else is compiling
    _logger.info("compiled %s in %.1f s", whole, time.perf_counter() - start)
    return whole


def _full_name(name: str, library: Path) -> str:
    with open(library, "rb") as file:
        return f"{name}-{hashlib.file_digest(file, 'sha256').hexdigest()}.so"


def _processor() -> str:
    """Return what `-march=native` depends on; a home folder may be shared by machines of several kinds."""
    kept = ("model name", "flags", "Features", "CPU part")
    lines = sorted({line for line in _cpuinfo() if line.startswith(kept)})
    return "\n".join(lines) or f"{platform.machine()} {platform.processor()}"


def _flags() -> list[str]:
    """Return the processor's extensions, as Linux names them."""
    return next((line.partition(":")[2].split() for line in _cpuinfo() if line.startswith("flags")), [])


def _cpuinfo() -> list[str]:
    return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if sys.platform.startswith("linux") else []
