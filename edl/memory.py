"""Allocator settings that keep large buffers from costing a page fault for every 4 KiB.

glibc hands every block of some megabytes back to the kernel when it is freed, so a request of that size takes
thousands of page faults to get it again. Told to keep such blocks, a process reuses them.
"""

from __future__ import annotations

import ctypes
import platform

# mallopt(3): numbers of its parameters.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # half a heap of glibc's arenas, 64 MiB: a larger one is refused
_LEAST_THRESHOLD = 128 << 10
"""glibc's own; with less, a message of ordinary size would cost system calls."""

_kept = 0


def keep_freed_memory(keep_bytes: int = 512 << 20) -> bool:
    """Let this process keep up to `keep_bytes` of freed memory, in every arena, for its next large buffers.

    Holds for the whole process, from now on; the largest number that was asked for counts. Does nothing where the C
    library is not glibc.

    Returns:
        Whether the C library took the settings.
    """
    global _kept
    if platform.libc_ver()[0] != "glibc":
        return False
    if keep_bytes <= _kept:
        return True
    _kept = keep_bytes
    libc = ctypes.CDLL(None)
    settings = (
        # What is larger than this threshold is never kept: a request of 19 MB must be below it (9,400 page faults).
        (_M_MMAP_THRESHOLD, min(max(keep_bytes // 4, _LEAST_THRESHOLD), _LARGEST_MMAP_THRESHOLD)),
        (_M_TRIM_THRESHOLD, min(max(keep_bytes, _LEAST_THRESHOLD), 2**31 - 1)),
        (_M_TOP_PAD, min(max(keep_bytes // 8, _LEAST_THRESHOLD), 64 << 20)),
    )
    return all(libc.mallopt(name, value) == 1 for name, value in settings)
