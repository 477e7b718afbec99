"""Caches that are collected, or closed by a signal handler, while their own functions are under way."""

from __future__ import annotations

import gc
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill.cache import CacheKey, SoftLabelCache
from edl.distill.cache.folder import SegmentFolder
from edl.errors import ClosedError
from tests.interrupting import InterruptAt, deadline

KEY = CacheKey("m", "1", ("y",))


def test_collected_cache_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, write = threading.Event(), SegmentFolder.write

    def slow(*args: Any) -> Path:
        assert go_on.wait(30)
        return write(*args)

    monkeypatch.setattr(SegmentFolder, "write", slow)
    before = set(threading.enumerate())  # some of other tests' may still write
    cache = SoftLabelCache(path=tmp_path)
    cache.view(KEY).put([1], {"y": np.zeros((1, 4), np.float32)})
    (thread,) = [thread for thread in set(threading.enumerate()) - before if thread.name == "edl-cache"]
    with deadline(10, "collected while its disk is slow"):
        del cache
        gc.collect()
    go_on.set()
    thread.join(30)
    with SoftLabelCache(path=tmp_path) as again:
        assert again.view(KEY).contains([1]).all(), "what was put before is written"


def test_cache_is_closed_before_any_line(tmp_path: Path) -> None:
    for number in itertools.count(1, 5):
        cache = SoftLabelCache(path=tmp_path / str(number))
        with deadline(10, f"closed before line {number} of put"):
            with InterruptAt(number, cache.close, "cache/writer.py") as interrupt:
                try:
                    for row in range(2):
                        cache.view(KEY).put([row], {"y": np.zeros((1, 4), np.float32)})
                except ClosedError:
                    pass
            cache.close()
        if not interrupt.reached:
            assert number > 20, "nothing was interrupted"
            break
