"""The cache's folder: bounds, several processes, kill -9."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from edl.distill.cache import CacheKey, SoftLabelCache, folder, load_labels
from edl.distill.cache import writer as writing
from edl.distill.cache.layout import RowLayout
from edl.errors import TemporaryError
from tests.fast.distill.cache.cached_rows import KEY, OTHER, found, nbytes, put, rows, segments


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, "edl.distill"):
        yield lambda: [record.getMessage() for record in caplog.records]


def test_labels_outlive_the_process(tmp_path: Path) -> None:
    """Labels outlive the process, and other programs can read them."""
    (file,) = put(tmp_path, [3, 1, 2])
    tensors = safetensors.numpy.load_file(file)
    assert tensors["sample_ids"].tolist() == [3, 1, 2]
    np.testing.assert_array_equal(tensors["logits"], rows([3, 1, 2])["logits"])
    assert json.loads((file.parent / "key.json").read_text())["dataset"] == "digits"
    assert found(tmp_path, [1, 2, 3, 4]) == [True, True, True, False]


def test_no_file_is_pickled(tmp_path: Path) -> None:
    (file,) = put(tmp_path, [1])
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    assert json.loads(file.read_bytes()[8 : 8 + length])["logits"]["dtype"] == "F32"


def test_rows_reach_the_disk_unasked(tmp_path: Path) -> None:
    with SoftLabelCache(0, tmp_path, flush_interval_s=0.05) as cache:
        for ids in ([1, 2], [3, 4]):
            cache.view(KEY).put(ids, rows(ids))
            deadline = time.monotonic() + 20
            while not all(found(tmp_path, ids)):
                assert time.monotonic() < deadline
                time.sleep(0.02)


def test_newest_label_of_a_sample_counts(tmp_path: Path) -> None:
    """Of several labels of one sample the newest counts, after reopening too."""
    with SoftLabelCache(0, tmp_path) as cache:
        for value in (7.0, 8.0, 9.0):
            cache.view(KEY).put([1, 2], {"logits": np.full((2, 3), value, np.float32)})
            cache.flush()
            assert cache.view(KEY).get([1]).outputs["logits"][0, 0] == value  # type: ignore[index]
    assert len(segments(tmp_path)) == 3
    with SoftLabelCache(0, tmp_path) as cache:
        assert cache.view(KEY).get([2]).outputs["logits"][0, 0] == 9.0  # type: ignore[index]
        assert cache.view(KEY).ids() == [1, 2]


def test_disks_bound_holds_at_every_moment(tmp_path: Path) -> None:
    bound, largest, stop = 128 << 10, 0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not stop.is_set():
            largest = max(largest, nbytes(tmp_path))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with SoftLabelCache(0, tmp_path, bound) as cache:
            for start in range(0, 4000, 20):
                cache.view(KEY if start % 40 else OTHER).put(range(start, start + 20), rows(range(start, start + 20)))
            cache.flush()
            stats = cache.stats()
    finally:
        stop.set()
        watcher.join()
    largest = max(largest, nbytes(tmp_path))  # on a busy machine the watcher may not have come to its second look
    assert bound / 2 < largest <= bound
    assert stats.disk_bytes == nbytes(tmp_path) <= bound
    assert stats.evicted_segments > 10
    assert found(tmp_path, range(3980, 4000)) == [True] * 20  # the newest are there


def test_oldest_files_of_all_keys_go_first(tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
    """The oldest files go first whatever they belong to."""
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
    """A file larger than the bound evicts nothing and is reported."""
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


def test_unwritable_rows_hold_nothing_up(tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
    """Rows that cannot be written hold up neither others nor who waits."""
    with SoftLabelCache(0, tmp_path) as cache:
        bad = cache.view(KEY)
        bad.put([1], rows([1]))
        assert bad.disk is not None
        assert bad.disk.layout is not None
        bad.disk.layout = RowLayout(bad.disk.layout.columns, {"logits": (object(), None)})  # type: ignore[dict-item]
        with pytest.raises(TemporaryError, match="TypeError"):
            cache.flush(timeout_s=10)
        assert cache.stats().failed_writes == 1
        cache.view(OTHER).put([2], rows([2]))
        cache.flush(timeout_s=10)
    assert found(tmp_path, [2], OTHER) == [True]
    assert sum("1 rows were not written, and will be asked for again: TypeError" in one for one in warnings_of()) == 1


def test_vanished_or_cut_files_are_misses(tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
    """Files that vanish or shrink under a reader are misses."""
    for start in (0, 50, 100):
        put(tmp_path, range(start, start + 50))
    files = segments(tmp_path)
    with SoftLabelCache(0, tmp_path) as cache:
        cache._handles.clear()
        view = cache.view(KEY)
        files[0].unlink()
        os.truncate(files[1], 10)
        cache._handles.clear()
        assert view.get([0, 99, 100, 51]).mask.tolist() == [False, False, True, False]
        assert view.contains([0, 99, 100]).tolist() == [False, False, True]
        view.put([0, 99], rows([0, 99]))
        assert view.get([0, 99, 100]).complete
    (warning,) = warnings_of()
    assert str(files[1]) in warning


def test_unwritable_folder_keeps_memory_rows(tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
    """A folder that cannot be written costs no labels in memory."""
    (tmp_path / KEY.folder).write_text("in the way")
    with SoftLabelCache(1 << 20, tmp_path) as cache:
        view = cache.view(KEY)
        for start in (0, 10):
            view.put(range(start, start + 10), rows(range(start, start + 10)))
            with pytest.raises(TemporaryError, match="10 rows could not be written: File exists"):
                cache.flush()
        assert view.get(range(20)).complete
        (tmp_path / KEY.folder).unlink()
        view.put(range(20), rows(range(20)))
        cache.flush()
    assert found(tmp_path, range(20)) == [True] * 20
    assert len([warning for warning in warnings_of() if "asked for again" in warning]) == 1


def test_lock_held_for_ever_hangs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that holds the lock for ever hangs nobody."""
    monkeypatch.setattr(folder, "_LOCK_S", 0.2)
    with SoftLabelCache(1 << 20, tmp_path) as cache:
        fd = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(fd, fcntl.LOCK_EX)
        cache.view(KEY).put([1], rows([1]))
        with pytest.raises(TemporaryError, match=r"another process has held .*lock for 0.2 s"):
            cache.flush()
        os.close(fd)
        cache.view(KEY).put([1], rows([1]))
        cache.flush()


