"""The store on etcd: keys that start with `edl/store/`, leases as etcd's own, versions as revisions.

Every write is a transaction, which compares the version and the lease of the key and sets it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from typing_extensions import override

from edl.discovery.common.blocking_watch import BlockingWatch
from edl.discovery.common.election import StoreElection
from edl.discovery.common.renewal import Claim, RenewedLease
from edl.discovery.common.resource import Resource
from edl.discovery.etcd.client import EtcdClient
from edl.discovery.etcd.target import EtcdTarget
from edl.discovery.keys import check_key, check_prefix, check_value
from edl.discovery.records import check_ttl
from edl.discovery.store import Election, Entry, Lease, Store, StoreSnapshot, StoreWatch
from edl.errors import ConflictError, DiscoveryError, LeaseLostError, SettingsError
from edl.protocol import etcd as wire

__all__ = ["EtcdStore"]

ROOT = "edl/store/"
_NO_LEASE = 0
"""etcd's own number for a key that belongs to no lease."""


class EtcdStore(Resource, Store):
    """See `Store`."""

    def __init__(self, target: EtcdTarget) -> None:
        super().__init__()
        self._target = target
        self._client = self._own(EtcdClient(target))

    def __repr__(self) -> str:
        return f"EtcdStore({self._target})"

    @override
    def lease(self, ttl_s: float = 10.0) -> Lease:
        self._check()
        ttl_s = check_ttl(ttl_s)
        claim = _LeaseClaim(self._target)
        try:
            granted = claim.open(ttl_s)
        except BaseException:
            claim.client.close()
            raise
        return self._own(RenewedLease(claim, ttl_s, granted))

    @override
    def get(self, key: str) -> Entry | None:
        self._check()
        found = self._client.entry(_path(check_key(key)))
        return None if found is None else _entry(found)

    @override
    def list(self, prefix: str) -> list[Entry]:
        self._check()
        return [_entry(found) for found in self._client.entries(_path(check_prefix(prefix)))[1]]

    @override
    def put(self, key: str, value: bytes, lease: Lease | None = None) -> Entry:
        self._check()
        path, value = _path(check_key(key)), check_value(value)
        answer = self._write(_put_if_free(path, value, self._number(lease)), lease)
        if not _has_put(answer):
            raise _held(key)
        return Entry(key, value, answer.header.revision)

    @override
    def compare_and_set(self, key: str, value: bytes, version: int | None, lease: Lease | None = None) -> Entry | None:
        self._check()
        path, value = _path(check_key(key)), check_value(value)
        number = self._number(lease)
        if version is not None and version < 1:
            return None  # no key has that version, and 0 means to etcd that there is no key
        put = wire.RequestOp(request_txn=_put_if_free(path, value, number))
        answer = self._write(wire.TxnRequest(compare=[_has_version(path, version or 0)], success=[put]), lease)
        if not answer.succeeded:
            return None
        if not any(_has_put(inner.response_txn) for inner in answer.responses):
            raise _held(key)
        return Entry(key, value, answer.header.revision)

    @override
    def delete(self, key: str, version: int | None = None) -> bool:
        self._check()
        path = _path(check_key(key))
        if version is None:
            return self._client.delete(path)
        delete = wire.RequestOp(request_delete_range=wire.DeleteRangeRequest(key=path))
        request = wire.TxnRequest(compare=[_has_version(path, version)], success=[delete])
        return version > 0 and self._write(request, None).succeeded

    @override
    def watch(self, prefix: str) -> StoreWatch:
        self._check()
        return self._own(_PrefixWatch(self._target, _path(check_prefix(prefix))))

    @override
    def elect(self, name: str, value: bytes, ttl_s: float = 10.0) -> Election:
        self._check()
        return self._own(StoreElection(self, name, check_value(value), check_ttl(ttl_s)))

    def _number(self, lease: Lease | None) -> int:
        """Return the lease's id, 0 without a lease."""
        if lease is None:
            return _NO_LEASE
        claim = lease.claim if isinstance(lease, RenewedLease) else None
        if not isinstance(claim, _LeaseClaim) or claim.client.target.endpoints != self._target.endpoints:
            raise SettingsError(f"{lease!r} is not a lease of {self!r}")
        if lease.lost:
            raise LeaseLostError("the lease has expired")
        return claim.number

    def _write(self, request: wire.TxnRequest, lease: Lease | None) -> wire.TxnResponse:
        answer = self._client.transact(request)
        if answer is not None:
            return answer
        if not isinstance(lease, RenewedLease):
            raise DiscoveryError(
                f"{self._target}: the answer is not what etcd answers: a lease is gone, and none was named"
            )
        lease.forfeit()
        raise LeaseLostError("the lease has expired")


