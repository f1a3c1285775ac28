"""Compilation of the C++ sources into a library.

`setup.py` runs this file alone, so this file must not import other modules of the package.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")


def compiler_flags(*processor: str) -> list[str]:
    """Return the compiler flags, including the given flags for a processor.

    They disable only the error flags of IEEE arithmetic: NaN is preserved, and sums are not reordered.
    """
    arithmetic = ("-fno-math-errno", "-fno-trapping-math")
    return ["-std=c++17", "-O3", *processor, "-fopenmp", *arithmetic, "-shared", "-fPIC"]


def find_compiler() -> list[str]:
    """Return the command of the C++ compiler, as a list: CXX if it is set, else the first compiler found.

    Raises:
        ValueError: if no compiler is found, or the command in CXX cannot be run.
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


def compile_library(
    compiler: Sequence[str], flags: Sequence[str], sources: dict[str, str], made: Path, own_openmp: bool = True
) -> None:
    """Compile the sources and write the library.

    Args:
        compiler: command of the compiler, as a list.
        flags: compiler flags (`compiler_flags`).
        sources: texts by file name, which are written beside the library.
        made: path of the library, in a directory for these files only.
        own_openmp: False leaves OpenMP's functions unresolved, so that the library uses the ones that PyTorch has
            loaded. Machines that get a prebuilt library may have no other OpenMP, or one with another name.

    Raises:
        ValueError, OSError, SubprocessError: if compilation fails; the message quotes the compiler.
    """
    for name, text in sources.items():
        made.with_name(name).write_text(text, encoding="utf-8")
    files = [name for name in sources if name.endswith(".cpp")]
    if own_openmp:
        _run([*compiler, *flags, *files, "-o", made.name], made.parent)
    else:
        _run([*compiler, *flags, "-c", *files], made.parent)
        objects = [str(Path(name).with_suffix(".o")) for name in files]
        _run([*compiler, "-shared", "-s", *objects, "-o", made.name], made.parent)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=300, check=False
    )
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise ValueError(f"{Path(command[0]).name}: {complaints[0]}")
