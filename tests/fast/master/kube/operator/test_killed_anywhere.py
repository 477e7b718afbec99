"""The real planners under a reconciler that is killed after any call: the end is that of one that was not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from edl.kube.objects import Object, format_time
from edl.kube.resource_types import ELASTIC_JOBS, PODS, TEACHER_POOLS, ResourceType
from edl.master.kube.capacity import ClusterCapacity
from edl.master.kube.operator.kinds import KINDS
from edl.master.kube.operator.reconciling import Reconciler
from edl.master.kube.operator.reconciling.surroundings import OwnerSurroundings
from edl.master.kube.resources import MemberOwner
from tests.fast.master.kube.operator.in_memory_api import InMemoryApi, OperatorKilled
from tests.fast.master.kube.operator.test_reconciler import NoSurroundings, snapshot

TEMPLATE = {"spec": {"containers": [{"name": "main", "image": "i", "resources": {"requests": {"memory": "1Gi"}}}]}}
METADATA = {"name": "digits", "namespace": "lab", "uid": "0123456789", "generation": 1}
JOB = {"run": ["t.py"], "minReplicas": 1, "maxReplicas": 4, "scaling": "external", "replicas": 2}
POOL = {"serve": ["m:f"], "minReplicas": 1, "maxReplicas": 4, "scaling": "external", "replicas": 2}

Action = tuple[str, int]
ACTIONS = st.tuples(
    st.sampled_from(["start", "oom", "error", "success", "evict", "silent", "scale", "suspend", "wait"]),
    st.integers(0, 3),
)


@dataclass(frozen=True)
class Given:
    """What is known beside the resource and its pods."""

    wanted: int | None = None
    allocation: int | None = None
    stale: str = ""
    cores: int | None = None


class GivenSurroundings(NoSurroundings):
    def __init__(self, api: InMemoryApi, given: Given) -> None:
        self._api = api
        self._given = given

    def look(self, owner: MemberOwner) -> OwnerSurroundings:
        found, capacity = self._given, None
        if found.cores is not None:
            amounts = {"cpu": str(found.cores), "memory": "64Gi", "pods": "110"}
            ready = {"allocatable": amounts, "conditions": [{"type": "Ready", "status": "True"}]}
            node = {"metadata": {"name": "node1"}, "spec": {}, "status": ready}
            pods = [obj for (plural, *_), obj in self._api.objects.items() if plural == "pods"]
            capacity = ClusterCapacity.of([node], pods)
        return OwnerSurroundings(capacity, found.wanted, found.allocation, None, found.stale)


def reconcile(api: InMemoryApi, key: str, given: Given) -> None:
    around = GivenSurroundings(api, given)
    Reconciler(api, KINDS, around, lambda *args: None, clock=lambda: api.now_s).reconcile(key)


def settle(api: InMemoryApi, key: str, given: Given) -> None:
    for _ in range(30):
        before = snapshot(api)
        reconcile(api, key, given)
        if snapshot(api) == before:
            return
    raise AssertionError(f"it never settles: {api.calls[-30:]}")


def act(api: InMemoryApi, kind: ResourceType, action: Action) -> None:
    """Do what users, kubelets and time do."""
    verb, number = action
    owner = api.objects.get((kind.plural, "lab", "digits"))
    names = api.names(PODS)
    if verb == "wait":
        api.now_s += 400.0 * number
    elif owner is not None and verb in ("scale", "suspend"):
        owner["spec"].update({"replicas": number + 1} if verb == "scale" else {"suspend": number % 2 == 0})
        owner["metadata"]["generation"] += 1
    elif names:
        end_pod(api, api.objects["pods", "lab", names[number % len(names)]], verb)


def end_pod(api: InMemoryApi, pod: Object, how: str) -> None:
    now = format_time(api.now_s)
    spec, status = pod["spec"], pod.setdefault("status", {})
    spec["nodeName"] = "node1"
    main = spec["containers"][0]["name"]
    conditions = [{"type": "PodScheduled", "status": "True"}]
    if how == "start":
        state: Object = {"running": {"startedAt": now}}
        phase = "Running"
        conditions += [{"type": "Ready", "status": "True"}]
    elif how == "silent":
        pod["metadata"]["deletionTimestamp"] = now
        return
    else:
        code, reason = {
            "oom": (137, "OOMKilled"),
            "error": (1, "Error"),
            "success": (0, "Completed"),
            "evict": (137, "Error"),
        }[how]
        state = {"terminated": {"exitCode": code, "reason": reason, "startedAt": now, "finishedAt": now}}
        phase = "Succeeded" if how == "success" else "Failed"
        if how == "evict":
            status["reason"] = "Evicted"
    status.update({"phase": phase, "conditions": conditions, "containerStatuses": [{"name": main, "state": state}]})


def run(
    kind: ResourceType, spec: dict[str, Any], steps: list[tuple[Action, list[int]]], given: Given, *, kill: bool
) -> InMemoryApi:
    api = InMemoryApi()
    api.put(kind, {"metadata": dict(METADATA), "spec": {"store": "consul://c", "template": TEMPLATE, **spec}})
    key = f"{kind.plural}/lab/digits"
    for action, kills in steps:
        for calls in kills if kill else ():
            api.calls.clear()
            api.kill_after = calls
            try:
                for _ in range(6):
                    reconcile(api, key, given)
            except OperatorKilled:
                pass
            api.kill_after = None
        settle(api, key, given)
        act(api, kind, action)
    settle(api, key, given)
    return api


STEPS = st.lists(st.tuples(ACTIONS, st.lists(st.integers(1, 12), max_size=3)), max_size=6)


GIVEN = st.builds(
    Given,
    st.none() | st.integers(0, 6),
    st.none() | st.integers(0, 5),
    st.sampled_from(["", "away"]),
    st.none() | st.integers(0, 5),
)
SCALING = st.sampled_from(["auto", "external"])


@settings(max_examples=60)
@given(STEPS, GIVEN, SCALING)
def test_job_after_any_kill(steps: list[tuple[Action, list[int]]], around: Given, scaling: str) -> None:
    spec = {**JOB, "scaling": scaling}
    killed, undisturbed = (run(ELASTIC_JOBS, spec, steps, around, kill=kill) for kill in (True, False))
    assert snapshot(killed) == snapshot(undisturbed)
    assert sorted(killed.made) == sorted(undisturbed.made), "a pod was made twice, or another one"


@settings(max_examples=60)
@given(STEPS, GIVEN, SCALING)
def test_pool_after_any_kill(steps: list[tuple[Action, list[int]]], around: Given, scaling: str) -> None:
    spec = {**POOL, "scaling": scaling}
    killed, undisturbed = (run(TEACHER_POOLS, spec, steps, around, kill=kill) for kill in (True, False))
    assert snapshot(killed) == snapshot(undisturbed)
    assert sorted(killed.made) == sorted(undisturbed.made), "a pod was made twice, or another one"
