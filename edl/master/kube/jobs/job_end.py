"""Whether a job has ended: a worker's success, a failure that does not pass by itself, or its deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from edl.master.kube.jobs.launches import MASTER, WORKER
from edl.master.kube.jobs.reasons import FAILURE_ADVICE, FAILURE_REASONS
from edl.master.kube.members import MemberEnd, MemberPod, MemberRecord
from edl.master.kube.resources import ElasticJob
from edl.master.scaling.terminations import TerminationCause

__all__ = ["JobFailure", "find_failure", "find_success_s", "has_given_up_shards"]

_EXIT_POISONED: Final = 3
"""What `edl master` ends with where shards were given up: the job has its result, without these."""
_SUCCEEDED: Final = TerminationCause.SUCCEEDED.value
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


def find_success_s(
    records: Mapping[str, MemberRecord], pods: Sequence[MemberPod], now_s: float
) -> tuple[str, float] | None:
    """Return the worker that has ended the job, and when; None while none has.

    A pod that was let go counts as well: it may have done the last step while it was asked to leave.

    Args:
        records: of all members.
        pods: of the job.
        now_s: the time.
    """
    ends = [
        (end.time_s, key)
        for key, record in records.items()
        if (end := record.last_end) is not None and key.startswith(f"{WORKER}-") and end.cause == _SUCCEEDED
    ]
    ends += [
        (pod.finished_s or now_s, pod.key)
        for pod in pods
        if pod.role == WORKER and pod.finished and pod.termination.exit_code == 0 and not pod.termination.signal
    ]
    if not ends:
        return None
    time_s, key = min(ends)
    return key, time_s


def has_given_up_shards(end: MemberEnd, key: str) -> bool:
    """Whether a member's end is that of a master whose shards were given up, which is no failure of the job.

    Args:
        end: of the member.
        key: of the member.
    """
    return key.startswith(f"{MASTER}-") and end.exit_code == _EXIT_POISONED


def find_failure(
    job: ElasticJob,
    records: Mapping[str, MemberRecord],
    messages: Mapping[str, str],
    started_s: float | None,
    now_s: float,
) -> JobFailure | None:
    """Return why a job has failed; None if it has not.

    Args:
        job: with its deadline.
        records: of all members.
        messages: key of a member -> the whole message of its end, where that is known.
        started_s: when the job was started; None before.
        now_s: the time.
    """
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
