"""What all of EDL's stores do alike: argument checks, leases that are kept renewed, watches and elections.

A backend subclasses `BaseStore` and says how to grant a lease (a `Claim`), read, write, remove and follow keys. The
checks have been made by then, and what a backend raises is already one of EDL's errors. `edl.discovery.registry` builds
services on the same methods, so a new backend is a registry as well.
"""

from __future__ import annotations

import abc
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

from typing_extensions import override

from edl.background import BackgroundLoop
from edl.discovery.records import check_ttl
from edl.discovery.resource import Resource
from edl.discovery.store import (
    Election,
    Entry,
    Lease,
    Store,
    StoreSnapshot,
    StoreWatch,
    check_key,
    check_prefix,
    check_value,
)
from edl.discovery.watching import FollowedWatch, Follower
from edl.errors import ClosedError, ConflictError, DiscoveryError, LeaseLostError, SettingsError
from edl.notifier import Notifier

__all__ = ["BaseStore", "Claim", "RENEWALS", "RenewedLease", "held_by_another", "retry_s"]

log = logging.getLogger("edl.discovery")

RENEWALS: Final = 4
"""Renewals per lease length: three may fail before the lease expires."""
_RETRY_S: Final = 0.5
"""The longest wait before a failed renewal is tried again, so that all are back soon after a store restarts."""
_CAMPAIGN_S: Final = 0.2
"""Wait after a failed attempt to lead: a job without a leader stands still, and an attempt is three small requests."""

Entries = Mapping[str, Entry]


def retry_s(ttl_s: float) -> float:
    """Return how long to wait after a failed renewal of a lease of that length."""
    return min(ttl_s / RENEWALS / 2, _RETRY_S)


def held_by_another(key: str) -> ConflictError:
    """Return the error for a write of a key that belongs to another lease."""
    return ConflictError(f"key {key!r} is held by another lease: it can be written with that one only")


class Claim(abc.ABC):
    """Something in a backend that lasts only as long as it is renewed: a lease. Its methods may raise DiscoveryError.

    Attributes:
        granted: A monotonic time before it was granted, so that the holder's clock runs ahead of the backend's.
    """

    def __init__(self) -> None:
        self.granted = time.monotonic()

    @abc.abstractmethod
    def renew(self) -> bool:
        """Renew; False if it has expired."""

    @abc.abstractmethod
    def withdraw(self) -> None:
        """End it now, with its keys, and release what this object holds. Called once."""


class BaseStore(Resource, Store):
    """See `Store`; a backend implements the methods below."""

    @abc.abstractmethod
    def grant(self, ttl_s: float) -> Claim:
        """Grant a lease."""

    @abc.abstractmethod
    def owns(self, claim: Claim) -> bool:
        """Whether this store can use a claim: it is of the same server or file."""

    @abc.abstractmethod
    def read(self, key: str) -> Entry | None:
        """Read a key."""

    @abc.abstractmethod
    def read_all(self, prefix: str) -> Sequence[Entry]:
        """Read all keys under a prefix, sorted."""

    @abc.abstractmethod
    def write(self, key: str, value: bytes, expected: int | None, claim: Claim | None) -> Entry | None:
        """Write a key under a claim, or under none.

        Args:
            key: The key.
            value: Its value.
            expected: The version that the key must have, 0 if it must not exist, None for any.
            claim: Of this store.

        Returns:
            The new entry; None if the key has another version.

        Raises:
            ConflictError: another claim holds the key.
            LeaseLostError: the claim has expired.
        """

    @abc.abstractmethod
    def remove(self, key: str, version: int | None) -> bool:
        """Delete a key, at that version if it is not None; whether it was deleted."""

    @abc.abstractmethod
    def follow(self, prefix: str) -> Follower[Entries]:
        """Follow all keys under a prefix. Does not wait for the backend."""

    # --- The contract ---

    @override
    def lease(self, ttl_s: float = 10.0) -> Lease:
        self._check()
        ttl_s = check_ttl(ttl_s)
        return self._own(RenewedLease(self.grant(ttl_s), ttl_s))

    @override
    def get(self, key: str) -> Entry | None:
        self._check()
        return self.read(check_key(key))

    @override
    def list(self, prefix: str) -> list[Entry]:
        self._check()
        return [*self.read_all(check_prefix(prefix))]

    @override
    def put(self, key: str, value: bytes, lease: Lease | None = None) -> Entry:
        entry = self._write(key, value, None, lease)
        if entry is None:
            raise DiscoveryError(f"{self!r} compared a version, which it was not asked to")
        return entry

    @override
    def compare_and_set(self, key: str, value: bytes, version: int | None, lease: Lease | None = None) -> Entry | None:
        if version is not None and version < 1:  # no key has that version, and to backends 0 means "no such key"
            self._check()
            check_key(key)
            check_value(value)
            return None
        return self._write(key, value, version or 0, lease)

    def _write(self, key: str, value: bytes, expected: int | None, lease: Lease | None) -> Entry | None:
        self._check()
        check_key(key)
        check_value(value)
        if lease is None:
            return self.write(key, value, expected, None)
        if not isinstance(lease, RenewedLease) or not self.owns(lease.claim):
            raise SettingsError(f"{lease!r} is not a lease of {self!r}")
        if lease.lost:
            raise LeaseLostError("the lease has expired")
        try:
            return self.write(key, value, expected, lease.claim)
        except LeaseLostError:
            lease.forfeit()
            raise

    @override
    def delete(self, key: str, version: int | None = None) -> bool:
        self._check()
        check_key(key)
        return (version is None or version > 0) and self.remove(key, version)

    @override
    def watch(self, prefix: str) -> StoreWatch:
        self._check()
        return self._own(_PrefixWatch(self.follow(check_prefix(prefix))))

    @override
    def elect(self, name: str, value: bytes, ttl_s: float = 10.0) -> Election:
        self._check()
        return self._own(StoreElection(self, name, check_value(value), check_ttl(ttl_s)))


