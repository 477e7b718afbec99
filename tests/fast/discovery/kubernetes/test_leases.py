"""Whose a key is once its lease has gone, over objects in memory."""

from __future__ import annotations

from typing import Any

import pytest

from edl.discovery import Store, open_store
from edl.discovery.common.renewal import RenewedLease
from edl.discovery.common.resource import Resource
from edl.discovery.kubernetes.leases import LeaseClaim
from edl.discovery.kubernetes.naming import key_object_name
from edl.discovery.store import Lease
from edl.errors import ConflictError
from edl.kube.resource_types import CONFIG_MAPS, LEASES, ResourceType
from tests.fast.master.kube.operator.in_memory_api import InMemoryApi

KEY = "jobs/x/members/0"


class Namespace(InMemoryApi):
    """What stores of a namespace ask; closing it does nothing."""

    pod = None
    target: object = None

    def delete(  # type: ignore[override]
        self, kind: ResourceType, name: str, *, uid: str = "", resource_version: str = ""
    ) -> bool:
        found = self.get(kind, name)
        if found is not None and resource_version not in ("", found["metadata"]["resourceVersion"]):
            raise ConflictError(f"{name} has changed")
        return super().delete(kind, name, uid=uid)

    def close(self) -> None:
        pass


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """What `open_store` finds; nobody removes the keys of leases that are gone."""
    pytest.importorskip("kubernetes", reason="the package kubernetes is not installed")
    objects = Namespace()

    def connect(target: object) -> Namespace:
        objects.target = target
        return objects

    for module in ("leases", "store"):
        monkeypatch.setattr(f"edl.discovery.kubernetes.{module}.KubernetesApi", connect)
    monkeypatch.setattr("edl.discovery.kubernetes.store.LeaseReaper", lambda api: Resource())
    return objects


def open_namespace() -> Store:
    return open_store("kubernetes://n")


def end_lease(objects: Namespace, lease: Lease) -> None:
    """Do what happens to the lease of a process that was paused."""
    assert isinstance(lease, RenewedLease)
    assert isinstance(lease.claim, LeaseClaim)
    assert InMemoryApi.delete(objects, LEASES, lease.claim.ref.name)


@pytest.mark.parametrize("leased", [True, False])
@pytest.mark.parametrize("write", ["put", "compare_and_set"])
def test_a_lost_lease_leaves_its_successor(objects: Namespace, write: str, leased: bool) -> None:
    """The key of a lease that is gone was taken over before anybody removed it."""
    with open_namespace() as first, open_namespace() as other:
        lost = first.lease(60.0)
        first.put(KEY, b"first", lost)
        end_lease(objects, lost)
        lease = other.lease(60.0) if leased else None
        entry = other.put(KEY, b"other", lease) if write == "put" else other.compare_and_set(KEY, b"other", None, lease)
        lost.close()
        assert entry is not None
        assert other.get(KEY) == entry


@pytest.mark.parametrize("call", ["create", "patch"])
def test_a_dead_key_goes_while_it_is_taken(objects: Namespace, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Who removes what belongs to no lease does so between two calls of who takes it over."""
    ask = getattr(objects, call)
    left = [key_object_name(KEY)]

    def ask_meanwhile(*arguments: Any, **options: Any) -> Any:
        if call == "patch" and left:
            InMemoryApi.delete(objects, CONFIG_MAPS, left.pop())
        try:
            return ask(*arguments, **options)
        finally:
            if call == "create" and left:
                InMemoryApi.delete(objects, CONFIG_MAPS, left.pop())

    with open_namespace() as first, open_namespace() as other:
        lost = first.lease(60.0)
        first.put(KEY, b"first", lost)
        end_lease(objects, lost)
        monkeypatch.setattr(objects, call, ask_meanwhile)
        entry = other.compare_and_set(KEY, b"other", None)
        assert not left
        assert entry is not None
        assert other.get(KEY) == entry
        assert other.compare_and_set(KEY, b"again", None) is None, "a key that is there"
        lost.close()


def test_a_lease_takes_its_changed_keys(objects: Namespace) -> None:
    """Its own write whose answer was lost, and another program's annotation, make a version that it does not know."""
    with open_namespace() as store:
        lease = store.lease(60.0)
        store.put(KEY, b"1", lease)
        assert objects.patch(CONFIG_MAPS, key_object_name(KEY), {"metadata": {"annotations": {"a": "b"}}})
        lease.close()
        assert store.get(KEY) is None
        assert objects.names(LEASES) == []
