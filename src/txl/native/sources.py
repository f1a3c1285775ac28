"""The C++ sources of the compiled library. `txl export` writes a variant of this file that contains the sources."""

from __future__ import annotations

from pathlib import Path

_NAMES = (
    *("decode.cpp", "attend.cpp", "attend_backward.cpp", "dropout.cpp", "cross_entropy.cpp", "rms_norm.cpp"),
    *("vectors.h", "panels.h", "dropout.h", "attention.h"),
)


def cpp_sources() -> dict[str, str]:
    """Return the texts of all sources and headers, by file name."""
    return {name: Path(__file__).with_name(name).read_text(encoding="utf-8") for name in _NAMES}
