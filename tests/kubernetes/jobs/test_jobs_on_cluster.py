"""Scenario 5 and its like: ends of real workers under `edl run`, and what the operator makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.discovery import open_store
from edl.master.naming import election_key
from tests.cluster.api import Cluster
from tests.cluster.operator_process import OperatorFactory
from tests.plugins_consul import ConsulAgent

HOST = "10.88.0.1"  # this machine, from a pod
END_S = 400.0  # to import torch twice, on a machine that does much else
SCRIPTS = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.consul]


@pytest.fixture
def store(machine: object, tmp_path: Path) -> Iterator[str]:
    """URL of a Consul agent that pods reach."""
    agent = ConsulAgent(tmp_path / "consul", {"client_addr": f"127.0.0.1 {HOST}"})
    try:
        agent.start()
        yield agent.url.replace("127.0.0.1", HOST)
    finally:
        agent.kill()


@pytest.fixture
def make_job(namespace: str, store: str, pod_template: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """An ElasticJob under `edl run`."""

    def make(run: list[str], template: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
        template = template or pod_template()
        fields = {"run": run, "store": store, "gracePeriodSeconds": 2, "template": template, **spec}
        metadata = {"name": "job", "namespace": namespace}
        return {"apiVersion": "edl.io/v1alpha1", "kind": "ElasticJob", "metadata": metadata, "spec": fields}

    return make


def read_status(cluster: Cluster, namespace: str) -> dict[str, Any]:
    job = cluster.get("elasticjobs", "job", namespace) or {}
    status = job.get("status", {})
    assert isinstance(status, dict)
    return status


def wait_phase(cluster: Cluster, namespace: str, *phases: str) -> dict[str, Any]:
    def ended() -> bool:
        return read_status(cluster, namespace).get("phase") in phases

    cluster.wait(f"the job's phase {phases}", ended, namespace, END_S)
    return read_status(cluster, namespace)


def test_bug_stops_the_job(
    cluster: Cluster,
    namespace: str,
    operator: OperatorFactory,
    make_job: Callable[..., dict[str, Any]],
    pod_template: Callable[..., dict[str, Any]],
) -> None:
    operator()
    template = pod_template(reads=[SCRIPTS])
    cluster.apply(make_job([str(SCRIPTS / "raising_script.py")], template))
    status = wait_phase(cluster, namespace, "Failed", "Succeeded")
    failed = next(item for item in status["conditions"] if item["type"] == "Failed")
    assert failed["reason"] == "UserError"
    assert "ValueError: no such column: label" in failed["message"]
    assert "in read_column" in failed["message"], "the traceback, not its last line alone"
    assert status["message"] == "worker-0: ValueError: no such column: label"

    def is_shown() -> bool:  # events are written by a thread of their own, after the status
        shown = cluster.kubectl("-n", namespace, "describe", "ej", "job").split("Events:")[1]
        return "Failed" in shown and "no such column: label" in shown

    cluster.wait("the event of the failure", is_shown, namespace)
    pods = cluster.list_pods(namespace, "edl.io/job=job")
    assert [pod["metadata"]["name"] for pod in pods] == ["job-worker-0-0"], "a bug is not tried again; its log stays"


def test_more_memory_after_a_kill(
    cluster: Cluster,
    namespace: str,
    operator: OperatorFactory,
    make_job: Callable[..., dict[str, Any]],
    pod_template: Callable[..., dict[str, Any]],
) -> None:
    """1,100 MiB do not go into 1 GiB, but into half as much more, beside the agent."""
    operator()
    template = pod_template(reads=[SCRIPTS], memory="1Gi")
    cluster.apply(make_job(["--no-prewarm", str(SCRIPTS / "hungry_script.py"), "1100"], template))
    status = wait_phase(cluster, namespace, "Failed", "Succeeded")
    record = status["members"]["worker-0"]
    assert status["phase"] == "Succeeded", status
    assert (record["try"], record["memoryFactor"]) == (1, 1.5)
    assert record["failures"] == {"out_of_memory": 1}
    pods = {pod["metadata"]["name"]: pod for pod in cluster.list_pods(namespace, "edl.io/job=job")}
    assert pods.keys() <= {"job-worker-0-0", "job-worker-0-1"}
    if first := pods.get("job-worker-0-0"):  # its kubelet may take a minute to let it go
        assert "deletionTimestamp" in first["metadata"]
    pod = pods["job-worker-0-1"]
    assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == "1536Mi"


def test_thirty_come_back(
    cluster: Cluster,
    namespace: str,
    operator: OperatorFactory,
    make_job: Callable[..., dict[str, Any]],
    pod_template: Callable[..., dict[str, Any]],
) -> None:
    operator()
    template = pod_template(["sleep", "100000"], cpu="1m", memory="32Mi")  # runc needs some before `sh` begins
    template["spec"]["containers"][0]["command"] = ["sh", "-c", "sleep 100000"]
    cluster.apply(make_job(["none"], template, minReplicas=2, maxReplicas=30, scaling="external", replicas=30))

    def list_running() -> list[str]:
        pods = cluster.list_pods(namespace, "edl.io/job=job")
        return [
            pod["metadata"]["uid"]
            for pod in pods
            if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]

    cluster.wait("30 workers", lambda: len(list_running()) == 30, namespace, END_S)
    before = set(list_running())
    path = f"/api/v1/namespaces/{namespace}/pods"
    cluster.ask(path, "DELETE", query={"labelSelector": "edl.io/job=job", "gracePeriodSeconds": "0"})
    cluster.wait("30 others", lambda: len(set(list_running()) - before) == 30, namespace, END_S)
    members = read_status(cluster, namespace)["members"]
    once = {record["lastEnd"]["cause"] for record in members.values() if record["try"] == 1}
    again = {record["lastEnd"]["cause"] for record in members.values() if record["try"] > 1}
    assert once == {"preempted"}
    assert again <= {"preempted", "launch_failed"}, "a kubelet with thirty pods to start may fail with some"
    pods = cluster.list_pods(namespace, "edl.io/job=job")
    assert count_most_starting(pods) >= 5, f"not one after another: {pods}"


def count_most_starting(pods: list[Any]) -> int:
    """Return how many pods had been made and did not run yet, when there were most of them."""
    running = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    made = [pod["metadata"]["creationTimestamp"] for pod in running]
    begun = [pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] for pod in running]
    return max(sum(time <= now for time in made) - sum(time <= now for time in begun) for now in made)


def test_master_is_replaced(
    cluster: Cluster, namespace: str, operator: OperatorFactory, store: str, make_job: Callable[..., dict[str, Any]]
) -> None:
    """The successor goes on with the journal in the store, under another address."""
    operator("--allow-store", store)
    master = {"enabled": True, "args": ["--data", "range:10", "--shard-size", "1"]}
    cluster.apply(make_job(["--no-python", "/usr/bin/sleep", "600"], master=master))
    job_id = cluster.wait("the job's id", lambda: read_status(cluster, namespace).get("jobId"), namespace)

    def find_address(pod: str) -> str:
        """The pod's address, if the store says that the job's master is there."""
        found = cluster.ask(f"/api/v1/namespaces/{namespace}/pods/{pod}")
        address = str(found["status"].get("podIP", "")) if found else ""
        with open_store(store) as opened:
            entry = opened.get(election_key(job_id))
        return address if entry is not None and address and address in entry.value.decode() else ""

    first = cluster.wait("the master", lambda: find_address("job-master-0-0"), namespace, END_S)
    cluster.kubectl("-n", namespace, "delete", "pod", "job-master-0-0", "--grace-period=0", "--force")
    second = cluster.wait("its successor", lambda: find_address("job-master-0-1"), namespace, END_S)
    assert first != second
    requests = cluster.ask(f"/api/v1/namespaces/{namespace}/pods/job-master-0-1")["spec"]["containers"][0]["resources"]
    assert "nvidia.com/gpu" not in requests.get("requests", {})
    assert read_status(cluster, namespace)["members"]["worker-0"]["try"] == 0, "workers do not notice"
