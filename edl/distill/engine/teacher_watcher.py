"""Follows the teachers of a service through discovery, in a thread of its own."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

from edl.background import BackgroundLoop
from edl.discovery import Registry, Snapshot, open_registry, open_store
from edl.distill.teachers import Teachers, fixed_instance
from edl.errors import DiscoveryError
from edl.settings import DiscoverySettings

__all__ = ["TeacherWatcher"]

logger = logging.getLogger("edl.distill")

_RETRY_S = 1.0
"""Between attempts: a registry that restarts is back within a second or two."""
_LOOK_S = 0.5
"""How often a watch without news looks whether this is closed: so long `close` may take."""
_CLOSE_S = 10.0
"""How long `close` waits for a registry that does not answer: twice a request's own deadline (5 s unless set)."""


class TeacherWatcher:
    """Calls `changed` with every snapshot of a service, from a thread of its own, until closed.

    Args:
        teachers: the service, or fixed endpoints, of which there is a single snapshot.
        changed: called with the snapshots.

    Raises:
        SettingsError: the registry's URL is wrong.
    """

    def __init__(self, teachers: Teachers, changed: Callable[[Snapshot], None]) -> None:
        self._teachers = teachers
        self._changed = changed
        self._closing = False
        self._loop: BackgroundLoop | None = None
        self._registry: Registry | None = None
        self._last = Snapshot(teachers.name, ())  # teachers last known stay while the registry fails
        self._model = teachers.model
        if teachers.service is None:
            fixed = tuple(replace(fixed_instance(endpoint), model=self._model) for endpoint in teachers.endpoints)
            changed(Snapshot(teachers.name, fixed))
            return
        self._url = DiscoverySettings.of(teachers.discovery).url
        self._registry = open_registry(self._url)  # a bad URL is the caller's error, here and now
        self._loop = BackgroundLoop(f"edl-follow-{teachers.service}", self._follow)

    def close(self) -> None:
        """Stop the thread, and close the registry."""
        self._closing = True
        if self._loop is not None:
            self._loop.close(_CLOSE_S)
        if self._registry is not None:
            self._registry.close()

    def _follow(self) -> float | None:
        """Follow the service until closed; return after how many seconds to try again, None for no more."""
        service = self._teachers.service
        assert service is not None
        try:
            self._watch(service)
        except DiscoveryError as exc:
            self._changed(replace(self._last, stale=str(exc)))
        except Exception as exc:
            # Whatever it was: a student that no longer hears of teachers would wait for them without a word.
            if self._closing:
                return None
            logger.exception("following %s failed in a way not foreseen, and is tried again", service)
            self._changed(replace(self._last, stale=f"{type(exc).__name__}: {exc}"))
        return _RETRY_S

    def _watch(self, service: str) -> None:
        assert self._registry is not None
        if self._teachers.max_teachers is None:
            with self._registry.watch(service) as watch:
                self._pass_on(watch.get)
            return
        from edl.discovery.balance.group import BalanceGroup

        store = open_store(self._url)
        try:
            with BalanceGroup(self._registry, store, service, _student_id(), want=self._teachers.max_teachers) as group:
                self._pass_on(group.get)
        finally:
            store.close()

    def _pass_on(self, get: Callable[[float | None], Snapshot | None]) -> None:
        while not self._closing:
            snapshot = get(_LOOK_S)
            if snapshot is None:
                continue
            if self._model:
                named = tuple(replace(instance, model=self._model) for instance in snapshot.instances)
                lapsed = tuple(replace(instance, model=self._model) for instance in snapshot.lapsed)
                snapshot = replace(snapshot, instances=named, lapsed=lapsed)
            self._last = snapshot
            self._changed(snapshot)


def _student_id() -> str:
    place = f"{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}-{os.urandom(4).hex()}"
    return hashlib.sha256(place.encode()).hexdigest()[:16]
