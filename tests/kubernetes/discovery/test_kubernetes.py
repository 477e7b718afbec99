"""What is particular to Kubernetes: rights, what the dead leave behind, outages, and objects that people change."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from edl.discovery import Snapshot, open_registry, open_store
from edl.discovery.kubernetes.naming import LeaseRef, build_key, key_object_name
from edl.errors import ClosedError, ConflictError, DiscoveryError, LeaseLostError
from tests.fast.discovery.conformance.backends import eventually, teacher
from tests.fast.discovery.conformance.kubernetes_backend import KubernetesBackend, open_kubernetes_backend
from tests.fast.discovery.conformance.processes import Member
from tests.interrupting import InterruptAt, deadline

if TYPE_CHECKING:
    from tests.cluster.api import Cluster

pytestmark = pytest.mark.kubernetes
DOCS = Path(__file__).parents[3] / "docs/discovery.md"


@pytest.fixture
def kube(kubernetes_backend: KubernetesBackend) -> KubernetesBackend:
    return kubernetes_backend


@pytest.fixture(autouse=True)
def _sockets_of_fixtures(kubernetes_backend: KubernetesBackend) -> None:
    """Open them before a test is watched for what it leaves open."""


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
    subject = {"kind": "ServiceAccount", "name": name, "namespace": kube.namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    binding = {"metadata": {"name": name}, "subjects": [subject], "roleRef": reference}
    kube.cluster.ask(f"{rbac}/rolebindings", "POST", binding)
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    answer = kube.cluster.ask(f"{path}/serviceaccounts/{name}/token", "POST", request)
    return {"token": answer["status"]["token"]}


def url_as(kube: KubernetesBackend, user: dict[str, str], path: Path) -> str:
    config = json.loads(kube.kubeconfig.read_text())
    config["users"][0]["user"] = user
    path.write_text(json.dumps(config))
    return f"kubernetes://{kube.namespace}?kubeconfig={path}"


def config_maps(kube: KubernetesBackend, selector: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kube.cluster.ask(kube.config_maps, query={"labelSelector": selector})["items"]
    return found


def test_documented_role_is_enough(kube: KubernetesBackend, service: str, tmp_path: Path) -> None:
    url = url_as(kube, service_account(kube, "member", documented_role()), tmp_path / "config")
    with open_registry(url) as registry, open_store(url) as store, store.lease(4.0) as lease:
        with registry.register(teacher(service)), registry.watch(service) as watch:
            assert eventually(lambda: (watch.get(1) or Snapshot("", ())).instances)
            assert service in registry.services()
        store.put(f"{service}/a", b"1", lease)
        assert store.compare_and_set(f"{service}/b", b"1", None)
        assert len(store.list(f"{service}/")) == 2
        assert store.delete(f"{service}/b")
        with store.elect(service, b"me") as election:
            assert election.wait(20)


def test_reader_follows_and_cannot_write(kube: KubernetesBackend, service: str, tmp_path: Path) -> None:
    role = documented_role()
    for rule in role["rules"]:
        rule["verbs"] = ["get", "list", "watch"]
    url = url_as(kube, service_account(kube, "reader", role), tmp_path / "config")
    with open_registry(kube.url) as theirs, open_registry(url) as registry, registry.watch(service) as watch:
        with theirs.register(teacher(service)):
            assert eventually(lambda: (watch.get(1) or Snapshot("", ())).instances)
            assert registry.snapshot(service).instances
        assert eventually(lambda: not (watch.get(1) or Snapshot("", (teacher(service),))).instances)
        with pytest.raises(DiscoveryError, match=r'resources: \["leases"\], verbs: \["create"\]'):
            registry.register(teacher(service))
        with open_store(url) as store, pytest.raises(DiscoveryError, match=r'\["configmaps"\], verbs: \["create"\]'):
            store.put(f"{service}/a", b"")


def test_strangers_are_refused(kube: KubernetesBackend, service: str, tmp_path: Path) -> None:
    """Nothing that may not be read is shown as empty."""
    url = url_as(kube, service_account(kube, "stranger", {"rules": []}), tmp_path / "config")
    with open_registry(url) as registry, open_store(url) as store, registry.watch(service) as watch:
        for call in (registry.services, lambda: registry.snapshot(service), lambda: store.list("")):
            with pytest.raises(DiscoveryError, match=r'verbs: \["list"\]'):
                call()
        with pytest.raises(DiscoveryError, match=r'verbs: \["get"\]'):
            store.get("a")
        found = watch.get(10)
        assert found is not None
        assert 'verbs: ["list"]' in found.stale


def test_replaced_token_is_taken_up(kube: KubernetesBackend, service: str, tmp_path: Path) -> None:
    path = tmp_path / "config"
    url_as(kube, service_account(kube, "rotating", documented_role()), path)
    good = json.loads(path.read_text())["users"][0]["user"]
    with open_store(url_as(kube, {"token": "expired"}, path)) as store, store.watch(f"{service}/") as watch:
        with pytest.raises(DiscoveryError, match="has expired"):
            store.get("a")
        stale = watch.get(10)
        assert stale is not None
        assert "has expired" in stale.stale
        url_as(kube, good, path)
        assert store.get("a") is None
        assert eventually(lambda: (found := watch.get(1)) is not None and not found.stale)


def test_what_belongs_to_no_lease_is_removed(
    kube: KubernetesBackend, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process died between the end of a lease and that of its keys; instances that lapsed are forgotten at last."""
    monkeypatch.setattr("edl.discovery.kubernetes.reaper.SWEEP_S", 0.3)
    monkeypatch.setattr("edl.discovery.kubernetes.reaper.REMEMBERED_S", 4.0)
    key = f"{service}/orphan"
    orphan = build_key(key, b"x", None)
    orphan["metadata"]["labels"]["edl.io/lease"] = "edl-lease-of-the-dead"
    orphan["metadata"]["annotations"]["edl.io/lease-uid"] = "gone"
    kube.cluster.ask(kube.config_maps, "POST", orphan)
    remove = kube.plant(service, "a", {})
    kube.cluster.ask(kube.leases, "DELETE", query={"labelSelector": "edl.io/discovery=lease"})
    with open_store(kube.url) as store, open_registry(kube.url) as registry, registry.watch(service) as watch:
        states = []
        deadline = time.monotonic() + 60
        while (not states or states[-1] != (0, 0)) and time.monotonic() < deadline:
            found = watch.get(0.5)
            if found is not None:
                states.append((len(found.instances), len(found.lapsed)))
        assert states[-2:] == [(0, 1), (0, 0)], "it is listed as lapsed before it is forgotten"
        assert eventually(lambda: store.get(key) is None)
        assert eventually(lambda: not config_maps(kube, f"edl.io/service={service}"))
    remove()


