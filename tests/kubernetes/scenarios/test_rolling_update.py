"""A pool whose spec is edited replaces its teachers one at a time, while a student reads labels."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader
from edl.kube.objects import parse_time
from edl.kube.resource_types import PODS
from edl.kube.watch import KubeWatch
from tests.cluster.api import MERGE, Cluster, kubectl_program
from tests.cluster.operator_process import OperatorFactory
from tests.kubernetes.scenarios.scene import Scene

FIRST, SECOND = 2.0, 3.0
"""What teachers multiply by: a label tells which model it is of."""
STEADY_S = 10.0
ROUNDING_S = 1.0
"""Times of the API are whole seconds."""
UPDATE_S = 480.0
"""Each of two teachers drains, is let go by a kubelet that may take a minute for it, and has a successor that starts on
a busy machine and is ready for 10 s."""
HEARD_S = 2.0
"""A teacher that leaves takes requests for so long, which a student on a busy machine may need to hear of it. It is the
most that the grace period of 10 s has room for: a quarter of the time to drain."""


@dataclass(frozen=True)
class Teachers:
    """Teachers at one moment; none of those that are leaving is among the others.

    Attributes:
        live: by revision.
        ready: by revision; a probe that a busy machine did not answer in time makes none less.
        leaving: that were asked to end, and have not ended.
        waiting: without a node.
    """

    live: tuple[tuple[str, int], ...]
    ready: tuple[tuple[str, int], ...]
    leaving: int
    waiting: int

    @property
    def most(self) -> int:
        return sum(count for _, count in self.live)

    @property
    def serving(self) -> int:
        return sum(count for _, count in self.ready)


class TeacherHistory:
    """Follows a pool's teachers, and keeps each state that they were in."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.states: list[Teachers] = []
        self.ended: dict[str, int] = {}
        self.steady_s: dict[str, float] = {}
        self._ready_s: dict[str, float] = {}
        self._watch: KubeWatch | None = None
        watch = KubeWatch(cluster.client, PODS, namespace, label_selector="edl.io/pool=digits", on_change=self._take)
        assert watch.wait_listed(30)
        self._watch = watch
        self._take("LISTED", None)

    def close(self) -> None:
        assert self._watch is not None
        self._watch.close()

    def begin(self) -> None:
        """Forget the states before the present one."""
        self.states = self.states[-1:]

    def shows_only(self, revision: str, count: int) -> bool:
        """Return whether so many teachers of a revision are all that there are, as this watch has seen by now."""
        last = self.states[-1]
        return last.live == ((revision, count),) and last.leaving == 0

    def _take(self, change: str, pod: Any) -> None:
        if self._watch is None:
            return
        pods = list(self._watch.objects.values())
        live = [other for other in pods if is_wanted(other)]
        for other in (*pods, *([pod] if pod is not None else [])):
            self._note(other, live)
        state = Teachers(
            count_revisions(live),
            count_revisions([other for other in live if other["metadata"]["name"] in self._ready_s]),
            sum(not is_wanted(other) and not has_ended(other) for other in pods),
            sum("nodeName" not in other["spec"] for other in live),
        )
        if not self.states or self.states[-1] != state:
            self.states.append(state)

    def _note(self, pod: Any, live: list[Any]) -> None:
        """Note since when a teacher is ready, for how long a successor had been when it had to leave, and its end."""
        metadata, ready = pod["metadata"], find_condition(pod, "Ready")
        name = metadata["name"]
        if ready.get("status") == "True":
            self._ready_s[name] = parse_time(ready["lastTransitionTime"])
        if not is_wanted(pod) and name not in self.steady_s:
            asked_s = parse_time(metadata["deletionTimestamp"]) - metadata["deletionGracePeriodSeconds"]
            others = [other["metadata"]["name"] for other in live if revision_of(other) != revision_of(pod)]
            since = [self._ready_s[other] for other in others if other in self._ready_s]
            self.steady_s[name] = asked_s - max(since, default=asked_s)
        for status in pod["status"].get("containerStatuses", []):
            if "terminated" in status["state"]:
                self.ended[name] = status["state"]["terminated"]["exitCode"]


def revision_of(pod: Any) -> str:
    return str(pod["metadata"]["labels"]["edl.io/revision"])


def count_revisions(pods: list[Any]) -> tuple[tuple[str, int], ...]:
    revisions = [revision_of(pod) for pod in pods]
    return tuple(sorted((revision, revisions.count(revision)) for revision in set(revisions)))


def find_condition(resource: Any, kind: str) -> dict[str, Any]:
    conditions = resource.get("status", {}).get("conditions", [])
    return next((item for item in conditions if item["type"] == kind), {})


def list_teachers(cluster: Cluster, namespace: str) -> dict[str, Any]:
    return {pod["metadata"]["name"]: pod for pod in cluster.list_pods(namespace, "edl.io/pool=digits")}


