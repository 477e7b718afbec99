"""The registry of services: which processes offer which service, kept up to date by leases.

`KeyRegistry` keeps services in any store. A registration consists of two keys under two leases: a record in JSON
(`registry/SERVICE/records/CLAIM`) and a sign of life (`registry/SERVICE/alive/CLAIM`). The record remains for about a
minute after the sign of life has expired. If both exist, the instance is live. If only the record exists, the instance
has lapsed, but may still answer. CLAIM is a random name, so that closing a registration never removes the keys of its
successor.

Consul has its own services, which its UI and DNS show, so the registry in Consul is a separate subclass of `Registry`.
For threads, forks, closing and deadlines, the same rules apply as for stores: see `edl.discovery.store`.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from typing_extensions import override

from edl.background import BackgroundLoop
from edl.discovery.records import (
    Instance,
    Rejected,
    Snapshot,
    check_service,
    check_ttl,
    from_json,
    is_service,
    to_json,
    validated,
)
from edl.discovery.store import RENEWALS, Claim, Entry, Store, retry_s
from edl.discovery.watching import FollowedWatch, Follower, Snapshots
from edl.errors import ClosedError, ConflictError, DiscoveryError, LeaseLostError, SettingsError
from edl.notifier import Notifier
from edl.resource import Resource

log = logging.getLogger("edl.discovery")

ROOT: Final = "registry/"
REMEMBERED_S: Final = 60.0
"""How long an instance whose lease has expired is listed as lapsed. Consul keeps such an instance for the same time."""
_RECORD_RENEWAL_S: Final = 15.0
"""Shortest time between renewals of a record's lease. This lease need not be renewed with every sign of life."""
_ATTEMPTS: Final = 3
"""Number of attempts to write a key: if its lease has expired, a new lease is used, which may expire too if the process
stalls again."""

T = TypeVar("T")


class Watch(Snapshots[Snapshot]):
    """Snapshots of a service as its instances change, with the guarantees of `edl.discovery.store.StoreWatch`."""


class InstanceClaim(abc.ABC):
    """A registration in a backend. It lasts as long as it is renewed. Its methods may raise DiscoveryError."""

    @abc.abstractmethod
    def announce(self, instance: Instance) -> None:
        """Show `instance` to others, in place of the instance that this claim showed before."""

    @abc.abstractmethod
    def renew(self) -> bool:
        """Renew; return False if the registration has lapsed and must be announced again."""

    @abc.abstractmethod
    def withdraw(self) -> None:
        """Deregister now, and release what this object holds. May be called twice."""


@dataclass(eq=False)
class _Update:
    """An announcement that a caller of `update` waits for."""

    instance: Instance
    done: bool = False
    failure: Exception | None = None


