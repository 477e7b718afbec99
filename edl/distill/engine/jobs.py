"""The jobs of a service: the queue from the feeding thread to the event loop, counters, and limits on waiting.

`ServiceLimits` tells other threads the limits of the live teachers. `Outage` decides,
without I/O, when work has waited too long for a teacher. The `engine` sends, retries and answers jobs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edl.distill.dispatch.actions import FailureKind, GiveUp
from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.engine.event_loop import EventLoopThread
from edl.distill.stats import ReaderStats, TeacherStats
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import Outputs
from edl.errors import BadOutputError, EDLError, PermanentError, RejectedError

if TYPE_CHECKING:
    from edl.distill.engine.engine import Engine


@dataclass(eq=False)
class LabelJob:
    """The rows of one request, to be labelled by one service."""

    number: int  # Number of the job, rising in the order of delivery
    payload: Payload  # The tensors
    # Called on the loop, once, with the outputs or an error, and the model's version
    on_done: Callable[[Outputs | EDLError, str], None]
    on_started: Callable[[], None]  # Called on the loop when the job is sent for the first time
    open_attempts: int = 0  # Number of its pending requests
    sent: bool = False  # Whether it was sent at least once
    finished: bool = False  # Whether `on_done` was called, or never will be


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

    It is replaced as a whole, so that other threads never see a partial change.
    """

    capacity: int = 0  # Requests that the teachers together want in flight, as of some milliseconds ago
    # Rows that every teacher accepts in a request, as of the last change of teachers; 0 without a limit
    max_rows: int = 0
    max_nbytes: int = 0  # Bytes of tensors that every teacher accepts in a request; 0 without a limit
    # Rows of the longest sequence that at least one teacher accepts, since a long sequence is sent to a teacher that
    # accepts it; 0 without a limit
    max_sequence: int = 0


class JobQueue:
    """Jobs on their way from the feeding thread to the loop.

    Args:
        take: Called on the loop with every job.
    """

    def __init__(self, thread: EventLoopThread, demand: Engine, take: Callable[[LabelJob], None]) -> None:
        self._thread = thread
        self._demand = demand
        self._take = take
        self._jobs: deque[LabelJob] = deque()
        self._woken = False

    def put(self, job: LabelJob) -> None:
        """Hand a job over, from the feeding thread."""
        self._jobs.append(job)
        # The loop checks the queue after it changes `demand`, so neither side misses the other.
        if not self._woken and not self._demand.full:
            self._woken = True
            self._thread.call(self._wake)

    def drain(self) -> None:
        """Send all queued jobs. Called on the loop."""
        while self._jobs:
            self._take(self._jobs.popleft())

    def _wake(self) -> None:
        self._woken = False
        self.drain()


_MOST_GONE = 100
"""How many departed teachers are remembered by name: enough to see what became of each where pods come and go."""


@dataclass
class _Counts:
    endpoint: str
    rows: int = 0
    requests: int = 0
    failures: int = 0


