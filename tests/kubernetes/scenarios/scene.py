"""A story's cast: resources in a namespace, the store that they meet at, and what is known of them from outside."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.api import Cluster
from tests.cluster.operator_process import OperatorFactory
from tests.plugins_consul import ConsulAgent

HOST = "10.88.0.1"
"""The machine, as its pods see it."""
PROGRAMS = Path(__file__).parent / "programs"
MEMORY = "1Gi"
"""Of a pod with PyTorch: `edl run` takes 370 MB, 200 MB of them shared until the worker's interpreter ends."""
START_S = 240.0
"""Until pods run and have imported PyTorch, on a machine that is busy with other tests."""
END_S = 480.0
SetGpus = Callable[[str, int], None]
EDL = (sys.executable, "-m", "edl")


def start_consul(folder: Path) -> ConsulAgent:
    """Start an agent that answers this machine and its pods."""
    agent = ConsulAgent(folder, {"client_addr": f"127.0.0.1 {HOST}"})
    agent.start()
    return agent


def consul_url(agent: ConsulAgent) -> str:
    """The agent's URL, for pods and for this machine."""
    return f"consul://{HOST}:{agent.http_port}"


@dataclass(frozen=True)
class Scene:
    """A namespace of a story, with what starts operators of it and what makes pods that run this project."""

    cluster: Cluster
    namespace: str
    operator: OperatorFactory
    pod_template: Callable[..., dict[str, Any]]

    def create_job(self, name: str, run: list[str], template: Mapping[str, Any], **spec: Any) -> None:
        """Create an ElasticJob."""
        self._create("ElasticJob", name, {"run": run, "template": template, **spec})

    def create_pool(self, name: str, serve: list[str], template: Mapping[str, Any], **spec: Any) -> None:
        """Create a TeacherPool."""
        self._create("TeacherPool", name, {"serve": serve, "template": template, **spec})

    def _create(self, kind: str, name: str, spec: Mapping[str, Any]) -> None:
        path = f"/apis/edl.io/v1alpha1/namespaces/{self.namespace}/{kind.lower()}s"
        body = {"apiVersion": "edl.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        self.cluster.ask(path, "POST", body)

    def delete_job(self, name: str) -> None:
        """Delete an ElasticJob, and wait until its pods have gone."""
        self.cluster.ask(f"/apis/edl.io/v1alpha1/namespaces/{self.namespace}/elasticjobs/{name}", "DELETE")
        self.wait(f"the end of the pods of {name}", lambda: not self.pods(name))

    def phase(self, job: str) -> str:
        """A job's phase."""
        return str(self.status(job).get("phase", ""))

    def status(self, job: str) -> dict[str, Any]:
        """A job's status; {} before it has any."""
        found: dict[str, Any] = self.cluster.get("elasticjobs", job, self.namespace).get("status", {})
        return found

    def pods(self, job: str) -> list[Any]:
        """A job's pods, those that have ended among them."""
        return self.cluster.list_pods(self.namespace, f"edl.io/job={job}")

    def running(self, job: str) -> list[str]:
        """Names of a job's pods that run and are not asked to end."""
        return [pod["metadata"]["name"] for pod in self.pods(job) if is_running(pod)]

    def wait_running(self, job: str, count: int) -> list[str]:
        """Wait until a job has so many running pods, and return their names in order.

        A worker trains before its node has told of it: the kubelet looks at its containers once a second, or later.
        """
        self.wait(f"{count} running pods of {job}", lambda: len(self.running(job)) == count)
        found = sorted(self.running(job))
        assert len(found) == count, self.cluster.describe(self.namespace)
        return found

    def wait(self, what: str, condition: Callable[[], Any], timeout_s: float = START_S) -> Any:
        """Wait for a condition; see `Cluster.wait`."""
        return self.cluster.wait(what, condition, self.namespace, timeout_s)

    def wait_success(self, job: str, timeout_s: float = END_S) -> None:
        """Wait for a job's end, which must be a success."""
        self.wait(f"the end of {job}", lambda: self.phase(job) in ("Succeeded", "Failed"), timeout_s)
        assert self.phase(job) == "Succeeded", self.cluster.describe(self.namespace)


def is_running(pod: Mapping[str, Any]) -> bool:
    """Whether a pod runs and is not asked to end."""
    return pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


def node_of(pod: Mapping[str, Any]) -> str:
    """The node that a pod is on; "" for none."""
    return str(pod["spec"].get("nodeName", ""))
