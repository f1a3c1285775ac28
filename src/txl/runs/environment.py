"""Descriptions of the hardware and software of a run, for its log."""

from __future__ import annotations

import math
import os
import platform

import torch

import txl
from txl import devices
from txl.devices import cpu_fields, cpu_flags
from txl.files import JsonObject


def describe_hardware(device: str) -> JsonObject:
    """Return a description of processor (with its vector instructions on Linux), cores, threads, memory and device."""
    flags, name = cpu_flags(), platform.processor() or platform.machine()
    if named := cpu_fields():
        widest = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
        name = " ".join([named.get("model name", platform.machine()), *widest])
    described: JsonObject = {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_bytes": _main_memory(),
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


def memory_bytes(device: str) -> float:
    """Return the memory of a device in bytes; infinity if the system does not report it."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    return _main_memory() or math.inf


def _main_memory() -> int | None:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None  # Windows


def multiplies_bfloat16(device: str) -> bool:
    """Return whether a device has special instructions for bfloat16 matrix products, faster than float32."""
    if device.startswith("cuda"):
        return (devices.compute_capability(device) or (0, 0)) >= (8, 0)
    return device == "cpu" and not {"avx512_bf16", "amx_bf16"}.isdisjoint(cpu_flags())
