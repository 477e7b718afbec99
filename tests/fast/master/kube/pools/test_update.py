"""A pool whose spec is edited: its teachers are replaced, one at a time, and students have theirs meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.kube.objects import format_time
from edl.master.kube.conditions import find_condition
from edl.master.kube.members import MemberPod
from edl.master.kube.pools.revision import REVISION_LABEL
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