def is_wanted(pod: Any) -> bool:
    return "deletionTimestamp" not in pod["metadata"]


def has_ended(pod: Any) -> bool:
    statuses = pod["status"].get("containerStatuses", [])
    return bool(statuses) and all("terminated" in status["state"] for status in statuses)


class Pupil:
    """Reads labels until it is stopped, and notes which model each is of."""

    def __init__(self, store: str) -> None:
        self.labels: list[float] = []
        self.rows_resent = 0
        self._store = store
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            with DistillReader(ins=["x"], predicts=["y"]) as reader:
                reader.set_dynamic_teacher(self._store, "digits")
                reader.set_batch_generator(self._batches)
                for number, (x, y) in enumerate(reader(), start=1):
                    assert x[0, 0] == number, "a batch is lost, repeated or out of order"
                    (factor,) = set((y / x).ravel().tolist())
                    self.labels.append(factor)
                    self.rows_resent = reader.stats().rows_resent
        except BaseException as exc:  # noqa: BLE001 - raised again by `check`
            self._failure = exc

    def _batches(self) -> Iterator[tuple[Any]]:
        number = 0
        while not self._stop.wait(0.02):
            number += 1
            yield (np.full((2, 4), number, np.float32),)

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def count(self) -> int:
        """Return how many batches have labels."""
        self.check()
        return len(self.labels)

    def wait(self, scene: Scene, more: int) -> list[float]:
        """Wait for so many labels more, and return of which models they are."""
        before = len(self.labels)
        scene.wait(f"{more} labels more", lambda: self.count() >= before + more)
        return self.labels[before:]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        self.check()
        assert not self._thread.is_alive()


@contextlib.contextmanager
def pupil_of(store: str) -> Iterator[Pupil]:
    found = Pupil(store)
    try:
        yield found
    finally:
        found.stop()


def serve(factor: float, delay_s: float = 0.05) -> list[str]:
    options = [f"scale={factor}", f"delay_s={delay_s}", f"version={factor:.0f}"]
    return ["--factory", "edl.testing.models:echo", *(part for option in options for part in ("--option", option))]


def slow(factor: float) -> list[str]:
    """Arguments of a teacher that takes seconds for a request, and is heard of before it refuses one."""
    return [*serve(factor, 3.0), "--linger", f"{HEARD_S}s"]


def edit(scene: Scene, **spec: Any) -> None:
    path = f"/apis/edl.io/v1alpha1/namespaces/{scene.namespace}/teacherpools/digits"
    scene.cluster.ask(path, "PATCH", {"spec": spec}, content_type=MERGE)


def pool_of(scene: Scene) -> Any:
    return scene.cluster.get("teacherpools", "digits", scene.namespace)


def updated_of(scene: Scene) -> tuple[str, str, bool]:
    """The condition `Updated`: status, reason, and whether it is of the spec as it is."""
    pool = pool_of(scene)
    found = find_condition(pool, "Updated")
    present = found.get("observedGeneration") == pool["metadata"]["generation"]
    return found.get("status", ""), found.get("reason", ""), present


def counted(scene: Scene) -> tuple[int, int]:
    """Teachers of the spec as it is, and those that are ready: a probe that was not answered in time makes one less."""
    status = pool_of(scene)["status"]
    return status["updatedReplicas"], status["readyReplicas"]


def wait_updated(scene: Scene) -> None:
    """Wait as a user does; a kubectl of these years minds the condition's `observedGeneration`."""
    scene.cluster.kubectl(
        *("-n", scene.namespace, "wait", "--for=condition=Updated", "tp/digits", f"--timeout={UPDATE_S:.0f}s"),
        timeout_s=UPDATE_S + 10,
        program=kubectl_program(new=True),
    )
    assert updated_of(scene) == ("True", "UpToDate", True), scene.cluster.describe(scene.namespace)


def wait_ready(scene: Scene, count: int) -> None:
    scene.wait(f"{count} teachers", lambda: pool_of(scene).get("status", {}).get("readyReplicas") == count)


