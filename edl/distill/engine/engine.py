"""`Engine`, which runs the requests of a service on the event loop, as the dispatcher decides.

The feeding thread submits jobs; `Engine` sends them to teachers, and calls each job's callback once. Methods below the
comment "Any thread" may be called from any thread; all other methods run on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from edl.discovery import Snapshot
from edl.distill.dispatch.actions import (
    Action,
    Deliver,
    FailureKind,
    GiveUp,
    RequestFailure,
    Send,
)
from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.engine.connection import ConnectionPool
from edl.distill.engine.event_loop import EventLoopThread
from edl.distill.options import Options
from edl.distill.stats import ReaderStats
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import ModelSpec, Outputs, OutputSpec, Reply
from edl.distill.transport.shm import Arena
from edl.errors import BadOutputError, EDLError, NoTeacherError, RejectedError, SettingsError
from edl.protocol.tls import CredentialFiles

logger = logging.getLogger("edl.distill")

_POLL_EVERY_S = 0.002  # between checks of deadlines and gauges; under load a check costs more than a request
_REFRESH_TIMEOUT_S = 1.0  # of asking for versions before an epoch; a live teacher answers within milliseconds
_REMIND_S = 10.0  # between two outage warnings: six log lines a minute
_SILENT_S = 5.0  # silence of live teachers before a warning: longer than most models need for a batch


@dataclass(eq=False)
class LabelJob:
    """The rows of one request to one service."""

    number: int  # ascending in the order of delivery
    payload: Payload
    # Called on the loop, once, with the outputs or an error, and the model's version
    on_done: Callable[[Outputs | EDLError, str], None]
    on_started: Callable[[], None]  # Called on the loop when the job is sent for the first time
    open_attempts: int = 0  # number of the job's pending requests
    dispatched: bool = False  # whether it no longer waits for its first send: sent, cancelled or failed
    finished: bool = False  # whether `on_done` was called, or never will be


class Engine:
    """Sends requests to the teachers of one service, in shared memory if there is an arena."""

    def __init__(
        self,
        name: str,
        output_spec: OutputSpec,
        options: Options,
        *,
        thread: EventLoopThread,
        arena: Arena | None,
        files: CredentialFiles | None = None,
    ) -> None:
        self.name = name
        self._thread = thread
        self._arena = arena
        self._timeout_s = options.teacher_timeout_s
        self._request_timeout_s = options.policy.request_timeout_s
        self._dispatcher = Dispatcher(options.policy)
        self.pool = ConnectionPool(
            name,
            output_spec,
            options,
            self._dispatcher,
            changed=self._teachers_changed,
            shared_memory=arena is not None,
            files=files,
        )
        self.compatibility = self.pool.compatibility  # the teachers' common properties
        self._submitted: deque[LabelJob] = deque()  # jobs not yet taken by the loop
        self._woken = False
        self._jobs: dict[int, LabelJob] = {}
        self._attempts: dict[Send, Callable[[], object]] = {}  # functions that cancel them
        self._timer: asyncio.TimerHandle | None = None
        self._polled_at = 0.0
        self._outage = Outage(options.teacher_timeout_s, options.policy.request_timeout_s)
        self._closed = False
        # Counted on the loop, read in any thread: rows by outcome, and jobs that no longer wait for their first send
        # because they were sent, cancelled or failed
        self.rows_asked = self._rows_received = self._rows_resent = self._rows_hedged = self.dispatched = 0
        self.capacity = 0  # requests that all teachers together can have in flight, as of some milliseconds ago

    # Any thread

    def submit(self, job: LabelJob) -> None:
        """Request a job's labels, from the feeding thread. Jobs are numbered in the order of delivery."""
        self._submitted.append(job)
        # The loop checks for jobs after each event that may free a teacher, so neither side misses the other.
        if not self._woken and not self.full:
            self._woken = True
            self._thread.call(self._wake)

    @property
    def full(self) -> bool:
        """Whether no teacher can take more requests and an answer is pending."""
        return self._dispatcher.full and bool(self._attempts)

    @property
    def wants_arena(self) -> bool:
        """Whether a teacher on this host reads shared memory."""
        return any(connection.shares_memory for connection in list(self.pool.connections.values()))

    def await_spec(self, timeout_s: float) -> ModelSpec | None:
        """Wait for the first teacher, and return its model; None if no teacher appears within `timeout_s`."""
        self.pool.news.wait_for(lambda: self.compatibility.spec is not None, timeout_s)
        return self.compatibility.spec

    def select_version(self) -> None:
        """Ask teachers for their model's version before an epoch. If none answers, this takes about a second."""
        if self.compatibility.spec is not None:
            with contextlib.suppress(TimeoutError):  # then the version stays for this epoch
                self._thread.run(self.pool.follow_version(_REFRESH_TIMEOUT_S), 2 * _REFRESH_TIMEOUT_S)

    @property
    def awaits_teachers(self) -> bool:
        """Whether any known teacher is not connected."""
        return any(connection.spec is None for connection in list(self.pool.connections.values()))

    def wait_changed(self, timeout_s: float) -> None:
        """Wait until a newly connected teacher changes the limits, or `timeout_s` have passed."""
        before = self.pool.limits
        self.pool.news.wait_for(lambda: self.pool.limits != before, timeout_s)

    def lacking(self) -> SettingsError | None:
        """Return the error if no teacher can serve the request; None while a suitable teacher may still appear."""
        found = self.pool.lacking()
        if not found:
            return None
        return SettingsError(f"no teacher of {self.name} can serve this request, and none is starting ({found})")

    def no_teacher(self, oversized_rows: int = 0, oversized_sequence: int = 0) -> NoTeacherError:
        """Return the error for an expired wait, or for a request or sequence too large for the live teachers."""
        limits, waited, found = self.pool.limits, f"within {self._timeout_s:g} s", self.pool.describe()
        if not oversized_rows:
            return NoTeacherError(f"no live teacher for {self.name} within {self._timeout_s:g} s ({found})")
        if oversized_sequence:
            what = (
                f"a sequence of {oversized_sequence} tokens {waited} ({found}): restart a teacher with a "
                "larger limit (edl serve --max-tokens), or cut sequences in your source"
            )
        elif not limits.max_rows or oversized_rows <= limits.max_rows:
            nbytes = max((job.payload.nbytes for job in self._jobs.values()), default=0)
            what = (
                f"a request of {oversized_rows} rows with {nbytes:,} bytes {waited}; every teacher accepts up to "
                f"{limits.max_nbytes:,} bytes: set batch_rows (set_teacher_batch_size) to fewer rows, or omit it; an "
                "EDL teacher reports its limit (edl serve --max-message); for other teachers, the limit is "
                "Options(max_request_bytes=...)"
            )
        else:
            what = (
                f"a request of {oversized_rows} rows {waited}; every teacher accepts up to {limits.max_rows} rows: "
                "set batch_rows (set_teacher_batch_size) to that number or less, or omit it"
            )
        return NoTeacherError(f"no live teacher for {self.name} accepted {what}")

    def stats(self) -> ReaderStats:
        """Return counters and gauges of this service."""
        teachers, departed = self.pool.teacher_stats()
        return ReaderStats(
            rows_asked=self.rows_asked,
            rows_received=self._rows_received,
            rows_resent=self._rows_resent,
            rows_hedged=self._rows_hedged,
            requests_hedged=self._dispatcher.hedged,
            set_aside={kind.value: count for kind, count in self._dispatcher.pauses.copy().items()},
            teachers_live=self._dispatcher.count_serving(self._now()),
            teachers=teachers,
            departed=departed,
            discovery=self.pool.stale,
        )

    # On the loop

    def set_teachers(self, snapshot: Snapshot, near: str = "", whole: bool = True) -> None:
        """Connect to new teachers; retire those that left. `TeacherWatcher` describes the arguments."""
        if not self._closed:
            self.pool.apply_snapshot(snapshot, near, whole)
            self._set_timer()

    def _teachers_changed(self, actions: list[Action]) -> None:
        self._apply(actions)
        self._take_jobs()

    def send_until(self, last: float) -> None:
        """Send only jobs up to number `last`; other pending jobs are cancelled, and sent again later."""
        if last == self._dispatcher.last:
            return
        was_idle = self._is_idle
        self._cancel_attempts(self._dispatcher.send_until(last))
        if was_idle:
            self._outage.start_work(self._now())
        self._apply(self._dispatcher.tick(self._now()))

    def set_awaited(self, number: int) -> None:
        """Record that the training loop waits for this job."""
        self._take_jobs()
        if number in self._jobs:
            self._apply(self._dispatcher.set_awaited(number, self._now()))

    def cancel(self, numbers: list[int]) -> None:
        """Drop jobs whose labels are no longer needed."""
        self._take_jobs()
        for number in numbers:
            job = self._jobs.pop(number, None)
            if job is not None:
                self._cancel_attempts(self._dispatcher.drop_task(number))
                self._end(job)
        self._take_jobs()
        self._set_timer()

    async def close(self) -> None:
        """End all connections; open jobs are never called back."""
        self._closed = True
        self._take_jobs()
        if self._timer is not None:
            self._timer.cancel()
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.finished = True
        await self.pool.close()
        for job in jobs.values():
            self._release(job)

    # Requests

    @property
    def _is_idle(self) -> bool:
        """Return whether no job may be sent now. This relies on jobs being added in the order of their numbers."""
        return not self._jobs or next(iter(self._jobs)) > self._dispatcher.last

    def _wake(self) -> None:
        self._woken = False
        self._take_jobs()

    def _take_jobs(self) -> None:
        while self._submitted:
            job = self._submitted.popleft()
            if self._closed:
                job.on_done(NoTeacherError("the reader is closed"), "")
                continue
            now, payload = self._now(), job.payload
            if not self._jobs:
                self._outage.start_work(now)
            self._jobs[job.number] = job
            self.rows_asked += payload.rows
            self._apply(
                self._dispatcher.add_task(job.number, now, payload.rows, payload.nbytes, payload.longest_sequence)
            )

    def _apply(self, actions: list[Action]) -> None:
        if self._closed:
            return
        for action in actions:
            if isinstance(action, Send):
                job = self._jobs[action.task]
                if not job.dispatched:
                    self._mark_dispatched(job)
                    job.on_started()
                job.open_attempts += 1
                if action.extra:
                    self._rows_hedged += job.payload.rows
                self._attempts[action] = self._start(action, job)
            elif isinstance(action, GiveUp):
                self._finish(action.task, _give_up_error(action), "")
        self._set_timer()

    def _start(self, send: Send, job: LabelJob) -> Callable[[], object]:
        ended = functools.partial(self._attempt_ended, send, job)
        connection = self.pool.connections.get(send.teacher)
        cancel = connection.start(job.payload, self._request_timeout_s, ended) if connection is not None else None
        if cancel is not None:
            return cancel
        left = RequestFailure(FailureKind.LOST, f"teacher {send.teacher} left")
        self._thread.loop.call_soon(ended, left)
        return lambda: None

    def _cancel_attempts(self, attempts: list[Send]) -> None:
        for attempt in attempts:
            if attempt in self._attempts:
                self._attempts[attempt]()

    def _attempt_ended(self, send: Send, job: LabelJob, result: Reply | RequestFailure | None) -> None:
        """Handle the end of an attempt: a reply, a failure, or None if the attempt was cancelled."""
        actions: list[Action] = []
        self._attempts.pop(send, None)
        try:
            if isinstance(result, Reply):
                result = self.compatibility.check_reply(send.teacher, job.payload.inputs, result) or result
            if isinstance(result, RequestFailure):
                actions = self._record_failure(send, job, result)
            elif result is not None:
                actions = self._record_answer(send, job, result)
        finally:
            job.open_attempts -= 1
            self._release(job)
        self._apply(actions)
        self.pool.end_if_idle(send.teacher)
        self._take_jobs()

    def _record_failure(self, send: Send, job: LabelJob, failure: RequestFailure) -> list[Action]:
        self.pool.counts_of(send.teacher)["failures"] += 1
        resent = self._dispatcher.resent
        actions = self._dispatcher.attempt_failed(send, failure, self._now())
        self._rows_resent += (self._dispatcher.resent - resent) * job.payload.rows
        if failure.kind is FailureKind.BAD_OUTPUT:
            logger.warning("teacher %s of %s is set aside: %s", send.teacher, self.name, failure.message)
        elif failure.kind not in (FailureKind.LOST, FailureKind.OVERLOADED):
            logger.warning("teacher %s of %s, %s: %s", send.teacher, self.name, failure.kind.value, failure.message)
        return actions

    def _record_answer(self, send: Send, job: LabelJob, reply: Reply) -> list[Action]:
        counts = self.pool.counts_of(send.teacher)
        counts["requests"] += 1
        actions = self._dispatcher.attempt_answered(send, self._now())
        if any(isinstance(action, Deliver) for action in actions) and not self._closed:
            self._outage.record_answer(self._now())
            counts["rows"] += job.payload.rows
            self._rows_received += job.payload.rows
            self._finish(job.number, reply.outputs, reply.version)
        return actions

    def _finish(self, number: int, result: Outputs | EDLError, version: str) -> None:
        job = self._jobs.pop(number)
        self._end(job)
        job.on_done(result, version)

    def _end(self, job: LabelJob) -> None:
        self._mark_dispatched(job)
        job.finished = True
        self._release(job)

    def _mark_dispatched(self, job: LabelJob) -> None:
        if not job.dispatched:
            job.dispatched = True
            self.dispatched += 1

    def _release(self, job: LabelJob) -> None:
        if job.finished and not job.open_attempts:
            slot = job.payload.slot
            job.payload.slot = None
            if slot is not None and self._arena is not None:
                self._arena.give(slot)

    # Time

    def _set_timer(self) -> None:
        """Schedule the dispatcher's next event. Under load, compute its time only every few milliseconds."""
        if self._closed:
            return
        now = self._now()
        if self._timer is not None and self._timer.when() <= now + _POLL_EVERY_S:
            return
        due: float | None = now + _POLL_EVERY_S
        if now >= self._polled_at + _POLL_EVERY_S:
            self._polled_at = now
            self.capacity = self._dispatcher.capacity
            dues = (self._dispatcher.next_event(now), self._check_outage(now))
            due = min((each for each in dues if each is not None), default=None)
        if due is not None and (self._timer is None or due < self._timer.when() - 0.001):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._thread.loop.call_at(max(due, now + 0.001), self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        self._polled_at = 0.0
        self._apply(self._dispatcher.tick(self._now()))
        self._take_jobs()

    def _check_outage(self, now: float) -> float | None:
        """Track how long there have been no teachers or answers; fail all open jobs if that lasts too long."""
        if self._is_idle:
            self._outage.finish_work()
            return None
        rows, sequence = self._dispatcher.oversized(now)
        status = self._outage.check(now, 0 if rows else self._dispatcher.count_serving(now))
        if status.message:
            which = f" takes a request of {rows} rows" if rows else ""
            logger.warning("no live teacher for %s%s%s", self.name, which, status.message)
        if status.silent_s:
            logger.warning("no teacher of %s has answered for %.0f s: still waiting", self.name, status.silent_s)
        if not status.expired:
            return status.check_at
        error = self.no_teacher(rows, sequence)
        self._outage.finish_work()
        for number in list(self._jobs):
            self._dispatcher.drop_task(number)
            self._finish(number, error, "")
        return None

    def _now(self) -> float:
        return self._thread.loop.time()


def _give_up_error(action: GiveUp) -> RejectedError | BadOutputError:
    words = "; ".join(f"{teacher}: {failure.kind.value}: {failure.message}" for teacher, failure in action.failures)
    if any(failure.kind is FailureKind.REJECTED for _, failure in action.failures):
        return RejectedError(f"teachers refuse a request: {words}")
    return BadOutputError(f"no teacher could label a request: {words}")


class OutageStatus(NamedTuple):
    """State of open work during an outage."""

    expired: bool  # whether the work has waited too long and fails
    check_at: float  # when to check again, in seconds
    message: str = ""  # to log about the wait for a live teacher; empty if nothing is due
    silent_s: float = 0.0  # seconds that live teachers have not answered, to log; 0 if nothing is due


class Outage:
    """Tracks how long there have been no teachers or no answers. Every method takes the time `now` in seconds."""

    def __init__(self, timeout_s: float, request_timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._request_timeout_s = request_timeout_s
        self._outage_since: float | None = None
        self._reminded_at = 0.0
        self._progress_at = 0.0
        self._longest_silence_s = 0.0  # longest silence of live teachers that ended with an answer, and so is normal
        self._silence_reported = self._had_outage = False

    def start_work(self, now: float) -> None:
        """Start the clock, because there is open work again."""
        self._progress_at = now
        self._outage_since = None
        self._silence_reported = self._had_outage = False

    def record_answer(self, now: float) -> None:
        """Record that an answer arrived."""
        if not self._had_outage:
            self._longest_silence_s = max(self._longest_silence_s, now - self._progress_at)
        self._progress_at = now
        self._silence_reported = self._had_outage = False

    def finish_work(self) -> None:
        """Stop the clock, because no work is open."""
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
            message = f" in the last {now - self._outage_since:.0f} s"
        return OutageStatus(False, min(given_up_at, self._reminded_at + _REMIND_S), message)
