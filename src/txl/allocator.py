"""Treatment of freed memory by the C library while a program trains or evaluates on a CPU."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc to keep the buffers that a step frees, instead of returning them to the system.

    By default glibc maps every large buffer anew, and its pages fault in again at every step: up to a third of a
    training step on a CPU. This changes the whole process, which is why programs call it and importing does not.

    Returns:
        Whether the C library has such a setting (it is glibc's alone).
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    kept = library.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
    return bool(library.mallopt(_M_TRIM_THRESHOLD, _LARGEST)) and bool(kept)
