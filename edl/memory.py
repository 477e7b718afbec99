"""Allocator settings that prevent a page fault for every 4 KiB of large buffers.

glibc returns every block of some megabytes to the kernel when it is freed, so the next request of that size takes
thousands of page faults. With these settings, a process keeps and reuses such blocks.
"""

from __future__ import annotations

import ctypes
import platform

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # half of a heap (64 MiB) of glibc's arenas: glibc refuses a larger value
_LEAST_THRESHOLD = 128 << 10
"""glibc's default; with a lower threshold, messages of ordinary size would cost system calls."""

_kept = 0


def keep_freed_memory(keep_bytes: int = 512 << 20) -> bool:
    """Let this process keep up to `keep_bytes` of freed memory per arena, for its next large buffers.

    Applies to the whole process from now on; of several calls, the one with the largest `keep_bytes` counts. Does
    nothing unless the C library is glibc. Returns whether the C library accepted the settings.
    """
    global _kept
    if platform.libc_ver()[0] != "glibc":
        return False
    if keep_bytes <= _kept:
        return True
    _kept = keep_bytes
    libc = ctypes.CDLL(None)
    settings = (
        # Blocks above this threshold are never kept: a request of 19 MB must be below it (9,400 page faults).
        (_M_MMAP_THRESHOLD, min(max(keep_bytes // 4, _LEAST_THRESHOLD), _LARGEST_MMAP_THRESHOLD)),
        (_M_TRIM_THRESHOLD, min(max(keep_bytes, _LEAST_THRESHOLD), 2**31 - 1)),
        (_M_TOP_PAD, min(max(keep_bytes // 8, _LEAST_THRESHOLD), 64 << 20)),
    )
    return all(libc.mallopt(name, value) == 1 for name, value in settings)
