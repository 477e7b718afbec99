"""An engine's parts: its threads, the jobs on their way to them, and which teachers it keeps and counts."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from edl.discovery import open_registry
from edl.discovery.registry import Instance, Snapshot
from edl.distill.dispatch.actions import Send
from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.dispatch.policy import Policy
from edl.distill.engine.connection import TeacherConnection
from edl.distill.engine.connection_pool import ConnectionPool
from edl.distill.engine.counters import EngineCounters
from edl.distill.engine.engine import Engine
from edl.distill.engine.event_loop import EventLoopThread, _GarbageGuard
from edl.distill.engine.job import LabelJob
from edl.distill.engine.job_queue import JobQueue
from edl.distill.engine.service_limits import ServiceLimits
from edl.distill.engine.teacher_watcher import TeacherWatcher
from edl.distill.metrics import export
from edl.distill.stats import ReaderStats
from edl.distill.teachers import Teachers
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import OutputSpec
from tests.waiting import DEADLINE_S, wait_until

PAYLOAD = Payload.of({"x": np.zeros((1, 1), np.float32)}, None)


def test_request_cancelled_unstarted_ends() -> None:
    """A reader breaks out of an epoch in the same turn of the loop: a task that never began runs no `finally`."""
    thread = EventLoopThread.acquire()
    engine = Engine("x", OutputSpec(("y",)), thread=thread, arena=None, policy=Policy(), teacher_timeout_s=DEADLINE_S)
    job = LabelJob(0, PAYLOAD, lambda *_: None, lambda: None, open_attempts=1)

    async def cancel_at_once() -> None:
        send = Send(attempt=7, task=0, teacher="gone", timeout_s=DEADLINE_S, extra=False)
        engine._attempts[send.attempt] = engine._start(send, job)
        engine._attempts[send.attempt]()
        await asyncio.sleep(0)  # the task is cancelled
        await asyncio.sleep(0)  # and what it left undone is done

    try:
        thread.run(cancel_at_once(), DEADLINE_S)
        assert not engine._attempts
        assert job.open_attempts == 0
        thread.run(engine.close(), DEADLINE_S)
    finally:
        thread.release()


def test_collector_is_on_after_the_last_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventLoopThread, "used", True)
    states = []
    try:
        for step in ("before", "before", "after_in_parent", "after_in_parent"):
            getattr(_GarbageGuard, step)()
            states.append(gc.isenabled())
    finally:
        gc.enable()
    assert states == [False, False, False, True]


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
        assert again.wait(DEADLINE_S), "the thread that follows the teachers is dead"
        following.close()
    (stale,) = [snapshot for snapshot in seen if snapshot.stale]
    assert [each.id for each in stale.instances] == ["a"], "a teacher that is there is not dropped meanwhile"
    assert any("not foreseen" in record.getMessage() for record in caplog.records)


@dataclass
class Demand:
    full: bool = False
    busy: bool = False
    limits: ServiceLimits = field(default_factory=ServiceLimits)


class Setup:
    """A queue, and the numbers of the jobs that were taken out of it. The feeding thread takes `gap_s` for each."""

    def __init__(self, thread: EventLoopThread) -> None:
        self.thread, self.demand = thread, Demand()
        self.now = self.gap_s = 0.0
        self.taken: list[int] = []
        self.queue = JobQueue(thread, self.demand, self.take, lambda: self.now)

    def take(self, job: LabelJob) -> None:
        self.taken.append(job.number)

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.now += self.gap_s
            self.queue.put(LabelJob(number, PAYLOAD, lambda result, version: None, lambda: None))

    def on_loop(self, function: Callable[[], None]) -> None:
        """Run it there, and wait for it and what was called before."""
        done = threading.Event()
        self.thread.call(lambda: (function(), done.set()))  # type: ignore[func-returns-value]
        assert done.wait(DEADLINE_S)

    def gather(self, limit: int) -> None:
        """Show the queue a feeding thread that is quick, so that it pays to gather so many jobs."""
        self.put(*range(8))
        self.until_taken(*range(8))
        self.taken.clear()
        self.demand.limits = ServiceLimits(gather_limit=limit)

    def until_taken(self, *numbers: int) -> None:
        wait_until(lambda: self.taken == [*numbers], f"jobs {numbers[:9]}")


@pytest.fixture
def setup() -> Iterator[Setup]:
    """The way from the feeding thread to the loop."""
    thread = EventLoopThread.acquire()
    yield Setup(thread)
    thread.release()


def test_last_job_is_not_left_behind(setup: Setup) -> None:
    setup.gather(4)
    setup.put(1)
    setup.until_taken(1)


def test_full_teachers_take_nothing(setup: Setup) -> None:
    """Nothing is taken while the teachers are full until an answer comes."""
    setup.demand.full = setup.demand.busy = True
    setup.put(1, 2)
    setup.on_loop(lambda: None)
    assert setup.taken == []
    setup.on_loop(setup.queue.drain_if_due)
    assert setup.taken == [1, 2]


def test_no_job_is_lost_or_overtakes(setup: Setup) -> None:
    """A teacher that answers each job some time after it was taken, and is busy in between, as in an engine."""
    setup.gather(4)
    open_jobs = 0

    def take(job: LabelJob) -> None:
        nonlocal open_jobs
        setup.taken.append(job.number)
        open_jobs += 1
        setup.demand.busy, setup.demand.full = open_jobs >= 2, open_jobs >= 6
        setup.thread.loop.call_soon(answered)

    def answered() -> None:
        nonlocal open_jobs
        open_jobs -= 1
        setup.demand.busy, setup.demand.full = open_jobs >= 2, open_jobs >= 6
        setup.queue.drain_if_due()

    setup.queue = JobQueue(setup.thread, setup.demand, take)
    setup.put(*range(5000))
    setup.until_taken(*range(5000))


@dataclass
class FakeConnection:
    """In place of a connection: up for as long as `spec` is not None."""

    instance: Instance
    spec: object | None = None
    lapsed: bool = False
    why: str = ""


class World:
    """`ConnectionPool` over fakes."""

    def __init__(self) -> None:
        self.made: list[FakeConnection] = []
        self.on_dropped: list[TeacherConnection] = []
        self.dispatcher = Dispatcher(Policy())
        self.pool = ConnectionPool("s", self.dispatcher, self._connect, self.on_dropped.append, self._spawn)

    def see(self, *ready: str, lapsed: str = "", revoked: str = "", draining: str = "") -> None:
        """A new snapshot, of teachers with one letter each."""
        instances = [*map(_teacher, ready), *(_teacher(name, "draining") for name in draining)]
        gone = tuple(map(_teacher, lapsed))
        self.pool.apply_snapshot(Snapshot("s", tuple(instances), lapsed=gone, revoked=frozenset(revoked)))

    def up(self, name: str) -> None:
        """The teacher of that name is connected."""
        self.connection(name).spec = object()
        self.dispatcher.teacher_up(name, 0.0)

    def down(self, name: str) -> None:
        """Its connection breaks."""
        self.connection(name).spec = None
        self.pool.connection_lost(self.pool.connections[name])

    def connection(self, name: str) -> FakeConnection:
        return cast(FakeConnection, self.pool.connections[name])

    @property
    def is_usable(self) -> str:
        """Teachers that the dispatcher would give work."""
        return "".join(sorted(name for name, state in self.dispatcher.teachers.items() if state.is_usable(1.0)))

    def _connect(self, instance: Instance) -> TeacherConnection:
        self.made.append(FakeConnection(instance))
        return cast(TeacherConnection, self.made[-1])

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        coroutine.close()
        task: asyncio.Future[None] = asyncio.Future(loop=asyncio.new_event_loop())
        task.get_loop().close()
        return cast("asyncio.Task[None]", task)


def _teacher(name: str, state: Any = "ready") -> Instance:
    return Instance("s", name, "h", 1, state=state)


@pytest.fixture
def world() -> World:
    world = World()
    world.see("a", "b")
    world.up("a")
    world.up("b")
    return world


def test_one_that_the_registry_forgot_stays(world: World) -> None:
    world.see("b", lapsed="a")
    world.see("b")
    assert world.is_usable == "ab", "Consul forgets in a minute what it cannot be told"
    world.see("b", "a")
    assert world.is_usable == "ab"
    world.see("b")
    assert world.is_usable == "b", "registered again, it left on purpose"


def test_forgotten_teacher_loses_connection(world: World) -> None:
    world.see("b", lapsed="a")
    world.see("b")
    world.down("a")
    assert world.is_usable == "b"
    assert "a" not in world.pool.connections
    assert world.on_dropped


def test_renewed_teacher_is_tried_at_once(world: World) -> None:
    world.see("b", lapsed="a")
    world.down("a")
    world.see("a", "b")
    assert len(world.made) == 3, "not when the long pause of a lapsed one is over"
    assert not world.connection("a").lapsed


def test_drain_and_revocation_end_lapsed(world: World) -> None:
    world.see(lapsed="ab")
    world.see(draining="a", revoked="b")
    assert world.is_usable == ""
    world.see(lapsed="a")
    assert world.is_usable == "", "it said that it drains"


class Reader:
    def __init__(self) -> None:
        self.counters = EngineCounters()

    def stats(self) -> ReaderStats:
        return self.counters.stats(Dispatcher(), lambda name: ("ready", ""), "")


def series(registry: CollectorRegistry, name: str) -> dict[str, float]:
    return {
        sample.labels["teacher"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name
    }


def answer(reader: Reader, teacher: str) -> None:
    counts = reader.counters.teacher(teacher)
    counts.rows += 4
    counts.requests += 1


def test_labels_of_those_that_left_go() -> None:
    reader, registry = Reader(), CollectorRegistry()
    export(reader, registry=registry)
    for number in range(500):
        reader.counters.add_teacher(f"pod-{number}", "h:1")
        answer(reader, f"pod-{number}")
        reader.counters.remove_teacher(f"pod-{number}")
        answer(reader, f"pod-{number}")  # to a request that was on its way
    reader.counters.add_teacher("pod-500", "h:1")
    assert series(registry, "edl_reader_teacher_rows_total") == {"departed": 4000.0, "pod-500": 0.0}
    assert series(registry, "edl_reader_teacher_in_flight") == {"pod-500": 0.0}, "a gauge of nobody is none"
    assert len(reader.stats().teachers) == 101, "a person may still read of the last hundred"
    assert reader.stats().teachers["pod-499"].state == "gone"
    reader.counters.add_teacher("pod-499", "h:1")
    answer(reader, "pod-499")
    rows = series(registry, "edl_reader_teacher_rows_total")
    assert rows == {"departed": 4000.0, "pod-500": 0.0, "pod-499": 4.0}, "one that comes again is counted anew"
    assert len(reader.stats().teachers) == 101
