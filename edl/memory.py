"""Allocator settings that keep large buffers from costing a page fault for every 4 KiB.

glibc hands every block of some megabytes back to the kernel when it is freed, so each request of that size takes
thousands of page faults to get it again. Told to keep such blocks, a process reuses them.
"""

from __future__ import annotations

import ctypes
import functools
import platform

__all__ = ["keep_freed_memory"]

# mallopt(3): parameters, and the largest threshold that glibc accepts on 64 bits (half a heap).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20


@functools.cache
def keep_freed_memory(keep_bytes: int = 512 << 20) -> bool:
    """Let this process keep up to `keep_bytes` of freed memory for its next large buffers.

    Holds for the whole process, from now on. Does nothing where the C library is not glibc.

    Returns:
        Whether the C library took the settings.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = (
        (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_M_TRIM_THRESHOLD, min(keep_bytes, 2**31 - 1)),
        (_M_TOP_PAD, 64 << 20),
    )
    return all(libc.mallopt(name, value) == 1 for name, value in settings)
