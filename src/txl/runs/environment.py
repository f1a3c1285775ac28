"""Hardware and software that a run happened on, for its record."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import txl


def describe_hardware(device: str) -> dict[str, Any]:
    """Describe processor, cores, memory and the device that computes."""
    described: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _memory_bytes(),
        "device": device,
    }
    if device.startswith("cuda"):
        described["gpu"] = torch.cuda.get_device_name(device)
    return described


def describe_software() -> dict[str, str]:
    """Return the versions of Python, PyTorch, this package and the system."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "txl": txl.__version__,
        "system": platform.platform(),
    }


def _memory_bytes() -> int | None:
    """Return the machine's memory; None on a system that does not tell (Windows)."""
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_name() -> str:
    """Return the processor's name, with its widest vector instructions where Linux tells them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(named.get("flags", "").split())
    widest = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return " ".join([named.get("model name", platform.machine()), *widest])
