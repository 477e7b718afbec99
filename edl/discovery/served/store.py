"""The Store that another process serves."""

from __future__ import annotations

import time
from typing import Any, Final

from typing_extensions import override

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.discovery.common.election import StoreElection
from edl.discovery.common.latest_value import LatestValue
from edl.discovery.common.renewal import Claim, RenewedLease
from edl.discovery.common.resource import Resource
from edl.discovery.keys import check_key, check_prefix, check_value
from edl.discovery.records import check_ttl
from edl.discovery.served.client import StoreClient, WatchCall
from edl.discovery.served.target import ServedTarget
from edl.discovery.store import Election, Entry, Lease, Store, StoreSnapshot, StoreWatch
from edl.errors import ClosedError, ConflictError, DiscoveryError, LeaseLostError, SettingsError
from edl.protocol import store as messages

__all__ = ["ServedStore"]

_FIRST_RETRY_S: Final = 0.2  # after the first failure: about as long as another process takes to notice and serve
_LAST_RETRY_S: Final = 1.0
"""Another process of the server's host takes over within a fraction of a second: it is found a second later at most."""


class ServedStore(Resource, Store):
    """See `Store`. Opening it asks the server nothing."""

    def __init__(self, target: ServedTarget) -> None:
        super().__init__()
        self._target = target
        self.client: Final = self._own(StoreClient(target))

    def __repr__(self) -> str:
        return f"ServedStore({self._target.url!r})"

    @override
    def lease(self, ttl_s: float = 10.0) -> Lease:
        self._check()
        ttl_s = check_ttl(ttl_s)
        granted = time.monotonic()
        reply = self.client.call("Grant", messages.GrantRequest(ttl_s=ttl_s), messages.GrantReply)
        return self._own(RenewedLease(_GrantedClaim(self.client, reply.lease), ttl_s, granted))

    @override
    def get(self, key: str) -> Entry | None:
        self._check()
        reply = self.client.call("Get", messages.GetRequest(key=check_key(key)), messages.GetReply)
        return _entry(reply.entry) if reply.HasField("entry") else None

    @override
    def list(self, prefix: str) -> list[Entry]:
        self._check()
        state = _PrefixState()
        for reply in self.client.gather(check_prefix(prefix)):
            state.take(reply)
        if state.partial:
            raise DiscoveryError(f"{self._target} broke off in the middle of an answer")
        return [state.entries[key] for key in sorted(state.entries)]

    @override
    def put(self, key: str, value: bytes, lease: Lease | None = None) -> Entry:
        self._check()
        entry = self._set(key, value, {}, lease)
        if entry is None:
            raise DiscoveryError(f"{self._target} gave an answer that does not fit: a version was not asked for")
        return entry

    @override
    def compare_and_set(self, key: str, value: bytes, version: int | None, lease: Lease | None = None) -> Entry | None:
        self._check()
        if version is not None and version < 1:
            check_key(key)
            check_value(value)
            return None  # no key has that version, and 0 means to the server that there is no key
        return self._set(key, value, {"version": version or 0}, lease)

    @override
    def delete(self, key: str, version: int | None = None) -> bool:
        self._check()
        request = messages.DeleteRequest(key=check_key(key), version=version)
        return self.client.call("Delete", request, messages.DeleteReply).deleted

    @override
    def watch(self, prefix: str) -> StoreWatch:
        self._check()
        return self._own(_PushedWatch(self.client, check_prefix(prefix)))

    @override
    def elect(self, name: str, value: bytes, ttl_s: float = 10.0) -> Election:
        self._check()
        return self._own(StoreElection(self, name, check_value(value), check_ttl(ttl_s)))

    def _set(self, key: str, value: bytes, condition: dict[str, int], lease: Lease | None) -> Entry | None:
        request = messages.SetRequest(
            key=check_key(key), value=check_value(value), lease=self._number(lease), **condition
        )
        reply = self.client.call("Set", request, messages.SetReply)
        outcome = messages.SetReply.Outcome
        if reply.outcome == outcome.WRITTEN:
            return Entry(key, value, reply.version)
        if reply.outcome == outcome.OTHER_VERSION:
            return None
        if reply.outcome == outcome.HELD:
            raise ConflictError(f"key {key!r} is held by another lease: it can be written with that one only")
        if reply.outcome == outcome.LEASE_LOST and isinstance(lease, RenewedLease):
            lease.forfeit()
            raise LeaseLostError("the lease has expired")
        raise DiscoveryError(f"{self._target} gave an answer that this version of EDL does not know: {reply.outcome}")

    def _number(self, lease: Lease | None) -> int | None:
        """Return the lease's number at the server, None without a lease."""
        if lease is None:
            return None
        claim = lease.claim if isinstance(lease, RenewedLease) else None
        if not isinstance(lease, RenewedLease) or not isinstance(claim, _GrantedClaim):
            raise SettingsError(f"{lease!r} is not a lease of {self!r}")
        if claim.client.target.endpoint != self._target.endpoint:
            raise SettingsError(f"a lease of {claim.client.target.url} is not a lease of {self!r}")
        if lease.lost:
            raise LeaseLostError("the lease has expired")
        return claim.number


class _GrantedClaim(Claim):
    """A lease at the server."""

    def __init__(self, client: StoreClient, number: int) -> None:
        self.client = client
        self.number = number

    def renew(self) -> bool:
        return self.client.call("Renew", messages.RenewRequest(lease=self.number), messages.RenewReply).renewed

    def withdraw(self) -> None:
        self.client.call("Revoke", messages.RevokeRequest(lease=self.number), messages.RevokeReply)


class _PrefixState:
    """All entries under a prefix, put together from what a server sends; `partial` while the rest is on its way."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.partial = True

    def take(self, reply: messages.WatchReply) -> None:
        for key in reply.deleted:
            self.entries.pop(key, None)
        for entry in reply.changed:
            self.entries[entry.key] = _entry(entry)
        self.partial = reply.more


class _PushedWatch(Resource, StoreWatch):
    """Snapshots that the server pushes, read by a thread."""

    def __init__(self, client: StoreClient, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix
        self._last: dict[str, Entry] = {}
        self._backoff = Backoff(_FIRST_RETRY_S, _LAST_RETRY_S, jitter=0.5)
        self._call: WatchCall | None = None
        self._newest: LatestValue[StoreSnapshot] = LatestValue()
        self._client = client
        self._own(BackgroundLoop("edl-store-watch", self._follow, self._cancel))

    def get(self, timeout_s: float | None = None) -> StoreSnapshot | None:
        if not self._closed:
            self._check()
        return self._newest.take(timeout_s)

    def _halt(self) -> None:
        self._newest.close()

    def _cancel(self) -> None:
        call = self._call
        if call is not None:
            call.cancel()

    def _follow(self) -> float | None:
        state = _PrefixState()
        try:
            self._call = self._client.watch(self._prefix)
            if self._closed:  # it looked for a call to cancel before there was one
                self._call.cancel()
            for reply in self._call:
                state.take(reply)
                if not state.partial:
                    self._backoff.reset()
                    self._last = dict(state.entries)
                    self._newest.put(StoreSnapshot(self._last))
            reason = f"{self._client.target} ended the watch"
        except ClosedError:
            return None
        except DiscoveryError as exc:
            reason = str(exc)
        if self._closed:
            return None
        self._newest.put(StoreSnapshot(self._last, stale=reason))
        return self._backoff.next_wait_s()


def _entry(found: Any) -> Entry:
    return Entry(found.key, found.value, found.version)
