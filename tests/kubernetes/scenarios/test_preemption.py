"""Online services take a job's GPUs, and give them back."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.api import Cluster
from tests.cluster.operator_process import OperatorFactory
from tests.kubernetes.scenarios.diary import Diary, lives, overlaps
from tests.kubernetes.scenarios.scene import MEMORY, PROGRAMS, Scene


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
    scene: Scene,
    gpus: Callable[[str, int], None],
    operator: OperatorFactory,
    consul_store: str,
    pod_template: Callable[..., dict[str, Any]],
    online_class: str,
    tmp_path: Path,
) -> None:
    """Of four workers three go and one stays; when there is room again, all come back, and no row was lost."""
    cluster, namespace = scene.cluster, scene.namespace
    shared = tmp_path / "shared"
    template = pod_template(gpus=1, memory=MEMORY, writes=[shared])
    diary, ended = Diary(shared / "diary.jsonl"), shared / "ended"
    for node in cluster.nodes():
        gpus(node, 2)
    operator("--store", consul_store, capacity=True)
    program = ["--nproc-per-node", "1", str(PROGRAMS / "counting.py"), str(diary.path), "--until", str(ended)]
    scene.create_job("count", program, template, minReplicas=1, maxReplicas=4)
    scene.wait("four workers that train", lambda: diary.has("step", lambda step: step["world"] == 4))
    (budget,) = cluster.ask(f"/apis/policy/v1beta1/namespaces/{namespace}/poddisruptionbudgets")["items"]
    assert budget["spec"]["minAvailable"] == 1

    online = pod_template(["sleep", "600"], gpus=1)
    online["spec"] |= {"priorityClassName": online_class, "terminationGracePeriodSeconds": 0}
    for index in range(3):
        cluster.run_pod(namespace, f"online-{index}", online)
    taken = scene.wait(
        "online pods on the job's GPUs",
        lambda: all(cluster.pod_phase(namespace, f"online-{index}") == "Running" for index in range(3)) and now(diary),
    )
    scene.wait(
        "training by the worker that is left", lambda: diary.has("step", lambda step: step["world"] == 1, after=taken)
    )
    scene.wait_running("count", 1)
    assert scene.phase("count") == "Running"
    for index in range(3):
        cluster.ask(f"/api/v1/namespaces/{namespace}/pods/online-{index}", "DELETE", {"gracePeriodSeconds": 0})
    freed = now(diary)
    scene.wait(
        "training by four workers again", lambda: diary.has("step", lambda step: step["world"] == 4, after=freed)
    )
    scene.wait_running("count", 4)
    ended.touch()
    scene.wait_success("count")

    (end,) = diary.entries("end")
    assert end["least"] == end["most"] == end["epochs"], f"rows lost or repeated: {end}"
    assert overlaps(lives(diary)) == [], "two processes of a member were alive at the same time"


def now(diary: Diary) -> float:
    """The time of the last entry."""
    return float(diary.entries()[-1]["at"])
