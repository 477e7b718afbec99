"""A pool whose spec is edited: its teachers are replaced, one at a time, and students have theirs meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.kube.objects import format_time
from edl.master.kube.conditions import find_condition
from edl.master.kube.members import MemberPod
from edl.master.kube.pools.revision import REVISION_LABEL, hash_place, hash_revision
from edl.master.kube.pools.updating import TeacherUpdate, choose_surplus
from tests.fast.master.kube.pools.simulated_cluster import GPU, TEMPLATE, SimulatedCluster

BOTH = pytest.mark.parametrize("capacity", [True, False], ids=["capacity", "probing"])
NEW = ["n.py:load"]


def pool(gpus: list[int], capacity: bool = True, wanted: int | None = 2, **spec: Any) -> SimulatedCluster:
    """Return a cluster with a pool that is at rest."""
    made = SimulatedCluster(gpus, capacity, **spec)
    made.wanted = wanted
    made.settle(60)
    return made


def condition(made: SimulatedCluster, kind: str) -> tuple[str, str]:
    found = find_condition(made.resource["status"], kind)
    return found["status"], found["reason"]


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


def go_on_without_nodes(made: SimulatedCluster, rounds: int) -> int:
    """Let the pool go on, with a scheduler that finds no node for any new pod; return the fewest that were ready."""
    fewest = count_ready(made)
    for _ in range(rounds):
        made.reconcile()
        held = {name: pod for name, pod in made.pods.items() if "nodeName" not in pod["spec"]}
        for name in held:
            del made.pods[name]
        made.schedule()
        made.pods |= held
        made.run_kubelets()
        made.now_s += 1
        fewest = min(fewest, count_ready(made))
    return fewest


def break_new(made: SimulatedCluster) -> None:
    """Have teachers of the edited spec not start."""
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


@BOTH
def test_without_room_the_old_goes_first(capacity: bool) -> None:
    made = pool([2], capacity)
    made.edit(serve=NEW)
    fewest, most = go_on(made, 250)
    assert (fewest, most) == (1, 2 if capacity else 3)
    assert made.list_serves() == NEW
    assert "awaitedMember" not in made.resource["status"]


@BOTH
@pytest.mark.parametrize("gpus", [2, 4])
def test_stops_at_the_first_that_fails(capacity: bool, gpus: int) -> None:
    made = pool([gpus], capacity, wanted=2)
    made.edit(serve=NEW)
    least = 2
    for _ in range(150):
        made.reconcile()
        made.schedule()
        made.run_kubelets()
        break_new(made)
        made.now_s += 1
        least = min(least, count_ready(made))
    assert least == (1 if gpus == 2 else 2)
    assert condition(made, "Updated") == ("False", "UpdateStopped")
    assert "no such image" in find_condition(made.resource["status"], "Updated")["message"]
    stopped = [event for event in made.events if event.reason == "UpdateStopped"]
    assert (stopped[0].type, len(stopped)) == ("Warning", 1)
    made.edit(serve=["m.py:load"])  # back to what was
    for pod in made.teachers():
        pod["status"].pop("containerStatuses", None) if pod["status"]["phase"] == "Running" else None
    made.settle(100)
    assert made.list_serves() == ["m.py:load"]
    assert (made.placed(), condition(made, "Ready")) == (2, ("True", "AllReady"))


def test_a_place_that_another_took_is_one() -> None:
    """Its successor found no node: the others of the spec before go on."""
    made = pool([3], wanted=3)
    made.edit(serve=NEW)
    made.reconcile()
    (leaving,) = [pod for pod in made.pods.values() if "deletionTimestamp" in pod["metadata"]]
    del made.pods[leaving["metadata"]["name"]]
    made.add_online("other")
    made.pods["other"]["spec"]["nodeName"] = "n0"
    assert go_on(made, 400) == (2, 2)
    assert made.list_serves() == ["m.py:load"]
    updated = find_condition(made.resource["status"], "Updated")
    assert (updated["reason"], "no node has room" in updated["message"]) == ("Updating", True)
    made.delete("other")
    made.settle(100)
    assert (made.list_serves(), made.placed()) == (NEW, 3)


@BOTH
def test_successor_that_gets_no_node(capacity: bool) -> None:
    """The scheduler finds none, whatever seems idle, as with a volume that is not bound: one teacher went, no more."""
    made = pool([4], capacity)
    made.edit(serve=NEW)
    fewest = go_on_without_nodes(made, 150)
    assert fewest == 1
    assert condition(made, "Updated") == ("False", "Updating")


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
    update = TeacherUpdate("new", None, "", False, None)
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


def pool_of_operators(capacity: bool, gpus: int) -> SimulatedCluster:
    """Return a pool at rest that names no store: it has that of its operator."""
    made = SimulatedCluster([gpus], capacity)
    del made.resource["spec"]["store"]
    made.default_store, made.wanted = "sqlite:///s", 2
    made.settle(60)
    return made


@BOTH
def test_operators_with_two_stores(capacity: bool) -> None:
    """Each has another revision of the same spec: neither replaces what the other makes, and the status is at rest."""
    made = pool_of_operators(capacity, 4)
    names, writes = set(made.pods), made.status_writes
    for second in range(200):
        for store in ("sqlite:///s", "sqlite:///t"):
            made.default_store = store
            made.reconcile()
            made.schedule()
            made.run_kubelets()
        made.now_s += 1
        if second == 100:
            made.delete(min(names))
    assert (len(set(made.pods) & names), len(made.teachers())) == (1, 2), "what ends is replaced all the same"
    assert made.status_writes - writes < 40
    made.settle(200)
    assert made.placed() == 2
    assert condition(made, "Updated") == ("True", "UpToDate"), "the other has gone"


@BOTH
def test_operator_with_another_store(capacity: bool) -> None:
    """As after an upgrade: its teachers are replaced, after a minute in which the one before may have run yet."""
    made = pool_of_operators(capacity, 4)
    names = set(made.pods)
    made.default_store = "sqlite:///t"
    made.settle(55)
    assert set(made.pods) == names
    assert condition(made, "Updated") == ("False", "Updating")
    assert go_on(made) == (2, 3)
    assert not set(made.pods) & names
    assert condition(made, "Updated") == ("True", "UpToDate")
    assert "revisionSince" not in made.resource["status"]


@pytest.mark.parametrize(
    ("edit", "counts"),
    [
        ({"service": "other"}, True),
        ({"store": "sqlite:///t"}, True),
        ({"gracePeriodSeconds": 20}, True),
        ({"priorityClassName": "low"}, True),
        ({"template": {"spec": {"containers": [{**TEMPLATE["spec"]["containers"][0], "image": "other"}]}}}, True),
        ({"maxReplicas": 3, "minReplicas": 1, "probeSeconds": 5, "scaling": "external", "replicas": 2}, False),
        ({"store": "sqlite:///s?"}, False),  # another spelling
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_pods_are_made_from_counts(edit: dict[str, Any], counts: bool) -> None:
    made = SimulatedCluster([4], True)
    before = hash_revision(made.pool)
    made.edit(**edit)
    assert (hash_revision(made.pool) != before) == counts


def test_pods_of_an_older_operator() -> None:
    """They have no revision: up to date when they are first seen, outdated by the next edit."""
    made = pool([4])
    names = set(made.pods)
    for pod in made.pods.values():
        del pod["metadata"]["labels"][REVISION_LABEL]
    for field in ("revision", "updatedReplicas"):
        del made.resource["status"][field]
    made.settle(20)
    assert set(made.pods) == names
    assert condition(made, "Updated") == ("True", "UpToDate")
    made.edit(serve=NEW)
    made.settle(100)
    assert made.list_serves() == NEW
    assert "unlabelledRevision" not in made.resource["status"]


def test_former_service_is_kept() -> None:
    made = pool([2])
    (former,) = made.resource["status"]["servedPlaces"]
    made.edit(service="letters")
    for _ in range(100):
        made.reconcile()
        serving = [
            pod for pod in made.pods.values() if pod["metadata"]["labels"][REVISION_LABEL] != hash_revision(made.pool)
        ]
        if serving:
            assert former in made.resource["status"]["servedPlaces"]
        made.schedule()
        made.run_kubelets()
        made.now_s += 1
    assert made.resource["status"]["servedPlaces"] == [hash_place(made.pool)]
    assert former != hash_place(made.pool)


def test_quota_has_no_room_for_one_more() -> None:
    """The API server refuses the successor: an outdated teacher goes first."""
    made = pool([4])
    made.edit(serve=NEW)
    refused = {"type": "Accepted", "status": "False", "reason": "QuotaExceeded", "observedGeneration": 2}
    made.resource["status"]["conditions"] = [refused]
    plan = made.reconcile()
    assert (len(plan.delete), plan.create) == (1, ())
    made.resource["status"]["conditions"] = [refused]
    assert not made.reconcile().delete, "one at a time"
