"""The processor, as Linux describes it."""

from __future__ import annotations

from pathlib import Path


def cpu_fields() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo (of the last core); empty on other systems, or if the file is hidden."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in fields.items()}


def cpu_flags() -> frozenset[str]:
    """Return the names of the processor's instruction sets and other features, such as avx2."""
    return frozenset(cpu_fields().get("flags", "").split())
