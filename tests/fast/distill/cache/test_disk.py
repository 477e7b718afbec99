"""The cache's folder: bounds, several processes, kill -9."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill.cache import CacheKey, SoftLabelCache, folder, load_labels
from edl.distill.cache import writer as writing
from edl.errors import TemporaryError
from tests.fast.distill.cache.conftest import KEY, OTHER, found, put, rows, segments
from tests.waiting import DEADLINE_S, wait_until


def test_oldest_files_of_all_keys_go_first(tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
    put(tmp_path, range(60), OTHER)
    (kept,) = put(tmp_path, range(60))
    put(tmp_path, range(100, 160), disk_bytes=65 << 10)
    assert not (tmp_path / OTHER.folder).exists()
    assert kept in segments(tmp_path)
    assert not warnings_of()
    put(tmp_path, range(200, 260), disk_bytes=65 << 10)
    assert kept not in segments(tmp_path)
    (warning,) = warnings_of()
    assert "raise disk_bytes=66560" in warning


def test_file_above_the_bound_evicts_nothing(tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
    (kept,) = put(tmp_path, range(10))
    with SoftLabelCache(1 << 20, tmp_path, 64 << 10) as cache:
        cache.view(KEY).put([99], {"logits": np.zeros((1, 100), np.float32)})
        cache.flush()
        big = CacheKey("wide", "1", ("logits",))
        cache.view(big).put([1], {"logits": np.zeros((1, 50_000), np.float32)})
        with pytest.raises(TemporaryError, match=r"1 rows could not be written: 200\d+ bytes do not fit into 65536"):
            cache.flush()
        cache.flush()  # told once
        assert cache.view(big).get([1]).complete  # memory has it
        assert cache.stats().failed_writes == 1
    assert kept.exists()
    (warning,) = warnings_of()
    assert "1 rows were not written" in warning


@pytest.mark.parametrize("cause", ["lock", "fsync", "rename"])
def test_a_failed_flush_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    """A process that holds the lock for ever hangs nobody; what is half written is swept."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(folder, "_LOCK_S", 0.2)
    with SoftLabelCache(1 << 20, tmp_path) as cache, monkeypatch.context() as broken:
        fd = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(fd, fcntl.LOCK_EX) if cause == "lock" else broken.setattr(os, cause, fail)
        cache.view(KEY).put([1], rows([1]))
        with pytest.raises(TemporaryError, match=r"another process has held .*lock for 0.2 s|Input/output error"):
            cache.flush()
        broken.undo()
        os.close(fd)
        assert not list(tmp_path.rglob(".writing-*"))
        cache.view(KEY).put([1], rows([1]))
        cache.flush()
    assert found(tmp_path, [1]) == [True]


def test_rows_reach_the_disk_unasked(tmp_path: Path) -> None:
    """Another cache of the folder sees them, though it has looked before they came."""
    with SoftLabelCache(0, tmp_path, flush_interval_s=0.05) as cache, SoftLabelCache(0, tmp_path) as other:
        view = other.view(KEY)
        for ids in ([1, 2], [3, 4]):
            assert not view.get(ids).mask.any()
            cache.view(KEY).put(ids, rows(ids))
            wait_until(lambda ids=ids: view.get(ids).complete, "rows on disk")  # type: ignore[misc]


WRITER = """
import sys
from edl.distill.cache import SoftLabelCache
from tests.fast.distill.cache.conftest import KEY, rows
path, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with SoftLabelCache(1 << 16, path, flush_interval_s=0.01) as cache:
    for start in range(first, last, 20):
        cache.view(KEY).put(range(start, start + 20), rows(range(start, start + 20)))
        cache.flush()
        print(start + 20, flush=True)
"""


def test_killed_writer_loses_no_flushed_row(tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
    """`kill -9` costs no row that was flushed, leaves nothing torn, and disturbs no other writer of the folder."""
    writers: list[subprocess.Popen[str]] = []
    with contextlib.ExitStack() as stack:
        for first, last in ((0, 400), (1000, 1_000_000)):
            arguments = [sys.executable, "-c", WRITER, str(tmp_path), str(first), str(last)]
            writers.append(stack.enter_context(subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)))
            stack.callback(writers[-1].kill)
        other, killed = writers
        assert killed.stdout is not None
        for _ in range(4):
            flushed = int(killed.stdout.readline())
        killed.kill()
        flushed = int([flushed, *killed.communicate()[0].split()][-1])
        assert other.wait(DEADLINE_S) == 0
    assert all(found(tmp_path, [*range(400), *range(1000, flushed)]))
    assert not warnings_of()
    put(tmp_path, [999_999])
    assert not list(tmp_path.glob("*/.writing-*"))


def test_machines_without_common_locks_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep their hands off each other's half-written files, the key's included: no flush fails."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # as where a lock is a machine's only
    monkeypatch.setattr(folder, "_machine", lambda: f"{threading.get_ident():016x}")

    def write(first: int) -> None:
        with SoftLabelCache(0, tmp_path, flush_interval_s=60) as cache:
            for at in range(first, first + 20):
                cache.view(KEY).put([at], rows([at]))
                cache.flush()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, (0, 100, 200)))
    assert len(load_labels(tmp_path)) == 60


def test_killed_writers_files_are_not_read(tmp_path: Path) -> None:
    (whole,) = put(tmp_path, range(10))
    left = whole.with_name(".writing-" + whole.name.replace(whole.name[:20], "9" * 20))
    left.write_bytes(whole.read_bytes()[:300])
    assert found(tmp_path, range(10)) == [True] * 10
    assert left.exists()
    put(tmp_path, range(10, 20))
    assert not left.exists()


def test_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are written all the same where no bound is to be kept."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    put(tmp_path, range(10))
    assert all(found(tmp_path, range(10)))
    with SoftLabelCache(0, tmp_path, disk_bytes=1 << 20) as cache:
        cache.view(KEY).put([1], rows([1]))
        with pytest.raises(TemporaryError, match="Function not implemented"):
            cache.flush()


def test_a_dead_writer_makes_nobody_wait(
    tmp_path: Path, warnings_of: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:

    def broken(self: Any) -> float:
        raise KeyError("a bug")

    monkeypatch.setattr(writing.SegmentWriter, "_until_due", broken)
    monkeypatch.setattr(writing, "_STALLED_S", 1e6)  # a put that waits for the thread never ends
    with SoftLabelCache(128 << 20, tmp_path) as cache:
        for start in range(0, 8000, 500):  # several files' worth
            cache.view(KEY).put(range(start, start + 500), rows(range(start, start + 500), 2500))
        with pytest.raises(TemporaryError, match="a bug"):
            cache.flush()
        assert cache.view(KEY).get([0]).complete, "memory goes on"
        assert cache.stats().failed_writes >= 1
    assert len([words for words in warnings_of() if "nothing more is written" in words]) == 1, "said once"
