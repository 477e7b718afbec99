"""The reconciler and the real planners over a double of the API server: it may be killed, refused and interrupted."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.errors import AccessDeniedError, EDLError, InvalidObjectError, KubernetesError
from edl.kube.objects import Object, format_time
from edl.kube.resource_types import DEPLOYMENTS, ELASTIC_JOBS, EVENTS, PODS, TEACHER_POOLS, ResourceType
from edl.kube.responses import NotServedError
from edl.master.kube.capacity import ClusterCapacity
from edl.master.kube.observation import OwnerObservation, StoreAnswer, find_condition
from edl.master.kube.operator.reconciler import Reconciler
from edl.master.kube.operator.stores import StoreAllowlist
from edl.master.kube.operator.surroundings import LiveSurroundings
from edl.master.kube.resources import MemberOwner
from tests.fast.master.kube.capacity import objects
from tests.fast.master.kube.operator.in_memory_api import InMemoryApi, OperatorKilled
from tests.fast.master.kube.operator.owners import NOWHERE

PAGE = (Path(__file__).parents[5] / "docs/kubernetes-conditions.md").read_text()
KEY = "elasticjobs/lab/digits"
POOL_KEY = "teacherpools/lab/digits"
METADATA = {"name": "digits", "namespace": "lab", "uid": "u-1", "generation": 1}
TEMPLATE = {"spec": {"containers": [{"name": "main", "image": "i", "resources": {"requests": {"memory": "1Gi"}}}]}}
FIRST = ("pods", "lab", "digits-worker-0-0")


@dataclass(frozen=True)
class Given:
    wanted: int | None = None
    allocation: int | None = None
    stale: str = ""
    cores: int | None = None


class GivenSurroundings:
    def __init__(self, api: InMemoryApi, given: Given) -> None:
        self._api = api
        self._given = given

    def look(self, owner: MemberOwner, pods: object) -> OwnerObservation:
        found, capacity = self._given, None
        if found.cores is not None:
            node = objects.node("node1", cpu=str(found.cores), memory="64Gi")
            pods = [obj for (plural, *_), obj in self._api.objects.items() if plural == "pods"]
            capacity = ClusterCapacity.of([node], pods)
        store = StoreAnswer(found.wanted, stale=found.stale)
        return OwnerObservation(capacity=capacity, store=store, allocation=found.allocation)

    def note_status(self, owner: MemberOwner, status: Any) -> None:
        """Nothing waits."""

    def note_gone(self, key: str) -> None:
        """Nothing was remembered."""


def make_job(**spec: Any) -> Object:
    fields = {"run": ["train.py"], "store": "consul://c", "template": TEMPLATE, "scaling": "external", **spec}
    return {"metadata": dict(METADATA), "spec": fields}


def make_api(**spec: Any) -> InMemoryApi:
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job(**spec))
    return api


def make_reconciler(api: Any, given: Given | None = None) -> tuple[Reconciler, list[str]]:
    """Return what a new operator has, and the reasons of the events that it shows."""
    reasons: list[str] = []
    around: Any = GivenSurroundings(api, given or Given())
    found = Reconciler(api, around, lambda kind, resource, note: reasons.append(note.reason), clock=lambda: api.now_s)
    return found, reasons


def settle(api: InMemoryApi, key: str = KEY, given: Given | None = None) -> None:
    for _ in range(30):
        before = snapshot(api)
        make_reconciler(api, given)[0].reconcile(key)
        if snapshot(api) == before:
            return
    raise AssertionError(f"it never settles: {api.calls[-30:]}")


def snapshot(api: InMemoryApi) -> str:
    """What is there, without versions and uids."""
    objects = copy.deepcopy(api.objects)
    for obj in objects.values():
        for name in ("resourceVersion", "uid", "creationTimestamp"):
            obj["metadata"].pop(name, None)
    return json.dumps([[*key, obj] for key, obj in sorted(objects.items())], sort_keys=True)


def read_job(api: InMemoryApi) -> Object:
    return api.objects["elasticjobs", "lab", "digits"]


def read_accepted(api: InMemoryApi, plural: str = "elasticjobs") -> tuple[str, str, str]:
    found = find_condition(api.objects[plural, "lab", "digits"]["status"], "Accepted")
    return found["status"], found["reason"], found["message"]


def edit(api: InMemoryApi, **spec: Any) -> None:
    job = read_job(api)
    job["spec"] = {**job["spec"], **spec}
    job["metadata"]["generation"] += 1


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
        ends = {"oom": (137, "OOMKilled"), "error": (1, "Error"), "success": (0, "Completed"), "evict": (137, "Error")}
        code, reason = ends[how]
        state = {"terminated": {"exitCode": code, "reason": reason, "startedAt": now, "finishedAt": now}}
        phase = "Succeeded" if how == "success" else "Failed"
        if how == "evict":
            status["reason"] = "Evicted"
    status.update({"phase": phase, "conditions": conditions, "containerStatuses": [{"name": main, "state": state}]})


def test_resource_that_goes() -> None:
    assert make_reconciler(InMemoryApi())[0].reconcile(KEY) is None
    api = make_api()
    read_job(api)["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    assert make_reconciler(api)[0].reconcile(KEY) == math.inf
    assert api.names(PODS) == []


def test_patience_outlives_the_operator() -> None:
    """A job that has waited an hour for a whole node is served first, also by an operator that has just started."""
    api, node = InMemoryApi(), objects.node("node1", 8)

    def put(name: str, gpus: int) -> str:
        container = {"name": "main", "image": "i", "resources": {"limits": {"nvidia.com/gpu": gpus}}}
        fields = {"run": ["t.py"], "store": NOWHERE, "template": {"spec": {"containers": [container]}}}
        metadata = {**METADATA, "name": name, "uid": f"u-{name}", "creationTimestamp": format_time(api.now_s)}
        api.put(ELASTIC_JOBS, {"metadata": metadata, "spec": fields})
        return f"elasticjobs/lab/{name}"

    def start_and_look(*keys: str) -> None:
        pods = [obj for (plural, *_), obj in api.objects.items() if plural == "pods"]
        for pod in pods:
            words = {"reason": "Unschedulable", "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu"}
            if "nodeName" not in pod["spec"]:
                refused = [{"type": "PodScheduled", "status": "False", **words}]
                pod["status"] = {"phase": "Pending", "conditions": refused}
        around = LiveSurroundings(lambda key: None, StoreAllowlist(), clock=lambda: api.now_s)
        with contextlib.closing(around):
            around.set_capacity(lambda: ClusterCapacity.of([node], pods))
            new: Any = Reconciler(api, around, lambda *_: None, clock=lambda: api.now_s)
            for key in keys:
                new.reconcile(key)

    big = put("big", 8)
    start_and_look(big)
    api.now_s += 3590.0
    small = put("small", 1)
    start_and_look(big, small)
    assert api.names(PODS) == ["big-worker-0-0", "small-worker-0-0"]
    api.now_s += 20.0
    start_and_look(big, small)
    assert api.names(PODS) == ["big-worker-0-0"]
    scheduled = find_condition(api.objects["elasticjobs", "lab", "small"]["status"], "Scheduled")
    assert (scheduled["reason"], big in scheduled["message"]) == ("WaitingForTurn", True)
    end_pod(api, api.objects["pods", "lab", "big-worker-0-0"], "start")
    start_and_look(big, small)
    api.now_s += 60.0
    start_and_look(big, small)
    assert api.names(PODS) == ["big-worker-0-0", "small-worker-0-1"]


def test_refused_spec_makes_nothing() -> None:
    api = make_api(minReplicas=5, maxReplicas=2)
    reconciler, reasons = make_reconciler(api)
    for _ in range(2):
        assert reconciler.reconcile(KEY) == math.inf
    assert read_accepted(api)[:2] == ("False", "MinAboveMax")
    assert (api.names(PODS), reasons) == ([], ["MinAboveMax"])


def test_pod_beyond_the_policy() -> None:
    """Whoever may create a job alone need not be allowed to make a privileged pod."""
    api = make_api(template={"spec": {**TEMPLATE["spec"], "hostPID": True, "serviceAccountName": "edl-operator"}})
    reconciler, reasons = make_reconciler(api)
    reconciler.reconcile(KEY)
    assert read_accepted(api)[:2] == ("False", "PodNotAllowed")
    assert "hostPID" in read_accepted(api)[2]
    assert (api.names(PODS), set(reasons)) == ([], {"PodNotAllowed"})
    edit(api, template=TEMPLATE)
    reconciler.reconcile(KEY)
    assert api.names(PODS)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "edl.io/scaled-by=digits"),
        ({"annotations": {"edl.io/scaled-by": "another"}}, "edl.io/scaled-by=digits"),
        ({"annotations": {"edl.io/scaled-by": "digits"}, "labels": {"app.kubernetes.io/name": "edl"}}, "EDL itself"),
    ],
)
def test_target_that_is_not_the_pools(metadata: Object, words: str) -> None:
    api = InMemoryApi()
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "edl-operator"}
    spec = {"store": "consul://c", "scaleTargetRef": target, "scaling": "external", "replicas": 0, "maxReplicas": 4}
    api.put(TEACHER_POOLS, {"metadata": dict(METADATA), "spec": spec})
    found = {"metadata": {"name": "edl-operator", "namespace": "lab", **metadata}, "spec": {"replicas": 1}}
    api.put(DEPLOYMENTS, found)
    with pytest.raises(InvalidObjectError, match=words):
        make_reconciler(api)[0].reconcile(POOL_KEY)
    assert read_accepted(api, "teacherpools")[:2] == ("False", "ObjectRefused")
    status = api.objects["teacherpools", "lab", "digits"]["status"]
    assert (status["phase"], find_condition(status, "Ready")["status"]) == ("Rejected", "Unknown")
    assert api.objects["deployments", "lab", "edl-operator"]["spec"]["replicas"] == 1


def test_wrong_edit_stops_nothing() -> None:
    """Pods are replaced, the status follows them, and `suspend` works; the edit may have raised the deadline."""
    api = make_api(minReplicas=2, maxReplicas=2, activeDeadlineSeconds=100)
    reconciler, reasons = make_reconciler(api)
    for _ in range(3):
        reconciler.reconcile(KEY)
    edit(api, minReplicas=3, activeDeadlineSeconds=100_000)
    end_pod(api, api.objects[FIRST], "evict")
    for _ in range(4):
        api.now_s += 2000.0
        reconciler.reconcile(KEY)
    assert "digits-worker-0-1" in api.names(PODS)
    assert read_accepted(api)[:2] == ("False", "MinAboveMax")
    assert "the previous spec applies" in read_accepted(api)[2]
    assert read_job(api)["status"]["observedGeneration"] == 2
    assert reasons.count("MinAboveMax") == 1
    version = read_job(api)["metadata"]["resourceVersion"]
    reconciler.reconcile(KEY)
    assert read_job(api)["metadata"]["resourceVersion"] == version, "it is written once"
    edit(api, suspend=True)
    for _ in range(3):
        reconciler.reconcile(KEY)
    assert read_job(api)["status"]["phase"] == "Suspended"
    edit(api, minReplicas=2, suspend=False, activeDeadlineSeconds=100_000)
    reconciler.reconcile(KEY)
    assert read_accepted(api)[0] == "True"


def test_wrong_edit_after_a_restart() -> None:
    """An operator that never saw a valid spec makes and deletes nothing, and its status says what is there."""
    api = make_api(minReplicas=2, maxReplicas=2)
    settle(api)
    end_pod(api, api.objects[FIRST], "start")
    settle(api)
    edit(api, minReplicas=3)
    reconciler, reasons = make_reconciler(api)

    def look() -> tuple[object, ...]:
        assert reconciler.reconcile(KEY) == math.inf
        status = read_job(api)["status"]
        running = find_condition(status, "Running")
        assert (running["reason"], find_condition(status, "Succeeded")) == ("NotAccepted", {})
        assert find_condition(status, "Scheduled")["status"] == "False", "it has waited since then"
        return status["phase"], status["readyReplicas"], status["replicas"], running["status"]

    assert look() == ("Running", 1, 2, "Unknown")
    assert api.names(PODS) == ["digits-worker-0-0", "digits-worker-1-0"]
    api.objects.pop(FIRST)
    assert look() == ("Pending", 0, 1, "False")
    end_pod(api, api.objects[("pods", "lab", "digits-worker-1-0")], "success")
    assert look() == ("Pending", 0, 0, "False"), "its end will count when the spec is valid again"
    api.objects.pop(("pods", "lab", "digits-worker-1-0"))
    assert look() == ("Rejected", 0, 0, "False")
    assert read_accepted(api)[:2] == ("False", "MinAboveMax")
    assert read_job(api)["status"]["message"].endswith("until you correct this, no pod is created or replaced")
    assert (api.names(PODS), reasons) == ([], ["MinAboveMax"]), "said once, whatever becomes of the pods"
    edit(api, minReplicas=2)
    settle(api)
    assert api.names(PODS) == ["digits-worker-0-1", "digits-worker-1-1"]


def test_wrong_edit_of_an_ended_job() -> None:
    api = make_api()
    settle(api)
    end_pod(api, api.objects[FIRST], "success")
    settle(api)
    edit(api, minReplicas=3, maxReplicas=2)
    make_reconciler(api)[0].reconcile(KEY)
    status = read_job(api)["status"]
    assert (status["phase"], find_condition(status, "Complete")["status"]) == ("Succeeded", "True")


def test_old_look_makes_no_pods() -> None:
    """An operator stands still between its reads and its writes, and another counts an end and removes the pod."""
    api = make_api()
    settle(api)
    api.objects.pop(FIRST)  # this operator has seen that, and no other change

    class Still(InMemoryApi):
        def list(self, *args: Any, **kwargs: Any) -> Any:
            found = super().list(*args, **kwargs)
            record = {**read_job(self)["status"]["members"]["worker-0"], "try": 1}
            members = {"worker-0": record}
            self.patch(ELASTIC_JOBS, "digits", {"status": {"members": members}}, "lab", subresource="status")
            return found

    api.made.clear()
    api.__class__ = Still
    wait_s = make_reconciler(api)[0].reconcile(KEY)
    assert wait_s is not None
    assert wait_s < 1.0
    assert api.made == [], "the name of a try that is over was given again"
    api.__class__ = InMemoryApi
    settle(api)
    assert FIRST not in api.objects


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        ("get", NotServedError("get gizmos/scale: not found"), "ObjectRefused"),
        ("patch", AccessDeniedError("gizmos/scale: not allowed (403)"), "AccessDenied"),
    ],
)
def test_scale_target_that_is_refused(monkeypatch: pytest.MonkeyPatch, call: str, error: EDLError, reason: str) -> None:
    def refuse(*args: Any, subresource: str = "") -> Any:
        if subresource == "scale":
            raise error
        return usual(*args, **({"subresource": subresource} if subresource else {}))

    api = InMemoryApi()
    usual = getattr(api, call)
    target = {"apiVersion": "example.com/v1", "kind": "Gizmo", "name": "triton"}
    spec = {"store": "consul://c", "scaleTargetRef": target, "scaling": "external", "replicas": 2, "maxReplicas": 4}
    api.put(TEACHER_POOLS, {"metadata": dict(METADATA), "spec": spec})
    gizmos = ResourceType("example.com", "v1", "gizmos", "Gizmo")
    annotations = {"edl.io/scaled-by": "digits"}
    metadata = {"name": "triton", "namespace": "lab", "annotations": annotations}
    api.put(gizmos, {"metadata": metadata, "spec": {"replicas": 1}})
    reconciler, reasons = make_reconciler(api)
    with monkeypatch.context() as patched:
        patched.setattr(api, call, refuse)
        for _ in range(2):
            with pytest.raises(type(error)):
                reconciler.reconcile(POOL_KEY)
    assert read_accepted(api, "teacherpools") == ("False", reason, str(error))
    assert reasons.count(reason) == 1
    wait_s = reconciler.reconcile(POOL_KEY)
    assert wait_s is not None
    assert wait_s <= 1.0
    reconciler.reconcile(POOL_KEY)
    assert read_accepted(api, "teacherpools")[0] == "True"
    assert api.objects["gizmos", "lab", "triton"]["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotServedError("delete poddisruptionbudgets: not found"), "Valid"),
        (AccessDeniedError("delete poddisruptionbudgets: not allowed (403)"), "AccessDenied"),
    ],
)
def test_removal_that_is_refused(monkeypatch: pytest.MonkeyPatch, error: EDLError, reason: str) -> None:
    """What comes after, here the job's own deletion at the end of its time, does not wait for it."""

    def refuse(kind: ResourceType, *args: Any, **options: Any) -> bool:
        if kind.plural == "poddisruptionbudgets":
            raise error
        return delete(kind, *args, **options)

    api = make_api(ttlSecondsAfterFinished=60)
    reconciler, reasons = make_reconciler(api)
    reconciler.reconcile(KEY)
    end_pod(api, api.objects[FIRST], "success")
    delete = api.delete
    monkeypatch.setattr(api, "delete", refuse)
    for _ in range(3):
        reconciler.reconcile(KEY)
    assert read_accepted(api)[1] == reason
    assert reasons.count("AccessDenied") == (reason == "AccessDenied")
    api.now_s += 61.0
    reconciler.reconcile(KEY)
    assert api.names(ELASTIC_JOBS) == []


