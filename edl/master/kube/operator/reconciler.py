"""`Reconciler`: reads a resource and its pods live, lets its planner decide, and carries out the plan."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from edl.errors import AccessDeniedError, ConflictError, InvalidObjectError, QuotaExceededError
from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import ELASTIC_JOBS, PODS, TEACHER_POOLS, ResourceType
from edl.kube.responses import NotServedError
from edl.master.kube.jobs import plan_job
from edl.master.kube.members.pod_policy import PodPolicy
from edl.master.kube.members.pods import (
    INDEX_LABEL,
    OWNER_UID_LABEL,
    ROLE_LABEL,
    TRY_LABEL,
    MemberPod,
    get_mapping,
    read_member_pods,
)
from edl.master.kube.observation import (
    Condition,
    EventNote,
    OwnerObservation,
    Plan,
    ScaleTarget,
    find_condition,
    write_conditions,
)
from edl.master.kube.operator.events import PodEvidence
from edl.master.kube.operator.surroundings import LiveSurroundings
from edl.master.kube.pools import plan_pool
from edl.master.kube.resources import (
    ElasticJob,
    MemberOwner,
    SpecProblem,
    TeacherPool,
    parse_elastic_job,
    parse_teacher_pool,
)

logger = logging.getLogger(__name__)


def build_merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> Object:
    """Return the merge patch from `before` to `after`; `after` has no nulls or empty strings (see `keep_present`)."""
    patch: Object = {name: None for name, old in before.items() if old is not None and name not in after}
    for name, new in after.items():
        old = before.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if inner := build_merge_patch(old, new):
                patch[name] = inner
        elif _encode(old) != _encode(new):  # which distinguishes 1 from true
            patch[name] = new
    return patch


def keep_present(value: Any) -> Any:
    """Return JSON without nulls, which a merge patch would treat as removals, and without empty strings.

    Kubernetes 1.20 treats an empty string as null, and refuses it if the schema requires a string.
    """
    if isinstance(value, Mapping):
        return {name: keep_present(inner) for name, inner in value.items() if inner is not None and inner != ""}
    if isinstance(value, (list, tuple)):
        return [keep_present(inner) for inner in value]
    return value


def _encode(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def set_condition(
    status: Mapping[str, Any], condition: Condition, generation: int, now_s: float, before: Mapping[str, Any]
) -> Object:
    """Return a status with a condition; if unchanged, the condition keeps its transition time from `before`."""
    written = write_conditions(_list_conditions(before), [condition], generation, now_s)
    others = [item for item in _list_conditions(status) if item.get("type") != condition.type]
    return {**status, "conditions": [*written, *others]}


def _list_conditions(status: Mapping[str, Any]) -> list[Object]:
    found = status.get("conditions")
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


_PREVIOUS_SPEC_APPLIES: Final = "until you correct this, the previous spec applies"
_NO_SPEC_APPLIES: Final = "until you correct this, no pod is created or replaced"
_ENDED: Final = ("Succeeded", "Failed")
_CONTINUED: Final = ("Scheduled", "Updated")


def write_refused_status(
    kind: ResourceType, resource: Mapping[str, Any], problem: SpecProblem, pods: Iterable[MemberPod], now_s: float
) -> Object:
    """Return the status of a refused resource whose members nobody replaces: what can be seen without a valid spec.

    Conditions that need the spec are omitted, which in Kubernetes means Unknown, except those from which a corrected
    resource continues: how long it has waited, and an update. A job that has ended keeps them all.
    """
    before, generation = get_mapping(resource, "status"), resource["metadata"].get("generation", 0)
    accepted = Condition("Accepted", False, problem.reason, problem.message)
    status = {**before, "observedGeneration": generation, "message": problem.message}
    if before.get("phase") in _ENDED:
        return set_condition(status, accepted, generation, now_s, before)
    role, works = ("worker", "Running") if kind == ELASTIC_JOBS else ("teacher", "Ready")
    present = [pod for pod in pods if pod.role == role]
    members = [pod for pod in present if pod.live]
    ready = sum(pod.ready for pod in members)
    for name in ("replicas", "readyReplicas", "scheduledReplicas", "borrowed"):
        status.pop(name, None)
    if members or not get_mapping(get_mapping(resource, "spec"), "scaleTargetRef"):
        status |= {"replicas": len(members), "readyReplicas": ready}
        status["message"] += f"; {_NO_SPEC_APPLIES}"
        text = f"{ready} of {len(members)} {role}s are ready; lost {role}s are not replaced until Accepted is True"
        state = Condition(works, None if ready else False, "NotAccepted", text)
    else:
        state = Condition(works, None, "NotAccepted", f"how many {role}s are ready is unknown until Accepted is True")
    kept = [
        each for each in _list_conditions(before) if each.get("type") in _CONTINUED and each.get("status") == "False"
    ]
    written = write_conditions(_list_conditions(before), [accepted, state], generation, now_s)
    return {
        **status,
        "conditions": [*written, *kept],
        "phase": "Running" if ready else "Pending" if present else "Rejected",
    }


_KEPT_S: Final = 900.0  # then an object is rewritten, which restores a disruption budget that was removed by hand


SCALED_BY: Final = "edl.io/scaled-by"
"""Annotation by which an object's owner allows a pool, given by name, to scale the object. Without it, the author of a
pool could scale anyone's objects with the operator's permissions."""
_PLURALS: Final = {"Deployment": "deployments", "StatefulSet": "statefulsets", "ReplicaSet": "replicasets"}
"""Plurals of scalable kinds. For other kinds an "s" is added, as in most CRDs."""


def find_scale_target(api: KubeClient, pool: TeacherPool) -> ScaleTarget | None:
    """Read the object that a pool scales, if any; InvalidObjectError if the pool may not scale it."""
    target, namespace = pool.scale_target_ref, pool.namespace
    if target is None:
        return None
    group, _, version = target.api_version.rpartition("/")
    kind = ResourceType(group, version, _PLURALS.get(target.kind, f"{target.kind.lower()}s"), target.kind)
    found = api.get(kind, target.name, namespace)
    if found is None:
        return None
    metadata = found["metadata"]
    if (metadata.get("labels") or {}).get("app.kubernetes.io/name") == "edl":
        raise InvalidObjectError(f"{target.kind} {target.name} is part of EDL itself, which pools cannot scale")
    if (metadata.get("annotations") or {}).get(SCALED_BY) != pool.name:
        raise InvalidObjectError(
            f"{target.kind} {target.name} does not let pool {pool.name} scale it: have its owner annotate it"
            f" with {SCALED_BY}={pool.name}"
        )
    scale = api.get(kind, target.name, namespace, subresource="scale")
    if scale is None:
        return None
    replicas, there = (scale.get("spec") or {}).get("replicas", 0), (scale.get("status") or {}).get("replicas", 0)
    if not all(isinstance(count, int) and count >= 0 for count in (replicas, there)):
        raise InvalidObjectError(
            f"{target.kind} {target.name}: its /scale has {replicas!r} replicas in spec and {there!r} in status;"
            " expected whole numbers"
        )
    return ScaleTarget(kind, target.name, replicas, there)


_CONFLICT_RETRY_S: Final = 0.2  # before rereading a resource that changed since it was read
_MOST_WARNED: Final = 1000
"""Maximum number of warnings that are remembered, so that each is logged only once. The warnings are about pods that
have a resource's label but are not members."""
_REFUSALS: Final[Mapping[type[Exception], str]] = {
    InvalidObjectError: "ObjectRefused",
    AccessDeniedError: "AccessDenied",
    QuotaExceededError: "QuotaExceeded",
}
"""Reasons for the condition `Accepted` if the API server accepts the spec, but refuses an object built from that
spec."""


