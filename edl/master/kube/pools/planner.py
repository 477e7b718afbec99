"""`plan_pool`: decides what to do about a TeacherPool, from an observation of one moment. Pure.

A pool grows into idle room by one teacher at a time, and backs off after a teacher found no room or was preempted. The
back-off is stored in `status.lastProbe`, so a new operator does not probe at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from edl.kube.objects import Object, format_time
from edl.master.kube.members.pod_template import POD_ADDRESS, build_member_pod
from edl.master.kube.members.pods import MemberPod, find_main_container, get_list
from edl.master.kube.members.records import (
    LAUNCH_PATIENCE_S,
    ExcludedNode,
    MemberRecord,
    read_member_records,
    record_end,
    relax_exclusions,
)
from edl.master.kube.observation import EventNote, OwnerObservation, Plan, PodDeletion
from edl.master.kube.pools.pool_status import (
    REVISION_LABEL,
    STEADY_S,
    Growth,
    PoolDraft,
    ProbeBackoff,
    TeacherUpdate,
    back_off,
    choose_surplus,
    describe_transitions,
    hash_place,
    hash_revision,
    is_behind,
    is_failing,
    list_places,
    write_status,
)
from edl.master.kube.resources import TeacherPool
from edl.master.scaling.terminations import (
    RelaunchAction,
    RelaunchRule,
    TerminationCause,
    TerminationReport,
    find_termination_cause,
)

SERVE_PORT: Final = 8001
"""For gRPC, as in Triton: https://github.com/triton-inference-server/server/blob/main/docs/protocol/README.md."""
METRICS_PORT: Final = 8002
_METRICS_NAME: Final = "metrics"
"""Name of the port for metrics, by which the chart's PodMonitor `edl-teachers` finds the port."""
_EXIT_MARGIN_S: Final = 2.0
"""Seconds of the grace period that are not used for draining, but for the kubelet's SIGTERM, deregistration, closing
the model and exiting. With less time, a teacher that drains until its deadline is killed before it leaves discovery."""
_LINGER: Final = "100ms"
"""How long a leaving teacher still accepts requests after discovery shows it as draining; its students' watches see
this within about 10 ms. The pod that takes over the teacher's GPU also has to wait for this time."""
_LOADING_S: Final = 1800  # to load and warm up a model before the kubelet restarts its container
_QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/"""
_PROBE_S: Final = 5  # seconds, interval and timeout: a teacher's own check waits for 4 s


def build_teacher_args(pool: TeacherPool) -> list[str]:
    """Return the arguments for `edl` in a teacher's container; those in `spec.serve` come last and take precedence."""
    drain_s = max(pool.grace_period_s / 2, pool.grace_period_s - _EXIT_MARGIN_S)
    args = ["serve", "--service", pool.service]
    if pool.store:
        args += ["--discovery", pool.store]
    args += ["--host", "0.0.0.0", "--port", str(SERVE_PORT), "--advertise", POD_ADDRESS]
    args += ["--metrics-host", "0.0.0.0", "--metrics-port", str(METRICS_PORT)]
    args += ["--drain-timeout", f"{drain_s:g}s", "--linger", _LINGER]
    return [*args, *pool.serve]