def test_name_that_another_has() -> None:
    """A namesake's pod hangs on a dead node: the job does not wait for it, nor takes it for its own."""
    other = make_api()
    settle(other)
    pod = other.objects[FIRST]
    pod["metadata"]["labels"]["edl.io/owner-uid"] = "u-0"
    api = make_api()
    api.put(PODS, pod)
    reconciler, reasons = make_reconciler(api)
    wait_s = reconciler.reconcile(KEY)
    assert wait_s is not None
    assert wait_s < 1.0, "nothing else asks for a look"
    assert reasons == ["Started", "NameTaken"]
    settle(api)
    assert api.names(PODS) == ["digits-worker-0-0", "digits-worker-0-1"]
    assert api.objects[FIRST]["metadata"]["labels"]["edl.io/owner-uid"] == "u-0"
    assert api.made == ["digits-worker-0-1"]


def test_away_is_never_no_pods() -> None:
    api = make_api(minReplicas=2)
    settle(api)
    before = snapshot(api)

    class Away(InMemoryApi):
        def list(self, *args: Any, **kwargs: Any) -> Any:
            raise KubernetesError("the API server does not answer")

    api.__class__ = Away
    with pytest.raises(KubernetesError):
        make_reconciler(api)[0].reconcile(KEY)
    assert snapshot(api) == before


