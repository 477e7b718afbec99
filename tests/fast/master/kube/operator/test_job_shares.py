"""Shares of jobs: GPUs go to all that can use them, and not to whom others arbitrate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from edl.kube.objects import Object, format_time
from edl.master.kube.capacity import ClusterCapacity
from edl.master.kube.jobs import find_waiting_since_s
from edl.master.kube.members.pods import MemberPod
from edl.master.kube.operator.stores import StoreAllowlist
from edl.master.kube.operator.surroundings import (
    LiveSurroundings,
    WaitingOwners,
    compute_shares,
    read_sharing_job,
)
from edl.master.kube.resources import ElasticJob, TeacherPool
from tests.fast.master.kube.capacity import objects
from tests.fast.master.kube.operator.owners import make_job, make_pool
from tests.waiting import wait_until


def share_job(name: str, least: int = 1, most: int = 8, gpus: int = 1, **spec: Any) -> ElasticJob:
    return make_job(name, gpus=gpus, minReplicas=least, maxReplicas=most, **spec)


def make_pod(name: str, node: str, owner: str = "", gpus: int = 1) -> Object:
    labels = {"edl.io/owner-uid": f"u-{owner}", "edl.io/role": "worker", "edl.io/job": owner} if owner else {}
    return objects.pod(gpus, name=name, uid=name, labels=labels, **({"node": node} if node else {}))


def share(nodes: list[Object], pods: list[Object], *jobs: ElasticJob) -> dict[str, int]:
    sharing = [found for job in jobs if (found := read_sharing_job(job)) is not None]
    found = compute_shares(ClusterCapacity.of(nodes, pods), sharing)
    return {key.rpartition("/")[2]: share.workers for key, share in found.items()}


FOUR = [objects.node("n", 4)]
MADE_S = share_job("a").created_s


def test_jobs_share_what_is_idle() -> None:
    assert share(FOUR, [], share_job("a")) == {"a": 4}
    assert share(FOUR, [make_pod("online", "n", gpus=3)], share_job("a")) == {"a": 1}, "others' are not shared"
    young = replace(share_job("a"), created_s=4e9)
    pods = [make_pod("a-0", "n", "a"), make_pod("a-1", "", "a")]
    assert share(FOUR, pods, young) == {"a": 4}, "its second pod, made a moment ago, has no node yet"
    pods = [make_pod(f"a-{number}", "n", "a") for number in range(4)]
    found = share(FOUR, pods, share_job("a"), share_job("b", least=2))
    assert sum(found.values()) == 4
    assert found["b"] >= 2
    assert found["a"] >= 1


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}, 4),
        ({"spec": {"unschedulable": True}}, 4),
        ({"status": {"allocatable": {"nvidia.com/gpu": "0"}}}, 4),
        ({"status": {"allocatable": {}}}, 4),
        ({"metadata": {"name": "another"}}, 8),
        ({"spec": {"unschedulable": True}, "asked": "a-0"}, 3),
    ],
    ids=["no heartbeat", "cordoned", "kubelet restarts", "no device plugin", "another in its place", "one is evicted"],
)
def test_workers_keep_what_they_run_on(change: dict[str, Any], count: int) -> None:
    """A node that stops answering for a moment takes no pods, but ends none: they run on, and so must the job."""
    pods = [make_pod(f"a-{number}", "n", "a") for number in range(4)]
    for pod in pods:
        if pod["metadata"]["name"] == change.get("asked"):
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    node = objects.node("n", 4)
    for name in ("metadata", "spec", "status"):
        node[name] |= change.get(name, {})
    assert share([node], pods, share_job("a")) == {"a": count}


@pytest.mark.parametrize(
    "job",
    [
        share_job("a", queue="team"),
        share_job("a", scaling="external"),
        share_job("a", suspend=True),
        share_job("a", gpus=0),
        share_job("a", pod={"schedulerName": "volcano"}),
        share_job("a", pod={"schedulerName": "another"}),
        share_job("a", pod={"initContainers": 7}),
    ],
    ids=["kueue", "external", "suspended", "no GPU", "volcano", "another", "unreadable"],
)
def test_job_that_others_arbitrate(job: ElasticJob) -> None:
    assert read_sharing_job(job) is None


def wait_since(at_s: float, *, least: int = 2, words: str = "3 Insufficient nvidia.com/gpu", **status: Any) -> Any:
    """Return since when a job waits whose second worker has no node."""
    scheduled = {"type": "Scheduled", "status": "False", "lastTransitionTime": format_time(at_s)}
    written = {"conditions": [scheduled], "startTime": format_time(MADE_S + 10), **status}
    pods = [MemberPod("w0", "worker", 0, 0, "u0", scheduled=True), MemberPod("w1", "worker", 1, 0, "u1")]
    pods[1] = replace(pods[1], unschedulable=words)
    return find_waiting_since_s(replace(share_job("big", least=least), status=written), pods)


def test_time_waited_is_bounded() -> None:
    """It is read from the status, and no edit of job or status makes it longer than what the API server tells."""
    assert wait_since(MADE_S + 60) == MADE_S + 60
    assert wait_since(0.0) == MADE_S + 10, "nobody has waited before the job was made and started"
    assert wait_since(0.0, startTime=format_time(0.0)) == MADE_S
    assert wait_since(MADE_S, startTime=format_time(MADE_S + 7200)) == MADE_S + 7200, "suspended, and resumed"
    assert wait_since(MADE_S, startTime=None) is None
    assert wait_since(MADE_S, conditions=[]) is None
    assert wait_since(MADE_S, least=1) is None, "it has its minimum"
    assert wait_since(MADE_S, least=3) is None, "a quota, or a pause after an end, keeps the third pod away"
    assert wait_since(MADE_S, words="pod has unbound immediate PersistentVolumeClaims") is None


def test_job_that_waited_too_long_is_first() -> None:
    """Small jobs would take each GPU as it comes free, and one that needs a whole node would wait for ever."""
    pods = [make_pod("a-0", "n", "a"), make_pod("big-0", "", "big", gpus=4), make_pod("b-0", "", "b")]
    small = [share_job("a", most=1), share_job("b", most=1), share_job("c", most=1, priorityClassName="urgent")]

    def hold(waited_s: float, node: Object = FOUR[0], pod: Object | None = None) -> list[str]:
        sharing = [found for job in small if (found := read_sharing_job(job)) is not None]
        big = read_sharing_job(replace(share_job("big", most=1, gpus=4, pod=pod), created_s=0.0))
        assert big is not None
        jobs = [*sharing, replace(big, waiting_since_s=1000.0)]
        found = compute_shares(ClusterCapacity.of([node], pods), jobs, {}, 1000.0 + waited_s)
        assert {share.starts_after for share in found.values()} <= {"", big.key}
        return [key.rpartition("/")[2] for key, share in found.items() if share.starts_after]

    assert hold(3599.0) == []
    assert hold(3600.0) == ["b"], "one that runs goes on, and another priority class is the scheduler's to order"
    assert hold(3600.0, objects.node("n", 3)) == [], "no node is large enough"
    assert hold(3600.0, pod={"nodeSelector": {"gpu": "h100"}}) == [], "none that it may use"


class GivenCapacity:
    def __init__(self) -> None:
        self.found: ClusterCapacity | None = ClusterCapacity.of(FOUR, [])

    def current(self) -> ClusterCapacity | None:
        return self.found


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def surroundings(told: list[str]) -> Iterator[LiveSurroundings]:
    with contextlib.closing(LiveSurroundings(told.append, StoreAllowlist())) as found:
        yield found


def test_changed_shares_are_looked_at(surroundings: LiveSurroundings, told: list[str]) -> None:
    source, first = GivenCapacity(), share_job("a")
    assert surroundings.look(first).allocation is None
    surroundings.set_capacity(source.current)
    assert surroundings.look(first).allocation == 4
    told.clear()
    ending = share_job("b", least=2, most=2)
    assert surroundings.look(ending).allocation == 2
    wait_until(lambda: first.key in told, "a look at the other job")
    assert surroundings.look(first).allocation == 2
    told.clear()
    surroundings.note_status(ending, {"phase": "Succeeded"})  # nothing need happen to it any more after that
    wait_until(lambda: first.key in told, "a look after the other's end")
    assert surroundings.look(first).allocation == 4
    source.found = None
    assert surroundings.look(first).allocation is None


def test_waiting_resource_hears_of_idle_room(surroundings: LiveSurroundings, told: list[str]) -> None:
    source, full = GivenCapacity(), [make_pod(f"x-{number}", "n") for number in range(4)]
    source.found = ClusterCapacity.of(FOUR, full)
    surroundings.set_capacity(source.current)
    waiting, content = share_job("a", scaling="external"), share_job("b", scaling="external")
    for job, wanted in ((waiting, 3), (content, 1)):
        surroundings.look(job)
        surroundings.note_status(job, {"wantedReplicas": wanted, "replicas": 1})
    source.found = ClusterCapacity.of(FOUR, full[:3])
    surroundings.note_capacity()
    wait_until(lambda: waiting.key in told, "a look at the one that waits")
    assert content.key not in told


def test_service_is_the_oldest_pools(surroundings: LiveSurroundings, told: list[str]) -> None:
    """Two teams that call their model `digits` in one store would label each other's data."""
    old, young = make_pool("a", 1, store="consul://consul:8500"), make_pool("b", 2, store="consul://Consul/")
    assert surroundings.look(young).service_holder == "", "nothing else is known yet"
    assert surroundings.look(old).service_holder == ""
    assert set(told) == {young.key}
    assert surroundings.look(young).service_holder == old.key
    assert surroundings.look(make_pool("c", 3, service="letters")).service_holder == ""
    told.clear()
    surroundings.forget(old.key)
    assert set(told) == {young.key}
    assert surroundings.look(young).service_holder == ""


