"""Whether a job has ended: a worker's success, a failure that does not pass by itself, or its deadline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from edl.master.kube.conditions import find_condition
from edl.master.kube.jobs.launches import MASTER, WORKER
from edl.master.kube.jobs.reasons import FAILURE_ADVICE, FAILURE_REASONS
from edl.master.kube.members import MemberEnd, MemberPod, MemberRecord, read_member_records
from edl.master.kube.members.records import MAX_MESSAGE_CHARS
from edl.master.kube.resources import ElasticJob
from edl.master.scaling.terminations import TerminationCause, find_termination_cause

__all__ = [
    "Completion",
    "JobFailure",
    "find_completion",
    "find_failure",
    "find_final_phase",
    "has_given_up_shards",
    "note_last_steps",
]

_EXIT_POISONED: Final = 3
"""What `edl master` ends with where shards were given up: the job has its result, without these."""
_SUCCEEDED: Final = TerminationCause.SUCCEEDED.value
_NOT_STORED: Final = TerminationCause.NOT_STORED.value
_LAST_STEPS: Final = (_SUCCEEDED, _NOT_STORED)
"""Causes of a worker's end with which the script has ended, and the job with it."""
_DEADLINE: Final = "DeadlineExceeded"


@dataclass(frozen=True)
class JobFailure:
    """Why a job has failed.

    Attributes:
        reason: of the condition `Failed`.
        summary: in a line for a person.
        message: the summary, what to do, and the traceback.
    """

    reason: str
    summary: str
    message: str


@dataclass(frozen=True)
class Completion:
    """The end of a job's work: a worker has done the last step.

    Attributes:
        key: of the worker that was the first to end.
        seen_s: when the operator first saw a worker's end, Unix time: nodes' clocks may be minutes away from its own.
        failure: why the job has failed nevertheless: a worker's last state is not stored; None if all are.
    """

    key: str
    seen_s: float
    failure: JobFailure | None = None


def note_last_steps(
    before: Mapping[str, MemberRecord], records: Mapping[str, MemberRecord], pods: Iterable[MemberPod], now_s: float
) -> dict[str, MemberRecord]:
    """Return records with the ends of workers that did the last step while they were asked to leave.

    Such an end stands in no record, since another try has the worker's place; and its pod goes before the others end.
    A last state that is not stored stays so, however well the other try ends, which found the job done.
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
        verdict, last = find_termination_cause(pod.termination), record.last_end
        counted = -1 if last is None else last.try_number
        known = last is not None and last.cause in (_NOT_STORED, verdict.cause.value)
        later = verdict.cause is TerminationCause.SUCCEEDED and counted > pod.try_number
        if verdict.cause.value in _LAST_STEPS and not known and not later:
            end = MemberEnd(
                # What is counted of a later try, such as one that found the job done, stays counted.
                try_number=max(pod.try_number, counted),
                cause=verdict.cause.value,
                evidence=verdict.evidence,
                exit_code=pod.termination.exit_code,
                message=pod.termination.message[-MAX_MESSAGE_CHARS:],
                pod=pod.name,
                node=pod.node,
                time_s=pod.finished_s or now_s,
                seen_s=now_s,
            )
            after[pod.key] = replace(record, last_end=end)
    return after


def find_completion(records: Mapping[str, MemberRecord], messages: Mapping[str, str]) -> Completion | None:
    """Return the end of the job's work; None while it goes on.

    `messages` has the whole message of a member's end by its key, where that is known.
    """
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
    """Return `Succeeded` or `Failed` of a job that has ended, which nothing changes; empty if it goes on.

    A condition says so, and what is recorded of the members' ends bears it out: a status that somebody wrote by hand
    ends no job.
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
    """Whether a member's end is that of a master whose shards were given up, which is no failure of the job."""
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
