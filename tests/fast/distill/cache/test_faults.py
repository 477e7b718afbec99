"""Each system call of the cache fails once: labels are right or not there, which is said, and it passes."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill.cache import SoftLabelCache
from edl.errors import EDLError, SettingsError, TemporaryError
from tests.fast.distill.cache.cached_rows import KEY, put, rows, segments

ERRORS = [errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.EINTR, errno.EIO, errno.EACCES]
WRITING = ["open", "write", "fsync", "rename", "mkdir", "close", "flock", "stat", "scandir", "unlink"]
READING = ["open", "fstat", "pread", "stat", "scandir"]
WAIT_S = 30.0


class Faults:
    """Fails one call of one function beneath the cache's folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code = 0
        self.left = self.failed = 0
        self._monkeypatch = monkeypatch

    def inject(self, name: str, code: int, times: int = 1) -> None:
        import fcntl

        self.code, self.left, self.failed = code, times, 0
        where: Any = fcntl if name == "flock" else os
        real = getattr(where, name)
        names = {name, "listdir"} if name == "scandir" else {name}
        for each in names:
            self._monkeypatch.setattr(where, each, self._failing(each, getattr(where, each)))
        assert callable(real)

    def _failing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.left and "edl" in threading.current_thread().name:
                self.left -= 1
                self.failed += 1
                if name == "close":
                    real(*args, **kwargs)  # as Linux does it: the descriptor is gone
                raise OSError(self.code, os.strerror(self.code))
            return real(*args, **kwargs)

        return call


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    yield Faults(monkeypatch)
    monkeypatch.undo()


