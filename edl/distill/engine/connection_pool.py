"""Who of a service's teachers is there: a link to each, from when discovery names it until its last request has ended.

A registration that lapsed does not end a link: whether its teacher is there, only the teacher tells. One that answers
is used on, even when the registry has forgotten it; one that does not is tried again for as long as it is listed.

What does not belong here: what the teachers are asked (`engine`), and one connection (`connection`).
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
"""How often a teacher whose registration lapsed is asked whether it is ready: nobody else would say that it left."""
_MOST_NAMES = 3  # in a line of the log
_MOST_TEACHERS = 20  # in an error, each with what is wrong with it


class ConnectionPool:
    """Of one service, on the event loop. The dispatcher is told who drains, who is lost and who is gone.

    Args:
        service: for messages.
        connect: makes the link to a teacher, which calls `lost` of this object when it is down.
        dropped: called with a link that is needed no more, for it to be closed.
        spawn: runs a coroutine until it ends or the engine does.

    Attributes:
        by_name: the links, by the teacher's id.
    """

    def __init__(
        self,
        service: str,
        dispatcher: Dispatcher,
        connect: Callable[[Instance], TeacherConnection],
        dropped: Callable[[TeacherConnection], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._service, self._dispatcher = service, dispatcher
        self._connect, self._dropped, self._spawn = connect, dropped, spawn
        self._leaving: dict[str, str] = {}  # by name, why
        self._forgotten: set[str] = set()  # lapsed, and not even listed any more
        self._checking: asyncio.Task[None] | None = None
        self._stale = ""
        self.by_name: dict[str, TeacherConnection] = {}

    @property
    def stale(self) -> str:
        """What is wrong with discovery, empty if nothing is. Any thread."""
        kept = sorted(link.instance.id for link in list(self.by_name.values()) if link.lapsed and link.spec is not None)
        lapsed = ""
        if kept:
            lapsed = (
                f"the registration of {listed(kept, _MOST_NAMES)} has lapsed, though the teacher answers: it is used"
                " on. It cannot renew it: its log says why (a full disk, a file or token that may not write)"
            )
        return "; ".join(filter(None, [self._stale, lapsed]))

    def follow(self, snapshot: Snapshot) -> None:
        """The registry's present view."""
        if snapshot.stale and snapshot.stale != self._stale:
            logger.warning("discovery of %s: %s; going on with the teachers last known", self._service, snapshot.stale)
        elif self._stale and not snapshot.stale:
            logger.info("discovery of %s answers again", self._service)
        self._stale = snapshot.stale
        ready = {instance.id: instance for instance in snapshot.instances if instance.state == "ready"}
        lapsed = {instance.id: instance for instance in snapshot.lapsed}
        draining = {instance.id for instance in snapshot.instances if instance.state == "draining"}
        listed = lapsed | ready
        for name, link in list(self.by_name.items()):
            if name in listed:
                if listed[name].endpoint != link.instance.endpoint:
                    self._retire(name, "left")
                    self._drop(name)
            elif link.lapsed and link.spec is not None and name not in draining and name not in snapshot.revoked:
                self._forgotten.add(name)  # the registry knows nothing of it; the teacher answers
            else:
                self._retire(name, "draining" if name in draining else "left")
        for name, instance in ready.items():
            self._renewed(name)
            self._join(name, instance)
        self._lapse(lapsed)

    def is_wanted(self, link: TeacherConnection) -> bool:
        """Whether this is still the link to its teacher, and the teacher stays."""
        name = link.instance.id
        return name not in self._leaving and self.by_name.get(name) is link

    def lost(self, link: TeacherConnection) -> None:
        """A link is down; it connects again by itself."""
        level = logging.INFO if link.instance.id in self._leaving else logging.WARNING
        logger.log(level, "teacher %s of %s is lost: %s", link.instance.id, self._service, link.why)
        self._dispatcher.teacher_down(link.instance.id)
        if link.instance.id in self._forgotten and self.by_name.get(link.instance.id) is link:
            self._retire(link.instance.id, "left")
            self._drop(link.instance.id)

    def end_if_idle(self, name: str) -> None:
        """A request to this teacher has ended: if it was the last one of a teacher that leaves, so does the link."""
        state = self._dispatcher.teachers.get(name)
        if name in self._leaving and (state is None or not state.in_flight):
            self._drop(name)

    def state_of(self, name: str) -> tuple[str, str]:
        """A teacher's state, and why."""
        link = self.by_name.get(name)
        return self._state(link) if link is not None else ("gone", "")

    def in_words(self) -> str:
        """What is known of each teacher. Any thread."""
        known = [
            f"{link.instance.id}: {_LAPSED + '; ' if link.lapsed else ''}{self._state(link)[1] or 'connecting'}"
            for link in list(self.by_name.values())
        ]
        found = listed(known, _MOST_TEACHERS, "; ") or "none is registered: `edl teachers` lists those that are"
        return found + (f"; discovery: {self.stale}" if self.stale else "")

    async def close(self) -> None:
        """End all connections."""
        await asyncio.gather(*(link.close() for link in self.by_name.values()))

    def _join(self, name: str, instance: Instance) -> None:
        if name in self._leaving:
            self._drop(name)
        if name not in self.by_name:
            self.by_name[name] = self._connect(instance)
            self._dispatcher.teacher_coming(name)

    def _renewed(self, name: str) -> None:
        """Its registration is there, perhaps again."""
        link = self.by_name.get(name)
        if link is None or not link.lapsed:
            return
        link.lapsed = False
        self._forgotten.discard(name)
        if link.spec is None:
            self._drop(name)  # and connect anew, at once
        else:
            logger.info("teacher %s of %s is registered again", name, self._service)

    def _lapse(self, lapsed: Mapping[str, Instance]) -> None:
        """Go on with those who answer, and try those who do not, or who are new."""
        kept = []
        for name, instance in lapsed.items():
            if self._leaving.get(name) == "draining":
                continue
            self._join(name, instance)
            link = self.by_name[name]
            if not link.lapsed:
                link.lapsed = True
                if link.spec is not None:
                    kept.append(name)
            self._forgotten.discard(name)
        if kept:
            logger.warning(
                "discovery of %s: the registration of %s has lapsed; it is used for as long as it answers",
                self._service,
                listed(kept, _MOST_NAMES),
            )
        if lapsed and (self._checking is None or self._checking.done()):
            self._checking = self._spawn(self._check_lapsed())

    async def _check_lapsed(self) -> None:
        while links := [link for link in self.by_name.values() if link.lapsed]:
            await asyncio.gather(*(link.check() for link in links))
            await asyncio.sleep(_CHECK_S)

    def _retire(self, name: str, why: str) -> None:
        """No new requests; the connection ends with the last request under way."""
        if name in self._leaving:
            return
        logger.info("teacher %s of %s: %s", name, self._service, why)
        self._leaving[name] = why
        self._dispatcher.teacher_draining(name)
        self.end_if_idle(name)

    def _drop(self, name: str) -> None:
        link = self.by_name.pop(name, None)
        self._leaving.pop(name, None)
        self._forgotten.discard(name)
        self._dispatcher.teacher_removed(name)
        if link is not None:
            self._dropped(link)

    def _state(self, link: TeacherConnection) -> tuple[str, str]:
        state = self._dispatcher.teachers.get(link.instance.id)
        if link.instance.id in self._leaving:
            return "draining", ""
        if state is not None and link.state == "ready" and state.closed_until > time.monotonic():
            return "set aside", state.why
        return link.state, link.why


_LAPSED = "its registration has lapsed"
