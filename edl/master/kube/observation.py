"""`OwnerObservation`: all that a planner knows of a resource and its surroundings at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from edl.master.kube.capacity import ClusterCapacity
from edl.master.kube.members import MemberPod

__all__ = ["WorkProgress", "OwnerObservation"]


@dataclass(frozen=True)
class WorkProgress:
    """How far a job is, as its master or its agents say in the store.

    Attributes:
        percentage: of the work that is done, 0 to 100; None if unknown.
        remaining_s: seconds that the rest takes at the present rate; None if unknown.
        rate: units a second; None if unknown.
        message: where the job stands, for a person.
    """

    percentage: int | None = None
    remaining_s: int | None = None
    rate: float | None = None
    message: str = ""


@dataclass(frozen=True)
class OwnerObservation:
    """What is known of a resource at one moment.

    Attributes:
        now_s: the time, in seconds since 1970.
        pods: members of the resource, by a live list.
        capacity: what the cluster has idle; None where the operator may not see that.
        wanted: members that the store says are useful; None if that is not known.
        allocation: workers that arbitration over all jobs gives this one; None where it does not arbitrate.
        progress: how far a job is; None if that is not known.
        store_stale: why the store's answers are old; empty if they are not.
        store_refused: why the operator does not ask the resource's store; empty if it does.
        service_holder: pool of another namespace whose the service is, in the same store; empty for none.
        store_unreachable: why the store has not answered for half a minute; empty if it has.
        target_replicas: what the pool's `scaleTargetRef` has now; None if there is no such target.
        target_ready: how many of them are ready; None if that is not known.
        strangers: uids of pods that have the members' label and are none, such as copies of a member.
    """

    now_s: float
    pods: tuple[MemberPod, ...] = ()
    capacity: ClusterCapacity | None = None
    wanted: int | None = None
    allocation: int | None = None
    progress: WorkProgress | None = None
    store_stale: str = ""
    store_refused: str = ""
    service_holder: str = ""
    store_unreachable: str = ""
    target_replicas: int | None = None
    target_ready: int | None = None
    strangers: frozenset[str] = frozenset()
