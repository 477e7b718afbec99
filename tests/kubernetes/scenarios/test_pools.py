"""Pools of teachers with a student: edited ones replace their teachers, and borrowed GPUs are given back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

from edl.distill import DistillReader
from edl.kube.resource_types import PODS
from edl.kube.watch import KubeWatch
from tests.cluster.api import MERGE, Cluster, kubectl_program
from tests.cluster.machine import KubeMachine
from tests.cluster.operator_process import OperatorProcess
from tests.kubernetes.scenarios.scene import Scene, SetGpus, find_condition, is_running
from tests.waiting import wait_until

FIRST, SECOND = 2.0, 3.0
"""What teachers multiply by: a label tells which model it is of."""
LOST_S = 240.0
"""Until a pod on a lost node is given up: 8 s until the node counts as lost, and 30 s of toleration."""
UPDATE_S = 480.0
"""Each of two teachers drains, is let go by a kubelet that may take a minute for it, and has a successor that starts on
a busy machine and is ready for 10 s."""


class Teachers(NamedTuple):
    """How many teachers there were at one moment.

    Attributes:
        there: that were not asked to end.
        serving: of these, that have been ready: a probe that a busy machine did not answer in time makes none less.
        waiting: of these, without a node.
        leaving: that were asked to end, and have not ended.
    """

    there: int
    serving: int
    waiting: int
    leaving: int


class TeacherHistory:
    """Follows a pool's teachers, and keeps each state that they were in, and how they ended."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.states: list[Teachers] = []
        self.exit_codes: dict[str, int] = {}
        self._ready: set[str] = set()
        self._watch: KubeWatch | None = None
        watch = KubeWatch(cluster.client, PODS, namespace, label_selector="edl.io/pool=digits", on_change=self._take)
        wait_until(lambda: watch.listed)
        self._watch = watch
        self._take("LISTED", None)

    def close(self) -> None:
        assert self._watch is not None
        self._watch.close()

    def begin(self) -> None:
        """Forget the states before the present one."""
        self.states = self.states[-1:]

    def _take(self, change: str, pod: Any) -> None:
        if self._watch is None:
            return
        pods = {other["metadata"]["name"]: other for other in self._watch.objects.values()}
        for name, other in {**pods, **({pod["metadata"]["name"]: pod} if pod is not None else {})}.items():
            for status in other["status"].get("containerStatuses", []):
                if "terminated" in status["state"]:
                    self.exit_codes[name] = status["state"]["terminated"]["exitCode"]
            if find_condition(other, "Ready").get("status") == "True":
                self._ready.add(name)
        there = {name: other for name, other in pods.items() if "deletionTimestamp" not in other["metadata"]}
        state = Teachers(
            len(there),
            len(there.keys() & self._ready),
            sum("nodeName" not in other["spec"] for other in there.values()),
            len(pods.keys() - there.keys() - self.exit_codes.keys()),
        )
        if self.states[-1:] != [state]:
            self.states.append(state)


class Student:
    """Reads labels until it is stopped, and notes which model each is of."""

    def __init__(self, scene: Scene, store: str) -> None:
        self.labels: list[float] = []
        self._scene = scene
        self._store = store
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(1)
        self._end = self._threads.submit(self._read)

    def _read(self) -> None:
        with DistillReader(ins=["x"], predicts=["y"]) as reader:
            reader.set_dynamic_teacher(self._store, "digits")
            reader.set_batch_generator(self._batches)
            for number, (x, y) in enumerate(reader(), start=1):
                assert x[0, 0] == number, "a batch is lost, repeated or out of order"
                (factor,) = set((y / x).ravel().tolist())
                self.labels.append(factor)

    def _batches(self) -> Iterator[tuple[Any]]:
        number = 0
        while not self._stop.wait(0.02):
            number += 1
            yield (np.full((2, 4), number, np.float32),)

    def read_labels(self, more: int) -> set[float]:
        """Wait for so many labels more, and return of which models they are."""
        before = len(self.labels)

        def has_more() -> bool:
            if self._end.done():
                self._end.result()
            return len(self.labels) >= before + more

        self._scene.wait(f"{more} labels more", has_more)
        return set(self.labels[before:])

    def close(self) -> None:
        self._stop.set()
        self._end.result(60)
        self._threads.shutdown()


def serve(factor: float) -> list[str]:
    options = [f"scale={factor}", "delay_s=0.05", f"version={factor:.0f}"]
    return ["--factory", "edl.testing.models:echo", *(part for option in options for part in ("--option", option))]


def edit(scene: Scene, **spec: Any) -> None:
    path = f"/apis/edl.io/v1alpha1/namespaces/{scene.namespace}/teacherpools/digits"
    scene.cluster.ask(path, "PATCH", {"spec": spec}, content_type=MERGE)


def read_pool(scene: Scene) -> Any:
    return scene.cluster.get("teacherpools", "digits", scene.namespace)


def wait_updated(scene: Scene) -> None:
    """Wait as a user does; a kubectl of these years minds the condition's `observedGeneration`."""
    scene.cluster.kubectl(
        *("-n", scene.namespace, "wait", "--for=condition=Updated", "tp/digits", f"--timeout={UPDATE_S:.0f}s"),
        timeout_s=UPDATE_S + 10,
        program=kubectl_program(new=True),
    )


def wait_ready(scene: Scene, count: int) -> None:
    scene.wait(f"{count} teachers", lambda: read_pool(scene).get("status", {}).get("readyReplicas") == count)


