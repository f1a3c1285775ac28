"""Compilation of the C++ sources into a library, and the libraries that a wheel has for users without a compiler.

The functions of a library take only pointers and numbers (`extern "C"`), so they do not depend on the version of
PyTorch or Python. A prebuilt file's name contains a hash of the sources, so that a library of other sources is never
loaded. `setup.py` runs this file alone, so it must not import other modules of the package.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

COMPILERS = ("c++", "g++", "clang++")

_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])


class Processor(NamedTuple):
    """A kind of processor."""

    name: str
    flags: tuple[str, ...]  # of the compiler
    needs: frozenset[str]  # what Linux must list for the processor (/proc/cpuinfo)


# Kinds of processors, fastest first. Older processors and other architectures have no library.
PROCESSORS = (
    # AMX tiles are used if the processor has them; the library checks this at run time (panels.h).
    Processor("avx512-bf16", ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"), _V4 | {"avx512_bf16"}),
    Processor("avx512", ("-march=x86-64-v4",), _V4),
    Processor("avx2", ("-march=x86-64-v3",), _V3),
)


def library_name(processor: Processor, sources: dict[str, str]) -> str:
    """Return the file name of the library compiled from `sources`, which are texts by file name."""
    content = "\n".join([*sources.values(), *processor.flags])
    return f"txl-{hashlib.sha256(content.encode()).hexdigest()[:16]}-{processor.name}.so"


def find_prebuilt(folder: Path, sources: dict[str, str], flags: Iterable[str]) -> Path | None:
    """Return the path of the fastest library of the sources that a processor with these flags supports, if any."""
    has = frozenset(flags)
    fitting = (folder / library_name(kind, sources) for kind in PROCESSORS if kind.needs <= has)
    return next((path for path in fitting if path.is_file()), None)


def compiler_flags(*processor: str) -> list[str]:
    """Return the compiler flags, including the given flags for a processor.

    They disable only the error flags of IEEE arithmetic: NaN is preserved, and sums are not reordered.
    """
    arithmetic = ("-fno-math-errno", "-fno-trapping-math")
    return ["-std=c++17", "-O3", *processor, "-fopenmp", *arithmetic, "-shared", "-fPIC"]


def find_compiler() -> list[str]:
    """Return the command of the C++ compiler: CXX if it is set, else the first one found; ValueError without any."""
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
    if (found := shutil.which(first)) is None:
        raise ValueError(f"CXX is {given!r}, and {first} cannot be run; set it to a C++ compiler, or unset it")
    return [found, *others]


def compile_library(
    compiler: Sequence[str], flags: Sequence[str], sources: dict[str, str], made: Path, own_openmp: bool = True
) -> None:
    """Compile the sources, which are written beside the library `made`, in a directory for these files only.

    Args:
        own_openmp: False leaves OpenMP's functions unresolved, so that the library uses the ones that PyTorch has
            loaded. Machines that get a prebuilt library may have no other OpenMP, or one with another name.

    Raises:
        ValueError, OSError, SubprocessError: if compilation fails; the message quotes the compiler.
    """
    for name, text in sources.items():
        made.with_name(name).write_text(text, encoding="utf-8")
    files = [name for name in sources if name.endswith(".cpp")]
    commands = [[*compiler, *flags, *files, "-o", made.name]]
    if not own_openmp:
        objects = [str(Path(name).with_suffix(".o")) for name in files]
        commands = [[*compiler, *flags, "-c", *files], [*compiler, "-shared", "-s", *objects, "-o", made.name]]
    for command in commands:
        done = subprocess.run(
            command, cwd=made.parent, capture_output=True, text=True, errors="replace", timeout=300, check=False
        )
        if done.returncode:
            complaints = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
            raise ValueError(f"{Path(command[0]).name}: {complaints[0]}")
