"""Freed memory: kept for reuse while a program trains, evaluates or serves on a CPU, or returned to the system."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc to keep the buffers that a step frees, instead of returning them to the system.

    By default glibc maps each large buffer again at every step; the page faults take up to a third of a training step
    on a CPU. The setting affects the whole process, so programs call this function and importing `txl` does not.

    Returns:
        True if glibc accepted the setting; False if it did not, or if the C library is not glibc.
    """
    library = _glibc()
    if library is None:
        return False
    is_mapped = library.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
    return bool(library.mallopt(_M_TRIM_THRESHOLD, _LARGEST)) and bool(is_mapped)


def return_freed_memory() -> None:
    """Return the memory that is free now to the system, also after `keep_freed_memory`; without glibc, do nothing."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return library if hasattr(library, "gnu_get_libc_version") else None
