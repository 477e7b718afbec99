"""Keeps connections to the teachers of a service, from their appearance in discovery until their last request ends.

A `TeacherConnection` connects, checks the model, and reconnects until it is closed. The `ConnectionPool` has one for
each teacher. A lapsed registration does not end a connection, because only the teacher itself can show whether it is
alive. A teacher that answers stays in use even if the registry has forgotten it; one that does not answer is tried
again while it is listed. The pool also detects when waiting for a first teacher is useless, because all have answered
and none fits (`ConnectionPool.lacking`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from edl.discovery.registry import Instance, Snapshot
from edl.distill.dispatch.actions import FailureKind
from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.engine.compatibility import TeacherCompatibility
from edl.distill.options import Options
from edl.distill.teachers import ResolvedInstance
from edl.distill.transport.calls import RequestFailed, TeacherLacks
from edl.distill.transport.client import Done, TeacherClient
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import ModelSpec, OutputSpec, parse_priority
from edl.distill.transport.shm import RegionNames
from edl.errors import SettingsError
from edl.notifier import wait_within
from edl.protocol import names
from edl.protocol.tls.credentials import CHECK_EVERY_S, CredentialFiles
from edl.protocol.tls.handshake import explain_handshake, looks_like_handshake
from edl.quoting import listed, shown

logger = logging.getLogger("edl.distill")

_CONNECT_TIMEOUT_S = 5.0
"""Deadline of an attempt to connect: enough for several round trips around the world, and the most a dead host
costs."""
_FIRST_BACKOFF_S = 0.1
"""Pause before the second attempt to connect, so that a restarting server is missed for at most a few batches."""
_LAST_BACKOFF_S = 2.0
"""Longest pause between attempts, within which a returning teacher is found."""
_LAST_LAPSED_BACKOFF_S = 15.0
"""The same for teachers that are probably dead. A SQLite file without a writer lists them until the next boot."""
_NEEDS_ATTENTION = (FailureKind.REJECTED, FailureKind.BAD_OUTPUT)  # waiting alone will not make connecting succeed
_STEADY_S = 2.0
"""A connection that breaks sooner than this counts as a failed attempt to connect."""


class TeacherConnection:
    """Keeps a discovered instance connected, on the event loop.

    Args:
        output_spec: What the student asks for; if it names no model, the instance's is used.
        shared_memory: Whether to use shared memory if the teacher is on this host.
        on_connected: Called when requests may be sent.
        on_disconnected: Called when requests may no longer be sent.
        on_connect_failed: Called when an attempt to connect failed.
    """

    def __init__(
        self,
        instance: Instance,
        output_spec: OutputSpec,
        options: Options,
        *,
        shared_memory: bool,
        files: CredentialFiles | None = None,
        compatibility: TeacherCompatibility,
        on_connected: Callable[[TeacherConnection], None],
        on_disconnected: Callable[[TeacherConnection], None],
        on_connect_failed: Callable[[TeacherConnection], None],
    ) -> None:
        self.instance = instance
        self.state = "connecting"  # "ready", "connecting" or "set aside"
        self.why = ""  # Reason why it is not ready, for people
        # Whether it has answered and lacks what is asked for, so that only a change of the server would help
        self.lacks = False
        # Whether its registration lapsed. Another server may have taken its address since, so the client connects
        # only to a server with the same version of the model, and less often.
        self.lapsed = False
        self._version = instance.meta.get("version", "")
        self._output_spec = _complete_spec(output_spec, instance)
        # The model that `refresh` found, if it changed; connecting again may take a while
        self.changed_spec: ModelSpec | None = None
        # The name that the certificate has, if the address of the instance is one of several of that name
        self._authority = instance.authority if isinstance(instance, ResolvedInstance) else ""
        self._shared_memory = shared_memory
        self._files = files
        self._options = options
        self._compatibility = compatibility
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected
        self._on_connect_failed = on_connect_failed
        self._client: TeacherClient | None = None
        self._names: RegionNames = {}
        self._retired: weakref.WeakSet[TeacherClient] = weakref.WeakSet()  # finish their last requests
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
        """Drop a connection that a request found lost, unless it has already been replaced."""
        if client is self._client:
            self.reconnect(why)

    async def refresh(self) -> None:
        """Check that the model is unchanged, and reconnect if not. Returns after the attempt to reconnect.

        A server may load another model, and gRPC may silently reconnect to another server at the same address.
        """
        client = self._client
        self.changed_spec = None
        if client is not None:
            try:
                spec = await client.fetch_spec(_CONNECT_TIMEOUT_S)
                self.changed_spec = spec if spec != client.spec else None
                changed = "" if spec == client.spec else f"its model is another one now, of version {spec.version!r}"
            except RequestFailed as exc:
                changed = exc.failure.message
            if changed and client is self._client:
                self.reconnect(changed)
        elif self.state == "set aside":  # the reason may no longer apply
            self._attempted.clear()
            self._retry_now.set()
        await self._attempted.wait()

    async def check(self) -> None:
        """Check that the teacher is still ready, and drop the connection if not."""
        client = self._client
        if client is None:
            return
        try:
            await client.check_ready(_CONNECT_TIMEOUT_S)
        except RequestFailed as exc:
            # A teacher that is full, or does not know the method, is alive.
            if client is self._client and exc.failure.kind is FailureKind.LOST:
                self.reconnect(exc.failure.message)

    def reconnect(self, why: str) -> None:
        """Reconnect, and check again that the teacher can be used."""
        if self._client is not None:
            self.why = why
            self._disconnect()

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

    def _disconnect(self) -> None:
        """Stop using the current connection; its pending requests may still succeed."""
        client = self._client
        self._client = None
        self.state = "connecting"
        self._attempted.clear()
        self._on_disconnected(self)
        self._broken.set()
        if client is not None:
            self._retired.add(client)
            client.retire()

    async def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            version = self._files.current(now=True).version if self._files is not None else 0
            client = TeacherClient(
                self.instance.endpoint,
                self._output_spec,
                shared_memory=self._shared_memory,
                region_names=self._names,
                files=self._files,
                options=self._options,
                on_lost=self._lost,
                authority=self._authority,
            )
            connected = lacks = False
            try:
                spec = await client.open(_CONNECT_TIMEOUT_S)
                lacks = bool(self._compatibility.lacking(self.instance, spec))
                refused = self._replacement_reason(spec) or self._compatibility.incompatibility(self.instance, spec)
                connected = not refused
                self.state = "ready" if connected else "set aside"
            except RequestFailed as exc:
                lacks = isinstance(exc, TeacherLacks)
                why = await self._explain_handshake(exc.failure.message)
                refused = why or exc.failure.message
                self.state = "set aside" if why or exc.failure.kind in _NEEDS_ATTENTION else "connecting"
            except Exception as exc:
                # Continue after any error, because `refresh` and the dispatcher wait for the attempt to end.
                logger.debug("connecting to teacher %s failed in a way not foreseen", self.instance.id, exc_info=True)
                refused = f"{self.instance.endpoint}: {type(exc).__name__}: {exc}"
                self.state = "set aside"
            finally:
                if not connected:
                    await client.close()
            refused = shown(refused)
            self._attempted.set()
            if connected:
                connected_at = time.monotonic()
                self._client = client
                self.why = ""
                self.lacks = False
                self._version = spec.version
                self._broken.clear()
                self._on_connected(self)
                await self._until_broken(version)
                if time.monotonic() - connected_at > _STEADY_S:
                    backoff_s = _FIRST_BACKOFF_S
                    continue  # reconnect at once, since the process may be back; only the next failure waits
            elif refused != self.why:
                level = logging.WARNING if self.state == "set aside" else logging.INFO
                logger.log(level, "teacher %s is not used: %s", self.instance.id, refused)
                self.why = refused
            self.lacks = lacks
            if not connected:
                self._on_connect_failed(self)
            with contextlib.suppress(asyncio.TimeoutError):
                await wait_within(self._retry_now.wait(), backoff_s * random.uniform(0.8, 1.2))
            self._retry_now.clear()
            backoff_s = min(backoff_s * 2, _LAST_LAPSED_BACKOFF_S if self.lapsed else _LAST_BACKOFF_S)

    def _replacement_reason(self, spec: ModelSpec) -> str:
        """Return why this may not be the server that was registered; empty if it is."""
        if not self.lapsed or (self._version and self._version in (spec.version, *spec.versions)):
            return ""
        if not self._version:
            return f"{self.instance.endpoint}: nothing tells whether this is who registered, without a version"
        return f"{self.instance.endpoint} has version {spec.version!r}, and version {self._version!r} registered"

    async def _until_broken(self, version: int) -> None:
        """Wait until the connection is dropped, and drop it when certificates or tokens change."""
        if self._files is None:
            await self._broken.wait()
        while not self._broken.is_set():
            try:
                # At random intervals, so that a student does not lose all its teachers at once.
                await wait_within(self._broken.wait(), CHECK_EVERY_S * random.uniform(0.5, 2))
            except asyncio.TimeoutError:
                assert self._files is not None
                if self._files.current(now=True).version != version:
                    self.why = "its credentials were replaced: reconnecting"
                    self._disconnect()

    async def _explain_handshake(self, words: str) -> str:
        """Return which certificate problem made an attempt to connect fail; empty if unknown."""
        if not looks_like_handshake(words):
            return ""
        says_tls = self.instance.meta.get(names.TLS_META) == "1"
        try:
            return await explain_handshake(
                self.instance.endpoint, self._files, says_tls=says_tls, authority=self._authority
            )
        except Exception:
            logger.exception("the reason why %s cannot be connected to was not found", self.instance.endpoint)
            return ""


def _complete_spec(output_spec: OutputSpec, instance: Instance) -> OutputSpec:
    """Complete the student's specification with the model and priority that the teacher registered."""
    if not output_spec.model and instance.model:
        output_spec = replace(output_spec, model=instance.model)
    registered = instance.meta.get(names.PRIORITY_META, "")
    if output_spec.priority == "auto" and registered:
        try:
            output_spec = replace(output_spec, priority=parse_priority(registered))
        except SettingsError as exc:
            logger.warning("the registration of %s: %s", instance.id, exc)
    return output_spec


