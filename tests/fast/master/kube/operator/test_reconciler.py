"""The reconciler over a double of the API server: what it does, in which order, and that it may be killed anywhere."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.dashboard.state.cluster.decoding import decode_workload
from edl.errors import AccessDeniedError, EDLError, InvalidObjectError, KubernetesError, QuotaExceededError
from edl.kube.objects import Object
from edl.kube.resource_types import ELASTIC_JOBS, EVENTS, POD_DISRUPTION_BUDGETS, PODS, TEACHER_POOLS, ResourceType
from edl.kube.responses import NotServedError
from edl.master.kube.conditions import Condition, find_condition, write_conditions
from edl.master.kube.members import MemberRecord, find_end
from edl.master.kube.observation import OwnerObservation
from edl.master.kube.operator.kinds import KINDS
from edl.master.kube.operator.reconciling.reconciler import Reconciler, ResourceHandling
from edl.master.kube.operator.reconciling.status_patch import build_merge_patch
from edl.master.kube.operator.reconciling.surroundings import OwnerSurroundings
from edl.master.kube.plan import EventNote, Plan, PodDeletion
from edl.master.kube.resources import ElasticJob, MemberOwner, parse_elastic_job
from edl.master.scaling.terminations import TerminationCause, find_termination_cause
from tests.fast.master.kube.operator.in_memory_api import InMemoryApi, OperatorKilled, merge

KEY = "elasticjobs/lab/digits"


class NoSurroundings:
    """Nothing but the resource and its pods."""

    def look(self, owner: MemberOwner) -> OwnerSurroundings:
        return OwnerSurroundings()

    def note_status(self, owner: MemberOwner, status: Any) -> None:
        """Nothing waits."""

    def note_gone(self, key: str) -> None:
        """Nothing was remembered."""

    def forget(self, key: str) -> None:
        """Nothing was remembered."""


def plan_members(job: ElasticJob, seen: OwnerObservation) -> Plan:
    """A small planner: as many pods as `maxReplicas`; failed pods are counted in the status, and replaced."""
    tries = {name: dict(entry) for name, entry in (job.status.get("members") or {}).items()}
    create, delete, events = [], [], []
    for index in range(job.max_replicas):
        entry = tries.setdefault(f"worker-{index}", {"try": 0, "failed": 0})
        pods = [pod for pod in seen.pods if pod.index == index]
        for pod in pods:
            if pod.finished and pod.try_number >= entry["try"]:
                entry.update({"try": pod.try_number + 1, "failed": entry["failed"] + 1})
                events.append(EventNote("Warning", "WorkerFailed", f"worker {index} failed", pod.name))
            if pod.try_number < entry["try"]:
                delete.append(PodDeletion(pod.name, pod.uid, 5, "it has failed"))
        if not any(pod.try_number == entry["try"] for pod in pods):
            create.append(make_pod(job.name, job.uid, index, entry["try"]))
    for pod in seen.pods:
        if pod.index >= job.max_replicas:
            delete.append(PodDeletion(pod.name, pod.uid, 5, "too many"))
    conditions = write_conditions(
        job.status.get("conditions", []), [Condition("Accepted", True, "Valid")], job.generation, seen.now_s
    )
    status = {"members": tries, "replicas": job.max_replicas, "conditions": conditions, "phase": "Running"}
    budget = {"metadata": {"name": job.name}, "spec": {"minAvailable": job.min_replicas}}
    return Plan(
        status,
        delete=tuple(delete),
        apply=((POD_DISRUPTION_BUDGETS, budget),),
        create=tuple(create),
        events=tuple(events),
        requeue_s=7.0,
    )


def make_pod(name: str, uid: str, index: int, number: int, phase: str = "Running") -> Object:
    return {
        "metadata": {
            "name": f"{name}-worker-{index}-{number}",
            "namespace": "lab",
            "labels": {
                "edl.io/owner-uid": uid,
                "edl.io/role": "worker",
                "edl.io/index": str(index),
                "edl.io/try": str(number),
            },
            "ownerReferences": [{"uid": uid, "controller": True}],
        },
        "spec": {"containers": [{"name": "main", "image": "i"}]},
        "status": {"phase": phase},
    }


def make_job(**spec: Any) -> Object:
    template = {"spec": {"containers": [{"name": "main", "image": "i"}]}}
    return {
        "metadata": {"name": "digits", "namespace": "lab", "uid": "u-1", "generation": 1},
        "spec": {"run": ["train.py"], "store": "consul://c", "template": template, **spec},
    }


def make_reconciler(api: InMemoryApi) -> tuple[Reconciler, list[EventNote]]:
    events: list[EventNote] = []
    kinds = {"elasticjobs": ResourceHandling(ELASTIC_JOBS, parse_elastic_job, plan_members)}
    reconciler = Reconciler(
        api, kinds, NoSurroundings(), lambda kind, resource, note: events.append(note), clock=lambda: api.now_s
    )
    return reconciler, events


def settle(api: InMemoryApi, rounds: int = 10) -> None:
    """Reconcile as new operators do, until nothing changes."""
    for _ in range(rounds):
        before = snapshot(api)
        make_reconciler(api)[0].reconcile(KEY)
        if snapshot(api) == before:
            return
    raise AssertionError("it never settles")


def reconcile_for_ever(api: InMemoryApi) -> None:
    while True:
        make_reconciler(api)[0].reconcile(KEY)


def snapshot(api: InMemoryApi) -> str:
    """What is there, without versions and uids."""
    objects = copy.deepcopy(api.objects)
    for obj in objects.values():
        for name in ("resourceVersion", "uid", "creationTimestamp"):
            obj["metadata"].pop(name, None)
    return json.dumps([[*key, obj] for key, obj in sorted(objects.items())], sort_keys=True)


def test_order_of_calls() -> None:
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job(maxReplicas=2))
    api.put(PODS, make_pod("digits", "u-1", 0, 0, phase="Failed"))
    reconciler, events = make_reconciler(api)
    assert reconciler.reconcile(KEY) == 7.0
    assert [call[:2] for call in api.calls] == [
        ("get", "elasticjobs"),
        ("list", "pods"),
        ("list", "events"),
        ("patch", "elasticjobs"),
        ("delete", "pods"),
        ("apply", "poddisruptionbudgets"),
        ("create", "pods"),
        ("create", "pods"),
    ]
    assert api.names(PODS) == ["digits-worker-0-1", "digits-worker-1-0"]
    assert [event.reason for event in events] == ["WorkerFailed"]


def test_settled_resource_costs_two_reads() -> None:
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job())
    reconciler, _ = make_reconciler(api)
    reconciler.reconcile(KEY)
    api.calls.clear()
    reconciler.reconcile(KEY)
    assert [verb for verb, *_ in api.calls] == ["get", "list"]


def test_resource_that_is_gone() -> None:
    assert make_reconciler(InMemoryApi())[0].reconcile(KEY) is None


def test_resource_in_deletion_is_left_alone() -> None:
    api = InMemoryApi()
    job = make_job()
    job["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    api.put(ELASTIC_JOBS, job)
    assert make_reconciler(api)[0].reconcile(KEY) == math.inf
    assert api.names(PODS) == []


def test_refused_spec_keeps_its_pods() -> None:
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job(maxReplicas=2))
    settle(api)
    job = api.objects["elasticjobs", "lab", "digits"]
    job["spec"]["minReplicas"] = 5
    job["metadata"]["generation"] = 2
    reconciler, events = make_reconciler(api)
    assert reconciler.reconcile(KEY) == math.inf
    accepted = find_condition(api.objects["elasticjobs", "lab", "digits"]["status"], "Accepted")
    assert (accepted["status"], accepted["reason"], accepted["observedGeneration"]) == ("False", "MinAboveMax", 2)
    assert api.names(PODS) == ["digits-worker-0-0", "digits-worker-1-0"]
    assert [event.reason for event in events] == ["MinAboveMax"]
    reconciler.reconcile(KEY)
    assert len(events) == 1, "an event that says nothing new"


def test_slip_in_an_edit_stops_nothing() -> None:
    """By the real planner: a job whose spec becomes invalid goes on by the spec before, and says what is wrong."""
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job(minReplicas=2, maxReplicas=2))
    events: list[EventNote] = []
    reconciler = Reconciler(
        api, KINDS, NoSurroundings(), lambda kind, resource, note: events.append(note), clock=lambda: api.now_s
    )
    for _ in range(3):
        reconciler.reconcile(KEY)
    assert len([key for key in api.objects if key[0] == "pods"]) == 2
    job = api.objects["elasticjobs", "lab", "digits"]
    job["spec"] = {**job["spec"], "minReplicas": 3}
    job["metadata"]["generation"] += 1
    pod = api.objects["pods", "lab", "digits-worker-0-0"]
    pod["status"] = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory"}
    for _ in range(4):
        api.now_s += 20.0
        reconciler.reconcile(KEY)
    assert ("pods", "lab", "digits-worker-0-1") in api.objects, "what ended is replaced"
    status = api.objects["elasticjobs", "lab", "digits"]["status"]
    accepted = find_condition(status, "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "MinAboveMax")
    assert "what the spec was before counts" in accepted["message"]
    assert (status["observedGeneration"], status["message"]) == (2, accepted["message"])
    assert status["formerSpec"] is True
    assert (status["phase"], status["readyReplicas"]) == ("Pending", 0)
    assert decode_workload("job", api.objects["elasticjobs", "lab", "digits"]).phase == "Pending", "it waits for pods"
    assert [note.reason for note in events].count("MinAboveMax") == 1
    writes = len(api.calls)
    reconciler.reconcile(KEY)
    assert [call for call in api.calls[writes:] if call[0] not in ("get", "list")] == [], "it is written once"
    job = api.objects["elasticjobs", "lab", "digits"]
    job["spec"]["suspend"] = True
    job["metadata"]["generation"] += 1
    for _ in range(3):
        reconciler.reconcile(KEY)
    assert api.objects["elasticjobs", "lab", "digits"]["status"]["phase"] == "Suspended"
    assert decode_workload("job", api.objects["elasticjobs", "lab", "digits"]).phase == "Suspended"
    job = api.objects["elasticjobs", "lab", "digits"]
    job["spec"].update(minReplicas=2, suspend=False)
    job["metadata"]["generation"] += 1
    reconciler.reconcile(KEY)
    status = api.objects["elasticjobs", "lab", "digits"]["status"]
    assert find_condition(status, "Accepted")["status"] == "True"
    assert "formerSpec" not in status


def test_former_spec_ends_nothing() -> None:
    """The edit that has a slip may be the one that raised the deadline, or the time after the end."""
    for field, phase in (("activeDeadlineSeconds", "Running"), ("ttlSecondsAfterFinished", "Succeeded")):
        api = InMemoryApi()
        api.put(ELASTIC_JOBS, make_job(minReplicas=1, maxReplicas=2, **{field: 100}))
        reconciler = Reconciler(api, KINDS, NoSurroundings(), lambda *args: None, clock=lambda api=api: api.now_s)
        for _ in range(3):
            reconciler.reconcile(KEY)
        if phase == "Succeeded":
            state = {"terminated": {"exitCode": 0, "finishedAt": "2001-09-09T01:46:40Z"}}
            ended = {"phase": phase, "containerStatuses": [{"name": "main", "state": state}]}
            api.objects["pods", "lab", "digits-worker-0-0"]["status"] = ended
            for _ in range(3):
                reconciler.reconcile(KEY)
            assert api.objects["elasticjobs", "lab", "digits"]["status"]["phase"] == phase
        job = api.objects["elasticjobs", "lab", "digits"]
        job["spec"] |= {field: 100_000, "minReplicas": 5}
        job["metadata"]["generation"] += 1
        api.now_s += 5000.0
        for _ in range(3):
            reconciler.reconcile(KEY)
        job = api.objects["elasticjobs", "lab", "digits"]
        assert job["status"]["phase"] != "Failed"
        job["spec"]["minReplicas"] = 1
        job["metadata"]["generation"] += 1
        reconciler.reconcile(KEY)
        assert ("elasticjobs", "lab", "digits") in api.objects


def test_ignored_edits_are_told_once() -> None:
    """Also where a slip has the condition that told them say something else."""
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job(minReplicas=1, maxReplicas=2, store="consul://c:8500"))
    events: list[EventNote] = []
    reconciler = Reconciler(
        api, KINDS, NoSurroundings(), lambda kind, resource, note: events.append(note), clock=lambda: api.now_s
    )
    for edit in ({}, {"store": "consul://d:8500"}, {"minReplicas": 5}):
        job = api.objects["elasticjobs", "lab", "digits"]
        job["spec"] |= edit
        job["metadata"]["generation"] += 1
        for _ in range(4):
            reconciler.reconcile(KEY)
    assert [note.reason for note in events].count("StoreChangeIgnored") == 1


def test_doubtful_time_decides_nothing() -> None:
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job())
    doubts = [True, True, False]
    reconciler = Reconciler(
        api,
        KINDS,
        NoSurroundings(),
        lambda *args: None,
        clock=lambda: api.now_s,
        is_time_doubtful=lambda: doubts.pop(0),
    )
    for _ in range(2):
        wait_s = reconciler.reconcile(KEY)
        assert wait_s is not None
        assert 0 < wait_s < 2
        assert not api.made
        assert not api.objects["elasticjobs", "lab", "digits"].get("status")
    reconciler.reconcile(KEY)
    assert api.made


def test_unknown_former_spec_is_rejected() -> None:
    """An operator that was started after the slip does not know the spec before, and goes on by none."""
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job(maxReplicas=2))
    settle(api)
    job = api.objects["elasticjobs", "lab", "digits"]
    job["spec"]["minReplicas"] = 5
    job["metadata"]["generation"] = 2
    job["status"].update(formerSpec=True, phase="Pending", readyReplicas=0)
    make_reconciler(api)[0].reconcile(KEY)
    job = api.objects["elasticjobs", "lab", "digits"]
    assert "formerSpec" not in job["status"]
    assert decode_workload("job", job).phase == "Rejected"


def test_changed_resource_is_read_again() -> None:
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job())

    class Meddler(InMemoryApi):
        def list(self, *args: Any, **kwargs: Any) -> Any:
            found = super().list(*args, **kwargs)
            self.patch(ELASTIC_JOBS, "digits", {"spec": {"maxReplicas": 3}}, "lab")
            return found

    api.__class__ = Meddler
    wait_s = make_reconciler(api)[0].reconcile(KEY)
    assert wait_s is not None
    assert wait_s < 1.0
    assert api.made == [], "a plan of a resource that is no more so was carried out"


def test_old_look_makes_no_pods() -> None:
    """An operator stands still between its reads and its writes, and another counts an end and removes the pod."""
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job())
    settle(api)
    api.objects.pop(("pods", "lab", "digits-worker-0-0"))  # this operator has seen that, and no other change

    class Still(InMemoryApi):
        def list(self, *args: Any, **kwargs: Any) -> Any:
            found = super().list(*args, **kwargs)
            members = {"worker-0": {"try": 1, "failed": 1}}
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
    assert api.names(PODS) == ["digits-worker-0-1"]


def test_refused_pod_is_a_condition() -> None:
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job())
    api.refuse = InvalidObjectError("pods: spec.containers[0].image: must not be empty")
    reconciler, events = make_reconciler(api)
    for _ in range(3):
        with pytest.raises(InvalidObjectError):
            reconciler.reconcile(KEY)
        status = api.objects["elasticjobs", "lab", "digits"]["status"]
        accepted = find_condition(status, "Accepted")
        assert (accepted["status"], accepted["reason"]) == ("False", "ObjectRefused")
        assert "image" in accepted["message"]
    assert [event.reason for event in events] == ["ObjectRefused"]
    writes = [call for call in api.calls if call[0] == "patch"]
    assert len(writes) <= 3, "the condition goes back and forth"
    api.refuse = None
    reconciler.reconcile(KEY)
    reconciler.reconcile(KEY)
    assert find_condition(api.objects["elasticjobs", "lab", "digits"]["status"], "Accepted")["status"] == "True"


def test_refused_pod_is_written_once() -> None:
    """By the real planner, which knows of no refusal and has the condition be True at each look."""
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job())
    api.refuse = InvalidObjectError("pods: spec.containers[0].image: must not be empty")
    reconciler = Reconciler(api, KINDS, NoSurroundings(), lambda *args: None, clock=lambda: api.now_s)
    seen = []
    for _ in range(4):
        with pytest.raises(InvalidObjectError):
            reconciler.reconcile(KEY)
        seen.append(copy.deepcopy(api.objects["elasticjobs", "lab", "digits"]))
        api.now_s += 60.0
    assert find_condition(seen[-1]["status"], "Accepted")["reason"] == "ObjectRefused"
    assert [job["metadata"]["resourceVersion"] for job in seen[1:]] == [seen[0]["metadata"]["resourceVersion"]] * 3


@pytest.mark.parametrize("call", ["read_scale", "write_scale"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotServedError("get gizmos/scale: not found"), "ObjectRefused"),
        (AccessDeniedError("gizmos/scale: not allowed (403)"), "AccessDenied"),
    ],
)
def test_scale_target_that_is_refused(monkeypatch: pytest.MonkeyPatch, call: str, error: EDLError, reason: str) -> None:
    def refuse(*args: Any) -> Object:
        raise error

    api = InMemoryApi()
    target = {"apiVersion": "example.com/v1", "kind": "Gizmo", "name": "triton"}
    spec = {"store": "consul://c", "scaleTargetRef": target, "scaling": "external", "replicas": 2, "maxReplicas": 4}
    pool = {"metadata": {"name": "digits", "namespace": "lab", "uid": "u-1", "generation": 1}, "spec": spec}
    api.put(TEACHER_POOLS, pool)
    gizmos = ResourceType("example.com", "v1", "gizmos", "Gizmo")
    api.put(gizmos, {"metadata": {"name": "triton", "namespace": "lab"}, "spec": {"replicas": 1}})
    events: list[EventNote] = []
    reconciler = Reconciler(api, KINDS, NoSurroundings(), lambda kind, resource, note: events.append(note))
    with monkeypatch.context() as patched:
        patched.setattr(api, call, refuse)
        for _ in range(2):
            with pytest.raises(type(error)):
                reconciler.reconcile("teacherpools/lab/digits")
    accepted = find_condition(api.objects["teacherpools", "lab", "digits"]["status"], "Accepted")
    assert (accepted["status"], accepted["reason"], accepted["message"]) == ("False", reason, str(error))
    assert [event.reason for event in events].count(reason) == 1
    wait_s = reconciler.reconcile("teacherpools/lab/digits")
    assert wait_s is not None
    assert wait_s < 1.0
    reconciler.reconcile("teacherpools/lab/digits")
    status = api.objects["teacherpools", "lab", "digits"]["status"]
    assert find_condition(status, "Accepted")["status"] == "True"
    assert api.objects["gizmos", "lab", "triton"]["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    "error", [NotServedError("delete podgroups: not found"), AccessDeniedError("delete podgroups: not allowed (403)")]
)
def test_removal_that_is_refused(monkeypatch: pytest.MonkeyPatch, error: EDLError) -> None:
    """What comes after, here the job's own deletion at the end of its time, does not wait for it."""

    def refuse(*args: Any) -> bool:
        raise error

    def plan(job: ElasticJob, observation: OwnerObservation) -> Plan:
        conditions = [Condition("Accepted", True, "Valid")]
        status = {"conditions": write_conditions([], conditions, 1, 0.0)}
        due = observation.now_s > 1_000_000.0
        return Plan(status, remove=((POD_DISRUPTION_BUDGETS, "digits"),), delete_owner=due)

    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job())
    events: list[EventNote] = []
    kinds = {"elasticjobs": ResourceHandling(ELASTIC_JOBS, parse_elastic_job, plan)}
    reconciler = Reconciler(
        api, kinds, NoSurroundings(), lambda kind, resource, note: events.append(note), clock=lambda: api.now_s
    )
    with monkeypatch.context() as patched:
        patched.setattr(api, "delete", lambda kind, *args, **options: refuse())
        for _ in range(3):
            reconciler.reconcile(KEY)
    denied = isinstance(error, AccessDeniedError)
    accepted = find_condition(api.objects["elasticjobs", "lab", "digits"]["status"], "Accepted")
    assert (accepted["status"], accepted["reason"]) == (("False", "AccessDenied") if denied else ("True", "Valid"))
    assert [event.reason for event in events] == (["AccessDenied"] if denied else [])
    api.now_s += 60.0
    reconciler.reconcile(KEY)
    assert api.names(ELASTIC_JOBS) == []


