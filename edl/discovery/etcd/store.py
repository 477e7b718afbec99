"""The store on etcd: keys below `edl/store/`, leases as etcd's own, versions as revisions.

Every write is a transaction, which compares the version and the lease of the key and sets it. A registry uses the same
class with keys below `edl/`, where earlier releases have their registrations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from typing_extensions import override

from edl.discovery.base_store import BaseStore, Claim, Entries, held_by_another
from edl.discovery.etcd.client import EtcdClient, EtcdTarget
from edl.discovery.store import Entry
from edl.discovery.watching import Follower, query_wait_s
from edl.errors import DiscoveryError, LeaseLostError
from edl.protocol import etcd as wire

__all__ = ["REGISTRY_ROOT", "EtcdStore"]

ROOT: Final = "edl/store/"
REGISTRY_ROOT: Final = "edl/"
_NO_LEASE: Final = 0
"""etcd's own number for a key that belongs to no lease."""


class EtcdStore(BaseStore):
    """See `Store`."""

    def __init__(self, target: EtcdTarget, root: str = ROOT) -> None:
        super().__init__()
        self._target = target
        self._root = root
        self._client = self._own(EtcdClient(target))

    def __repr__(self) -> str:
        return f"EtcdStore({self._target})"

    @override
    def grant(self, ttl_s: float) -> Claim:
        return _EtcdClaim(self._target, ttl_s)

    @override
    def owns(self, claim: Claim) -> bool:
        return isinstance(claim, _EtcdClaim) and claim.client.target.endpoints == self._target.endpoints

    @override
    def read(self, key: str) -> Entry | None:
        found = self._client.entry(self._path(key))
        return None if found is None else _entry(found, self._root)

    @override
    def read_all(self, prefix: str) -> Sequence[Entry]:
        return [_entry(found, self._root) for found in self._client.entries(self._path(prefix))[1]]

    @override
    def write(self, key: str, value: bytes, expected: int | None, claim: Claim | None) -> Entry | None:
        path = self._path(key)
        put = _put_if_free(path, value, claim.number if isinstance(claim, _EtcdClaim) else _NO_LEASE)
        if expected is None:
            request = put
        else:  # a key that does not exist has revision 0
            request = wire.TxnRequest(compare=[_has_version(path, expected)], success=[wire.RequestOp(request_txn=put)])
        answer = self._client.transact(request)
        if answer is None:
            if claim is None:
                raise DiscoveryError(
                    f"{self._target}: the answer is not what etcd answers: a lease is gone, and none was named"
                )
            raise LeaseLostError("the lease has expired")
        if expected is None:
            written = _has_put(answer)
        elif not answer.succeeded:
            return None
        else:
            written = any(_has_put(inner.response_txn) for inner in answer.responses)
        if not written:
            raise held_by_another(key)
        return Entry(key, value, answer.header.revision)

    @override
    def remove(self, key: str, version: int | None) -> bool:
        path = self._path(key)
        if version is None:
            return self._client.delete(path)
        delete = wire.RequestOp(request_delete_range=wire.DeleteRangeRequest(key=path))
        answer = self._client.transact(wire.TxnRequest(compare=[_has_version(path, version)], success=[delete]))
        return answer is not None and answer.succeeded

    @override
    def follow(self, prefix: str) -> Follower[Entries]:
        return _EtcdFollower(self._target, self._root, self._path(prefix))

    def _path(self, key: str) -> bytes:
        return (self._root + key).encode()


class _EtcdClaim(Claim):
    """A lease of etcd's. Its connection is its own: the store may be closed while the lease is granted."""

    def __init__(self, target: EtcdTarget, ttl_s: float) -> None:
        super().__init__()
        self.client = EtcdClient(target)
        self._ttl_s = ttl_s
        try:
            self.number = self.client.grant(ttl_s)
        except BaseException:
            self.client.close()
            raise

    @override
    def renew(self) -> bool:
        return self.client.renew(self.number, self._ttl_s)

    @override
    def withdraw(self) -> None:
        try:
            self.client.revoke(self.number)
        finally:
            self.client.close()


class _EtcdFollower(Follower[Entries]):
    pause_s: ClassVar[float] = 0.05

    def __init__(self, target: EtcdTarget, root: str, path: bytes) -> None:
        self._client = EtcdClient(target, from_main=False)
        self._root = root
        self._path = path
        self._revision: int | None = None

    @override
    def next(self, wait_s: float | None) -> Entries:
        known, self._revision = self._revision, None
        if known is not None:
            self._client.await_change(self._path, known, query_wait_s(wait_s))
        revision, found = self._client.entries(self._path)
        if known is None or revision >= known:  # an etcd that began anew is behind
            self._revision = max(1, revision)
        return {entry.key: entry for entry in (_entry(each, self._root) for each in found)}

    @override
    def close(self) -> None:
        self._client.close()


def _entry(found: wire.KeyValue, root: str) -> Entry:
    # Another program may have put a key there that is no text.
    return Entry(found.key.decode(errors="replace").removeprefix(root), found.value, found.mod_revision)


def _has_version(path: bytes, version: int) -> wire.Compare:
    """Compare a key's last revision; 0 means that the key does not exist."""
    return wire.Compare(target=wire.Compare.MOD, key=path, mod_revision=version)


def _put_if_free(path: bytes, value: bytes, lease: int) -> wire.TxnRequest:
    """Set a key unless another lease holds it. To etcd a missing key has lease 0."""
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
