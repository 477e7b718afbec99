"""What a pool does, in a simulated cluster: it grows into idle room, and gives back."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.kube.objects import format_time
from edl.master.kube.capacity import ClusterCapacity
from edl.master.kube.members.pods import MemberPod, read_member_pods
from edl.master.kube.observation import OwnerObservation, StoreAnswer, find_condition
from edl.master.kube.pools import plan_pool
from edl.master.kube.pools.pool_status import REVISION_LABEL, TeacherUpdate, choose_surplus
from tests.fast.master.kube.capacity.objects import node
from tests.fast.master.kube.pools.simulated_cluster import GPU, TEMPLATE, SimulatedCluster

BOTH = pytest.mark.parametrize("capacity", [True, False], ids=["capacity", "probing"])


def cluster(gpus: list[int], capacity: bool = True, wanted: int | None = 4, **spec: Any) -> SimulatedCluster:
    made = SimulatedCluster(gpus, capacity, **spec)
    made.wanted = wanted
    return made


def condition(made: SimulatedCluster, kind: str) -> tuple[str, str]:
    found = find_condition(made.resource["status"], kind)
    return found["status"], found["reason"]


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
        assert condition(made, "Growing") == ("False", "NoIdleCapacity")


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
    assert condition(made, "Growing") == ("False", "AtMaximum")


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
    plan = plan_pool(made.pool, OwnerObservation(made.now_s, members, capacity=old, store=StoreAnswer(4)))
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
    assert condition(made, "Growing") == ("False", "TeacherFailing")
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


def test_crash_loop_is_told_once() -> None:
    """Between two ends its container runs for some seconds, and no teacher more is wanted meanwhile."""
    made = cluster([1], wanted=1)
    made.settle(2)
    (pod,) = made.pods.values()
    states: list[dict[str, Any]] = [
        {"terminated": {"exitCode": 1, "message": "NameError: predictt"}},
        {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
    ]
    for second in range(40):
        running = {"running": {"startedAt": format_time(made.now_s - 1)}}
        state = [*states, running][second // 5 % 3]
        restarts = second // 10
        status = {"name": "edl", "state": state, "restartCount": restarts, "lastState": states[0]}
        pod["status"] |= {"containerStatuses": [status], "conditions": [{"type": "Ready", "status": "False"}]}
        made.reconcile()
        assert condition(made, "Ready") == ("False", "TeacherFailing"), second
        assert "exit code 1: NameError: predictt" in made.resource["status"]["message"], second
        made.now_s += 1
    assert reasons(made)["TeacherFailing"] == 1
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": format_time(made.now_s)}
    pod["status"]["conditions"] = [ready]
    pod["status"]["containerStatuses"] = [{**status, "state": running, "restartCount": 9}]
    requeue_s = made.reconcile().requeue_s
    assert requeue_s is not None
    made.now_s += requeue_s
    made.reconcile()
    assert condition(made, "Ready") == ("True", "AllReady")


def test_node_that_is_back_is_used_again() -> None:
    made = cluster([1, 1])
    made.settle(20)
    for pod in list(made.teachers()):
        if pod["spec"]["nodeName"] == "n1":
            pod["status"] |= {"reason": "NodeLost"}
            pod["metadata"]["deletionTimestamp"] = format_time(made.now_s)
    gpus, made.nodes = made.nodes, {"n0": 1}
    made.settle(20)
    assert made.placed() == 1
    made.nodes = gpus
    made.settle(20)
    assert made.placed() == 2
    assert "excludedNodes" not in made.resource["status"]


def test_node_that_is_left_out_is_told() -> None:
    made = cluster([1], wanted=1)
    made.settle(5)
    (pod,) = made.pods.values()
    pod["status"] |= {"phase": "Failed", "reason": "Evicted"}
    made.settle(10)
    (left,) = made.resource["status"]["excludedNodes"]
    assert (left["node"], left["cause"]) == ("n0", "evicted")
    growing = find_condition(made.resource["status"], "Growing")
    assert growing["reason"] == "NoIdleCapacity"
    assert f"excluded: n0 until {left['until']} (evicted)" in growing["message"]


def test_pods_that_vanish_are_bounded() -> None:
    """Somebody deletes each teacher at once: its end counts for nothing, but not as many pods as seconds are made."""
    made = cluster([1], wanted=1)
    for _ in range(60):
        made.reconcile()
        made.reconcile()
        made.pods.clear()
        made.now_s += 1
    assert 2 <= made.created <= 12


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
    again = made.reconcile()
    assert again.requeue_s is not None, "no event tells of changes to the Deployment"
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
    plan = plan_pool(made.pool, OwnerObservation(made.now_s, capacity=capacity, store=StoreAnswer(1)))
    assert len(plan.create) == 1


def test_pool_leaves_a_service_that_is_taken() -> None:
    made = cluster([2], wanted=1, minReplicas=1)
    made.settle(5)
    (pod,), _ = read_member_pods(list(made.pods.values()), "pool-uid")
    seen = OwnerObservation(made.now_s, (pod,), service_holder="teacherpools/team-a/digits")
    plan = plan_pool(made.pool, seen)
    assert [deletion.name for deletion in plan.delete] == [pod.name]
    assert not plan.create
    accepted = find_condition(plan.status, "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "ServiceTaken")
    ready = find_condition(plan.status, "Ready")
    assert (ready["status"], ready["reason"], plan.status["phase"]) == ("False", "ServiceTaken", "Rejected")
    assert "team-a" in plan.status["message"]
    assert [event.reason for event in plan.events] == ["ServiceTaken"]


NEW = ["n.py:load"]


def pool(gpus: list[int], capacity: bool = True, wanted: int | None = 2, **spec: Any) -> SimulatedCluster:
    made = cluster(gpus, capacity, wanted, **spec)
    made.settle(60)
    return made


def count_ready(made: SimulatedCluster) -> int:
    ready = {"type": "Ready", "status": "True"}
    return sum(ready.items() <= item.items() for pod in made.teachers() for item in pod["status"]["conditions"])


def go_on(made: SimulatedCluster, rounds: int = 100) -> tuple[int, int]:
    """Let the pool go on; return the fewest teachers that were ready meanwhile, and the most that there were."""
    fewest, most = count_ready(made), len(made.teachers())
    for _ in range(rounds):
        made.settle(1)
        fewest, most = min(fewest, count_ready(made)), max(most, len(made.teachers()))
    return fewest, most


def break_new(made: SimulatedCluster) -> None:
    for pod in made.teachers():
        if pod["spec"]["containers"][0]["args"][-1] == NEW[0] and "nodeName" in pod["spec"]:
            waiting = {"reason": "ErrImagePull", "message": "no such image"}
            pod["status"] |= {
                "phase": "Pending",
                "conditions": [],
                "containerStatuses": [{"name": "edl", "state": {"waiting": waiting}}],
            }


@BOTH
def test_successor_is_ready_first(capacity: bool) -> None:
    made = pool([4], capacity)
    assert condition(made, "Updated") == ("True", "UpToDate")
    made.edit(serve=NEW)
    made.reconcile()
    assert condition(made, "Updated") == ("False", "Updating")
    assert condition(made, "Ready") == ("True", "Updating")
    assert go_on(made) == (2, 3)
    assert made.list_serves() == NEW
    assert condition(made, "Updated") == ("True", "UpToDate")
    assert condition(made, "Ready") == ("True", "AllReady")
    assert [event.reason for event in made.events if event.reason.startswith("Upd")] == ["Updating", "Updated"]


@pytest.mark.parametrize("slip", ["node", "gpus"])
def test_edit_that_fits_nowhere(slip: str) -> None:
    """A teacher that went would make no room: none goes."""
    made = pool([2])
    names = set(made.pods)
    limits = {"resources": {"limits": {GPU: "8"}}} if slip == "gpus" else {}
    container = {**TEMPLATE["spec"]["containers"][0], **limits}
    made.edit(template={"spec": {"containers": [container], "nodeSelector": {"a": "b"} if slip == "node" else {}}})
    made.settle(60)
    assert set(made.pods) == names
    updated = find_condition(made.resource["status"], "Updated")
    assert (updated["reason"], "even if" in updated["message"]) == ("Updating", True)


def test_crash_loop_stops_once() -> None:
    """Between two ends its container runs for some seconds."""
    made = pool([4])
    made.edit(serve=NEW)
    for second in range(60):
        made.reconcile()
        made.schedule()
        made.run_kubelets()
        break_new(made)
        for pod in made.teachers():
            for status in pod["status"].get("containerStatuses", []):
                status["restartCount"] = 1
                if second % 15 < 5:
                    status["state"] = {"running": {}}
        made.now_s += 1
    assert [event.reason for event in made.events if event.reason.startswith("Upd")] == ["Updating", "UpdateStopped"]
    assert count_ready(made) == 2


@settings(max_examples=50)
@given(
    teachers=st.lists(st.tuples(st.booleans(), st.sampled_from(["waits", "starts", "ready"])), max_size=12),
    target=st.integers(0, 8),
)
def test_surplus_leaves_what_serves(teachers: list[tuple[bool, str]], target: int) -> None:
    pods = [
        MemberPod(
            f"t{number}", "teacher", number, 0, str(number), ready=state == "ready", scheduled=state != "waits",
            labels={REVISION_LABEL: "new" if new else "old"},
        )
        for number, (new, state) in enumerate(teachers)
    ]  # fmt: skip
    update = TeacherUpdate("new", "", False, None)
    surplus = choose_surplus(update, pods, target)
    limit = target + 1 if target and update.list_outdated(pods) else target
    assert len({pod.name for pod in surplus}) == len(surplus) == max(0, len(pods) - limit)
    kept = [pod for pod in pods if pod not in surplus]
    if any(pod.ready for pod in surplus):
        assert not [pod for pod in kept if not pod.scheduled and pod.labels[REVISION_LABEL] == "new"]
        assert sum(pod.ready for pod in kept) >= min(target, sum(pod.ready for pod in pods)) or all(
            pod.labels[REVISION_LABEL] == "old" for pod in kept
        )


def test_ready_for_seconds_before_the_next() -> None:
    made = pool([4], wanted=1)
    made.edit(serve=NEW)
    made.settle(1)
    (new,) = [pod for pod in made.teachers() if pod["spec"]["containers"][0]["args"][-1] == NEW[0]]
    since = {"type": "Ready", "status": "True", "lastTransitionTime": format_time(made.now_s)}
    new["status"]["conditions"] = [since]
    plan = made.reconcile()
    assert (plan.delete, plan.requeue_s) == ((), pytest.approx(10, abs=1))
    made.now_s += 10
    assert [deletion.name for deletion in made.plan().delete] == [
        pod["metadata"]["name"] for pod in made.teachers() if pod is not new
    ]
    since["lastTransitionTime"] = format_time(made.now_s + 3600)
    made.now_s += 10
    assert made.plan().delete, "its node's clock is ahead"


def fail_to_mount(made: SimulatedCluster) -> None:
    for pod in made.teachers()[:1]:
        pod["status"] = {
            "phase": "Pending",
            "containerStatuses": [{"name": "edl", "state": {"waiting": {"reason": "ContainerCreating"}}}],
        }
        made.pod_events[pod["metadata"]["uid"]] = {"FailedMount": "driver not found"}


@pytest.mark.parametrize("nodes", [[2], [1, 1]], ids=["alone", "of two"])
def test_failing_node_is_waited_for(nodes: list[int]) -> None:
    """Where only the node of the failure has room, another teacher would fail as well."""
    made = cluster(nodes, minReplicas=2)
    made.reconcile()
    made.schedule()
    fail_to_mount(made)
    made.now_s += 130.0
    assert len(made.reconcile().create) == len(nodes) - 1
    if len(nodes) == 1:
        assert condition(made, "Growing") == ("False", "TeacherFailing")


@BOTH
@pytest.mark.parametrize("seed", range(2))
def test_pool_comes_to_rest(capacity: bool, seed: int) -> None:
    """Edits, demand, online pods, teachers that do not start and an operator with another store: in any order."""
    made = cluster([2, 1, 2], capacity, minReplicas=1)
    del made.resource["spec"]["store"]
    choice, trouble, nodes = random.Random(seed), "", made.nodes
    for step in range(400):
        if step % 20 == 0:
            made.edit(serve=choice.choice([NEW, ["m.py:load"]]))
            made.wanted = choice.choice([None, 0, 1, 2, 3, 4])
            made.default_store = choice.choice(["edl://s", "edl://s", "edl://t"])
            trouble = choice.choice(["", "", "image", "mount", "nodes"])
            made.pod_events.clear()
            for name in [name for name in made.pods if name.startswith("online") and choice.random() < 0.5]:
                made.delete(name)
            made.add_online(f"online-{step}")
        made.nodes = dict.fromkeys(made.nodes, 0) if trouble == "nodes" else dict(nodes)
        made.settle(1)
        if trouble == "image":
            break_new(made)
        elif trouble == "mount":
            fail_to_mount(made)
    made.pod_events.clear()
    for name in [name for name in made.pods if name.startswith("online")]:
        made.delete(name)
    made.nodes, made.default_store, made.wanted = nodes, "edl://s", 3
    made.edit(serve=NEW)
    made.settle(400)
    assert (made.list_serves(), made.placed(), count_ready(made)) == (NEW, 3, 3)
    assert condition(made, "Updated") == ("True", "UpToDate")
