"""The registry on etcd: two keys for every registration, a record and a sign of life.

The record (`edl/registry/SERVICE/records/CLAIM/ID`, JSON) outlives the sign (`edl/registry/SERVICE/alive/CLAIM`) by a
minute: an instance that has a record and no sign of life has lapsed.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable

from typing_extensions import override

from edl.discovery.common.renewal import InstanceClaim, RenewedRegistration
from edl.discovery.common.resource import Resource
from edl.discovery.common.service_view import build_snapshot
from edl.discovery.common.service_watch import BlockingServiceWatch
from edl.discovery.etcd.client import EtcdClient
from edl.discovery.etcd.target import EtcdTarget
from edl.discovery.records import check_service, check_ttl, from_json, is_service, to_json, validated
from edl.discovery.registry import Instance, Registration, Registry, Snapshot, Watch
from edl.errors import DiscoveryError
from edl.protocol import etcd as wire

__all__ = ["EtcdRegistry"]

ROOT = "edl/registry/"
REMEMBERED_S = 60.0
"""How long an instance whose lease has run out is listed as lapsed: as long as Consul keeps it."""
RECORD_RENEWAL_S = 15.0
"""How often a record's lease is renewed at most: it need not be with each sign of life."""
_ATTEMPTS = 3
"""To announce: a lease that lapsed is granted anew, and lapses again where the process stands still for so long."""


class EtcdRegistry(Resource, Registry):
    """See `Registry`."""

    def __init__(self, target: EtcdTarget) -> None:
        super().__init__()
        self._target = target
        self._client = self._own(EtcdClient(target))

    def __repr__(self) -> str:
        return f"EtcdRegistry({self._target})"

    @override
    def register(self, instance: Instance, ttl_s: float = 10.0) -> Registration:
        self._check()
        instance, ttl_s = validated(instance), check_ttl(ttl_s)
        claim = _RecordClaim(self._target, instance, ttl_s)
        try:
            return self._own(RenewedRegistration(claim, instance, ttl_s))
        except BaseException:
            claim.client.close()
            raise

    @override
    def snapshot(self, service: str) -> Snapshot:
        self._check()
        return _snapshot(check_service(service), self._client.entries(_folder(service))[1])

    @override
    def services(self) -> tuple[str, ...]:
        self._check()
        parts = (key.decode(errors="replace").removeprefix(ROOT).split("/") for key in self._client.keys(ROOT.encode()))
        return tuple(sorted({names[0] for names in parts if names[1:2] == ["records"] and is_service(names[0])}))

    @override
    def watch(self, service: str) -> Watch:
        self._check()
        return self._own(_ServiceWatch(self._target, check_service(service)))


class _RecordClaim(InstanceClaim):
    """A record and its sign of life, both under a lease of etcd's.

    The keys carry this claim's own name, so that closing it never removes a successor's.
    """

    def __init__(self, target: EtcdTarget, instance: Instance, ttl_s: float) -> None:
        self.client = EtcdClient(target)
        self._ttl_s = ttl_s
        name, folder = secrets.token_hex(8), _folder(instance.service)
        self._record = folder + f"records/{name}/{instance.id}".encode()
        self._alive = folder + f"alive/{name}".encode()
        self._leases: tuple[int, int] | None = None  # of the record, and of the sign of life
        self._record_renewed = -math.inf

    def announce(self, instance: Instance) -> None:
        for _ in range(_ATTEMPTS):
            if self._leases is None:
                asked = time.monotonic()
                record_ttl_s = self._ttl_s + REMEMBERED_S + RECORD_RENEWAL_S
                self._leases = self.client.grant(record_ttl_s), self.client.grant(self._ttl_s)
                self._record_renewed = asked
            record, alive = self._leases
            puts = (
                wire.PutRequest(key=self._record, value=to_json(instance).encode(), lease=record),
                wire.PutRequest(key=self._alive, lease=alive),
            )
            if self.client.transact(wire.TxnRequest(success=[wire.RequestOp(request_put=put) for put in puts])):
                return
            self._leases = None
        raise DiscoveryError(f"{self.client.target}: a lease of {self._ttl_s:g} s lapsed while it was made")

    def renew(self) -> bool:
        if self._leases is None:
            return False
        record, alive = self._leases
        if not self.client.renew(alive, self._ttl_s):
            return False
        now = time.monotonic()
        if now >= self._record_renewed + RECORD_RENEWAL_S:
            if not self.client.renew(record, self._ttl_s):
                return False
            self._record_renewed = now
        # A person may have deleted the keys, and a lease has no need of any.
        return self._are_there()

    def _are_there(self) -> bool:
        there = [
            wire.Compare(target=wire.Compare.CREATE, result=wire.Compare.GREATER, key=key, create_revision=0)
            for key in (self._record, self._alive)
        ]
        answer = self.client.transact(wire.TxnRequest(compare=there))
        return answer is not None and answer.succeeded

    def withdraw(self) -> None:
        try:
            for lease in self._leases or ():  # the record's first: what has a sign of life only is nothing
                self.client.revoke(lease)
        finally:
            self.client.close()


class _ServiceWatch(BlockingServiceWatch):
    def __init__(self, target: EtcdTarget, service: str) -> None:
        client = EtcdClient(target, from_main=False)

        def query(index: int | None, wait_s: float) -> tuple[int, Snapshot]:
            if index is not None:
                client.await_change(_folder(service), index, wait_s)
            index, found = client.entries(_folder(service))
            return index, _snapshot(service, found)

        super().__init__(service, client, query)


def _folder(service: str) -> bytes:
    return f"{ROOT}{service}/".encode()


def _snapshot(service: str, found: Iterable[wire.KeyValue]) -> Snapshot:
    """Sort a service's keys into instances, the last registered at the end."""
    records: dict[str, tuple[str, wire.KeyValue]] = {}
    alive: dict[str, int] = {}
    for entry in found:
        kind, _, rest = entry.key.removeprefix(_folder(service)).decode(errors="replace").partition("/")
        name, _, instance_id = rest.partition("/")
        if kind == "records":
            records[name] = (instance_id, entry)
        elif kind == "alive":
            alive[name] = entry.create_revision
    in_order = sorted(records.items(), key=lambda item: alive.get(item[0], item[1][1].mod_revision))
    read = {name: from_json(service, instance_id, entry.value) for name, (instance_id, entry) in in_order}
    return build_snapshot(
        service,
        [instance for name, instance in read.items() if name in alive],
        [instance for name, instance in read.items() if name not in alive],
    )
