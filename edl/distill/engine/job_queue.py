"""Brings jobs from the feeding thread to the event loop; decides when to wake the loop, and when jobs gather.

Where a teacher on the same host answers within a millisecond, waking the loop and sending a message cost more than the
job itself. There, jobs gather for a moment while the feeding thread prepares the next ones, and are sent together.
`ServiceLimits` is what the other threads read of the live teachers in return. Sending, retrying and answering jobs does
not belong here (`engine`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edl.distill.dispatch.actions import FailureKind, GiveUp
from edl.distill.engine.event_loop import EventLoopThread
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import Outputs
from edl.errors import BadOutputError, EDLError, PermanentError, RejectedError

__all__ = ["JobQueue", "LabelJob", "ServiceLimits", "TeacherDemand", "give_up_error"]

MOST_GATHERED = 8
"""Largest number of jobs that are sent together, however many the teachers have room for."""
_PATIENCE_S = 0.001
"""How long jobs may gather. No job waits for the next one where jobs come further apart than this."""
_LONGEST_GAP_S = 4 * _PATIENCE_S  # longer gaps count as this, so that one hiccup is soon forgotten


@dataclass(eq=False)
class LabelJob:
    """A request's worth of rows.

    Attributes:
        number: Number of the job, rising in the order of delivery.
        payload: The tensors.
        on_done: Called on the loop, once, with the outputs or an error, and the model's version.
        on_started: Called on the loop when the job is sent for the first time.
        open_attempts: Number of its requests under way.
        sent: Whether it was sent at least once.
        finished: Whether `on_done` was called, or never will be.
    """

    number: int
    payload: Payload
    on_done: Callable[[Outputs | EDLError, str], None]
    on_started: Callable[[], None]
    open_attempts: int = 0
    sent: bool = False
    finished: bool = False


def give_up_error(action: GiveUp) -> PermanentError:
    """Return the error that the training loop gets for a task that was given up."""
    words = "; ".join(f"{teacher}: {failure.kind.value}: {failure.message}" for teacher, failure in action.failures)
    kinds = {failure.kind for _, failure in action.failures}
    if FailureKind.REJECTED in kinds:
        return RejectedError(f"teachers refuse a request: {words}")
    return BadOutputError(f"no teacher could label a request: {words}")


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of the live teachers of a service at one moment.

    It is replaced as a whole, so that other threads never see half of a change.

    Attributes:
        capacity: Requests that the teachers together want in flight, as of some milliseconds ago.
        gather_limit: Number of jobs worth sending together, where all teachers are quick and on this host; else 0.
        max_rows: Most rows in a request that every teacher accepts, as of when the last teacher came or left; 0 without
            a limit.
        max_nbytes: Most bytes of tensors in a request that every teacher accepts; 0 without a limit.
        max_sequence: Rows of the longest sequence that at least one teacher accepts, since a long sequence is sent to a
            teacher that accepts it; 0 without a limit.
    """

    capacity: int = 0
    gather_limit: int = 0
    max_rows: int = 0
    max_nbytes: int = 0
    max_sequence: int = 0


class TeacherDemand(Protocol):
    """Answers a job queue's questions about the teachers.

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
        thread: The event loop.
        demand: Says how busy the teachers are.
        take: Called with every job, on the loop.
        clock: Returns the time in seconds, from which the gap between jobs is measured.
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
        # The loop looks at the queue after it has changed `demand`, so that neither side misses the other.
        if self._woken or self._demand.full:
            return
        if self._gathering and (self._timer is not None or self._demand.busy):
            return
        self._woken = True
        self._thread.call(self._wake)

    def drain_if_due(self) -> None:
        """Send the jobs in the queue, unless more are worth waiting for. On the loop, whenever an answer has come."""
        if not self._jobs:
            return
        if not self._gathering:
            self.drain()
        elif not self._demand.busy and self._timer is None:
            self._timer = self._thread.loop.call_later(_PATIENCE_S, self.drain)

    def drain(self) -> None:
        """Send all jobs in the queue. On the loop."""
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
