"""The conformance suite over Kubernetes, and what is particular to it: rights, tokens, outages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from edl.discovery import Registry, open_registry, open_store
from edl.errors import DiscoveryError
from tests.cluster.api import Cluster
from tests.fast.discovery.conformance.backends import KubernetesBackend, teacher
from tests.fast.discovery.conformance.suite import LONG_S, RegistrySuite, StoreSuite, seen, seen_values
from tests.waiting import DEADLINE_S, wait_until

PROGRAM = """
import time
from edl.discovery import Instance, open_registry, open_store
with open_registry("kubernetes://") as registry, open_store("kubernetes://") as store, store.lease(20.0) as lease:
    registration = registry.register(Instance("digits", "a", "127.0.0.1", 9000), 20.0)
    store.put("of/lease", b"1", lease)
    print("ready", flush=True)
    time.sleep(600)
"""
DOCS = Path(__file__).parents[3] / "docs/discovery.md"


class TestRegistry(RegistrySuite):
    pass


class TestStore(StoreSuite):
    pass


def documented_role() -> dict[str, Any]:
    text = DOCS.read_text()
    block = text[text.index("```yaml\n") + 8 :]
    role: dict[str, Any] = yaml.safe_load(block[: block.index("```")])
    return role


def service_account(kube: KubernetesBackend, name: str, role: dict[str, Any]) -> dict[str, str]:
    """Make an account with a role; returns a kubeconfig's user."""
    path = f"/api/v1/namespaces/{kube.namespace}"
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{kube.namespace}"
    kube.cluster.ask(f"{path}/serviceaccounts", "POST", {"metadata": {"name": name}})
    kube.cluster.ask(f"{rbac}/roles", "POST", role | {"metadata": {"name": name}})
    kube.cluster.bind(kube.namespace, name, name)
    return {"token": kube.cluster.make_token(kube.namespace, name)}


def url_as(kube: KubernetesBackend, user: dict[str, str], path: Path) -> str:
    config = json.loads(kube.kubeconfig.read_text())
    config["users"][0]["user"] = user
    path.write_text(json.dumps(config))
    return f"kubernetes://{kube.namespace}?kubeconfig={path}"


def test_documented_role_is_enough(backend: KubernetesBackend, service: str, tmp_path: Path) -> None:
    """And who has no role is refused: nothing that may not be read is shown as empty."""
    url = url_as(backend, service_account(backend, "member", documented_role()), tmp_path / "config")
    with open_registry(url) as registry, open_store(url) as store, store.lease(LONG_S) as lease:
        with registry.register(teacher(service), LONG_S), registry.watch(service) as watch:
            seen(watch, "a")
            assert service in registry.services()
        store.put(f"{service}/a", b"1", lease)
        assert store.compare_and_set(f"{service}/b", b"1", None)
        assert len(store.list(f"{service}/")) == 2
        assert store.delete(f"{service}/b")
        with store.elect(service, b"me", LONG_S) as election:
            assert election.wait(DEADLINE_S)
    url = url_as(backend, service_account(backend, "stranger", {"rules": []}), tmp_path / "config")
    with open_registry(url) as registry, open_store(url) as store, registry.watch(service) as watch:
        for call in (registry.services, lambda: registry.snapshot(service), lambda: store.list("")):
            with pytest.raises(DiscoveryError, match=r'verbs: \["list"\]'):
                call()
        assert 'verbs: ["list"]' in (watch.get(DEADLINE_S) or pytest.fail("nothing came")).stale


def test_replaced_token_is_taken_up(backend: KubernetesBackend, service: str, tmp_path: Path) -> None:
    good, path = service_account(backend, "rotating", documented_role()), tmp_path / "config"
    with open_store(url_as(backend, {"token": "expired"}, path)) as store, store.watch(f"{service}/") as watch:
        with pytest.raises(DiscoveryError, match="has expired"):
            store.get("a")
        assert "has expired" in (watch.get(DEADLINE_S) or pytest.fail("nothing came")).stale
        url_as(backend, good, path)
        assert store.get("a") is None
        seen_values(watch, {})


def test_update_brings_back_a_lease(backend: KubernetesBackend, registry: Registry, service: str) -> None:
    """A record without one is removed, and the next renewal may be far away."""
    query = {"labelSelector": "edl.io/discovery=lease"}
    with registry.register(teacher(service), LONG_S) as registration:
        backend.cluster.ask(backend.leases, "DELETE", query=query)
        registration.update(teacher(service, state="draining"))
        assert len(backend.cluster.ask(backend.leases, query=query)["items"]) == 1


def test_outage_ends_nobody(backend: KubernetesBackend, registry: Registry, service: str) -> None:
    """The server is away for longer than leases last: who could not renew is not taken for dead when it is back."""
    with registry.register(teacher(service), 3.0) as registration, registry.watch(service) as watch:
        seen(watch, "a")
        backend.proxy.refuse()
        try:
            wait_until(lambda: "is over" in registration.error or registration.error)
            stale = watch.get(DEADLINE_S) or pytest.fail("the watch does not notice")
            assert stale.stale
        finally:
            backend.proxy.restore()
        while stale.stale:
            stale = watch.get(DEADLINE_S) or pytest.fail("the watch does not recover")
            assert stale.instances
            assert not stale.lapsed
        wait_until(lambda: not registration.error)
        assert registry.snapshot(service).instances


def test_pod_registers_and_leaves(
    cluster: Cluster, namespace: str, pod_template: Callable[..., dict[str, Any]]
) -> None:
    """A pod's own rights and namespace are all that `kubernetes://` needs, and what it makes goes with the pod."""
    cluster.apply(documented_role(), namespace=namespace)
    cluster.bind(namespace, "default", "edl-discovery")
    template = pod_template(["python", "-c", PROGRAM])
    fields = {"EDL_POD_NAME": "metadata.name", "EDL_POD_UID": "metadata.uid"}
    own = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
    template["spec"]["containers"][0]["env"] += own
    template["spec"]["automountServiceAccountToken"] = True
    cluster.run_pod(namespace, "teacher", template)

    def objects() -> list[tuple[str, dict[str, Any]]]:
        """What each is, and its metadata."""
        query = ("configmaps,leases", "-l", "app.kubernetes.io/managed-by=edl", "-o", "json")
        found = [item["metadata"] for item in json.loads(cluster.kubectl("-n", namespace, "get", *query))["items"]]
        return [(metadata["labels"]["edl.io/discovery"], metadata) for metadata in found]

    def kinds() -> list[str]:
        return sorted(what for what, _ in objects())

    wanted = ["instance", "key", "lease", "lease", "reaper"]
    cluster.wait("the pod's registration and key", lambda: kinds() == wanted, namespace)
    path = f"/api/v1/namespaces/{namespace}/pods/teacher"
    uid = cluster.ask(path)["metadata"]["uid"]
    leases = {metadata["uid"] for what, metadata in objects() if what == "lease"}
    for what, metadata in objects():
        owners = [owner["uid"] for owner in metadata.get("ownerReferences") or ()]
        if what in ("instance", "lease"):
            assert owners == [uid], what
        elif what == "key":
            assert set(owners) <= leases
            assert owners
    # Killed, not ended: nobody of EDL's is left to clear up.
    cluster.ask(path, "DELETE", {"gracePeriodSeconds": 0})
    cluster.wait("nothing of the pod's left", lambda: kinds() in ([], ["reaper"]), namespace, timeout_s=180.0)
