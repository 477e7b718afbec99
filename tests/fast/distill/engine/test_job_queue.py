"""The way from the feeding thread to the loop: no job is left behind, and jobs gather only where it pays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from edl.distill.engine.event_loop import EventLoopThread
from edl.distill.engine.job import LabelJob
from edl.distill.engine.job_queue import JobQueue
from edl.distill.engine.service_limits import ServiceLimits
from edl.distill.transport.request import Payload

TIMEOUT_S = 20


@dataclass
class Demand:
    full: bool = False
    busy: bool = False
    limits: ServiceLimits = field(default_factory=ServiceLimits)


@dataclass
class Setup:
    """An inbox, and the numbers of the jobs that were taken out of it."""

    thread: EventLoopThread
    demand: Demand = field(default_factory=Demand)
    taken: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.job_queue = JobQueue(self.thread, self.demand, lambda job: self.taken.append(job.number))

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.job_queue.put(job(number))

    def on_loop(self, function: Callable[[], None]) -> None:
        """Run it there, and wait for it and what was called before."""
        done = threading.Event()
        self.thread.call(lambda: (function(), done.set()))
        assert done.wait(TIMEOUT_S)

    def until_taken(self, *numbers: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.taken != [*numbers]:
            assert time.monotonic() < deadline, self.taken
            time.sleep(0.001)


def job(number: int) -> LabelJob:
    payload = Payload.of({"x": np.zeros((1, 1), np.float32)}, None)
    return LabelJob(number, payload, lambda result, version: None, lambda: None)


@pytest.fixture
def setup() -> Iterator[Setup]:
    thread = EventLoopThread.acquire()
    yield Setup(thread)
    thread.release()


def hurry(setup: Setup) -> None:
    """Let the inbox see a feeding thread that is quick, as far as the clock of this machine allows."""
    job_queue = cast(Any, setup.job_queue)
    job_queue._gap_s, job_queue._put_at = (
        -1.0,
        time.monotonic(),
    )  # no hiccup between the puts of a test makes that positive


def test_job_is_taken_at_once_without_gain(setup: Setup) -> None:
    """A job is taken at once where it does not pay to gather."""
    setup.put(1)
    setup.until_taken(1)
    setup.demand.limits = ServiceLimits(gather_limit=4)
    time.sleep(0.01)  # a slow feeding thread: the next job is not to be expected within a millisecond
    setup.put(2)
    setup.until_taken(1, 2)


def test_last_job_is_not_left_behind(setup: Setup) -> None:
    setup.demand.limits = ServiceLimits(gather_limit=4)
    hurry(setup)
    setup.put(1)
    setup.until_taken(1)


def test_jobs_wait_while_teachers_are_busy(setup: Setup) -> None:
    """Jobs wait for an answer while the teachers are busy."""
    setup.demand.limits = ServiceLimits(gather_limit=3)
    setup.demand.busy = True
    hurry(setup)
    setup.put(1, 2)
    setup.on_loop(setup.job_queue.drain_if_due)
    assert setup.taken == [], "an answer has come, and there is enough to do until the next one"
    setup.demand.busy = False
    setup.on_loop(setup.job_queue.drain_if_due)
    setup.until_taken(1, 2)


def test_enough_jobs_wake_the_loop(setup: Setup) -> None:
    """Jobs that are enough wake the loop though the teachers are busy."""
    setup.demand.limits = ServiceLimits(gather_limit=3)
    setup.demand.busy = True
    hurry(setup)
    setup.put(1, 2, 3)
    setup.until_taken(1, 2, 3)


def test_full_teachers_take_nothing(setup: Setup) -> None:
    """Nothing is taken while the teachers are full until an answer comes."""
    setup.demand.full = setup.demand.busy = True
    setup.put(1, 2)
    setup.on_loop(lambda: None)
    assert setup.taken == []
    setup.on_loop(setup.job_queue.drain_if_due)
    assert setup.taken == [1, 2]


def test_taking_in_is_taking_all(setup: Setup) -> None:
    setup.demand.limits = ServiceLimits(gather_limit=9)
    setup.demand.busy = True
    hurry(setup)
    setup.put(1, 2)
    setup.on_loop(setup.job_queue.drain)
    assert setup.taken == [1, 2]


def test_no_job_is_lost_or_overtakes(setup: Setup) -> None:
    """A teacher that answers each job some time after it was taken, and is busy in between, as in an engine."""
    count = 20_000
    setup.demand.limits = ServiceLimits(gather_limit=4)
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
        setup.job_queue.drain_if_due()

    setup.job_queue = JobQueue(setup.thread, setup.demand, take)
    one = job(0)
    for number in range(count):
        setup.job_queue.put(LabelJob(number, one.payload, one.on_done, one.on_started))
    setup.until_taken(*range(count))