def test_rows_of_another_process_are_found(tmp_path: Path) -> None:
    with SoftLabelCache(0, tmp_path) as mine, SoftLabelCache(0, tmp_path) as other:
        view = mine.view(KEY)
        assert not view.get([1]).complete
        other.view(KEY).put([1], rows([1]))
        other.flush()
        deadline = time.monotonic() + 20
        while not view.get([1]).complete:
            assert time.monotonic() < deadline
            time.sleep(0.05)


_WRITE = """
import sys
import numpy as np
from edl.distill.cache import CacheKey, SoftLabelCache
path, first, last, bound = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) or None
cache = SoftLabelCache(1 << 16, path, bound, flush_interval_s=0.01)
view = cache.view(CacheKey("resnet", "1", ("logits",), dataset="digits"))
for start in range(first, last, 20):
    ids = np.arange(start, start + 20)
    view.put(ids, {"logits": np.repeat(ids[:, None].astype(np.float32), 100, axis=1)})
    cache.flush()
    print(start + 20, flush=True)
cache.close()
"""


def writer(path: Path, first: int, last: int, bound: int = 0) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", _WRITE, str(path), str(first), str(last), str(bound)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_writing_processes_do_not_clash(tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
    """Processes that write at the same time do not clash."""
    processes = [writer(tmp_path, first, first + 400) for first in (0, 1000, 2000)]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    for first in (0, 1000, 2000):
        assert all(found(tmp_path, range(first, first + 400)))
    assert len(segments(tmp_path)) == 60
    assert not warnings_of()


def test_processes_share_a_bound(tmp_path: Path) -> None:
    bound, largest = 100 << 10, 0
    processes = [writer(tmp_path, first, first + 1000, bound) for first in (0, 10_000)]
    while any(process.poll() is None for process in processes):
        largest = max(largest, nbytes(tmp_path))
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    largest = max(largest, nbytes(tmp_path))
    assert bound / 2 < largest <= bound
    assert sum(found(tmp_path, [*range(1000), *range(10_000, 11_000)])) > 100


def test_evicted_key_is_written_again(tmp_path: Path) -> None:
    """Another process evicts all labels of a key, and the key's file with them; labels that come later are found."""
    bound = 65 << 10
    with SoftLabelCache(0, tmp_path, bound) as mine, SoftLabelCache(0, tmp_path, bound) as other:
        mine.view(KEY).put(range(60), rows(range(60)))
        mine.flush()
        for start in (0, 100, 200):
            other.view(OTHER).put(range(start, start + 60), rows(range(start, start + 60)))
            other.flush()
        assert not (tmp_path / KEY.folder).exists(), "it was to be evicted"
        mine.view(KEY).put([7], rows([7]))
        mine.flush()
    assert KEY in folder.SegmentFolder(tmp_path, None).keys()  # noqa: SIM118 - not a mapping
    assert load_labels(tmp_path, KEY).ids == (7,)


@pytest.mark.parametrize("after", [1, 7])
def test_kill_9_costs_no_flushed_row(tmp_path: Path, warnings_of: Callable[[], list[str]], after: int) -> None:
    """`kill -9` costs no row that was flushed and leaves nothing torn."""
    process = writer(tmp_path, 0, 1_000_000)
    assert process.stdout is not None
    flushed = 0
    for _ in range(after):
        flushed = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert all(found(tmp_path, range(flushed)))
    assert not warnings_of()
    put(tmp_path, [999_999])
    assert all(re.fullmatch(r"key\.json|\d{20}-.*\.safetensors", path.name) for path in tmp_path.glob("*/*"))


