"""An engine's threads: requests that are cancelled, forks, and a thread that goes on after an error."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edl.discovery import open_registry
from edl.discovery.registry import Instance, Snapshot
from edl.distill.dispatch.actions import Send
from edl.distill.dispatch.policy import Policy
from edl.distill.engine.engine import Engine
from edl.distill.engine.event_loop import EventLoopThread, _GarbageGuard
from edl.distill.engine.job import LabelJob
from edl.distill.engine.teacher_watcher import TeacherWatcher
from edl.distill.teachers import Teachers
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import OutputSpec

TIMEOUT_S = 90.0


def test_request_cancelled_unstarted_ends() -> None:
    """A reader breaks out of an epoch in the same turn of the loop: a task that never began runs no `finally`."""
    thread = EventLoopThread.acquire()
    engine = Engine(
        "x", OutputSpec(outputs=("y",)), thread=thread, arena=None, policy=Policy(), teacher_timeout_s=TIMEOUT_S
    )
    job = LabelJob(
        0, Payload.of({"x": np.zeros((2, 3), "float32")}, None), lambda *_: None, lambda: None, open_attempts=1
    )

    async def cancel_at_once() -> None:
        send = Send(attempt=7, task=0, teacher="gone", timeout_s=TIMEOUT_S, extra=False)
        engine._attempts[send.attempt] = engine._start(send, job)
        engine._attempts[send.attempt]()
        await asyncio.sleep(0)  # the task is cancelled
        await asyncio.sleep(0)  # and what it left undone is done

    try:
        thread.run(cancel_at_once(), TIMEOUT_S)
        assert not engine._attempts
        assert job.open_attempts == 0
        thread.run(engine.close(), TIMEOUT_S)
    finally:
        thread.release()


@pytest.fixture
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(EventLoopThread, "used", True)
    assert gc.isenabled()
    yield
    gc.enable()


def test_collector_is_on_after_the_last_fork(collecting: None) -> None:
    """It is on again after the last of several forks at once."""
    _GarbageGuard.before()
    _GarbageGuard.before()
    _GarbageGuard.after_in_parent()
    assert not gc.isenabled(), "a fork is still under way"
    _GarbageGuard.after_in_parent()
    assert gc.isenabled()


WAIT_S = 90.0


def test_teachers_are_followed_after_a_bug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"sqlite:///{tmp_path}/discovery.sqlite"
    seen: list[Snapshot] = []
    failed, again = threading.Event(), threading.Event()

    def changed(snapshot: Snapshot) -> None:
        seen.append(snapshot)
        if snapshot.stale:
            failed.set()
        elif failed.is_set():
            again.set()
        elif snapshot.instances:
            raise KeyError("a bug")

    with open_registry(url) as registry, registry.register(Instance("s", "a", "127.0.0.1", 1), 60.0):
        following = TeacherWatcher(Teachers("s", discovery=url), changed)
        assert again.wait(WAIT_S), "the thread that follows the teachers is dead"
        following.close()
    (stale,) = [snapshot for snapshot in seen if snapshot.stale]
    assert [each.id for each in stale.instances] == ["a"], "a teacher that is there is not dropped meanwhile"
    assert any("not foreseen" in record.getMessage() for record in caplog.records)