class _PrefixWatch(FollowedWatch[Entries, StoreSnapshot], StoreWatch):
    def __init__(self, follower: Follower[Entries]) -> None:
        self._last: Entries = {}
        super().__init__(follower, self._take, lambda reason: StoreSnapshot(self._last, stale=reason))

    def _take(self, entries: Entries) -> StoreSnapshot:
        self._last = entries
        return StoreSnapshot(entries)


class RenewedLease(Resource, Lease):
    """A lease over a claim that has just been granted."""

    def __init__(self, claim: Claim, ttl_s: float) -> None:
        super().__init__()
        self.claim = claim
        self._ttl_s = ttl_s
        self._expires = claim.granted + ttl_s
        self._late_at = -math.inf
        self._forfeited = False
        self._begun = False
        self._own(BackgroundLoop("edl-lease", self._step))

    @property
    @override
    def lost(self) -> bool:
        if not self._closed:
            self._check_process()
        # Looks at the clock every time: after a pause of the process, the thread may not have noticed yet.
        if self._closed or time.monotonic() >= self._expires:
            self._forfeited = True
        return self._forfeited

    @property
    @override
    def late_at(self) -> float:
        self._record_lateness()
        return self._late_at

    def forfeit(self) -> None:
        """Note that the store says that the lease is gone."""
        self._forfeited = True

    def _record_lateness(self) -> None:
        now = time.monotonic()
        if now > self._expires - self._ttl_s / 2:
            self._late_at = now

    def _step(self) -> float | None:
        if not self._begun:  # it has just been granted
            self._begun = True
            return self._ttl_s / RENEWALS
        if self.lost:
            return None
        asked = time.monotonic()
        try:
            if not self.claim.renew():
                self._forfeited = True
                log.warning("a lease of %g s has expired", self._ttl_s)
                return None
        except DiscoveryError as exc:
            log.debug("a lease of %g s could not be renewed: %s", self._ttl_s, exc)
            return retry_s(self._ttl_s)
        if not self.lost:
            self._record_lateness()
            self._expires = asked + self._ttl_s
        return self._ttl_s / RENEWALS

    def _release(self) -> None:
        try:
            self.claim.withdraw()
        except (DiscoveryError, ClosedError) as exc:  # another thread may close the store at this moment
            log.warning("a lease could not be given up, it expires within %g s: %s", self._ttl_s, exc)


class StoreElection(Resource, Election):
    """A candidate. A thread follows the key, and tries to create it whenever it is gone."""

    def __init__(self, store: Store, name: str, value: bytes, ttl_s: float) -> None:
        super().__init__()
        self._store = store
        self._key = check_key(f"elections/{name}")
        self._value = value
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        self._version: int | None = None  # of the key, while this candidate holds it
        self._changed = Notifier()  # a signal handler may close this in the middle of `wait`
        self._watch: StoreWatch = self._own(store.watch(self._key))
        self._own(BackgroundLoop("edl-election", self._campaign, self._watch.close))

    @property
    @override
    def is_leader(self) -> bool:
        if not self._closed:
            self._check_process()
        lease = self._lease
        return self._version is not None and lease is not None and not lease.lost and not self._closed

    @override
    def leader(self) -> bytes | None:
        self._check()
        entry = self._store.get(self._key)
        return None if entry is None else entry.value

    @override
    def wait(self, timeout_s: float | None = None) -> bool:
        self._check()
        self._changed.wait_for(lambda: self._closed or self.is_leader, timeout_s)
        return not self._closed and self.is_leader

    def _campaign(self) -> float | None:
        try:
            self._try()
        except (DiscoveryError, LeaseLostError) as exc:
            log.debug("election %s: %s", self._key, exc)
            return _CAMPAIGN_S
        except ClosedError:  # the store is being closed, and this candidate with it
            return None
        # The watch only wakes this thread; the store itself is asked for the state. A key that came and went between
        # two looks is missed by the watch, hence a second at most.
        self._watch.get(min(self._ttl_s / 4, 1.0))
        return 0.0

    def _try(self) -> None:
        """Find out whether this candidate leads; take the key if it is free."""
        if self._lease is None or self._lease.lost:
            self._drop_lease()
            self._lease = self._store.lease(self._ttl_s)
        entry = self._store.get(self._key)
        if entry is not None and entry.version == self._version:
            return
        self._version = None
        if entry is not None:
            return
        try:
            entry = self._store.compare_and_set(self._key, self._value, None, self._lease)
        except DiscoveryError:
            # It may have happened all the same, and then nobody would know who leads: give up the key with its lease.
            self._drop_lease()
            raise
        if entry is not None:
            self._version = entry.version
            self._changed.notify()

    def _drop_lease(self) -> None:
        self._version = None
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _halt(self) -> None:
        self._changed.notify()

    def _release(self) -> None:
        self._version = None
        if self._lease is not None:
            self._lease.close()
