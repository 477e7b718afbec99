"""Jobs that train go on while online services take their GPUs, a node is lost, or the API server is away.

The counts of the model that comes out say that each row was seen as often as any other, and the diary that no two
processes of a member were alive at the same time.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.api import Cluster
from tests.cluster.machine import KubeMachine
from tests.kubernetes.scenarios.scene import MEMORY, PROGRAMS, START_S, Diary, Scene, SetGpus, index_of, is_running

LOST_S = 240.0
"""Until a pod on a lost node is replaced: 8 s until the node counts as lost, 30 s of toleration, and a start."""
AWAY_S = 30.0
UNNOTICED_S = AWAY_S / 2
"""A job that waited for the API server would do nothing for all that time; a pause of some seconds between two steps of
0.2 s may come from a busy machine."""


class Training:
    """A job that trains until it is told to end."""

    def __init__(self, scene: Scene, folder: Path, name: str = "count", gpus: int = 1, **spec: Any) -> None:
        self._scene = scene
        self.name = name
        self.diary = Diary(folder / name / "diary.jsonl")
        self._ended = folder / name / "ended"
        program = [str(PROGRAMS / "counting.py"), str(self.diary.path), str(self._ended)]
        template = scene.pod_template(gpus=gpus, memory=MEMORY, writes=[folder / name])
        scene.create_job(name, ["--nproc-per-node", "1", *program], template, **spec)

    def wait_world(self, count: int, after: float = 0.0, timeout_s: float = START_S) -> float:
        """Wait for a step by so many workers after a time, and return when it was."""
        self._scene.wait(
            f"training by {count} workers",
            lambda: self.diary.has("step", lambda step: step["world"] == count, after),
            timeout_s,
        )
        return next(float(step["at"]) for step in self.diary.entries("step", after) if step["world"] == count)

    def finish(self) -> None:
        """End it, and check what it has trained on."""
        self._ended.touch()
        self._scene.wait_success(self.name)
        (end,) = self.diary.entries("end")
        assert end["least"] == end["most"] == end["epochs"], f"rows lost or repeated: {end}"
        assert self.diary.overlaps() == [], "two processes of a member were alive at the same time"


@pytest.fixture
def online_class(cluster: Cluster) -> Iterator[str]:
    """A PriorityClass above that of jobs."""
    name = f"edl-test-online-{secrets.token_hex(4)}"
    kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}}
    cluster.ask("/apis/scheduling.k8s.io/v1/priorityclasses", "POST", {**kind, "value": 1000})
    try:
        yield name
    finally:
        cluster.ask(f"/apis/scheduling.k8s.io/v1/priorityclasses/{name}", "DELETE")


def test_preempted_job_shrinks_and_grows(
    scene: Scene, gpus: SetGpus, consul_store: str, online_class: str, tmp_path: Path
) -> None:
    """Of four workers three go and one stays; when there is room again, all come back, and no row was lost."""
    cluster, namespace = scene.cluster, scene.namespace
    for node in cluster.nodes():
        gpus(node, 2)
    scene.operator("--store", consul_store, capacity=True)
    training = Training(scene, tmp_path, minReplicas=1, maxReplicas=4)
    training.wait_world(4)
    (budget,) = cluster.ask(f"/apis/policy/v1beta1/namespaces/{namespace}/poddisruptionbudgets")["items"]
    assert budget["spec"]["minAvailable"] == 1

    online = scene.pod_template(["sleep", "600"], gpus=1)
    online["spec"] |= {"priorityClassName": online_class, "terminationGracePeriodSeconds": 0}
    names = [f"online-{index}" for index in range(3)]
    for name in names:
        cluster.run_pod(namespace, name, online)
    scene.wait(
        "online pods on the job's GPUs",
        lambda: {pod["metadata"]["name"] for pod in cluster.list_pods(namespace) if is_running(pod)} >= set(names),
    )
    training.wait_world(1, after=training.diary.entries()[-1]["at"])
    scene.wait_running("count", 1)
    assert scene.phase("count") == "Running"
    for name in names:
        cluster.ask(f"/api/v1/namespaces/{namespace}/pods/{name}", "DELETE", {"gracePeriodSeconds": 0})
    training.wait_world(4, after=training.diary.entries()[-1]["at"])
    scene.wait_running("count", 4)
    training.finish()


def test_job_goes_on_without_its_node(
    scene: Scene, gpus: SetGpus, stoppable_nodes: KubeMachine, consul_store: str, tmp_path: Path
) -> None:
    """It shrinks to what is left, grows on the other node, and when the node is back nothing runs twice."""
    home, other = scene.cluster.nodes()
    gpus(home, 1)
    gpus(other, 1)
    scene.operator("--store", consul_store)
    training = Training(scene, tmp_path, minReplicas=1, maxReplicas=2)
    training.wait_world(2)
    scene.wait_running("count", 2)
    (lost,) = (
        pod["metadata"]["name"] for pod in scene.pods("count") if is_running(pod) and pod["spec"]["nodeName"] == other
    )
    gpus(home, 2)  # room for its successor

    stoppable_nodes.stop_node(other)
    stopped = time.time()
    alone = training.wait_world(1, after=stopped)
    # Not after `stopped`: of a step that both had computed by then, the one that is left writes a moment later.
    training.wait_world(2, alone, LOST_S)

    def find_successor() -> list[Any]:
        pods = {pod["metadata"]["name"]: pod for pod in scene.pods("count") if is_running(pod)}
        return [pod for name, pod in pods.items() if index_of(name) == index_of(lost) and name != lost]

    (successor,) = scene.wait("its pod", find_successor)
    assert successor["spec"]["nodeName"] == home
    stoppable_nodes.start_node(other)
    scene.wait("the end of the lost pod", lambda: lost not in [pod["metadata"]["name"] for pod in scene.pods("count")])
    training.wait_world(2, after=time.time() + 5)
    training.finish()
    late = [entry for entry in training.diary.entries(after=stopped + 1) if entry["pod"] == lost]
    assert late == [], "what ran on the lost node went on"
    names = sorted(pod["metadata"]["name"] for pod in scene.pods("count"))
    assert len({index_of(name) for name in names}) == 2, names


def test_running_jobs_do_not_notice(
    scene: Scene, stoppable_nodes: KubeMachine, consul_store: str, edl_store: str, tmp_path: Path
) -> None:
    """For 30 s the API server answers nobody in the cluster: the same processes go on, step by step.

    And the operator goes on afterwards.
    """
    stores = {"with-consul": consul_store, "with-edl": edl_store}
    running = scene.operator("--store", consul_store)
    jobs = [Training(scene, tmp_path, name, gpus=0, minReplicas=2, store=store) for name, store in stores.items()]
    for job in jobs:
        job.wait_world(2)
        scene.wait("the phase", lambda job=job: scene.phase(job.name) == "Running")  # type: ignore[misc]
    workers = {job.name: scene.wait_running(job.name, 2) for job in jobs}

    away = threading.Event()
    stoppable_nodes.stop_api_server()
    try:
        away.wait(AWAY_S)
    finally:
        stoppable_nodes.continue_api_server()
    back = time.time()
    for job in jobs:
        scene.wait("training afterwards", lambda job=job: job.diary.has("step", after=back + 10))  # type: ignore[misc]
        assert sorted(scene.running(job.name)) == workers[job.name]
    assert running.running, running.text
    for job in jobs:
        job.finish()
        assert len(job.diary.lives()) == 2, f"workers of {job.name} were started again"
        assert job.diary.longest_pause("step") < UNNOTICED_S
