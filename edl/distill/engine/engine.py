"""`Engine`, which runs the requests of a service on the event loop, as the dispatcher decides.

Methods of `Engine` below "Any thread" may be called from anywhere; the rest runs on the loop. The set of teachers is in
`connection`, decisions are in `edl.distill.dispatch`, and the data source and the order of delivery in
`edl.distill.pipeline`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from edl.discovery.registry import Instance, Snapshot
from edl.distill.dispatch.actions import Action, Deliver, FailureKind, GiveUp, RequestFailure, Send
from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.engine.compatibility import TeacherCompatibility
from edl.distill.engine.connection import ConnectionPool, TeacherConnection
from edl.distill.engine.event_loop import EventLoopThread
from edl.distill.engine.jobs import (
    EngineCounters,
    JobQueue,
    LabelJob,
    Outage,
    ServiceLimits,
    give_up_error,
)
from edl.distill.options import Options
from edl.distill.stats import ReaderStats
from edl.distill.transport.schema import ModelSpec, Outputs, OutputSpec, Reply
from edl.distill.transport.shm import Arena
from edl.errors import EDLError, NoTeacherError, SettingsError
from edl.notifier import Notifier
from edl.protocol.tensors import Array
from edl.protocol.tls.credentials import CredentialFiles

logger = logging.getLogger("edl.distill")

_POLL_EVERY_S = 0.002
"""Shortest interval between checks of deadlines and gauges, because under load each costs more than a request."""
_REFRESH_TIMEOUT_S = 1.0
"""How long the start of an epoch waits for the teachers' versions. A live teacher answers within milliseconds."""


