"""Where a reader's teachers come from: fixed endpoints, or a service followed through discovery."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edl.discovery import Registry, Snapshot, open_registry, open_store
from edl.discovery.registry import Instance
from edl.distill.transport.request import check_version
from edl.errors import DiscoveryError, SettingsError
from edl.notifier import ReentrantEvent
from edl.settings import DiscoverySettings, TeacherSettings, is_above_zero, is_count

__all__ = ["Following", "Teachers", "identities", "teachers_from_env"]

logger = logging.getLogger("edl.distill")


@dataclass(frozen=True)
class Teachers:
    """The teachers of one service, or a fixed list of them.

    Attributes:
        service: name under which they register; or
        endpoints: `host:port` of each.
        discovery: URL of the registry; None for `EDL_DISCOVERY`, or this machine's SQLite file.
        max_teachers: talk to so many at most; students of the same service share them out evenly then.
        model: model name in requests; empty for what the teacher registered, or the only one that it serves.
        weight: share in a weighted average with other services.
        version: labels of this version of the model only; empty for any. See "Versions" in docs/students.md.
    """

    service: str | None = None
    endpoints: tuple[str, ...] = ()
    discovery: str | None = None
    max_teachers: int | None = None
    model: str = ""
    weight: float = 1.0
    version: str = ""

    def __post_init__(self) -> None:
        check_version(self.version)
        if bool(self.service) == bool(self.endpoints):
            raise SettingsError("name either a service or endpoints of teachers (and not both)")
        if self.max_teachers is not None and not is_count(self.max_teachers):
            raise SettingsError(f"max_teachers={self.max_teachers!r}: must be a whole number of at least 1, or None")
        if not is_above_zero(self.weight) or self.weight == float("inf"):
            raise SettingsError(f"weight={self.weight!r}: must be a finite number above 0")
        for endpoint in self.endpoints:
            _instance(endpoint)

    @classmethod
    def parse(cls, teachers: str | Sequence[str] | Teachers, *, discovery: str | None = None) -> Teachers:
        """A service's name, `host:port[,host:port…]`, a list of `host:port`, or what is parsed already."""
        if isinstance(teachers, Teachers):
            return teachers
        parts = teachers.split(",") if isinstance(teachers, str) else list(teachers)
        parts = [part.strip() for part in parts if part.strip()]
        if not parts:
            raise SettingsError(f"teachers={teachers!r}: name a service, or host:port of each teacher")
        if len(parts) == 1 and ":" not in parts[0]:
            return cls(service=parts[0], discovery=discovery)
        return cls(endpoints=tuple(parts))

    @property
    def name(self) -> str:
        """For titles."""
        return self.service or ", ".join(self.endpoints)

    @property
    def described(self) -> str:
        """For messages: the name, and where it is looked up."""
        return f"{self.service!r} in {DiscoverySettings.of(self.discovery).url}" if self.service else self.name


def identities(groups: Sequence[Teachers]) -> list[str]:
    """Whose labels those of each group are, in a cache: the service, or all fixed endpoints in one order.

    A registry's URL plays no part, since it has several names, but where an ensemble has a service of one name twice.
    """
    names = [group.service or ",".join(sorted(group.endpoints)) for group in groups]
    places = [(name, DiscoverySettings.of(group.discovery).url) for name, group in zip(names, groups, strict=True)]
    return [
        name if len({url for other, url in places if other == name}) == 1 else " in ".join((name, url))
        for name, url in places
    ]


def teachers_from_env(*, optional: bool = False) -> list[Teachers]:
    """What `EDL_TEACHERS`, or `EDL_SERVICE` and `EDL_DISCOVERY`, say.

    Raises:
        SettingsError: they say nothing, unless teachers are optional.
    """
    settings = TeacherSettings.from_env()
    if settings.endpoints:
        return [Teachers(endpoints=settings.endpoints)]
    if settings.service:
        return [Teachers(settings.service, discovery=settings.discovery, max_teachers=settings.max_teachers)]
    if optional:
        return []
    raise SettingsError(
        "no teachers named: call set_dynamic_teacher or set_fixed_teacher, pass teachers=, "
        "or set EDL_SERVICE (with EDL_DISCOVERY) or EDL_TEACHERS in the environment"
    )


def _instance(endpoint: str) -> Instance:
    if endpoint.startswith("unix:"):
        return Instance(service="fixed", id=endpoint, address=endpoint, port=0)
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(f"teacher {endpoint!r}: expected host:port, such as 10.0.0.7:8500")
    return Instance(service="fixed", id=endpoint, address=host.strip("[]"), port=int(port))


class Following:
    """Tells `changed` of every snapshot, from a thread of its own, until closed."""

    def __init__(self, teachers: Teachers, changed: Callable[[Snapshot], None]) -> None:
        self._teachers, self._changed = teachers, changed
        self._closing = ReentrantEvent()  # closed by signal handlers as well
        self._thread: threading.Thread | None = None
        self._registry: Registry | None = None
        self._last = Snapshot(teachers.name, ())  # teachers last known stay while the registry fails
        self._model = teachers.model
        if teachers.service is None:
            fixed = tuple(replace(_instance(endpoint), model=self._model) for endpoint in teachers.endpoints)
            changed(Snapshot(teachers.name, fixed))
            return
        self._url = DiscoverySettings.of(teachers.discovery).url
        self._registry = open_registry(self._url)  # a bad URL is the caller's error, here and now
        self._thread = threading.Thread(target=self._follow, name=f"edl-follow-{teachers.service}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(10.0)
        if self._registry is not None:
            self._registry.close()

    def _follow(self) -> None:
        service = self._teachers.service
        assert service is not None
        while not self._closing.is_set():
            try:
                self._watch(service)
            except DiscoveryError as exc:
                self._changed(replace(self._last, stale=str(exc)))
                self._closing.wait(1.0)
            except Exception as exc:
                # Whatever it was: a student that no longer hears of teachers would wait for them without a word.
                if self._closing.is_set():
                    return
                logger.exception("following %s failed in a way not foreseen, and is tried again", service)
                self._changed(replace(self._last, stale=f"{type(exc).__name__}: {exc}"))
                self._closing.wait(1.0)

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
        while not self._closing.is_set():
            snapshot = get(0.5)
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
