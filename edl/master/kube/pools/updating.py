"""How the teachers of a pool whose spec was edited are replaced: one by one, the successor first where there is room.

What teachers are made from is a digest, their revision, which tells those that were made from a spec that has been
edited since. A teacher is taken away when its successor has been ready for some seconds. Where no node has room for one
more, a teacher goes first, and no other until its successor has a node: what was borrowed may be another's by then. A
successor that does not start stops it all: what remains of the spec before goes on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from edl.discovery.urls import identify_store
from edl.kube.objects import format_time
from edl.master.kube.members.naming import OWNER_UID_LABEL
from edl.master.kube.members.pods import MemberPod
from edl.master.kube.members.records import read_time
from edl.master.kube.observation import Condition, OwnerObservation, find_condition
from edl.master.kube.resources import TeacherPool

REVISION_LABEL: Final = "edl.io/revision"
_CHARS: Final = 10
"""Characters of the digest: 40 bits tell the specs of a pool apart."""
_PLACE_CHARS: Final = 16
"""Characters of the digest: 64 bits tell the places of a cluster apart."""


def hash_revision(pool: TeacherPool) -> str:
    """Return the digest of all that a teacher's pod is made from.

    Other fields change no pod: bounds, scaling, `probeSeconds`, another spelling of the store. Whatever
    else is counted here some day has all teachers of all pools replaced when the operator is upgraded.
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
    """Return the digest of where students find a pool's teachers: the service, and the store in the one spelling."""
    place = json.dumps([identify_store(pool.store), pool.service])
    return hashlib.sha256(place.encode()).hexdigest()[:_PLACE_CHARS]


def list_places(pool: TeacherPool) -> frozenset[str]:
    """Return where teachers of a pool may be found: by its spec, and by specs before it, which its status keeps."""
    written = pool.status.get("servedPlaces")
    former = written if isinstance(written, list) else []
    return frozenset({hash_place(pool), *(place for place in former if isinstance(place, str))})


_YIELD_S: Final = 30.0
"""For so long a revision counts that another operator wrote: it writes none where it is gone."""
_HOLD_S: Final = 60.0
"""After so long nothing but the pool's own operator is there: another would have taken over after `_YIELD_S`."""


@dataclass(frozen=True)
class RevisionTerm:
    """Since when a revision is the pool's that came without an edit.

    Attributes:
        since_s: Unix time; None for a revision that came by an edit, or a while ago.
        yields_s: how long the pool is another operator's to look after, in seconds; 0 if it is not.
        held_s: seconds during which no teacher may be replaced; 0 for none.
    """

    since_s: float | None = None
    yields_s: float = 0.0
    held_s: float = 0.0

    @classmethod
    def of(cls, pool: TeacherPool, revision: str, labelled: bool, now_s: float) -> RevisionTerm:
        """Read it."""
        if pool.status.get("observedGeneration") != pool.generation:
            return cls()
        since_s = read_time(pool.status.get("revisionSince"))
        age_s = now_s - since_s if since_s is not None else -1.0
        if pool.status.get("revision") == revision:
            return cls(since_s, held_s=_HOLD_S - age_s) if 0 <= age_s < _HOLD_S else cls()
        known = bool(pool.status.get("revision"))  # an operator that knows no revisions drops it
        if 0 <= age_s < _YIELD_S and known:
            return cls(since_s, yields_s=_YIELD_S - age_s)
        return cls(now_s, held_s=_HOLD_S) if known or labelled else cls()

    def format(self) -> str | None:
        """Return `status.revisionSince`."""
        return None if self.since_s is None else format_time(self.since_s)


_RESTART_S: Final = 600.0
"""A restarted container counts as failing for no longer: by then it loads a large model. The kubelet's back-off between
two restarts, after which it counts anew, is half of that."""
_TEACHER: Final = re.compile(r"teacher-[0-9]{1,9}")
STEADY_S: Final = 10.0
"""A successor counts after it has been ready for this time: a student's first request may end it."""


@dataclass(frozen=True)
class UpdateView:
    """How far an update is, for the status.

    Attributes:
        outdated: teachers that were made from another spec.
        updated: teachers that were made from this one.
        awaited: the member that went first, to make room for its successor; empty for none.
        waits_for: what the next replacement waits for, for a person; empty for nothing.
        stopped: why the update has stopped; empty if it has not.
        places: where its teachers may be found, see `list_places`.
        unproven: none of the spec before is left, and those of this one have not all been ready for some seconds.
        since: when the revision changed without an edit, as `RevisionTerm.format` has it.
    """

    revision: str
    outdated: int
    updated: int
    awaited: str = ""
    waits_for: str = ""
    stopped: str = ""
    places: tuple[str, ...] = ()
    unproven: bool = False
    since: str | None = None

    def describe(self) -> Condition:
        """Return the condition `Updated`."""
        if not self.outdated and not self.unproven:
            return Condition("Updated", True, "UpToDate", "all teachers are made from the present spec")
        if not self.outdated:
            waits = self.stopped or self.waits_for or "those of the present one start"
            reason = "UpdateStopped" if self.stopped else "Updating"
            return Condition("Updated", False, reason, f"no teacher of a spec before is left: {waits}")
        counted = f"{self.outdated} of {self.outdated + self.updated} teachers are made from a spec before"
        if self.stopped:
            return Condition("Updated", False, "UpdateStopped", f"{counted}, and go on: {self.stopped}")
        waits = f": {self.waits_for}" if self.waits_for else ", and are replaced one at a time"
        return Condition("Updated", False, "Updating", f"{counted}{waits}")


