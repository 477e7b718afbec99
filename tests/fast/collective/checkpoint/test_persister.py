"""The thread that stores: what fails is said once and tried again; at its end a job waits for a slow storage."""

from __future__ import annotations

import contextlib
import itertools
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
from edl.collective.checkpoint.storage.persister import CheckpointPersister
from edl.collective.checkpoint.storage.writer import CheckpointWriter
from edl.discovery import open_store
from edl.errors import ProtocolError, TemporaryError
from tests.fast.collective.checkpoint import saved
from tests.waiting import DEADLINE_S, wait_until

RUN = "346d06b600000001"


class ApiError(Exception):
    """What a library of an object store raises, which knows nothing of OSError."""


class Balky(MemoryFileSystem):
    """A storage that calls `before` whenever a file is to be opened, and may be full after so many writes to it."""

    protocol = "balky"
    storage: Storage

    def _open(self, *arguments: Any, **settings: Any) -> Any:
        self.storage.before()
        file = super()._open(*arguments, **settings)
        write, written = file.write, itertools.count()

        def some(data: Any) -> Any:
            if next(written) >= self.storage.writes:
                raise OSError(122, "Disk quota exceeded")
            return write(data)

        file.write = some
        return file


class Storage:
    """A storage, an agent's persister, and what that says."""

    def __init__(self, prefix: Path) -> None:
        self.url, self.prefix = f"balky://edl-{uuid.uuid4().hex}", prefix
        self.before: Callable[[], object] = lambda: None
        self.writes = 1 << 30
        self.lines: list[str] = []
        self.persisters: list[CheckpointPersister] = []

    def put(self, step: int) -> None:
        saved.put(self.prefix, State(values=torch.full((10,), step)), step)

    def persister(self, *, start: bool = True, **settings: Any) -> CheckpointPersister:
        settings = {"run": lambda: RUN, "report_stored": self.lines.append, "poll_s": 0.02, **settings}
        made = CheckpointPersister(self.url, [self.prefix], self.lines.append, **settings)
        self.persisters.append(made)
        if start:
            made.start()
        return made

    def wait_stored(self, step: int) -> None:
        wait_until(lambda: any(f"stored the state after step {step} at" in line for line in self.lines), "it is stored")


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    fsspec.register_implementation("balky", Balky, clobber=True)
    made = Storage(tmp_path / "s")
    monkeypatch.setattr(Balky, "storage", made, raising=False)
    yield made
    made.before = lambda: None
    for persister in made.persisters:  # what they still write would come back behind its removal
        persister.close(DEADLINE_S)
    fs, root = fsspec.core.url_to_fs(made.url)
    if fs.exists(root):
        fs.rm(root, recursive=True)


def fail(error: Exception, times: int = 1 << 30) -> Callable[[], object]:
    """Return a function that raises an error so many times."""
    left = iter(range(times))

    def before() -> None:
        if next(left, None) is not None:
            raise error

    return before


@pytest.mark.parametrize("error", [ApiError("slow down"), MemoryError("memory"), None])
def test_next_state_is_stored_after_errors(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    storage.put(1)
    with monkeypatch.context() as broken:
        if error is None:
            broken.setattr(CheckpointWriter, "_choose_state", lambda *arguments: 1 / 0)
        else:
            storage.before = fail(error)
        persister = storage.persister()
        wait_until(lambda: storage.lines, "the failure is reported")
        assert (str(error) if error else "fault in EDL") in storage.lines[0]
    storage.before = lambda: None
    storage.put(2)
    persister.store_newest()
    storage.wait_stored(2)
    assert persister.close(DEADLINE_S)


def test_unknown_states_are_not_stored(storage: Storage) -> None:
    storage.put(1)
    persister = storage.persister(start=False)
    persister.store_newest()
    assert persister.close(DEADLINE_S, patient=True)
    fs, root = fsspec.core.url_to_fs(storage.url)
    assert not fs.exists(root)


def test_job_end_retries_the_last_state(storage: Storage) -> None:
    storage.before = fail(ApiError("slow down"), times=2)
    persister = storage.persister()
    storage.put(1)
    persister.store_newest()
    assert persister.close(DEADLINE_S, patient=True)
    storage.wait_stored(1)


@pytest.mark.parametrize("patient", [False, True])
def test_storage_that_takes_nothing_is_left(storage: Storage, patient: bool) -> None:
    released = threading.Event()
    storage.before = lambda: released.wait(DEADLINE_S)
    storage.put(1)
    persister = storage.persister()
    persister.store_newest()
    try:
        assert not persister.close(0.3, patient=patient)
        assert "left incomplete" in storage.lines[-1]
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


def test_job_end_waits_for_slow_storage(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file takes less than the limit, and all of them together more."""
    clock = Clock()
    monkeypatch.setattr(persister_module, "time", clock)
    storage.before = clock.take_file
    storage.put(1)
    persister = storage.persister()
    persister.store_newest()
    assert persister.close(2.5, patient=True)
    assert clock.now_s > 2.5
    storage.wait_stored(1)


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


def test_full_storage_is_not_waited_for(storage: Storage) -> None:
    """Each attempt gets as far as the one before it."""
    storage.writes = 2
    storage.put(1)
    persister = storage.persister()
    wait_until(lambda: storage.lines, "the failure is reported")
    assert "quota" in storage.lines[0]
    assert persister._writer.written_nbytes > 0
    persister.store_newest()
    assert not persister.close(0.3, patient=True)


@pytest.mark.parametrize("how", ["the block ends", "sys.exit()", "an error", "close"])
def test_worker_alone_ends_well_if_stored(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    monkeypatch.setattr(persister_module, "_WORKER_RETRY_S", 0.3)
    storage.before = fail(ApiError("slow down"))
    words = f"the last state is not at {storage.url}, what was stored before is as it was: .*slow down"
    ends = {
        "the block ends": pytest.raises(TemporaryError, match=words),
        "sys.exit()": pytest.raises(TemporaryError, match=words),
        "an error": pytest.raises(LookupError, match="the script's own"),
        "close": contextlib.nullcontext(),
    }
    with ends[how], Checkpointer(State(step=0), storage=storage.url, interval_steps=1) as checkpointer:
        checkpointer.restore()
        checkpointer.save(0, force=True)
        if how == "sys.exit()":
            sys.exit()
        if how == "an error":
            raise LookupError("the script's own")
        if how == "close":
            checkpointer.close()
    assert how in ("the block ends", "sys.exit()") or re.search(words, caplog.records[-1].getMessage())
