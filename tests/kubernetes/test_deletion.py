"""What is deleted leaves nothing behind, in the cluster or in Consul."""

from __future__ import annotations

import psutil

from edl.discovery import open_registry
from tests.kubernetes.scenarios.scene import Scene

REPORTED_S = 240.0
"""A kubelet of 1.20 reports a pod's end a minute late at times; its processes have ended long before."""
KINDS = (
    "/api/v1/namespaces/{}/pods",
    "/api/v1/namespaces/{}/services",
    "/api/v1/namespaces/{}/configmaps",
    "/api/v1/namespaces/{}/persistentvolumeclaims",
    "/apis/coordination.k8s.io/v1/namespaces/{}/leases",
    "/apis/policy/v1beta1/namespaces/{}/poddisruptionbudgets",
    "/apis/edl.io/v1alpha1/namespaces/{}/elasticjobs",
    "/apis/edl.io/v1alpha1/namespaces/{}/teacherpools",
)


def list_all(scene: Scene) -> set[str]:
    """Names of all objects of a namespace that somebody of EDL's may have made."""
    found = set()
    for path in KINDS:
        answer = scene.cluster.ask(path.format(scene.namespace))
        if answer is None and "policy" in path:
            answer = scene.cluster.ask(path.replace("v1beta1", "v1").format(scene.namespace))
        found |= {f"{path.rsplit('/', 1)[1]}/{item['metadata']['name']}" for item in (answer or {"items": []})["items"]}
    return found


def count_processes(scene: Scene) -> int:
    """How many processes of this machine belong to the namespace's pods."""
    processes = psutil.process_iter(["environ"])
    return sum((process.info["environ"] or {}).get("MEMBERS_OF") == scene.namespace for process in processes)


def test_deletion_leaves_nothing(scene: Scene, consul_store: str) -> None:
    """Neither of resources, nor of a namespace whose operator is gone: nothing has a finalizer."""
    cluster, namespace = scene.cluster, scene.namespace
    template = {"spec": scene.pod_template(env={"MEMBERS_OF": namespace})["spec"]}
    process = scene.operator("--store", consul_store)
    scene.wait("the namespace's own objects", lambda: list_all(scene))
    before = list_all(scene)

    def count_registered() -> int:
        with open_registry(consul_store) as registry:
            return len(registry.snapshot("pool").instances)

    def create() -> None:
        """Make a job of two workers and a pool of a teacher, and wait until all is up."""
        common = {"gracePeriodSeconds": 5}
        scene.create_job("job", ["--no-python", "/usr/bin/sleep", "600"], template, minReplicas=2, **common)
        scene.create_pool("pool", ["--factory", "edl.testing.models:echo"], template, minReplicas=1, **common)
        scene.wait(
            "two workers and a teacher",
            lambda: [pod["status"].get("phase") for pod in cluster.list_pods(namespace)] == ["Running"] * 3,
        )
        scene.wait("the teacher's registration", count_registered)

    create()
    assert len(list_all(scene) - before) >= 6, "a job, a pool, three pods and a disruption budget"
    assert count_processes(scene) >= 3
    cluster.kubectl("-n", namespace, "delete", "elasticjob/job", "teacherpool/pool", "--wait=true")
    scene.wait("no process", lambda: not count_processes(scene))
    scene.wait("no registration", lambda: not count_registered())
    scene.wait("nothing left", lambda: list_all(scene) == before, REPORTED_S)

    create()
    process.kill()
    path = f"/api/v1/namespaces/{namespace}"
    cluster.ask(path, "DELETE")
    cluster.wait("no process", lambda: not count_processes(scene), timeout_s=REPORTED_S)
    cluster.wait("no registration", lambda: not count_registered(), timeout_s=REPORTED_S)
    cluster.wait("the namespace's end", lambda: cluster.ask(path) is None, timeout_s=REPORTED_S)
