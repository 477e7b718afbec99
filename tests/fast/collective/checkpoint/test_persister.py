"""The thread that stores: what fails is said once and tried again; at its end a job waits for a slow storage."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from edl.collective.agent.job_run import JobRun
from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.state.state import State
from edl.collective.checkpoint.storage import persister as persister_module
from edl.collective.checkpoint.storage.persister import POLL_S, CheckpointPersister
from edl.collective.checkpoint.storage.writer import CheckpointWriter
from edl.discovery import open_store
from edl.errors import ProtocolError, TemporaryError
from tests.fast.collective.checkpoint import saved
from tests.waiting import DEADLINE_S, wait_until

RUN = "346d06b600000001"


class ApiError(Exception):
    """What a library of an object store raises, which knows nothing of OSError."""


class Balky(MemoryFileSystem):  # type: ignore[misc]
    """A storage that calls `before` whenever a file is to be opened."""

    protocol = "balky"
    before: Callable[[], object] = staticmethod(lambda: None)

    def _open(self, *arguments: Any, **settings: Any) -> Any:
        type(self).before()
        return super()._open(*arguments, **settings)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    fsspec.register_implementation("balky", Balky, clobber=True)
    monkeypatch.setattr(Balky, "before", staticmethod(lambda: None))
    name = f"balky://edl-{uuid.uuid4().hex}"
    yield name
    fs, root = fsspec.core.url_to_fs(name)
    if fs.exists(root):
        fs.rm(root, recursive=True)


def put(prefix: Path, step: int) -> None:
    saved.put(prefix, State(values=torch.full((10,), step)), step)


def agents_persister(url: str, prefix: Path, report: Callable[[str], object], **settings: Any) -> CheckpointPersister:
    settings = {"run": lambda: RUN, "report_stored": report, "poll_s": POLL_S, **settings}
    return CheckpointPersister(url, [prefix], report, **settings)


def started(url: str, prefix: Path, lines: list[str]) -> CheckpointPersister:
    persister = agents_persister(url, prefix, lines.append)
    persister.start()
    return persister


def fail(error: Exception) -> Callable[[], object]:
    def before() -> None:
        raise error

    return before


@pytest.mark.parametrize("error", [ApiError("slow down"), MemoryError("slow down")])
def test_next_state_is_stored_after_errors(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(Balky, "before", staticmethod(fail(error)))
    put(tmp_path / "s", 1)
    persister = started(url, tmp_path / "s", lines)
    wait_until(lambda: bool(lines))
    assert "slow down" in lines[0] or "memory" in lines[0]
    monkeypatch.setattr(Balky, "before", staticmethod(lambda: None))
    put(tmp_path / "s", 2)
    persister.store_newest()
    wait_until(lambda: "stored the state after step 2" in lines[-1])
    assert persister.close(DEADLINE_S)


def test_unknown_states_are_not_stored(tmp_path: Path, url: str) -> None:
    """Before it is known whose states these are nothing is stored."""
    put(tmp_path / "s", 1)
    persister = agents_persister(url, tmp_path / "s", lambda line: pytest.fail(line))
    persister.store_newest()
    assert persister.close(DEADLINE_S, patient=True)
    fs, root = fsspec.core.url_to_fs(url)
    assert not fs.exists(root)


def test_own_fault_does_not_end_the_thread(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    put(tmp_path / "s", 1)
    with monkeypatch.context() as broken:
        broken.setattr(CheckpointWriter, "_choose_state", lambda *arguments: 1 / 0)
        persister = started(url, tmp_path / "s", lines)
        wait_until(lambda: bool(lines))
        assert "fault in EDL" in lines[0]
    persister.store_newest()
    wait_until(lambda: "stored the state after step 1" in lines[-1])
    assert persister.close(DEADLINE_S)


def test_repeated_failure_is_reported_once(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    tries = threading.Semaphore(0)

    def before() -> None:
        tries.release()
        raise ApiError("slow down")

    monkeypatch.setattr(Balky, "before", staticmethod(before))
    put(tmp_path / "s", 1)
    persister = started(url, tmp_path / "s", lines)
    for _ in range(3):
        persister.store_newest()
        assert tries.acquire(timeout=DEADLINE_S)
    assert not persister.close(DEADLINE_S)
    assert [line for line in lines if "slow down" in line] == lines[:1]


def test_job_end_retries_the_last_state(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a job tries again until its last state is stored."""
    lines: list[str] = []
    failing = iter(range(2))

    def before() -> None:
        if next(failing, None) is not None:
            raise ApiError("slow down")

    monkeypatch.setattr(Balky, "before", staticmethod(before))
    persister = started(url, tmp_path / "s", lines)
    put(tmp_path / "s", 1)
    persister.store_newest()
    assert persister.close(DEADLINE_S, patient=True)
    assert "stored the state after step 1" in lines[-1]