@dataclass(frozen=True)
class TeacherUpdate:
    """Which teachers to replace.

    Attributes:
        awaited: the member that went first, by the status; empty for none.
        full: the namespace's quota has no room for a teacher more, by the status.
        wanted: teachers that the status says are wanted; None if it says nothing.
        begun: an update was not over, by the status, or teachers are outdated now.
        term: of the revision, where it changed without an edit.
    """

    revision: str
    awaited: str
    full: bool
    wanted: int | None
    begun: bool = False
    term: RevisionTerm = field(default_factory=RevisionTerm)

    @classmethod
    def of(cls, pool: TeacherPool, live: Sequence[MemberPod], now_s: float) -> TeacherUpdate:
        """Read it."""
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
            term=RevisionTerm.of(pool, revision, any(REVISION_LABEL in pod.labels for pod in live), now_s),
        )

    def list_outdated(self, live: Sequence[MemberPod]) -> tuple[MemberPod, ...]:
        """Return those to replace, in order: first those that serve no student, then the newest."""
        found = (pod for pod in live if pod.labels.get(REVISION_LABEL) != self.revision)
        return tuple(sorted(found, key=lambda pod: (pod.ready, -pod.created_s, -pod.index)))

    def list_updated(self, live: Sequence[MemberPod]) -> tuple[MemberPod, ...]:
        """Return those that are made from the present spec."""
        return tuple(pod for pod in live if pod.labels.get(REVISION_LABEL) == self.revision)

    def count_present(self, live: Sequence[MemberPod]) -> int:
        """Return how many teachers count as there: while some are replaced there are one more or less for a while."""
        if self.wanted is not None and (self.awaited or self.list_outdated(live)):
            return self.wanted
        return len(live)

    def list_useless(self, live: Sequence[MemberPod], now_s: float) -> list[MemberPod]:
        """Return outdated teachers that no successor need wait for: they have no node, or cannot start."""
        if self.term.held_s:
            return []
        stopped = self.find_failing(live, now_s) is not None
        outdated = self.list_outdated(live)
        return [pod for pod in outdated if not pod.scheduled or (is_failing(pod, now_s) and not stopped)]

    def find_failing(self, live: Sequence[MemberPod], now_s: float) -> MemberPod | None:
        """Return a teacher of the present spec that does not start, or was restarted and is not steady yet."""
        return next((pod for pod in self.list_updated(live) if is_failing(pod, now_s)), None)

    def find_starting(self, live: Sequence[MemberPod], now_s: float) -> tuple[MemberPod | None, float | None]:
        """Return a teacher of the present spec that has not proven itself yet, and seconds until the next look."""
        waits = [(_find_unsteady_s(pod, now_s), pod) for pod in self.list_updated(live)]
        unready = next((pod for _, pod in waits if not pod.ready), None)
        if unready is not None:
            return unready, None
        left_s, pod = max(waits, key=lambda item: item[0], default=(0.0, None))
        return (pod, left_s) if left_s > 0 else (None, None)

    def keep_awaited(self, live: Sequence[MemberPod], target: int) -> str:
        """Return the member whose successor has no node yet; empty if it has, or is not needed."""
        arrived = any(pod.key == self.awaited and pod.scheduled for pod in live)
        return "" if arrived or sum(pod.scheduled for pod in live) >= target else self.awaited


def is_failing(pod: MemberPod, now_s: float) -> bool:
    """Whether a teacher's container cannot start, or ended a while ago and has not been steady since.

    A container that ends again and again runs for some seconds between: without a look back it would seem to start.
    """
    if pod.failing or (pod.finished and pod.phase == "Running"):
        return True
    is_recent = pod.started_s is None or now_s - pod.started_s < _RESTART_S
    return bool(pod.restarts) and is_recent and (not pod.ready or _find_unsteady_s(pod, now_s) > 0)


def choose_surplus(update: TeacherUpdate, live: Sequence[MemberPod], target: int) -> list[MemberPod]:
    """Return what is too much of a pool that is being updated, without that fewer than `target` are ready for it.

    There should be `target` teachers; during an update there may be one more.
    """
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
    """Whether what is idle was counted with a teacher that has gone since: its place is free, and not seen so."""
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
    """Return for how many more seconds a teacher must be ready until it counts."""
    if pod.ready_s is None:
        return 0.0
    # It is by the node's clock: where that is wrong, the time at which the pod got its node has to do.
    since_s = pod.ready_s if pod.ready_s <= now_s + STEADY_S else pod.placed_s
    return max(0.0, min(STEADY_S, since_s + STEADY_S - now_s))
