"""Leader election over any store: the candidate that creates the name's key, under a lease, leads."""

from __future__ import annotations

import logging

from typing_extensions import override

from edl.background import BackgroundLoop
from edl.discovery.common.resource import Resource
from edl.discovery.keys import check_key
from edl.discovery.store import Election, Lease, Store, StoreWatch
from edl.errors import ClosedError, DiscoveryError, LeaseLostError
from edl.notifier import Notifier

__all__ = ["StoreElection", "election_key"]

log = logging.getLogger("edl.discovery")

RETRY_S = 0.2
"""Wait after a failed attempt to lead: a job without a leader stands still, and an attempt is three small requests."""


def election_key(name: str) -> str:
    """Return the key that the leader of `name` holds."""
    return f"elections/{name}"


class StoreElection(Resource, Election):
    """A candidate. A thread follows the key and tries to create it whenever it is gone."""

    def __init__(self, store: Store, name: str, value: bytes, ttl_s: float) -> None:
        super().__init__()
        self._store = store
        self._key = check_key(election_key(name))
        self._value = value
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        self._version: int | None = None  # of the key while this candidate holds it
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
            return RETRY_S
        except ClosedError:  # the store is being closed, and this candidate with it
            return None
        # The watch only wakes this thread when the key changes; what is true is asked of the store itself.
        # It can miss a key that came and went between two looks, hence the second at most.
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
            # It may have happened all the same. Nobody would know who leads: give the key up with the lease.
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
