"""How many teachers a pool is to have, and whether it may make one more at this moment; if not, why and until when.

After a teacher that found no room, or was preempted, nothing is tried for a while. That back-off is in
`status.lastProbe`, so that a new operator does not probe at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edl.kube.objects import format_time, parse_time
from edl.master.kube.members.pods import MemberPod
from edl.master.kube.members.records import LAUNCH_PATIENCE_S
from edl.master.kube.observation import OwnerObservation
from edl.master.kube.pools.updating import is_failing
from edl.master.kube.resources import TeacherPool
from edl.master.scaling.terminations import TerminationCause, find_termination_cause


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


_MOST_S: Final = 300.0
"""Between two probes: what is idle is borrowed within 5 minutes, at 12 pods an hour while nothing is."""


@dataclass(frozen=True)
class ProbeBackoff:
    """The last time that a pool found no room.

    Attributes:
        at_s: when its probe was removed, or a teacher preempted, Unix time.
        wait_s: how long nothing is tried after it, in seconds.
    """

    at_s: float
    wait_s: float

    @classmethod
    def read(cls, status: Mapping[str, Any]) -> ProbeBackoff | None:
        """Read `status.lastProbe`; None where there is none, or none that EDL wrote."""
        written = status.get("lastProbe")
        if not isinstance(written, Mapping):
            return None
        wait_s = written.get("backoffSeconds")
        try:
            at_s = parse_time(written["at"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None
        if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 < wait_s < math.inf:
            return None
        return cls(at_s, min(_MOST_S, float(wait_s)))

    def format(self) -> dict[str, Any]:
        """Return it as `status.lastProbe` has it."""
        return {"at": format_time(self.at_s), "backoffSeconds": math.ceil(self.wait_s)}

    def left_s(self, now_s: float) -> float:
        """Return how many seconds to wait before the next try, 0 for none.

        A clock that was set back does not make it longer than the whole.
        """
        return max(0.0, min(self.wait_s, self.at_s + self.wait_s - now_s))

    def is_over(self, pods: Iterable[MemberPod]) -> bool:
        """Return whether a teacher that came after it has found room, so that the next may follow at once."""
        return any(pod.created_s > self.at_s for pod in pods)


def back_off(before: ProbeBackoff | None, first_s: float, now_s: float) -> ProbeBackoff:
    """Return the back-off after a probe that found no room: twice the one before, up to 300 s."""
    wait_s = first_s if before is None else max(first_s, 2 * before.wait_s)
    return ProbeBackoff(now_s, min(_MOST_S, wait_s))


_CAPACITY_LAG_S: Final = 1.0
"""For a watch to show a pod that a list shows already: it takes milliseconds, and a busy API server a second."""
_CAPACITY_LOOK_S: Final = 30.0
"""After so long it is looked again whether there is room, where no event came that says so."""


@dataclass(frozen=True)
class Growth:
    """Whether a pool grows.

    Attributes:
        growing: a teacher is being made, or waits for its node.
        create: it should be made now.
        reason: CamelCase, as the condition `Growing` has it.
        message: for a person; the same as long as nothing changes.
        requeue_s: when to look again, in seconds; None if nothing but an event changes it.
    """

    growing: bool
    reason: str
    message: str
    create: bool = False
    requeue_s: float | None = None


def decide_growth(
    pool: TeacherPool,
    observation: OwnerObservation,
    live: Sequence[MemberPod],
    target: int,
    backoff: ProbeBackoff | None,
    not_before_s: float | None,
    pod: Mapping[str, Any],
) -> Growth:
    """Decide whether a pool makes a teacher more.

    `pod` would be made; where capacity is known, it keeps away from the node of `find_launch_failure`.
    `not_before_s` is when the member may be made whose turn it is; None for at once.
    """
    now_s = observation.now_s
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
        return Growth(False, "AtWanted", "no more teachers are wanted")
    failing = next((other for other in live if is_failing(other, now_s)), None)
    if failing is not None and not _may_start_elsewhere(observation, live, pod):
        return Growth(False, "TeacherFailing", f"{failing.name} does not start, or ends again and again")
    if not_before_s is not None and now_s < not_before_s:
        return Growth(False, "BackOff", "the next teacher waits, since others ended", requeue_s=not_before_s - now_s)
    if len(live) < pool.min_replicas:
        return Growth(True, "BelowMinimum", "a teacher is made, since minReplicas is not reached", create=True)
    return _grow_into_idle_room(observation, live, backoff, pod)


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


def _grow_into_idle_room(
    observation: OwnerObservation,
    live: Sequence[MemberPod],
    backoff: ProbeBackoff | None,
    pod: Mapping[str, Any],
) -> Growth:
    """Decide by what is idle; where that is not known, a teacher that waits for a node finds out."""
    capacity = observation.capacity
    left_s = backoff.left_s(observation.now_s) if backoff is not None else 0.0
    fitting = None
    if capacity is not None:
        if not all(capacity.shows(other.uid, other.node) for other in live):
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
