"""What a run happened on: hardware and software, for its record."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import txl


def describe_hardware(device: str) -> dict[str, Any]:
    """Processor, cores, memory and the device that computes."""
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
    """Versions."""
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


def multiplies_bfloat16(device: str) -> bool:
    """Tell whether a device multiplies matrices of bfloat16 by instructions of their own, faster than float32."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device == "cpu" and not {"avx512_bf16", "amx_bf16"}.isdisjoint(_cpu_fields().get("flags", "").split())


def _cpu_name() -> str:
    """The processor's name, with its widest vector instructions where Linux tells them."""
    named = _cpu_fields()
    if not named:
        return platform.processor() or platform.machine()
    flags = set(named.get("flags", "").split())
    widest = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return " ".join([named.get("model name", platform.machine()), *widest])


def _cpu_fields() -> dict[str, str]:
    """Read what Linux says of a processor; nothing on another system."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in fields.items()}
