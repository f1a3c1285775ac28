"""The processor, as Linux describes it."""

from __future__ import annotations

from pathlib import Path


def cpu_lines() -> list[str]:
    """Return the lines of /proc/cpuinfo, of all cores; empty on other systems, or if the file is hidden."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def cpu_fields() -> dict[str, str]:
    """Return the fields of the last core."""
    fields = dict(line.split(":", 1) for line in cpu_lines() if ":" in line)
    return {key.strip(): value.strip() for key, value in fields.items()}


def cpu_flags() -> frozenset[str]:
    """Return the names of the processor's instruction sets and other features, such as avx2."""
    return frozenset(cpu_fields().get("flags", "").split())