def test_full_quota_is_a_condition() -> None:
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job())
    api.refuse = QuotaExceededError('pods "digits-worker-0-0" is forbidden: exceeded quota: gpus')
    reconciler, events = make_reconciler(api)
    for _ in range(2):
        with pytest.raises(QuotaExceededError):
            reconciler.reconcile(KEY)
        accepted = find_condition(api.objects["elasticjobs", "lab", "digits"]["status"], "Accepted")
        assert (accepted["status"], accepted["reason"]) == ("False", "QuotaExceeded")
        assert "exceeded quota: gpus" in accepted["message"]
    assert [event.reason for event in events] == ["QuotaExceeded"]
    api.refuse = None
    reconciler.reconcile(KEY)
    reconciler.reconcile(KEY)
    assert find_condition(api.objects["elasticjobs", "lab", "digits"]["status"], "Accepted")["status"] == "True"


def test_name_that_another_has() -> None:
    """A namesake's pod hangs on a dead node: the job does not wait for it, nor takes it for its own."""
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job())
    api.put(PODS, make_pod("digits", "u-0", 0, 0))
    reconciler, events = make_reconciler(api)
    wait_s = reconciler.reconcile(KEY)
    assert wait_s is not None
    assert wait_s < 1.0, "nothing else asks for a look"
    assert [event.reason for event in events] == ["NameTaken"]
    settle(api)
    assert api.names(PODS) == ["digits-worker-0-0", "digits-worker-0-1"]
    assert api.objects["pods", "lab", "digits-worker-0-0"]["metadata"]["labels"]["edl.io/owner-uid"] == "u-0"
    assert api.made == ["digits-worker-0-1"]


