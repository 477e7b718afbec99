"""Brings jobs from the feeding thread to the event loop; decides when to wake the loop, and when jobs gather.

To wake the loop for a job, and to send a message for it, costs more than the job itself where a teacher on the same
host answers within a millisecond. There jobs gather for a moment, while the feeding thread makes the next jobs ready,
and go out together. What does not belong here: what becomes of a job.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from edl.distill.engine.event_loop import EventLoopThread
from edl.distill.engine.job import LabelJob
from edl.distill.engine.service_limits import ServiceLimits

__all__ = ["TeacherDemand", "JobQueue"]

MOST_GATHERED = 8
"""Jobs that are enough to be sent together, however many there is room for."""
_PATIENCE_S = 0.001
"""How long jobs may gather. Where the next one takes longer than that to come, none waits for it."""
_LONGEST_GAP_S = 4 * _PATIENCE_S  # that counts as such, so that one hiccup is soon forgotten


class TeacherDemand(Protocol):
    """What a job queue asks about the teachers.

    Read in any thread; changed on the event loop, before a call of `JobQueue.drain_if_due`.
    """

    @property
    def full(self) -> bool:
        """Whether no teacher could be given more, and an answer is on its way."""

    @property
    def busy(self) -> bool:
        """Whether all teachers have something to do, and an answer is on its way."""

    @property
    def limits(self) -> ServiceLimits:
        """The limits of the live teachers; `gather_limit` says how many jobs to collect before sending."""


class JobQueue:
    """Jobs that the loop has not taken yet.

    Args:
        thread: the event loop.
        demand: of the teachers.
        take: called with every job, on the loop.
        clock: returns seconds that tell how quickly jobs come.
    """

    def __init__(
        self,
        thread: EventLoopThread,
        demand: TeacherDemand,
        take: Callable[[LabelJob], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread = thread
        self._demand = demand
        self._take = take
        self._clock = clock
        self._jobs: deque[LabelJob] = deque()
        self._woken = False
        self._timer: asyncio.TimerHandle | None = None
        self._put_at = 0.0
        self._gap_s = _LONGEST_GAP_S

    def put(self, job: LabelJob) -> None:
        """Hand a job over, from the feeding thread."""
        now = self._clock()
        self._gap_s += (min(now - self._put_at, _LONGEST_GAP_S) - self._gap_s) / 4
        self._put_at = now
        self._jobs.append(job)
        # The loop looks in here after it has changed what is asked here, so that neither misses the other.
        if self._woken or self._demand.full:
            return
        if self._gathering and (self._timer is not None or self._demand.busy):
            return
        self._woken = True
        self._thread.call(self._wake)

    def drain_if_due(self) -> None:
        """Send what is there, unless more is worth waiting for. On the loop, whenever an answer has come."""
        if not self._jobs:
            return
        if not self._gathering:
            self.drain()
        elif not self._demand.busy and self._timer is None:
            self._timer = self._thread.loop.call_later(_PATIENCE_S, self.drain)

    def drain(self) -> None:
        """Send all that is there. On the loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._jobs:
            self._take(self._jobs.popleft())

    @property
    def _gathering(self) -> bool:
        return len(self._jobs) < self._demand.limits.gather_limit and self._gap_s < _PATIENCE_S

    def _wake(self) -> None:
        self._woken = False
        self.drain_if_due()
