"""Implements discovery on Consul: keys in the folder `edl/` of its KV store, leases as sessions, teachers as services.

Use the agent on the process's own machine, not a load balancer in front of several agents: a registration or a lease
belongs to the agent that created it.

Every write of the store is a transaction, which is atomic and returns the new version. A session depends on the TTL
check of its own small service (`edl-lease`), not on a check of the node: if a check of the node failed, Consul would
consider all services of the node dead. For each instance, the registry creates an ordinary service with a TTL check, so
that Consul's UI and DNS show the instance.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeVar

from typing_extensions import override

from edl.discovery.consul_client import ALIVE, ConsulClient, ConsulTarget
from edl.discovery.records import RESERVED_META, Instance, Rejected, Snapshot, is_service, parsed
from edl.discovery.registry import InstanceClaim, Registry, ServiceWatch, Watch, build_snapshot
from edl.discovery.store import Claim, Entries, Entry, Store, held_by_another
from edl.discovery.watching import Follower, query_wait_s
from edl.errors import DiscoveryError, LeaseLostError

T = TypeVar("T")

ROOT: Final = "edl/"
LEASE_SERVICE: Final = "edl-lease"
NODE_ALIVE: Final = "serfHealth"  # Consul's own name for the check of a node


class _BlockingFollower(Follower[T]):
    """Sends the index of the last answer with each query, so that Consul holds the query until something changes."""

    pause_s: ClassVar[float] = 0.05

    def __init__(self, target: ConsulTarget, ask: Callable[[ConsulClient, int | None, float], tuple[int, T]]) -> None:
        self._client = ConsulClient(target)
        self._ask = ask
        self._index: int | None = None

    @override
    def next(self, wait_s: float | None) -> T:
        known, self._index = self._index, None
        index, found = self._ask(self._client, known, query_wait_s(wait_s))
        if known is None or index >= known:  # a Consul that lost its data is behind; below 1 it would not block
            self._index = max(1, index)
        return found

    @override
    def close(self) -> None:
        self._client.close()


# --- The store ---


class ConsulStore(Store):
    """See `Store`."""

    def __init__(self, target: ConsulTarget) -> None:
        super().__init__()
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
        pair = self._pair(key)
        return None if pair is None else pair.entry

    @override
    def read_all(self, prefix: str) -> Sequence[Entry]:
        return [pair.entry for pair in _pairs(self._client, prefix)[1]]

    @override
    def write(self, key: str, value: bytes, expected: int | None, claim: Claim | None) -> Entry | None:
        for _ in self._attempts(key):
            pair = self._pair(key) if claim is None or expected is not None else None
            if expected is not None and expected != _version(pair):
                return None
            version = self._set(key, value, expected, claim, pair)
            if version is not None:
                return Entry(key, value, version)
            if isinstance(claim, _SessionClaim) and (expected is None or _version(self._pair(key)) == expected):
                # The lock failed: the session has ended, or another one holds the key.
                raise held_by_another(key) if claim.renew() else LeaseLostError("the lease has expired")
            if expected is not None:
                return None
        raise AssertionError("unreachable")

    def _set(self, key: str, value: bytes, expected: int | None, claim: Claim | None, pair: _Pair | None) -> int | None:
        """Try once; return the new version, or None if Consul refused."""
        write = {"Key": ROOT + key, "Value": base64.b64encode(value).decode()}
        if not isinstance(claim, _SessionClaim):
            if pair is not None and pair.session:
                raise held_by_another(key)
            return self._transact({"Verb": "cas", "Index": _version(pair), **write})
        lock = {"Verb": "lock", "Session": claim.session, **write}
        if expected is None:
            return self._transact(lock)
        check = {"Verb": "check-index", "Index": expected} if expected else {"Verb": "check-not-exists"}
        return self._transact({"Key": ROOT + key, **check}, lock)

    @override
    def remove(self, key: str, version: int | None) -> bool:
        for _ in self._attempts(key):
            pair = self._pair(key)
            if pair is None or version not in (None, pair.entry.version):
                return False
            delete = {"Verb": "delete-cas", "Key": ROOT + key, "Index": pair.entry.version}
            if self._transact(delete) is not None:
                return True
        raise AssertionError("unreachable")

    @override
    def follow(self, prefix: str) -> Follower[Entries]:
        def ask(client: ConsulClient, index: int | None, wait_s: float) -> tuple[int, Entries]:
            index, pairs = _pairs(client, prefix, index, wait_s)
            return index, {pair.entry.key: pair.entry for pair in pairs}

        return _BlockingFollower(self._target, ask)

    def _pair(self, key: str) -> _Pair | None:
        answer = self._client.ask("GET", f"/v1/kv/{ROOT}{key}", accepts=(404,))
        with self._client.understood():
            return None if answer.status == 404 else _parse_pair(json.loads(answer.body)[0])

    def _transact(self, *operations: Mapping[str, Any]) -> int | None:
        """Do all `operations` on keys, or none; return the last key's index, None if Consul refused an operation."""
        answer = self._client.ask("PUT", "/v1/txn", [{"KV": operation} for operation in operations], accepts=(409,))
        if answer.status == 409:
            return None
        with self._client.understood():
            results = json.loads(answer.body)["Results"] or [{"KV": {"ModifyIndex": 0}}]  # deletions have no result
            return int(results[-1]["KV"]["ModifyIndex"])

    def _attempts(self, key: str) -> Iterator[None]:
        """Yield again after every collision with another writer, until the request's time is up."""
        deadline = time.monotonic() + self._target.timeout_s
        while True:
            yield
            if time.monotonic() > deadline:
                raise DiscoveryError(f"{self._target}: other writers keep changing key {key!r}")
            time.sleep(secrets.randbelow(20) / 1000)