def put_event(api: InMemoryApi, number: int, reason: str) -> None:
    metadata = {"name": f"e{number}", "namespace": "lab"}
    words = {"message": 'secret "keys" not found', "lastTimestamp": f"2026-01-31T12:00:0{number}Z"}
    uid = api.objects[FIRST]["metadata"]["uid"]
    api.put(EVENTS, {"metadata": metadata, "involvedObject": {"uid": uid}, "reason": reason, **words})


@pytest.mark.parametrize("follows", ["", "Pulling"])
def test_missing_secret_is_in_events(follows: str) -> None:
    """The pod itself says ContainerCreating, as does one that starts."""
    api = make_api()
    settle(api)
    pod = api.objects[FIRST]
    state = {"waiting": {"reason": "ContainerCreating"}}
    pod["spec"]["nodeName"] = "node1"
    pod["status"] = {"phase": "Pending", "containerStatuses": [{"name": "main", "state": state}]}
    for number, reason in enumerate(("FailedMount", follows)):
        put_event(api, number, reason)
    for age_s in (10.0, 35.0):
        api.now_s += age_s
        make_reconciler(api)[0].reconcile(KEY)
        message = find_condition(read_job(api)["status"], "Running")["message"]
        assert ('secret "keys" not found' in message) == (age_s > 30 and not follows), message


