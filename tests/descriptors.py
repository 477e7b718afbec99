"""Which files a process has open: those of a kind, since threads of other tests may open and close others."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["count_descriptors"]


def count_descriptors(*prefixes: str, pid: int | str = "self") -> int:
    """How many open files' names begin with one of `prefixes`, such as `/dev/shm/` or `socket:`."""
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # the one by which the folder is read
            count += str(descriptor.readlink()).startswith(prefixes)
    return count