def test_events_survive_what_fails_after() -> None:
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job())
    api.put(PODS, make_pod("digits", "u-1", 0, 0, phase="Failed"))
    api.refuse = KubernetesError("the API server does not answer")
    reconciler, events = make_reconciler(api)
    for _ in range(2):
        with pytest.raises(KubernetesError):
            reconciler.reconcile(KEY)
    api.refuse = None
    reconciler.reconcile(KEY)
    assert [event.reason for event in events] == ["WorkerFailed"]


def test_away_is_never_no_pods() -> None:
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job(maxReplicas=2))
    settle(api)
    before = snapshot(api)

    class Away(InMemoryApi):
        def list(self, *args: Any, **kwargs: Any) -> Any:
            raise KubernetesError("the API server does not answer")

    api.__class__ = Away
    with pytest.raises(KubernetesError):
        make_reconciler(api)[0].reconcile(KEY)
    assert snapshot(api) == before


POD = st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from(["Running", "Failed", "Pending"]))


@given(st.lists(POD, max_size=6), st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(1, 14), max_size=4))
def test_killed_after_any_call(
    pods: list[tuple[int, int, str]], replicas: int, known_try: int, kills: list[int]
) -> None:
    """Wherever operators are killed: the state at the end is that of one that was not, and nothing is made twice."""

    def start() -> InMemoryApi:
        api = InMemoryApi()
        job = make_job(maxReplicas=replicas)
        job["status"] = {"members": {"worker-0": {"try": known_try, "failed": known_try}}}
        api.put(ELASTIC_JOBS, job)
        for index, number, phase in pods:
            api.put(PODS, make_pod("digits", "u-1", index, number, phase))
        return api

    undisturbed = start()
    settle(undisturbed)
    api = start()
    for kill in kills:
        api.calls.clear()
        api.kill_after = kill
        with pytest.raises(OperatorKilled):
            reconcile_for_ever(api)
    api.kill_after = None
    settle(api)
    assert snapshot(api) == snapshot(undisturbed)
    assert sorted(api.made) == sorted(undisturbed.made), "something was made twice, or not at all"


