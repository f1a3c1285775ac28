"""Libraries that a wheel carries for users without a compiler, one for each kind of processor.

Their functions take pointers and numbers alone (`extern "C"`), so that they belong to no version of PyTorch or Python;
a file's name holds a hash of the sources, so that one of other sources is never loaded. `setup.py` compiles them, and
runs this file by itself: it imports nothing of ours.
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
    """For the compiler."""
    needs: frozenset[str]
    """Flags that Linux has to list for a processor (/proc/cpuinfo)."""


PROCESSORS = (
    # Tiles of AMX are used where the processor has them; the library asks at run time (panels.h).
    Processor(
        "avx512-bf16",
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        _V4 | {"avx512_bf16"},
    ),
    Processor("avx512", ("-march=x86-64-v4",), _V4),
    Processor("avx2", ("-march=x86-64-v3",), _V3),
)
"""The fastest first. Older processors, and other architectures, have none."""


def library_name(processor: Processor, sources: dict[str, str]) -> str:
    """Return the name of the file compiled from these sources, texts by file name."""
    content = "\n".join([*sources.values(), *processor.flags])
    return f"txl-{hashlib.sha256(content.encode()).hexdigest()[:16]}-{processor.name}.so"


def find_prebuilt(folder: Path, sources: dict[str, str], flags: Iterable[str]) -> Path | None:
    """Return the fastest library for a processor in a folder; None if there is none for it.

    Args:
        folder: where they lie.
        sources: what they have to be compiled from.
        flags: of the processor.
    """
    has = frozenset(flags)
    fitting = (folder / library_name(each, sources) for each in PROCESSORS if each.needs <= has)
    return next((path for path in fitting if path.is_file()), None)
