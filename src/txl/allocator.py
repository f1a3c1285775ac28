"""Setting of the C library that keeps freed memory for reuse while a program trains or evaluates on a CPU."""

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
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    kept = library.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
    return bool(library.mallopt(_M_TRIM_THRESHOLD, _LARGEST)) and bool(kept)