def test_taken_service_after_a_restart(told: list[str]) -> None:
    """An operator that has just started knows of no pool: the one that it looks at first is not the only one."""
    old, young = make_pool("a", 1), make_pool("b", 2)
    asked: list[str] = []

    def list_pools(namespace: str) -> list[TeacherPool]:
        asked.append(namespace)
        return [pool for pool in (old, young) if pool.namespace == namespace]

    found = LiveSurroundings(told.append, StoreAllowlist(), list_pools=list_pools, namespaces=("a", "b"))
    with contextlib.closing(found):
        for _ in range(2):
            assert found.look(young).service_holder == old.key
        assert asked == ["a", "b"], "it asks at each look"
        assert set(told) >= {old.key}, "one that has gone since would be a rival for ever"
        found.note_gone(old.key)
        assert found.look(young).service_holder == ""


def make_teacher(number: int, priority: int) -> Object:
    pod = make_pod(f"t-{number}", "n")
    pod["metadata"]["labels"] = {"edl.io/owner-uid": "u-pool", "edl.io/role": "teacher", "edl.io/pool": "p"}
    pod["spec"]["priority"] = priority
    return pod


@pytest.mark.parametrize(
    ("pools", "priority", "count"),
    [({"u-pool": 0}, -100, 4), ({"u-pool": 2}, -100, 2), ({"u-pool": 0}, 1000, 1), ({}, -100, 1)],
    ids=["all lent", "its minimum is kept", "of higher priority", "of another operator"],
)
def test_only_what_can_be_taken_is_lent(pools: dict[str, int], priority: int, count: int) -> None:
    pods = [make_pod("a-0", "n", "a"), *(make_teacher(number, priority) for number in range(3))]
    sharing = read_sharing_job(share_job("a"))
    assert sharing is not None
    assert compute_shares(ClusterCapacity.of(FOUR, pods), [sharing], pools)[sharing.key].workers == count


