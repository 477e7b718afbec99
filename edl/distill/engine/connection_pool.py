"""Keeps connections to the teachers of a service, from when discovery names them until their last request has ended.

A lapsed registration does not end a connection: only the teacher itself can tell whether it is alive. A teacher that
answers stays in use even when the registry has forgotten it; a teacher that does not is tried again while it is listed.
The pool also knows when waiting for a first teacher is useless, because all have answered and none fits (`lacking`).

Requests (`engine`) and a single connection (`connection`) do not belong here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from edl.discovery.registry import Instance, Snapshot
from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.engine.connection import TeacherConnection
from edl.quoting import listed

__all__ = ["ConnectionPool"]

logger = logging.getLogger("edl.distill")

_CHECK_S = 2.0
"""How often a teacher whose registration lapsed is asked whether it is ready, as the registry no longer tells."""
_MOST_NAMES = 3  # teachers named in a line of the log
_MOST_TEACHERS = 20  # teachers described in an error


class ConnectionPool:
    """Connections of a service, on the event loop. Tells the dispatcher which teachers drain, are lost, or are gone.

    Args:
        service: Name of the service, for messages.
        dispatcher: Is told which teachers there are.
        connect: Makes the connection to an instance, which calls `connection_lost` when it breaks.
        on_dropped: Called with a connection that is no longer needed, to close it.
        spawn: Runs a coroutine until it ends or the engine does.

    Attributes:
        connections: Connections by the teacher's id.
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
        self.connections: dict[str, TeacherConnection] = {}

    @property
    def stale(self) -> str:
        """The reason why discovery does not work; empty if it does. Any thread."""
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
        """Connect to new teachers, and let go of those that left.

        Args:
            snapshot: The registry's present view.
            near: "; did you mean …?" where the service may be misspelled, for errors.
            whole: Whether the snapshot has all teachers of the service.
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
                self._unlisted.add(name)  # the registry has forgotten it, and the teacher answers
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
        """Note that a connection broke; it connects again by itself."""
        level = logging.INFO if connection.instance.id in self._leaving else logging.WARNING
        logger.log(level, "teacher %s of %s is lost: %s", connection.instance.id, self._service, connection.why)
        self._dispatcher.teacher_down(connection.instance.id)
        if connection.instance.id in self._unlisted and self.connections.get(connection.instance.id) is connection:
            self._retire(connection.instance.id, "left")
            self._drop(connection.instance.id)

    def end_if_idle(self, name: str) -> None:
        """Drop the connection to a leaving teacher whose last request has ended."""
        state = self._dispatcher.teachers.get(name)
        if name in self._leaving and (state is None or not state.in_flight):
            self._drop(name)

    def teacher_state(self, name: str) -> tuple[str, str]:
        """Return a teacher's state, and the reason for people."""
        connection = self.connections.get(name)
        return self._state(connection) if connection is not None else ("gone", "")

    def describe(self) -> str:
        """Describe all teachers, for errors. Any thread."""
        known = [
            f"{each.instance.id}: {_LAPSED + '; ' if each.lapsed else ''}{self._state(each)[1] or 'connecting'}"
            for each in list(self.connections.values())
        ]
        nobody = f"none is registered{self._near or ':'} `edl teachers` lists those that are"
        found = listed(known, _MOST_TEACHERS, "; ") or nobody
        return found + (f"; discovery: {self.stale}" if self.stale else "")

    def lacking(self) -> str:
        """Return what each teacher lacks, once all have answered and none has what is asked for. Any thread.

        The result is empty while a teacher may still come: one is being connected to, cannot be reached, drains or is
        left to other students, or the registry is away. A teacher that is being replaced drains first, so a rolling
        update is waited for.
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
        """Note that a teacher is registered, perhaps again."""
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
        """Keep teachers that answer though their registration lapsed; try those that are new or do not answer."""
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
