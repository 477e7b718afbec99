"""How many teachers a pool is to have, and whether it may make one more at this moment; if not, why and until when.

After a teacher that found no room, or was preempted, nothing is tried for a while. That back-off is in
`status.lastProbe`, so that a new operator does not probe at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from edl.master.kube.members.pods import MemberPod
from edl.master.kube.members.records import LAUNCH_PATIENCE_S
from edl.master.kube.observation import OwnerObservation
from edl.master.kube.pools.pool_status import Growth, PoolDraft
from edl.master.kube.pools.updating import is_failing
from edl.master.kube.resources import TeacherPool
from edl.master.scaling.terminations import TerminationCause, find_termination_cause


def find_target(pool: TeacherPool, observation: OwnerObservation, present: int) -> int:
    """Return how many teachers a pool should have, between its bounds; 0 if it is suspended or its service is taken.

    If EDL scales and the store does not say how many are wanted, nothing moves: while the store is away or may not be
    asked, the number that was wanted last stays; else the number of `present` teachers, pending ones included.
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
        if (observation.store.stale or observation.store.refused) and type(before) is int:
            count = before
    return max(pool.min_replicas, min(count, pool.max_replicas))


_CAPACITY_LAG_S: Final = 1.0
"""For a watch to show a pod that a list shows already: it takes milliseconds, and a busy API server a second."""
_CAPACITY_LOOK_S: Final = 30.0
"""After so long it is looked again whether there is room, where no event came that says so."""


def decide_growth(draft: PoolDraft, target: int, not_before_s: float | None, pod: Mapping[str, Any]) -> Growth:
    """Decide whether a pool makes another teacher, up to `target`, which `pod` would be.

    Where capacity is known, `pod` avoids the node of `find_launch_failure`. `not_before_s` is when its member may be
    made; None for at once.
    """
    pool, observation, live, now_s = draft.pool, draft.observation, draft.live, draft.observation.now_s
    if pool.suspend:
        return Growth(False, "Suspended", "suspend: true")
    if observation.service_holder:
        return Growth(False, "ServiceTaken", f"{observation.service_holder} serves {pool.service} in the same store")
    waiting = next((other for other in live if not other.scheduled), None)
    if waiting is not None:
        requeue_s = None
        if len(live) > pool.min_replicas and not pool.queue:
            requeue_s = max(0.1, waiting.created_s + pool.probe_s - now_s)
        return Growth(True, "WaitsForNode", f"{waiting.name} waits for a node", requeue_s=requeue_s)
    if len(live) >= target:
        if target == pool.max_replicas:
            return Growth(False, "AtMaximum", "maxReplicas is reached")
        return Growth(False, "AtWanted", "as many teachers as wanted")
    failing = next((other for other in live if is_failing(other, now_s)), None)
    if failing is not None and not _may_start_elsewhere(observation, live, pod):
        return Growth(False, "TeacherFailing", f"{failing.name} does not start, or ends again and again")
    if not_before_s is not None and now_s < not_before_s:
        return Growth(False, "BackOff", "the next teacher waits, since others ended", requeue_s=not_before_s - now_s)
    if len(live) < pool.min_replicas:
        return Growth(True, "BelowMinimum", "a teacher is made, since minReplicas is not reached", create=True)
    return _grow_into_idle_room(draft, pod)


def find_launch_failure(live: Sequence[MemberPod], now_s: float) -> MemberPod | None:
    """Return the teacher that has not started for long where no other fails: its node may be why, and others may do."""
    failing = [other for other in live if is_failing(other, now_s)]
    if len(failing) != 1 or now_s - failing[0].placed_s < LAUNCH_PATIENCE_S:
        return None
    cause = find_termination_cause(failing[0].termination).cause
    return failing[0] if cause is TerminationCause.LAUNCH_FAILED else None


def _may_start_elsewhere(observation: OwnerObservation, live: Sequence[MemberPod], pod: Mapping[str, Any]) -> bool:
    """Whether a teacher that fails is no reason to make none. A second one that fails is: then it is not the node."""
    if find_launch_failure(live, observation.now_s) is None:
        return False
    if observation.capacity is None:
        return True
    try:
        return observation.capacity.count_fitting(pod) > 0
    except ValueError:
        return False


def _grow_into_idle_room(draft: PoolDraft, pod: Mapping[str, Any]) -> Growth:
    """Decide by idle capacity; if that is unknown, a teacher that waits for a node finds out."""
    capacity = draft.observation.capacity
    left_s = draft.backoff.left_s(draft.observation.now_s) if draft.backoff is not None else 0.0
    fitting = None
    if capacity is not None:
        if not all(capacity.shows(other.uid, other.node) for other in draft.live):
            return Growth(True, "LooksForRoom", "what is idle is being found out", requeue_s=_CAPACITY_LAG_S)
        try:
            fitting = capacity.count_fitting(pod)
        except ValueError:  # not as the API has it: the API server says so in its own words when the pod is made
            fitting = None
    if fitting == 0:
        return Growth(False, "NoIdleCapacity", "no node has room for a teacher", requeue_s=_CAPACITY_LOOK_S)
    if left_s > 0:
        message = "the last teacher that was tried found no node, or was preempted; tried again later"
        return Growth(False, "NoIdleCapacity", message, requeue_s=left_s)
    return Growth(True, "Creating", "a teacher is made", create=True)
