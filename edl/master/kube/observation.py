"""`OwnerObservation`: all that a planner knows of a resource and its surroundings at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from edl.kube.resource_types import ResourceType
from edl.master.kube.capacity import ClusterCapacity
from edl.master.kube.members import MemberPod

__all__ = ["OwnerObservation", "ScaleTarget", "StoreAnswer", "WorkProgress"]


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
        type, name: of the target.
        replicas: that it is to have.
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
        store: what the resource's store says.
        allocation: workers that arbitration over all jobs gives this one; None where it does not arbitrate.
        service_holder: pool of another namespace whose the service is, in the same store; empty for none.
        target: what the pool's `scaleTargetRef` names; None if there is no such object.
    """

    now_s: float = 0.0
    pods: tuple[MemberPod, ...] = ()
    strangers: frozenset[str] = frozenset()
    capacity: ClusterCapacity | None = None
    store: StoreAnswer = field(default_factory=StoreAnswer)
    allocation: int | None = None
    service_holder: str = ""
    target: ScaleTarget | None = None
