"""Who of a service's teachers is there: a link to each, from when discovery names it until its last request has ended.

What does not belong here: what the teachers are asked (`edl.distill.engine`), and one connection (`edl.distill.link`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from edl.discovery.registry import Instance, Snapshot
from edl.distill.dispatch import Dispatcher
from edl.distill.link import Link

__all__ = ["Links"]

logger = logging.getLogger("edl.distill")


class Links:
    """Of one service, on the event loop. The dispatcher is told who drains, who is lost and who is gone.

    Args:
        service: for messages.
        connect: makes the link to a teacher, which calls `lost` of this object when it is down.
        dropped: called with a link that is needed no more, for it to be closed.

    Attributes:
        stale: what is wrong with discovery, empty if nothing is.
        by_name: the links, by the teacher's id.
    """

    def __init__(
        self, service: str, dispatcher: Dispatcher, connect: Callable[[Instance], Link], dropped: Callable[[Link], None]
    ) -> None:
        self._service, self._dispatcher = service, dispatcher
        self._connect, self._dropped = connect, dropped
        self._leaving: set[str] = set()
        self.stale = ""
        self.by_name: dict[str, Link] = {}

    def follow(self, snapshot: Snapshot) -> None:
        """The registry's present view."""
        if snapshot.stale and snapshot.stale != self.stale:
            logger.warning("discovery of %s: %s; going on with the teachers last known", self._service, snapshot.stale)
        elif self.stale and not snapshot.stale:
            logger.info("discovery of %s answers again", self._service)
        self.stale = snapshot.stale
        wanted = {instance.id: instance for instance in snapshot.instances if instance.state == "ready"}
        draining = {instance.id for instance in snapshot.instances if instance.state == "draining"}
        for name, link in list(self.by_name.items()):
            moved = name in wanted and wanted[name].endpoint != link.instance.endpoint
            if name not in wanted or moved:
                self._retire(name, "draining" if name in draining else "left")
                if moved:
                    self._drop(name)
        for name, instance in wanted.items():
            self._join(name, instance)

    def is_wanted(self, link: Link) -> bool:
        """Whether this is still the link to its teacher, and the teacher stays."""
        name = link.instance.id
        return name not in self._leaving and self.by_name.get(name) is link

    def lost(self, link: Link) -> None:
        """A link is down; it connects again by itself."""
        level = logging.INFO if link.instance.id in self._leaving else logging.WARNING
        logger.log(level, "teacher %s of %s is lost: %s", link.instance.id, self._service, link.why)
        self._dispatcher.teacher_down(link.instance.id)

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
        known = [f"{link.instance.id}: {self._state(link)[1] or 'connecting'}" for link in list(self.by_name.values())]
        found = "; ".join(known) if known else "none is registered: `edl teachers` lists those that are"
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

    def _retire(self, name: str, why: str) -> None:
        """No new requests; the connection ends with the last request under way."""
        if name in self._leaving:
            return
        logger.info("teacher %s of %s: %s", name, self._service, why)
        self._leaving.add(name)
        self._dispatcher.teacher_draining(name)
        self.end_if_idle(name)

    def _drop(self, name: str) -> None:
        link = self.by_name.pop(name, None)
        self._leaving.discard(name)
        self._dispatcher.teacher_removed(name)
        if link is not None:
            self._dropped(link)

    def _state(self, link: Link) -> tuple[str, str]:
        state = self._dispatcher.teachers.get(link.instance.id)
        if link.instance.id in self._leaving:
            return "draining", ""
        if state is not None and link.state == "ready" and state.closed_until > time.monotonic():
            return "set aside", state.why
        return link.state, link.why
