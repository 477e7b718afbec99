"""The input and output of a planner: an `OwnerObservation`, and a `Plan` with its conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edl.kube.objects import Object, format_time
from edl.kube.resource_types import ResourceType
from edl.master.kube.capacity import ClusterCapacity
from edl.master.kube.members.pods import MemberPod


@dataclass(frozen=True)
class Condition:
    """A condition of a resource; `status` is None if it is unknown."""

    type: str
    status: bool | None
    reason: str
    message: str = ""


def write_conditions(
    before: Sequence[Mapping[str, Any]], conditions: Sequence[Condition], generation: int, now_s: float
) -> list[dict[str, Any]]:
    """Return `conditions` for a status; unchanged ones keep their transition times. Others in `before` are dropped."""
    former = {str(found.get("type")): found for found in before if isinstance(found, Mapping)}
    written = []
    for condition in conditions:
        status = "Unknown" if condition.status is None else str(condition.status)
        previous = former.get(condition.type, {})
        since = previous.get("lastTransitionTime") if previous.get("status") == status else None
        written.append(
            {
                "type": condition.type,
                "status": status,
                "reason": condition.reason,
                # Never empty: Kubernetes 1.20 turns an empty string in a new status into null.
                "message": condition.message or condition.reason,
                "lastTransitionTime": since or format_time(now_s),
                "observedGeneration": generation,
            }
        )
    return written


def find_condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return a condition of a status; empty if it is missing."""
    conditions = status.get("conditions")
    for found in conditions if isinstance(conditions, list) else []:
        if isinstance(found, Mapping) and found.get("type") == kind:
            return found
    return {}


@dataclass(frozen=True)
class PodDeletion:
    """A pod to delete, unless its uid has changed. `grace_period_s` is None for the pod's own period."""

    name: str
    uid: str
    grace_period_s: int | None
    reason: str


@dataclass(frozen=True)
class EventNote:
    """An event for `kubectl describe`; repeated events are counted. `pod` is a pod that the event also concerns."""

    type: str
    reason: str
    message: str
    pod: str = ""


def describe_store(store: StoreAnswer) -> Condition:
    """Return the condition `Accepted` of a valid spec; its store may still be refused or unreachable."""
    if store.refused:
        return Condition("Accepted", True, "StoreNotAllowed", store.refused)
    if store.unreachable:
        return Condition("Accepted", True, "StoreUnreachable", store.unreachable)
    return Condition("Accepted", True, "Valid", "the spec is valid")


@dataclass(frozen=True)
class ScaleTarget:
    """The Deployment or similar object that a pool scales. Its `/scale` does not say how many replicas are ready."""

    type: ResourceType
    name: str
    replicas: int
    ready: int


@dataclass(frozen=True)
class Plan:
    """What to do about a resource, in the order of the attributes.

    `status` comes first: a pod's outcome is recorded before the pod is deleted. So even if the operator is killed in
    between, it is known why the pod ended, and the pod's number is not reused.

    Attributes:
        status: the whole status; None removes a field.
        remove: other objects to delete: type and name.
        apply: other objects to write by server-side apply.
        create: pods to create; an existing pod of the resource with that name is fine.
        scale: the object of the pool's `scaleTargetRef`, and its new replicas; None leaves them unchanged.
        delete_owner: delete the resource itself, `ttlSecondsAfterFinished` after its end.
        requeue_s: seconds until the next reconciliation, even if nothing changes; None for never.
    """

    status: Object
    delete: tuple[PodDeletion, ...] = ()
    remove: tuple[tuple[ResourceType, str], ...] = ()
    apply: tuple[tuple[ResourceType, Object], ...] = ()
    create: tuple[Object, ...] = ()
    scale: tuple[ScaleTarget, int] | None = None
    events: tuple[EventNote, ...] = field(default=())
    delete_owner: bool = False
    requeue_s: float | None = None


@dataclass(frozen=True)
class WorkProgress:
    """A job's progress from its master's report: percentage done, and remaining seconds; each is None if unknown."""

    percentage: int | None = None
    remaining_s: int | None = None


@dataclass(frozen=True)
class StoreAnswer:
    """A store's answer about a resource. A reason is empty if it does not apply.

    Attributes:
        wanted: useful number of members; None if unknown. While the store is unreachable, this is its last answer.
        stale: why the store's answers are stale.
        refused: why the store is not asked at all.
        unreachable: why the store has not answered for half a minute.
        silent: the store answers, but for ten minutes nobody has written how many members are wanted.
    """

    wanted: int | None = None
    progress: WorkProgress | None = None
    stale: str = ""
    refused: str = ""
    unreachable: str = ""
    silent: bool = False


@dataclass(frozen=True)
class OwnerObservation:
    """The state of a resource at one moment.

    Attributes:
        now_s: Unix time.
        pods: members of the resource, from a live list.
        strangers: uids of pods that have the members' label but are not members, such as copies of a member's pod.
        capacity: idle capacity of the cluster; None if unknown, for example without permission to read it.
        allocation: workers that arbitration gives this job; None if the job takes no part, or capacity is unknown.
        starts_after: job that has waited so long that this job must not start before it; empty for none.
        service_holder: pool in another namespace that holds this pool's service; empty for none.
        target: object named by `scaleTargetRef`; None if it does not exist.
    """

    now_s: float = 0.0
    pods: tuple[MemberPod, ...] = ()
    strangers: frozenset[str] = frozenset()
    capacity: ClusterCapacity | None = None
    store: StoreAnswer = field(default_factory=StoreAnswer)
    allocation: int | None = None
    starts_after: str = ""
    service_holder: str = ""
    target: ScaleTarget | None = None
