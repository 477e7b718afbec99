"""`plan_job`: decides what to do about an ElasticJob, from an observation of one moment. Pure.

The minimum is created at once, and a worker that ended is replaced at once if no other pod has taken its place. Above
the minimum, the job grows when there is idle capacity. When it shrinks, the newest workers are removed first.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from edl.kube.objects import Object, read_time
from edl.kube.resource_types import POD_DISRUPTION_BUDGETS, ResourceType
from edl.master.kube.jobs.launches import (
    MASTER,
    WORKER,
    build_disruption_budget,
    build_master_pod,
    build_object_name,
    build_pod_group,
    build_worker_pod,
    starts_as_gang,
)
from edl.master.kube.jobs.status import (
    SOON_S,
    Completion,
    JobDraft,
    JobFailure,
    find_completion,
    find_failure,
    find_final_phase,
    get_started_s,
    has_given_up_shards,
    note_last_steps,
    write_finished_status,
    write_job_status,
)
from edl.master.kube.members.pod_template import has_memory_quantity
from edl.master.kube.members.pods import MemberPod
from edl.master.kube.members.records import (
    LAUNCH_PATIENCE_S,
    NO_ROOM,
    ROOM_PATIENCE_S,
    MemberOutcome,
    MemberRecord,
    list_superseded,
    read_member_records,
    review_members,
)
from edl.master.kube.observation import OwnerObservation, Plan, PodDeletion, describe_store, find_condition
from edl.master.kube.resources import ElasticJob
from edl.master.scaling.terminations import TerminationCause

PROBE_S: Final = 20.0
"""A worker above the minimum is removed if no node takes it within this time: other pods may be waiting for the same
room."""
_GIVING_S: Final = 60.0
"""Extra time for a worker to which the arbiter has assigned room: the present holder of the room has a grace period to
leave."""
_MOST_CREATED: Final = 100  # per reconciliation, so that other resources and the API server get their turn
_NEXT_CREATED_S: Final = 0.5
_MOST_BACKOFF_S: Final = 300.0  # as in the relaunch table: people forget whatever waits longer


def find_target(job: ElasticJob, observation: OwnerObservation) -> int:
    """Return how many workers are wanted, between the job's minimum and maximum."""

    def clamp(count: int) -> int:
        return max(job.min_replicas, min(job.max_replicas, count))

    if job.scaling == "external":
        return clamp(job.min_replicas if job.replicas is None else job.replicas)
    if observation.store.wanted is not None:
        useful = clamp(observation.store.wanted)
    elif observation.store.stale:  # the useful number is unknown now, which is no reason to change anything
        before = job.status.get("wantedReplicas")
        useful = clamp(before if isinstance(before, int) else job.min_replicas)
    else:
        useful = job.max_replicas
    return useful if observation.allocation is None else min(useful, clamp(observation.allocation))


def _size_workers(draft: JobDraft) -> None:
    """Decide which workers to keep, remove and add.

    Above its minimum, a job grows by the number of workers that fit, or by the number that the arbiter has assigned. If
    neither number is known, the job adds one worker, which is removed if no node takes it.
    """
    job, observation, now_s = draft.job, draft.observation, draft.observation.now_s
    workers = {key: pod for key, pod in draft.review.current.items() if pod.role == WORKER}
    gang = starts_as_gang(job)
    draft.target = find_target(job, observation)
    if observation.starts_after and not any(pod.scheduled for pod in workers.values()):
        draft.target = 0  # the scheduler would give the freed GPUs to pods of this job
    ranked = sorted(workers, key=lambda key: _rank(workers[key], gang))
    kept, draft.shrunk = ranked[: draft.target], ranked[draft.target :]
    patience_s = PROBE_S if observation.allocation is None else PROBE_S + _GIVING_S
    for key in [] if gang else kept[job.min_replicas :]:
        if workers[key].pending:
            draft.times.append(workers[key].created_s + patience_s)
            if now_s >= draft.times[-1]:
                draft.homeless.append(key)
    for key in draft.shrunk:
        draft.release(workers[key], "fewer workers are wanted")
    for key in draft.homeless:
        kept.remove(key)
        draft.release(workers[key], "no node takes it")
        draft.records[key] = _back_off(draft.records[key], now_s)
    draft.workers = sorted((workers[key] for key in kept), key=lambda pod: pod.index)
    _find_indices(draft)
    coming = {*draft.waiting, *(f"{WORKER}-{index}" for index in draft.create)}
    for key, record in draft.records.items():
        if record.replaces and key.startswith(f"{WORKER}-") and key not in coming:
            draft.records[key] = record.displace()  # fewer are wanted by now
    if len(draft.create) > _MOST_CREATED:
        del draft.create[_MOST_CREATED:]
        draft.times.append(now_s + _NEXT_CREATED_S)
    draft.times += draft.waiting.values()


