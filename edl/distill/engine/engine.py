"""The teachers of one service at work: carries out what the dispatcher decides, on the reader's event loop.

`Engine` methods marked "any thread" may be called from anywhere; the rest runs on the loop. What does not belong here:
the user's data source, the order of delivery, which teachers are there (`connection_pool`), and decisions, which are
the dispatcher's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal

from edl.discovery.registry import Instance, Snapshot
from edl.distill.dispatch.actions import Action, Deliver, FailureKind, GiveUp, RequestFailure, Send
from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.dispatch.outage import Outage
from edl.distill.dispatch.policy import Policy
from edl.distill.engine.compatibility import TeacherCompatibility
from edl.distill.engine.connection import TeacherConnection
from edl.distill.engine.connection_pool import ConnectionPool
from edl.distill.engine.counters import EngineCounters
from edl.distill.engine.event_loop import EventLoopThread
from edl.distill.engine.job import LabelJob, give_up_error
from edl.distill.engine.job_queue import MOST_GATHERED, JobQueue
from edl.distill.stats import ReaderStats
from edl.distill.transport.client import RequestFailed
from edl.distill.transport.message_limits import MESSAGE_LIMITS, MessageLimits
from edl.distill.transport.schema import ModelSpec, Outputs, OutputSpec, Reply
from edl.distill.transport.shm import Arena
from edl.errors import EDLError, NoTeacherError
from edl.notifier import Notifier
from edl.protocol.tensors import Array
from edl.protocol.tls.credentials import CredentialFiles

__all__ = ["Engine"]

logger = logging.getLogger("edl.distill")

_LOOK_EVERY_S = 0.002
_LOOK_AGAIN_S = 1.0


class Engine:
    """All teachers of one service.

    Args:
        name: for messages: the service, or the fixed endpoints.
        teacher_timeout_s: how long work may wait while no teacher is live.
        files: certificates and tokens, None for neither.
        mixed_versions: see `TeacherCompatibility`.
        limits: of messages.
    """

    def __init__(
        self,
        name: str,
        output_spec: OutputSpec,
        *,
        thread: EventLoopThread,
        arena: Arena | None,
        policy: Policy,
        teacher_timeout_s: float,
        files: CredentialFiles | None = None,
        mixed_versions: Literal["warn", "refuse"] = "warn",
        limits: MessageLimits = MESSAGE_LIMITS,
    ) -> None:
        self.name = name
        self.output_spec = output_spec
        self._thread, self._arena = thread, arena
        self._timeout_s = teacher_timeout_s
        self._files, self._limits = files, limits
        self._dispatcher = Dispatcher(policy)
        self._agreement = TeacherCompatibility(name, output_spec, mixed_versions)
        self._links = ConnectionPool(name, self._dispatcher, self._connect, self._dropped, self._spawn)
        self._jobs: dict[int, LabelJob] = {}
        self._spec_known = Notifier()
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempts: dict[int, Callable[[], object]] = {}  # what cancels each
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at = 0.0
        self._inbox = JobQueue(thread, self, self._submit)
        self._outage = Outage(teacher_timeout_s, policy.request_timeout_s)
        self._tally = EngineCounters()
        self._closed = False
        self.room = 0
        """Requests that all live teachers together want in flight, as of some milliseconds ago."""
        self.gathers = 0
        """Jobs that are better sent together, where all live teachers are quick and on this host; else 0."""
        self.dispatched = 0
        """Jobs that were sent for the first time, or need not be any more. Written on the loop only."""
        self.max_rows = self.max_nbytes = 0
        """What every teacher takes in one request, as of when the last one came or left; 0 if none has a limit."""

    # Any thread

    @property
    def wants_arena(self) -> bool:
        """Whether a teacher on this host reads shared memory."""
        return any(link.shares_memory for link in list(self._links.by_name.values()))

    def submit(self, job: LabelJob) -> None:
        """Ask for a job's labels. Jobs are numbered in the order of delivery."""
        self._inbox.put(job)

    @property
    def full(self) -> bool:
        """Whether no teacher could be given more, and an answer is on its way."""
        return self._dispatcher.full and bool(self._attempts)

    @property
    def busy(self) -> bool:
        """Whether each teacher has something to do, and an answer is on its way."""
        return self._dispatcher.busy and bool(self._attempts)

    def await_spec(self, timeout_s: float) -> ModelSpec | None:
        """What the teachers' model looks like; None while no teacher has told within `timeout_s`."""
        self._spec_known.wait_for(lambda: self._agreement.spec is not None, timeout_s)
        return self._agreement.spec

    def check_cacheable(self, fields: Mapping[str, Array]) -> None:
        """See `TeacherCompatibility.check_cacheable`; from one thread at a time."""
        self._agreement.check_cacheable(fields)

    def follow_version(self) -> None:
        """Before an epoch whose labels are kept: see which version of the model the teachers have by now.

        Takes milliseconds where teachers answer, and a second at most.
        """
        if self._agreement.spec is not None:
            with contextlib.suppress(TimeoutError):  # then the version stays for this epoch
                self._thread.run(self._follow_version(), 2 * _LOOK_AGAIN_S)

    def no_teacher(self, too_large: int = 0) -> NoTeacherError:
        """The error for a wait that was in vain, with what is known of each teacher.

        Args:
            too_large: rows of a request that is larger than what those take that are live; 0 if none is.
        """
        if too_large and (not self.max_rows or too_large <= self.max_rows):
            nbytes = max((job.payload.nbytes for job in self._jobs.values()), default=0)
            return NoTeacherError(
                f"no live teacher for {self.name} took a request of {too_large} rows with {nbytes:,} bytes within "
                f"{self._timeout_s:g} s, and {self.max_nbytes:,} bytes are what all of them take: set batch_rows "
                "(set_teacher_batch_size) to fewer rows, or leave it out; a teacher says what it takes (edl serve "
                "--max-message), for others it is Options(max_request_bytes=...)"
            )
        if too_large:
            return NoTeacherError(
                f"no live teacher for {self.name} took a request of {too_large} rows within {self._timeout_s:g} s, and "
                f"{self.max_rows} rows are what all of them take: set batch_rows (set_teacher_batch_size) to that or "
                "less, or leave it out"
            )
        found = self._links.in_words()
        return NoTeacherError(f"no live teacher for {self.name} within {self._timeout_s:g} s ({found})")

    def stats(self) -> ReaderStats:
        """Counters and gauges of this service."""
        return self._tally.stats(self._dispatcher, self._links.state_of, self._links.stale)

    # On the loop

    def set_teachers(self, snapshot: Snapshot) -> None:
        """The registry's present view."""
        if not self._closed:
            self._links.follow(snapshot)
            self._set_timer()

    def begin_epoch(self) -> None:
        """Nothing is delivered yet that the answers to come must be like."""
        self._agreement.begin_epoch()

    def _submit(self, job: LabelJob) -> None:
        if self._closed:
            job.done(NoTeacherError("the reader is closed"), "")
            return
        if not self._jobs:
            self._outage.begin(self._now())
        self._jobs[job.number] = job
        self._tally.asked += job.payload.rows
        self._apply(self._dispatcher.add(job.number, self._now(), job.payload.rows, job.payload.nbytes))

    def wanted(self, number: int) -> None:
        """The training loop waits for this job."""
        self._inbox.take_in()
        if number in self._jobs:
            self._apply(self._dispatcher.wanted(number, self._now()))

    def cancel(self, numbers: list[int]) -> None:
        """Nobody wants these jobs any more."""
        self._inbox.take_in()
        for number in numbers:
            job = self._jobs.pop(number, None)
            if job is not None:
                job.finished = True
                if not job.sent:
                    self.dispatched += 1
                for attempt in self._dispatcher.drop(number):
                    if attempt in self._attempts:
                        self._attempts[attempt]()
                self._release(job)
        self._inbox.take_in()
        self._set_timer()

    async def close(self) -> None:
        """End all connections; open jobs are never called back."""
        self._closed = True
        self._inbox.take_in()
        if self._timer is not None:
            self._timer.cancel()
        jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.finished = True
        await self._links.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for job in jobs:
            self._release(job)
        self._links.by_name.clear()

    # Teachers

    def _connect(self, instance: Instance) -> TeacherConnection:
        self._tally.begin(instance.id, instance.endpoint)
        return TeacherConnection(
            instance,
            self.output_spec,
            shared_memory=self._arena is not None,
            files=self._files,
            limits=self._limits,
            accept=self._agreement.incompatibility,
            up=self._teacher_up,
            down=self._teacher_down,
            not_up=self._teacher_not_up,
        )

    def _dropped(self, link: TeacherConnection) -> None:
        self._tally.end(link.instance.id)
        self._agreement.left(link.instance.id)
        if self._dispatcher.teachers:  # else the last one may come back, and take no more than before
            self.max_rows, self.max_nbytes = self._dispatcher.max_rows, self._dispatcher.max_nbytes
        self._spawn(link.close())
        self._set_timer()

    def _teacher_up(self, link: TeacherConnection) -> None:
        if not self._links.is_wanted(link):
            return
        logger.info("teacher %s of %s is ready", link.instance.id, self.name)
        if self._agreement.spec is None:
            self._agreement.spec = link.spec
        spec = link.spec
        limits = (spec.max_rows, spec.max_nbytes) if spec is not None else (0, 0)
        actions = self._dispatcher.teacher_up(link.instance.id, self._now(), *limits)
        self.max_rows, self.max_nbytes = self._dispatcher.max_rows, self._dispatcher.max_nbytes
        self._spec_known.notify()
        self._apply(actions)
        self._inbox.take_in()

    def _teacher_not_up(self, link: TeacherConnection) -> None:
        if self._links.by_name.get(link.instance.id) is link:
            self._apply(self._dispatcher.teacher_not_coming(link.instance.id, self._now()))

    def _teacher_down(self, link: TeacherConnection) -> None:
        self._agreement.left(link.instance.id)
        self._links.lost(link)
        self._set_timer()

    async def _follow_version(self) -> None:
        links = self._links
        self._agreement.selecting_version = True
        try:
            looks = [self._spawn(link.look_again()) for link in links.by_name.values() if links.is_wanted(link)]
            if looks:
                _, late = await asyncio.wait(looks, timeout=_LOOK_AGAIN_S)
                for look in late:
                    look.cancel()
        finally:
            self._agreement.selecting_version = False
        wanted = [link.spec or link.changed_spec for link in links.by_name.values() if links.is_wanted(link)]
        self._agreement.follow([spec for spec in wanted if spec is not None])
        for link in list(links.by_name.values()):
            if link.spec is not None and self._agreement.refuses(link.spec.version):
                link.reconnect("another version of the model is followed")  # and is refused then, with words

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
                    job.started()
                job.running += 1
                if action.extra:
                    self._tally.hedged += job.payload.rows
                self._attempts[action.attempt] = self._start(action, job)
            elif isinstance(action, GiveUp):
                job = self._jobs.pop(action.task)
                self._finish(job, give_up_error(action), "")
        self._set_timer()

    def _start(self, send: Send, job: LabelJob) -> Callable[[], object]:
        """Send a request; what cancels it. Most need no task of their own, which spares the loop some of its turns."""
        link = self._links.by_name.get(send.teacher)
        if link is not None and link.spec is not None:
            ended = functools.partial(self._ended, send, job)
            cancel = link.start(job.payload, send.timeout_s, ended)
            if cancel is not None:
                return cancel
        task = self._spawn(self._attempt(send, job, link))
        task.add_done_callback(lambda _: self._never_began(send, job))
        return task.cancel

    def _never_began(self, send: Send, job: LabelJob) -> None:
        """A task that is cancelled before its first step does nothing at all, not even end what it stands for."""
        if send.attempt in self._attempts and not self._closed:
            self._ended(send, job, None)

    async def _attempt(self, send: Send, job: LabelJob, link: TeacherConnection | None) -> None:
        result: Reply | RequestFailure | None = None
        try:
            if link is None or link.spec is None:
                raise RequestFailed(FailureKind.LOST, f"teacher {send.teacher} left")
            result = await link.infer(job.payload, send.timeout_s)
        except RequestFailed as exc:
            result = exc.failure
        except asyncio.CancelledError:
            if self._closed or not self._dispatcher.knows(send.attempt):
                raise  # nobody wants it any more
            # gRPC cancels what is under way on a connection that is closed.
            result = RequestFailure(FailureKind.LOST, f"the connection to {send.teacher} was closed")
        except Exception as exc:
            # Whatever it was, the request has ended, and its task must go elsewhere.
            logger.exception("a request to teacher %s of %s failed in a way not foreseen", send.teacher, self.name)
            result = RequestFailure(FailureKind.ERROR, f"{type(exc).__name__}: {exc}")
        finally:
            self._ended(send, job, result)

    def _ended(self, send: Send, job: LabelJob, result: Reply | RequestFailure | None) -> None:
        """A request has ended: with a reply, a failure, or None where it was cancelled."""
        actions: list[Action] = []
        self._attempts.pop(send.attempt, None)
        try:
            if isinstance(result, Reply):
                agreement = self._agreement
                failure = agreement.check_version(send.teacher, result.version)
                failure = failure or agreement.check_output(send.teacher, job.payload.inputs, result.outputs)
                result = failure or result
            if isinstance(result, RequestFailure):
                actions = self._failed(send, job, result)
            elif result is not None:
                actions = self._answered(send, job, result)
        finally:
            job.running -= 1
            self._release(job)
        self._apply(actions)
        self._links.end_if_idle(send.teacher)
        self._inbox.look()

    def _failed(self, send: Send, job: LabelJob, failure: RequestFailure) -> list[Action]:
        self._tally.of(send.teacher).failures += 1
        resent = self._dispatcher.resent
        actions = self._dispatcher.failed(send.attempt, failure, self._now())
        self._tally.resent += (self._dispatcher.resent - resent) * job.payload.rows
        if failure.kind is FailureKind.BAD_OUTPUT:
            logger.warning("teacher %s of %s is set aside: %s", send.teacher, self.name, failure.message)
        elif failure.kind not in (FailureKind.LOST, FailureKind.OVERLOADED):
            logger.warning("teacher %s of %s, %s: %s", send.teacher, self.name, failure.kind.value, failure.message)
        return actions

    def _answered(self, send: Send, job: LabelJob, reply: Reply) -> list[Action]:
        counts = self._tally.of(send.teacher)
        counts.requests += 1
        actions = self._dispatcher.answered(send.attempt, self._now())
        if any(isinstance(action, Deliver) for action in actions) and not self._closed:
            self._outage.progress(self._now())
            counts.rows += job.payload.rows
            self._tally.received += job.payload.rows
            del self._jobs[job.number]
            self._finish(job, reply.outputs, reply.version)
        return actions

    def _finish(self, job: LabelJob, result: Outputs | EDLError, version: str) -> None:
        job.finished = True
        if not job.sent:
            self.dispatched += 1
        job.done(result, version)
        self._release(job)

    def _release(self, job: LabelJob) -> None:
        """Give the job's memory back once no request reads it."""
        if job.finished and not job.running:
            slot, job.payload.slot = job.payload.slot, None
            if slot is not None and self._arena is not None:
                self._arena.give(slot)

    # Time

    def _set_timer(self) -> None:
        """See that the dispatcher is asked again when the time has come. Under load that is not found out each time."""
        if self._closed:
            return
        now = self._now()
        if self._timer is not None and self._timer.when() <= now + _LOOK_EVERY_S:
            return
        due: float | None = now + _LOOK_EVERY_S
        if now >= self._looked_at + _LOOK_EVERY_S:
            self._looked_at, self.room = now, self._dispatcher.room
            bundles = self._dispatcher.quick and all(
                link.takes_bundles for link in self._links.by_name.values() if link.spec is not None
            )
            self.gathers = min(self.room // 2, MOST_GATHERED) if bundles else 0
            due, nobody = self._dispatcher.next_event(now), self._watch_for_nobody(now)
            due = nobody if due is None else due if nobody is None else min(due, nobody)
        if due is not None and (self._timer is None or due < self._timer.when() - 0.001):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._thread.loop.call_at(max(due, now + 0.001), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._looked_at = 0.0
        self._apply(self._dispatcher.tick(self._now()))
        self._inbox.take_in()

    def _watch_for_nobody(self, now: float) -> float | None:
        """Keep track of a time without teachers, or without an answer; fail all open jobs when it gets too long."""
        if not self._jobs:
            self._outage.end()
            return None
        too_large = self._dispatcher.too_large(now)
        outlook = self._outage.look(now, self._dispatcher.live(now) if not too_large else 0)
        if outlook.say:
            which = f" takes a request of {too_large} rows" if too_large else ""
            logger.warning("no live teacher for %s%s%s", self.name, which, outlook.say)
        if outlook.silent_s:
            logger.warning("no teacher of %s has answered for %.0f s: still waiting", self.name, outlook.silent_s)
        if outlook.over:
            self._fail_all(self.no_teacher(too_large))
            return None
        return outlook.look_at

    def _fail_all(self, error: NoTeacherError) -> None:
        self._outage.end()
        jobs, self._jobs = self._jobs, {}
        for number, job in jobs.items():
            self._dispatcher.drop(number)
            self._finish(job, error, "")

    def _now(self) -> float:
        return self._thread.loop.time()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._thread.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._gone)
        return task

    def _gone(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a bug in the engine of %s", self.name, exc_info=task.exception())