def test_killed_writers_files_are_not_read(tmp_path: Path) -> None:
    """What a killed writer left is not read and goes with the next write."""
    (whole,) = put(tmp_path, range(10))
    left = whole.with_name(".writing-" + whole.name.replace(whole.name[:20], "9" * 20))
    left.write_bytes(whole.read_bytes()[:300])
    assert found(tmp_path, range(10)) == [True] * 10
    assert left.exists()
    put(tmp_path, range(10, 20))
    assert not left.exists()


MACHINE = """
import fcntl, sys
import numpy as np
from edl.distill.cache import CacheKey, SoftLabelCache, folder, load_labels
fcntl.flock = lambda *_: None  # as where a lock is this machine's only
folder._machine = lambda: sys.argv[2] * 16
key = CacheKey("m", "1", ("y",))
with SoftLabelCache(0, sys.argv[1], flush_interval_s=60) as cache:
    for at in range(int(sys.argv[3]), int(sys.argv[3]) + 60):
        cache.view(key).put([at], {"y": np.full((1, 4), at, np.float32)})
        cache.flush()
"""


def test_machines_without_common_locks_share(tmp_path: Path) -> None:
    """They keep their hands off each other's half-written files, the key's included: no flush fails."""
    command = [sys.executable, "-c", MACHINE, str(tmp_path)]
    processes = [subprocess.Popen([*command, name, str(at)]) for name, at in (("a", 0), ("b", 100), ("c", 200))]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(load_labels(tmp_path)) == 180


def test_file_of_another_machine_is_left(tmp_path: Path) -> None:
    (whole,) = put(tmp_path, range(10))
    left = [whole.with_name(f".writing-{digit * 16}-01234567-{whole.name}") for digit in "ab"]
    for path in left:
        path.write_bytes(b"half")
    os.utime(left[1], (time.time() - 90_000,) * 2)
    put(tmp_path, range(10, 20))
    assert [path.exists() for path in left] == [True, False]


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


@pytest.mark.parametrize("ids", [[""], ["größe", "", "a/b"], [-(2**63), 2**63 - 1]])
def test_unusual_ids_survive_the_disk(tmp_path: Path, ids: list[Any]) -> None:
    with SoftLabelCache(0, tmp_path) as cache:
        cache.view(KEY).put(ids, rows(range(len(ids))))
    with SoftLabelCache(0, tmp_path) as cache:
        assert cache.view(KEY).ids() == ids
        np.testing.assert_array_equal(
            cache.view(KEY).get(ids).outputs["logits"],  # type: ignore[arg-type]
            rows(range(len(ids)))["logits"],
        )


def test_row_put_during_a_write_is_written(tmp_path: Path) -> None:
    """A row put while the older one was being written stays to be written."""
    with SoftLabelCache(0, tmp_path) as cache:
        namespace = cache.view(KEY).disk
        assert namespace is not None
        older, newer = b"older", b"newer"
        namespace.pending.update({1: newer, 2: older})
        namespace.written([1, 2], [older, older])
        assert namespace.pending == {1: newer}
        namespace.pending.clear()


def test_row_put_during_a_read_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older row must not get into memory, where it would be found first, when the newer one found no room there."""
    put(tmp_path, [1])
    with SoftLabelCache(1 << 20, tmp_path) as cache:
        view = cache.view(KEY)
        assert view.disk is not None
        read = view.disk.read

        def read_slowly(place: Any) -> Any:
            records = read(place)
            with monkeypatch.context() as full:
                full.setattr(cache._memory, "limit_bytes", 0)
                view.put([1], rows([7]))
            return records

        monkeypatch.setattr(view.disk, "read", read_slowly)
        view.get([1])
        assert view.get([1]).outputs["logits"][0, 0] == 7  # type: ignore[index]


def test_a_dead_writer_makes_nobody_wait(
    tmp_path: Path, warnings_of: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error where none was foreseen ends the thread that writes."""

    def broken(self: Any) -> float:
        raise KeyError("a bug")

    monkeypatch.setattr("edl.distill.cache.writer.SegmentWriter._until_due", broken)
    with SoftLabelCache(128 << 20, tmp_path) as cache:
        started = time.monotonic()
        for start in range(0, 8000, 500):  # several files' worth, for which `put` would wait a minute
            cache.view(KEY).put(range(start, start + 500), rows(range(start, start + 500), 2500))
        with pytest.raises(TemporaryError, match="a bug"):
            cache.flush()
        assert time.monotonic() - started < writing._STALLED_S, "each put waits for a thread that is dead"
        assert cache.view(KEY).get([0]).complete, "memory goes on"
        assert cache.stats().failed_writes >= 1
    assert len([words for words in warnings_of() if "nothing more is written" in words]) == 1, "said once"
