"""What a pool does, in a simulated cluster: it grows into idle room, and gives back."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any

import pytest

from edl.master.kube.capacity import ClusterCapacity
from edl.master.kube.conditions import find_condition
from edl.master.kube.members import read_member_pods
from edl.master.kube.observation import OwnerObservation
from edl.master.kube.pools import plan_pool
from edl_serving.command_line.parser import CommandParser
from edl_serving.command_line.serve_config import GROUPS, ServeConfig
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


def test_probes_back_off() -> None:
    """Without capacity a full cluster is probed after 20, 40, … up to 300 s, for 20 s each."""
    made = cluster([1], capacity=False)
    made.add_online("online")
    made.schedule()
    began: list[float] = []
    for _ in range(1100):
        before = made.created
        made.reconcile()
        if made.created > before:
            began.append(made.now_s)
        made.schedule()
        made.run_kubelets()
        made.now_s += 1
    pauses = [later - earlier for earlier, later in itertools.pairwise(began)]
    assert pauses == [40, 60, 100, 180, 320, 320]
    assert made.pending() in (0, 1)


@BOTH
def test_shrinks_newest_first(capacity: bool) -> None:
    made = cluster([4], capacity)
    made.settle(10)
    made.wanted = 2
    names = sorted(made.pods, key=lambda name: made.pods[name]["metadata"]["creationTimestamp"])
    plan = made.reconcile()
    assert {deletion.name for deletion in plan.delete} == set(names[2:])
    assert {deletion.grace_period_s for deletion in plan.delete} == {None}, "their pods' own, for which they drain"
    made.settle(5)
    assert sorted(made.pods) == sorted(names[:2])
    assert "Preempted" not in reasons(made), "it was the pool's own will"
    made.wanted = 4
    made.settle(10)
    assert made.placed() == 4
    assert len({*names, *made.pods}) == 6, "no name is given twice"


def test_store_away_keeps_what_was_wanted() -> None:
    made = cluster([4], wanted=3)
    made.settle(10)
    made.wanted, made.store_stale = None, "the store is away"
    made.add_online("a")
    made.add_online("b")
    made.settle(10)
    assert made.placed() == 2
    made.delete("a")
    made.delete("b")
    made.settle(10)
    assert made.placed() == 3, "three were wanted last"
    made.store_stale = ""
    made.settle(10)
    assert (made.placed(), made.resource["status"]["wantedReplicas"]) == (3, 3), "nothing is known: nothing moves"


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


def test_minimum_waits_as_long_as_it_takes() -> None:
    made = cluster([0], wanted=4, minReplicas=1)
    made.settle(100)
    assert (made.pending(), made.created) == (1, 1)
    assert growing(made) == ("True", "WaitsForNode")
    assert made.plan().requeue_s is None, "an event tells"
    unknown = cluster([4], wanted=None, minReplicas=2)
    unknown.settle(10)
    assert unknown.placed() == 2, "where nothing is known, the minimum"


@BOTH
def test_external_scaling(capacity: bool) -> None:
    made = cluster([4], capacity, wanted=4, scaling="external", replicas=2)
    made.settle(10)
    assert made.placed() == 2
    made.resource["spec"]["replicas"] = 9
    made.settle(10)
    assert made.placed() == 4, "maxReplicas"
    assert reasons(made)["ScaleIgnored"] == 0
    ignoring = cluster([4], capacity, wanted=1, replicas=3)
    ignoring.settle(10)
    assert (ignoring.placed(), reasons(ignoring)["ScaleIgnored"]) == (1, 1)


@BOTH
def test_suspend_and_resume(capacity: bool) -> None:
    made = cluster([4], capacity)
    made.settle(10)
    made.resource["spec"]["suspend"] = True
    made.settle(10)
    assert not made.pods
    status = made.resource["status"]
    assert status["phase"] == "Suspended"
    assert find_condition(status, "Suspended")["status"] == "True"
    made.resource["spec"]["suspend"] = False
    made.settle(10)
    assert made.placed() == 4


@BOTH
def test_nothing_happens_at_rest(capacity: bool) -> None:
    made = cluster([4], capacity)
    made.settle(20)
    writes, events = made.status_writes, len(made.events)
    for _ in range(50):
        plan = made.reconcile()
        assert not plan.create
        assert not plan.delete
        assert plan.requeue_s is None, "only events wake it"
        made.now_s += 10
    assert made.status_writes == writes
    assert len(made.events) == events


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


@pytest.mark.parametrize(("reason", "elsewhere"), [("CrashLoopBackOff", False), ("CreateContainerConfigError", True)])
def test_failing_teacher_stops_growth(reason: str, elsewhere: bool) -> None:
    """For ever where the container crashes; what cannot be launched may be so because of its node."""
    made = cluster([1, 3])
    made.reconcile()
    made.schedule()
    (pod,) = made.pods.values()
    state = {"waiting": {"reason": reason, "message": 'secret "keys" not found'}}
    pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "edl", "state": state}]}
    assert not made.reconcile().create
    assert growing(made) == ("False", "TeacherFailing")
    assert reason in find_condition(made.resource["status"], "Ready")["message"]
    assert reasons(made)["TeacherFailing"] == 1
    made.now_s += 1000.0
    assert bool(made.plan().create) == elsewhere


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


def fail_to_mount(made: SimulatedCluster, pod: dict[str, Any]) -> None:
    state = {"waiting": {"reason": "ContainerCreating"}}
    pod["status"] = {"phase": "Pending", "containerStatuses": [{"name": "edl", "state": state}]}
    words = "driver name csi.example not found in the list of registered CSI drivers"
    made.pod_events[pod["metadata"]["uid"]] = {"FailedMount": words}


@BOTH
@pytest.mark.parametrize("least", [0, 2])
def test_failure_of_a_node_stops_no_other(least: int, capacity: bool) -> None:
    """A teacher that cannot start on its node left GPUs of other nodes idle; a second one that fails is no node's."""
    made = cluster([1, 3], capacity, minReplicas=least)
    made.reconcile()
    made.schedule()
    (first,) = made.pods.values()
    fail_to_mount(made, first)
    assert not made.reconcile().create
    assert growing(made) == ("False", "TeacherFailing"), "what comes late, such as a secret, is waited for"
    made.now_s += 130.0
    (second,) = made.reconcile().create
    assert ("nodeAffinity" in second["spec"].get("affinity", {})) is capacity
    assert find_condition(made.resource["status"], "Ready")["reason"] == "TeacherFailing"
    made.schedule()
    fail_to_mount(made, made.pods[second["metadata"]["name"]])
    for _ in range(3):
        assert not made.reconcile().create
        assert growing(made) == ("False", "TeacherFailing")
        made.now_s += 130.0
    assert first["metadata"]["name"] in made.pods, "it starts when its node can"