def test_room_is_counted_for_who_waits() -> None:
    waiting = WaitingOwners()
    gpu, cpu = share_job("gpu"), share_job("cpu", gpus=0)
    full = [make_pod(f"x-{number}", "n") for number in range(4)]
    no_gpu = ClusterCapacity.of(FOUR, full)
    a_gpu = ClusterCapacity.of(FOUR, [*full[1:], make_pod("y", "n", gpus=0)])
    for job in (gpu, cpu):
        waiting.observe(job, no_gpu)
        waiting.note(job, True)
    assert waiting.find_due(no_gpu, 100.0) == ([], None), "as it was"
    assert waiting.find_due(a_gpu, 101.0) == ([gpu.key], None)
    assert waiting.find_due(a_gpu, 102.0) == ([], None), "nothing has come since"
    assert waiting.find_due(no_gpu, 103.0) == ([], None)
    assert waiting.find_due(a_gpu, 104.0) == ([], 7.0), "room that comes and goes is no look each"
    assert waiting.find_due(a_gpu, 111.0) == ([gpu.key], None)
    waiting.note(gpu, False)
    waiting.find_due(no_gpu, 130.0)
    assert waiting.find_due(a_gpu, 131.0) == ([], None)


@pytest.mark.parametrize("pod", [{"nodeSelector": "gpu"}, {"priority": "high"}])
def test_bad_template_waits_for_nothing(pod: Object) -> None:
    """One resource's slip must not end the looks at all others."""
    waiting = WaitingOwners()
    bad, good = share_job("a", pod=pod), share_job("b")
    other = {**make_pod("w", ""), "spec": {"containers": [], "priority": 5}}
    capacity = ClusterCapacity.of(FOUR, [other])
    waiting.observe(bad, capacity)
    for job in (bad, good):
        waiting.note(job, True)
    assert good.key in waiting.find_due(capacity, 1.0)[0]