def _describe_refusal(exc: InvalidObjectError | AccessDeniedError | QuotaExceededError) -> SpecProblem:
    return SpecProblem(next(reason for error, reason in _REFUSALS.items() if isinstance(exc, error)), str(exc))


class ResourceHandling(NamedTuple):
    """How resources of a kind are read and planned; the second argument of `parse` is the default store."""

    type: ResourceType
    parse: Callable[[Mapping[str, Any], str], MemberOwner | tuple[SpecProblem, ...]]
    plan: Callable[[Any, OwnerObservation], Plan]


KINDS: Final[Mapping[str, ResourceHandling]] = {
    ELASTIC_JOBS.plural: ResourceHandling(ELASTIC_JOBS, parse_elastic_job, plan_job),
    TEACHER_POOLS.plural: ResourceHandling(TEACHER_POOLS, parse_teacher_pool, plan_pool),
}


class Reconciler:
    """Brings one resource at a time to its desired state. Thread-safe for different keys.

    It can be killed at any point. Outcomes of pods are recorded before the pods are deleted, by a write that fails if
    the resource has changed since it was read. Names of pods are derived from the status. Only pods with the observed
    uid are deleted, and an existing object of the resource counts as created.

    `clock` returns the Unix time of the API server, which timestamps pods.
    """

    def __init__(
        self,
        api: KubeClient,
        surroundings: LiveSurroundings,
        record_event: Callable[[ResourceType, Mapping[str, Any], EventNote], None],
        *,
        default_store: str = "",
        policy: PodPolicy | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._surroundings = surroundings
        self._record_event = record_event
        self._default_store = default_store
        self._policy = policy or PodPolicy()
        self._clock = clock
        self._evidence = PodEvidence(api)
        self._done: dict[str, dict[tuple[str, str, str], tuple[str, float]]] = {}  # written objects of each key
        self._accepted: dict[str, Object] = {}  # the last resource of each key whose spec was valid
        self._refusals: dict[str, tuple[str, int, SpecProblem]] = {}
        self._warned: set[str] = set()
        self._statuses: dict[str, str] = {}

    def is_own_status(self, key: str, status: Mapping[str, Any]) -> bool:
        """Whether a resource's status is the one that this operator last wrote or found."""
        return self._statuses.get(key) == _encode(keep_present(status))

    def reconcile(self, key: str) -> float | None:
        """Read a resource and its pods, and carry out its plan; if this raises an EDLError, reconcile again.

        Returns:
            Seconds until the next reconciliation, even if nothing changes; infinite for never; None if the resource is
            gone.
        """
        plural, namespace, name = key.split("/")
        kind = KINDS[plural]
        resource = self._api.get(kind.type, name, namespace)
        if resource is None:
            self.forget(key)
            return None
        if resource["metadata"].get("deletionTimestamp"):
            return math.inf  # the garbage collector deletes its pods, by their owner reference
        parsed = kind.parse(resource, self._default_store)
        problems = parsed if isinstance(parsed, tuple) else self._policy.find_problems(parsed)
        former = self._parse_former(kind, key, resource) if problems else None
        if former is None and (isinstance(parsed, tuple) or problems):
            problem = SpecProblem(problems[0].reason, "; ".join(each.message for each in problems))
            return self._refuse(kind, resource, problem)
        owner = parsed if former is None else former
        assert not isinstance(owner, tuple)
        if former is None:
            self._accepted[key] = resource
        try:
            target = find_scale_target(self._api, owner) if isinstance(owner, TeacherPool) else None
        except (InvalidObjectError, AccessDeniedError) as exc:
            self._refuse(kind, resource, _describe_refusal(exc))
            raise
        plan = kind.plan(owner, self._observe(owner, target))
        if problems:
            plan = self._note_problems(owner, plan, problems)
        return self._carry_out(resource, owner, plan)

    def forget(self, key: str) -> None:
        remembered: tuple[dict[str, Any], ...] = (self._done, self._accepted, self._refusals, self._statuses)
        for known in remembered:
            known.pop(key, None)
        self._surroundings.note_gone(key)

    def _parse_former(self, kind: ResourceHandling, key: str, resource: Object) -> MemberOwner | None:
        """Return a resource with its last valid spec, so that its status and `suspend` still work; None if unknown."""
        former, now = self._accepted.get(key), resource.get("spec")
        if former is None or former["metadata"].get("uid") != resource["metadata"].get("uid"):
            return None
        spec = dict(former["spec"])
        suspend = now.get("suspend", False) if isinstance(now, Mapping) else None
        if isinstance(suspend, bool):
            spec["suspend"] = suspend
        owner = kind.parse({**resource, "spec": spec}, self._default_store)
        if isinstance(owner, tuple):
            return None
        if isinstance(owner, ElasticJob):
            # The edit may have raised these limits, so they must not end or delete the job.
            return replace(owner, active_deadline_s=None, ttl_seconds_after_finished=None)
        return owner

    def _note_problems(self, owner: MemberOwner, plan: Plan, problems: tuple[SpecProblem, ...]) -> Plan:
        message = f"{'; '.join(problem.message for problem in problems)}; {_PREVIOUS_SPEC_APPLIES}"
        problem = SpecProblem(problems[0].reason, message)
        status, events = self._with_problem(plan.status, problem, owner), plan.events
        if owner.status.get("observedGeneration") != owner.generation:
            events = (*events, EventNote("Warning", problem.reason, message))
        return replace(plan, status={**status, "observedGeneration": owner.generation}, events=events)

    def _observe(self, owner: MemberOwner, target: ScaleTarget | None) -> OwnerObservation:
        listed = self._list_pods(owner.namespace, owner.uid)
        evidence = self._evidence.collect(listed, owner.namespace, self._clock())
        pods, reasons = read_member_pods(listed, owner.uid, evidence)
        for reason in reasons:
            if reason not in self._warned and len(self._warned) < _MOST_WARNED:
                self._warned.add(reason)
                logger.warning("%s: %s", owner.key, reason)
        strangers = frozenset(str(pod["metadata"].get("uid")) for pod in listed) - {pod.uid for pod in pods}
        known = self._surroundings.look(owner, pods)
        return replace(known, now_s=self._clock(), pods=pods, strangers=strangers, target=target)

    def _list_pods(self, namespace: str, uid: str) -> list[Object]:
        return self._api.list(PODS, namespace, label_selector=f"{OWNER_UID_LABEL}={uid}").items

    def _refuse(self, kind: ResourceHandling, resource: Object, problem: SpecProblem) -> float:
        namespace, uid = resource["metadata"]["namespace"], resource["metadata"]["uid"]
        pods, _ = read_member_pods(self._list_pods(namespace, uid), uid)
        status = write_refused_status(kind.type, resource, problem, pods, self._clock())
        written = self._write_status(kind.type, resource, status)
        if written is None:
            return _CONFLICT_RETRY_S
        known = find_condition(get_mapping(resource, "status"), "Accepted")
        if written and (known.get("reason"), known.get("message")) != (problem.reason, problem.message):
            self._record_event(kind.type, resource, EventNote("Warning", problem.reason, status["message"]))
        return math.inf

    def _carry_out(self, resource: Object, owner: MemberOwner, plan: Plan) -> float:
        kind = owner.resource_type
        plan = self._note_refusal(owner, plan)
        self._surroundings.note_status(owner, plan.status)
        written = self._write_status(kind, resource, plan.status)
        if written is None:
            return _CONFLICT_RETRY_S  # the resource has changed since the plan was made
        if plan.create and not written and self._has_changed(kind, resource):
            return _CONFLICT_RETRY_S  # no write has shown that the observation is stale, as after a pause
        if written:
            self._show(kind, resource, plan.events)  # they describe changes of the status, which are not found again
        denied = self._take_away(owner, plan)
        if denied is not None:
            self._remember_refusal(resource, owner, denied)
        try:
            taken = self._make(owner, plan)
            if plan.scale is not None:
                target, replicas = plan.scale
                spec = {"spec": {"replicas": replicas}}
                self._api.patch(target.type, target.name, spec, owner.namespace, subresource="scale")
        except (InvalidObjectError, AccessDeniedError, QuotaExceededError) as exc:
            self._remember_refusal(resource, owner, exc)
            raise
        was_refused = denied is None and self._refusals.pop(owner.key, None) is not None
        if not written:
            self._show(kind, resource, plan.events)
        if plan.delete_owner:
            self._api.delete(kind, owner.name, owner.namespace, uid=owner.uid)
        if taken:
            self._skip_tries(owner, taken)
            return _CONFLICT_RETRY_S
        if was_refused:
            return _CONFLICT_RETRY_S  # the status still says so
        return math.inf if plan.requeue_s is None else plan.requeue_s

    def _has_changed(self, kind: ResourceType, resource: Object) -> bool:
        read = resource["metadata"]
        now = self._api.get(kind, read["name"], read["namespace"])
        return now is None or now["metadata"].get("resourceVersion") != read["resourceVersion"]

    def _show(self, kind: ResourceType, resource: Object, notes: Sequence[EventNote]) -> None:
        for note in notes:
            self._record_event(kind, resource, note)

    def _take_away(self, owner: MemberOwner, plan: Plan) -> AccessDeniedError | None:
        """Delete the plan's objects; return the error if it is forbidden to delete an object other than a pod."""
        denied = None
        for pod in plan.delete:
            try:
                self._api.delete(PODS, pod.name, owner.namespace, uid=pod.uid, grace_period_s=pod.grace_period_s)
            except ConflictError:
                continue  # a different pod has that name by now
            logger.info("%s: pod %s deleted: %s", owner.key, pod.name, pod.reason)
        for kind, name in plan.remove:
            if not self._is_done(owner, kind, name, ""):
                try:
                    self._api.delete(kind, name, owner.namespace)
                except NotServedError:
                    pass  # a cluster without the kind has no such object
                except AccessDeniedError as exc:
                    denied = exc
                    continue
                self._note_done(owner, kind, name, "")
        return denied

    def _make(self, owner: MemberOwner, plan: Plan) -> list[Object]:
        """Create the plan's objects; return the pods whose names are already taken."""
        taken = []
        for kind, obj in plan.apply:
            name, text = obj["metadata"]["name"], json.dumps(obj, sort_keys=True)
            if not self._is_done(owner, kind, name, text):
                self._api.apply(kind, obj, owner.namespace)
                self._note_done(owner, kind, name, text)
        for obj in plan.create:
            try:
                self._api.create(PODS, obj, owner.namespace)
            except ConflictError:
                if not self._has_pod(owner, obj["metadata"]["name"]):
                    taken.append(obj)
                continue  # created before: by this operator before it was killed, or by a second one
            logger.info("%s: pod %s created", owner.key, obj["metadata"]["name"])
        return taken

    def _is_done(self, owner: MemberOwner, kind: ResourceType, name: str, text: str) -> bool:
        """Whether an object other than a pod was already written, so that nothing is written at rest."""
        before, written_s = self._done.get(owner.key, {}).get((owner.uid, kind.plural, name), (None, 0.0))
        return before == text and time.monotonic() - written_s <= _KEPT_S

    def _note_done(self, owner: MemberOwner, kind: ResourceType, name: str, text: str) -> None:
        self._done.setdefault(owner.key, {})[owner.uid, kind.plural, name] = text, time.monotonic()

    def _has_pod(self, owner: MemberOwner, name: str) -> bool:
        """Whether a pod is the owner's, not an earlier owner's of that name; ConflictError if the pod is gone."""
        found = self._api.list(PODS, owner.namespace, field_selector=f"metadata.name={name}").items
        if not found:
            raise ConflictError(f"{owner.key}: pod {name} existed, and is gone")
        return bool(read_member_pods(found, owner.uid)[0])

    def _skip_tries(self, owner: MemberOwner, pods: Sequence[Object]) -> None:
        """Skip an attempt number of the members, so that their next pods have a new name."""
        fresh = self._reread(owner)
        if fresh is None:
            return
        status = fresh.get("status") or {}
        members, skipped = dict(status.get("members") or {}), []
        for pod in pods:
            labels = pod["metadata"]["labels"]
            key, number = f"{labels[ROLE_LABEL]}-{labels[INDEX_LABEL]}", int(labels[TRY_LABEL])
            record = members.get(key)
            if isinstance(record, Mapping) and record.get("try") == number:
                members[key] = {**record, "try": number + 1}
                skipped.append(pod["metadata"]["name"])
        if self._write_status(owner.resource_type, fresh, {**status, "members": members}):
            for name in skipped:
                message = (
                    f"a pod named {name} exists, but does not belong to this resource: the next attempt's name is used"
                )
                logger.warning("%s: %s", owner.key, message)
                self._record_event(owner.resource_type, fresh, EventNote("Warning", "NameTaken", message, name))

    def _reread(self, owner: MemberOwner) -> Object | None:
        fresh = self._api.get(owner.resource_type, owner.name, owner.namespace)
        return fresh if fresh is not None and fresh["metadata"].get("uid") == owner.uid else None

    def _write_status(self, kind: ResourceType, resource: Object, status: Mapping[str, Any]) -> bool | None:
        """Write a status if it differs; return whether it differs, or None if the resource has changed or is gone."""
        metadata = resource["metadata"]
        before = resource.get("status")
        status = keep_present(status)
        patch = build_merge_patch(before if isinstance(before, dict) else {}, status)
        # Before it is written: the watch may see it before this call returns.
        key = f"{kind.plural}/{metadata['namespace']}/{metadata['name']}"
        self._statuses[key] = _encode(status)
        if not patch:
            return False
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": patch}
        try:
            written = self._api.patch(kind, metadata["name"], body, metadata["namespace"], subresource="status")
        except ConflictError:
            return None
        return None if written is None else True

    def _note_refusal(self, owner: MemberOwner, plan: Plan) -> Plan:
        """Keep the condition about a refused object until the API server accepts the object or the spec changes."""
        uid, generation, problem = self._refusals.get(owner.key, ("", 0, None))
        if problem is None or (uid, generation) != (owner.uid, owner.generation):
            return plan
        return replace(plan, status=self._with_problem(plan.status, problem, owner))

    def _remember_refusal(
        self,
        resource: Object,
        owner: MemberOwner,
        exc: InvalidObjectError | AccessDeniedError | QuotaExceededError,
    ) -> None:
        problem = _describe_refusal(exc)
        known = self._refusals.get(owner.key)
        self._refusals[owner.key] = (owner.uid, owner.generation, problem)
        if known is None or known[2] != problem:
            self._record_event(owner.resource_type, resource, EventNote("Warning", problem.reason, problem.message))
            if (fresh := self._reread(owner)) is not None:
                status = self._with_problem(fresh.get("status") or {}, problem, owner)
                self._write_status(owner.resource_type, fresh, status)

    def _with_problem(self, status: Mapping[str, Any], problem: SpecProblem, owner: MemberOwner) -> Object:
        condition = Condition("Accepted", False, problem.reason, problem.message)
        written = set_condition(status, condition, owner.generation, self._clock(), owner.status)
        return {**written, "message": problem.message}
