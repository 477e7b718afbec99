"""How a pool replaces its teachers after an edit of its spec: one by one, the successor first if there is room.

A digest of everything that a pod is created from, its revision, tells which teachers are outdated. If no node has room
for one more, a teacher is removed first, and no other until its successor has a node, because someone else may take
borrowed room. If a successor does not start, the update stops, and the outdated teachers stay.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edl.discovery.store_url import identify_store
from edl.master.kube.members.pods import OWNER_UID_LABEL, MemberPod
from edl.master.kube.observation import OwnerObservation, find_condition
from edl.master.kube.resources import TeacherPool

REVISION_LABEL: Final = "edl.io/revision"
_CHARS: Final = 10
"""40 bits distinguish the specs of a pool, 64 the places of a cluster."""
_PLACE_CHARS: Final = 16


def hash_revision(pool: TeacherPool) -> str:
    """Return the digest of everything that a teacher's pod is created from, and of no other field of the spec.

    A change of the fields included here replaces all teachers of all pools when the operator is upgraded.
    """
    parts = {
        "serve": list(pool.serve),
        "service": pool.service,
        "store": identify_store(pool.store),
        "template": pool.template,
        "priorityClassName": pool.priority_class_name,
        "gracePeriodSeconds": pool.grace_period_s,
        "queue": pool.queue,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:_CHARS]


def hash_place(pool: TeacherPool) -> str:
    """Return the digest of where students find a pool's teachers: the service and its store."""
    place = json.dumps([identify_store(pool.store), pool.service])
    return hashlib.sha256(place.encode()).hexdigest()[:_PLACE_CHARS]


def list_places(pool: TeacherPool) -> frozenset[str]:
    """Return the places of a pool's teachers: the spec's, and those of earlier specs, which the status keeps."""
    written = pool.status.get("servedPlaces")
    former = written if isinstance(written, list) else []
    return frozenset({hash_place(pool), *(place for place in former if isinstance(place, str))})


_RESTART_S: Final = 600.0  # a restarted container counts as failing for this long, enough to load a large model
_TEACHER: Final = re.compile(r"teacher-[0-9]{1,9}")
STEADY_S: Final = 10.0  # of readiness until a successor counts: a student's first request may end it


@dataclass(frozen=True)
class TeacherUpdate:
    """Which teachers to replace, from the pool's status and its pods.

    Attributes:
        awaited: the member removed first to make room; empty for none.
        full: the namespace's quota has no room for another teacher.
        wanted: last wanted number of teachers; None if unknown.
        begun: an update has started and is not over.
    """

    revision: str
    awaited: str
    full: bool
    wanted: int | None
    begun: bool = False

    @classmethod
    def of(cls, pool: TeacherPool, live: Sequence[MemberPod]) -> TeacherUpdate:
        revision = hash_revision(pool)
        awaited, wanted = pool.status.get("awaitedMember"), pool.status.get("wantedReplicas")
        refusal = find_condition(pool.status, "Accepted")
        has_outdated = any(pod.labels.get(REVISION_LABEL) != revision for pod in live)
        return cls(
            revision=revision,
            begun=has_outdated or find_condition(pool.status, "Updated").get("status") == "False",
            awaited=awaited if isinstance(awaited, str) and _TEACHER.fullmatch(awaited) else "",
            full=refusal.get("reason") == "QuotaExceeded" and refusal.get("observedGeneration") == pool.generation,
            wanted=wanted if isinstance(wanted, int) and not isinstance(wanted, bool) else None,
        )

    def list_outdated(self, live: Sequence[MemberPod]) -> tuple[MemberPod, ...]:
        """Return the teachers to replace, in order: first those that serve no student, then the newest."""
        found = (pod for pod in live if pod.labels.get(REVISION_LABEL) != self.revision)
        return tuple(sorted(found, key=lambda pod: (pod.ready, -pod.created_s, -pod.index)))

    def list_updated(self, live: Sequence[MemberPod]) -> tuple[MemberPod, ...]:
        return tuple(pod for pod in live if pod.labels.get(REVISION_LABEL) == self.revision)

    def count_present(self, live: Sequence[MemberPod]) -> int:
        """Return how many teachers count as present; a replacement in progress adds or removes none."""
        if self.wanted is not None and (self.awaited or self.list_outdated(live)):
            return self.wanted
        return len(live)

    def list_useless(self, live: Sequence[MemberPod], now_s: float) -> list[MemberPod]:
        """Return outdated teachers that serve no student, because they have no node or cannot start."""
        stopped = self.find_failing(live, now_s) is not None
        outdated = self.list_outdated(live)
        return [pod for pod in outdated if not pod.scheduled or (is_failing(pod, now_s) and not stopped)]

    def find_failing(self, live: Sequence[MemberPod], now_s: float) -> MemberPod | None:
        """Return a teacher with the present spec that fails; None if none does."""
        return next((pod for pod in self.list_updated(live) if is_failing(pod, now_s)), None)

    def find_starting(self, live: Sequence[MemberPod], now_s: float) -> tuple[MemberPod | None, float | None]:
        """Return a not yet steady teacher with the current spec, and the seconds until the next check."""
        waits = [(_find_unsteady_s(pod, now_s), pod) for pod in self.list_updated(live)]
        unready = next((pod for _, pod in waits if not pod.ready), None)
        if unready is not None:
            return unready, None
        left_s, pod = max(waits, key=lambda item: item[0], default=(0.0, None))
        return (pod, left_s) if left_s > 0 else (None, None)

    def keep_awaited(self, live: Sequence[MemberPod], target: int) -> str:
        """Return the member whose successor still has no node; empty for none."""
        arrived = any(pod.key == self.awaited and pod.scheduled for pod in live)
        return "" if arrived or sum(pod.scheduled for pod in live) >= target else self.awaited


