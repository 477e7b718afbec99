"""Which teachers a pool replaces, the plan being built (`PoolDraft`), and the status and events derived from it.

After its spec is edited, a pool replaces its teachers one by one; if there is room, it starts each successor before it
stops the old teacher. Outdated teachers are recognized by their revision, a digest of everything that a pod is created
from. If no node has room for another teacher, an old teacher is removed first. No further teacher is removed until the
successor has a node, because other pods may take the borrowed room. If a successor does not start, the update stops,
and the outdated teachers stay.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from edl.discovery.store_url import identify_store
from edl.kube.objects import Object, format_time, read_time
from edl.master.kube.members.pods import OWNER_UID_LABEL, MemberPod, build_selector
from edl.master.kube.members.records import MemberRecord, format_member_records
from edl.master.kube.observation import (
    Condition,
    EventNote,
    OwnerObservation,
    PodDeletion,
    ScaleTarget,
    describe_store,
    find_condition,
    write_conditions,
)
from edl.master.kube.resources import TeacherPool

REVISION_LABEL: Final = "edl.io/revision"
_CHARS: Final = 10
"""40 bits (10 digits) distinguish the specs of a pool; 64 bits (16 digits) distinguish the places of a cluster."""
_PLACE_CHARS: Final = 16


def hash_revision(pool: TeacherPool) -> str:
    """Return the digest of everything that a teacher's pod is created from, and of no other field of the spec.

    If a release of the operator includes other fields here, the upgrade replaces all teachers of all pools.
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
        """Return a teacher with the present spec that fails; None if no such teacher fails."""
        return next((pod for pod in self.list_updated(live) if is_failing(pod, now_s)), None)

    def find_starting(self, live: Sequence[MemberPod], now_s: float) -> tuple[MemberPod | None, float | None]:
        """Return an updated teacher that is not steady yet, if any, and the seconds until the next check."""
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
    """Return surplus teachers, so that up to `target` teachers stay ready. During an update, one more may stay."""
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


_MOST_S: Final = 300.0  # idle room is borrowed within 5 minutes, at 12 pods an hour while there is none


@dataclass(frozen=True)
class ProbeBackoff:
    """The last time that a pool found no room: at `at_s` (Unix time), its probe was removed or a teacher preempted."""

    at_s: float
    wait_s: float

    @classmethod
    def read(cls, status: Mapping[str, Any]) -> ProbeBackoff | None:
        """Read `status.lastProbe`; None if it is missing or was not written by EDL."""
        written = status.get("lastProbe")
        if not isinstance(written, Mapping):
            return None
        at_s, wait_s = read_time(written.get("at")), written.get("backoffSeconds")
        if at_s is None or isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 < wait_s < math.inf:
            return None
        return cls(at_s, min(_MOST_S, float(wait_s)))

    def format(self) -> Object:
        return {"at": format_time(self.at_s), "backoffSeconds": math.ceil(self.wait_s)}

    def left_s(self, now_s: float) -> float:
        """Return the seconds to wait before the next attempt. Setting the clock back does not prolong the wait."""
        return max(0.0, min(self.wait_s, self.at_s + self.wait_s - now_s))

    def is_over(self, pods: Iterable[MemberPod]) -> bool:
        """Return whether a later teacher has found room, so that the next teacher may follow at once."""
        return any(pod.created_s > self.at_s for pod in pods)


def back_off(before: ProbeBackoff | None, first_s: float, now_s: float) -> ProbeBackoff:
    """Return the back-off after a probe that found no room: twice the previous back-off, up to 300 s."""
    wait_s = first_s if before is None else max(first_s, 2 * before.wait_s)
    return ProbeBackoff(now_s, min(_MOST_S, wait_s))


@dataclass(frozen=True)
class Growth:
    """Whether a pool grows, for the condition `Growing`. `requeue_s` is None if only an event can change this."""

    growing: bool
    reason: str
    message: str
    create: bool = False
    requeue_s: float | None = None