def _rank(pod: MemberPod, gang: bool) -> tuple[float, ...]:
    """Return a sort key: the last worker is removed first. A gang's first indices are its minimum."""
    if gang:
        return (pod.index,)
    return (not pod.scheduled, not pod.ready, pod.created_s, pod.index)


def _find_indices(draft: JobDraft) -> None:
    job, observation, records = draft.job, draft.observation, draft.records
    growth: list[int] = []
    kept = {pod.key for pod in draft.workers}
    missing, indices = draft.target - len(kept), _order_indices(job, records, observation.now_s)
    while missing > 0:
        free = next(indices)
        key = f"{WORKER}-{free}"
        record = records.get(key, MemberRecord())
        if key in kept or record.ended:
            continue
        missing -= 1
        if not record.can_start(observation.now_s):
            draft.waiting[key] = record.not_before_s or observation.now_s
        elif len(kept) + len(draft.create) < job.min_replicas or record.replaces:
            draft.create.append(free)
        else:
            growth.append(free)
    pending = any(pod.pending for pod in draft.workers) or bool(draft.create)
    blocked = any(NO_ROOM in records[key].failures for key in draft.waiting if key in records)
    if growth and not blocked and (not pending or observation.allocation is not None):
        draft.create += growth[: _count_growth(draft, growth)]


def _order_indices(job: ElasticJob, records: Mapping[str, MemberRecord], now_s: float) -> Iterator[int]:
    """Yield free worker indices in the order to fill them: first those of workers whose pods have just ended.

    Such a worker keeps its place; other free indices count as growth. A gang's minimum is its first indices, so these
    are filled in order.
    """
    back: list[int] = []
    if not starts_as_gang(job):
        keys = (key for key, record in records.items() if record.replaces and record.can_start(now_s))
        back = sorted(int(key.removeprefix(f"{WORKER}-")) for key in keys if key.startswith(f"{WORKER}-"))
    yield from back
    yield from (index for index in itertools.count() if index not in back)


def _count_growth(draft: JobDraft, growth: list[int]) -> int:
    job, observation = draft.job, draft.observation
    if observation.allocation is not None:
        return len(growth)  # the arbiter has counted the room, including what teachers return
    if observation.capacity is None or starts_as_gang(job):
        return 1
    record = draft.records.get(f"{WORKER}-{growth[0]}", MemberRecord())
    fitting = observation.capacity.count_fitting(build_worker_pod(job, growth[0], record))
    # A requested number is tried; a job that only takes idle capacity waits until there is some.
    return 1 if fitting is None else max(fitting, 1 if job.scaling == "external" else 0)


def _back_off(record: MemberRecord, now_s: float) -> MemberRecord:
    count = record.failures.get(NO_ROOM, 0) + 1
    delay_s = min(_MOST_BACKOFF_S, PROBE_S * 2 ** min(count - 1, 10))
    not_before_s = max(now_s + delay_s, record.not_before_s or 0.0)
    return replace(record, failures={**record.failures, NO_ROOM: count}, not_before_s=not_before_s)


