"""The C++ sources of the compiled library. What `txl export` writes holds a copy of this file with the texts in it."""

from __future__ import annotations

from pathlib import Path

_NAMES = (
    *("decode.cpp", "attend.cpp", "attend_backward.cpp", "dropout.cpp", "cross_entropy.cpp", "rms_norm.cpp"),
    *("vectors.h", "panels.h", "dropout.h", "attention.h"),
)


def cpp_sources() -> dict[str, str]:
    """Return texts by file name: those that are compiled, and the headers that they include."""
    return {name: Path(__file__).with_name(name).read_text(encoding="utf-8") for name in _NAMES}
