"""Specifies a student's teachers, and watches the teachers of a service through discovery.

Students wait for an unregistered service even if a similar name is registered: `digits-2` may be about to start while
`digits` runs. The watcher logs "did you mean" at once, and `NoTeacherError` repeats it if no teacher appears. If a
fixed endpoint is a DNS name, each of its addresses is a teacher. DNS names are looked up repeatedly, because pods come
and go.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit

from edl.background import BackgroundLoop
from edl.discovery import Instance, Registry, Snapshot, open_registry, open_store
from edl.discovery.records import check_service, is_service
from edl.distill.transport.schema import Priority, check_priority, check_version
from edl.errors import EDLError, SettingsError
from edl.quoting import did_you_mean
from edl.settings import DiscoverySettings, TeacherSettings, is_above_zero, is_count

logger = logging.getLogger("edl.distill")

_RETRY_S = 1.0  # between attempts: a restarting registry is back within a second or two
_LOOK_S = 0.5  # how often a quiet watch checks whether the watcher is closed: `close` may take as long
_NEAR_EVERY_S = 10.0  # how often to ask for similar names while there is no teacher: a Consul call per service
_RESOLVE_S = 5.0  # how often DNS names are looked up: CoreDNS itself answers from a cache for 5 to 30 s
_CLOSE_S = 10.0  # how long `close` waits for a silent registry: twice a request's own deadline (5 s unless set)


@dataclass(frozen=True)
class Teachers:
    """The teachers of a service, or a fixed list of teachers.

    Attributes:
        service: Name under which the teachers register. Set either this or `endpoints`.
        endpoints: `host:port` of every teacher. A DNS name with several addresses means a teacher at each of them.
        discovery: URL of the registry; None for `EDL_DISCOVERY`, or this machine's SQLite file.
        max_teachers: Largest number of teachers to use at a time. Students of the same service then share its teachers.
        model: Model name in requests; empty for the model that the teacher registered, or for its only model.
        weight: Weight of this service in a weighted average over services.
        version: Use only labels of this model version; empty for any. See "Versions" in docs/students.md.
        priority: Priority of requests on a Triton server that has other clients. "lowest" uses the lowest level, with
            few rows and requests at a time; "default" sends no priority; a number is sent as the level. "auto" uses the
            priority with which the server was registered (`edl register --priority`); if there is none, it uses the
            lowest level if the model has levels. See docs/borrowing-triton.md.

    Raises:
        SettingsError: A value is invalid, or neither or both of `service` and `endpoints` are set.
    """

    service: str | None = None
    endpoints: tuple[str, ...] = ()
    discovery: str | None = None
    max_teachers: int | None = None
    model: str = ""
    weight: float = 1.0
    version: str = ""
    priority: Priority = "auto"

    def __post_init__(self) -> None:
        check_version(self.version)
        check_priority(self.priority)
        if bool(self.service) == bool(self.endpoints):
            raise SettingsError("name either a service or endpoints of teachers, not both")
        if self.service:
            if isinstance(self.service, str) and ":" in self.service:
                raise SettingsError(
                    f"service {self.service!r}: a service is looked up by the name that its teachers register under, "
                    "which has no colon. Give addresses (host:port) as Teachers(endpoints=[...]), set_fixed_teacher, "
                    "--teachers or EDL_TEACHERS"
                )
            check_service(self.service)
        if self.max_teachers is not None and not is_count(self.max_teachers):
            raise SettingsError(f"max_teachers={self.max_teachers!r}: must be a whole number of at least 1, or None")
        if not is_above_zero(self.weight) or self.weight == float("inf"):
            raise SettingsError(f"weight={self.weight!r}: must be a finite number above 0")
        for endpoint in self.endpoints:
            fixed_instance(endpoint)

    @classmethod
    def parse(cls, teachers: str | Sequence[str] | Teachers, *, discovery: str | None = None) -> Teachers:
        """Return the teachers that a name or addresses specify.

        Args:
            teachers: A service's name, `host:port[,host:port…]`, a list of `host:port`, or `Teachers`, returned as is.
            discovery: URL of the registry.

        Raises:
            SettingsError: `teachers` is empty, or is neither a name nor addresses.
        """
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
        """The name for use in titles."""
        return self.service or ", ".join(self.endpoints)

    @property
    def described(self) -> str:
        """The name for use in messages, with the registry's URL."""
        return f"{self.service!r} in {DiscoverySettings.of(self.discovery).url}" if self.service else self.name