def as_worker(function: Callable[[], Any]) -> Any:
    """Run it where faults are injected; pytest itself opens files, too."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append((function(), None))
        except BaseException as exc:  # noqa: BLE001 - raised below
            results.append((None, exc))

    thread = threading.Thread(target=run, name="edl-test", daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "it hangs"
    result, error = results[0]
    if error is not None:
        raise error
    return result


def check(path: Path, wanted: range) -> list[bool]:
    """Which labels a new cache has; each is right."""
    with SoftLabelCache(0, path) as cache:
        got = cache.view(KEY).get(wanted)
        there = np.asarray(wanted)[got.mask]
        if len(there):
            assert (got.outputs["logits"] == rows(there)["logits"]).all()  # type: ignore[operator]
        return [bool(each) for each in got.mask]


@pytest.mark.parametrize(("call", "code"), list(itertools.product(WRITING, ERRORS)))
def test_a_write_that_fails_once(tmp_path: Path, faults: Faults, call: str, code: int) -> None:
    put(tmp_path, range(5))
    with SoftLabelCache(1 << 20, tmp_path, disk_bytes=1 << 20) as cache:
        view = cache.view(KEY)
        (tmp_path / KEY.folder / ".writing-left").write_bytes(b"by a killed process")
        faults.inject(call, code)
        lost = ""
        view.put(range(5, 10), rows(range(5, 10)))
        try:
            as_worker(cache.flush)
        except TemporaryError as exc:
            lost = str(exc)
        assert faults.failed == 1, f"{call} is called somewhere"
        assert not lost or os.strerror(code) in lost, "why"
        faults.left = 0
        view.put(range(10, 15), rows(range(10, 15)))
        cache.flush()
    known = check(tmp_path, range(15))
    assert all(known[:5]), "what was on disk before"
    assert all(known[10:]), "what came when it was over"
    assert lost or all(known[5:10]), "rows are missing without a word"
    assert not list(tmp_path.rglob(".writing-*")), "what is half written is swept"


@pytest.mark.parametrize(("call", "code"), list(itertools.product(READING, ERRORS)))
def test_a_read_that_fails_once(
    tmp_path: Path, faults: Faults, call: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, range(5))
    put(tmp_path, range(5, 10))
    for at_open in (True, False):
        cache = SoftLabelCache(0, tmp_path)
        view: Any = None if at_open else cache.view(KEY)
        if not at_open:
            cache._handles.clear()

        def read(view: Any = view, cache: SoftLabelCache = cache) -> Any:
            return (view or cache.view(KEY)).get(range(10))

        faults.inject(call, code)
        try:
            got = as_worker(read)
        except EDLError:
            got = None
        assert faults.failed == 1 or not at_open, f"{call} is called somewhere"
        if got is not None and got.outputs:
            there = np.arange(10)[got.mask]
            assert (got.outputs["logits"] == rows(there)["logits"]).all(), "a label of another sample"
        if got is not None and not got.complete:
            assert caplog.records, "labels are missing without a word"
        faults.left = 0
        view = cache.view(KEY)
        view.disk.scan(force=True)
        assert view.get(range(10)).complete, "it has passed, and the labels are there again"
        cache.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_that_is_freed(tmp_path: Path, faults: Faults, code: int, caplog: pytest.LogCaptureFixture) -> None:
    with SoftLabelCache(0, tmp_path, flush_interval_s=0.01) as cache:
        view = cache.view(KEY)
        faults.inject("write", code, times=10**9)
        with caplog.at_level(logging.WARNING, "edl.distill"):
            for start in range(0, 50, 5):
                view.put(range(start, start + 5), rows(range(start, start + 5)))
                with pytest.raises(TemporaryError, match=os.strerror(code)):
                    cache.flush()
        assert len(caplog.records) == 1, "a disk that stays full is said once"
        faults.left = 0
        view.put(range(100, 105), rows(range(100, 105)))
        cache.flush()
        assert view.get(range(100, 105)).complete
        assert not view.get(range(50)).mask.any(), "what was lost is asked for again"
        assert not list(tmp_path.rglob(".writing-*"))


def test_clock_set_back_ages_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, [1])
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now - 10**18)  # thirty years
    with SoftLabelCache(0, tmp_path) as cache:
        cache.view(KEY).put([1], {"logits": np.full((1, 100), 9.0, np.float32)})
    first, second = segments(tmp_path)
    assert first.name < second.name, "the newest of several labels of a sample, and the last to be evicted"
    with SoftLabelCache(0, tmp_path) as cache:
        assert cache.view(KEY).get([1]).outputs["logits"][0, 0] == 9.0  # type: ignore[index]
    monkeypatch.setattr(time, "time_ns", lambda: 10**20 - 1)
    put(tmp_path, [2])
    monkeypatch.setattr(time, "time_ns", lambda: now)
    put(tmp_path, [3])
    with SoftLabelCache(0, tmp_path) as cache:
        assert cache.view(KEY).get([1, 2, 3]).complete, "a name of the last moment is followed by nothing"


def test_a_folder_in_it_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `lost+found` at the root of a file system."""
    (tmp_path / "lost+found").mkdir()
    listed = Path.iterdir

    def iterdir(path: Path) -> Any:
        if path.name == "lost+found":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with SoftLabelCache(0, tmp_path) as cache:
        cache.view(KEY).put([1], rows([1]))
        cache.flush()
        assert cache.stats().disk_bytes > 0


IDS: list[Any] = [True, False, 1.0, float("nan"), None, b"1", (1,), [1], np.float32(1), np.bool_(True), 1j, object()]


@pytest.mark.parametrize("sample", IDS, ids=repr if len(IDS) < 5 else range(len(IDS)))
def test_ids_that_are_equal_to_others_only(sample: Any) -> None:
    with SoftLabelCache() as cache:
        view = cache.view(KEY)
        view.put([0, 1], rows([0, 1]))
        for ask in (view.get, view.contains, lambda ids: view.put(ids, rows([5]))):
            with pytest.raises(SettingsError, match="must be an integer or a string"):
                ask([sample])
        assert view.get([np.int64(1), np.uint8(0)]).complete
        assert not view.get(["1"]).complete
        view.put(["1", "x" * 100_000, "", "\0"], rows([7, 8, 9, 10]))
        got: Any = view.get(["1", 1, "", "\0", "x" * 100_000, "x" * 99_999])
        assert got.mask.tolist() == [True] * 5 + [False]
        assert got.outputs["logits"][:, 0].tolist() == [7, 1, 9, 10, 8]
