"""The way from the feeding thread to the loop: no job is left behind, and jobs gather only where it pays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from edl.distill.engine.event_loop import EventLoopThread
from edl.distill.engine.job import LabelJob
from edl.distill.engine.job_queue import JobQueue
from edl.distill.engine.service_limits import ServiceLimits
from edl.distill.transport.request import Payload
from tests.waiting import DEADLINE_S, wait_until

PAYLOAD = Payload.of({"x": np.zeros((1, 1), np.float32)}, None)


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
        self.thread.call(lambda: (function(), done.set()))
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