def test_events_tell_who_ended_a_pod() -> None:
    """They are asked for once: the next look is of the same moment."""
    api = make_api(minReplicas=2)
    settle(api)
    end_pod(api, api.objects[FIRST], "silent")
    put_event(api, 0, "Preempted")
    api.calls.clear()
    reconciler, _ = make_reconciler(api)
    for _ in range(2):
        reconciler.reconcile(KEY)
    assert read_job(api)["status"]["members"]["worker-0"]["lastEnd"]["cause"] == "preempted"
    assert [call for call in api.calls if call[1] == "events"] == [("list", "events", "")]


Action = tuple[str, int]
ACTIONS = st.tuples(
    st.sampled_from(["start", "oom", "error", "success", "evict", "silent", "vanish", "scale", "suspend", "wait"]),
    st.integers(0, 3),
)


def act(api: InMemoryApi, kind: ResourceType, action: Action) -> None:
    verb, number = action
    owner = api.objects.get((kind.plural, "lab", "digits"))
    names = api.names(PODS)
    if verb == "wait":
        api.now_s += 400.0 * number
    elif owner is not None and verb in ("scale", "suspend"):
        owner["spec"].update({"replicas": number + 1} if verb == "scale" else {"suspend": number % 2 == 0})
        owner["metadata"]["generation"] += 1
    elif names and verb == "vanish":
        del api.objects["pods", "lab", names[number % len(names)]]
    elif names:
        end_pod(api, api.objects["pods", "lab", names[number % len(names)]], verb)


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
                    make_reconciler(api, given)[0].reconcile(key)
            except OperatorKilled:
                pass
            api.kill_after = None
        settle(api, key, given)
        check(api, kind)
        act(api, kind, action)
    settle(api, key, given)
    return api