@given(st.integers(1, 12))
def test_two_operators_at_once(switch: int) -> None:
    """A second operator that does all between two calls of the first."""
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job(maxReplicas=3))
    api.put(PODS, make_pod("digits", "u-1", 1, 0, "Failed"))
    undisturbed = copy.deepcopy(api)
    settle(undisturbed)

    class Interleaved(InMemoryApi):
        busy = False

        def _count(self, *args: Any) -> None:
            super()._count(*args)
            if not self.busy and len(self.calls) == switch:
                self.busy = True
                make_reconciler(self)[0].reconcile(KEY)
                self.busy = False

    api.__class__ = Interleaved
    make_reconciler(api)[0].reconcile(KEY)
    settle(api)
    assert snapshot(api) == snapshot(undisturbed)
    assert sorted(api.made) == sorted(undisturbed.made)


VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from(["a", "b", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=8,
)
STATUS = st.dictionaries(st.sampled_from("pqr"), VALUE, max_size=3)


@given(STATUS, STATUS)
def test_merge_patch_makes_the_status(before: dict[str, Any], after: dict[str, Any]) -> None:
    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: clean(inner) for name, inner in value.items() if inner is not None and inner != ""}
        return [clean(inner) for inner in value] if isinstance(value, list) else value

    before = clean(before)
    patch = build_merge_patch(before, after)
    assert json.dumps(merge(before, patch), sort_keys=True) == json.dumps(clean(after), sort_keys=True)
    assert (patch == {}) == (json.dumps(before, sort_keys=True) == json.dumps(clean(after), sort_keys=True))


