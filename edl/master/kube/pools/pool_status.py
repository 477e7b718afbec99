"""The status of a TeacherPool, and the events that go with its changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edl.kube.objects import Object, format_time
from edl.master.kube.members.naming import build_selector
from edl.master.kube.members.records import MemberRecord, format_member_records
from edl.master.kube.observation import Condition, EventNote, OwnerObservation, find_condition, write_conditions
from edl.master.kube.pools.growth import Growth, ProbeBackoff
from edl.master.kube.pools.updating import UpdateView
from edl.master.kube.resources import TeacherPool


@dataclass(frozen=True)
class PoolView:
    """A pool as it is after its plan.

    Attributes:
        target: teachers that it is to have.
        replicas: teachers that there are, or are being made.
        leaving: names of pods that were asked to end and have not ended.
        failing: which teacher does not start, and why; empty if all do.
        backoff: of its probes; None for none.
        update: of teachers that were made from a spec before; None where the pool has no teachers of its own.
    """

    target: int
    replicas: int
    scheduled: int
    ready: int
    growth: Growth
    leaving: tuple[str, ...] = ()
    failing: str = ""
    backoff: ProbeBackoff | None = None
    records: Mapping[str, MemberRecord] = field(default_factory=dict)
    update: UpdateView | None = None


def write_status(pool: TeacherPool, observation: OwnerObservation, view: PoolView) -> Object:
    """Return the whole status. The same for the same view: nothing in it counts seconds."""
    ready, message = _describe_readiness(pool, view)
    conditions = [
        _describe_acceptance(pool, observation),
        ready,
        Condition("Growing", view.growth.growing, view.growth.reason, view.growth.message),
        Condition("Suspended", pool.suspend, "Suspended" if pool.suspend else "NotSuspended"),
    ]
    update = view.update
    if update is not None:
        conditions.append(update.describe())
    if observation.service_holder:
        message = conditions[0].message
    if observation.store.stale and pool.scaling == "auto":
        message += "; how many are wanted is not known, as the store is away"
    if observation.store.refused and pool.scaling == "auto" and not pool.suspend:
        message += f"; how many are wanted is not known: {observation.store.refused}"
    phase = "Suspended" if pool.suspend else "Running" if view.ready or not view.target else "Pending"
    before = pool.status.get("conditions")
    return {
        "observedGeneration": pool.generation,
        "phase": phase,
        "service": pool.service,
        "replicas": view.replicas,
        "readyReplicas": view.ready,
        "scheduledReplicas": view.scheduled,
        "wantedReplicas": view.target,
        "borrowed": max(0, view.scheduled - pool.min_replicas),
        "leaving": list(view.leaving),
        "ignoredReplicas": _find_ignored(pool),
        "selector": ",".join(f"{key}={value}" for key, value in sorted(build_selector(pool, "teacher").items())),
        "message": message,
        "revision": update.revision if update is not None else None,
        "revisionSince": update.since if update is not None else None,
        "updatedReplicas": update.updated if update is not None else None,
        "servedPlaces": list(update.places) if update is not None else None,
        "awaitedMember": (update.awaited or None) if update is not None else None,
        "lastProbe": view.backoff.format() if view.backoff is not None else None,
        "excludedNodes": _list_excluded(view.records, observation.now_s),
        "members": format_member_records(view.records),
        "conditions": write_conditions(
            before if isinstance(before, list) else [], conditions, pool.generation, observation.now_s
        ),
    }


def _list_excluded(records: Mapping[str, MemberRecord], now_s: float) -> list[Object] | None:
    """Return the nodes that teachers keep away from, why, and the latest time until when."""
    nodes = [node for record in records.values() for node in record.excluded_nodes if node.until_s > now_s]
    latest = {node.node: node for node in sorted(nodes, key=lambda node: (node.node, node.until_s))}
    found = [{"node": node.node, "until": format_time(node.until_s), "cause": node.cause} for node in latest.values()]
    return found or None


def _describe_acceptance(pool: TeacherPool, observation: OwnerObservation) -> Condition:
    if not observation.service_holder and observation.store.refused:
        return Condition("Accepted", True, "StoreNotAllowed", observation.store.refused)
    if not observation.service_holder and observation.store.unreachable and pool.scaling == "auto":
        return Condition("Accepted", True, "StoreUnreachable", observation.store.unreachable)
    if not observation.service_holder:
        return Condition("Accepted", True, "Valid", "the specification can be carried out")
    text = f"{observation.service_holder} serves {pool.service} in the same store: choose another spec.service or store"
    return Condition("Accepted", False, "ServiceTaken", text)


def _describe_readiness(pool: TeacherPool, view: PoolView) -> tuple[Condition, str]:
    """Return the condition `Ready`, and the status's message."""
    counted = f"{view.ready} of {view.target} teachers are ready"
    if pool.suspend:
        return Condition("Ready", False, "Suspended", counted), "suspended"
    if view.failing:
        return Condition("Ready", False, "TeacherFailing", f"{counted}; {view.failing}"), f"{counted}; {view.failing}"
    if view.ready >= view.target:
        if view.update is not None and view.update.outdated:
            message = f"{counted}; {view.update.describe().message}"
            return Condition("Ready", True, "Updating", message), message
        return Condition("Ready", True, "AllReady", counted), counted
    if view.ready < view.scheduled:
        return Condition("Ready", False, "Starting", counted), f"{counted}, others start"
    message = f"{counted}: {view.growth.message}"
    return Condition("Ready", False, view.growth.reason, message), message


