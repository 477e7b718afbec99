"""Keeps connections to a service's teachers, from when discovery lists them until their last request ends.

A lapsed registration does not end a connection, because only the teacher itself can show whether it is alive. While it
answers, such a teacher stays in use, even if the registry no longer lists it. A teacher that does not answer is retried
while it is listed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from edl.background import start_call
from edl.backoff import CHANCE
from edl.discovery import Instance, Snapshot
from edl.distill.dispatch.actions import NO_LIMITS, Action, FailureKind, Limits
from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.engine.compatibility import TeacherCompatibility
from edl.distill.options import Options
from edl.distill.stats import TeacherStats
from edl.distill.teachers import ResolvedInstance
from edl.distill.transport.calls import RequestFailed, TeacherLacks
from edl.distill.transport.client import Done, TeacherClient
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import ModelSpec, OutputSpec, parse_priority
from edl.distill.transport.shm import RegionNames
from edl.errors import SettingsError
from edl.notifier import Notifier, wait_within
from edl.protocol import names
from edl.protocol.tls import CHECK_EVERY_S, CredentialFiles, explain_handshake
from edl.quoting import listed, shown

logger = logging.getLogger("edl.distill")

_CONNECT_TIMEOUT_S = 5.0  # enough for several round trips around the world; a dead host costs this much
_MOST_FAILED_CHANNELS = 2
"""How many tensor channels in a row may end before their first answer, as behind some firewalls. After that many, a new
connection starts with gRPC and tries to open a channel later."""
_FIRST_BACKOFF_S = 0.1  # a restarting server is missed for at most a few batches
_LAST_BACKOFF_S = 2.0  # longest pause between attempts to connect
_LAST_LAPSED_BACKOFF_S = 15.0  # for probably dead teachers: a SQLite file may list them until the next boot
_NEEDS_ATTENTION = (FailureKind.REJECTED, FailureKind.BAD_OUTPUT)  # waiting alone will not make connecting succeed
_STEADY_S = 2.0  # a connection that breaks sooner than this counts as a failed attempt to connect
_CHECK_S = 2.0  # how often a teacher whose registration lapsed is asked whether it is ready
_MOST_NAMES = 3  # teachers named in a log line
_MOST_TEACHERS = 20  # teachers described in an error
_MOST_GONE = 100  # departed teachers remembered by name: enough to trace each one as pods come and go


def no_counts() -> Counter[str]:
    """Return counters as in `TeacherStats`. All keys exist from the start, because any thread may read the counters."""
    return Counter(rows=0, requests=0, failures=0)


class TeacherConnection:
    """Keeps the connection to a discovered instance, on the event loop, and reports changes to its pool."""

    def __init__(self, instance: Instance, pool: ConnectionPool) -> None:
        self.instance = instance
        self.counts = no_counts()
        self.state = "connecting"  # "ready", "connecting" or "set aside"
        self.why = ""  # why it is not ready, as text
        self.lacks = False  # has answered, but cannot serve the request: only a change of server or student would help
        # Whether its registration lapsed. Another server may have taken over its address, so the client connects only
        # to a server with the same model version, and less often.
        self.lapsed = False
        self.unlisted = False  # whether its registration lapsed and is no longer listed
        self.leaving = ""  # "left" or "draining" if it gets no new requests, and ends with its last one
        self.changed_spec: ModelSpec | None = None  # found by `refresh`, if it changed
        self._pool = pool
        self._version = instance.meta.get("version", "")
        # The name in the certificate, if the instance is one of several addresses of that name
        self._authority = instance.authority if isinstance(instance, ResolvedInstance) else ""
        self._output_spec = _complete_spec(pool.output_spec, instance)
        self._client: TeacherClient | None = None
        self._names: RegionNames = {}
        self._retired: weakref.WeakSet[TeacherClient] = weakref.WeakSet()  # clients finishing their last requests
        self._broken = asyncio.Event()
        self._retry_now = asyncio.Event()  # ends the pause before the next attempt
        self._attempted = asyncio.Event()  # whether an attempt to connect has ended since the connection was lost
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def shares_memory(self) -> bool:
        """Whether the teacher reads this student's shared memory."""
        return self._client is not None and self._client.shares_memory

    @property
    def spec(self) -> ModelSpec | None:
        """The teacher's model, None while it is not connected."""
        return self._client.spec if self._client is not None else None

    def start(self, payload: Payload, timeout_s: float, done: Done) -> Callable[[], None] | None:
        """Send a request; see `TeacherClient.start`. Returns None while not connected."""
        return self._client.start(payload, timeout_s, done) if self._client is not None else None

    def _lost(self, client: TeacherClient, why: str) -> None:
        """Drop the connection, which a request found to be lost, unless the connection has already been replaced."""
        if client is self._client:
            self.reconnect(why)

    async def refresh(self, *, must_be_ready: bool = False) -> None:
        """Check whether the teacher's model is unchanged. If it has changed, return after an attempt to reconnect.

        With `must_be_ready`, a teacher that is not ready counts as lost. Before an epoch, a teacher need not be ready:
        Triton is not ready while it replaces a version, but its metadata already show the new version.
        """
        client = self._client
        self.changed_spec = None
        if client is not None:
            try:
                spec = await client.refresh_spec(_CONNECT_TIMEOUT_S, must_be_ready=must_be_ready)
                self.changed_spec = spec if spec != client.spec else None
                changed = "" if spec == client.spec else f"its model has changed and now has version {spec.version!r}"
            except RequestFailed as exc:
                # A full teacher is alive, and would not accept a new connection.
                changed = exc.failure.message if exc.failure.kind is not FailureKind.OVERLOADED else ""
            if changed and client is self._client:
                self.reconnect(changed)
        elif self.state == "set aside":  # the reason may no longer apply
            self._attempted.clear()
            self._retry_now.set()
        await self._attempted.wait()

    def reconnect(self, why: str) -> None:
        """Reconnect, and check again that the teacher can be used. Pending requests may still succeed."""
        client = self._client
        if client is None:
            return
        self.why = why
        self._client = None
        self.state = "connecting"
        self._attempted.clear()
        self._pool.connection_lost(self)
        self._broken.set()
        self._retired.add(client)
        client.retire()

    async def close(self) -> None:
        """Disconnect; pending requests end with LOST."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        last = self._client
        self._client = None
        for client in list(self._retired):
            await client.close(unregister=False)
        if last is not None:
            await last.close()

    async def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        failed_channels = 0
        files = self._pool.files
        while True:
            version = files.current(now=True).version if files is not None else 0
            client = TeacherClient(
                self.instance.endpoint,
                self._output_spec,
                shared_memory=self._pool.shared_memory,
                region_names=self._names,
                files=files,
                options=self._pool.options,
                on_lost=self._lost,
                authority=self._authority,
                over_channel=failed_channels < _MOST_FAILED_CHANNELS,
            )
            refused, lacks = await self._connect(client)
            self._attempted.set()
            if not refused:
                connected_at = time.monotonic()
                self._client = client
                self.why = ""
                self.lacks = False
                self._broken.clear()
                self._pool.connection_up(self)
                await self._until_broken(version)
                failed_channels = failed_channels + 1 if client.channel_failed else 0
                if time.monotonic() - connected_at > _STEADY_S:
                    backoff_s = _FIRST_BACKOFF_S
                    continue  # reconnect at once, since the process may be back; only the next failure waits
            else:
                if refused != self.why:
                    level = logging.WARNING if self.state == "set aside" else logging.INFO
                    logger.log(level, "teacher %s is not used: %s", self.instance.id, refused)
                    self.why = refused
                self.lacks = lacks  # set after the reason, which another thread may then read
                self._pool.connect_failed(self)
            with contextlib.suppress(asyncio.TimeoutError):
                await wait_within(self._retry_now.wait(), backoff_s * CHANCE.uniform(0.8, 1.2))
            self._retry_now.clear()
            backoff_s = min(backoff_s * 2, _LAST_LAPSED_BACKOFF_S if self.lapsed else _LAST_BACKOFF_S)

    async def _connect(self, client: TeacherClient) -> tuple[str, bool]:
        """Try to connect; return why the teacher is not used ("" if used), and whether it lacks something required."""
        lacks, refused = False, "the attempt was cancelled"
        try:
            spec = await client.open(_CONNECT_TIMEOUT_S)
            compatibility = self._pool.compatibility
            lacks = bool(compatibility.lacking(self.instance, spec))
            refused = self._replacement_reason(spec) or compatibility.incompatibility(self.instance, spec)
            self.state = "set aside" if refused else "ready"
            if not refused:
                self._version = spec.version
        except RequestFailed as exc:
            lacks = isinstance(exc, TeacherLacks)
            why = await self._explain_handshake(exc.failure.message)
            refused = why or exc.failure.message
            self.state = "set aside" if why or exc.failure.kind in _NEEDS_ATTENTION else "connecting"
        except Exception as exc:
            # Continue after any error, because `refresh` and the dispatcher wait for the attempt to end.
            logger.debug("connecting to teacher %s failed unexpectedly", self.instance.id, exc_info=True)
            refused = f"{self.instance.endpoint}: {type(exc).__name__}: {exc}"
            self.state = "set aside"
        finally:
            if refused:
                await client.close()
        return shown(refused), lacks

    def _replacement_reason(self, spec: ModelSpec) -> str:
        """Return why this server may not be the one that registered; empty if it is."""
        if not self.lapsed or (self._version and self._version in (spec.version, *spec.versions)):
            return ""
        if not self._version:
            return f"{self.instance.endpoint}: without a version, it cannot be identified as the server that registered"
        return f"{self.instance.endpoint} has version {spec.version!r}, but version {self._version!r} registered"

    async def _until_broken(self, version: int) -> None:
        """Wait until the connection is dropped; drop it here if certificates or tokens change."""
        files = self._pool.files
        if files is None:
            await self._broken.wait()
            return
        while not self._broken.is_set():
            try:
                # At random intervals, so that a student does not lose all its teachers at once.
                await wait_within(self._broken.wait(), CHECK_EVERY_S * CHANCE.uniform(0.5, 2))
            except asyncio.TimeoutError:
                if files.current(now=True).version != version:
                    self.reconnect("this student's credentials were replaced: reconnecting")

    async def _explain_handshake(self, words: str) -> str:
        endpoint = self.instance.endpoint
        try:
            explain = functools.partial(explain_handshake, words, endpoint, self._pool.files, authority=self._authority)
            return await asyncio.wrap_future(start_call("edl-handshake", explain))
        except Exception:
            logger.exception("could not find out why %s is unreachable", endpoint)
            return ""


def _complete_spec(output_spec: OutputSpec, instance: Instance) -> OutputSpec:
    if not output_spec.model and instance.model:
        output_spec = replace(output_spec, model=instance.model)
    registered = instance.meta.get(names.PRIORITY_META, "")
    if output_spec.priority == "auto" and registered:
        try:
            output_spec = replace(output_spec, priority=parse_priority(registered))
        except SettingsError as exc:
            logger.warning("the registration of %s: %s", instance.id, exc)
    return output_spec


class ConnectionPool:
    """Manages a service's teachers, on the event loop; other threads may read its state.

    `changed` gets the dispatcher's resulting actions after a teacher connected, was unreachable, was lost or left.
    """

    def __init__(
        self,
        service: str,
        output_spec: OutputSpec,
        options: Options,
        dispatcher: Dispatcher,
        *,
        changed: Callable[[list[Action]], None],
        shared_memory: bool = False,
        files: CredentialFiles | None = None,
    ) -> None:
        self.output_spec, self.options = output_spec, options
        self.shared_memory, self.files = shared_memory, files
        self.connections: dict[str, TeacherConnection] = {}  # by the teacher's id
        self.compatibility = TeacherCompatibility(service, output_spec, options.mixed_versions)
        # What all known teachers (or the last ones) accept in a request, and the longest sequence that any accepts.
        self.limits = NO_LIMITS  # replaced as a whole, so never half updated
        self.news = Notifier()  # notified when a teacher connects
        self._service = service
        self._dispatcher = dispatcher
        self._changed = changed
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()  # tasks that close dropped connections
        self._checking: asyncio.Task[None] | None = None
        self._stale = ""
        self._near = ""
        self._is_whole = False
        self._lock = threading.Lock()  # so that a leaving teacher is counted exactly once
        self._gone: dict[str, TeacherStats] = {}  # the teachers that left most recently
        self._departed = no_counts()  # sums over all teachers that left

    # Any thread

    @property
    def stale(self) -> str:
        """Why discovery does not answer, and whose registrations have lapsed; empty if neither is the case."""
        kept = sorted(
            connection.instance.id
            for connection in list(self.connections.values())
            if connection.lapsed and connection.spec is not None
        )
        lapsed = ""
        if kept:
            lapsed = (
                f"the registration of {listed(kept, _MOST_NAMES)} has lapsed, but the teacher answers: it stays in"
                " use. Its log says why it cannot renew the registration (a full disk, missing write permission)"
            )
        return "; ".join(filter(None, [self._stale, lapsed]))

    def describe(self) -> str:
        """Describe all teachers for error messages."""
        known = [
            f"{each.instance.id}: {'its registration has lapsed; ' if each.lapsed else ''}"
            f"{self._state(each)[1] or 'connecting'}"
            for each in list(self.connections.values())
        ]
        nobody = f"none is registered{self._near or ':'} `edl teachers` lists those that are"
        found = listed(known, _MOST_TEACHERS, "; ") or nobody
        return found + (f"; discovery: {self.stale}" if self.stale else "")

    def lacking(self) -> str:
        """Return what each teacher lacks, if all teachers have answered and none can serve the request.

        The result is empty while a suitable teacher may still appear: while a teacher is connecting, unreachable,
        draining or left to other students, or while the registry does not answer. It is also empty once any teacher has
        been used.
        """
        connections = list(self.connections.values())
        if self.compatibility.spec is not None or not self._is_whole or not connections:
            return ""
        return self.describe() if all(connection.lacks for connection in connections) else ""

    def teacher_stats(self) -> tuple[dict[str, TeacherStats], TeacherStats]:
        """Return each teacher's counters, with gauges for present teachers, and the sums over departed teachers."""
        with self._lock:
            teachers, present = self._gone.copy(), self.connections.copy()
            departed = TeacherStats("", "gone", "", **self._departed)
        for name, connection in present.items():
            state = self._dispatcher.teachers.get(name)
            status, why = self._state(connection)
            teachers[name] = TeacherStats(
                endpoint=connection.instance.endpoint,
                state=status,
                why=why,
                in_flight=len(state.in_flight) if state else 0,
                window=state.window.size if state else 0,
                median_s=(state.window.median_s or 0.0) if state else 0.0,
                **connection.counts,
            )
        return teachers, departed

    def _state(self, connection: TeacherConnection) -> tuple[str, str]:
        state = self._dispatcher.teachers.get(connection.instance.id)
        if connection.leaving:
            return "draining", ""
        if state is not None and connection.state == "ready" and state.closed_until > time.monotonic():
            return "set aside", state.why
        return connection.state, connection.why

    # On the loop

    def counts_of(self, name: str) -> Counter[str]:
        """Return the counters to increment: the teacher's own, or those of departed teachers if it has left."""
        connection = self.connections.get(name)
        return connection.counts if connection is not None else self._departed

    def apply_snapshot(self, snapshot: Snapshot, near: str = "", whole: bool = True) -> None:
        """Connect to new teachers; retire those that left. `near`: "; did you mean …?" for messages, or empty."""
        self._is_whole = False
        self._near = near
        if snapshot.stale and snapshot.stale != self._stale:
            logger.warning("discovery of %s: %s; using the last known teachers", self._service, snapshot.stale)
        elif self._stale and not snapshot.stale:
            logger.info("discovery of %s answers again", self._service)
        self._stale = snapshot.stale
        ready = {instance.id: instance for instance in snapshot.instances if instance.state == "ready"}
        lapsed = {instance.id: instance for instance in snapshot.lapsed}
        draining = {instance.id for instance in snapshot.instances if instance.state == "draining"}
        for name, connection in list(self.connections.items()):
            instance = ready.get(name) or lapsed.get(name)
            answers = connection.lapsed and connection.spec is not None
            if instance is not None:
                if instance.endpoint != connection.instance.endpoint:
                    self._retire(connection, "left")
                    self._drop(connection)
            elif answers and name not in draining and name not in snapshot.revoked:
                connection.unlisted = True  # the registry has forgotten the teacher, but it answers
            else:
                self._retire(connection, "draining" if name in draining else "left")
        for instance in ready.values():
            self._add(instance, lapsed=False)
        kept = [instance.id for instance in lapsed.values() if self._add(instance, lapsed=True)]
        if kept:
            logger.warning(
                "discovery of %s: the registration of %s has lapsed; the teacher is used while it answers",
                self._service,
                listed(kept, _MOST_NAMES),
            )
        if lapsed and (self._checking is None or self._checking.done()):
            self._checking = self._spawn(self._check_lapsed())
        # Teachers that leave, or whose registration is invalid, may be about to be replaced.
        self._is_whole = whole and not (snapshot.stale or lapsed or draining or snapshot.rejected)

    def _add(self, instance: Instance, *, lapsed: bool) -> bool:
        """Keep or open a listed teacher's connection.

        Returns True if the teacher's registration has just lapsed, but the teacher still answers.
        """
        known = self.connections.get(instance.id)
        if known is not None and lapsed and known.leaving == "draining":
            return False
        is_renewed = known is not None and known.lapsed and not lapsed
        if known is not None and (known.leaving or (is_renewed and known.spec is None)):
            self._drop(known)  # a teacher that registered again is retried at once
            known = None
        elif is_renewed:
            logger.info("teacher %s of %s is registered again", instance.id, self._service)
        if known is None:
            known = TeacherConnection(instance, self)
            with self._lock:
                self.connections[instance.id] = known
                self._gone.pop(instance.id, None)
            self._dispatcher.teacher_connecting(instance.id)
        lapsed_now = lapsed and not known.lapsed and known.spec is not None
        known.lapsed, known.unlisted = lapsed, False
        return lapsed_now

    def connection_up(self, connection: TeacherConnection) -> None:
        """Record that requests may be sent over a connection."""
        spec, name = connection.spec, connection.instance.id
        if spec is None or connection.leaving or self.connections.get(name) is not connection:
            return
        logger.info("teacher %s of %s is ready", name, self._service)
        if self.compatibility.spec is None:
            self.compatibility.spec = spec
        limits = Limits(spec.max_rows, spec.max_nbytes, spec.max_sequence)
        actions = self._dispatcher.teacher_up(name, time.monotonic(), limits, spec.max_in_flight)
        self.limits = self._dispatcher.limits
        self.news.notify()
        self._changed(actions)

    def connect_failed(self, connection: TeacherConnection) -> None:
        """Record that an attempt to connect failed."""
        if self.connections.get(connection.instance.id) is connection:
            self._changed(self._dispatcher.teacher_unreachable(connection.instance.id, time.monotonic()))

    def connection_lost(self, connection: TeacherConnection) -> None:
        """Record that a connection broke. The connection reconnects by itself."""
        name = connection.instance.id
        self.compatibility.forget_teacher(name)
        level = logging.INFO if connection.leaving else logging.WARNING
        logger.log(level, "teacher %s of %s is lost: %s", name, self._service, connection.why)
        self._dispatcher.teacher_down(name)
        if connection.unlisted and self.connections.get(name) is connection:
            self._retire(connection, "left")
            self._drop(connection)
        self._changed([])

    def end_if_idle(self, name: str) -> None:
        """Drop the connection to a leaving teacher if its last request has ended."""
        connection, state = self.connections.get(name), self._dispatcher.teachers.get(name)
        if connection is not None and connection.leaving and (state is None or not state.in_flight):
            self._drop(connection)

    async def follow_version(self, timeout_s: float) -> None:
        """Ask teachers for their model's version before an epoch; see `TeacherCompatibility.select_version`."""
        self.compatibility.selecting_version = True
        try:
            asked = [self._spawn(each.refresh()) for each in self.connections.values() if not each.leaving]
            if asked:
                _, late = await asyncio.wait(asked, timeout=timeout_s)
                for task in late:
                    task.cancel()
        finally:
            self.compatibility.selecting_version = False
        found = [each.spec or each.changed_spec for each in self.connections.values() if not each.leaving]
        self.compatibility.select_version([spec for spec in found if spec is not None])
        for connection in list(self.connections.values()):
            if connection.spec is not None and self.compatibility.refuses_version(connection.spec.version):
                connection.reconnect("a different version of the model is now used")  # it is then refused with a reason

    async def close(self) -> None:
        """End all connections."""
        await asyncio.gather(*(connection.close() for connection in self.connections.values()))
        await asyncio.gather(*self._closing, return_exceptions=True)  # if cancelled, they would leave sockets open
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.connections.clear()

    async def _check_lapsed(self) -> None:
        while lapsed := [connection for connection in self.connections.values() if connection.lapsed]:
            await asyncio.gather(
                *(connection.refresh(must_be_ready=True) for connection in lapsed if connection.spec is not None)
            )
            await asyncio.sleep(_CHECK_S)

    def _retire(self, connection: TeacherConnection, why: str) -> None:
        """Send no new requests to a teacher; its connection ends when its last request ends."""
        if not connection.leaving:
            name = connection.instance.id
            logger.info("teacher %s of %s: %s", name, self._service, why)
            connection.leaving = why
            self._dispatcher.teacher_draining(name)
            self.end_if_idle(name)

    def _drop(self, connection: TeacherConnection) -> None:
        name, counts = connection.instance.id, connection.counts
        if self.connections.get(name) is not connection:
            return
        with self._lock:
            del self.connections[name]
            self._departed.update(counts)
            self._gone[name] = TeacherStats(connection.instance.endpoint, "gone", "", **counts)
            if len(self._gone) > _MOST_GONE:
                del self._gone[next(iter(self._gone))]
        self.compatibility.forget_teacher(name)
        self._dispatcher.teacher_removed(name)
        if self._dispatcher.teachers:  # otherwise keep the limits, since the last teacher may return
            self.limits = self._dispatcher.limits
        self._closing.add(self._spawn(connection.close()))
        self._changed([])

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._closing.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a bug in the engine of %s", self._service, exc_info=task.exception())
