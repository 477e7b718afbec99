"""How many teachers a pool is to have, whatever room there is for them."""

from __future__ import annotations

from edl.master.kube.observation import OwnerObservation
from edl.master.kube.resources import TeacherPool

__all__ = ["find_target"]


def find_target(pool: TeacherPool, observation: OwnerObservation, present: int) -> int:
    """Return how many teachers a pool is to have, between its bounds; none while it is suspended, or its service taken.

    Where EDL scales and the store does not say how many are wanted, nothing is moved: while the store is away, or may
    not be asked, the number that was wanted last stays, and where nothing stands in it, that of the teachers there are.

    `present` counts the teachers that are there, those that wait for a node included.
    """
    if pool.suspend or observation.service_holder:
        return 0
    if pool.scaling == "external":
        count = pool.min_replicas if pool.replicas is None else pool.replicas
    elif observation.store.wanted is not None:
        count = observation.store.wanted
    else:
        before = pool.status.get("wantedReplicas")
        count = present
        if (
            (observation.store.stale or observation.store.refused)
            and isinstance(before, int)
            and not isinstance(before, bool)
        ):
            count = before
    return max(pool.min_replicas, min(count, pool.max_replicas))
