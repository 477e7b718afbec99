"""Shares of jobs: GPUs go to all that can use them, and not to whom others arbitrate."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from edl.errors import AccessDeniedError
from edl.kube.objects import Object
from edl.master.kube.capacity import ClusterCapacity
from edl.master.kube.operator import job_shares, live_surroundings
from edl.master.kube.operator.job_shares import compute_shares, read_sharing_job
from edl.master.kube.operator.live_surroundings import LiveSurroundings
from edl.master.kube.operator.service_holders import ServiceHolders
from edl.master.kube.operator.store_allowlist import StoreAllowlist
from edl.master.kube.operator.waiting_owners import WaitingOwners
from edl.master.kube.pools.revision import hash_place
from edl.master.kube.resources import ElasticJob, TeacherPool, parse_elastic_job, parse_teacher_pool
from edl.master.scaling.arbitration import Allocation


def make_job(name: str, least: int = 1, most: int = 8, gpus: int = 1, **spec: Any) -> ElasticJob:
    container = {"name": "main", "image": "i", "resources": {"limits": {"nvidia.com/gpu": gpus}} if gpus else {}}
    template = {"spec": {"containers": [container], **spec.pop("pod", {})}}
    metadata = {"name": name, "namespace": "lab", "uid": f"u-{name}", "creationTimestamp": "2023-11-14T00:00:00Z"}
    bounds = {"minReplicas": least, "maxReplicas": most}
    job = parse_elastic_job(
        {
            "metadata": metadata,
            "spec": {"run": ["t.py"], "store": "sqlite:////nowhere/x.sqlite", "template": template, **bounds, **spec},
            "status": {},
        }
    )
    assert isinstance(job, ElasticJob), job
    return job


def make_node(name: str, gpus: int) -> Object:
    amounts = {"cpu": "64", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": str(gpus)}
    conditions = [{"type": "Ready", "status": "True"}]
    return {"metadata": {"name": name}, "spec": {}, "status": {"allocatable": amounts, "conditions": conditions}}


def make_pod(name: str, node: str, owner: str = "", gpus: int = 1) -> Object:
    labels = {"edl.io/owner-uid": f"u-{owner}", "edl.io/role": "worker", "edl.io/job": owner} if owner else {}
    container = {"name": "m", "resources": {"requests": {"nvidia.com/gpu": str(gpus)}}}
    return {
        "metadata": {"name": name, "namespace": "lab", "uid": name, "labels": labels},
        "spec": {"containers": [container], "nodeName": node},
        "status": {"phase": "Running" if node else "Pending"},
    }


def share(nodes: list[Object], pods: list[Object], *jobs: ElasticJob) -> dict[str, int]:
    sharing = [found for job in jobs if (found := read_sharing_job(job, None, None)) is not None]
    found = compute_shares(ClusterCapacity.of(nodes, pods), sharing)
    return {key.rpartition("/")[2]: count for key, count in found.items()}


def test_one_job_gets_all() -> None:
    assert share([make_node("n", 4)], [], make_job("a")) == {"a": 4}


def test_young_job_keeps_what_it_was_given() -> None:
    """Its second pod, made a moment ago, has no node yet."""
    young = replace(make_job("a"), created_s=time.time())
    pods = [make_pod("a-0", "n", "a"), make_pod("a-1", "", "a")]
    assert share([make_node("n", 4)], pods, young) == {"a": 4}


def test_jobs_share_and_keep_their_minimum() -> None:
    pods = [make_pod(f"a-{number}", "n", "a") for number in range(4)]
    found = share([make_node("n", 4)], pods, make_job("a"), make_job("b", least=2))
    assert sum(found.values()) == 4
    assert found["b"] >= 2
    assert found["a"] >= 1


def test_what_others_hold_is_not_shared() -> None:
    pods = [make_pod("online", "n", gpus=3)]
    assert share([make_node("n", 4)], pods, make_job("a")) == {"a": 1}


@pytest.mark.parametrize(
    "job",
    [
        make_job("a", queue="team"),
        make_job("a", scaling="external"),
        make_job("a", suspend=True),
        make_job("a", gpus=0),
        make_job("a", pod={"schedulerName": "volcano"}),
    ],
    ids=["kueue", "external", "suspended", "no GPU", "volcano"],
)
def test_job_that_others_arbitrate(job: ElasticJob) -> None:
    assert read_sharing_job(job, None, None) is None


@pytest.mark.parametrize("scheduler", [None, "", "default-scheduler"])
def test_default_scheduler_leaves_it_to_edl(scheduler: str | None) -> None:
    """An empty name, or null as a chart may write it, is the default scheduler's."""
    assert read_sharing_job(make_job("a", pod={"schedulerName": scheduler}), None, None) is not None