class _SessionClaim(Claim):
    """A session, and the service whose check ends it. Has its own connection, as a lease may outlive a call."""

    def __init__(self, target: ConsulTarget, ttl_s: float) -> None:
        super().__init__()
        self._client = ConsulClient(target)
        self._ttl_s = ttl_s
        self._service_id = f"{LEASE_SERVICE}-{secrets.token_hex(8)}"
        self.session = ""

    def open(self) -> None:
        deadline = time.monotonic() + self._client.target.timeout_s
        while True:
            self._client.register_service(LEASE_SERVICE, self._service_id, self._ttl_s)
            try:
                self.session = self._create()
                self.granted = time.monotonic()
                if self.renew():
                    return
            except DiscoveryError:
                # The servers hear of the check a moment after the agent; on a busy machine it may lapse before that.
                if time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                raise DiscoveryError(
                    f"{self._client.target}: a lease of {self._ttl_s} s lapsed while it was being created"
                )
            time.sleep(0.05)

    def _create(self) -> str:
        """Create a session that ends when the service lapses; Consul then deletes the keys that the session has locked.

        A session's own TTL is at least ten seconds, and Consul may double it, so the service's check normally ends the
        session. The TTL ends the session if the agent disappears and no longer runs the check.
        """
        body = {
            "Name": "edl",
            "Checks": [NODE_ALIVE, f"service:{self._service_id}"],
            "LockDelay": "0s",
            "Behavior": "delete",
            "TTL": f"{max(10, math.ceil(self._ttl_s))}s",
        }
        answer = self._client.ask("PUT", "/v1/session/create", body)
        with self._client.understood():
            return str(json.loads(answer.body)["ID"])

    @override
    def renew(self) -> bool:
        # In this order: an agent that lost the service has ended the session, which the second call detects.
        if not self._client.renew_service(self._service_id):
            return False
        return self._client.ask("PUT", f"/v1/session/renew/{self.session}", accepts=(404,)).status != 404

    @override
    def withdraw(self) -> None:
        try:
            if self.session:
                self._client.ask("PUT", f"/v1/session/destroy/{self.session}")
            self._client.deregister_service(self._service_id)
        finally:
            self._client.close()


class _Pair(NamedTuple):
    """A key as Consul holds it; `session` is empty while the key is not locked."""

    entry: Entry
    session: str


def _pairs(client: ConsulClient, prefix: str, index: int | None = None, wait_s: float = 0.0) -> tuple[int, list[_Pair]]:
    """Return the index and all keys under `prefix`; given an `index`, wait up to `wait_s` for a newer state."""
    answer = client.ask("GET", f"/v1/kv/{ROOT}{prefix}", accepts=(404,), wait=(index, wait_s), recurse="1")
    with client.understood():
        found = () if answer.status == 404 else json.loads(answer.body)
        return int(answer.found_index), [_parse_pair(each) for each in found]


def _parse_pair(found: Any) -> _Pair:
    value = base64.b64decode(found["Value"] or "")
    return _Pair(Entry(found["Key"].removeprefix(ROOT), value, int(found["ModifyIndex"])), found.get("Session", ""))


def _version(pair: _Pair | None) -> int:
    return 0 if pair is None else pair.entry.version


# --- The registry ---


