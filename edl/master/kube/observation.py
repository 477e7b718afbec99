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
    """Return `status.conditions`; an unchanged status keeps its transition time. Others of `before` are dropped."""
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
                # Never empty: Kubernetes 1.20 turns an empty text in a new status into null.
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
    """A pod to delete, unless its uid has changed. `grace_period_s` is None for the pod's own."""

    name: str
    uid: str
    grace_period_s: int | None
    reason: str


@dataclass(frozen=True)
class EventNote:
    """An event for `kubectl describe`; repeated events are counted. `pod` is a pod that it is also about."""

    type: str
    reason: str
    message: str
    pod: str = ""


def describe_store(store: StoreAnswer) -> Condition:
    """Return the condition `Accepted` of a valid spec, whose store may be refused or away nevertheless."""
    if store.refused:
        return Condition("Accepted", True, "StoreNotAllowed", store.refused)
    if store.unreachable:
        return Condition("Accepted", True, "StoreUnreachable", store.unreachable)
    return Condition("Accepted", True, "Valid", "the spec is valid")


@dataclass(frozen=True)
class ScaleTarget:
    """The Deployment, or similar, that a pool scales. `/scale` does not say how many replicas are ready."""

    type: ResourceType
    name: str
    replicas: int
    ready: int


@dataclass(frozen=True)
class Plan:
    """What to do about a resource, in the order of the attributes.

    `status` comes first: a pod's outcome is recorded before the pod is deleted, so an operator killed in between never
    forgets why it ended, or reuses its number.

    Attributes:
        status: the whole status; None removes a field.
        remove: other objects to delete: type and name.
        apply: other objects to write by server-side apply.
        create: pods to create; an existing pod of the resource with that name is fine.
        scale: the object of the pool's `scaleTargetRef`, and its new replicas; None leaves them unchanged.
        delete_owner: delete the resource itself, `ttlSecondsAfterFinished` after its end.
        requeue_s: seconds until the next reconciliation in any case; None for never.
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
    """Percentage of a job's work that is done, and seconds for the rest, by its master; None if unknown."""

    percentage: int | None = None
    remaining_s: int | None = None


@dataclass(frozen=True)
class StoreAnswer:
    """A store's answer about a resource. Reasons are empty if they do not apply.

    Attributes:
        wanted: useful number of members; None if unknown. While the store is unreachable, the last answer.
        stale: why the store's answers are stale.
        refused: why the store is not asked at all.
        unreachable: why the store has not answered for half a minute.
        silent: the store answers, but nobody has written how many are wanted for ten minutes.
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
        strangers: uids of pods with the members' label that are not members, such as copies of one.
        capacity: idle capacity of the cluster; None if the operator may not see it.
        allocation: workers that arbitration gives this job; None if it takes no part.
        starts_after: job that has waited so long that this one must not start before it; empty for none.
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