def test_wanted_is_the_most_of_use() -> None:
    found = read_sharing_job(make_job("a", least=2), 3, None)
    assert found is not None
    assert (found.least, found.most) == (2, 3)
    none = read_sharing_job(make_job("a", least=2), 0, None)
    assert none is not None
    assert none.most == 2


def test_unreadable_template_takes_no_part() -> None:
    assert read_sharing_job(make_job("a", pod={"initContainers": 7}), None, None) is None


class GivenCapacity:
    """What is idle, as a test says."""

    def __init__(self) -> None:
        self.found: ClusterCapacity | None = None

    def current(self) -> ClusterCapacity | None:
        return self.found


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_changed_shares_are_looked_at() -> None:
    told: list[str] = []
    surroundings = LiveSurroundings(told.append, StoreAllowlist())
    source = GivenCapacity()
    try:
        assert surroundings.look(make_job("a")).allocation is None
        source.found = ClusterCapacity.of([make_node("n", 4)], [])
        surroundings.set_capacity(source)
        assert surroundings.look(make_job("a")).allocation == 4
        told.clear()
        found = surroundings.look(make_job("b", least=2)).allocation
        assert found is not None
        assert found >= 2
        wait_for(lambda: "elasticjobs/lab/a" in told)  # by this look, or by that at the capacity if it is late
        told.clear()
        surroundings.forget("elasticjobs/lab/b")
        wait_for(lambda: "elasticjobs/lab/a" in told and surroundings.look(make_job("a")).allocation == 4)
        source.found = None
        assert surroundings.look(make_job("a")).allocation is None
    finally:
        surroundings.close()


def test_ended_job_leaves_its_share_at_once() -> None:
    """Nothing need happen to it any more after the status that says so."""
    told: list[str] = []
    surroundings = LiveSurroundings(told.append, StoreAllowlist())
    source = GivenCapacity()
    try:
        source.found = ClusterCapacity.of([make_node("n", 4)], [])
        surroundings.set_capacity(source)
        ending = make_job("b", least=2, most=2)
        surroundings.look(ending)
        assert surroundings.look(make_job("a")).allocation == 2
        surroundings.note_status(ending, {"phase": "Succeeded"})
        wait_for(lambda: surroundings.look(make_job("a")).allocation == 4)
        assert "elasticjobs/lab/a" in told
    finally:
        surroundings.close()


def test_waiting_resource_hears_of_idle_room() -> None:
    told: list[str] = []
    surroundings = LiveSurroundings(told.append, StoreAllowlist())
    source = GivenCapacity()
    full = [make_pod(f"x-{number}", "n") for number in range(4)]
    try:
        source.found = ClusterCapacity.of([make_node("n", 4)], full)
        surroundings.set_capacity(source)
        waiting, content = make_job("a", scaling="external"), make_job("b", scaling="external")
        time.sleep(1.2)
        surroundings.note_status(waiting, {"wantedReplicas": 3, "replicas": 1})
        surroundings.note_status(content, {"wantedReplicas": 1, "replicas": 1})
        told.clear()
        surroundings.note_capacity()
        time.sleep(1.2)
        assert told == [], "nothing more is idle"
        source.found = ClusterCapacity.of([make_node("n", 4)], full[:3])
        surroundings.note_capacity()
        wait_for(lambda: told)
        assert told == [waiting.key]
    finally:
        surroundings.close()


def make_pool(
    namespace: str, day: int, service: str = "digits", store: str = "sqlite:////nowhere/x.sqlite"
) -> TeacherPool:
    spec = {"serve": ["m.py:f"], "service": service, "store": store}
    metadata = {"name": "p", "namespace": namespace, "uid": namespace, "creationTimestamp": f"2026-01-0{day}T00:00:00Z"}
    template = {"spec": {"containers": [{"name": "main", "image": "i"}]}}
    pool = parse_teacher_pool({"metadata": metadata, "spec": {**spec, "template": template}})
    assert isinstance(pool, TeacherPool), pool
    return pool


