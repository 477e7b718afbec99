"""The registry on Consul: an ordinary service with a TTL check per instance, to be seen in Consul's UI and DNS."""

from __future__ import annotations

import re
import secrets
from typing import Any

from typing_extensions import override

from edl.discovery.common.renewal import InstanceClaim, RenewedRegistration
from edl.discovery.common.resource import Resource
from edl.discovery.common.service_view import build_snapshot
from edl.discovery.common.service_watch import BlockingServiceWatch
from edl.discovery.consul.client import ConsulClient, ConsulService
from edl.discovery.consul.target import ConsulTarget
from edl.discovery.records import RESERVED_META, check_service, check_ttl, is_service, parsed, validated
from edl.discovery.registry import Instance, Registration, Registry, Rejected, Snapshot, Watch
from edl.errors import DiscoveryError

__all__ = ["LEASE_SERVICE", "ConsulRegistry"]

LEASE_SERVICE = "edl-lease"
_NOT_OURS = frozenset({"consul", LEASE_SERVICE})


class ConsulRegistry(Resource, Registry):
    """See `Registry`. Services that others registered in Consul are seen as well, as far as they make sense."""

    def __init__(self, target: ConsulTarget) -> None:
        super().__init__()
        self._target = target
        self._client = self._own(ConsulClient(target))

    def __repr__(self) -> str:
        return f"ConsulRegistry({self._target})"

    @override
    def register(self, instance: Instance, ttl_s: float = 10.0) -> Registration:
        self._check()
        instance, ttl_s = validated(instance), check_ttl(ttl_s)
        claim = _ServiceClaim(self._target, instance, ttl_s)
        try:
            return self._own(RenewedRegistration(claim, instance, ttl_s))
        except BaseException:
            claim.client.close()
            raise

    @override
    def snapshot(self, service: str) -> Snapshot:
        self._check()
        return _snapshot(check_service(service), self._client.instances(service)[1])

    @override
    def services(self) -> tuple[str, ...]:
        self._check()
        names = sorted(filter(is_service, set(self._client.service_names()) - _NOT_OURS))
        snapshots = (_snapshot(name, self._client.instances(name)[1]) for name in names)
        return tuple(snapshot.service for snapshot in snapshots if snapshot.instances or snapshot.lapsed)

    @override
    def watch(self, service: str) -> Watch:
        self._check()
        return self._own(_ServiceWatch(self._target, check_service(service)))


class _ServiceClaim(InstanceClaim):
    """A service at the agent. Its id there is this claim's own, so that closing it never removes a successor's."""

    def __init__(self, target: ConsulTarget, instance: Instance, ttl_s: float) -> None:
        self.client = ConsulClient(target)
        self._ttl_s = ttl_s
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", instance.id)[:64]
        self._service_id = f"{instance.service}-{readable}-{secrets.token_hex(4)}"

    def announce(self, instance: Instance) -> None:
        # An agent that cannot reach its servers would accept this, and nobody would hear of it.
        if not self.client.has_leader():
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

    def renew(self) -> bool:
        return self.client.renew_service(self._service_id)

    def withdraw(self) -> None:
        try:
            self.client.deregister_service(self._service_id)
        finally:
            self.client.close()


class _ServiceWatch(BlockingServiceWatch):
    def __init__(self, target: ConsulTarget, service: str) -> None:
        client = ConsulClient(target)

        def query(index: int | None, wait_s: float) -> tuple[int, Snapshot]:
            index, entries = client.instances(service, index, wait_s)
            return index, _snapshot(service, entries)

        super().__init__(service, client, query)


def _snapshot(service: str, found: list[ConsulService]) -> Snapshot:
    in_order = sorted(found, key=lambda entry: entry.created)
    live = [_instance(service, entry) for entry in in_order if entry.health == "passing"]
    lapsed = [_instance(service, entry) for entry in in_order if entry.health == "lapsed"]
    return build_snapshot(service, live, lapsed)


def _instance(service: str, found: ConsulService) -> Instance | Rejected:
    """Return what Consul knows of an instance. Where EDL did not register it, most is left to the defaults."""
    fields: dict[str, Any] = {
        "address": found.address,
        "port": found.port if found.port or found.address.startswith("unix:") else None,
        "tags": found.tags,
        "meta": {
            key: value
            for key, value in found.meta.items()
            if key not in RESERVED_META and not key.startswith(("edl-", "consul-"))
        },
    }
    fields.update((key, found.meta[key]) for key in ("model", "state") if key in found.meta)
    if "capacity" in found.meta:
        fields["capacity"] = _number(found.meta["capacity"])
    return parsed(service, found.meta.get("edl-id") or f"{found.node}/{found.id}", fields)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
