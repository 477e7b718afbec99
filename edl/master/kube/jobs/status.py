"""Decides whether a job has ended, and writes its status, in which no field changes merely because time passes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from edl.kube.objects import Object, format_time, read_time
from edl.master.kube.capacity import GPU
from edl.master.kube.jobs.launches import MASTER, WORKER
from edl.master.kube.members.pods import MemberPod, build_selector
from edl.master.kube.members.records import (
    MemberEnd,
    MemberRecord,
    MemberReview,
    format_member_records,
    read_member_records,
    record_end,
)
from edl.master.kube.observation import (
    Condition,
    EventNote,
    OwnerObservation,
    PodDeletion,
    WorkProgress,
    describe_store,
    find_condition,
    write_conditions,
)
from edl.master.kube.resources import ElasticJob
from edl.master.scaling.terminations import TerminationCause

FAILURE_REASONS: Final[Mapping[TerminationCause, str]] = {
    TerminationCause.USER_ERROR: "UserError",
    TerminationCause.OUT_OF_MEMORY: "OutOfMemory",
    TerminationCause.KILLED: "Killed",
    TerminationCause.CRASHED: "Crashed",
    TerminationCause.PEER_LOST: "PeerLost",
    TerminationCause.EVICTED: "Evicted",
    TerminationCause.HARDWARE: "HardwareFault",
    TerminationCause.UNCLEAR_FAULT: "UnclearFault",
    TerminationCause.LAUNCH_FAILED: "LaunchFailed",
    TerminationCause.NOT_STORED: "NotStored",
    TerminationCause.UNKNOWN: "UnknownEnd",
}
"""Reasons for the condition `Failed`, by the cause that ended the job. Other causes never end a job."""

FAILURE_ADVICE: Final[Mapping[str, str]] = {
    "UserError": "fix the script, delete the job and submit it again",
    "OutOfMemory": "ask for more memory in spec.template, or find the leak",
    "Killed": "find out what kills it: `kubectl describe pod`, and the kernel log of its node",
    "Crashed": "look for an incompatible library, driver or image: native code crashed on two nodes",
    "PeerLost": "check the network between the nodes, and the other workers' logs",
    "Evicted": "request the memory and ephemeral storage that it uses, so that it gets a node that has them",
    "HardwareFault": "check the GPUs of the nodes named in status.members; several nodes failed",
    "UnclearFault": "run the script with CUDA_LAUNCH_BLOCKING=1: a kernel failed on two nodes",
    "LaunchFailed": "fix the command, image, volume, secret or init container that the message names",
    "NotStored": "check the storage of spec.checkpoint: the last state was not stored there",
    "UnknownEnd": "check the node's kubelet: there is no information about why the pod ended",
    "DeadlineExceeded": "raise spec.activeDeadlineSeconds, or give the job more workers",
}
_EXIT_POISONED: Final = 3  # of `edl master` if shards were given up: the job has its result, without these
_SUCCEEDED: Final = TerminationCause.SUCCEEDED.value
_NOT_STORED: Final = TerminationCause.NOT_STORED.value
_LAST_STEPS: Final = (_SUCCEEDED, _NOT_STORED)  # the script has ended, and the job with it
_DEADLINE: Final = "DeadlineExceeded"


@dataclass(frozen=True)
class JobFailure:
    """Why a job has failed; `message` contains the summary, what to do, and the traceback."""

    reason: str
    summary: str
    message: str


@dataclass(frozen=True)
class Completion:
    """The end of a job's work: a worker has done the last step.

    Attributes:
        key: the worker that was the first to end.
        seen_s: when the operator first saw that a worker ended, Unix time. (The nodes' clocks may be minutes off.)
        failure: why the job has nevertheless failed: a worker's last state is not stored. None if all last states are
            stored.
    """

    key: str
    seen_s: float
    failure: JobFailure | None = None


def note_last_steps(
    before: Mapping[str, MemberRecord], records: Mapping[str, MemberRecord], pods: Iterable[MemberPod], now_s: float
) -> dict[str, MemberRecord]:
    """Return records that include the ends of workers that did the last step after they were asked to end.

    `review_members` does not record such an end, since a new attempt has the worker's place. If the last state was not
    stored, this stays on record even if the new attempt finds the job done and succeeds.
    """
    after = dict(records)
    for key, record in before.items():
        old, new = record.last_end, after[key].last_end
        if old is not None and new is not None and old.cause == _NOT_STORED:
            after[key] = replace(after[key], last_end=replace(old, try_number=new.try_number))
    for pod in pods:
        record = after.get(pod.key, MemberRecord())
        if pod.role != WORKER or not pod.finished or not record.is_superseded(pod):
            continue
        end, last = record_end(record, pod.termination, pod, now_s).end, record.last_end
        counted = -1 if last is None else last.try_number
        known = last is not None and last.cause in (_NOT_STORED, end.cause)
        later = end.cause == _SUCCEEDED and counted > pod.try_number
        if end.cause in _LAST_STEPS and not known and not later:
            # Ends of a later attempt, such as one that found the job done, stay counted.
            after[pod.key] = replace(record, last_end=replace(end, try_number=max(pod.try_number, counted)))
    return after


def find_completion(records: Mapping[str, MemberRecord], messages: Mapping[str, str]) -> Completion | None:
    """Return the end of the job's work; None while it continues. `messages` maps members' keys to full messages."""
    ends = sorted(
        (end.time_s, key, end)
        for key, record in records.items()
        if (end := record.last_end) is not None and key.startswith(f"{WORKER}-") and end.cause in _LAST_STEPS
    )
    if not ends:
        return None
    first, seen_s = ends[0][1], min(end.seen_s for _, _, end in ends)
    for _, key, end in ends:
        if end.cause == _NOT_STORED:
            return Completion(first, seen_s, _describe(key, end, messages.get(key) or end.message))
    return Completion(first, seen_s)


def find_final_phase(job: ElasticJob) -> str:
    """Return `Succeeded` or `Failed` for a job that has ended; empty if it continues.

    The job has ended if a condition says so and the recorded ends of members confirm it: a status written by hand does
    not end a job.
    """
    records = read_member_records(job.status)
    completion = find_completion(records, {})
    if completion is not None and completion.failure is None:
        return "Succeeded" if find_condition(job.status, "Complete").get("status") == "True" else ""
    failed = find_condition(job.status, "Failed")
    if failed.get("status") != "True":
        return ""
    is_late = failed.get("reason") == _DEADLINE and bool(job.status.get("completionTime"))
    is_borne_out = completion is not None or find_failure(job, records, {}, None, 0.0) is not None
    return "Failed" if is_late or is_borne_out else ""


def has_given_up_shards(end: MemberEnd, key: str) -> bool:
    """Whether a master ended because shards were given up, which does not count as a failure of the job."""
    return key.startswith(f"{MASTER}-") and end.exit_code == _EXIT_POISONED


def find_failure(
    job: ElasticJob,
    records: Mapping[str, MemberRecord],
    messages: Mapping[str, str],
    started_s: float | None,
    now_s: float,
) -> JobFailure | None:
    """Return why a job has failed; None if it has not."""
    stopped = [
        (end.cause != TerminationCause.USER_ERROR.value, end.time_s, key, end)
        for key, record in records.items()
        if record.ended
        and (end := record.last_end) is not None
        and end.cause != _SUCCEEDED
        and not has_given_up_shards(end, key)
    ]
    if stopped:
        # The script's own error first: others may have failed because of it.
        _, _, key, end = min(stopped, key=lambda item: item[:3])
        return _describe(key, end, messages.get(key) or end.message)
    if job.active_deadline_s is not None and started_s is not None and now_s >= started_s + job.active_deadline_s:
        summary = f"it has run for {job.active_deadline_s} s"
        return JobFailure(_DEADLINE, summary, f"{summary}, its activeDeadlineSeconds: {FAILURE_ADVICE[_DEADLINE]}")
    return None


def _describe(key: str, end: MemberEnd, text: str) -> JobFailure:
    try:
        reason = FAILURE_REASONS.get(TerminationCause(end.cause), "UnknownEnd")
    except ValueError:
        reason = "UnknownEnd"
    lines = [line for line in text.strip().splitlines() if line.strip()]
    summary = f"{key}: {lines[-1].strip() if lines else end.evidence}"
    where = f" on {end.node}" if end.node else ""
    first = f"{key}{where} ended: {end.cause.replace('_', ' ')} ({end.evidence}): {FAILURE_ADVICE[reason]}"
    return JobFailure(reason, summary, f"{first}\n{text.strip()}" if text.strip() else first)


_ESTIMATE_STEP: Final = 0.1
"""An estimate is rewritten only if it changes by at least this share: each write notifies everyone who watches the
job."""


SOON_S: Final = 0.5  # least time until a requeue: times in statuses have whole seconds


@dataclass
class JobDraft:
    """A job's plan while it is being built: the planner fills in the plan, and the job's status is written from it.

    Attributes:
        workers: live pods that stay; each is its member's newest attempt.
        create: indices of workers whose pods are created now.
        waiting: workers to create later: maps each worker's key to the Unix time of its creation.
        shrunk: keys of workers to remove because fewer are wanted.
        homeless: keys of workers above the minimum to remove because no node takes them.
        succeeded: the worker that ended the job, once all other workers have ended.
        times: Unix times at which the decision will change merely because time passes.
        reasons: maps names of pods to why they are removed.
    """

    job: ElasticJob
    observation: OwnerObservation
    review: MemberReview
    records: dict[str, MemberRecord]
    target: int = 0
    workers: list[MemberPod] = field(default_factory=list)
    create: list[int] = field(default_factory=list)
    waiting: dict[str, float] = field(default_factory=dict)
    shrunk: list[str] = field(default_factory=list)
    homeless: list[str] = field(default_factory=list)
    suspended: bool = False
    ending: str = ""
    succeeded: str = ""
    failure: JobFailure | None = None
    events: list[EventNote] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.failure is not None or bool(self.succeeded)

    @property
    def ready(self) -> int:
        return sum(pod.ready for pod in self.workers)

    def note(self, reason: str, message: str, pod: str = "", warning: bool = False) -> None:
        self.events.append(EventNote("Warning" if warning else "Normal", reason, message, pod))

    def release(self, pod: MemberPod, reason: str) -> None:
        """Release a pod: a new attempt takes its place, so this operator or a later one deletes the pod."""
        if not self.records[pod.key].is_superseded(pod):
            self.records[pod.key] = self.records[pod.key].begin_try(self.observation.now_s)
        self.reasons[pod.name] = reason

    def list_deletions(self, pods: Iterable[MemberPod]) -> tuple[PodDeletion, ...]:
        return tuple(
            PodDeletion(pod.name, pod.uid, None, self.reasons.get(pod.name, "its end is recorded")) for pod in pods
        )

    def get_requeue_s(self) -> float | None:
        """Return the seconds until the decision changes merely because time passes; None if it will not change."""
        now_s = self.observation.now_s
        times = [time_s for time_s in self.times if time_s > now_s]
        return max(SOON_S, min(times) - now_s) if times else None


def find_waiting_since_s(job: ElasticJob, pods: Iterable[MemberPod]) -> float | None:
    """Return when a job began to wait for GPUs for its minimum (Unix time); None if it does not wait, or if unrecorded.

    A job counts as waiting if all the pods of its minimum exist and the scheduler lacks GPUs for at least one of them.
    Waiting for a quota or a volume does not count, since it must not hold other jobs back. Time before a suspension
    does not count either.
    """
    workers = [pod for pod in pods if pod.role == WORKER and pod.live]
    if len(workers) < job.min_replicas or sum(pod.scheduled for pod in workers) >= job.min_replicas:
        return None
    if not any(pod.pending and GPU in pod.unschedulable for pod in workers):
        return None
    scheduled, started_s = find_condition(job.status, "Scheduled"), get_started_s(job)
    since_s = read_time(scheduled.get("lastTransitionTime"))
    if scheduled.get("status") != "False" or since_s is None or started_s is None:
        return None
    return max(since_s, started_s, job.created_s)


def get_started_s(job: ElasticJob) -> float | None:
    """Return the start of a job's present run, Unix time; None before the run starts and while the job is suspended."""
    return read_time(job.status.get("startTime"))


def write_finished_status(job: ElasticJob, phase: str, workers: int) -> Object:
    """Return the status of a job that ended earlier, including how many of its pods still run."""
    counts = {"replicas": workers, "readyReplicas": 0, "wantedReplicas": 0}
    return {**job.status, "observedGeneration": job.generation, "phase": phase, **counts}


def write_job_status(draft: JobDraft) -> Object:
    job, now_s = draft.job, draft.observation.now_s
    conditions = [
        Condition("Accepted", True, "StoreChangeIgnored", job.ignored_edits)
        if job.ignored_edits
        else describe_store(draft.observation.store),
        _describe_scheduled(draft),
        _describe_running(draft),
        Condition("Suspended", True, "SuspendRequested", "spec.suspend is true: `edl resume` continues the job")
        if draft.suspended
        else Condition("Suspended", False, "NotSuspended", "spec.suspend is false"),
        _describe_complete(draft),
        Condition("Failed", True, draft.failure.reason, draft.failure.message)
        if draft.failure is not None
        else Condition("Failed", False, "NotFailed", "the job has not failed"),
    ]
    running = next(condition for condition in conditions if condition.type == "Running")
    before = job.status.get("conditions")
    status: Object = {
        **{key: value for key, value in job.status.items() if key not in _VANISHING},
        "observedGeneration": job.generation,
        "phase": _find_phase(draft, running),
        "jobId": job.job_id,
        "store": job.store,
        "checkpoint": job.checkpoint,
        "replicas": len(draft.workers) + len(draft.create),
        "readyReplicas": draft.ready,
        "wantedReplicas": 0 if draft.finished or draft.suspended else draft.target,
        "selector": ",".join(f"{key}={value}" for key, value in build_selector(job, WORKER).items()),
        "conditions": write_conditions(before if isinstance(before, list) else [], conditions, job.generation, now_s),
        "members": format_member_records(draft.records),
        "message": _write_message(conditions, draft),
    }
    started_s = get_started_s(job)
    if not draft.suspended:
        status["startTime"] = format_time(now_s if started_s is None else started_s)
    if job.ignored_edits:
        status["ignoredEdits"] = job.ignored_edits
    if draft.finished:
        status["completionTime"] = format_time(now_s)
    _write_progress(status, job.status, draft.observation.store.progress, bool(draft.succeeded))
    return status


_VANISHING: Final = ("startTime", "completionTime", "ignoredEdits")
"""Fields that are removed if empty: for example, a suspended job has no `startTime`, as in `batch/v1`."""


def _find_phase(draft: JobDraft, running: Condition) -> str:
    if draft.failure is not None:
        return "Failed"
    if draft.succeeded:
        return "Succeeded"
    if draft.suspended:
        return "Suspended"
    return "Running" if running.status else "Pending"


_AT_REST: Final = {True: ("Finished", "the job has ended"), False: ("Suspended", "spec.suspend is true")}


def _describe_scheduled(draft: JobDraft) -> Condition:
    job, observation = draft.job, draft.observation
    build = functools.partial(Condition, "Scheduled")
    if draft.finished or draft.suspended:
        return build(False, *_AT_REST[draft.finished])
    if observation.starts_after and not draft.target:
        text = f"{observation.starts_after} has waited so long for its workers that it starts first"
        return build(False, "WaitingForTurn", text)
    count = sum(pod.scheduled for pod in draft.workers)
    refused = next((pod for pod in draft.workers if pod.pending and pod.unschedulable), None)
    words = f"; {refused.key} waits: {refused.unschedulable}" if refused else ""
    if count >= job.min_replicas:
        reason = "AllScheduled" if count >= draft.target else "MinimumScheduled"
        return build(True, reason, f"{count} of {draft.target} workers have a node{words}")
    if refused is not None:
        text = f"{count} of the {job.min_replicas} workers that the job needs have a node{words}"
        return build(False, "Unschedulable", text)
    if draft.waiting:
        return build(False, "BackingOff", _describe_waiting(draft))
    return build(False, "WaitingForNode", f"{count} of the {job.min_replicas} workers that the job needs have a node")


def _describe_running(draft: JobDraft) -> Condition:
    job, ready = draft.job, draft.ready
    build = functools.partial(Condition, "Running")
    if draft.finished or draft.suspended:
        return build(False, *_AT_REST[draft.finished])
    if draft.ending:
        return build(True, "Ending", draft.ending)
    stuck = next((pod for pod in draft.workers if pod.failing), None)
    words = f"{stuck.key}: {stuck.waiting}: {stuck.waiting_message}".rstrip(": ") if stuck else ""
    if ready >= job.min_replicas:
        return build(True, "WorkersRunning", f"{ready} of {draft.target} workers run" + (f"; {words}" if words else ""))
    if stuck is not None:
        return build(False, "ContainerWaiting", words)
    if draft.waiting:
        return build(False, "BackingOff", _describe_waiting(draft))
    count = sum(pod.scheduled for pod in draft.workers)
    if count < job.min_replicas:
        return build(False, "NotScheduled", f"{count} of the {job.min_replicas} workers that the job needs have a node")
    return build(False, "Starting", f"{ready} of the {job.min_replicas} workers that the job needs are ready")


def _describe_waiting(draft: JobDraft) -> str:
    waiting = draft.waiting
    key = min(waiting, key=lambda name: (waiting[name], name))
    end = draft.records[key].last_end if key in draft.records else None
    why = f": it ended, {end.cause.replace('_', ' ')} ({end.evidence})" if end is not None else ""
    if end is not None and (lines := end.message.strip().splitlines()):
        why += f": {lines[-1].strip()}"
    others = f"; {len(waiting) - 1} more wait" if len(waiting) > 1 else ""
    return f"{key} is restarted at {format_time(waiting[key])}{why}{others}"


def _describe_complete(draft: JobDraft) -> Condition:
    if draft.failure is not None:
        return Condition("Complete", False, "JobFailed", "the job has failed")
    if draft.succeeded:
        return Condition("Complete", True, "WorkersSucceeded", f"{draft.succeeded} has ended the job")
    return Condition("Complete", False, "NotFinished", draft.ending or "the job is running")


def _write_message(conditions: list[Condition], draft: JobDraft) -> str:
    if draft.failure is not None:
        return draft.failure.summary
    if draft.succeeded:
        return "the job has succeeded"
    if draft.suspended:
        return "suspended"
    running = next(condition for condition in conditions if condition.type == "Running")
    scheduled = next(condition for condition in conditions if condition.type == "Scheduled")
    message = scheduled.message if running.reason == "NotScheduled" else running.message
    store = describe_store(draft.observation.store)
    return message if store.reason == "Valid" else f"{message}; {store.message}"


def _write_progress(status: Object, before: Mapping[str, Any], progress: WorkProgress | None, succeeded: bool) -> None:
    """Write the progress; figures that are unknown now keep their last values."""
    if succeeded:
        if "progressPercentage" in before or progress is not None:
            status["progressPercentage"] = 100
            status["estimatedRemainingSeconds"] = 0
        return
    if progress is None:
        return
    if progress.percentage is not None:
        status["progressPercentage"] = progress.percentage
    if progress.remaining_s is not None:
        old = before.get("estimatedRemainingSeconds")
        near = isinstance(old, int) and abs(progress.remaining_s - old) <= _ESTIMATE_STEP * max(old, 1)
        if not near or before.get("progressPercentage") != progress.percentage:
            status["estimatedRemainingSeconds"] = progress.remaining_s