def test_service_is_the_oldest_pools() -> None:
    """Two teams that call their model `digits` in one store would label each other's data."""
    looked_at: list[str] = []
    surroundings = LiveSurroundings(looked_at.append, StoreAllowlist())
    old, young = make_pool("a", 1), make_pool("b", 2)
    try:
        assert surroundings.look(young).service_holder == "", "nothing else is known yet"
        assert surroundings.look(old).service_holder == ""
        assert set(looked_at) == {young.key}
        assert surroundings.look(young).service_holder == old.key
        assert surroundings.look(make_pool("c", 3, "letters")).service_holder == ""
        looked_at.clear()
        surroundings.forget(old.key)
        assert set(looked_at) == {young.key}
        assert surroundings.look(young).service_holder == ""
    finally:
        surroundings.close()


@pytest.mark.parametrize(
    ("store", "spelling"),
    [
        ("consul://consul:8500", "consul://Consul/"),
        ("kubernetes://edl", "kubernetes://edl/"),
        ("etcd://a:2379,b:2379", "etcd://b,a"),
    ],
)
def test_rivals_by_any_spelling_of_a_store(store: str, spelling: str) -> None:
    surroundings = LiveSurroundings(lambda key: None, StoreAllowlist())
    old, young = make_pool("a", 1, store=store), make_pool("b", 2, store=spelling)
    try:
        surroundings.look(old)
        assert surroundings.look(young).service_holder == old.key
    finally:
        surroundings.close()


def test_taken_service_after_a_restart() -> None:
    """An operator that has just started knows of no pool: the one that it looks at first is not the only one."""
    old, young = make_pool("a", 1), make_pool("b", 2)
    asked: list[str] = []
    looked_at: list[str] = []

    def list_pools(namespace: str) -> list[TeacherPool]:
        asked.append(namespace)
        return [pool for pool in (old, young) if pool.namespace == namespace]

    surroundings = LiveSurroundings(looked_at.append, StoreAllowlist(), list_pools=list_pools, namespaces=("a", "b"))
    try:
        assert surroundings.look(young).service_holder == old.key
        assert surroundings.look(young).service_holder == old.key
        assert asked == ["a", "b"], "it asks at each look"
        assert set(looked_at) >= {old.key}, "one that has gone since would be a rival for ever"
        surroundings.note_gone(old.key)
        assert surroundings.look(young).service_holder == ""
    finally:
        surroundings.close()


def test_service_is_kept_while_it_is_served() -> None:
    """An edited pool has teachers of its former service until the last of them has gone; so it is after a restart."""
    looked_at: list[str] = []
    old, young = make_pool("a", 1), make_pool("b", 2)
    old = replace(old, status={"servedPlaces": [hash_place(old)]})
    edited = replace(old, service="letters", generation=2)
    for known in (True, False):
        holders = ServiceHolders(looked_at.append, lambda namespace: [], ())
        if known:
            holders.find_holder(old)
        holders.find_holder(edited)
        assert holders.find_holder(young) == old.key
        looked_at.clear()
        assert holders.find_holder(replace(edited, status={"servedPlaces": [hash_place(edited)]})) == ""
        assert looked_at == [young.key]
        assert holders.find_holder(young) == ""


def test_taken_service_of_denied_namespace() -> None:
    old, young = make_pool("a", 1), make_pool("b", 2)
    text = f"{old.key} serves digits in the same store: choose another spec.service or store"
    accepted = {"type": "Accepted", "status": "False", "reason": "ServiceTaken", "message": text}
    taken = replace(young, status={"conditions": [{**accepted, "observedGeneration": young.generation}]})
    now_s, denied = 100.0, {"a"}

    def list_pools(namespace: str) -> list[TeacherPool]:
        if namespace in denied:
            raise AccessDeniedError("teacherpools: not allowed (403)")
        return []

    holders = ServiceHolders(lambda key: None, list_pools, ("a", "b"), lambda: now_s)
    assert holders.find_holder(taken) == old.key, "its teachers run on, and it may not be read now"
    assert holders.find_holder(young) == "", "nothing says that it was taken"
    assert holders.find_holder(replace(taken, generation=young.generation + 1)) == "", "it was edited meanwhile"
    denied.clear()
    assert holders.find_holder(taken) == old.key
    now_s += 61.0
    assert holders.find_holder(taken) == "", "its namespace has been listed, and it is not there"


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
    sharing = read_sharing_job(make_job("a"), None, None)
    assert sharing is not None
    assert compute_shares(ClusterCapacity.of([make_node("n", 4)], pods), [sharing], pools) == {sharing.key: count}


