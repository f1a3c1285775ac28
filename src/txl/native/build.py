"""The shared library of the C++ sources: from the wheel if it contains one, else compiled once for this processor.

If the wheel has no library and there is no C++ compiler, one line is logged, and PyTorch computes the same results.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from txl.devices import cpu_flags, cpu_lines
from txl.files import cache_folder
from txl.native.compiling import compile_library, compiler_flags, find_compiler, find_prebuilt
from txl.native.sources import cpp_sources

_FLAGS = compiler_flags("-march=native")

_logger = logging.getLogger(__name__)
_wanted: ContextVar[bool] = ContextVar("compiled code is wanted", default=True)


@contextmanager
def compiled_code(wanted: bool) -> Iterator[None]:
    """Allow or forbid the compiled library on a CPU within a `with` block; by default it is allowed.

    Products by oneDNN (`txl.native.operations`) are forbidden with it.
    """
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


def is_wanted() -> bool:
    """Return whether the compiled library is allowed here; see `compiled_code`."""
    return _wanted.get()


def library() -> ctypes.CDLL | None:
    """Return the library; None if it is not available (which is logged once) or not wanted."""
    if not is_wanted():
        return None
    found, reason = _load()
    if reason is not None:
        _log_once(reason)
    return found


@functools.cache
def _log_once(reason: str) -> None:
    _logger.warning("compiled code is not available, PyTorch is used instead: %s", reason)


def why_not() -> str | None:
    """Return why the library is not available here; None if it is."""
    return _load()[1] if is_wanted() else "`compiled_code(False)` forbids it"


def identity() -> dict[str, str]:
    """Return what results of the library depend on: the library in use ("none" without one) and the processor."""
    made = library()
    return {
        "library": "none" if made is None else Path(made._name).stem.removeprefix("txl-"),
        "processor": hashlib.sha256(_processor().encode()).hexdigest()[:12],
    }


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    # Import PyTorch first: a library from a wheel uses the OpenMP functions that PyTorch has loaded.
    import torch  # noqa: F401

    brought = find_prebuilt(Path(__file__).parent, cpp_sources(), cpu_flags())
    if brought is not None:
        try:
            return ctypes.CDLL(str(brought)), None
        except OSError as error:
            _logger.warning("%s cannot be loaded (%s); it is compiled instead", brought, error)
    try:
        return ctypes.CDLL(str(_built())), None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return None, " ".join(str(error).split())[:300]


def _built() -> Path:
    """Return the path of the library, which is compiled unless an undamaged file is in the cache.

    The file's name ends with the sha256 of the content, so that a damaged file is detected before it is loaded.
    """
    sources, compiler = cpp_sources(), find_compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    told_apart = "\n".join([*sources.values(), *compiler, version, *_FLAGS, _processor()])
    name = f"txl-{hashlib.sha256(told_apart.encode()).hexdigest()[:16]}"
    folder = cache_folder() / "native"
    for found in sorted(folder.glob(f"{name}-*.so")):
        if found.name == _full_name(name, found):
            return found
        # Do not remove the file: another process may have replaced it by an undamaged one by now.
        _logger.info("%s is damaged; it is compiled again", found)
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / f"{name}.so"
        compile_library(compiler, _FLAGS, sources, made)
        with open(made, "rb") as file:
            os.fsync(file.fileno())
        whole = folder / _full_name(name, made)
        os.replace(made, whole)  # atomic, as other processes may compile the same library
    _logger.info("compiled %s in %.1f s", whole, time.perf_counter() - start)
    return whole


def _full_name(name: str, library: Path) -> str:
    return f"{name}-{hashlib.sha256(library.read_bytes()).hexdigest()}.so"


def _processor() -> str:
    """Return a description of the processor, as far as `-march=native` depends on it.

    It is part of the library's name, since machines with different processors may share a home directory.
    """
    kept = ("model name", "flags", "Features", "CPU part")
    lines = sorted({line for line in cpu_lines() if line.startswith(kept)})
    return "\n".join(lines) or f"{platform.machine()} {platform.processor()}"