class ConsulRegistry(Registry):
    """See `Registry`. Also lists the valid services that other programs have registered in Consul."""

    def __init__(self, target: ConsulTarget) -> None:
        super().__init__()
        self._target = target
        self._client = self._own(ConsulClient(target))

    def __repr__(self) -> str:
        return f"ConsulRegistry({self._target})"

    @override
    def _claim(self, instance: Instance, ttl_s: float) -> InstanceClaim:
        return _ServiceClaim(self._target, instance, ttl_s)

    @override
    def _read(self, service: str) -> Snapshot:
        return _instances(self._client, service)[1]

    @override
    def _names(self) -> Iterable[str]:
        answer = self._client.ask("GET", "/v1/catalog/services")
        with self._client.understood():
            catalog = set(json.loads(answer.body).keys())
        if not catalog:  # Consul's own service is in every catalog, so everything was left out
            raise self._client.denied("the permission service:read is missing for every service")
        names = filter(is_service, catalog - {"consul", LEASE_SERVICE})
        return [found.service for found in map(self._read, names) if found.instances or found.lapsed]

    @override
    def _follow(self, service: str) -> Watch:
        follower = _BlockingFollower(
            self._target, lambda client, index, wait_s: _instances(client, service, index, wait_s)
        )
        return ServiceWatch(service, follower, lambda found: found)


class _ServiceClaim(InstanceClaim):
    """A service at the agent. Its id is unique, so closing this claim never removes a successor's service."""

    def __init__(self, target: ConsulTarget, instance: Instance, ttl_s: float) -> None:
        self.client = ConsulClient(target)
        self._ttl_s = ttl_s
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", instance.id)[:64]
        self._service_id = f"{instance.service}-{readable}-{secrets.token_hex(4)}"

    @override
    def announce(self, instance: Instance) -> None:
        # An agent that cannot reach its servers would accept this, and the servers would never hear of it.
        answer = self.client.ask("GET", "/v1/status/leader")
        with self.client.understood():
            leader = json.loads(answer.body).strip()
        if not leader:
            raise DiscoveryError(f"{self.client.target}: the servers have no leader yet")
        self.client.register_service(
            instance.service,
            self._service_id,
            self._ttl_s,
            address=instance.address,
            port=instance.port,
            tags=instance.tags,
            meta={
                **instance.meta,
                "edl-id": instance.id,
                "model": instance.model,
                "capacity": repr(instance.capacity),
                "state": instance.state,
            },
        )

    @override
    def renew(self) -> bool:
        return self.client.renew_service(self._service_id)

    @override
    def withdraw(self) -> None:
        try:
            self.client.deregister_service(self._service_id)
        finally:
            self.client.close()


def _instances(
    client: ConsulClient, service: str, index: int | None = None, wait_s: float = 0.0
) -> tuple[int, Snapshot]:
    """Return the index and the instances of `service`; given an `index`, wait up to `wait_s` for a newer state."""
    answer = client.ask("GET", f"/v1/health/service/{service}", wait=(index, wait_s))
    with client.understood():
        found = json.loads(answer.body) or ()
        live: list[Instance | Rejected] = []
        lapsed: list[Instance | Rejected] = []
        for each in sorted(found, key=lambda each: int(each["Service"].get("CreateIndex") or 0)):
            instance, health = _instance(service, each), _health(each)
            if health != "failing":
                (live if health == "passing" else lapsed).append(instance)
        index = int(answer.found_index)
    if not found:
        client.check_may_read(service)
    return index, build_snapshot(service, live, lapsed)


def _health(found: Any) -> Literal["passing", "lapsed", "failing"]:
    """Return "lapsed" if only the checks that detect lost contact fail: EDL's TTL check and the node's own check."""
    failing = [check for check in found.get("Checks") or () if check["Status"] != "passing"]
    if not failing:
        return "passing"
    # Any other failing check, or maintenance, means that the instance must not be used.
    silent = all(check["CheckID"] == NODE_ALIVE or check["Name"] == ALIVE for check in failing)
    return "lapsed" if silent and "edl-id" in (found["Service"].get("Meta") or {}) else "failing"


def _instance(service: str, found: Any) -> Instance | Rejected:
    """Return what Consul knows about an instance. If EDL did not register the instance, most values are defaults."""
    node, offered = found["Node"], found["Service"]
    address, port = str(offered.get("Address") or node["Address"]), int(offered.get("Port") or 0)
    meta = dict(offered.get("Meta") or {})
    fields: dict[str, Any] = {
        "address": address,
        "port": port if port or address.startswith("unix:") else None,
        "tags": tuple(offered.get("Tags") or ()),
        "meta": {
            key: value
            for key, value in meta.items()
            if key not in RESERVED_META and not key.startswith(("edl-", "consul-"))
        },
    }
    fields.update((key, meta[key]) for key in ("model", "state") if key in meta)
    if "capacity" in meta:
        fields["capacity"] = _number(meta["capacity"])
    return parsed(service, meta.get("edl-id") or f"{node['Node']}/{offered['ID']}", fields)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