def test_room_is_counted_for_who_waits() -> None:
    waiting = WaitingOwners()
    gpu, cpu = make_job("gpu"), make_job("cpu", gpus=0)
    full = [make_pod(f"x-{number}", "n") for number in range(4)]
    no_gpu = ClusterCapacity.of([make_node("n", 4)], full)
    a_gpu = ClusterCapacity.of([make_node("n", 4)], [*full[1:], make_pod("y", "n", gpus=0)])
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


def test_template_of_many_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, counted = WaitingOwners(), []
    capacity = ClusterCapacity.of([make_node("n", 4)], [])
    for number in range(20):
        waiting.note(make_job(f"j-{number}"), True)
    count_fitting = ClusterCapacity.count_fitting

    def count(self: ClusterCapacity, pod: Any) -> int:
        counted.append(pod)
        return count_fitting(self, pod)

    monkeypatch.setattr(ClusterCapacity, "count_fitting", count)
    assert len(waiting.find_due(capacity, 1.0)[0]) == 20
    assert len(counted) == 1


@pytest.mark.parametrize("pod", [{"nodeSelector": "gpu"}, {"priority": "high"}, {"tolerations": 7}, {"affinity": []}])
def test_bad_template_waits_for_nothing(pod: Object) -> None:
    """One resource's slip must not end the looks at all others."""
    waiting = WaitingOwners()
    bad, good = make_job("a", pod=pod), make_job("b")
    other = {**make_pod("w", ""), "spec": {"containers": [], "priority": 5}}
    capacity = ClusterCapacity.of([make_node("n", 4)], [other])
    waiting.observe(bad, capacity)
    for job in (bad, good):
        waiting.note(job, True)
    assert good.key in waiting.find_due(capacity, 1.0)[0]


def test_arbitration_goes_on_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its steps were used up a pending minimum waited until something else changed."""
    given: list[Mapping[str, Mapping[str, int]]] = []

    def arbitrate_in_steps(nodes: Any, requests: Any, placements: Mapping[str, Mapping[str, int]]) -> Allocation:
        given.append(placements)
        placed = {"elasticjobs/lab/a": {"n": len(given)}}
        return Allocation(placed, (), {}, 1, settled=len(given) == 3)

    monkeypatch.setattr(job_shares, "arbitrate", arbitrate_in_steps)
    assert share([make_node("n", 8)], [], make_job("a")) == {"a": 3}
    assert given[1:] == [{"elasticjobs/lab/a": {"n": 1}}, {"elasticjobs/lab/a": {"n": 2}}]


def test_shares_are_computed_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that began earlier must not write over what a later one found."""
    capacity = ClusterCapacity.of([make_node("n", 8)], [])
    first, begun = threading.Event(), threading.Event()
    sizes: list[int] = []

    def compute(capacity: Any, jobs: Sequence[Any], pools: Any) -> Mapping[str, int]:
        sizes.append(len(jobs))
        if len(sizes) == 1:
            begun.set()
            assert first.wait(60)
        return {job.key: len(jobs) for job in jobs}

    monkeypatch.setattr(live_surroundings, "compute_shares", compute)
    with contextlib.closing(LiveSurroundings(lambda key: None, StoreAllowlist())) as found:
        found._loop.close()
        found._capacity = FixedCapacity(capacity)
        early = threading.Thread(target=found.look, args=(make_job("a"),))
        late = threading.Thread(target=found.look, args=(make_job("b"),))
        early.start()
        assert begun.wait(60)
        late.start()
        late.join(0.3)
        assert sizes == [1], "it waits for its turn"
        first.set()
        early.join(60)
        late.join(60)
        assert (sizes, set(found._shares.values())) == ([1, 2], {2})


class FixedCapacity:
    """A capacity that nothing changes."""

    def __init__(self, capacity: ClusterCapacity) -> None:
        self._found = capacity

    def current(self) -> ClusterCapacity:
        return self._found