def test_key_of_a_lease_that_is_gone_is_free(kube: KubernetesBackend, service: str) -> None:
    """The process that removes it is late: a writer does not wait for it."""
    gone = LeaseRef("edl-lease-of-the-dead", "6e1b0cb2-9f6b-4a0e-b2f5-000000000000")
    for name in "abc":
        obj = build_key(f"{service}/{name}", b"old", gone)
        del obj["metadata"]["ownerReferences"]  # else Kubernetes itself removes it
        kube.cluster.ask(kube.config_maps, "POST", obj)
    with open_store(kube.url) as store:
        assert store.put(f"{service}/a", b"new").value == b"new"
        entry = store.compare_and_set(f"{service}/b", b"new", None)
        assert entry is not None
        assert store.get(f"{service}/b") == entry
        with store.lease() as lease:
            assert store.put(f"{service}/c", b"new", lease).value == b"new"


def test_outage_ends_nobody(kube: KubernetesBackend, service: str) -> None:
    """The server is away for longer than leases last: who could not renew is not taken for dead when it is back."""
    with open_registry(kube.url) as registry, registry.register(teacher(service), 3.0) as registration:
        lapses: list[Any] = []
        done = threading.Event()

        def look() -> None:
            while not done.wait(0.1):
                for obj in config_maps(kube, f"edl.io/service={service}"):
                    lapses.extend(name for name in obj["metadata"]["labels"] if name == "edl.io/lapsed")

        looker = threading.Thread(target=look)
        looker.start()
        try:
            for _ in range(2):
                kube.proxy.refuse()
                try:
                    assert eventually(lambda: registration.error)
                    time.sleep(3.5)
                finally:
                    kube.proxy.restore()
                assert eventually(lambda: not registration.error)
                time.sleep(2.0)
        finally:
            done.set()
            looker.join()
        assert lapses == []
        assert registry.snapshot(service).instances


def test_silent_server(kube: KubernetesBackend, service: str) -> None:
    """Packets vanish: calls end in time, closing does not wait, and what is up again is found."""
    with open_store(kube.url, timeout_s=1.0) as store, store.watch(f"{service}/") as watch:
        assert watch.get(10) is not None
        kube.proxy.silent = True
        try:
            begun = time.monotonic()
            with pytest.raises(DiscoveryError, match="in time"):
                store.get("a")
            assert time.monotonic() - begun < 20
            begun = time.monotonic()
            watch.close()
            assert time.monotonic() - begun < 20
        finally:
            kube.proxy.restore()
            kube.proxy.cut()
        assert eventually(lambda: _answers(store.list, f"{service}/"))


def _answers(call: Callable[[str], object], argument: str) -> bool:
    try:
        call(argument)
    except DiscoveryError:
        return False
    return True