def build_teacher_pod(pool: TeacherPool, index: int, record: MemberRecord) -> Object:
    """Return the pod of a teacher.

    The kubelet restarts a container that ends, so the pod keeps the borrowed resources. If a model crashes at each
    start, its pod shows `CrashLoopBackOff`, and the pool does not grow until the model starts.
    """
    labels = {REVISION_LABEL: hash_revision(pool), **({_QUEUE_LABEL: pool.queue} if pool.queue else {})}
    pod = build_member_pod(pool, "teacher", index, record, build_teacher_args(pool), labels=labels)
    spec = pod["spec"]
    spec["restartPolicy"] = "Always"
    main: dict[str, Any] = dict(find_main_container(spec))
    spec["containers"] = [main if item.get("name") == main.get("name") else item for item in spec["containers"]]
    if any(arg.startswith("--metrics-port") for arg in pool.serve):
        return pod  # its probes would use a different port
    main.setdefault("startupProbe", _probe("/livez", failures=_LOADING_S // _PROBE_S))
    main.setdefault("livenessProbe", _probe("/livez", failures=6))
    main.setdefault("readinessProbe", {**_probe("/readyz", failures=1), "periodSeconds": 2})
    own = {"name": "grpc", "containerPort": SERVE_PORT, "protocol": "TCP"}
    main["ports"] = list(main.get("ports") or [own])
    if not any(port.get("name") == _METRICS_NAME for item in spec["containers"] for port in get_list(item, "ports")):
        main["ports"].append({"name": _METRICS_NAME, "containerPort": METRICS_PORT, "protocol": "TCP"})
    return pod


def _probe(path: str, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": METRICS_PORT},
        "periodSeconds": _PROBE_S,
        "timeoutSeconds": _PROBE_S,
        "failureThreshold": failures,
    }


def find_target(pool: TeacherPool, observation: OwnerObservation, present: int) -> int:
    """Return how many teachers a pool should have, within its bounds; 0 if it is suspended or its service is taken.

    If the store does not say how many teachers are wanted, nothing changes. While the store is unreachable or may not
    be asked, the last wanted number is kept; otherwise the number of `present` teachers, including pending ones, is
    kept.
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


_CAPACITY_LAG_S: Final = 1.0  # from a list to a watch that shows the same: milliseconds, or more if the server is busy
_CAPACITY_LOOK_S: Final = 30.0  # to recheck whether there is room, if no event reports it


def decide_growth(draft: PoolDraft, target: int, not_before_s: float | None, pod: Mapping[str, Any]) -> Growth:
    """Decide whether a pool with fewer than `target` teachers creates another teacher, whose pod would be `pod`.

    If capacity is known, `pod` avoids the node of `find_launch_failure`. `not_before_s` is when the teacher may be
    created; None for at once.
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
        message = "the next teacher waits, since other teachers ended"
        return Growth(False, "BackOff", message, requeue_s=not_before_s - now_s)
    if len(live) < pool.min_replicas:
        return Growth(True, "BelowMinimum", "a teacher is created, since minReplicas is not reached", create=True)
    return _grow_into_idle_room(draft, pod)


def find_launch_failure(live: Sequence[MemberPod], now_s: float) -> MemberPod | None:
    """Return a teacher that has been failing for long, if no other teacher fails: its node may be the cause."""
    failing = [other for other in live if is_failing(other, now_s)]
    if len(failing) != 1 or now_s - failing[0].placed_s < LAUNCH_PATIENCE_S:
        return None
    cause = find_termination_cause(failing[0].termination).cause
    return failing[0] if cause is TerminationCause.LAUNCH_FAILED else None


def _may_start_elsewhere(observation: OwnerObservation, live: Sequence[MemberPod], pod: Mapping[str, Any]) -> bool:
    """Whether to try another teacher although one teacher fails. If a second one fails, the node is not the cause."""
    if find_launch_failure(live, observation.now_s) is None:
        return False
    return observation.capacity is None or bool(observation.capacity.count_fitting(pod))


def _grow_into_idle_room(draft: PoolDraft, pod: Mapping[str, Any]) -> Growth:
    """Decide by idle capacity; if idle capacity is unknown, a teacher that waits for a node serves as a probe."""
    capacity = draft.observation.capacity
    left_s = draft.backoff.left_s(draft.observation.now_s) if draft.backoff is not None else 0.0
    fitting = None
    if capacity is not None:
        if not all(capacity.shows(other.uid, other.node) for other in draft.live):
            return Growth(True, "LooksForRoom", "checking idle capacity", requeue_s=_CAPACITY_LAG_S)
        fitting = capacity.count_fitting(pod)
    if fitting == 0:
        return Growth(False, "NoIdleCapacity", "no node has room for a teacher", requeue_s=_CAPACITY_LOOK_S)
    if left_s > 0:
        message = "the last attempted teacher found no node, or was preempted; another attempt follows later"
        return Growth(False, "NoIdleCapacity", message, requeue_s=left_s)
    return Growth(True, "Creating", "a teacher is created", create=True)


def _scale_target(draft: PoolDraft) -> None:
    """Decide the value for the `/scale` of the pool's `scaleTargetRef`.

    The operator does not create, probe or remove that object's pods one by one, and ignores idle capacity. If an
    autoscaler writes the same `/scale`, its value is overwritten. The pool's former teachers are removed, but their
    records stay.
    """
    pool, ref, holder = draft.pool, draft.pool.scale_target_ref, draft.observation.service_holder
    assert ref is not None
    for pod in draft.live:
        draft.release(pod, "the pool scales another object instead of its own pods")
    present = draft.replicas
    draft.target = find_target(pool, draft.observation, present)
    named = f"{ref.kind} {ref.name}"
    if holder:
        draft.target = present  # not for the pool to end: its registrations are the problem
        draft.growth = Growth(False, "ServiceTaken", f"{holder} serves {pool.service} in the same store")
    elif draft.observation.target is None:
        draft.growth = Growth(False, "TargetMissing", f"this namespace has no {named}")
    elif present < draft.target:
        draft.growth = Growth(True, "Scaling", f"{named} is scaled to {draft.target}")
    elif draft.target == pool.max_replicas:
        draft.growth = Growth(False, "AtMaximum", "maxReplicas is reached")
    else:
        draft.growth = Growth(False, "AtWanted", "as many teachers as wanted")
    if draft.observation.target is not None and present != draft.target:
        draft.scale = (draft.observation.target, draft.target)
    # No event reports changes to the object: nothing watches it.
    draft.look_again_s = _TARGET_LOOK_S if present == draft.ready == draft.target else _LEAVING_LOOK_S


_ELSEWHERE: Final = frozenset({TerminationCause.EVICTED, TerminationCause.HARDWARE, TerminationCause.NODE_LOST})
"""Causes for which a node is responsible: the teacher's next pod avoids that node for a while."""
_TEACHER_TABLE: Final = {
    cause: (RelaunchRule(RelaunchAction.ELSEWHERE if cause in _ELSEWHERE else RelaunchAction.NEW_POD),)
    for cause in TerminationCause
}
"""A teacher is a server: whatever ended its pod, a new pod follows. The kubelet restarts containers that exit."""

_START_LOOK_S: Final = 30.0
"""Interval for rechecking teachers that do not start: their pods' events are read at the same interval."""
_TARGET_LOOK_S: Final = 15.0  # to recheck the object of a `scaleTargetRef` that has the desired scale
_LEAVING_LOOK_S: Final = 1.0
"""Interval for rechecking whether an outdated teacher is gone, and whether the watch for idle capacity has noticed
that."""


def plan_pool(pool: TeacherPool, observation: OwnerObservation) -> Plan:
    """Decide what to do about a pool. For a pool at rest, nothing changes, not even the status."""
    teachers = [pod for pod in observation.pods if pod.role == "teacher"]
    draft = PoolDraft(pool, observation, teachers, read_member_records(pool.status), ProbeBackoff.read(pool.status))
    _settle_members(draft)
    if pool.scale_target_ref is None:
        draft.update = TeacherUpdate.of(pool, draft.live)
        _size(draft, draft.update)
    else:
        _scale_target(draft)
    return Plan(
        status=write_status(draft),
        delete=tuple(draft.delete),
        create=tuple(draft.create),
        scale=draft.scale,
        events=(*draft.events, *describe_transitions(draft)),
        requeue_s=_find_requeue_s(draft),
    )


def _size(draft: PoolDraft, update: TeacherUpdate) -> None:
    draft.target = find_target(draft.pool, draft.observation, update.count_present(draft.live))
    if draft.backoff is not None and draft.backoff.is_over(pod for pod in draft.live if pod.scheduled):
        draft.backoff = None
    if draft.pool.status.get("revision") not in (None, update.revision):
        draft.backoff = None  # from teachers of a different spec
    _shrink(draft, update)
    draft.awaited = update.keep_awaited(draft.live, draft.target)
    draft.growth = _grow(draft, draft.target)
    if update.list_outdated(draft.live) and not draft.growth.create:
        _replace_outdated(draft, update)
    draft.places = (hash_place(draft.pool),)
    outdated = update.list_outdated(draft.live)
    if outdated or draft.delete or any(not pod.node_silent for pod in draft.leaving):
        draft.places = tuple(sorted(list_places(draft.pool)))
    draft.unproven = update.begun and draft.target > 0 and not outdated and not _is_proven(draft, update)


def _find_requeue_s(draft: PoolDraft) -> float | None:
    now_s, times = draft.observation.now_s, [draft.growth.requeue_s, draft.look_again_s]
    if draft.update is not None:
        if any(is_failing(pod, now_s) for pod in draft.live):
            times.append(STEADY_S)  # when it may be steady again
        if any(pod.scheduled and pod.phase == "Pending" for pod in draft.live):
            times.append(_START_LOOK_S)  # a missing volume or secret changes no pod, nor does its arrival
        if list_places(draft.pool) - set(draft.places):
            times.append(_LEAVING_LOOK_S)  # to tell others of the free place
    return min((value for value in times if value is not None), default=None)


def _find_leaving_look_s(leaving: Sequence[MemberPod], now_s: float) -> float:
    """Return the seconds until the next check whether teachers are gone: few, unless all exceed their grace period."""
    hang = [pod.delete_by_s is not None and now_s > pod.delete_by_s + _START_LOOK_S for pod in leaving]
    return _START_LOOK_S if hang and all(hang) else _LEAVING_LOOK_S


def _settle_members(draft: PoolDraft) -> None:
    now_s = draft.observation.now_s
    newest: dict[str, MemberPod] = {}
    for pod in draft.teachers:
        record = draft.records.get(pod.key, MemberRecord()).adopt(pod)
        draft.records[pod.key] = record
        if pod.try_number == record.try_number:
            newest[pod.key] = pod
    for key, record in list(draft.records.items()):
        found = newest.get(key)
        if key.startswith("teacher-") and (_has_ended(found) if found is not None else bool(record.uid)):
            _record_end(draft, key, found, now_s)
    for pod in draft.teachers:
        if pod.try_number == draft.records[pod.key].try_number:
            draft.live.append(pod)
        elif pod.emptied and not pod.node_silent:
            draft.delete.append(
                PodDeletion(pod.name, pod.uid, 0, "its containers have ended: other pods wait for its place")
            )
        elif not pod.deleting:  # it ended for good, or was released by an operator that died before deleting it
            draft.delete.append(PodDeletion(pod.name, pod.uid, None, "another pod has its place"))


def _record_end(draft: PoolDraft, key: str, pod: MemberPod | None, now_s: float) -> None:
    """Count a teacher's end; if capacity is unknown, a place that another pod took is not requested again at once."""
    report = pod.termination if pod is not None else TerminationReport(events=("Preempted",))
    outcome = record_end(draft.records[key], report, pod, now_s, table=_TEACHER_TABLE)
    record, cause, evidence = outcome.record, outcome.verdict.cause, outcome.verdict.evidence
    drained = pod is not None and pod.deleting and cause is TerminationCause.SUCCEEDED
    taken = cause is TerminationCause.PREEMPTED or drained
    if taken:
        record = record.forgive(now_s)
        if draft.observation.capacity is None:
            # Not before the teacher is gone and the pod that took its place has its node: a scheduler other than the
            # pod's does not reserve the place for it, and a probe would get there first.
            least_s = float(max(draft.pool.probe_s, draft.pool.grace_period_s))
            wait_s = max(least_s, draft.backoff.wait_s if draft.backoff is not None else 0.0)
            draft.backoff = ProbeBackoff(now_s, wait_s)
    draft.records[key] = record
    name = pod.name if pod is not None else key
    message = f"{name}: {'it was asked to end, and has drained' if drained else evidence}"
    draft.events.append(
        EventNote("Normal", "Preempted" if taken else "TeacherEnded", message, pod.name if pod is not None else "")
    )
    if pod is None:  # it was gone before it was seen leaving
        draft.events.append(EventNote("Normal", "GaveBack", f"{name} has ended: its resources are free"))


def _shrink(draft: PoolDraft, update: TeacherUpdate) -> None:
    """Release surplus teachers: first those without a node, then the newest. At most one may wait for a node."""
    now_s, pool, target = draft.observation.now_s, draft.pool, draft.target
    gone = set()
    for pod in update.list_useless(draft.live, now_s):
        draft.release(pod, "it has an earlier spec, and serves no student")
        gone.add(pod.name)
    kept = sorted(
        (pod for pod in draft.live if pod.name not in gone),
        key=lambda pod: (not pod.scheduled, pod.created_s, pod.index),
    )
    for pod in choose_surplus(update, kept, target) if update.list_outdated(kept) else kept[target:]:
        draft.release(pod, "fewer teachers are wanted")
        gone.add(pod.name)
    kept = [pod for pod in kept if pod.name not in gone]
    waiting = [pod for pod in kept if not pod.scheduled]
    for pod in waiting[1:]:
        draft.release(pod, "only one teacher waits for a node at a time")
    kept = [pod for pod in kept if pod.scheduled or pod is waiting[0]]
    # A teacher of the minimum waits as long as it takes, and so does one whose start Kueue decides.
    is_probe = bool(waiting) and len(kept) > pool.min_replicas and not pool.queue
    if is_probe and now_s - waiting[0].created_s >= pool.probe_s:
        draft.backoff = back_off(draft.backoff, float(pool.probe_s), now_s)
        draft.release(waiting[0], f"no node had room for it within {pool.probe_s} s")
        kept.remove(waiting[0])
    draft.live = kept


def _grow(draft: PoolDraft, target: int) -> Growth:
    pool, observation, live = draft.pool, draft.observation, draft.live
    taken = {pod.index for pod in live}
    index = next(number for number in range(len(taken) + 1) if number not in taken)
    if draft.awaited and draft.awaited not in {pod.key for pod in live}:
        index = int(draft.awaited.rpartition("-")[2])
    record = draft.records.get(f"teacher-{index}", MemberRecord())
    excluded = relax_exclusions(record, None, observation.now_s).excluded_nodes
    stuck = find_launch_failure(live, observation.now_s)
    left_out = excluded
    if stuck is not None and stuck.node and observation.capacity is not None:  # it tells whether another node has room
        left_out = (*excluded, ExcludedNode(stuck.node, observation.now_s, TerminationCause.LAUNCH_FAILED.value))
    pod = build_teacher_pod(pool, index, replace(record, excluded_nodes=left_out))
    growth = decide_growth(draft, target, record.not_before_s, pod)
    if excluded and growth.reason == "NoIdleCapacity":
        words = ", ".join(f"{node.node} until {format_time(node.until_s)} ({node.cause})" for node in excluded)
        growth = replace(growth, message=f"{growth.message}; excluded: {words}")
    if growth.create:
        draft.records.setdefault(f"teacher-{index}", record)
        draft.create.append(pod)
    return growth


def _replace_outdated(draft: PoolDraft, update: TeacherUpdate) -> None:
    """Advance an update by one step: create a successor if there is room for it, or release an outdated teacher."""
    pool, observation, live, target = draft.pool, draft.observation, draft.live, draft.target
    chosen = update.list_outdated(live)[0]
    starting, draft.look_again_s = update.find_starting(live, observation.now_s)
    if update.find_failing(live, observation.now_s) is not None:
        return
    waiting = starting if starting is not None and not starting.scheduled else None
    # It lacks quota, which Kueue grants, or belongs to the minimum: neither leaves by itself, and both need a place.
    is_stuck = waiting is not None and (bool(pool.queue) or len(live) <= target)
    left_s = waiting.created_s + pool.probe_s - observation.now_s if waiting is not None and is_stuck else 0.0
    if starting is not None and (not is_stuck or left_s > 0):
        draft.waits_for = _describe_start(starting)
        if is_stuck:
            draft.look_again_s = max(0.1, left_s)
        return
    if len(live) <= target:
        if draft.awaited:
            draft.waits_for = f"no node has room for the successor of {draft.awaited}"
            return
        leaving = [pod for pod in draft.leaving if not pod.node_silent]
        if leaving or is_behind(pool, observation):
            names = ", ".join(pod.name for pod in leaving) or "a released teacher"
            draft.waits_for = f"{names} {'have' if len(leaving) > 1 else 'has'} not ended yet"
            draft.look_again_s = _find_leaving_look_s(leaving, observation.now_s)
            return
        if waiting is None:
            if len(live) == target and not update.full:
                draft.growth = _grow(draft, target + 1)
            has_no_room = draft.growth.reason == "NoIdleCapacity" or (update.full and len(live) == target)
            if draft.growth.create or not has_no_room:
                return
        if not _makes_room(draft, chosen, waiting):
            draft.waits_for = f"no node could take its successor, even if {chosen.name} left"
            draft.look_again_s = _START_LOOK_S
            return
        draft.awaited = (waiting or chosen).key
        draft.backoff = None  # its successor gets the freed room
    draft.release(chosen, "it has an earlier spec, and a successor takes its place")
    live.remove(chosen)


def _makes_room(draft: PoolDraft, chosen: MemberPod, waiting: MemberPod | None) -> bool:
    """Whether a successor could be placed if the chosen teacher were removed; True if capacity is unknown."""
    capacity = draft.observation.capacity
    if capacity is None:
        return True
    member = waiting or chosen
    record = relax_exclusions(draft.records[member.key], None, draft.observation.now_s)
    pod = build_teacher_pod(draft.pool, member.index, record)
    return capacity.without({chosen.uid}).count_fitting(pod, ignored=(member.uid,)) != 0


def _is_proven(draft: PoolDraft, update: TeacherUpdate) -> bool:
    """Whether the present spec works, once no outdated teacher is left; if not, record what the update awaits."""
    if draft.awaited:
        draft.waits_for = f"no node has room for the successor of {draft.awaited}"
        return False
    placed = [pod for pod in draft.live if pod.scheduled]
    starting, draft.look_again_s = update.find_starting(placed, draft.observation.now_s)
    if starting is not None:
        draft.waits_for = _describe_start(starting)
    return bool(placed) and starting is None


def _has_ended(pod: MemberPod) -> bool:
    """Whether a pod has ended or was asked to end; a container that ended is restarted in its pod."""
    return pod.deleting or pod.phase in ("Succeeded", "Failed")


def _describe_start(pod: MemberPod) -> str:
    if not pod.scheduled:
        return f"{pod.name} has no node yet{f': {pod.unschedulable}' if pod.unschedulable else ''}"
    return f"{pod.name} {f'has been ready for less than {STEADY_S:.0f} s' if pod.ready else 'is not ready yet'}"
