"""The registry on Consul: an ordinary service with a TTL check per instance, so that Consul's UI and DNS show it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from typing import Any, ClassVar, Final

from typing_extensions import override

from edl.discovery.consul.client import ConsulClient, ConsulService, ConsulTarget
from edl.discovery.consul.store import LEASE_SERVICE
from edl.discovery.records import RESERVED_META, Instance, Rejected, Snapshot, is_service, parsed
from edl.discovery.registry import InstanceClaim, Registry, ServiceWatch, Watch, build_snapshot
from edl.discovery.watching import Follower, query_wait_s
from edl.errors import DiscoveryError

__all__ = ["ConsulRegistry"]

_NOT_OURS: Final = frozenset({"consul", LEASE_SERVICE})


class ConsulRegistry(Registry):
    """See `Registry`. Services that others registered in Consul are seen as well, as far as they make sense."""

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
        return _snapshot(service, self._client.instances(service)[1])

    @override
    def _names(self) -> Iterable[str]:
        names = filter(is_service, set(self._client.service_names()) - _NOT_OURS)
        return [found.service for found in map(self._read, names) if found.instances or found.lapsed]

    @override
    def _follow(self, service: str) -> Watch:
        return ServiceWatch(service, _ServiceFollower(self._target, service), lambda found: _snapshot(service, found))


class _ServiceClaim(InstanceClaim):
    """A service at the agent. Its id there is this claim's own, so that closing it never removes a successor's."""

    def __init__(self, target: ConsulTarget, instance: Instance, ttl_s: float) -> None:
        self.client = ConsulClient(target)
        self._ttl_s = ttl_s
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", instance.id)[:64]
        self._service_id = f"{instance.service}-{readable}-{secrets.token_hex(4)}"

    @override
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

    @override
    def renew(self) -> bool:
        return self.client.renew_service(self._service_id)

    @override
    def withdraw(self) -> None:
        try:
            self.client.deregister_service(self._service_id)
        finally:
            self.client.close()


class _ServiceFollower(Follower["list[ConsulService]"]):
    pause_s: ClassVar[float] = 0.05

    def __init__(self, target: ConsulTarget, service: str) -> None:
        self._client = ConsulClient(target)
        self._service = service
        self._index: int | None = None

    @override
    def next(self, wait_s: float | None) -> list[ConsulService]:
        known, self._index = self._index, None
        index, found = self._client.instances(self._service, known, query_wait_s(wait_s))
        if known is None or index >= known:  # as for keys
            self._index = max(1, index)
        return found

    @override
    def close(self) -> None:
        self._client.close()


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