def service_identities(groups: Sequence[Teachers]) -> list[str]:
    """Return the name of each group's labels in a cache: the service, or all endpoints in sorted order.

    The registry's URL is included only if an ensemble has two services with the same name, because one registry may
    have several URLs.
    """
    names = [group.service or ",".join(sorted(group.endpoints)) for group in groups]
    places = [(name, DiscoverySettings.of(group.discovery).url) for name, group in zip(names, groups, strict=True)]
    return [
        name if len({url for other, url in places if other == name}) == 1 else " in ".join((name, url))
        for name, url in places
    ]


def teachers_from_env(*, optional: bool = False) -> list[Teachers]:
    """Return the teachers in `EDL_TEACHERS`, or `EDL_SERVICE` and `EDL_DISCOVERY`; may be [] if `optional`."""
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


_NO_URL: Final = "name a service, or host:port of teachers; the store's URL is a separate setting"


def fixed_instance(endpoint: str) -> Instance:
    """Return an `Instance` for an endpoint, `host:port` or `unix:/path`."""
    if not _is_endpoint(endpoint):
        if "://" in endpoint:
            meant = urlsplit(endpoint).netloc
            hint = f"did you mean {meant!r} (host:port)?" if _is_endpoint(meant) else _NO_URL
            raise SettingsError(f"teacher {endpoint!r} is a URL; {hint}")
        other = " (name a service with Teachers(service=...) or set_dynamic_teacher)" if is_service(endpoint) else ""
        raise SettingsError(f"teacher {endpoint!r}: expected host:port, such as 10.0.0.7:8500{other}")
    if endpoint.startswith("unix:"):
        return Instance(service="fixed", id=endpoint, address=endpoint, port=0)
    host, _, port = endpoint.rpartition(":")
    return Instance(service="fixed", id=endpoint, address=host.strip("[]"), port=int(port))


def _is_endpoint(text: str) -> bool:
    if text.startswith("unix:"):
        return True
    host, _, port = text.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal() and 0 < int(port) < 65536


@dataclass(frozen=True)
class ResolvedInstance(Instance):
    """One of several addresses of a DNS name. `authority` is the name and port, as in the server's certificate."""

    authority: str = ""


