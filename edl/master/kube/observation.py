"""What goes into a planner and what comes out: an `OwnerObservation`, and a `Plan` with the conditions that it writes.

A planner knows only what is in the observation. Only the `Reconciler` carries plans out.
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
    """Something that holds of a resource, or does not.

    Attributes:
        status: it holds; None if that is not known.
    """

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
    """A pod that is to end.

    Attributes:
        uid: of the pod; another pod of that name is left alone.
        grace_period_s: seconds that it has to end; None for what the pod says itself.
    """

    name: str
    uid: str
    grace_period_s: int | None
    reason: str


@dataclass(frozen=True)
class EventNote:
    """An event to be shown by `kubectl describe`; the same event again is counted, not repeated.

    Attributes:
        reason: CamelCase, of a fixed set, for programs.
        pod: name of the pod that it is about as well; empty for none.
    """

    type: str
    reason: str
    message: str
    pod: str = ""


@dataclass(frozen=True)
class Plan:
    """What to do about a resource, in the order of the attributes.

    `status` comes first: the outcome of a pod is recorded before the pod goes, so that an operator that is killed in
    between never forgets why the pod ended, or gives a number again that was used. Events are shown as soon as it is
    written.

    Attributes:
        status: the whole of it; None in a field removes what was there.
        remove: other objects that are to go: type and name.
        apply: other objects as they should be, by server-side apply.
        create: pods to be made; a pod of the resource that is there by that name is as good.
        scale_target: replicas that the pool's `scaleTargetRef` is to have; None to leave it as it is.
        delete_owner: the resource itself is to go: its time after its end is over.
        requeue_s: seconds after which to look again, whatever happens; None for no such need.
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
    """How far a job is, as its master says in the store.

    Attributes:
        percentage: of the work that is done, 0 to 100; None if unknown.
        remaining_s: seconds that the rest takes at the present rate; None if unknown.
        message: where the job stands, for a person.
    """

    percentage: int | None = None
    remaining_s: int | None = None
    message: str = ""


@dataclass(frozen=True)
class StoreAnswer:
    """What a store says of a resource.

    Attributes:
        wanted: members that are useful; None if nothing says so. While the store is away, what it said last.
        progress: how far the job is; None if that is not known.
        stale: why the store's answers are old; empty if they are not.
        refused: why the store is not asked at all; empty if it is.
        unreachable: why the store has not answered for half a minute; empty if it has.
        silent: for ten minutes nothing was written of what is wanted, though the store answers: nothing decides it now.
    """

    wanted: int | None = None
    progress: WorkProgress | None = None
    stale: str = ""
    refused: str = ""
    unreachable: str = ""
    silent: bool = False


@dataclass(frozen=True)
class ScaleTarget:
    """The Deployment, or the like, that a pool scales in place of pods of its own.

    Attributes:
        ready: that it has; `/scale` does not say how many of them are ready.
    """

    type: ResourceType
    name: str
    replicas: int
    ready: int


@dataclass(frozen=True)
class OwnerObservation:
    """What is known of a resource at one moment.

    Attributes:
        now_s: the time, in seconds since 1970.
        pods: members of the resource, by a live list.
        strangers: uids of pods that have the members' label and are none, such as copies of a member.
        capacity: what the cluster has idle; None where the operator may not see that.
        allocation: workers that arbitration over all jobs gives this one; None where it does not arbitrate.
        starts_after: job that has waited so long for its minimum that this one must not start before; empty for none.
        service_holder: pool of another namespace whose the service is, in the same store; empty for none.
        target: what the pool's `scaleTargetRef` names; None if there is no such object.
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
