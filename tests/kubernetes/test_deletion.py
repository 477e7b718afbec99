"""Scenario 8: what is deleted leaves nothing behind, in the cluster or in Consul."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from edl.discovery import open_registry
from tests.cluster.api import Cluster
from tests.cluster.operator_process import OperatorFactory
from tests.plugins_consul import ConsulAgent

HOST = "10.88.0.1"  # this machine, from a pod
TEACHER = f"{Path(__file__).parent / 'small_teacher.py'}:predict"
GRACE_S = 5
LEASE_S = 60.0
KILLED_S = GRACE_S + 60.0  # the kubelet notices, asks, waits for the grace period, and kills
# A kubelet of 1.20 reports a pod's end a minute late at times; its processes have ended long before. See cluster.api.
# Measured with three pods of a plain image and a grace period of 5 s: namespaces were gone after 19 to 77 s.
REPORTED_S = 240.0
READY_S = 150.0
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


@pytest.fixture
def consul(machine: object, tmp_path: Path) -> Iterator[ConsulAgent]:
    """A Consul agent that pods reach."""
    agent = ConsulAgent(tmp_path / "consul", {"client_addr": f"127.0.0.1 {HOST}"})
    try:
        agent.start()
        yield agent
    finally:
        agent.kill()


def _list_all(cluster: Cluster, namespace: str) -> set[str]:
    """Names of all objects of a namespace that somebody of EDL's may have made."""
    found = set()
    for path in KINDS:
        answer = cluster.ask(path.format(namespace))
        if answer is None and "policy" in path:
            answer = cluster.ask(path.replace("v1beta1", "v1").format(namespace))
        found |= {f"{path.rsplit('/', 1)[1]}/{item['metadata']['name']}" for item in (answer or {"items": []})["items"]}
    return found


class Members:
    """A job of two workers with a disruption budget, and a pool of a teacher that registers in Consul."""

    def __init__(self, cluster: Cluster, namespace: str, url: str, template: dict[str, Any]) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self.url = url
        self._template = {"spec": template["spec"]}

    def create(self) -> None:
        """Make both, and wait until all is up."""
        common = {"store": self.url, "gracePeriodSeconds": GRACE_S, "template": self._template}
        self._cluster.apply(
            self._resource(
                "ElasticJob", "job", {"run": ["--no-python", "/usr/bin/sleep", "600"], "minReplicas": 2, **common}
            ),
            self._resource(
                "TeacherPool",
                "pool",
                {
                    "serve": ["--callable", TEACHER, "--input", "x:float32[4]"],
                    "minReplicas": 1,
                    "service": self._namespace,
                    **common,
                },
            ),
            namespace=self._namespace,
        )
        self._cluster.wait("two workers and a teacher", self._all_run, self._namespace, READY_S)
        self._cluster.wait("the teacher's registration", self.registered, self._namespace, READY_S)

    @staticmethod
    def _resource(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
        return {"apiVersion": "edl.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}

    def _all_run(self) -> bool:
        phases = [pod["status"].get("phase") for pod in self._cluster.list_pods(self._namespace)]
        return phases == ["Running"] * 3

    def list_processes(self) -> list[str]:
        """Command lines of this machine's processes that belong to the job or the teacher."""
        found = []
        for process in psutil.process_iter(["environ", "cmdline"]):
            environ = process.info["environ"] or {}
            if environ.get("MEMBERS_OF") == self._namespace:
                found.append(" ".join(process.info["cmdline"] or ()))
        return found

    def registered(self) -> int:
        """How many teachers Consul has of the namespace's service."""
        with open_registry(self.url) as registry:
            return len(registry.snapshot(self._namespace).instances)


@pytest.fixture
def members(
    cluster: Cluster, namespace: str, consul: ConsulAgent, pod_template: Callable[..., dict[str, Any]]
) -> Members:
    """Not made yet."""
    return Members(
        cluster, namespace, consul.url.replace("127.0.0.1", HOST), pod_template(env={"MEMBERS_OF": namespace})
    )


@pytest.mark.slow
@pytest.mark.consul
def test_deleted_resources_leave_nothing(
    cluster: Cluster, namespace: str, operator: OperatorFactory, members: Members
) -> None:
    operator("--store", members.url)
    cluster.wait("the namespace's own objects", lambda: _list_all(cluster, namespace), namespace)
    before = _list_all(cluster, namespace)
    members.create()
    assert len(_list_all(cluster, namespace) - before) >= 6, "a job, a pool, three pods and a disruption budget"
    assert len(members.list_processes()) >= 3
    cluster.kubectl("-n", namespace, "delete", "elasticjob/job", "teacherpool/pool", "--wait=true")
    cluster.wait("no process", lambda: not members.list_processes(), namespace, KILLED_S)
    cluster.wait("no registration", lambda: not members.registered(), namespace, LEASE_S)
    cluster.wait("nothing left", lambda: _list_all(cluster, namespace) == before, namespace, REPORTED_S)


@pytest.mark.slow
@pytest.mark.consul
def test_namespace_needs_no_operator(
    cluster: Cluster, namespace: str, operator: OperatorFactory, members: Members
) -> None:
    """A namespace is deleted with all that is in it, also where the operator is gone: nothing has a finalizer."""
    process = operator("--store", members.url)
    members.create()
    process.kill()
    for plural in ("elasticjobs", "teacherpools"):
        for item in cluster.ask(f"/apis/edl.io/v1alpha1/namespaces/{namespace}/{plural}")["items"]:
            assert not item["metadata"].get("finalizers"), item["metadata"]
    for pod in cluster.list_pods(namespace):
        assert not pod["metadata"].get("finalizers"), pod["metadata"]
    path = f"/api/v1/namespaces/{namespace}"
    cluster.ask(path, "DELETE")
    cluster.wait("no process", lambda: not members.list_processes(), timeout_s=KILLED_S)
    cluster.wait("no registration", lambda: not members.registered(), timeout_s=LEASE_S)
    cluster.wait("the namespace's end", lambda: cluster.ask(path) is None, timeout_s=REPORTED_S)