def test_successors_come_first(scene: Scene, gpus: SetGpus, consul_store: str) -> None:
    """Without `edl-capacity`; then a spec whose image is not there, and back."""
    gpus(scene.cluster.nodes()[0], 3)
    template = scene.pod_template(gpus=1)
    scene.operator("--store", consul_store)
    scene.create_pool("digits", serve(FIRST), template, maxReplicas=2, scaling="external", replicas=2)
    wait_ready(scene, 2)
    with (
        contextlib.closing(TeacherHistory(scene.cluster, scene.namespace)) as history,
        contextlib.closing(Student(scene, consul_store)) as student,
    ):
        assert student.read_labels(20) == {FIRST}
        history.begin()
        edit(scene, serve=serve(SECOND))
        wait_updated(scene)
        student.read_labels(50)
        assert student.read_labels(20) == {SECOND}
        scene.wait("the end of the last teacher", lambda: history.states[-1] == (2, 2, 0, 0))
        for state in history.states:
            assert state.serving >= 2, f"its successor comes first: {history.states}"
            assert state.there <= 3, f"one more than there are otherwise: {history.states}"
            assert max(state.leaving, state.waiting) <= 1, f"one at a time: {history.states}"

        broken = {**template["spec"]["containers"][0], "image": "docker.io/edl/none:1", "imagePullPolicy": "Never"}
        edit(scene, template={"spec": {**template["spec"], "containers": [broken]}})
        scene.wait("the stop", lambda: find_condition(read_pool(scene), "Updated")["reason"] == "UpdateStopped")
        assert "ErrImageNeverPull" in find_condition(read_pool(scene), "Updated")["message"]
        assert student.read_labels(50) == {SECOND}, "those of the spec before go on"
        edit(scene, template=template)
        wait_updated(scene)
        assert min(state.serving for state in history.states) >= 2, history.states
        student.read_labels(20)
    assert set(history.exit_codes.values()) <= {0}, f"teachers that were replaced have drained: {history.exit_codes}"
    assert {"Updating", "Updated", "UpdateStopped"} <= scene.cluster.reasons(scene.namespace)


def test_teachers_come_with_a_student(scene: Scene, consul_store: str) -> None:
    """Nobody says how many there are to be, but for `maxReplicas`: the load of a student brings them."""
    scene.operator("--store", consul_store)
    scene.create_pool("digits", serve(FIRST), scene.pod_template(), minReplicas=0, maxReplicas=1)
    scene.wait("a pool at rest", lambda: read_pool(scene).get("status", {}).get("wantedReplicas") == 0)
    assert scene.cluster.list_pods(scene.namespace) == []
    with contextlib.closing(Student(scene, consul_store)) as student:
        assert student.read_labels(20) == {FIRST}
    spec = read_pool(scene)["spec"]
    assert (spec["scaling"], spec["minReplicas"], spec["replicas"]) == ("auto", 0, 0), "nobody has said a number"


@pytest.mark.parametrize("capacity", [True, False], ids=["capacity", "probing"])
def test_borrowed_and_given_back(scene: Scene, gpus: SetGpus, consul_store: str, capacity: bool) -> None:
    """Four teachers have all GPUs; an online Deployment takes two of them, and leaves."""
    cluster, namespace = scene.cluster, scene.namespace
    for node in cluster.nodes():
        gpus(node, 2)
    process = scene.operator("--http-port", "0", "--store", consul_store, capacity=capacity)
    spec = {"maxReplicas": 4, "scaling": "external", "replicas": 4, "probeSeconds": 2}
    scene.create_pool("digits", serve(FIRST), scene.pod_template(gpus=1), **spec)
    online = scene.pod_template(["sleep", "100000"], gpus=1)
    online["spec"]["terminationGracePeriodSeconds"] = 0
    scene.create_deployment("online", online)
    with (
        contextlib.closing(TeacherHistory(cluster, namespace)) as history,
        contextlib.closing(Student(scene, consul_store)) as student,
    ):
        wait_ready(scene, 4)
        cluster.scale(namespace, "online", 2)
        scene.wait(
            "online pods on the teachers' GPUs",
            lambda: sum(is_running(pod) for pod in cluster.list_pods(namespace, "app=online")) == 2,
        )
        scene.wait("two teachers", lambda: read_pool(scene)["status"]["scheduledReplicas"] == 2)
        student.read_labels(50)
        cluster.scale(namespace, "online", 0)
        wait_ready(scene, 4)
        assert student.read_labels(50) == {FIRST}
        assert max(state.waiting for state in history.states) <= 1, "never more than one teacher waits for a node"
    assert set(history.exit_codes.values()) <= {0}, f"every teacher drained: {history.exit_codes}"
    if capacity:
        scene.wait("the metric of both", lambda: read_metric(process, "edl_give_back_seconds_count") == 2)
    scene.wait("the events", lambda: {"Grew", "Preempted", "GaveBack"} <= cluster.reasons(namespace))


def test_node_that_is_back_is_borrowed(
    scene: Scene, gpus: SetGpus, stoppable_nodes: KubeMachine, consul_store: str
) -> None:
    """What was lost with a node is no reason to leave it out: it is Ready again."""
    nodes = scene.cluster.nodes()
    for node in nodes:
        gpus(node, 1)
    scene.operator("--store", consul_store, capacity=True)
    spec = {"maxReplicas": 2, "scaling": "external", "replicas": 2}
    scene.create_pool("digits", serve(FIRST), scene.pod_template(gpus=1), **spec)
    wait_ready(scene, 2)
    stoppable_nodes.stop_node(nodes[1])
    scene.wait("the loss", lambda: read_pool(scene)["status"]["scheduledReplicas"] == 1, LOST_S)
    stoppable_nodes.start_node(nodes[1])
    scene.wait("both again", lambda: read_pool(scene)["status"]["readyReplicas"] == 2, LOST_S)
    assert "excludedNodes" not in read_pool(scene)["status"]


def read_metric(process: OperatorProcess, name: str) -> float:
    lines = process.ask("/metrics")[1].splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