def test_evicted_pod_is_replaced_and_removed() -> None:
    made = cluster([1, 1], wanted=1)
    made.settle(5)
    (name,) = made.pods
    made.pods[name]["status"] = {"phase": "Failed", "reason": "Evicted", "conditions": []}
    made.settle(5)
    assert name not in made.pods
    (pod,) = made.teachers()
    assert pod["spec"]["nodeName"]
    assert "affinity" in pod["spec"], "it keeps away from the node for a while"
    assert reasons(made)["TeacherEnded"] == 1


def test_two_that_wait_become_one() -> None:
    """Two operators at once: the second pod's name is another index's."""
    made = cluster([0], capacity=False)
    made.reconcile()
    (first,) = made.pods.values()
    second = {**first, "metadata": {**first["metadata"], "name": "digits-teacher-7-0"}}
    second["metadata"]["labels"] = {**first["metadata"]["labels"], "edl.io/index": "7"}
    made.add(second, -100)
    made.reconcile()
    assert made.pending() == 1


def test_pod_of_the_template() -> None:
    made = cluster([1], queue="team")
    (pod,) = made.plan().create
    spec, (main,) = pod["spec"], pod["spec"]["containers"]
    assert spec["priorityClassName"] == "edl-teacher"
    assert spec["restartPolicy"] == "Always"
    assert spec["terminationGracePeriodSeconds"] == 10
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    args = main["args"]
    assert args[:5] == ["serve", "--service", "digits", "--discovery", "sqlite:///s"]
    assert args[-1] == "m.py:load"
    assert args[args.index("--drain-timeout") + 1] == "8s"
    assert args[args.index("--advertise") + 1] == "$(EDL_POD_IP)"
    for kind, path in (("startup", "/livez"), ("liveness", "/livez"), ("readiness", "/readyz")):
        assert main[f"{kind}Probe"]["httpGet"] == {"path": path, "port": 8002}
    assert {port["name"]: port["containerPort"] for port in main["ports"]} == {"grpc": 8001, "metrics": 8002}


