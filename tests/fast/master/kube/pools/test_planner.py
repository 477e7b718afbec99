"""What a pool does, in a simulated cluster: it grows into idle room, and gives back."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest

from edl.master.kube.capacity import ClusterCapacity
from edl.master.kube.conditions import find_condition
from edl.master.kube.members import read_member_pods
from edl.master.kube.observation import OwnerObservation
from edl.master.kube.pools import plan_pool
from tests.fast.master.kube.capacity.objects import node
from tests.fast.master.kube.pools.simulated_cluster import TEMPLATE, SimulatedCluster

BOTH = pytest.mark.parametrize("capacity", [True, False], ids=["capacity", "probing"])


def cluster(gpus: list[int], capacity: bool = True, wanted: int | None = 4, **spec: Any) -> SimulatedCluster:
    made = SimulatedCluster(gpus, capacity, **spec)
    made.wanted = wanted
    return made


def growing(made: SimulatedCluster) -> tuple[str, str]:
    condition = find_condition(made.resource["status"], "Growing")
    return condition["status"], condition["reason"]


def reasons(made: SimulatedCluster) -> Counter[str]:
    return Counter(event.reason for event in made.events)


@BOTH
def test_grows_into_idle_room(capacity: bool) -> None:
    made = cluster([2, 1], capacity)
    assert len(made.reconcile().create) == 1
    again = made.reconcile()
    assert not again.create, "one waits for its node"
    assert again.apply == (), "a disruption budget would make the scheduler hesitate to take a teacher's place"
    made.settle(20)
    assert made.placed() == 3
    status = made.resource["status"]
    assert (status["replicas"], status["readyReplicas"], status["wantedReplicas"]) == (3 + made.pending(), 3, 4)
    assert status["borrowed"] == 3
    if capacity:
        assert made.created == 3, "no pod is made for which there is no room"
        assert growing(made) == ("False", "NoIdleCapacity")


@BOTH
def test_gives_back_and_borrows_again(capacity: bool) -> None:
    made = cluster([2, 2], capacity)
    made.settle(20)
    assert made.placed() == 4
    made.add_online("online-0")
    made.add_online("online-1")
    made.settle(60)
    assert made.placed() == 2
    assert all("nodeName" in made.pods[name]["spec"] for name in ("online-0", "online-1"))
    assert reasons(made)["Preempted"] == 2
    assert reasons(made)["GaveBack"] >= 2
    for name in ("online-0", "online-1"):
        made.delete(name)
    made.settle(400)
    assert made.placed() == 4
    assert growing(made) == ("False", "AtMaximum")


@pytest.mark.parametrize(
    ("trouble", "reason"), [("store_unreachable", "StoreUnreachable"), ("store_refused", "StoreNotAllowed")]
)
def test_trouble_with_the_store_is_said(trouble: str, reason: str) -> None:
    made = cluster([4], wanted=3)
    made.settle(10)
    made.wanted = None
    setattr(made, trouble, "consul://x: it is so")
    made.settle(10)
    assert made.placed() == 3, "three were wanted last"
    accepted = find_condition(made.resource["status"], "Accepted")
    assert (accepted["status"], accepted["reason"], accepted["message"]) == ("True", reason, "consul://x: it is so")


def test_old_capacity_makes_nothing() -> None:
    """A watch that has not seen the last teacher yet would find its room idle."""
    made = cluster([2])
    made.settle(3)
    hidden = {name: pod for name, pod in made.pods.items() if made.placed()}
    plan_with_all = made.plan()
    members, _ = read_member_pods(hidden.values(), "pool-uid")
    old = ClusterCapacity.of([node("n0", 2)], [])
    plan = plan_pool(made.pool, OwnerObservation(made.now_s, members, old, 4))
    assert not plan.create
    assert plan.requeue_s == 1.0
    assert plan_with_all.requeue_s != 1.0


@BOTH
def test_missing_secret_is_told(capacity: bool) -> None:
    """It stands in events alone: the pod stays ContainerCreating, and no change of it has the pool looked at."""
    made = cluster([4], capacity)
    made.reconcile()
    made.schedule()
    (pod,) = made.pods.values()
    state = {"waiting": {"reason": "ContainerCreating"}}
    pod["status"] = {"phase": "Pending", "containerStatuses": [{"name": "edl", "state": state}]}
    requeue_s = made.plan().requeue_s
    assert requeue_s is not None, "nobody would look at the events"
    assert requeue_s <= 60
    words = 'MountVolume.SetUp failed for volume "keys": secret "keys" not found'
    made.pod_events[pod["metadata"]["uid"]] = {"FailedMount": words}
    plan = made.reconcile()
    assert not plan.create, "another would not start either"
    assert plan.requeue_s is not None, "nobody would see that the events go on"
    assert growing(made) == ("False", "TeacherFailing")
    ready = find_condition(made.resource["status"], "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "TeacherFailing")
    assert words in ready["message"]
    assert reasons(made)["TeacherFailing"] == 1
    made.reconcile()
    assert reasons(made)["TeacherFailing"] == 1
    made.pod_events.clear()
    ready_state = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    pod["status"] = {**ready_state, "containerStatuses": [{"name": "edl", "state": {"running": {}}}]}
    assert made.reconcile().create, "it grows on when the secret is there"


def test_adopted_target_ends_own_teachers() -> None:
    """They would hold their GPUs, and serve, beside the pods of the object that the pool scales from now on."""
    made = cluster([2], minReplicas=1, maxReplicas=2)
    made.settle(10)
    names = [pod["metadata"]["name"] for pod in made.teachers()]
    assert len(names) == 2
    spec = made.resource["spec"]
    own = {"serve": spec.pop("serve"), "template": spec.pop("template")}
    spec["scaleTargetRef"] = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "triton"}
    plan = made.reconcile()
    assert sorted(deletion.name for deletion in plan.delete) == sorted(names)
    made.reconcile()
    assert made.resource["status"]["leaving"] == sorted(names)
    made.settle(10)
    assert not made.pods
    assert not made.reconcile().delete
    del spec["scaleTargetRef"]
    spec.update(own)
    made.settle(10)
    assert len(made.teachers()) == 2
    assert not set(names) & made.pods.keys(), "their names are not given again"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("resources", "big"),
        ("tolerations", ["x"]),
        ("initContainers", ["x"]),
        ("affinity", {"nodeAffinity": [7]}),
    ],
)
def test_unreadable_template_makes_a_pod(place: str, value: object) -> None:
    """The API server says what is wrong with the pod, in its own words, as soon as there is one to refuse."""
    template = copy.deepcopy(TEMPLATE)
    (template["spec"]["containers"][0] if place == "resources" else template["spec"])[place] = value  # type: ignore[index]
    made = cluster([2], template=template)
    assert made.pool.min_replicas == 0
    capacity = ClusterCapacity.of([node("n0", 2, taints=[{"key": "k", "effect": "NoSchedule"}])], [])
    plan = plan_pool(made.pool, OwnerObservation(made.now_s, (), capacity, 1))
    assert len(plan.create) == 1


def test_pool_leaves_a_service_that_is_taken() -> None:
    made = cluster([2], wanted=1, minReplicas=1)
    made.settle(5)
    (pod,), _ = read_member_pods(list(made.pods.values()), "pool-uid")
    seen = OwnerObservation(made.now_s, (pod,), None, 2, service_holder="teacherpools/team-a/digits")
    plan = plan_pool(made.pool, seen)
    assert [deletion.name for deletion in plan.delete] == [pod.name]
    assert not plan.create
    accepted = find_condition(plan.status, "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "ServiceTaken")
    assert "team-a" in plan.status["message"]
    assert [event.reason for event in plan.events] == ["ServiceTaken"]