def check(api: InMemoryApi, kind: ResourceType) -> None:
    """No member lives twice, there are no more than the spec allows, and one teacher at a time waits for a node.

    Each condition of a job has a reason that the page on conditions explains.
    """
    for condition in api.objects[kind.plural, "lab", "digits"]["status"]["conditions"] if kind == ELASTIC_JOBS else ():
        assert f"`{condition['reason']}`" in PAGE.partition(f"### {condition['type']}\n")[2].partition("\n#")[0], (
            condition
        )
        assert condition["message"]
    pods = [obj for (plural, *_), obj in api.objects.items() if plural == "pods"]
    live = [pod for pod in pods if pod.get("status", {}).get("phase", "Pending") in ("Pending", "Running")]
    live = [pod for pod in live if "deletionTimestamp" not in pod["metadata"]]
    assert len({pod["metadata"]["name"].rpartition("-")[0] for pod in live}) == len(live) <= 4
    assert kind == ELASTIC_JOBS or sum("nodeName" not in pod["spec"] for pod in live) <= 1


@pytest.mark.parametrize(
    ("kind", "spec"),
    [(ELASTIC_JOBS, {"run": ["t.py"]}), (TEACHER_POOLS, {"serve": ["m:f"]})],
    ids=["job", "pool"],
)
@settings(max_examples=20)
@given(
    st.lists(st.tuples(ACTIONS, st.lists(st.integers(1, 12), max_size=3)), max_size=6),
    st.builds(
        Given,
        st.none() | st.integers(0, 6),
        st.none() | st.integers(0, 5),
        st.sampled_from(["", "away"]),
        st.none() | st.integers(0, 5),
    ),
    st.sampled_from(["auto", "external"]),
)
def test_killed_after_any_call(
    kind: ResourceType, spec: dict[str, Any], steps: list[tuple[Action, list[int]]], around: Given, scaling: str
) -> None:
    """Wherever operators are killed: the end is that of one that was not, and nothing is made twice."""
    spec = {**spec, "minReplicas": 1, "maxReplicas": 4, "replicas": 2, "scaling": scaling}
    killed, undisturbed = (run(kind, spec, steps, around, kill=kill) for kill in (True, False))
    assert snapshot(killed) == snapshot(undisturbed)
    assert sorted(killed.made) == sorted(undisturbed.made), "a pod was made twice, or another one"