def test_templates_own_fields_stay() -> None:
    """PodMonitor `edl-teachers` finds the metrics' port by name, also beside the template's own ports."""
    ports = [{"name": "http", "containerPort": 9000}]
    own = {"readinessProbe": {"exec": {"command": ["true"]}}, "ports": ports}
    template = {"spec": {"containers": [{**TEMPLATE["spec"]["containers"][0], **own}]}}
    (main,) = cluster([1], template=template).plan().create[0]["spec"]["containers"]
    assert main["readinessProbe"] == own["readinessProbe"]
    assert "livenessProbe" in main
    assert {port["name"]: port["containerPort"] for port in main["ports"]} == {"http": 9000, "metrics": 8002}
    assert len(ports) == 1, "the template is not changed"


def test_arguments_are_read_by_edl_serve() -> None:
    serve = ["--callable", "m:f", "--input", "x:float32[4]", "--drain-timeout", "3s"]
    made = cluster([1], serve=serve, gracePeriodSeconds=1)
    (main,) = made.plan().create[0]["spec"]["containers"]
    args = [arg.replace("$(EDL_POD_IP)", "10.0.0.9") for arg in main["args"]]
    _, given = CommandParser("edl serve", "", "").parse_settings(GROUPS, args[1:])
    config = ServeConfig.of(given)
    assert (config.registration.service, config.registration.url, config.address) == (
        "digits",
        "sqlite:///s",
        "10.0.0.9",
    )
    assert (config.server.host, config.server.metrics_host, config.server.metrics_port) == ("0.0.0.0", "0.0.0.0", 8002)
    assert config.server.drain_timeout_s == 3.0, "what the user says comes last"


def test_emptied_pod_is_deleted_at_once() -> None:
    """Its kubelet would do so, up to 10 s later, while the online pod waits."""
    made = cluster([2], wanted=2)
    made.settle(5)
    name, other = sorted(made.pods)
    made.delete(name)
    made.reconcile()
    pod = made.pods[name]
    asked = pod["metadata"]["deletionTimestamp"]
    assert not made.reconcile().delete, "it still runs"
    pod["status"]["containerStatuses"] = [
        {"name": "edl", "state": {"terminated": {"exitCode": 0, "finishedAt": asked}}}
    ]
    (deletion,) = made.plan().delete
    assert (deletion.name, deletion.uid, deletion.grace_period_s) == (name, pod["metadata"]["uid"], 0)
    pod["status"] |= {
        "conditions": [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
    }
    assert not made.plan().delete, "its node is silent: nobody knows what runs there"
    assert other in made.pods


def test_no_probe_while_a_place_is_given() -> None:
    """A probe within the grace period could take the place before the pod for which it was freed."""
    made = cluster([1], capacity=False, probeSeconds=2)
    made.settle(10)
    made.add_online("online")
    made.schedule()
    created = made.created
    asked_s = made.now_s
    while made.now_s < asked_s + 9:
        made.reconcile()
        made.now_s += 1
    assert made.created == created


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
