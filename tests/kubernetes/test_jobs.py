"""Ends of real workers and masters under `edl run`, and of whole jobs and pools: what is deleted leaves nothing."""

from __future__ import annotations

import psutil

from edl.discovery import open_registry
from tests.kubernetes.scenarios.scene import PROGRAMS, Scene

KINDS = "pods,services,configmaps,persistentvolumeclaims,leases,poddisruptionbudgets,elasticjobs,teacherpools"


def test_more_memory_after_a_kill(scene: Scene, consul_store: str) -> None:
    """1,100 MiB do not go into 1 GiB, but into half as much more, beside the agent."""
    scene.operator("--store", consul_store)
    run = ["--no-prewarm", str(PROGRAMS / "hungry.py"), "1100"]
    scene.create_job("job", run, scene.pod_template(memory="1Gi"), gracePeriodSeconds=2)
    scene.wait_success("job")
    record = scene.status("job")["members"]["worker-0"]
    assert (record["try"], record["memoryFactor"]) == (1, 1.5)
    assert record["failures"] == {"out_of_memory": 1}
    pods = {pod["metadata"]["name"]: pod for pod in scene.pods("job")}
    assert pods.keys() <= {"job-worker-0-0", "job-worker-0-1"}
    if first := pods.get("job-worker-0-0"):  # its kubelet may take a minute to let it go
        assert "deletionTimestamp" in first["metadata"]
    assert pods["job-worker-0-1"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "1536Mi"


def list_all(scene: Scene) -> set[str]:
    """Names of all objects of a namespace that somebody of EDL's may have made."""
    return set(scene.cluster.kubectl("-n", scene.namespace, "get", KINDS, "-o", "name").split())


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
    scene.wait("nothing left", lambda: list_all(scene) == before)

    create()
    process.kill()
    path = f"/api/v1/namespaces/{namespace}"
    cluster.ask(path, "DELETE")
    scene.wait("no process", lambda: not count_processes(scene))
    scene.wait("no registration", lambda: not count_registered())
    scene.wait("the namespace's end", lambda: cluster.ask(path) is None)