@pytest.mark.parametrize(("follows", "expected"), [("", "FailedMount"), ("Pulling", "ContainerCreating")])
def test_missing_secret_is_in_events(follows: str, expected: str) -> None:
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job())
    pod = make_pod("digits", "u-1", 0, 0, "Pending")
    pod["metadata"]["uid"] = "p-1"
    pod["spec"]["nodeName"] = "node1"
    state = {"waiting": {"reason": "ContainerCreating"}}
    pod["status"]["containerStatuses"] = [{"name": "main", "state": state}]
    api.put(PODS, pod)
    for second, reason in enumerate(("FailedMount", follows)):
        event = {
            "reason": reason,
            "message": 'secret "keys" not found',
            "lastTimestamp": f"2026-01-31T12:00:0{second}Z",
        }
        api.put(
            EVENTS, {"metadata": {"name": f"e{second}", "namespace": "lab"}, "involvedObject": {"uid": "p-1"}, **event}
        )
    seen: list[OwnerObservation] = []

    def plan(job: ElasticJob, observation: OwnerObservation) -> Plan:
        seen.append(observation)
        return Plan({"phase": "Running"})

    kinds = {"elasticjobs": ResourceHandling(ELASTIC_JOBS, parse_elastic_job, plan)}
    for age_s in (10.0, 130.0):
        now_s = api.now_s + age_s
        Reconciler(api, kinds, NoSurroundings(), lambda *args: None, clock=lambda now_s=now_s: now_s).reconcile(KEY)
    assert [item.pods[0].waiting for item in seen] == ["ContainerCreating", expected]
    late = seen[1].pods[0]
    report = find_end(MemberRecord(), late, seen[1].now_s)
    assert (report is not None) == (not follows)
    if report is not None:
        assert report.message == late.waiting_message == 'secret "keys" not found'
        assert find_termination_cause(report).cause is TerminationCause.LAUNCH_FAILED


def test_evidence_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    api = InMemoryApi()
    api.put(ELASTIC_JOBS, make_job())
    pod = make_pod("digits", "u-1", 0, 0)
    pod["metadata"].update({"uid": "p-1", "deletionTimestamp": "2026-01-31T12:00:00Z"})
    api.put(PODS, pod)
    api.put(
        EVENTS,
        {
            "metadata": {"name": "e", "namespace": "lab"},
            "involvedObject": {"uid": "p-1"},
            "reason": "Preempted",
        },
    )
    seen = []

    def plan(job: ElasticJob, observation: OwnerObservation) -> Plan:
        seen.append(observation.pods[0].termination.events)
        return Plan({"phase": "Running"})

    kinds = {"elasticjobs": ResourceHandling(ELASTIC_JOBS, parse_elastic_job, plan)}
    reconciler = Reconciler(api, kinds, NoSurroundings(), lambda *args: None)
    reconciler.reconcile(KEY)
    reconciler.reconcile(KEY)
    assert seen == [("Preempted",), ("Preempted",)]
    assert [call for call in api.calls if call[1] == "events"] == [("list", "events", "")]