class EngineCounters:
    """Counts rows by their outcome. Written on the event loop only, read from any thread."""

    def __init__(self) -> None:
        self.asked = self.received = self.resent = self.hedged = 0
        self._lock = threading.Lock()  # so that a leaving teacher's counts are neither doubled nor missing
        self._present: dict[str, _Counts] = {}
        self._gone: dict[str, _Counts] = {}  # the teachers that left last
        self._departed = _Counts("")  # sums over all teachers that left

    def add_teacher(self, teacher: str, endpoint: str) -> None:
        """Start counting for a new teacher."""
        with self._lock:
            self._gone.pop(teacher, None)
            self._present[teacher] = _Counts(endpoint)

    def remove_teacher(self, teacher: str) -> None:
        """Add the counts of a teacher that left to the sums of departed teachers."""
        with self._lock:
            counts = self._present.pop(teacher, None)
            if counts is None:
                return
            self._departed.rows += counts.rows
            self._departed.requests += counts.requests
            self._departed.failures += counts.failures
            self._gone[teacher] = counts
            if len(self._gone) > _MOST_GONE:
                del self._gone[next(iter(self._gone))]

    def teacher(self, teacher: str) -> _Counts:
        """Return the counts of a teacher, for writing.

        If it left before its last request ended, these are the sums of departed teachers.
        """
        return self._present.get(teacher, self._departed)

    def stats(self, dispatcher: Dispatcher, state_of: Callable[[str], tuple[str, str]], stale: str) -> ReaderStats:
        """Return all counters and the dispatcher's gauges; `stale` says what is wrong with discovery."""
        with self._lock:
            teachers = {name: _seen(counts) for name, counts in self._gone.items()}
            present, departed = self._present.copy(), _seen(self._departed)
        for name, counts in present.items():
            state = dispatcher.teachers.get(name)
            status, why = state_of(name)
            teachers[name] = TeacherStats(
                endpoint=counts.endpoint,
                state=status if status != "gone" else "draining",  # it is about to be removed
                why=why,
                rows=counts.rows,
                requests=counts.requests,
                failures=counts.failures,
                in_flight=len(state.in_flight) if state else 0,
                window=state.window.size if state else 0,
                median_s=(state.window.median_s or 0.0) if state else 0.0,
            )
        return ReaderStats(
            rows_asked=self.asked,
            rows_received=self.received,
            rows_resent=self.resent,
            rows_hedged=self.hedged,
            requests_hedged=dispatcher.hedged,
            set_aside={kind.value: count for kind, count in dispatcher.pauses.copy().items()},
            teachers_live=dispatcher.count_serving(time.monotonic()),
            teachers=teachers,
            departed=departed,
            discovery=stale,
        )


def _seen(counts: _Counts) -> TeacherStats:
    return TeacherStats(counts.endpoint, "gone", "", counts.rows, counts.requests, counts.failures)


_REMIND_S = 10.0
"""Pause between two warnings of an outage: often enough for a person who watches, and only six log lines a minute."""
_SILENT_S = 5.0
"""How long live teachers may be silent before a warning: longer than most models need for a batch."""


@dataclass(frozen=True)
class OutageStatus:
    """State of open work during an outage."""

    expired: bool  # whether the work has waited too long and fails
    check_at: float  # when to check again, in seconds
    message: str = ""  # text about the wait for a live teacher; empty if there is nothing new to report
    # seconds for which live teachers have not answered; 0 if that is not worth a warning or was reported
    silent_s: float = 0.0


class Outage:
    """Tracks how long there have been no teachers or no answers. Every method takes the time `now` in seconds."""

    def __init__(self, timeout_s: float, request_timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._request_timeout_s = request_timeout_s
        self._outage_since: float | None = None
        self._reminded_at = 0.0
        self._progress_at = 0.0
        self._longest_silence_s = 0.0  # longest silence of live teachers that ended with an answer, so it is normal
        self._silence_reported = self._had_outage = False

    def start_work(self, now: float) -> None:
        """Start the clock, because there is work again."""
        self._progress_at = now
        self._outage_since = None
        self._silence_reported = self._had_outage = False

    def record_answer(self, now: float) -> None:
        """Note that an answer arrived."""
        if not self._had_outage:
            self._longest_silence_s = max(self._longest_silence_s, now - self._progress_at)
        self._progress_at = now
        self._silence_reported = self._had_outage = False

    def finish_work(self) -> None:
        """Stop the clock: all work is done."""
        self._outage_since = None

    def check(self, now: float, live: int) -> OutageStatus:
        """Return the state of open work."""
        stuck_at = self._progress_at + self._timeout_s + self._request_timeout_s
        if live:
            self._outage_since = None
            silent_at = self._progress_at + max(_SILENT_S, 2 * self._longest_silence_s)
            if self._silence_reported or now < silent_at:
                return OutageStatus(now >= stuck_at, stuck_at if self._silence_reported else min(silent_at, stuck_at))
            self._silence_reported = True
            return OutageStatus(now >= stuck_at, stuck_at, silent_s=now - self._progress_at)
        self._had_outage = True
        message = ""
        if self._outage_since is None:
            self._outage_since = self._reminded_at = now
            message = f": waiting up to {self._timeout_s:g} s"
        given_up_at = min(self._outage_since + self._timeout_s, stuck_at)
        if now >= given_up_at:
            return OutageStatus(True, given_up_at, message)
        if now >= self._reminded_at + _REMIND_S:
            self._reminded_at = now
            message = f" since {now - self._outage_since:.0f} s"
        return OutageStatus(False, min(given_up_at, self._reminded_at + _REMIND_S), message)