class Registration(Resource):
    """An instance that a background thread keeps registered until it is closed.

    The thread renews the lease four times per lease length. If the lease ended (the process was paused, or the registry
    was restarted or lost its data), the thread registers the instance again, with the values of `instance`. `close`
    deregisters the instance. If the registry does not answer at that time, a warning is logged, and the registration
    lapses.

    Args:
        claim: Announced once in the constructor, so that an unreachable registry raises an error. Later, only the
            thread uses the claim; this keeps renewals and updates in order without a lock.
        instance: The instance that other processes see.
        ttl_s: Seconds after the last renewal until the registration lapses.
    """

    def __init__(self, claim: InstanceClaim, instance: Instance, ttl_s: float) -> None:
        super().__init__()
        self._claim = claim
        self._ttl_s = ttl_s
        self._instance = instance
        self._error = ""
        self._updates: deque[_Update] = deque()
        self._updated = Notifier()
        self._announced = False
        self._kept_until = 0.0  # monotonic time at which the registration lapses, as far as known here
        self._renew_at = time.monotonic() + ttl_s / RENEWALS
        self._announce()
        self._background = self._own(BackgroundLoop("edl-registration", self._step))

    @property
    def instance(self) -> Instance:
        """The instance as it is registered, or as it will be registered as soon as the registry answers."""
        return self._instance

    @property
    def error(self) -> str:
        """Why others may not see the instance: the last renewal failed or is taking too long. Empty without a fault."""
        # Checks the clock every time: a renewal may hang for longer than the lease, or the process was paused.
        if not self._error and not self._closed and time.monotonic() >= self._kept_until:
            return f"its lease of {self._ttl_s:g} s has expired: a renewal is taking longer than that"
        return self._error

    def update(self, instance: Instance) -> None:
        """Replace the registered values, for example to start draining.

        Args:
            instance: The new values, with the same service and id.

        Raises:
            SettingsError: The service or id is different, or the instance has values that no registry could hold.
                Nothing is changed.
            DiscoveryError: The registry cannot be reached. The new values are kept, and are written as soon as
                possible.
            ClosedError: The registration is closed, or was closed during the call.
        """
        self._check()
        instance = validated(instance)
        if (instance.service, instance.id) != (self._instance.service, self._instance.id):
            raise SettingsError(
                f"a registration keeps its service and id: {self._instance.service}/{self._instance.id} cannot become"
                f" {instance.service}/{instance.id}"
            )
        update = _Update(instance)
        self._updates.append(update)
        self._background.wake()
        self._updated.wait_for(lambda: update.done or self._closed)
        if not update.done:
            self._check()
        if update.failure is not None:
            try:
                raise update.failure
            finally:
                del update  # the error's traceback references this frame, which would reference the error

    def _announce(self) -> None:
        asked = time.monotonic()
        self._claim.announce(self._instance)
        self._announced = True
        self._kept_until = asked + self._ttl_s

    def _step(self) -> float:
        was_updated = bool(self._updates)
        while self._updates:
            update = self._updates.popleft()
            self._instance = update.instance
            self._announced = False
            try:
                self._announce()
            except Exception as exc:  # noqa: BLE001 - raised again in `update`
                update.failure = exc
            update.done = True
            self._updated.notify()
        if was_updated and not self._announced:
            return retry_s(self._ttl_s)
        # An announcement need not renew the lease, and updates may be more frequent than renewals.
        due_s = self._renew_at - time.monotonic()
        return due_s if due_s > 0 and self._announced and not self._error else self._renew()

    def _renew(self) -> float:
        asked = time.monotonic()
        try:
            if self._announced and self._claim.renew():
                self._kept_until = asked + self._ttl_s
            else:
                self._announced = False
                self._announce()
        except DiscoveryError as exc:
            if not self._error:
                log.warning(
                    "%s/%s cannot be kept registered: %s. Students that are connected stay connected. The registration"
                    " lapses %g s after its last renewal. Retrying until this succeeds",
                    self._instance.service,
                    self._instance.id,
                    exc,
                    self._ttl_s,
                )
            self._error = str(exc)
            return retry_s(self._ttl_s)
        if self._error:
            log.info("%s/%s is registered again", self._instance.service, self._instance.id)
            self._error = ""
        self._renew_at = asked + self._ttl_s / RENEWALS
        return self._ttl_s / RENEWALS

    def _halt(self) -> None:
        self._updated.notify()

    def _release(self) -> None:
        try:
            self._claim.withdraw()
        except (DiscoveryError, ClosedError) as exc:  # another thread may close the registry at this moment
            log.warning(
                "%s/%s could not be deregistered; it lapses within %g s: %s",
                self._instance.service,
                self._instance.id,
                self._ttl_s,
                exc,
            )


class Registry(Resource):
    """Services and the processes that offer them; opened by `open_registry`.

    If the registry cannot be reached, methods raise an error; they never return an empty answer. A registration that
    cannot be used is left out of the instances and listed in `Snapshot.rejected`; it does not affect other
    registrations.
    """

    def register(self, instance: Instance, ttl_s: float = 10.0) -> Registration:
        """Register an instance, and keep it registered until the registration is closed.

        If two live registrations have the same service and id, other processes see the later one. Closing one of the
        two registrations does not affect the other one.

        Args:
            instance: The instance that other processes see.
            ttl_s: Seconds after the last renewal until the registration lapses, 0.5 to 86,400. If this process dies,
                other processes see the instance as lapsed after about that time. (etcd counts whole seconds, rounded
                up.)

        Returns:
            The registration, which other processes see from now on.

        Raises:
            SettingsError: The instance has values that no registry could hold, or `ttl_s` is out of range.
            DiscoveryError: The registry cannot be reached. The registration is not retried: register again.
        """
        self._check()
        instance, ttl_s = validated(instance), check_ttl(ttl_s)
        claim = self._claim(instance, ttl_s)
        try:
            return self._own(Registration(claim, instance, ttl_s))
        except BaseException:
            with contextlib.suppress(DiscoveryError, ClosedError):
                claim.withdraw()
            raise

    def snapshot(self, service: str) -> Snapshot:
        """Return the current instances of a service, with `stale` empty; no instances if there is no such service.

        Args:
            service: The service's name.

        Raises:
            SettingsError: No service can have that name.
            DiscoveryError: The registry cannot be reached.
        """
        self._check()
        return self._read(check_service(service))

    def services(self) -> tuple[str, ...]:
        """Return the names of the services with at least one instance, live or lapsed, sorted.

        Raises:
            DiscoveryError: The registry cannot be reached.
        """
        self._check()
        return tuple(sorted(self._names()))

    def watch(self, service: str) -> Watch:
        """Return a watch of a service, with its own thread and connection.

        The call does not wait for the registry, and does not fail while the registry is unreachable: snapshots report
        this in `stale`.

        Args:
            service: The service's name.

        Raises:
            SettingsError: No service can have that name.
        """
        self._check()
        return self._own(self._follow(check_service(service)))

    @abc.abstractmethod
    def _claim(self, instance: Instance, ttl_s: float) -> InstanceClaim:
        """Prepare a registration without a request to the backend."""

    @abc.abstractmethod
    def _read(self, service: str) -> Snapshot:
        """Read a service."""

    @abc.abstractmethod
    def _names(self) -> Iterable[str]:
        """Read the names of services."""

    @abc.abstractmethod
    def _follow(self, service: str) -> Watch:
        """Follow a service."""