_ENDING_S: Final = 60.0
"""How long the other workers may take to store their last states and end. If their grace period is longer, it applies
instead."""
_MOST_NOTES: Final = 5
_MOST_EVENT_CHARS: Final = 900  # the API takes 1,024 bytes, and its recorder cuts off a traceback's end
_START_LOOK_S: Final = 30.0  # to recheck workers that do not start: a missing volume or secret changes no pod


def plan_job(job: ElasticJob, observation: OwnerObservation) -> Plan:
    """Decide what to do about a job. For a job at rest, nothing changes, not even the status."""
    if job.deleting:
        return Plan(status=dict(job.status))  # pods are deleted with their owner
    if phase := find_final_phase(job):
        return _plan_finished(job, phase, observation)
    if not job.started and any(not pod.finished for pod in observation.pods):
        job = job.pin_run()  # it was suspended, and pods of its last run still exist
    progress = observation.store.progress.percentage if observation.store.progress is not None else None
    before = read_member_records(job.status)
    review = review_members(before, observation.pods, observation.now_s, progress)
    records = note_last_steps(before, review.records, observation.pods, observation.now_s)
    draft = JobDraft(job, observation, review, records)
    _note_outcomes(draft)
    messages = {key: outcome.message for key, outcome in review.outcomes.items()}
    if completion := find_completion(draft.records, messages):
        return _plan_ending(draft, completion)
    failure = find_failure(job, draft.records, messages, get_started_s(job), observation.now_s)
    if failure is not None:
        return _plan_failed(draft, failure)
    if job.suspend:
        return _plan_suspended(draft)
    return _plan_running(draft)


def _plan_running(draft: JobDraft) -> Plan:
    job, observation = draft.job, draft.observation
    create: list[Object] = []
    if job.master.enabled:
        create += _make_master(draft)
    elif f"{MASTER}-0" in draft.review.current:
        draft.release(draft.review.current[f"{MASTER}-0"], "the job no longer has a master")
    _size_workers(draft)
    for index in draft.create:
        record = draft.records.setdefault(f"{WORKER}-{index}", MemberRecord())
        create.append(build_worker_pod(job, index, record))
    _note_changes(draft)
    draft.times += [pod.placed_s + LAUNCH_PATIENCE_S for pod in draft.workers if pod.waiting]
    if any(pod.starting for pod in draft.workers):
        draft.times.append(observation.now_s + _START_LOOK_S)
    draft.times += [
        pod.created_s + ROOM_PATIENCE_S
        for pod in draft.workers
        if pod.pending and draft.records[pod.key].excluded_nodes
    ]
    if job.active_deadline_s is not None:
        draft.times.append((get_started_s(job) or observation.now_s) + job.active_deadline_s)
    group = build_pod_group(job)
    return Plan(
        status=write_job_status(draft),
        delete=draft.list_deletions(list_superseded(draft.records, observation.pods)),
        apply=(build_disruption_budget(job), *((group,) if group is not None else ())),
        create=tuple(create),
        events=tuple(draft.events),
        requeue_s=draft.get_requeue_s(),
    )


def _make_master(draft: JobDraft) -> list[Object]:
    """Return the master's pod if it should be created now: a master is replaced as soon as it dies."""
    key, now_s = f"{MASTER}-0", draft.observation.now_s
    record = draft.records.setdefault(key, MemberRecord())
    if key in draft.review.current or record.ended:
        return []
    if not record.can_start(now_s):
        draft.times.append(record.not_before_s or now_s)
        return []
    return [build_master_pod(draft.job, record)]


