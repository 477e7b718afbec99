"""The status of an ElasticJob: counts, phase, conditions and progress. Nothing in it changes by time alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from edl.kube.objects import Object, format_time
from edl.master.kube.conditions import Condition, write_conditions
from edl.master.kube.jobs.job_end import JobFailure
from edl.master.kube.jobs.launches import WORKER
from edl.master.kube.members import MemberPod, MemberRecord, build_selector, format_member_records
from edl.master.kube.members.records import read_time
from edl.master.kube.observation import OwnerObservation, WorkProgress
from edl.master.kube.resources import ElasticJob

__all__ = ["JobView", "get_started_s", "write_finished_status", "write_job_status"]

_LAUNCHING: Final = frozenset({"", "ContainerCreating", "PodInitializing"})
"""Why a container waits that is being started."""
_ESTIMATE_STEP: Final = 0.1
"""By how much of itself an estimate must change to be written again: each write goes to all who watch the job."""


@dataclass(frozen=True)
class JobView:
    """A job as its status shows it.

    Attributes:
        records: of all members.
        workers: live pods of the newest tries.
        target: how many workers are wanted.
        creating: how many pods of workers are being made.
        waiting: keys of workers that are made later -> when, Unix time.
        suspended: there are no workers since `spec.suspend` is true.
        ending: how the job is ending; empty if it is not.
        succeeded: which worker ended the job; empty if none has, or others are waited for.
        failure: why it has failed; None if it has not.
    """

    records: Mapping[str, MemberRecord]
    workers: tuple[MemberPod, ...] = ()
    target: int = 0
    creating: int = 0
    waiting: Mapping[str, float] | None = None
    suspended: bool = False
    ending: str = ""
    succeeded: str = ""
    failure: JobFailure | None = None


def get_started_s(job: ElasticJob) -> float | None:
    """Return when a job's present run was started, Unix time; None before, and while it is suspended."""
    return read_time(job.status.get("startTime"))


def write_finished_status(job: ElasticJob, phase: str, workers: int) -> Object:
    """Return the status of a job that has ended before: as it is, but for what follows from its end."""
    counts = {"replicas": workers, "readyReplicas": 0, "wantedReplicas": 0}
    return {**job.status, "observedGeneration": job.generation, "phase": phase, **counts}


def write_job_status(job: ElasticJob, observation: OwnerObservation, view: JobView) -> Object:
    """Return the whole status of a job."""
    now_s = observation.now_s
    ready = sum(pod.ready for pod in view.workers)
    finished = view.failure is not None or bool(view.succeeded)
    conditions = [
        _describe_accepted(job, observation),
        _describe_scheduled(job, view, finished),
        _describe_running(job, view, ready, finished),
        _describe_suspended(view),
        _describe_complete(view),
        _describe_failed(view),
    ]
    before = job.status.get("conditions")
    status: Object = {
        **{key: value for key, value in job.status.items() if key not in _VANISHING},
        "observedGeneration": job.generation,
        "phase": _find_phase(view, ready),
        "jobId": job.job_id,
        "store": job.store,
        "checkpoint": job.checkpoint,
        "replicas": len(view.workers) + view.creating,
        "readyReplicas": ready,
        "wantedReplicas": 0 if finished or view.suspended else view.target,
        "selector": ",".join(f"{key}={value}" for key, value in build_selector(job, WORKER).items()),
        "conditions": write_conditions(before if isinstance(before, list) else [], conditions, job.generation, now_s),
        "members": format_member_records(view.records),
        "message": _write_message(conditions, view),
    }
    started_s = get_started_s(job)
    if not view.suspended:
        status["startTime"] = format_time(now_s if started_s is None else started_s)
    if job.ignored_edits:
        status["ignoredEdits"] = job.ignored_edits
    if finished:
        status["completionTime"] = format_time(now_s)
    _write_progress(status, job.status, observation.store.progress, bool(view.succeeded))
    return status


_VANISHING: Final = ("startTime", "completionTime", "ignoredEdits")
"""Fields that are only there at times: a job that is suspended has no start, as `batch/v1` has it."""


def _find_phase(view: JobView, ready: int) -> str:
    if view.failure is not None:
        return "Failed"
    if view.succeeded:
        return "Succeeded"
    if view.suspended:
        return "Suspended"
    return "Running" if ready or view.ending else "Pending"


def _describe_accepted(job: ElasticJob, observation: OwnerObservation) -> Condition:
    if job.ignored_edits:
        return Condition("Accepted", True, "StoreChangeIgnored", job.ignored_edits)
    if observation.store.refused:
        return Condition("Accepted", True, "StoreNotAllowed", observation.store.refused)
    if observation.store.unreachable:
        return Condition("Accepted", True, "StoreUnreachable", observation.store.unreachable)
    return Condition("Accepted", True, "Valid", "the spec can be worked on")