@dataclass
class PoolDraft:
    """A pool's plan while it is being built: the planner fills in the plan, and the pool's status is written from it.

    Attributes:
        live: teachers that count: each is its member's newest pod, and is not leaving.
        update: which teachers are outdated; None if the pool scales a different object.
        awaited: the member that was removed to make room for its successor, while the successor has no node yet; empty
            for none.
        waits_for: what the next replacement of an outdated teacher waits for; empty for nothing.
        look_again_s: seconds until the next check of what `waits_for` describes, or of the object that the pool scales;
            None if an event reports any change.
        places: where the pool's teachers may be found; see `list_places`.
        unproven: no outdated teacher is left, but not all teachers with the present spec have been ready for some
            seconds yet.
    """

    pool: TeacherPool
    observation: OwnerObservation
    teachers: list[MemberPod]
    records: dict[str, MemberRecord]
    backoff: ProbeBackoff | None
    live: list[MemberPod] = field(default_factory=list)
    update: TeacherUpdate | None = None
    target: int = 0
    growth: Growth = Growth(False, "", "")
    scale: tuple[ScaleTarget, int] | None = None
    delete: list[PodDeletion] = field(default_factory=list)
    create: list[Object] = field(default_factory=list)
    events: list[EventNote] = field(default_factory=list)
    awaited: str = ""
    waits_for: str = ""
    look_again_s: float | None = None
    places: tuple[str, ...] = ()
    unproven: bool = False

    @property
    def replicas(self) -> int:
        """How many teachers exist or are being created."""
        if self.update is not None:
            return len(self.live) + len(self.create)
        return 0 if self.observation.target is None else self.observation.target.replicas

    @property
    def scheduled(self) -> int:
        return self.replicas if self.update is None else sum(pod.scheduled for pod in self.live)

    @property
    def ready(self) -> int:
        if self.update is not None:
            return sum(pod.ready for pod in self.live)
        return 0 if self.observation.target is None else self.observation.target.ready

    @property
    def leaving(self) -> list[MemberPod]:
        """Teachers that were asked to end and have not ended."""
        return [pod for pod in self.teachers if pod.deleting and not pod.finished]

    @property
    def outdated(self) -> int:
        return 0 if self.update is None else len(self.update.list_outdated(self.live))

    @property
    def failing(self) -> str:
        """Which teacher does not start, and why; empty if all start."""
        now_s = self.observation.now_s
        if self.update is None:
            return ""
        return next((describe_failure(pod) for pod in self.live if is_failing(pod, now_s)), "")

    def release(self, pod: MemberPod, reason: str) -> None:
        """Release a teacher, with its pod's own grace period. The record begins a new attempt, so no name is reused."""
        self.records[pod.key] = self.records[pod.key].begin_try(self.observation.now_s)
        self.delete.append(PodDeletion(pod.name, pod.uid, None, reason))


def describe_failure(pod: MemberPod) -> str:
    """Return why a teacher does not start: how its container last ended, or else why the kubelet waits."""
    if not pod.failing:
        ended = f": {pod.container_end}" if pod.container_end else ""
        return f"{pod.name}: its container has ended and was restarted{ended}"
    if pod.waiting == "CrashLoopBackOff" and pod.container_end:
        return f"{pod.name}: {pod.waiting}: its container ends with {pod.container_end}"
    return f"{pod.name}: {pod.waiting}: {pod.waiting_message or pod.termination.message}"


def write_status(draft: PoolDraft) -> Object:
    """Return the whole status. Equal drafts give equal statuses: nothing in it counts seconds."""
    pool, store, update = draft.pool, draft.observation.store, draft.update
    ready, message = _describe_readiness(draft)
    conditions = [
        _describe_acceptance(draft),
        ready,
        Condition("Growing", draft.growth.growing, draft.growth.reason, draft.growth.message),
        Condition("Suspended", pool.suspend, "Suspended" if pool.suspend else "NotSuspended"),
        *([_describe_update(draft)] if update is not None else []),
    ]
    if store.stale and pool.scaling == "auto":
        message += "; the wanted number is unknown, as the store is unreachable"
    if store.refused and pool.scaling == "auto" and not pool.suspend:
        message += f"; the wanted number is unknown: {store.refused}"
    before, now_s = pool.status.get("conditions"), draft.observation.now_s
    status = {
        "observedGeneration": pool.generation,
        "phase": _find_phase(draft),
        "service": pool.service,
        "replicas": draft.replicas,
        "readyReplicas": draft.ready,
        "scheduledReplicas": draft.scheduled,
        "wantedReplicas": draft.target,
        "borrowed": max(0, draft.scheduled - pool.min_replicas),
        "leaving": sorted(pod.name for pod in draft.leaving),
        "ignoredReplicas": _find_ignored(pool),
        "selector": ",".join(f"{key}={value}" for key, value in sorted(build_selector(pool, "teacher").items())),
        "message": message,
        "lastProbe": draft.backoff.format() if draft.backoff is not None else None,
        "excludedNodes": _list_excluded(draft.records, now_s),
        "members": format_member_records(draft.records),
        "conditions": write_conditions(before if isinstance(before, list) else [], conditions, pool.generation, now_s),
    }
    if update is not None:
        status["revision"] = update.revision
        status["updatedReplicas"] = draft.replicas - draft.outdated
        status["servedPlaces"] = list(draft.places)
        status["awaitedMember"] = draft.awaited or None
    return status


def _find_phase(draft: PoolDraft) -> str:
    if draft.pool.suspend:
        return "Suspended"
    if draft.observation.service_holder:
        return "Rejected"
    return "Running" if draft.ready or not draft.target else "Pending"