def addresses_of(host: str) -> list[str]:
    """Return a name's addresses in the IP family that this host prefers: in both, a teacher would count twice."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for family, _, _, _, address in found if family == found[0][0]})


def _is_name(instance: Instance) -> bool:
    try:
        ipaddress.ip_address(instance.address)
    except ValueError:
        return not instance.address.startswith("unix:") and instance.address != "localhost"
    return False


class TeacherWatcher:
    """Reports teachers when they change, from its own thread; endpoints without DNS names are reported once.

    `changed` is called with three arguments: the latest snapshot; a hint for messages, see below; and whether the
    snapshot has all of the service's teachers (False if it leaves some to other students, see `max_teachers`, or while
    the registry does not answer). The hint is "; did you mean …?" if the service has never had a teacher and the
    registry has a service with a similar name, otherwise an empty string.
    """

    def __init__(
        self,
        teachers: Teachers,
        changed: Callable[[Snapshot, str, bool], None],
        resolve: Callable[[str], list[str]] | None = None,
    ) -> None:
        self._teachers = teachers
        self._changed = changed
        self._closing = False
        self._loop: BackgroundLoop | None = None
        self._registry: Registry | None = None
        self._last = Snapshot(teachers.name, ())  # the last known teachers stay while the registry fails
        self._has_answered = False
        self._never_seen = True  # whether no instance of the service has ever been registered, as far as we know
        self._near = ""
        self._near_due = 0.0
        self._failure = ""
        self._model = teachers.model
        if teachers.service is None:
            self._resolve = resolve or addresses_of
            self._fixed = [replace(fixed_instance(endpoint), model=self._model) for endpoint in teachers.endpoints]
            self._addresses = {each.address: [each.address] for each in self._fixed}
            if any(map(_is_name, self._fixed)):
                self._loop = BackgroundLoop("edl-resolve", self._follow_addresses)
            else:
                changed(Snapshot(teachers.name, tuple(self._fixed)), "", True)
            return
        self._url = DiscoverySettings.of(teachers.discovery).url
        self._registry = open_registry(self._url)  # a wrong URL is the caller's error, raised here
        self._loop = BackgroundLoop(f"edl-follow-{teachers.service}", self._follow)

    def close(self) -> None:
        """Stop the thread, and close the registry."""
        self._closing = True
        if self._loop is not None:
            self._loop.close(_CLOSE_S)
        if self._registry is not None:
            self._registry.close()

    def _follow_addresses(self) -> float:
        """Report addresses if they have changed; return the seconds until the next look-up."""
        failed = ""
        for host in {each.address for each in self._fixed if _is_name(each)}:
            try:
                self._addresses[host] = self._resolve(host)
            except (OSError, UnicodeError) as exc:
                failed = f"the name {host!r} cannot be resolved: {exc}"
        found = {there.endpoint: there for each in self._fixed for there in self._at_addresses(each)}
        snapshot = Snapshot(self._teachers.name, tuple(found.values()), stale=failed)
        if snapshot != self._last and not self._closing:
            self._last = snapshot
            self._changed(snapshot, "", True)
        return _RESOLVE_S

    def _at_addresses(self, named: Instance) -> list[Instance]:
        addresses = self._addresses[named.address]
        if len(addresses) == 1:
            return [named]  # gRPC resolves the name itself, and certificates are checked against it
        return [
            ResolvedInstance(
                named.service,
                f"{named.id} ({address})",
                address,
                named.port,
                model=named.model,
                authority=named.endpoint,
            )
            for address in addresses
        ]

    def _follow(self) -> float | None:
        """Follow the service until closed; return the seconds until the next attempt, None if there is none."""
        service = self._teachers.service
        assert service is not None
        try:
            self._watch(service)
        except Exception as exc:
            if self._closing:
                return None
            words = str(exc)
            if not isinstance(exc, EDLError):
                words = f"{type(exc).__name__}: {exc}"  # else a student would wait silently
                if words != self._failure:
                    logger.exception("watching %s failed unexpectedly; retrying", service)
            self._failure = words
            self._changed(replace(self._last, stale=words), self._near, False)
        return _RETRY_S

    def _watch(self, service: str) -> None:
        assert self._registry is not None
        if self._teachers.max_teachers is None:
            with self._registry.watch(service) as watch:
                self._pass_on(service, watch.get)
            return
        from edl.discovery.group import BalanceGroup

        with (
            contextlib.closing(open_store(self._url)) as store,
            BalanceGroup(self._registry, store, service, _student_id(), want=self._teachers.max_teachers) as group,
        ):
            self._pass_on(service, group.get)

    def _pass_on(self, service: str, get: Callable[[float | None], Snapshot | None]) -> None:
        while not self._closing:
            snapshot = get(_LOOK_S)
            if snapshot is not None:
                self._last = self._with_model(snapshot)
                self._has_answered = self._has_answered or not snapshot.stale
                if snapshot.instances or snapshot.lapsed or snapshot.rejected:
                    self._never_seen, self._near = False, ""
                self._changed(self._last, self._near, self._sees_all(service))
            if self._has_answered and self._never_seen and time.monotonic() >= self._near_due:
                self._near_due = time.monotonic() + _NEAR_EVERY_S
                self._suggest(service)

    def _sees_all(self, service: str) -> bool:
        assert self._registry is not None
        if self._teachers.max_teachers is None:
            return True
        try:
            return len(self._registry.snapshot(service).instances) <= len(self._last.instances)
        except EDLError:
            return False

    def _with_model(self, snapshot: Snapshot) -> Snapshot:
        if not self._model:
            return snapshot
        named = tuple(replace(instance, model=self._model) for instance in snapshot.instances)
        lapsed = tuple(replace(instance, model=self._model) for instance in snapshot.lapsed)
        return replace(snapshot, instances=named, lapsed=lapsed)

    def _suggest(self, service: str) -> None:
        assert self._registry is not None
        try:
            known = self._registry.services()
        except EDLError:
            return  # the watch reports that the registry does not answer
        near = "" if service in known else did_you_mean(service, known)
        if near == self._near:
            return
        self._near = near
        if near:
            logger.warning("no teacher of %r is registered in %s%s Waiting for one", service, self._url, near)
        self._changed(self._last, near, True)


def _student_id() -> str:
    place = f"{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}-{os.urandom(4).hex()}"
    return hashlib.sha256(place.encode()).hexdigest()[:16]