def is_failing(pod: MemberPod, now_s: float) -> bool:
    """Whether a teacher's container cannot start, or ended and has not been steady since.

    A container in a crash loop runs for a few seconds each time, which must not count as a start.
    """
    if pod.failing or (pod.finished and pod.phase == "Running"):
        return True
    is_recent = pod.started_s is None or now_s - pod.started_s < _RESTART_S
    return bool(pod.restarts) and is_recent and (not pod.ready or _find_unsteady_s(pod, now_s) > 0)


def choose_surplus(update: TeacherUpdate, live: Sequence[MemberPod], target: int) -> list[MemberPod]:
    """Return the surplus of a pool, so that up to `target` teachers stay ready. An update may add one to `target`."""
    outdated, updated = deque(update.list_outdated(live)), update.list_updated(live)
    newest = sorted(updated, key=lambda pod: (not pod.ready, pod.created_s, pod.index))
    waiting = deque(pod for pod in newest if not pod.scheduled)
    placed = [pod for pod in newest if pod.scheduled]
    ready, surplus = sum(pod.ready for pod in live), []
    for _ in range(len(live) - (target + 1 if target and outdated else target)):
        if waiting:
            chosen = waiting.popleft()
        elif outdated and (not placed or not outdated[0].ready or ready > target):
            chosen = outdated.popleft()
        else:
            chosen = placed.pop()
        ready -= chosen.ready
        surplus.append(chosen)
    return surplus


def is_behind(pool: TeacherPool, observation: OwnerObservation) -> bool:
    """Whether the known capacity still counts a teacher that is gone."""
    if observation.capacity is None:
        return False
    there = observation.strangers | {pod.uid for pod in observation.pods}
    return any(
        claim.labels.get(OWNER_UID_LABEL) == pool.uid
        and claim.namespace == pool.namespace
        and claim.uid not in there
        and not claim.ended
        for claim in observation.capacity.pods
    )


def _find_unsteady_s(pod: MemberPod, now_s: float) -> float:
    if pod.ready_s is None:
        return 0.0
    # It is by the node's clock: if that is wrong, use the time at which the pod got its node.
    since_s = pod.ready_s if pod.ready_s <= now_s + STEADY_S else pod.placed_s
    return max(0.0, min(STEADY_S, since_s + STEADY_S - now_s))