def _describe_scheduled(job: ElasticJob, view: JobView, finished: bool) -> Condition:
    def build(holds: bool, reason: str, message: str) -> Condition:
        return Condition("Scheduled", holds, reason, message)

    if finished:
        return build(False, "Finished", "the job has ended")
    if view.suspended:
        return build(False, "Suspended", "spec.suspend is true")
    count = sum(pod.scheduled for pod in view.workers)
    refused = next((pod for pod in view.workers if pod.pending and pod.unschedulable), None)
    words = f"; {refused.key} waits: {refused.unschedulable}" if refused else ""
    if count >= job.min_replicas:
        reason = "AllScheduled" if count >= view.target else "MinimumScheduled"
        return build(True, reason, f"{count} of {view.target} workers have a node{words}")
    if refused is not None:
        text = f"{count} of the {job.min_replicas} workers that the job needs have a node{words}"
        return build(False, "Unschedulable", text)
    if view.waiting:
        return build(False, "BackingOff", _describe_waiting(view))
    return build(False, "WaitingForNode", f"{count} of the {job.min_replicas} workers that the job needs have a node")


def _describe_running(job: ElasticJob, view: JobView, ready: int, finished: bool) -> Condition:
    def build(holds: bool, reason: str, message: str) -> Condition:
        return Condition("Running", holds, reason, message)

    if finished:
        return build(False, "Finished", "the job has ended")
    if view.suspended:
        return build(False, "Suspended", "spec.suspend is true")
    if view.ending:
        return build(bool(ready), "Ending", view.ending)
    stuck = next((pod for pod in view.workers if pod.waiting not in _LAUNCHING), None)
    words = f"{stuck.key}: {stuck.waiting}: {stuck.waiting_message}".rstrip(": ") if stuck else ""
    if ready >= job.min_replicas:
        return build(True, "WorkersRunning", f"{ready} of {view.target} workers run" + (f"; {words}" if words else ""))
    if stuck is not None:
        return build(False, "ContainerWaiting", words)
    if view.waiting:
        return build(False, "BackingOff", _describe_waiting(view))
    count = sum(pod.scheduled for pod in view.workers)
    if count < job.min_replicas:
        return build(False, "NotScheduled", f"{count} of the {job.min_replicas} workers that it needs have a node")
    return build(False, "Starting", f"{ready} of the {job.min_replicas} workers that it needs are ready")


def _describe_waiting(view: JobView) -> str:
    waiting = view.waiting or {}
    key = min(waiting, key=lambda name: (waiting[name], name))
    end = view.records[key].last_end if key in view.records else None
    why = f": it ended, {end.cause.replace('_', ' ')} ({end.evidence})" if end is not None else ""
    if end is not None and (lines := end.message.strip().splitlines()):
        why += f": {lines[-1].strip()}"
    others = f"; {len(waiting) - 1} others wait as well" if len(waiting) > 1 else ""
    return f"{key} is made again at {format_time(waiting[key])}{why}{others}"


def _describe_suspended(view: JobView) -> Condition:
    if view.suspended:
        return Condition("Suspended", True, "SuspendRequested", "spec.suspend is true: `edl resume` goes on")
    return Condition("Suspended", False, "NotSuspended", "spec.suspend is false")


def _describe_complete(view: JobView) -> Condition:
    if view.failure is not None:
        return Condition("Complete", False, "JobFailed", "the job has failed")
    if view.succeeded:
        return Condition("Complete", True, "WorkersSucceeded", f"{view.succeeded} has ended the job")
    return Condition("Complete", False, "NotFinished", view.ending or "the job goes on")


def _describe_failed(view: JobView) -> Condition:
    if view.failure is not None:
        return Condition("Failed", True, view.failure.reason, view.failure.message)
    return Condition("Failed", False, "NotFailed", "the job has not failed")


def _write_message(conditions: list[Condition], view: JobView) -> str:
    if view.failure is not None:
        return view.failure.summary
    if view.succeeded:
        return "the job has succeeded"
    if view.suspended:
        return "suspended"
    running = next(condition for condition in conditions if condition.type == "Running")
    scheduled = next(condition for condition in conditions if condition.type == "Scheduled")
    return scheduled.message if running.reason == "NotScheduled" else running.message


def _write_progress(status: Object, before: Mapping[str, Any], progress: WorkProgress | None, succeeded: bool) -> None:
    """Write how far the job is; what is not known now stays as it was."""
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