@pytest.mark.parametrize("patient", [False, True])
def test_storage_that_takes_nothing_is_left(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    lines: list[str] = []
    released = threading.Event()
    monkeypatch.setattr(Balky, "before", staticmethod(lambda: released.wait(DEADLINE_S)))
    put(tmp_path / "s", 1)
    persister = started(url, tmp_path / "s", lines)
    persister.store_newest()
    try:
        assert not persister.close(0.3, patient=patient)
        assert "left incomplete" in lines[-1]
    finally:
        released.set()


class Clock:
    """A clock for a persister: a file takes two seconds of it, and a thread that waits notices each file."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._waiting = threading.current_thread()
        self._looks = 0

    def monotonic(self) -> float:
        self._looks += threading.current_thread() is self._waiting
        return self.now_s

    def take_file(self) -> None:
        seen = self._looks
        wait_until(lambda: self._looks > seen + 3)  # at most two a round: it has seen what was written before
        self.now_s += 2.0


def test_job_end_waits_for_slow_storage(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file takes less than the limit, and all of them together more."""
    lines: list[str] = []
    clock = Clock()
    monkeypatch.setattr(persister_module, "time", clock)
    monkeypatch.setattr(Balky, "before", staticmethod(clock.take_file))
    put(tmp_path / "s", 1)
    persister = started(url, tmp_path / "s", lines)
    persister.store_newest()
    assert persister.close(2.5, patient=True)
    assert clock.now_s > 2.5
    assert "stored the state after step 1" in lines[-1]


def test_agents_agree_on_a_run(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite"
    with open_store(url) as first, open_store(url) as second:
        run = JobRun(first, "job")()
        assert (JobRun(second, "job")(), JobRun(first, "job")()) == (run, run)
        assert JobRun(second, "another")() != run
        named = JobRun(first, "job")
        assert named() == run
        first.delete("jobs/job/run")
        assert (named(), JobRun(second, "job")()) == (run, run), "a store that lost its records learns it again"
        first.put("jobs/third/run", b"../..")
        with pytest.raises(ProtocolError, match="not the name of a run"):
            JobRun(second, "third")()


class Full(MemoryFileSystem):  # type: ignore[misc]
    """A storage that takes some of each file, and then has no room."""

    protocol = "full"

    def _open(self, *arguments: Any, **settings: Any) -> Any:
        file = super()._open(*arguments, **settings)
        write, left = file.write, [2]

        def some(data: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(122, "Disk quota exceeded")
            return write(data)

        file.write = some
        return file


def test_full_storage_is_not_waited_for(tmp_path: Path) -> None:
    """Each attempt gets as far as the one before it."""
    fsspec.register_implementation("full", Full, clobber=True)
    put(tmp_path / "s", 1)
    lines: list[str] = []
    persister = started(f"full://edl-{uuid.uuid4().hex}", tmp_path / "s", lines)
    wait_until(lambda: bool(lines))
    assert "quota" in lines[0]
    assert persister._writer.written_nbytes > 0
    persister.store_newest()
    assert not persister.close(0.3, patient=True)


def test_request_during_a_look_counts(tmp_path: Path, url: str) -> None:
    """The newest state is asked for while the thread looks for marked ones: it is stored next."""
    asked: list[bool] = []

    def store(newest: bool) -> bool:
        asked.append(newest)
        if len(asked) == 1:
            persister.store_newest()
        return True

    persister = agents_persister(url, tmp_path / "s", lambda line: None)
    persister._store = store  # type: ignore[method-assign]
    for _ in range(3):
        persister._poll_and_store()
    assert asked == [False, True, False]


def test_sys_exit_saves_no_half_step(url: str) -> None:
    def script() -> None:
        with Checkpointer(State(step=0), storage=url, interval_steps=1) as checkpointer:
            checkpointer.restore()
            checkpointer.save(0, force=True)
            checkpointer.state.step = 1
            sys.exit(0)

    with pytest.raises(SystemExit):
        script()
    again = Checkpointer(State(step=-1), storage=url)
    assert again.restore() == 0
    assert again.state.step == 0
    again.close()


@pytest.mark.parametrize("how", ["the block ends", "sys.exit()", "an error", "close"])
def test_worker_alone_ends_well_if_stored(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Without an agent a script ends well only if its last state is stored."""
    monkeypatch.setattr(persister_module, "_WORKER_RETRY_S", 0.3)
    monkeypatch.setattr(Balky, "before", staticmethod(fail(ApiError("slow down"))))
    words = f"the last state is not at {url}, what was stored before is as it was: .*slow down"
    ends = {
        "the block ends": pytest.raises(TemporaryError, match=words),
        "sys.exit()": pytest.raises(TemporaryError, match=words),
        "an error": pytest.raises(LookupError, match="the script's own"),
        "close": contextlib.nullcontext(),
    }
    with ends[how], Checkpointer(State(step=0), storage=url, interval_steps=1) as checkpointer:
        checkpointer.restore()
        checkpointer.save(0, force=True)
        if how == "sys.exit()":
            sys.exit()
        if how == "an error":
            raise LookupError("the script's own")
        if how == "close":
            checkpointer.close()
    assert how in ("the block ends", "sys.exit()") or re.search(words, caplog.records[-1].getMessage())


def test_a_storage_that_cannot_keep_pace(tmp_path: Path, url: str) -> None:
    """It is said once when it begins, and when it is over."""
    lines: list[str] = []
    slow = agents_persister(url, tmp_path / "s", lines.append, interval_s=1e-9)
    slow.start()
    for step in (1, 2):
        put(tmp_path / "s", step)
        wait_until(lambda step=step: any(f"after step {step} at" in line for line in lines))  # type: ignore[misc]
    slow._interval_s = 1e9
    put(tmp_path / "s", 3)
    wait_until(lambda: "the storage keeps pace again" in lines)
    slow.close(10.0)
    assert sum("longer than --checkpoint-interval" in line for line in lines) == 1, lines
