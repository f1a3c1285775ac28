"""Libraries that a wheel contains for users without a compiler, one for each kind of processor.

The functions of a library take only pointers and numbers (`extern "C"`), so they do not depend on the version of
PyTorch or Python. A file's name contains a hash of the sources, so that a library of other sources is never loaded.
`setup.py` compiles the libraries; it runs this file alone, so this file must not import other modules of the package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])


class Processor(NamedTuple):
    """A kind of processor."""

    name: str
    flags: tuple[str, ...]
    """Compiler flags."""
    needs: frozenset[str]
    """Flags that Linux must list for the processor (/proc/cpuinfo)."""


# Kinds of processors, fastest first. Older processors and other architectures have no library.
PROCESSORS = (
    # AMX tiles are used if the processor has them; the library checks this at run time (panels.h).
    Processor(
        "avx512-bf16",
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        _V4 | {"avx512_bf16"},
    ),
    Processor("avx512", ("-march=x86-64-v4",), _V4),
    Processor("avx2", ("-march=x86-64-v3",), _V3),
)


def library_name(processor: Processor, sources: dict[str, str]) -> str:
    """Return the file name of the library compiled from `sources`, which are texts by file name."""
    content = "\n".join([*sources.values(), *processor.flags])
    return f"txl-{hashlib.sha256(content.encode()).hexdigest()[:16]}-{processor.name}.so"


def find_prebuilt(folder: Path, sources: dict[str, str], flags: Iterable[str]) -> Path | None:
    """Return the path of the fastest library that a processor supports; None if there is none.

    Args:
        folder: directory of the libraries.
        sources: sources that the library must be compiled from, texts by file name.
        flags: flags of the processor.
    """
    has = frozenset(flags)
    fitting = (folder / library_name(kind, sources) for kind in PROCESSORS if kind.needs <= has)
    return next((path for path in fitting if path.is_file()), None)
