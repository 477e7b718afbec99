"""The store on Kubernetes: a ConfigMap for every key, a Lease for every lease, versions as `resourceVersion`.

Every write names the version that it replaces, which the API server compares.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping

from typing_extensions import override

from edl.discovery.common.blocking_watch import BlockingWatch
from edl.discovery.common.election import StoreElection
from edl.discovery.common.renewal import RenewedLease
from edl.discovery.common.resource import Resource
from edl.discovery.keys import check_key, check_prefix, check_value
from edl.discovery.kubernetes.api import KubernetesApi
from edl.discovery.kubernetes.leases import LeaseClaim
from edl.discovery.kubernetes.naming import (
    LeaseRef,
    build_key,
    key_object_name,
    lease_ref_of,
    parse_entry,
    select_prefix,
    version_of,
)
from edl.discovery.kubernetes.reaper import LeaseReaper
from edl.discovery.kubernetes.target import KubernetesTarget
from edl.discovery.kubernetes.watching import ConfigMapWatch
from edl.discovery.records import check_ttl
from edl.discovery.store import Election, Entry, Lease, Store, StoreSnapshot, StoreWatch
from edl.errors import ConflictError, DiscoveryError, LeaseLostError, SettingsError
from edl.kube.objects import Object
from edl.kube.resource_types import CONFIG_MAPS, LEASES

__all__ = ["KubernetesStore"]

log = logging.getLogger("edl.discovery")

_MOST_KNOWN = 1024
"""Keys of which the version written last is kept, so that the next write needs no read before it."""


class KubernetesStore(Resource, Store):
    """See `Store`.

    Args:
        target: which cluster and namespace.
        reaps: take part in removing the leases that are over; False for who only looks, and may change nothing.
    """

    def __init__(self, target: KubernetesTarget, *, reaps: bool = True) -> None:
        super().__init__()
        self._target = target
        self._reaps = reaps
        self._api = self._own(KubernetesApi(target))
        self._first_use = threading.Lock()  # taken without waiting, and never released
        self._known: dict[str, tuple[int, LeaseRef | None]] = {}

    def __repr__(self) -> str:
        return f"KubernetesStore({self._target})"

    @override
    def lease(self, ttl_s: float = 10.0) -> Lease:
        self._begin()
        claim = LeaseClaim(self._target, check_ttl(ttl_s))
        try:
            granted = claim.open()
        except BaseException:
            claim.api.close()
            raise
        return self._own(RenewedLease(claim, ttl_s, granted))

    @override
    def get(self, key: str) -> Entry | None:
        name = key_object_name(check_key(key))
        self._begin()
        found = self._api.get(CONFIG_MAPS, name)
        if found is None:
            return None
        entry = parse_entry(found)
        if entry is None:
            raise DiscoveryError(
                f"{self._target}: ConfigMap {name} (key {key!r}) was spoiled by another program: delete it"
            )
        return entry

    @override
    def list(self, prefix: str) -> list[Entry]:
        selector = select_prefix(check_prefix(prefix))
        self._begin()
        entries = (parse_entry(obj) for obj in self._api.list(CONFIG_MAPS, selector))
        return sorted(
            (entry for entry in entries if entry is not None and entry.key.startswith(prefix)),
            key=lambda entry: entry.key,
        )

    @override
    def put(self, key: str, value: bytes, lease: Lease | None = None) -> Entry:
        key, value = check_key(key), check_value(value)
        self._begin()
        claim = self._claim(lease)
        name, ref = key_object_name(key), claim.ref if claim else None
        for _ in self._attempts(key):
            version, holder = self._known.get(name) or self._read(name)
            if holder not in (None, ref) and self._is_held(holder):
                raise _held(key)
            entry = self._write(key, value, version, claim)
            if entry is not None:
                self._verify(entry, lease)
                return entry
        raise AssertionError("unreachable")

    @override
    def compare_and_set(self, key: str, value: bytes, version: int | None, lease: Lease | None = None) -> Entry | None:
        key, value = check_key(key), check_value(value)
        self._begin()
        claim = self._claim(lease)
        name, ref = key_object_name(key), claim.ref if claim else None
        if version is not None and version < 1:
            return None
        known = self._known.get(name)
        found, holder = known if known is not None and known[0] == version else (0, None)
        if version is not None and not found:
            found, holder = self._read(name)
            if found != version:
                return None
        if holder not in (None, ref) and self._is_held(holder):
            raise _held(key)
        entry = self._write(key, value, found, claim)
        if entry is None and version is None:
            entry = self._write_dead(key, value, claim)
        if entry is not None:
            self._verify(entry, lease)
        return entry

    @override
    def delete(self, key: str, version: int | None = None) -> bool:
        name = key_object_name(check_key(key))
        self._begin()
        self._known.pop(name, None)
        if version is not None and version < 1:
            return False
        try:
            return self._api.delete(CONFIG_MAPS, name, resource_version="" if version is None else str(version))
        except ConflictError:
            return False

    @override
    def watch(self, prefix: str) -> StoreWatch:
        check_prefix(prefix)
        self._begin()
        return self._own(_PrefixWatch(self._api, prefix))

    @override
    def elect(self, name: str, value: bytes, ttl_s: float = 10.0) -> Election:
        self._begin()
        return self._own(StoreElection(self, name, check_value(value), check_ttl(ttl_s)))

    def _begin(self) -> None:
        """Check that this is open; with the first use, begin to see to it that leases end."""
        self._check()
        if self._reaps and self._first_use.acquire(blocking=False):
            self._own(LeaseReaper(self._api))

    def _claim(self, lease: Lease | None) -> LeaseClaim | None:
        if lease is None:
            return None
        claim = lease.claim if isinstance(lease, RenewedLease) else None
        if not isinstance(claim, LeaseClaim) or claim.api.target != self._target:
            raise SettingsError(f"{lease!r} is not a lease of {self!r}")
        if lease.lost:
            raise LeaseLostError("the lease has expired")
        return claim

    def _read(self, name: str) -> tuple[int, LeaseRef | None]:
        """Version and lease of a key; 0 where there is no such key."""
        found = self._api.get(CONFIG_MAPS, name)
        return (0, None) if found is None else (version_of(found), lease_ref_of(found))

    def _is_held(self, holder: LeaseRef | None) -> bool:
        """Whether a lease is there; a key whose lease is gone is about to be removed, and free."""
        found = self._api.get(LEASES, holder.name) if holder is not None else None
        return found is not None and holder is not None and found["metadata"].get("uid") == holder.uid

    def _write(self, key: str, value: bytes, version: int, claim: LeaseClaim | None) -> Entry | None:
        """Write a key over a version, 0 where there must be no such key; None where it is another by now."""
        name, ref = key_object_name(key), claim.ref if claim else None
        try:
            if version:
                patch = build_key(key, value, ref, str(version))
                written: Object | None = self._api.patch(CONFIG_MAPS, name, patch)
            else:
                written = self._api.create(CONFIG_MAPS, build_key(key, value, ref))
        except ConflictError:
            written = None
        except DiscoveryError:
            self._known.pop(name, None)
            raise
        if written is None:
            self._known.pop(name, None)
            return None
        if claim is not None:
            claim.add_key(name, version_of(written))
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        entry = Entry(key, value, version_of(written))
        self._known[name] = (entry.version, ref)
        return entry

    def _write_dead(self, key: str, value: bytes, claim: LeaseClaim | None) -> Entry | None:
        """Write a key that went with its lease, while who removes such keys is late or just at it; None if it lives."""
        name = key_object_name(key)
        for _ in self._attempts(key):
            found, holder = self._read(name)
            if found and (holder is None or self._is_held(holder)):
                return None
            entry = self._write(key, value, found, claim)
            if entry is not None:
                return entry
        raise AssertionError("unreachable")

    def _verify(self, entry: Entry, lease: Lease | None) -> None:
        """Undo a write whose lease ended while it was made."""
        if lease is not None and lease.lost:
            self.delete(entry.key, entry.version)
            raise LeaseLostError("the lease has expired")

    def _attempts(self, key: str) -> Iterator[None]:
        """Yield once more after every collision with another writer, until the time for a request is over."""
        deadline = time.monotonic() + self._target.settings.timeout_s
        while True:
            yield
            if time.monotonic() > deadline:
                raise DiscoveryError(f"{self._target}: others change key {key!r} all the time")
            time.sleep(secrets.randbelow(20) / 1000)


class _PrefixWatch(BlockingWatch[Mapping[str, Entry], StoreSnapshot], StoreWatch):
    def __init__(self, api: KubernetesApi, prefix: str) -> None:
        self._last: Mapping[str, Entry] = {}
        self._read: dict[int, Entry | None] = {}  # by version, which no other object has
        self._prefix = prefix
        objects = ConfigMapWatch(api, select_prefix(prefix))

        def query(index: int | None, wait_s: float) -> tuple[int, Mapping[str, Entry]]:
            version, found = objects.await_change(index, wait_s)
            return version, self._parse(found.values())

        super().__init__(
            objects,
            query,
            answered=self._take,
            failed=lambda reason: StoreSnapshot(self._last, stale=reason),
        )

    def _parse(self, found: Iterable[Object]) -> Mapping[str, Entry]:
        read: dict[int, Entry | None] = {}
        for obj in found:
            version = version_of(obj)
            read[version] = self._read[version] if version in self._read else parse_entry(obj)
        self._read = read
        entries = (entry for entry in read.values() if entry is not None)
        return {entry.key: entry for entry in entries if entry.key.startswith(self._prefix)}

    def _take(self, entries: Mapping[str, Entry]) -> StoreSnapshot:
        self._last = entries
        return StoreSnapshot(entries)

    def get(self, timeout_s: float | None = None) -> StoreSnapshot | None:
        return self.take(timeout_s)


def _held(key: str) -> ConflictError:
    return ConflictError(f"key {key!r} is held by another lease: it can be written with that one only")