class _LeaseClaim(Claim):
    """A lease of etcd's. Its connection is its own: the store may be closed while the lease is made."""

    def __init__(self, target: EtcdTarget) -> None:
        self.client = EtcdClient(target)
        self.number = 0
        self._ttl_s = 0.0

    def open(self, ttl_s: float) -> float:
        """Have the lease granted; returns a monotonic time before that."""
        asked = time.monotonic()
        self.number = self.client.grant(ttl_s)
        self._ttl_s = ttl_s
        return asked

    def renew(self) -> bool:
        return self.client.renew(self.number, self._ttl_s)

    def withdraw(self) -> None:
        try:
            self.client.revoke(self.number)
        finally:
            self.client.close()


class _PrefixWatch(BlockingWatch["list[wire.KeyValue]", StoreSnapshot], StoreWatch):
    def __init__(self, target: EtcdTarget, path: bytes) -> None:
        self._last: dict[str, Entry] = {}
        client = EtcdClient(target, from_main=False)

        def query(index: int | None, wait_s: float) -> tuple[int, list[wire.KeyValue]]:
            if index is not None:
                client.await_change(path, index, wait_s)
            return client.entries(path)

        super().__init__(
            client,
            query,
            answered=self._take,
            failed=lambda reason: StoreSnapshot(self._last, stale=reason),
        )

    def _take(self, found: Iterable[wire.KeyValue]) -> StoreSnapshot:
        self._last = {entry.key: entry for entry in map(_entry, found)}
        return StoreSnapshot(self._last)

    def get(self, timeout_s: float | None = None) -> StoreSnapshot | None:
        return self.take(timeout_s)


def _path(key: str) -> bytes:
    return (ROOT + key).encode()


def _entry(found: wire.KeyValue) -> Entry:
    # Somebody else may have put a key there that is no text.
    return Entry(found.key.decode(errors="replace").removeprefix(ROOT), found.value, found.mod_revision)


def _has_version(path: bytes, version: int) -> wire.Compare:
    """Whether a key was last written at that revision; 0: whether there is none."""
    return wire.Compare(target=wire.Compare.MOD, key=path, mod_revision=version)


def _put_if_free(path: bytes, value: bytes, lease: int) -> wire.TxnRequest:
    """Set a key unless another lease holds it. A missing key has lease 0 in etcd's eyes."""
    put = wire.RequestOp(request_put=wire.PutRequest(key=path, value=value, lease=lease))

    def if_held_by(holder: int) -> wire.TxnRequest:
        compare = wire.Compare(target=wire.Compare.LEASE, key=path, lease=holder)
        return wire.TxnRequest(compare=[compare], success=[put])

    request = if_held_by(_NO_LEASE)
    if lease != _NO_LEASE:
        request.failure.append(wire.RequestOp(request_txn=if_held_by(lease)))
    return request


def _has_put(answer: wire.TxnResponse) -> bool:
    """Return whether either branch of `_put_if_free` was taken."""
    return answer.succeeded or any(inner.response_txn.succeeded for inner in answer.responses)


def _held(key: str) -> ConflictError:
    return ConflictError(f"key {key!r} is held by another lease: it can be written with that one only")