def test_people_delete_and_change(kube: KubernetesBackend, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl.discovery.kubernetes.registry.RECORD_CHECK_S", 0.2)
    with open_registry(kube.url) as registry, registry.register(teacher(service), 4.0):
        (obj,) = config_maps(kube, f"edl.io/service={service}")
        for path in (
            f"{kube.config_maps}/{obj['metadata']['name']}",
            f"{kube.leases}/{obj['metadata']['labels']['edl.io/lease']}",
        ):
            uid = kube.cluster.ask(path)["metadata"]["uid"]
            kube.cluster.ask(path, "DELETE")
            assert eventually(lambda: len(config_maps(kube, f"edl.io/service={service}")) == 1), uid
            assert eventually(lambda: len(registry.snapshot(service).instances) == 1)
    key = f"{service}/a"
    with open_store(kube.url) as store, store.watch(f"{service}/") as watch, store.lease() as lease:
        store.put(key, b"1", lease)
        store.put(f"{service}/b", b"1")
        path = f"{kube.config_maps}/{key_object_name(key)}"
        spoiled = {
            "binaryData": {"value": base64.b64encode(b"2").decode()},
            "metadata": {"annotations": {"edl.io/key": ""}},
        }
        kube.cluster.ask(path, "PATCH", spoiled, content_type="application/merge-patch+json")
        assert eventually(lambda: set(((found := watch.get(1)) and found.entries) or ()) == {f"{service}/b"})
        with pytest.raises(DiscoveryError, match="spoiled"):
            store.get(key)
        with open_store(kube.url) as other, pytest.raises(ConflictError):
            other.put(key, b"3")
        assert store.delete(key)
        assert store.put(key, b"4").version > 0


@pytest.fixture
def own_namespace(cluster: Cluster, tmp_path: Path) -> Iterator[KubernetesBackend]:
    with open_kubernetes_backend(cluster, tmp_path) as backend:
        yield backend


def test_deleted_namespace(own_namespace: KubernetesBackend, service: str) -> None:
    """All goes with it, nothing holds it up, and the errors say what is wrong."""
    with open_registry(own_namespace.url) as registry, open_store(own_namespace.url) as store:
        registration = registry.register(teacher(service), 4.0)
        lease = store.lease(4.0)
        store.put(f"{service}/a", b"1", lease)
        path = f"/api/v1/namespaces/{own_namespace.namespace}"
        own_namespace.cluster.ask(path, "DELETE")
        assert eventually(lambda: own_namespace.cluster.ask(path) is None, 60)
        assert eventually(lambda: lease.lost)
        assert eventually(lambda: "namespace" in registration.error)
        with pytest.raises(DiscoveryError, match=r"namespace"):
            store.put(f"{service}/a", b"1")
        assert store.list("") == [], "that is true"


def test_paused_reaper_harms_nobody(own_namespace: KubernetesBackend, service: str) -> None:
    """The process that removes leases is paused for longer than these last; others were renewed meanwhile."""
    reaper = Member(own_namespace.url, "hold", f"{service}/reaper", "30.0")
    try:
        assert reaper.hear() == "ready"
        assert eventually(lambda: own_namespace.cluster.ask(f"{own_namespace.leases}/edl-lease-reaper"))
        with open_store(own_namespace.url) as store, store.lease(4.0) as lease:
            store.put(f"{service}/a", b"1", lease)
            reaper.pause()
            time.sleep(8.0)
            assert not lease.lost
            reaper.resume()
            assert reaper.ask("?") == "kept"
            time.sleep(2.0)
            assert not lease.lost
            assert {entry.key for entry in store.list(f"{service}/")} == {f"{service}/a", f"{service}/reaper"}
    finally:
        reaper.end()


def test_nothing_is_left(own_namespace: KubernetesBackend, service: str) -> None:
    with open_registry(own_namespace.url) as registry, open_store(own_namespace.url) as store:
        registry.register(teacher(service))
        store.put(f"{service}/a", b"1", store.lease())
        assert store.elect(service, b"me").wait(20)
    for path in (own_namespace.config_maps, own_namespace.leases):
        items = own_namespace.cluster.ask(path, query={"labelSelector": "app.kubernetes.io/managed-by=edl"})["items"]
        assert items == []


@pytest.mark.parametrize("what", ["registry", "store"])
def test_closing_in_the_middle_of_a_call(kube: KubernetesBackend, service: str, what: str) -> None:
    """By a signal handler, in the main thread's own calls, wherever they are."""

    def use_registry() -> Any:
        opened = open_registry(kube.url)

        def use() -> None:
            with opened.register(teacher(service)) as registration, opened.watch(service) as watch:
                watch.get(5)
                registration.update(teacher(service, state="draining"))
                opened.snapshot(service)

        return opened, use

    def use_store() -> Any:
        opened = open_store(kube.url)

        def use() -> None:
            with opened.lease() as lease, opened.watch(f"{service}/") as watch:
                opened.put(f"{service}/a", b"1", lease)
                watch.get(5)
                opened.delete(f"{service}/a")

        return opened, use

    for number in itertools.count(1, 97):
        with deadline(20, f"closed before line {number}"):
            opened, use = use_registry() if what == "registry" else use_store()
            with (
                InterruptAt(number, opened.close, "edl/") as interrupt,
                contextlib.suppress(ClosedError, LeaseLostError),
            ):
                use()
            opened.close()
        if not interrupt.reached:
            assert number > 500, "nothing was interrupted"
            break
    assert eventually(lambda: not config_maps(kube, f"edl.io/service={service}")), "what was closed is still registered"