# --- Services in a store ---


class KeyRegistry(Registry):
    """A registry in a store; closing the registry closes the store."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store: Store = self._own(store)

    def __repr__(self) -> str:
        return f"KeyRegistry({self._store!r})"

    @override
    def _claim(self, instance: Instance, ttl_s: float) -> InstanceClaim:
        return _KeysClaim(self._store, instance, ttl_s)

    @override
    def _read(self, service: str) -> Snapshot:
        return _parse(service, self._store.read_all(_folder(service)))

    @override
    def _names(self) -> Iterable[str]:
        parts = (entry.key.removeprefix(ROOT).split("/") for entry in self._store.read_all(ROOT))
        return {names[0] for names in parts if names[1:2] == ["records"] and is_service(names[0])}

    @override
    def _follow(self, service: str) -> Watch:
        follower = self._store.follow(_folder(service))
        return ServiceWatch(service, follower, lambda entries: _parse(service, entries.values()))


class _KeysClaim(InstanceClaim):
    """A record and its sign of life.

    The sign of life is written before the record and withdrawn after the record: a sign without a record is ignored,
    while a record without a sign would be listed as lapsed.
    """

    def __init__(self, store: Store, instance: Instance, ttl_s: float) -> None:
        name, folder = secrets.token_hex(8), _folder(instance.service)
        self._alive = _LeasedKey(store, f"{folder}alive/{name}", ttl_s)
        self._record = _LeasedKey(store, f"{folder}records/{name}", ttl_s + REMEMBERED_S + _RECORD_RENEWAL_S)
        self._record_renewed = -math.inf
        self._checks_record = False

    @override
    def announce(self, instance: Instance) -> None:
        # An update does not rewrite the sign of life: of two registrations with the same id, the later sign counts.
        self._alive.put(b"", 0)
        self._record.put(to_json(instance).encode(), None)

    @override
    def renew(self) -> bool:
        if not self._alive.renew():
            return False
        now = time.monotonic()
        if now >= self._record_renewed + _RECORD_RENEWAL_S:
            if not self._record.renew():
                return False
            self._record_renewed = now
        # Someone may have deleted a key, which does not end its lease. Check one of the two keys each time.
        self._checks_record = not self._checks_record
        return (self._record if self._checks_record else self._alive).exists()

    @override
    def withdraw(self) -> None:
        try:
            self._record.withdraw()
        finally:
            self._alive.withdraw()


class _LeasedKey:
    """A key under its own lease, which is granted when needed."""

    def __init__(self, store: Store, key: str, ttl_s: float) -> None:
        self._store = store
        self._key = key
        self._ttl_s = ttl_s
        self._claim: Claim | None = None

    def put(self, value: bytes, expected: int | None) -> None:
        for _ in range(_ATTEMPTS):
            if self._claim is None:
                self._claim = self._store.grant(self._ttl_s)
            try:
                self._store.write(self._key, value, expected, self._claim)
                return
            except LeaseLostError:
                self._drop()
            except ConflictError as exc:  # an abandoned lease of this claim has not ended yet
                raise DiscoveryError(str(exc)) from exc
        raise DiscoveryError(f"{self._store!r}: a lease of {self._ttl_s:g} s expired before its key was written")

    def renew(self) -> bool:
        if self._claim is None:
            return False
        if self._claim.renew():
            return True
        self._drop()
        return False

    def exists(self) -> bool:
        return self._store.read(self._key) is not None

    def withdraw(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.withdraw()

    def _drop(self) -> None:
        """Release a claim that has expired, and its connection."""
        with contextlib.suppress(DiscoveryError):
            self.withdraw()


def _folder(service: str) -> str:
    return f"{ROOT}{service}/"


def _parse(service: str, found: Iterable[Entry]) -> Snapshot:
    """Return the snapshot for a service's keys."""
    records: dict[str, Entry] = {}
    alive: dict[str, int] = {}
    for entry in found:
        kind, _, name = entry.key.removeprefix(_folder(service)).partition("/")
        if kind == "records":
            records[name] = entry
        elif kind == "alive":
            alive[name] = entry.version
    in_order = sorted(records.items(), key=lambda item: alive.get(item[0], item[1].version))
    read = {name: from_json(service, name, entry.value) for name, entry in in_order}
    return build_snapshot(
        service,
        [instance for name, instance in read.items() if name in alive],
        [instance for name, instance in read.items() if name not in alive],
    )


