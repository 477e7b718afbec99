"""The store on Consul: keys in the folder `edl/` of its KV store, leases as sessions.

Every write is a transaction, which is atomic and tells the version that it made.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Iterator

from typing_extensions import override

from edl.discovery.common.blocking_watch import BlockingWatch
from edl.discovery.common.election import StoreElection
from edl.discovery.common.renewal import RenewedLease
from edl.discovery.common.resource import Resource
from edl.discovery.consul.client import ConsulClient, KeyValuePair
from edl.discovery.consul.lease import SessionClaim
from edl.discovery.consul.target import ConsulTarget
from edl.discovery.keys import check_key, check_prefix, check_value
from edl.discovery.records import check_ttl
from edl.discovery.store import Election, Entry, Lease, Store, StoreSnapshot, StoreWatch
from edl.errors import ConflictError, DiscoveryError, LeaseLostError, SettingsError

__all__ = ["ConsulStore"]

ROOT = "edl/"


class ConsulStore(Resource, Store):
    """See `Store`."""

    def __init__(self, target: ConsulTarget) -> None:
        super().__init__()
        if target.dc:
            raise SettingsError(
                f"{target}: a store cannot be in another datacenter (?dc={target.dc}): leases live here"
            )
        self._target = target
        self._client = self._own(ConsulClient(target))

    def __repr__(self) -> str:
        return f"ConsulStore({self._target})"

    @override
    def lease(self, ttl_s: float = 10.0) -> Lease:
        self._check()
        ttl_s = check_ttl(ttl_s)
        claim = SessionClaim(self._target, ttl_s)
        try:
            granted = claim.open()
        except BaseException:
            with contextlib.suppress(DiscoveryError):
                claim.withdraw()
            raise
        return self._own(RenewedLease(claim, ttl_s, granted))

    @override
    def get(self, key: str) -> Entry | None:
        self._check()
        pair = self._client.pair(ROOT + check_key(key))
        return None if pair is None else _entry(pair)

    @override
    def list(self, prefix: str) -> list[Entry]:
        self._check()
        return [_entry(pair) for pair in self._client.pairs(ROOT + check_prefix(prefix))[1]]

    @override
    def put(self, key: str, value: bytes, lease: Lease | None = None) -> Entry:
        self._check()
        path, value = ROOT + check_key(key), check_value(value)
        session = self._session(lease)
        if lease is not None:
            index = self._client.transact({"Verb": "lock", "Key": path, "Value": value, "Session": session})
            if index is None:
                raise _refusal(key, lease)
            return Entry(key, value, index)
        for _ in self._attempts(key):
            pair = self._client.pair(path)
            _refuse_held(key, pair)
            index = self._set_if_unchanged(path, value, pair)
            if index is not None:
                return Entry(key, value, index)
        raise AssertionError("unreachable")

    @override
    def compare_and_set(self, key: str, value: bytes, version: int | None, lease: Lease | None = None) -> Entry | None:
        self._check()
        path, value = ROOT + check_key(key), check_value(value)
        session = self._session(lease)
        pair = self._client.pair(path)
        if (None if pair is None else pair.index) != version:
            return None
        if lease is None:
            _refuse_held(key, pair)
            index = self._set_if_unchanged(path, value, pair)
            return None if index is None else Entry(key, value, index)
        unchanged = (
            {"Verb": "check-not-exists", "Key": path}
            if version is None
            else {"Verb": "check-index", "Key": path, "Index": version}
        )
        index = self._client.transact(unchanged, {"Verb": "lock", "Key": path, "Value": value, "Session": session})
        if index is not None:
            return Entry(key, value, index)
        pair = self._client.pair(path)
        if (None if pair is None else pair.index) == version:
            raise _refusal(key, lease)
        return None

    @override
    def delete(self, key: str, version: int | None = None) -> bool:
        self._check()
        path = ROOT + check_key(key)
        for _ in self._attempts(key):
            pair = self._client.pair(path)
            if pair is None or version not in (None, pair.index):
                return False
            if self._client.transact({"Verb": "delete-cas", "Key": path, "Index": pair.index}) is not None:
                return True
        raise AssertionError("unreachable")

    @override
    def watch(self, prefix: str) -> StoreWatch:
        self._check()
        return self._own(_PrefixWatch(self._target, check_prefix(prefix)))

    @override
    def elect(self, name: str, value: bytes, ttl_s: float = 10.0) -> Election:
        self._check()
        return self._own(StoreElection(self, name, check_value(value), check_ttl(ttl_s)))

    def _set_if_unchanged(self, path: str, value: bytes, pair: KeyValuePair | None) -> int | None:
        index = 0 if pair is None else pair.index
        return self._client.transact({"Verb": "cas", "Key": path, "Value": value, "Index": index})

    def _session(self, lease: Lease | None) -> str:
        """Return the lease's session, empty without a lease."""
        if lease is None:
            return ""
        if not isinstance(lease, RenewedLease) or not isinstance(lease.claim, SessionClaim):
            raise SettingsError(f"{lease!r} is not a lease of {self!r}")
        if lease.lost:
            raise LeaseLostError("the lease has expired")
        return lease.claim.session

    def _attempts(self, key: str) -> Iterator[None]:
        """Yield once more after every collision with another writer, until the time for a request is over."""
        deadline = time.monotonic() + self._target.timeout_s
        while True:
            yield
            if time.monotonic() > deadline:
                raise DiscoveryError(f"{self._target}: others change key {key!r} all the time")
            time.sleep(secrets.randbelow(20) / 1000)


class _PrefixWatch(BlockingWatch["list[KeyValuePair]", StoreSnapshot], StoreWatch):
    def __init__(self, target: ConsulTarget, prefix: str) -> None:
        self._last: dict[str, Entry] = {}
        client = ConsulClient(target)
        super().__init__(
            client,
            lambda index, wait_s: client.pairs(ROOT + prefix, index, wait_s),
            answered=self._take,
            failed=lambda reason: StoreSnapshot(self._last, stale=reason),
        )

    def _take(self, pairs: Iterable[KeyValuePair]) -> StoreSnapshot:
        self._last = {entry.key: entry for entry in map(_entry, pairs)}
        return StoreSnapshot(self._last)

    def get(self, timeout_s: float | None = None) -> StoreSnapshot | None:
        return self.take(timeout_s)


def _entry(pair: KeyValuePair) -> Entry:
    return Entry(pair.key.removeprefix(ROOT), pair.value, pair.index)


def _refuse_held(key: str, pair: KeyValuePair | None) -> None:
    if pair is not None and pair.session:
        raise _held(key)


def _refusal(key: str, lease: Lease) -> LeaseLostError | ConflictError:
    """Return what a failed lock means: the lease is over, or another holds the key."""
    assert isinstance(lease, RenewedLease)
    if lease.claim.renew():
        return _held(key)
    lease.forfeit()
    return LeaseLostError("the lease has expired")


def _held(key: str) -> ConflictError:
    return ConflictError(f"key {key!r} is held by another lease: it can be written with that one only")
