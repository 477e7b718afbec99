"""The registry on Kubernetes: a ConfigMap for every registration, and a Lease as its sign of life.

The ConfigMap outlives the Lease by a minute, with a label that says so: an instance with that label has lapsed.
Watchers follow the ConfigMaps, and hear nothing of renewals.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from typing_extensions import override

from edl.discovery.common.renewal import InstanceClaim, RenewedRegistration
from edl.discovery.common.resource import Resource
from edl.discovery.common.service_view import build_snapshot
from edl.discovery.common.service_watch import BlockingServiceWatch
from edl.discovery.kubernetes.api import KubernetesApi
from edl.discovery.kubernetes.leases import LeaseObject
from edl.discovery.kubernetes.naming import (
    INSTANCES,
    LABEL_LAPSED,
    build_instance,
    parse_instance,
    random_name,
    select_service,
    service_of,
)
from edl.discovery.kubernetes.reaper import LeaseReaper
from edl.discovery.kubernetes.target import KubernetesTarget
from edl.discovery.kubernetes.watching import ConfigMapWatch
from edl.discovery.records import check_service, check_ttl, is_service, validated
from edl.discovery.registry import Instance, Registration, Registry, Snapshot, Watch
from edl.errors import ConflictError, DiscoveryError
from edl.kube.objects import Object
from edl.kube.resource_types import CONFIG_MAPS

__all__ = ["KubernetesRegistry"]

RECORD_CHECK_S = 15.0
"""How often a registration looks whether a person has deleted its ConfigMap. Each time costs as much as a renewal."""
_ATTEMPTS = 3
"""To announce: the ConfigMap may come or go between two calls."""


class KubernetesRegistry(Resource, Registry):
    """See `Registry`."""

    def __init__(self, target: KubernetesTarget) -> None:
        super().__init__()
        self._target = target
        self._api = self._own(KubernetesApi(target))
        self._first_use = threading.Lock()  # taken without waiting, and never released

    def __repr__(self) -> str:
        return f"KubernetesRegistry({self._target})"

    @override
    def register(self, instance: Instance, ttl_s: float = 10.0) -> Registration:
        instance, ttl_s = validated(instance), check_ttl(ttl_s)
        self._begin()
        claim = _RecordClaim(self._target, ttl_s)
        try:
            return self._own(RenewedRegistration(claim, instance, ttl_s))
        except BaseException:
            claim.api.close()
            raise

    @override
    def snapshot(self, service: str) -> Snapshot:
        check_service(service)
        self._begin()
        return _snapshot(service, self._api.list(CONFIG_MAPS, select_service(service)))

    @override
    def services(self) -> tuple[str, ...]:
        self._begin()
        found: dict[str, list[Object]] = {}
        for obj in self._api.list(CONFIG_MAPS, INSTANCES):
            found.setdefault(service_of(obj), []).append(obj)
        snapshots = (_snapshot(name, objects) for name, objects in sorted(found.items()) if is_service(name))
        return tuple(snapshot.service for snapshot in snapshots if snapshot.instances or snapshot.lapsed)

    @override
    def watch(self, service: str) -> Watch:
        check_service(service)
        self._begin()
        return self._own(_ServiceWatch(self._api, service))

    def _begin(self) -> None:
        """Check that this is open; with the first use, begin to see to it that registrations lapse."""
        self._check()
        if self._first_use.acquire(blocking=False):
            self._own(LeaseReaper(self._api))


class _RecordClaim(InstanceClaim):
    """A registration's ConfigMap and Lease. The names are its own, so that closing it never removes a successor's."""

    def __init__(self, target: KubernetesTarget, ttl_s: float) -> None:
        self.api = KubernetesApi(target)
        self._ttl_s = ttl_s
        self._name = random_name("instance")
        self._lease: LeaseObject | None = None
        self._checked_s = 0.0

    @override
    def announce(self, instance: Instance) -> None:
        # The reaper removes a record whose Lease is gone. An API server that lost its data has lost both.
        if self._lease is not None and not self._lease.renew():
            self._lease = None
        if self._lease is None:
            lease = LeaseObject(self.api, self._ttl_s)
            lease.create()
            self._lease = lease
        self._write(instance, self._lease)
        self._checked_s = time.monotonic()

    def _write(self, instance: Instance, lease: LeaseObject) -> None:
        pod = self.api.pod
        for _ in range(_ATTEMPTS):
            patch = build_instance(self._name, instance, lease.ref, lease.since, pod, patch=True)
            if self.api.patch(CONFIG_MAPS, self._name, patch) is not None:
                return
            try:
                self.api.create(
                    CONFIG_MAPS, build_instance(self._name, instance, lease.ref, lease.since, pod, patch=False)
                )
            except ConflictError:
                continue
            return
        raise DiscoveryError(f"{self.api.target}: ConfigMap {self._name} comes and goes: another program deletes it")

    @override
    def renew(self) -> bool:
        if self._lease is None:
            return False
        if not self._lease.renew():
            self._lease = None
            return False
        if time.monotonic() < self._checked_s + RECORD_CHECK_S:
            return True
        found = self.api.get(CONFIG_MAPS, self._name)
        if found is None or LABEL_LAPSED in (found["metadata"].get("labels") or {}):
            return False
        self._checked_s = time.monotonic()
        return True

    @override
    def withdraw(self) -> None:
        try:
            self.api.delete(CONFIG_MAPS, self._name)
            if self._lease is not None:
                self._lease.remove()
        finally:
            self.api.close()


class _ServiceWatch(BlockingServiceWatch):
    def __init__(self, api: KubernetesApi, service: str) -> None:
        objects = ConfigMapWatch(api, select_service(service))

        def query(index: int | None, wait_s: float) -> tuple[int, Snapshot]:
            version, found = objects.await_change(index, wait_s)
            return version, _snapshot(service, found.values())

        super().__init__(service, objects, query)


def _snapshot(service: str, found: Iterable[Object]) -> Snapshot:
    """Sort a service's ConfigMaps into instances, the last registered at the end."""
    read = [parse_instance(service, obj) for obj in found if service_of(obj) == service]
    in_order = sorted(read, key=lambda record: record.since)
    return build_snapshot(
        service,
        [record.instance for record in in_order if not record.lapsed],
        [record.instance for record in in_order if record.lapsed],
    )