class Engine:
    """Sends the requests of one service to its teachers.

    Args:
        arena: The reader's shared memory; None to use none.
        files: Certificates and tokens; None for neither.
    """

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
        self.output_spec = output_spec
        self._thread = thread
        self._arena = arena
        self._options = options
        self._timeout_s = options.teacher_timeout_s
        self._files = files
        self._dispatcher = Dispatcher(options.policy)
        self._compatibility = TeacherCompatibility(name, output_spec, options.mixed_versions)
        self._pool = ConnectionPool(name, self._dispatcher, self._connect, self._connection_dropped, self._spawn)
        self._jobs: dict[int, LabelJob] = {}
        self._spec_known = Notifier()
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempts: dict[int, Callable[[], object]] = {}  # functions that cancel them
        self._timer: asyncio.TimerHandle | None = None
        self._polled_at = 0.0
        self._job_queue = JobQueue(thread, self, self._submit)
        self._outage = Outage(options.teacher_timeout_s, options.policy.request_timeout_s)
        self._counters = EngineCounters()
        self._closed = False
        self.limits = ServiceLimits()  # Limits of the live teachers. Replaced on the loop, read in any thread.
        # Number of jobs that no longer wait for their first send: sent, cancelled or failed. Counted on the loop, read
        # in any thread. Not part of `limits`, which would otherwise be replaced for each request.
        self.dispatched = 0

    # Any thread

    @property
    def wants_arena(self) -> bool:
        """Whether a teacher on this host reads shared memory."""
        return any(connection.shares_memory for connection in list(self._pool.connections.values()))

    def submit(self, job: LabelJob) -> None:
        """Ask for a job's labels. Jobs are numbered in the order of delivery."""
        self._job_queue.put(job)

    @property
    def full(self) -> bool:
        """Whether no teacher can take more requests and an answer is pending."""
        return self._dispatcher.full and bool(self._attempts)

    def await_spec(self, timeout_s: float) -> ModelSpec | None:
        """Wait for the first teacher, and return its model; None if there is none within `timeout_s`."""
        self._spec_known.wait_for(lambda: self._compatibility.spec is not None, timeout_s)
        return self._compatibility.spec

    def check_cacheable(self, fields: Mapping[str, Array]) -> None:
        """Check that cached labels fit; see `TeacherCompatibility.check_cacheable`. From a single thread at a time."""
        self._compatibility.check_cacheable(fields)

    @property
    def weights_versions(self) -> Collection[str]:
        """The versions that teachers have so far declared to be hashes of the weights; grows while the engine runs."""
        return self._compatibility.weights_versions

    @property
    def is_unversioned(self) -> bool:
        """Whether neither the model's metadata nor an answer has named a version."""
        return self._compatibility.is_unversioned

    @property
    def tokenizer(self) -> str:
        """The hash of the teachers' tokenizer; empty until a teacher or its registration reports it."""
        return self._compatibility.tokenizer

    def select_version(self) -> None:
        """Ask the teachers, before an epoch whose labels are cached, which version of the model they have.

        Takes milliseconds if the teachers answer, and about a second otherwise.
        """
        if self._compatibility.spec is not None:
            with contextlib.suppress(TimeoutError):  # then the version stays for this epoch
                self._thread.run(self._follow_version(), 2 * _REFRESH_TIMEOUT_S)

    @property
    def awaits_teachers(self) -> bool:
        """Whether a teacher is being connected to for the first time."""
        return any(connection.spec is None for connection in list(self._pool.connections.values()))

    def wait_changed(self, timeout_s: float) -> None:
        """Wait until the teachers' limits change, as when one connects, or `timeout_s` have passed."""
        before = self.limits
        self._spec_known.wait_for(lambda: self.limits != before, timeout_s)

    def lacking(self) -> SettingsError | None:
        """Return the error if all teachers lack what is asked for; None while a suitable teacher may still appear.

        Once a teacher has been used, there is no error: it proves that such teachers exist, so students wait for
        others.
        """
        found = self._pool.lacking() if self._compatibility.spec is None else ""
        if not found:
            return None
        return SettingsError(f"no teacher of {self.name} has what is asked for, and none is on its way ({found})")

    def describe_teachers(self) -> str:
        """Describe all teachers, for messages."""
        return self._pool.describe()

    def no_teacher(self, oversized_rows: int = 0, oversized_sequence: int = 0) -> NoTeacherError:
        """Return the error for a wait that has reached its deadline, with the state of all teachers.

        Args:
            oversized_rows: Rows of a request that is too large for the live teachers; 0 without such a request.
            oversized_sequence: Rows of a sequence in it that is too long for them; 0 without one.
        """
        limits = self.limits
        if oversized_sequence:
            return NoTeacherError(
                f"no live teacher for {self.name} took a sequence of {oversized_sequence} tokens within "
                f"{self._timeout_s:g} s ({self._pool.describe()}): start a teacher that takes it again (edl serve "
                "--max-tokens), or cut sequences in your source"
            )
        if oversized_rows and (not limits.max_rows or oversized_rows <= limits.max_rows):
            nbytes = max((job.payload.nbytes for job in self._jobs.values()), default=0)
            return NoTeacherError(
                f"no live teacher for {self.name} took a request of {oversized_rows} rows with {nbytes:,} bytes within "
                f"{self._timeout_s:g} s, and {limits.max_nbytes:,} bytes are what all of them take: set batch_rows "
                "(set_teacher_batch_size) to fewer rows, or leave it out; a teacher says what it takes (edl serve "
                "--max-message), for others it is Options(max_request_bytes=...)"
            )
        if oversized_rows:
            return NoTeacherError(
                f"no live teacher for {self.name} took a request of {oversized_rows} rows within "
                f"{self._timeout_s:g} s, and {limits.max_rows} rows are what all of them take: set "
                "batch_rows (set_teacher_batch_size) to that or less, or leave it out"
            )
        found = self._pool.describe()
        return NoTeacherError(f"no live teacher for {self.name} within {self._timeout_s:g} s ({found})")

    @property
    def rows_asked(self) -> int:
        """Number of rows asked for so far."""
        return self._counters.asked

    def stats(self) -> ReaderStats:
        """Return counters and gauges of this service."""
        return self._counters.stats(self._dispatcher, self._pool.teacher_state, self._pool.stale)

    # On the loop

    def set_teachers(self, snapshot: Snapshot, near: str = "", whole: bool = True) -> None:
        """Connect to new teachers, and retire those that left; `TeacherWatcher` describes the arguments."""
        if not self._closed:
            self._pool.apply_snapshot(snapshot, near, whole)
            self._set_timer()

    def begin_epoch(self) -> None:
        """Start an epoch; see `TeacherCompatibility.begin_epoch`."""
        self._compatibility.begin_epoch()

    def send_until(self, last: float) -> None:
        """Send only jobs up to the number `last`; others that are under way are taken back, and sent again later."""
        if last == self._dispatcher.last:
            return
        was_idle = self._is_idle
        for attempt in self._dispatcher.send_until(last):
            if attempt in self._attempts:
                self._attempts[attempt]()
        if was_idle:
            self._outage.start_work(self._now())
        self._apply(self._dispatcher.tick(self._now()))

    @property
    def _is_idle(self) -> bool:
        """Whether there is no job that may be sent. Jobs were added in the order of their numbers."""
        return not self._jobs or next(iter(self._jobs)) > self._dispatcher.last

    def _submit(self, job: LabelJob) -> None:
        if self._closed:
            job.on_done(NoTeacherError("the reader is closed"), "")
            return
        if not self._jobs:
            self._outage.start_work(self._now())
        self._jobs[job.number] = job
        self._counters.asked += job.payload.rows
        payload = job.payload
        self._apply(
            self._dispatcher.add_task(job.number, self._now(), payload.rows, payload.nbytes, payload.longest_sequence)
        )

    def set_awaited(self, number: int) -> None:
        """Note that the training loop waits for this job."""
        self._job_queue.drain()
        if number in self._jobs:
            self._apply(self._dispatcher.set_awaited(number, self._now()))

    def cancel(self, numbers: list[int]) -> None:
        """Drop jobs whose labels are no longer wanted."""
        self._job_queue.drain()
        for number in numbers:
            job = self._jobs.pop(number, None)
            if job is not None:
                job.finished = True
                if not job.sent:
                    self.dispatched += 1
                for attempt in self._dispatcher.drop_task(number):
                    if attempt in self._attempts:
                        self._attempts[attempt]()
                self._release(job)
        self._job_queue.drain()
        self._set_timer()

    async def close(self) -> None:
        """End all connections; open jobs are never called back."""
        self._closed = True
        self._job_queue.drain()
        if self._timer is not None:
            self._timer.cancel()
        jobs = list(self._jobs.values())
        self._jobs = {}
        for job in jobs:
            job.finished = True
        await self._pool.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for job in jobs:
            self._release(job)
        self._pool.connections.clear()

    # Teachers

    def _connect(self, instance: Instance) -> TeacherConnection:
        self._counters.add_teacher(instance.id, instance.endpoint)
        return TeacherConnection(
            instance,
            self.output_spec,
            self._options,
            shared_memory=self._arena is not None,
            files=self._files,
            compatibility=self._compatibility,
            on_connected=self._teacher_up,
            on_disconnected=self._teacher_down,
            on_connect_failed=self._teacher_unreachable,
        )

    def _connection_dropped(self, connection: TeacherConnection) -> None:
        self._counters.remove_teacher(connection.instance.id)
        self._compatibility.forget_teacher(connection.instance.id)
        if self._dispatcher.teachers:  # otherwise keep the limits, since the last teacher may come back
            self._update_request_limits()
        self._spawn(connection.close())
        self._set_timer()

    def _teacher_up(self, connection: TeacherConnection) -> None:
        if not self._pool.is_current(connection):
            return
        logger.info("teacher %s of %s is ready", connection.instance.id, self.name)
        if self._compatibility.spec is None:
            self._compatibility.spec = connection.spec
        spec = connection.spec
        limits = (spec.max_rows, spec.max_nbytes, spec.max_in_flight, spec.max_sequence) if spec is not None else ()
        actions = self._dispatcher.teacher_up(connection.instance.id, self._now(), *limits)
        self._update_request_limits()
        self._spec_known.notify()
        self._apply(actions)
        self._job_queue.drain()

    def _update_request_limits(self) -> None:
        dispatcher = self._dispatcher
        self.limits = replace(
            self.limits,
            max_rows=dispatcher.max_rows,
            max_nbytes=dispatcher.max_nbytes,
            max_sequence=dispatcher.max_sequence,
        )

    def _teacher_unreachable(self, connection: TeacherConnection) -> None:
        if self._pool.connections.get(connection.instance.id) is connection:
            self._apply(self._dispatcher.teacher_unreachable(connection.instance.id, self._now()))

    def _teacher_down(self, connection: TeacherConnection) -> None:
        self._compatibility.forget_teacher(connection.instance.id)
        self._pool.connection_lost(connection)
        self._set_timer()

    async def _follow_version(self) -> None:
        pool = self._pool
        self._compatibility.selecting_version = True
        try:
            looks = [
                self._spawn(connection.refresh())
                for connection in pool.connections.values()
                if pool.is_current(connection)
            ]
            if looks:
                _, late = await asyncio.wait(looks, timeout=_REFRESH_TIMEOUT_S)
                for look in late:
                    look.cancel()
        finally:
            self._compatibility.selecting_version = False
        wanted = [
            connection.spec or connection.changed_spec
            for connection in pool.connections.values()
            if pool.is_current(connection)
        ]
        self._compatibility.select_version([spec for spec in wanted if spec is not None])
        for connection in list(pool.connections.values()):
            if connection.spec is not None and self._compatibility.refuses_version(connection.spec.version):
                connection.reconnect("another version of the model is followed")  # and is refused then, with words

    # Requests

    def _apply(self, actions: list[Action]) -> None:
        if self._closed:
            return
        for action in actions:
            if isinstance(action, Send):
                job = self._jobs[action.task]
                if not job.sent:
                    job.sent = True
                    self.dispatched += 1
                    job.on_started()
                job.open_attempts += 1
                if action.extra:
                    self._counters.hedged += job.payload.rows
                self._attempts[action.attempt] = self._start(action, job)
            elif isinstance(action, GiveUp):
                job = self._jobs.pop(action.task)
                self._finish(job, give_up_error(action), "")
        self._set_timer()

    def _start(self, send: Send, job: LabelJob) -> Callable[[], object]:
        """Send a request; return what cancels it."""
        ended = functools.partial(self._attempt_ended, send, job)
        connection = self._pool.connections.get(send.teacher)
        cancel = connection.start(job.payload, send.timeout_s, ended) if connection is not None else None
        if cancel is not None:
            return cancel
        left = RequestFailure(FailureKind.LOST, f"teacher {send.teacher} left")
        self._thread.loop.call_soon(ended, left)
        return lambda: None

    def _attempt_ended(self, send: Send, job: LabelJob, result: Reply | RequestFailure | None) -> None:
        """Handle the end of an attempt: a reply, a failure, or None if it was cancelled."""
        actions: list[Action] = []
        self._attempts.pop(send.attempt, None)
        try:
            if isinstance(result, Reply):
                compatibility = self._compatibility
                failure = compatibility.check_version(send.teacher, result.version)
                failure = failure or compatibility.check_output(send.teacher, job.payload.inputs, result.outputs)
                result = failure or result
            if isinstance(result, RequestFailure):
                actions = self._record_failure(send, job, result)
            elif result is not None:
                actions = self._record_answer(send, job, result)
        finally:
            job.open_attempts -= 1
            self._release(job)
        self._apply(actions)
        self._pool.end_if_idle(send.teacher)
        self._job_queue.drain()

    def _record_failure(self, send: Send, job: LabelJob, failure: RequestFailure) -> list[Action]:
        self._counters.teacher(send.teacher).failures += 1
        resent = self._dispatcher.resent
        actions = self._dispatcher.attempt_failed(send.attempt, failure, self._now())
        self._counters.resent += (self._dispatcher.resent - resent) * job.payload.rows
        if failure.kind is FailureKind.BAD_OUTPUT:
            logger.warning("teacher %s of %s is set aside: %s", send.teacher, self.name, failure.message)
        elif failure.kind not in (FailureKind.LOST, FailureKind.OVERLOADED):
            logger.warning("teacher %s of %s, %s: %s", send.teacher, self.name, failure.kind.value, failure.message)
        return actions

    def _record_answer(self, send: Send, job: LabelJob, reply: Reply) -> list[Action]:
        counts = self._counters.teacher(send.teacher)
        counts.requests += 1
        actions = self._dispatcher.attempt_answered(send.attempt, self._now())
        if any(isinstance(action, Deliver) for action in actions) and not self._closed:
            self._outage.record_answer(self._now())
            counts.rows += job.payload.rows
            self._counters.received += job.payload.rows
            del self._jobs[job.number]
            self._finish(job, reply.outputs, reply.version)
        return actions

    def _finish(self, job: LabelJob, result: Outputs | EDLError, version: str) -> None:
        job.finished = True
        if not job.sent:
            self.dispatched += 1
        job.on_done(result, version)
        self._release(job)

    def _release(self, job: LabelJob) -> None:
        """Return the job's slot of shared memory once no request reads it."""
        if job.finished and not job.open_attempts:
            slot = job.payload.slot
            job.payload.slot = None
            if slot is not None and self._arena is not None:
                self._arena.give(slot)

    # Time

    def _set_timer(self) -> None:
        """Schedule the dispatcher's next event. Under load, its time is computed only every few milliseconds."""
        if self._closed:
            return
        now = self._now()
        if self._timer is not None and self._timer.when() <= now + _POLL_EVERY_S:
            return
        due: float | None = now + _POLL_EVERY_S
        if now >= self._polled_at + _POLL_EVERY_S:
            self._polled_at = now
            if self._dispatcher.capacity != self.limits.capacity:
                self.limits = replace(self.limits, capacity=self._dispatcher.capacity)
            due, outage_check_at = self._dispatcher.next_event(now), self._check_outage(now)
            due = outage_check_at if due is None else due if outage_check_at is None else min(due, outage_check_at)
        if due is not None and (self._timer is None or due < self._timer.when() - 0.001):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._thread.loop.call_at(max(due, now + 0.001), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._polled_at = 0.0
        self._apply(self._dispatcher.tick(self._now()))
        self._job_queue.drain()

    def _check_outage(self, now: float) -> float | None:
        """Track how long there have been no teachers or answers, and fail all open jobs when it is too long."""
        if self._is_idle:
            self._outage.finish_work()
            return None
        oversized_rows = self._dispatcher.oversized_rows(now)
        status = self._outage.check(now, self._dispatcher.count_serving(now) if not oversized_rows else 0)
        if status.message:
            which = f" takes a request of {oversized_rows} rows" if oversized_rows else ""
            logger.warning("no live teacher for %s%s%s", self.name, which, status.message)
        if status.silent_s:
            logger.warning("no teacher of %s has answered for %.0f s: still waiting", self.name, status.silent_s)
        if status.expired:
            self._fail_all(self.no_teacher(oversized_rows, self._dispatcher.oversized_sequence(now)))
            return None
        return status.check_at

    def _fail_all(self, error: NoTeacherError) -> None:
        self._outage.finish_work()
        jobs = self._jobs
        self._jobs = {}
        for number, job in jobs.items():
            self._dispatcher.drop_task(number)
            self._finish(job, error, "")

    def _now(self) -> float:
        return self._thread.loop.time()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._thread.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a bug in the engine of %s", self.name, exc_info=task.exception())