# --- What a watcher believes ---


def build_snapshot(
    service: str, found: Iterable[Instance | Rejected], lapsed: Iterable[Instance | Rejected] = ()
) -> Snapshot:
    """Sort a registry's entries, given in the order of registration, into a snapshot.

    If two entries have the same id, the later entry counts. Draining instances whose lease has expired count as
    departed, and invalid records whose lease has expired are dropped.
    """
    newest = {entry.id: entry for entry in found}
    over = {entry.id: entry for entry in lapsed if entry.id not in newest}
    by_id = [newest[key] for key in sorted(newest)]
    return Snapshot(
        service,
        tuple(entry for entry in by_id if isinstance(entry, Instance)),
        tuple(entry for entry in by_id if isinstance(entry, Rejected)),
        lapsed=tuple(
            entry for _, entry in sorted(over.items()) if isinstance(entry, Instance) and entry.state == "ready"
        ),
    )


class ServiceView:
    """Turns a registry's answers and failures into the snapshots that a watcher returns. Does no I/O.

    While the registry cannot be reached, snapshots keep the last known instances. A registry that restarts may have
    lost its data, or may list all instances as lapsed until they renew. So snapshots also keep an instance that is
    missing in the first `settle_s` after the outage, and these snapshots are marked stale: a registry restart must not
    make every student drop its teachers.
    """

    def __init__(self, service: str, settle_s: float = 5.0) -> None:
        self._service = service
        self._settle_s = settle_s
        self._last = Snapshot(service, ())
        self._failing = False
        self._settled_at: float | None = None
        self._logged: set[Rejected] = set()

    @property
    def recheck_at(self) -> float | None:
        """When to call `answered` again even without a change, by the clock of its argument `now`; None for never."""
        return self._settled_at if self._last.stale else None

    def answered(self, snapshot: Snapshot, now: float) -> Snapshot:
        """Return the snapshot to hand out after the registry has answered."""
        self._log_rejected(snapshot.rejected)
        if self._failing:
            self._failing = False
            self._settled_at = now + self._settle_s
            log.info("service %s: the registry answers again", self._service)
        if self._settled_at is not None and now >= self._settled_at:
            self._settled_at = None
        self._last = snapshot if self._settled_at is None else self._with_missing(snapshot)
        return self._last

    def failed(self, reason: str) -> Snapshot:
        """Return the snapshot to hand out after the registry failed to answer."""
        if not self._failing:
            self._failing = True
            self._settled_at = None
            known = len(self._last.instances)
            what = f"keeping the last known instances ({known})" if known else "no instance is known yet"
            log.warning("service %s: %s: %s", self._service, what, reason)
        self._last = replace(self._last, stale=reason)
        return self._last

    def _with_missing(self, snapshot: Snapshot) -> Snapshot:
        present = {entry.id for entry in snapshot.instances} | {entry.id for entry in snapshot.rejected}
        missing = [entry for entry in self._last.instances if entry.id not in present]
        if not missing:
            return snapshot
        kept = {entry.id for entry in missing}
        return Snapshot(
            self._service,
            tuple(sorted((*snapshot.instances, *missing), key=lambda entry: entry.id)),
            snapshot.rejected,
            stale=f"after an outage, {len(missing)} instances are missing: waiting for them to register again",
            lapsed=tuple(entry for entry in snapshot.lapsed if entry.id not in kept),
        )

    def _log_rejected(self, rejected: tuple[Rejected, ...]) -> None:
        for entry in rejected:
            if entry not in self._logged:
                log.warning("service %s: registration %s is left out: %s", self._service, entry.id, entry.reason)
        self._logged = set(rejected)


class ServiceWatch(FollowedWatch[T, Snapshot], Watch):
    """Hands out a `ServiceView`'s snapshots of a service; `parse` turns the backend's state into a snapshot."""

    def __init__(self, service: str, follower: Follower[T], parse: Callable[[T], Snapshot]) -> None:
        view = ServiceView(service)
        super().__init__(
            follower,
            answered=lambda found: view.answered(parse(found), time.monotonic()),
            failed=view.failed,
            recheck_at=lambda: view.recheck_at,
        )