_CHECK_S = 2.0
"""How often a teacher whose registration lapsed is asked whether it is ready, since the registry no longer knows."""
_MOST_NAMES = 3  # teachers named in a log line
_MOST_TEACHERS = 20  # teachers described in an error


class ConnectionPool:
    """The connections of a service, on the event loop. Tells the dispatcher which teachers drain, are lost or left.

    Args:
        on_dropped: Called with a connection that is no longer needed and should be closed.
    """

    def __init__(
        self,
        service: str,
        dispatcher: Dispatcher,
        connect: Callable[[Instance], TeacherConnection],
        on_dropped: Callable[[TeacherConnection], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._service = service
        self._dispatcher = dispatcher
        self._connect = connect
        self._on_dropped = on_dropped
        self._spawn = spawn
        self._leaving: dict[str, str] = {}  # reason by name
        self._unlisted: set[str] = set()  # lapsed, and no longer listed
        self._checking: asyncio.Task[None] | None = None
        self._stale = ""
        self._near = ""
        self._is_whole = False
        self.connections: dict[str, TeacherConnection] = {}  # Connections by the teacher's id

    @property
    def stale(self) -> str:
        """Why discovery does not work; empty if it does. Callable from any thread."""
        kept = sorted(
            connection.instance.id
            for connection in list(self.connections.values())
            if connection.lapsed and connection.spec is not None
        )
        lapsed = ""
        if kept:
            lapsed = (
                f"the registration of {listed(kept, _MOST_NAMES)} has lapsed, though the teacher answers: it stays in"
                " use. It cannot renew it: its log says why (a full disk, a file or token that may not write)"
            )
        return "; ".join(filter(None, [self._stale, lapsed]))

    def apply_snapshot(self, snapshot: Snapshot, near: str = "", whole: bool = True) -> None:
        """Connect to new teachers, and retire those that left.

        `near` is "; did you mean …?" for error messages if the service may be misspelled.
        """
        self._is_whole = False
        self._near = near
        if snapshot.stale and snapshot.stale != self._stale:
            logger.warning("discovery of %s: %s; going on with the teachers last known", self._service, snapshot.stale)
        elif self._stale and not snapshot.stale:
            logger.info("discovery of %s answers again", self._service)
        self._stale = snapshot.stale
        ready = {instance.id: instance for instance in snapshot.instances if instance.state == "ready"}
        lapsed = {instance.id: instance for instance in snapshot.lapsed}
        draining = {instance.id for instance in snapshot.instances if instance.state == "draining"}
        listed = lapsed | ready
        for name, connection in list(self.connections.items()):
            if name in listed:
                if listed[name].endpoint != connection.instance.endpoint:
                    self._retire(name, "left")
                    self._drop(name)
            elif (
                connection.lapsed
                and connection.spec is not None
                and name not in draining
                and name not in snapshot.revoked
            ):
                self._unlisted.add(name)  # the registry has forgotten the teacher, but it answers
            else:
                self._retire(name, "draining" if name in draining else "left")
        for name, instance in ready.items():
            self._mark_renewed(name)
            self._add(name, instance)
        self._keep_lapsed(lapsed)
        # Teachers that leave, or whose registration is invalid, may be about to be replaced.
        self._is_whole = whole and not (snapshot.stale or lapsed or draining or snapshot.rejected)

    def is_current(self, connection: TeacherConnection) -> bool:
        """Return whether this is still the connection to its teacher, and the teacher is not leaving."""
        name = connection.instance.id
        return name not in self._leaving and self.connections.get(name) is connection

    def connection_lost(self, connection: TeacherConnection) -> None:
        """Note that a connection broke. It reconnects by itself."""
        level = logging.INFO if connection.instance.id in self._leaving else logging.WARNING
        logger.log(level, "teacher %s of %s is lost: %s", connection.instance.id, self._service, connection.why)
        self._dispatcher.teacher_down(connection.instance.id)
        if connection.instance.id in self._unlisted and self.connections.get(connection.instance.id) is connection:
            self._retire(connection.instance.id, "left")
            self._drop(connection.instance.id)

    def end_if_idle(self, name: str) -> None:
        """Drop the connection to a leaving teacher if its last request has ended."""
        state = self._dispatcher.teachers.get(name)
        if name in self._leaving and (state is None or not state.in_flight):
            self._drop(name)

    def teacher_state(self, name: str) -> tuple[str, str]:
        """Return a teacher's state, and the reason as text."""
        connection = self.connections.get(name)
        return self._state(connection) if connection is not None else ("gone", "")

    def describe(self) -> str:
        """Describe all teachers for error messages. Callable from any thread."""
        known = [
            f"{each.instance.id}: {_LAPSED + '; ' if each.lapsed else ''}{self._state(each)[1] or 'connecting'}"
            for each in list(self.connections.values())
        ]
        nobody = f"none is registered{self._near or ':'} `edl teachers` lists those that are"
        found = listed(known, _MOST_TEACHERS, "; ") or nobody
        return found + (f"; discovery: {self.stale}" if self.stale else "")

    def lacking(self) -> str:
        """Return what each teacher lacks, once all have answered and none has what is asked for.

        The result is empty while a suitable teacher may still appear: while one is connecting, unreachable, draining or
        left to other students, or while the registry does not answer. In a rolling update a teacher drains before it is
        replaced, so students wait. Callable from any thread.
        """
        connections = list(self.connections.values())
        if not self._is_whole or not connections or not all(connection.lacks for connection in connections):
            return ""
        return self.describe()

    async def close(self) -> None:
        """End all connections."""
        await asyncio.gather(*(connection.close() for connection in self.connections.values()))

    def _add(self, name: str, instance: Instance) -> None:
        if name in self._leaving:
            self._drop(name)
        if name not in self.connections:
            self.connections[name] = self._connect(instance)
            self._dispatcher.teacher_connecting(name)

    def _mark_renewed(self, name: str) -> None:
        """Note that a teacher is registered, possibly after its registration had lapsed."""
        connection = self.connections.get(name)
        if connection is None or not connection.lapsed:
            return
        connection.lapsed = False
        self._unlisted.discard(name)
        if connection.spec is None:
            self._drop(name)  # the caller connects again at once
        else:
            logger.info("teacher %s of %s is registered again", name, self._service)

    def _keep_lapsed(self, lapsed: Mapping[str, Instance]) -> None:
        """Keep teachers whose registration lapsed but which answer, and try those that are new or do not answer."""
        kept = []
        for name, instance in lapsed.items():
            if self._leaving.get(name) == "draining":
                continue
            self._add(name, instance)
            connection = self.connections[name]
            if not connection.lapsed:
                connection.lapsed = True
                if connection.spec is not None:
                    kept.append(name)
            self._unlisted.discard(name)
        if kept:
            logger.warning(
                "discovery of %s: the registration of %s has lapsed; it is used for as long as it answers",
                self._service,
                listed(kept, _MOST_NAMES),
            )
        if lapsed and (self._checking is None or self._checking.done()):
            self._checking = self._spawn(self._check_lapsed())

    async def _check_lapsed(self) -> None:
        while connections := [connection for connection in self.connections.values() if connection.lapsed]:
            await asyncio.gather(*(connection.check() for connection in connections))
            await asyncio.sleep(_CHECK_S)

    def _retire(self, name: str, why: str) -> None:
        """Send no new requests to a teacher; its connection ends with its last request."""
        if name in self._leaving:
            return
        logger.info("teacher %s of %s: %s", name, self._service, why)
        self._leaving[name] = why
        self._dispatcher.teacher_draining(name)
        self.end_if_idle(name)

    def _drop(self, name: str) -> None:
        connection = self.connections.pop(name, None)
        self._leaving.pop(name, None)
        self._unlisted.discard(name)
        self._dispatcher.teacher_removed(name)
        if connection is not None:
            self._on_dropped(connection)

    def _state(self, connection: TeacherConnection) -> tuple[str, str]:
        state = self._dispatcher.teachers.get(connection.instance.id)
        if connection.instance.id in self._leaving:
            return "draining", ""
        if state is not None and connection.state == "ready" and state.closed_until > time.monotonic():
            return "set aside", state.why
        return connection.state, connection.why


_LAPSED = "its registration has lapsed"
