"""The chart's store on the real cluster: its pod is lost with all it knew, and everybody comes back to the next."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from edl.background import start_call
from edl.discovery import Registry, Snapshot, Store, open_registry, open_store
from edl.errors import DiscoveryError
from tests.cluster.operator_process import render_chart
from tests.kubernetes.scenarios.scene import Scene
from tests.waiting import DEADLINE_S

SERVE = ["--factory", "edl.testing.models:echo"]


def test_lost_store_is_filled_again(scene: Scene, values: Path, store_address: str) -> None:
    """Workers and teachers go on in the same pods; nobody who watches sees the teachers gone."""
    cluster, namespace, url = scene.cluster, scene.namespace, f"edl://{store_address}:29400"
    chart = ("--values", str(values), "--set", f"storeServer.clusterIP={store_address}")
    text = render_chart(namespace, *chart, "--show-only", "templates/store.yaml")
    cluster.kubectl("-n", namespace, "apply", "-f", "-", text=text)
    scene.operator("--store", url)
    scene.create_pool("digits", SERVE, scene.pod_template(), scaling="external", replicas=1, maxReplicas=1)
    scene.create_job("job", ["--no-python", "/usr/bin/sleep", "600"], scene.pod_template(), minReplicas=2)
    seen: list[Snapshot] = []
    ended = threading.Event()
    with contextlib.ExitStack() as stack:
        registry = stack.enter_context(open_registry(url, timeout_s=10.0))
        store = stack.enter_context(open_store(url, timeout_s=10.0))
        watch = stack.enter_context(registry.watch("digits"))
        scene.wait("the teacher", lambda: teachers(registry))
        job_id = scene.wait("the job's id", lambda: scene.status("job").get("jobId"))
        prefix = f"jobs/{job_id}/nodes/"
        scene.wait("both nodes", lambda: len(keys(store, prefix)) == 2)
        nodes = keys(store, prefix)
        pods, teacher = scene.wait_running("job", 2), teachers(registry)

        def follow() -> None:
            while not ended.is_set():
                if (snapshot := watch.get(0.5)) is not None:
                    seen.append(snapshot)

        following = start_call("edl-test", follow)
        scene.wait("a first look", lambda: seen)
        (before,) = store_pods(scene)
        cluster.kubectl("-n", namespace, "delete", "pod", before, "--grace-period=0", "--force")
        scene.wait("another store", lambda: before not in (found := store_pods(scene)) and found)
        scene.wait("the same teacher", lambda: teachers(registry) == teacher)
        scene.wait("the same nodes", lambda: keys(store, prefix) == nodes)
        ended.set()
        following.result(DEADLINE_S)
    assert any(snapshot.stale for snapshot in seen), "the store was never away"
    assert all(snapshot.instances for snapshot in seen[1:]), seen
    assert sorted(scene.running("job")) == pods


def teachers(registry: Registry) -> list[str]:
    """Ids of live teachers; none while the store is away."""
    with contextlib.suppress(DiscoveryError):
        return [instance.id for instance in registry.snapshot("digits").instances]
    return []


def keys(store: Store, prefix: str) -> list[str]:
    """Keys under a prefix; none while the store is away."""
    with contextlib.suppress(DiscoveryError):
        return [entry.key for entry in store.list(prefix)]
    return []


def store_pods(scene: Scene) -> list[str]:
    """Names of the store's pods."""
    found = scene.cluster.list_pods(scene.namespace, "app.kubernetes.io/component=store")
    return [pod["metadata"]["name"] for pod in found]
