"""A story's cast: resources in a namespace, the store that they meet at, and what is known of them from outside.

Programs of a job keep a diary in a file of lines of JSON: kind, at (seconds), pod, pid, and more.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.api import Cluster
from tests.cluster.operator_process import OperatorFactory
from tests.plugins_consul import ConsulAgent

HOST = "10.88.0.1"
"""The machine, as its pods see it."""
PROGRAMS = Path(__file__).parent / "programs"
MEMORY = "1Gi"
"""Of a pod with PyTorch: `edl run` takes 370 MB, 200 MB of them shared until the worker's interpreter ends."""
START_S = 300.0
"""Until pods run and have imported PyTorch, on a machine that is busy with other tests."""
END_S = 480.0
SetGpus = Callable[[str, int], None]
Entry = dict[str, Any]


@contextlib.contextmanager
def open_consul(folder: Path) -> Iterator[str]:
    """URL of a real Consul, for this machine and for pods."""
    agent = ConsulAgent(folder, {"client_addr": f"127.0.0.1 {HOST}"})
    agent.start()
    try:
        yield f"consul://{HOST}:{agent.http_port}"
    finally:
        agent.stop()


@dataclass(frozen=True)
class Scene:
    """A namespace of a story, with what starts operators of it and what makes pods that run this project."""

    cluster: Cluster
    namespace: str
    operator: OperatorFactory
    pod_template: Callable[..., dict[str, Any]]

    def create_job(self, name: str, run: list[str], template: Mapping[str, Any], **spec: Any) -> None:
        """Create an ElasticJob."""
        self.create("ElasticJob", name, run=run, template=template, **spec)

    def create_pool(self, name: str, serve: list[str], template: Mapping[str, Any], **spec: Any) -> None:
        """Create a TeacherPool."""
        self.create("TeacherPool", name, serve=serve, template=template, **spec)

    def create(self, kind: str, name: str, **spec: Any) -> None:
        """Create a resource of EDL's."""
        path = f"/apis/edl.io/v1alpha1/namespaces/{self.namespace}/{kind.lower()}s"
        body = {"apiVersion": "edl.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        self.cluster.ask(path, "POST", body)

    def create_deployment(self, name: str, template: Mapping[str, Any]) -> None:
        """Create a Deployment of no pods yet, whose label `app` is its name."""
        labels = {"app": name}
        pod = {"metadata": {"labels": labels}, "spec": template["spec"]}
        spec = {"replicas": 0, "selector": {"matchLabels": labels}, "template": pod}
        deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}
        self.cluster.apply(deployment, namespace=self.namespace)

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


def find_condition(resource: Any, kind: str) -> dict[str, Any]:
    """A resource's condition; {} without."""
    conditions = (resource or {}).get("status", {}).get("conditions", [])
    return next((item for item in conditions if item["type"] == kind), {})


def index_of(pod: str) -> str:
    """NAME-ROLE-INDEX of NAME-ROLE-INDEX-TRY."""
    return pod.rpartition("-")[0]


class Life(NamedTuple):
    """The time in which a process was seen alive."""

    pod: str
    pid: int
    begin: float
    end: float


class Diary:
    """A file to which all processes of a job append."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self, kind: str = "", after: float = 0.0) -> list[Entry]:
        """Entries of a kind, or all, that were written after a time; in the order in which they were written."""
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        # A line that crosses a page of the file may be there by half while it is written.
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [entry for entry in found if kind in ("", entry["kind"]) and entry["at"] > after]

    def has(self, kind: str, accept: Callable[[Entry], bool] = lambda entry: True, after: float = 0.0) -> bool:
        """Whether there is an entry of a kind that is accepted."""
        return any(accept(entry) for entry in self.entries(kind, after))

    def longest_pause(self, kind: str) -> float:
        """The longest time in seconds between two entries of a kind."""
        times = [entry["at"] for entry in self.entries(kind)]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)

    def lives(self) -> list[Life]:
        """The processes that wrote, in the order in which they began."""
        times: dict[tuple[str, int], list[float]] = defaultdict(list)
        for entry in self.entries():
            times[entry["pod"], entry["pid"]].append(entry["at"])
        found = [Life(pod, pid, min(seen), max(seen)) for (pod, pid), seen in times.items()]
        return sorted(found, key=lambda life: life.begin)

    def overlaps(self) -> list[tuple[Life, Life]]:
        """Pairs of processes of one member that were alive at the same time."""
        return [
            (first, second)
            for first, second in itertools.combinations(self.lives(), 2)
            if index_of(first.pod) == index_of(second.pod) and second.begin < first.end
        ]