def _plan_ending(draft: JobDraft, completion: Completion) -> Plan:
    """Wait for running workers, release the others, and end the job, successfully if all last states are stored."""
    winner = completion.key
    end_s = completion.seen_s + max(_ENDING_S, float(draft.job.grace_period_s))
    late = draft.observation.now_s >= end_s
    for pod in draft.review.current.values():
        if pod.role == WORKER and pod.started_s is not None and not pod.node_silent and not late:
            draft.workers.append(pod)
        elif pod.role == WORKER:
            draft.release(pod, "the job has ended")
    if draft.workers:
        draft.workers.sort(key=lambda pod: pod.index)
        draft.ending = f"{winner} has ended the job; {len(draft.workers)} others are still ending"
    elif completion.failure is not None:
        return _plan_failed(draft, completion.failure)
    else:
        draft.succeeded = winner
        draft.note("Succeeded", f"{winner} has ended the job")
    draft.times.append(end_s)
    draft.target = max(1, len(draft.workers))
    return _build_last_plan(draft)


def _plan_failed(draft: JobDraft, failure: JobFailure) -> Plan:
    draft.failure = failure
    draft.note("Failed", _cut_middle(failure.message), warning=True)
    return _build_last_plan(draft)


def _cut_middle(text: str) -> str:
    if len(text) <= _MOST_EVENT_CHARS:
        return text
    head = text.partition("\n")[0][: _MOST_EVENT_CHARS // 3]
    return f"{head}\n[...]\n{text[len(head) + 10 - _MOST_EVENT_CHARS :]}"


def _plan_suspended(draft: JobDraft) -> Plan:
    """Release all pods. Members' records remain, but no member keeps its place."""
    draft.suspended = True
    for pod in draft.review.current.values():
        draft.release(pod, "the job is suspended")
    draft.records = {key: record.displace() if record.replaces else record for key, record in draft.records.items()}
    if draft.job.status.get("phase") != "Suspended":
        draft.note("Suspended", f"spec.suspend is true; pods removed: {len(draft.review.current)}")
    return _build_last_plan(draft)


def _build_last_plan(draft: JobDraft) -> Plan:
    """Return the plan for a job that creates no more pods; live pods that the job does not wait for are deleted."""
    job, pods, running, status = draft.job, draft.observation.pods, bool(draft.workers), write_job_status(draft)
    going = {pod.name for pod in list_superseded(draft.records, pods)}
    if not running:
        going |= {pod.name for pod in pods if pod.occupying}
    kept = _keep_ended(pods, draft.records)
    return Plan(
        status=status,
        delete=draft.list_deletions(tuple(pod for pod in pods if pod.name in going - kept)),
        remove=() if running else _list_removals(job),
        events=tuple(draft.events),
        requeue_s=_get_ttl_s(job, status, draft.observation.now_s) if not running else draft.get_requeue_s(),
    )


def _keep_ended(pods: tuple[MemberPod, ...], records: Mapping[str, MemberRecord]) -> set[str]:
    """Return the names of ended pods that are kept for their logs: the pods of members that ended for good."""
    return {
        pod.name
        for pod in pods
        if pod.phase in ("Succeeded", "Failed")
        and (pod.termination.exit_code == 0 or (pod.key in records and records[pod.key].ended))
    }


def _plan_finished(job: ElasticJob, phase: str, observation: OwnerObservation) -> Plan:
    """Delete running pods of a job that has already ended, and the job itself when its TTL is over."""
    live = tuple(pod for pod in observation.pods if pod.live)
    status = write_finished_status(job, phase, sum(pod.role == WORKER for pod in live))
    requeue_s = _get_ttl_s(job, status, observation.now_s)
    return Plan(
        status=status,
        delete=tuple(
            PodDeletion(pod.name, pod.uid, None, "the job has ended") for pod in observation.pods if pod.occupying
        ),
        remove=_list_removals(job),
        delete_owner=requeue_s is not None and requeue_s <= 0,
        requeue_s=None if requeue_s is None else max(SOON_S, requeue_s),
    )


def _get_ttl_s(job: ElasticJob, status: Mapping[str, object], now_s: float) -> float | None:
    completed_s = read_time(status.get("completionTime"))
    if job.ttl_seconds_after_finished is None or completed_s is None:
        return None
    return completed_s + job.ttl_seconds_after_finished - now_s


def _list_removals(job: ElasticJob) -> tuple[tuple[ResourceType, str], ...]:
    group, name = build_pod_group(job), build_object_name(job)
    return ((POD_DISRUPTION_BUDGETS, name), *([(group[0], name)] if group is not None else []))


def _note_outcomes(draft: JobDraft) -> None:
    outcomes = draft.review.outcomes
    workers = {key: outcome for key, outcome in outcomes.items() if key.startswith(f"{WORKER}-")}
    if len(workers) > _MOST_NOTES:
        causes = Counter(outcome.verdict.cause.value.replace("_", " ") for outcome in workers.values())
        text = ", ".join(f"{count} {cause}" for cause, count in sorted(causes.items()))
        draft.note("WorkerEnded", f"{len(workers)} workers ended: {text}", warning=True)
        workers = {}
    for key, outcome in workers.items():
        _note_outcome(draft, "WorkerEnded", key, outcome)
    for key, outcome in outcomes.items():
        if key.startswith(f"{MASTER}-") and has_given_up_shards(outcome.end, key):
            draft.note("ShardsGivenUp", "shards were given up: `edl status` shows which, and why", warning=True)
        elif key.startswith(f"{MASTER}-"):
            _note_outcome(draft, "MasterEnded", key, outcome)
    out_of_memory = any(outcome.verdict.cause is TerminationCause.OUT_OF_MEMORY for outcome in outcomes.values())
    if out_of_memory and not has_memory_quantity(draft.job):
        text = "spec.template sets no memory for its container: set resources.limits.memory, so that it can be raised"
        draft.note("MemoryNotSet", text, warning=True)


def _note_outcome(draft: JobDraft, reason: str, key: str, outcome: MemberOutcome) -> None:
    end, cause = outcome.end, outcome.verdict.cause
    where = f" on {end.node}" if end.node else ""
    what = f"{key}{where}: {cause.value.replace('_', ' ')} ({end.evidence}): {outcome.decision.action.value}"
    if outcome.decision.delay_s:
        what += f" after {outcome.decision.delay_s:.0f} s"
    draft.note(reason, what, end.pod, warning=cause is not TerminationCause.SUCCEEDED)


def _note_changes(draft: JobDraft) -> None:
    job, status, accepted = draft.job, draft.job.status, describe_store(draft.observation.store)
    if job.scaling == "auto" and job.replicas is not None and status.get("observedGeneration") != job.generation:
        draft.note("ScaleIgnored", f"spec.replicas is {job.replicas}, but spec.scaling is auto", warning=True)
    if job.ignored_edits and status.get("ignoredEdits") != job.ignored_edits:
        draft.note("StoreChangeIgnored", job.ignored_edits, warning=True)
    elif accepted.reason != "Valid" and find_condition(status, "Accepted").get("reason") in (None, "Valid"):
        draft.note(accepted.reason, accepted.message, warning=True)
    grown = [index for index in draft.create if not draft.records[f"{WORKER}-{index}"].replaces]
    if status.get("phase") == "Suspended":
        draft.note("Resumed", "spec.suspend is false again")
        grown = []
    elif get_started_s(job) is None:
        draft.note("Started", f"workers created: {len(draft.create)}; wanted: {draft.target}")
        grown = []
    if grown:
        added = f"workers created: {len(grown)}, in addition to {len(draft.workers)}"
        draft.note("Growing", f"{added}; wanted: {draft.target}")
    if draft.shrunk:
        draft.note("Shrinking", f"workers removed: {len(draft.shrunk)}; wanted: {draft.target}")
    for key in draft.homeless:
        draft.note("NoRoom", f"no node takes {key}: it is removed, and created again later")