def _find_ignored(pool: TeacherPool) -> int | None:
    """Return what `/scale` wrote where that decides nothing."""
    return pool.replicas if pool.scaling == "auto" else None


def describe_transitions(pool: TeacherPool, view: PoolView) -> tuple[EventNote, ...]:
    """Return the events of what is otherwise than in the status before; at rest there are none."""
    events = []
    before = pool.status
    was_scheduled = before.get("scheduledReplicas")
    if isinstance(was_scheduled, int) and view.scheduled > was_scheduled:
        events.append(EventNote("Normal", "Grew", f"{view.scheduled} teachers have a node, {was_scheduled} before"))
    was_leaving = before.get("leaving")
    for name in was_leaving if isinstance(was_leaving, list) else []:
        if isinstance(name, str) and name not in view.leaving:
            events.append(EventNote("Normal", "GaveBack", f"{name} has ended: what it had is free", name))
    if view.growth.reason != find_condition(before, "Growing").get("reason"):
        if view.growth.reason == "NoIdleCapacity":
            events.append(EventNote("Normal", "NoIdleCapacity", view.growth.message))
        if view.growth.reason == "ServiceTaken":
            events.append(EventNote("Warning", "ServiceTaken", view.growth.message))
        if view.growth.reason == "Suspended":
            events.append(EventNote("Normal", "Suspended", "all teachers are taken away"))
    if view.failing and find_condition(before, "Ready").get("reason") != "TeacherFailing":
        events.append(EventNote("Warning", "TeacherFailing", view.failing))
    if view.update is not None:
        events += _describe_update(before, view.update.describe())
    ignored = _find_ignored(pool)
    if ignored is not None and ignored != before.get("ignoredReplicas"):
        events.append(
            EventNote(
                "Normal", "ScaleIgnored", f"replicas: {ignored} decides nothing, as scaling is auto; set external"
            )
        )
    return tuple(events)


def _describe_update(before: Mapping[str, object], now: Condition) -> list[EventNote]:
    reason = find_condition(before, "Updated").get("reason")
    if now.reason == reason or (now.status and not reason):
        return []
    kind = "Warning" if now.reason == "UpdateStopped" else "Normal"
    return [EventNote(kind, "Updated" if now.status else now.reason, now.message)]
