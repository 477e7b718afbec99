"""The input and output of a planner: an `OwnerObservation`, and a `Plan` with the conditions that it writes.

A planner knows only what is in the observation; only the `Reconciler` carries plans out.
"""

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
    """Return conditions as `status.conditions` has them. A transition time is kept where the status stays the same.

    Conditions of `before` that are not named in `conditions` are left out.
    """
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
                # Never empty: Kubernetes 1.20 makes null of an empty text in a status that was not there before.
                "message": condition.message or condition.reason,
                "lastTransitionTime": since or format_time(now_s),
                "observedGeneration": generation,
            }
        )
    return written


def find_condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return a condition of a status; empty if it is not there."""
    conditions = status.get("conditions")
    for found in conditions if isinstance(conditions, list) else []:
        if isinstance(found, Mapping) and found.get("type") == kind:
            return found
    return {}


@dataclass(frozen=True)
class PodDeletion:
    """A pod to delete; another pod of that name stays. `grace_period_s` is None for the pod's own."""

    name: str
    uid: str
    grace_period_s: int | None
    reason: str


@dataclass(frozen=True)
class EventNote:
    """An event for `kubectl describe`; the same event again is counted, not repeated. `pod` is one it is also about."""

    type: str
    reason: str
    message: str
    pod: str = ""


@dataclass(frozen=True)
class Plan:
    """What to do about a resource, in the order of the attributes.

    `status` comes first: the outcome of a pod is recorded before the pod goes, so that an operator that is killed in
    between never forgets why the pod ended, or uses a number twice. Events are shown once the status is written.

    Attributes:
        status: the whole of it; None removes a field.
        remove: other objects to delete: type and name.
        apply: other objects as they should be, by server-side apply.
        create: pods to make; a pod of the resource with that name is as good.
        scale_target: replicas for the pool's `scaleTargetRef`; None leaves them unchanged.
        delete_owner: delete the resource itself, `ttlSecondsAfterFinished` after its end.
        requeue_s: seconds after which to look again in any case; None for never.
    """

    status: Object
    delete: tuple[PodDeletion, ...] = ()
    remove: tuple[tuple[ResourceType, str], ...] = ()
    apply: tuple[tuple[ResourceType, Object], ...] = ()
    create: tuple[Object, ...] = ()
    scale_target: int | None = None
    events: tuple[EventNote, ...] = field(default=())
    delete_owner: bool = False
    requeue_s: float | None = None


@dataclass(frozen=True)
class WorkProgress:
    """How much of a job is done in percent, and seconds that the rest takes, by its master; None if unknown."""

    percentage: int | None = None
    remaining_s: int | None = None


@dataclass(frozen=True)
class StoreAnswer:
    """What a store says about a resource. Reasons are empty if they do not apply.

    Attributes:
        wanted: useful members; None if unknown. While the store is away, the last answer.
        stale: why the store's answers are old.
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
class ScaleTarget:
    """The Deployment, or the like, that a pool scales. `/scale` does not say how many replicas are ready."""

    type: ResourceType
    name: str
    replicas: int
    ready: int


@dataclass(frozen=True)
class OwnerObservation:
    """What is known about a resource at one moment.

    Attributes:
        now_s: Unix time.
        pods: members of the resource, from a live list.
        strangers: uids of pods with the members' label that are not members, such as copies of one.
        capacity: idle capacity of the cluster; None if the operator may not see it.
        allocation: workers that arbitration gives this job; None if it takes no part.
        starts_after: job that has waited so long that this one must not start before it; empty for none.
        service_holder: pool of another namespace that holds this pool's service; empty for none.
        target: object that `scaleTargetRef` names; None if there is none.
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
