"""The store on Consul: keys in the folder `edl/` of its KV store, leases as sessions.

Every write is a transaction, which is atomic and tells the version that it made. A session hangs on the TTL check of a
small service of its own (`edl-lease`). A check of the node itself would, when it fails, declare every service of that
node dead.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

from typing_extensions import override

from edl.discovery.base_store import BaseStore, Claim, Entries, held_by_another
from edl.discovery.consul.client import ConsulClient, ConsulTarget, KeyValuePair
from edl.discovery.store import Entry
from edl.discovery.watching import Follower, query_wait_s
from edl.errors import DiscoveryError, LeaseLostError, SettingsError

__all__ = ["LEASE_SERVICE", "ConsulStore"]

ROOT: Final = "edl/"
LEASE_SERVICE: Final = "edl-lease"


class ConsulStore(BaseStore):
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
    def grant(self, ttl_s: float) -> Claim:
        claim = _SessionClaim(self._target, ttl_s)
        try:
            claim.open()
        except BaseException:
            with contextlib.suppress(DiscoveryError):
                claim.withdraw()
            raise
        return claim

    @override
    def owns(self, claim: Claim) -> bool:
        return isinstance(claim, _SessionClaim)

    @override
    def read(self, key: str) -> Entry | None:
        pair = self._client.pair(ROOT + key)
        return None if pair is None else _entry(pair)

    @override
    def read_all(self, prefix: str) -> Sequence[Entry]:
        return [_entry(pair) for pair in self._client.pairs(ROOT + prefix)[1]]

    @override
    def write(self, key: str, value: bytes, expected: int | None, claim: Claim | None) -> Entry | None:
        path = ROOT + key
        for _ in self._attempts(key):
            pair = self._client.pair(path) if claim is None or expected is not None else None
            if expected is not None and expected != _index(pair):
                return None
            index = self._set(path, value, expected, claim, pair)
            if index is not None:
                return Entry(key, value, index)
            if isinstance(claim, _SessionClaim) and (expected is None or _index(self._client.pair(path)) == expected):
                # The lock failed: the session is over, or another one has the key.
                raise held_by_another(key) if claim.renew() else LeaseLostError("the lease has expired")
            if expected is not None:
                return None
        raise AssertionError("unreachable")

    def _set(
        self, path: str, value: bytes, expected: int | None, claim: Claim | None, pair: KeyValuePair | None
    ) -> int | None:
        """Try once; returns the new index, or None if Consul refused."""
        if not isinstance(claim, _SessionClaim):
            if pair is not None and pair.session:
                raise held_by_another(path.removeprefix(ROOT))
            return self._client.transact({"Verb": "cas", "Key": path, "Value": value, "Index": _index(pair)})
        unchanged: list[dict[str, Any]] = []
        if expected is not None:
            check = {"Verb": "check-index", "Index": expected} if expected else {"Verb": "check-not-exists"}
            unchanged = [{"Key": path, **check}]
        lock = {"Verb": "lock", "Key": path, "Value": value, "Session": claim.session}
        return self._client.transact(*unchanged, lock)

    @override
    def remove(self, key: str, version: int | None) -> bool:
        path = ROOT + key
        for _ in self._attempts(key):
            pair = self._client.pair(path)
            if pair is None or version not in (None, pair.index):
                return False
            if self._client.transact({"Verb": "delete-cas", "Key": path, "Index": pair.index}) is not None:
                return True
        raise AssertionError("unreachable")

    @override
    def follow(self, prefix: str) -> Follower[Entries]:
        return _ConsulFollower(self._target, ROOT + prefix)

    def _attempts(self, key: str) -> Iterator[None]:
        """Yield once more after every collision with another writer, until the time for a request is over."""
        deadline = time.monotonic() + self._target.timeout_s
        while True:
            yield
            if time.monotonic() > deadline:
                raise DiscoveryError(f"{self._target}: others change key {key!r} all the time")
            time.sleep(secrets.randbelow(20) / 1000)


class _SessionClaim(Claim):
    """A session, and the service whose check ends it. Its connection is its own, as the lease may outlive a call."""

    def __init__(self, target: ConsulTarget, ttl_s: float) -> None:
        super().__init__()
        self._client = ConsulClient(target)
        self._ttl_s = ttl_s
        self._service_id = f"{LEASE_SERVICE}-{secrets.token_hex(8)}"
        self.session = ""

    def open(self) -> None:
        """Make the session."""
        deadline = time.monotonic() + self._client.target.timeout_s
        while True:
            self._client.register_service(LEASE_SERVICE, self._service_id, self._ttl_s)
            try:
                self.session = self._client.create_session(self._service_id, self._ttl_s)
                self.granted = time.monotonic()
                if self.renew():
                    return
            except DiscoveryError:
                # The servers hear of the check a moment after the agent; on a busy machine it may lapse before that.
                if time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                raise DiscoveryError(f"{self._client.target}: a lease of {self._ttl_s} s lapsed while it was made")
            time.sleep(0.05)

    @override
    def renew(self) -> bool:
        # In this order: an agent that lost the service has ended the session, which the second call finds out.
        return self._client.renew_service(self._service_id) and self._client.renew_session(self.session)

    @override
    def withdraw(self) -> None:
        try:
            if self.session:
                self._client.destroy_session(self.session)
            self._client.deregister_service(self._service_id)
        finally:
            self._client.close()


class _ConsulFollower(Follower[Entries]):
    pause_s: ClassVar[float] = 0.05

    def __init__(self, target: ConsulTarget, path: str) -> None:
        self._client = ConsulClient(target)
        self._path = path
        self._index: int | None = None

    @override
    def next(self, wait_s: float | None) -> Entries:
        known, self._index = self._index, None
        index, pairs = self._client.pairs(self._path, known, query_wait_s(wait_s))
        if known is None or index >= known:  # a Consul that lost its memory is behind; below 1 it would not block
            self._index = max(1, index)
        return {entry.key: entry for entry in map(_entry, pairs)}

    @override
    def close(self) -> None:
        self._client.close()


def _entry(pair: KeyValuePair) -> Entry:
    return Entry(pair.key.removeprefix(ROOT), pair.value, pair.index)


def _index(pair: KeyValuePair | None) -> int:
    """Return what `write` compares: 0 if there is no key."""
    return 0 if pair is None else pair.index