def _list_excluded(records: Mapping[str, MemberRecord], now_s: float) -> list[Object] | None:
    nodes = [node for record in records.values() for node in record.excluded_nodes if node.until_s > now_s]
    latest = {node.node: node for node in sorted(nodes, key=lambda node: (node.node, node.until_s))}
    found = [{"node": node.node, "until": format_time(node.until_s), "cause": node.cause} for node in latest.values()]
    return found or None


def _describe_acceptance(draft: PoolDraft) -> Condition:
    pool, store, holder = draft.pool, draft.observation.store, draft.observation.service_holder
    if holder:
        text = f"{holder} serves {pool.service} in the same store: choose another spec.service or store"
        return Condition("Accepted", False, "ServiceTaken", text)
    # Whoever sets `/scale` does not need the store.
    return describe_store(store if pool.scaling == "auto" else replace(store, unreachable=""))


def _describe_readiness(draft: PoolDraft) -> tuple[Condition, str]:
    counted = f"{draft.ready} of {draft.target} teachers are ready"
    if draft.pool.suspend:
        return Condition("Ready", False, "Suspended", counted), "suspended"
    if draft.observation.service_holder:
        message = _describe_acceptance(draft).message
        return Condition("Ready", False, "ServiceTaken", message), message
    if draft.failing:
        message = f"{counted}; {draft.failing}"
        return Condition("Ready", False, "TeacherFailing", message), message
    if draft.ready >= draft.target:
        if draft.outdated:
            message = f"{counted}; {_describe_update(draft).message}"
            return Condition("Ready", True, "Updating", message), message
        return Condition("Ready", True, "AllReady", counted), counted
    if draft.ready < draft.scheduled:
        return Condition("Ready", False, "Starting", counted), f"{counted}; others are starting"
    message = f"{counted}: {draft.growth.message}"
    return Condition("Ready", False, draft.growth.reason, message), message


def _describe_update(draft: PoolDraft) -> Condition:
    assert draft.update is not None
    failing = draft.update.find_failing(draft.live, draft.observation.now_s)
    stopped = describe_failure(failing) if failing is not None else ""
    if not draft.outdated and not draft.unproven:
        return Condition("Updated", True, "UpToDate", "all teachers have the present spec")
    reason = "UpdateStopped" if stopped else "Updating"
    if not draft.outdated:
        waits = stopped or draft.waits_for or "teachers with the present spec are starting"
        return Condition("Updated", False, reason, f"no teacher of an earlier spec is left: {waits}")
    counted = f"{draft.outdated} of {draft.replicas} teachers have an earlier spec"
    if stopped:
        return Condition("Updated", False, reason, f"{counted}, and keep running: {stopped}")
    waits = f": {draft.waits_for}" if draft.waits_for else ", and are replaced one at a time"
    return Condition("Updated", False, reason, f"{counted}{waits}")


def _find_ignored(pool: TeacherPool) -> int | None:
    return pool.replicas if pool.scaling == "auto" else None


def describe_transitions(draft: PoolDraft) -> tuple[EventNote, ...]:
    """Return the events for changes from the previous status; at rest there are none."""
    events = []
    pool, before, growth = draft.pool, draft.pool.status, draft.growth
    was_scheduled = before.get("scheduledReplicas")
    if isinstance(was_scheduled, int) and draft.scheduled > was_scheduled:
        events.append(EventNote("Normal", "Grew", f"{draft.scheduled} teachers have a node, {was_scheduled} before"))
    was_leaving, leaving = before.get("leaving"), {pod.name for pod in draft.leaving}
    for name in was_leaving if isinstance(was_leaving, list) else []:
        if isinstance(name, str) and name not in leaving:
            events.append(EventNote("Normal", "GaveBack", f"{name} has ended: its resources are free", name))
    if growth.reason != find_condition(before, "Growing").get("reason"):
        if growth.reason == "NoIdleCapacity":
            events.append(EventNote("Normal", "NoIdleCapacity", growth.message))
        if growth.reason == "ServiceTaken":
            events.append(EventNote("Warning", "ServiceTaken", growth.message))
        if growth.reason == "Suspended":
            events.append(EventNote("Normal", "Suspended", "all teachers are removed"))
    if draft.failing and find_condition(before, "Ready").get("reason") != "TeacherFailing":
        events.append(EventNote("Warning", "TeacherFailing", draft.failing))
    if draft.update is not None:
        now, reason = _describe_update(draft), find_condition(before, "Updated").get("reason")
        if now.reason != reason and not (now.status and not reason):
            kind = "Warning" if now.reason == "UpdateStopped" else "Normal"
            events.append(EventNote(kind, "Updated" if now.status else now.reason, now.message))
    ignored = _find_ignored(pool)
    if ignored is not None and ignored != before.get("ignoredReplicas"):
        text = f"replicas: {ignored} has no effect, as scaling is auto; set scaling to external"
        events.append(EventNote("Normal", "ScaleIgnored", text))
    return tuple(events)
