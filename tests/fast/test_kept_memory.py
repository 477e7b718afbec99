"""What the C library is told of freed memory, for a number of bytes that may be kept."""

from __future__ import annotations

import ctypes
import platform

import pytest

from edl import memory

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # mallopt(3)


@pytest.mark.parametrize(("keep_mib", "threshold_mib"), [(512, 32), (256, 32), (128, 32), (8, 2)])
def test_large_requests_are_kept(keep_mib: int, threshold_mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[int, int] = {}

    class Library:
        def __init__(self, _: object) -> None:
            pass

        def mallopt(self, name: int, value: int) -> int:
            settings[name] = value
            return 1

    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(memory, "_kept", 0)
    assert memory.keep_freed_memory(keep_mib << 20)
    assert settings[MMAP_THRESHOLD] == threshold_mib << 20, "what is larger costs a page fault for every 4 KiB"
    assert settings[TRIM_THRESHOLD] == keep_mib << 20