@pytest.mark.slow
@pytest.mark.consul
def test_successors_come_first(
    scene: Scene,
    gpus: Callable[[str, int], None],
    operator: OperatorFactory,
    consul_store: str,
    pod_template: Callable[..., dict[str, Any]],
) -> None:
    """Without `edl-capacity`; then a spec whose image is not there, and back."""
    cluster, namespace = scene.cluster, scene.namespace
    gpus(cluster.nodes()[0], 3)
    template = pod_template(gpus=1)
    operator("--store", consul_store)
    scene.create_pool("digits", serve(FIRST), template, maxReplicas=2, scaling="external", replicas=2)
    wait_ready(scene, 2)
    before = pool_of(scene)["status"]["revision"]
    with contextlib.closing(TeacherHistory(cluster, namespace)) as history, pupil_of(consul_store) as pupil:
        assert set(pupil.wait(scene, 20)) == {FIRST}
        history.begin()
        edit(scene, serve=serve(SECOND))
        wait_updated(scene)
        after = pool_of(scene)["status"]["revision"]
        scene.wait("the end of the last teacher", lambda: history.shows_only(after, 2))
        check_one_at_a_time(history, before, after)
        assert {state.serving >= 2 for state in history.states} == {True}, history.states
        assert len(history.steady_s) == 2
        assert min(history.steady_s.values()) >= STEADY_S - 2 * ROUNDING_S
        pupil.wait(scene, 50)
        assert set(pupil.wait(scene, 20)) == {SECOND}
        assert set(pupil.labels) == {FIRST, SECOND}

        good = {name for name, pod in list_teachers(cluster, namespace).items() if is_wanted(pod)}
        history.begin()
        broken = {**template["spec"]["containers"][0], "image": "docker.io/edl/none:1", "imagePullPolicy": "Never"}
        edit(scene, template={"spec": {**template["spec"], "containers": [broken]}})
        scene.wait("the stop", lambda: updated_of(scene) == ("False", "UpdateStopped", True))
        assert "ErrImageNeverPull" in find_condition(pool_of(scene), "Updated")["message"]
        assert set(pupil.wait(scene, 50)) == {SECOND}, "those of the spec before go on"
        scene.wait("two that are ready, and the one that is not", lambda: counted(scene) == (1, 2))
        edit(scene, template=template)
        wait_updated(scene)
        assert {state.serving >= 2 for state in history.states} == {True}, history.states
        scene.wait(
            "the end of the one that failed",
            lambda: {name for name, pod in list_teachers(cluster, namespace).items() if is_wanted(pod)} == good,
        )
        pupil.wait(scene, 20)
    drained = {name: code for name, code in history.ended.items() if name not in good}
    assert set(drained.values()) <= {0}, f"teachers that were replaced have drained: {drained}"
    reasons = cluster.kubectl("-n", namespace, "get", "events", "-o", "jsonpath={.items[*].reason}").split()
    assert {"Updating", "Updated", "UpdateStopped"} <= set(reasons)


@pytest.mark.slow
@pytest.mark.consul
def test_no_room_and_a_long_drain(
    scene: Scene,
    gpus: Callable[[str, int], None],
    operator: OperatorFactory,
    consul_store: str,
    pod_template: Callable[..., dict[str, Any]],
) -> None:
    """With `edl-capacity`: a teacher goes first, finishes what it has begun, and no other goes meanwhile."""
    cluster, namespace = scene.cluster, scene.namespace
    gpus(cluster.nodes()[0], 2)
    operator("--store", consul_store, capacity=True)
    template = pod_template(gpus=1)
    scene.create_pool("digits", slow(FIRST), template, maxReplicas=2, scaling="external", replicas=2)
    wait_ready(scene, 2)
    before = pool_of(scene)["status"]["revision"]
    awaited = []
    with contextlib.closing(TeacherHistory(cluster, namespace)) as history, pupil_of(consul_store) as pupil:
        pupil.wait(scene, 2)
        history.begin()
        edit(scene, serve=slow(SECOND))
        deadline = time.monotonic() + UPDATE_S
        while updated_of(scene) != ("True", "UpToDate", True):
            assert time.monotonic() < deadline, cluster.describe(namespace)
            awaited.append(pool_of(scene)["status"].get("awaitedMember"))
            time.sleep(0.2)
        after = pool_of(scene)["status"]["revision"]
        scene.wait("the last change", lambda: history.shows_only(after, 2))
        check_one_at_a_time(history, before, after)
        assert {state.serving >= 1 for state in history.states} == {True}, history.states
        assert {"teacher-0", "teacher-1"} <= set(awaited)
        pupil.wait(scene, 6)
        assert set(pupil.wait(scene, 4)) == {SECOND}
        assert pupil.rows_resent == 0, "both always have requests, and each that left has finished its own"
    assert set(history.ended.values()) <= {0}, f"they have drained: {history.ended}"


def check_one_at_a_time(history: TeacherHistory, before: str, after: str) -> None:
    """Check that teachers of two revisions, and no more, were there, and that each step was of a single teacher."""
    old = [dict(state.live).get(before, 0) for state in history.states]
    assert sorted(set(old), reverse=True) == [2, 1, 0]
    assert old == sorted(old, reverse=True), f"none of the spec before is made again: {history.states}"
    for state in history.states:
        assert {revision for revision, _ in state.live} <= {before, after}
        assert state.most <= 3, f"one more than there are otherwise: {state}"
        assert state.leaving <= 1, f"one at a time: {state}"
        assert state.waiting <= 1
        starting = dict(state.live).get(after, 0) - dict(state.ready).get(after, 0)
        assert starting <= 1, f"one at a time: {state}"
