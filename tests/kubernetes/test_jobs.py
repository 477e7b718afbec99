"""Ends of real workers and masters under `edl run`, and what the operator makes of them."""

from __future__ import annotations

import json

from edl.discovery import open_store
from edl.master.naming import election_key
from edl.master.reports import read_report
from tests.kubernetes.scenarios.scene import PROGRAMS, Scene


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


def test_master_is_replaced(scene: Scene, consul_store: str) -> None:
    """The successor goes on with the journal in the store, and workers find it there."""
    cluster, namespace = scene.cluster, scene.namespace
    scene.operator("--store", consul_store)
    master = {"enabled": True, "args": ["--data", "range:10", "--shard-size", "1"]}
    scene.create_job("job", ["--no-python", "/usr/bin/sleep", "600"], scene.pod_template(), master=master)
    job_id = scene.wait("the job's id", lambda: scene.status("job").get("jobId"))

    def find_term(pod: str) -> int:
        """The term of the job's master, if workers find it in this pod; 0 if they do not.

        The address alone does not tell pods apart: a node may give that of a pod that has ended to the next one.
        """
        found = cluster.ask(f"/api/v1/namespaces/{namespace}/pods/{pod}")
        with open_store(consul_store) as opened:
            entry, report = opened.get(election_key(job_id)), read_report(opened, job_id)
        if found is None or entry is None or report is None:
            return 0
        leader, address = json.loads(entry.value), found["status"].get("podIP", "")
        is_there = leader["host"] == report["host"] == pod and leader["endpoint"].startswith(f"{address}:")
        return int(report["term"]) if is_there else 0

    first = scene.wait("the master", lambda: find_term("job-master-0-0"))
    cluster.kubectl("-n", namespace, "delete", "pod", "job-master-0-0", "--grace-period=0", "--force")
    second = scene.wait("its successor", lambda: find_term("job-master-0-1"))
    assert second > first, "its journal is that of the first"
    assert scene.status("job")["members"]["worker-0"]["try"] == 0, "workers do not notice"
