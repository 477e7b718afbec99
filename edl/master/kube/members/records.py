"""Records of members in their owner's `status.members`, and the next step after a member's end.

A record is written before its pod is deleted or created. So after a crash, the next operator knows whether a pod's end
was counted, and which attempt follows. Within a pod, `edl run` restarts the workers; once the pod has ended, the
relaunch table of `edl.master.scaling` decides whether a new pod follows. If a member ran for a long time, or its owner
made progress, failures are counted from zero again.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from edl.kube.objects import format_time, read_time
from edl.master.kube.members.pods import MemberPod, get_list, get_mapping, get_text
from edl.master.scaling.terminations import (
    MEMORY_STEP,
    RELAUNCH_TABLE,
    RelaunchAction,
    RelaunchDecision,
    RelaunchRule,
    TerminationCause,
    TerminationReport,
    TerminationVerdict,
    decide_relaunch,
    find_termination_cause,
)

MAX_MESSAGE_CHARS: Final = 400
"""Maximum number of characters kept from the message of a member's last end: the messages of a thousand members then
take 0.4 MB of etcd's 1.5 MB per object."""
MAX_MEMORY_FACTOR: Final = MEMORY_STEP**3  # the relaunch table's three steps: a status with more was written by hand
_PACE_S: Final = 10.0
_BURST_S: Final = 40.0
"""To limit the load on the cluster, a member gets one pod every `_PACE_S` seconds in the long run, and at most
`_BURST_S / _PACE_S` more at once."""
_MEMBER: Final = re.compile(r"[a-z]+-(?:0|[1-9][0-9]{0,8})")
"""Matches a member's role and index. Other keys were written by hand, and are ignored."""


@dataclass(frozen=True)
class ExcludedNode:
    """A node that a member's next pods avoid until `until_s`, Unix time."""

    node: str
    until_s: float
    cause: str


@dataclass(frozen=True)
class MemberEnd:
    """How a member's pod ended. Times are Unix times.

    Attributes:
        time_s: when the pod ended according to its node's clock, or was found to be gone.
        seen_s: when the operator saw that the pod had ended; delays are counted from this time.
        progress: the owner's progress at that time, in percent; None if unknown.
        displaced: the member's place is taken or lost, so a successor needs a different place.
    """

    try_number: int
    cause: str
    evidence: str = ""
    exit_code: int | None = None
    message: str = ""
    pod: str = ""
    node: str = ""
    time_s: float = 0.0
    seen_s: float = 0.0
    progress: int | None = None
    displaced: bool = False


@dataclass(frozen=True)
class MemberRecord:
    """The record of a member, for all of its pods. Times are Unix times.

    Attributes:
        try_number: the number of its newest pod, or of the next one.
        uid: uid of the pod of that attempt, once the pod has been seen. If the pod is missing later, it counts as
            ended.
        failures: maps each cause to how many times the member has ended with it since it last made progress.
        not_before_s: when the pod of this attempt may be created; None for at once.
        paced_until_s: when the member's next pod would be due at its normal pace, given the pods created so far.
    """

    try_number: int = 0
    uid: str = ""
    failures: Mapping[str, int] = field(default_factory=dict)
    memory_factor: float = 1.0
    excluded_nodes: tuple[ExcludedNode, ...] = ()
    not_before_s: float | None = None
    last_end: MemberEnd | None = None
    paced_until_s: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether the newest pod has ended for good, so that no other pod follows."""
        return self.last_end is not None and self.last_end.try_number >= self.try_number

    def is_superseded(self, pod: MemberPod) -> bool:
        """Whether a later attempt has a pod's place, because the pod's end was counted or the pod was released."""
        return pod.try_number < self.try_number

    @property
    def replaces(self) -> bool:
        """Whether the pod of this attempt has not been seen yet, and replaces a pod that has just ended."""
        end = self.last_end
        return end is not None and end.try_number == self.try_number - 1 and not self.uid and not end.displaced

    def can_start(self, now_s: float) -> bool:
        return not self.ended and (self.not_before_s is None or now_s >= self.not_before_s)

    def displace(self) -> MemberRecord:
        """Return the record of a member that has lost its place: a later pod of this member counts as growth."""
        return replace(self, last_end=replace(self.last_end, displaced=True)) if self.last_end is not None else self

    def begin_try(self, now_s: float, delay_s: float = 0.0) -> MemberRecord:
        """Return the record for the next pod, due after `delay_s`, or later if there were too many pods recently."""
        # A time further ahead than the pace allows is from before the clock was set back.
        used_until_s = max(now_s, min(self.paced_until_s, now_s + _BURST_S + _PACE_S))
        allowed_s = max(now_s + delay_s, used_until_s - _BURST_S)
        return replace(
            self,
            try_number=self.try_number + 1,
            uid="",
            not_before_s=allowed_s if allowed_s > now_s else None,
            paced_until_s=used_until_s + _PACE_S,
        )

    def forgive(self, now_s: float) -> MemberRecord:
        """Return the record of a member whose last end no longer counts: only the pace of its pods is kept."""
        allowed_s = self.paced_until_s - _PACE_S - _BURST_S
        return replace(self, failures={}, not_before_s=allowed_s if allowed_s > now_s else None)

    def adopt(self, pod: MemberPod) -> MemberRecord:
        """Return the record with the given pod as the member's newest."""
        if pod.try_number < self.try_number or (pod.try_number == self.try_number and pod.uid == self.uid):
            return self
        return replace(self, try_number=pod.try_number, uid=pod.uid, not_before_s=None)


def read_member_records(status: Mapping[str, Any]) -> dict[str, MemberRecord]:
    """Return the records of `status.members` by keys such as `worker-0`, without entries that EDL did not write."""
    members = status.get("members")
    if not isinstance(members, Mapping):
        return {}
    return {
        key: _read_record(value)
        for key, value in members.items()
        if isinstance(value, Mapping) and _MEMBER.fullmatch(key)
    }


def format_member_records(records: Mapping[str, MemberRecord]) -> dict[str, Any]:
    """Return `status.members`, without empty fields."""
    return {key: _format_record(records[key]) for key in sorted(records, key=_sort_key)}


def _sort_key(key: str) -> tuple[str, int]:
    role, _, index = key.rpartition("-")
    return role, int(index)


def _read_record(value: Mapping[str, Any]) -> MemberRecord:
    failures = get_mapping(value, "failures")
    return MemberRecord(
        try_number=_read_count(value.get("try")) or 0,
        uid=get_text(value, "uid"),
        failures={cause: count for cause in failures if (count := _read_count(failures[cause]))},
        memory_factor=_read_factor(value.get("memoryFactor")),
        excluded_nodes=tuple(
            ExcludedNode(get_text(item, "node"), until_s, get_text(item, "cause"))
            for item in get_list(value, "excludedNodes")
            if get_text(item, "node") and (until_s := read_time(item.get("until"))) is not None
        ),
        not_before_s=read_time(value.get("notBefore")),
        last_end=_read_end(get_mapping(value, "lastEnd")),
        paced_until_s=read_time(value.get("pacedUntil")) or 0.0,
    )


def _read_end(value: Mapping[str, Any]) -> MemberEnd | None:
    try_number, cause = _read_count(value.get("try")), get_text(value, "cause")
    if try_number is None or not cause:
        return None
    code = value.get("exitCode")
    return MemberEnd(
        try_number=try_number,
        cause=cause,
        evidence=get_text(value, "evidence"),
        exit_code=code if isinstance(code, int) else None,
        message=get_text(value, "message"),
        pod=get_text(value, "pod"),
        node=get_text(value, "node"),
        time_s=(time_s := read_time(value.get("time")) or 0.0),
        seen_s=read_time(value.get("seen")) or time_s,
        progress=_read_count(value.get("progress")),
        displaced=value.get("displaced") is True,
    )


def _format_record(record: MemberRecord) -> dict[str, Any]:
    # Rounded up: rounded down, the earliest start would be too early.
    not_before_s, paced_until_s = record.not_before_s, record.paced_until_s
    return _keep_said(
        {
            "try": record.try_number,
            "uid": record.uid,
            "failures": dict(sorted(record.failures.items())),
            "memoryFactor": record.memory_factor if record.memory_factor != 1.0 else None,
            "excludedNodes": [
                {"node": item.node, "until": format_time(item.until_s), "cause": item.cause}
                for item in record.excluded_nodes
            ],
            "notBefore": format_time(math.ceil(not_before_s)) if not_before_s is not None else None,
            "pacedUntil": format_time(math.ceil(paced_until_s)) if paced_until_s else None,
            "lastEnd": _format_end(record.last_end) if record.last_end is not None else None,
        }
    )


def _format_end(end: MemberEnd) -> dict[str, Any]:
    return _keep_said(
        {
            "try": end.try_number,
            "cause": end.cause,
            "time": format_time(end.time_s),
            "seen": format_time(end.seen_s),
            "evidence": end.evidence,
            "message": end.message,
            "pod": end.pod,
            "node": end.node,
            "exitCode": end.exit_code,
            "progress": end.progress,
            "displaced": end.displaced or None,
        }
    )


def _keep_said(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}


def _read_factor(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < math.inf:
        return 1.0
    return min(float(value), MAX_MEMORY_FACTOR)


def _read_count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**9 else None


LAUNCH_PATIENCE_S: Final = 120.0
"""A container that cannot start counts as ended after this time. In this time, the kubelet tries four times."""
STEADY_S: Final = 600.0
"""After a run of this length, a member's failures are counted from zero. This is twice the longest delay between
attempts."""
EXCLUSION_S: Final = 900.0
"""How long a member avoids a node where it failed: pressure on its memory or disk has passed by then."""
FAULTY_EXCLUSION_S: Final = 86_400.0  # for a node with a broken GPU, a day: people have to repair it
_MOST_EXCLUDED: Final = 8
"""Maximum number of nodes that a member avoids, the latest ones. With more, a small cluster might have no node left."""
_TAKEN: Final = frozenset({"PreemptionByScheduler", "Preempted", "Preempting"})
"""Reasons by which the scheduler and the kubelet report that another pod took a pod's place."""
ROOM_PATIENCE_S: Final = 60.0
"""A pod that no node takes within this time is recreated with fewer excluded nodes."""


@dataclass(frozen=True)
class MemberOutcome:
    """The outcome of counting a member's end; `record` is the member's new record."""

    record: MemberRecord
    verdict: TerminationVerdict
    decision: RelaunchDecision
    end: MemberEnd
    message: str = ""


def find_end(record: MemberRecord, pod: MemberPod | None, now_s: float) -> TerminationReport | None:
    """Return the evidence about the end of `pod`, the newest pod; None while it runs, or if its end is counted."""
    if record.ended:
        return None
    if pod is None:
        # Seen before, and gone without a trace: deleted by force, or by the control plane when its node was removed.
        return TerminationReport() if record.uid else None
    if not pod.live:
        return pod.termination
    if pod.waiting and now_s - pod.placed_s >= LAUNCH_PATIENCE_S:
        verdict = find_termination_cause(pod.termination)
        if verdict.cause is TerminationCause.LAUNCH_FAILED:
            return pod.termination
    return None


def record_end(
    record: MemberRecord,
    report: TerminationReport,
    pod: MemberPod | None,
    now_s: float,
    *,
    progress: int | None = None,
    table: Mapping[TerminationCause, tuple[RelaunchRule, ...]] = RELAUNCH_TABLE,
) -> MemberOutcome:
    """Count the end of a member's newest pod, and decide the next step."""
    verdict = _find_cause(report, pod)
    failures = {} if _has_progressed(record, pod, now_s, progress) else dict(record.failures)
    reached = record.last_end.progress if record.last_end is not None else None
    count = failures.get(verdict.cause.value, 0) + 1
    decision = decide_relaunch(verdict.cause, count, table)
    end = MemberEnd(
        try_number=record.try_number,
        cause=verdict.cause.value,
        evidence=verdict.evidence,
        exit_code=report.exit_code,
        message=report.message[-MAX_MESSAGE_CHARS:],
        pod=pod.name if pod else "",
        node=pod.node if pod else "",
        time_s=(pod.finished_s if pod else None) or now_s,
        seen_s=now_s,
        progress=max((known for known in (progress, reached) if known is not None), default=None),
        displaced=_is_displaced(verdict, report),
    )
    if verdict.cause is not TerminationCause.SUCCEEDED:
        failures[verdict.cause.value] = count
    after = replace(record, failures=failures, last_end=end)
    if decision.action not in (RelaunchAction.NOTHING, RelaunchAction.STOP):
        after = replace(
            after.begin_try(now_s, decision.delay_s),
            memory_factor=_raise_memory(record.memory_factor, decision.action),
            excluded_nodes=_exclude(record, end, decision, now_s),
        )
    return MemberOutcome(after, verdict, decision, end, report.message)


def relax_exclusions(record: MemberRecord, pod: MemberPod | None, now_s: float) -> MemberRecord:
    """Return a record without the excluded nodes that may be used again.

    If no other node takes the member's pod within a minute, only nodes with a broken GPU stay excluded. The returned
    record is then for the next attempt, and the pod of this attempt is removed.
    """
    left = tuple(item for item in record.excluded_nodes if item.until_s > now_s)
    stuck = pod is not None and pod.pending and bool(pod.unschedulable) and now_s - pod.created_s >= ROOM_PATIENCE_S
    if stuck and record.excluded_nodes:
        faulty = tuple(item for item in left if item.cause == TerminationCause.HARDWARE.value)
        if faulty != record.excluded_nodes:
            return replace(record.begin_try(now_s), excluded_nodes=faulty)
    return record if len(left) == len(record.excluded_nodes) else replace(record, excluded_nodes=left)


def _find_cause(report: TerminationReport, pod: MemberPod | None) -> TerminationVerdict:
    if pod is None:
        return TerminationVerdict(TerminationCause.PREEMPTED, "its pod is gone: it was deleted")
    verdict = find_termination_cause(report)
    if verdict.cause is TerminationCause.UNKNOWN and pod.deleting:
        # Counted as soon as it is asked to end, so that its successor need not wait for it.
        return TerminationVerdict(TerminationCause.PREEMPTED, "it was asked to end: its pod is being deleted")
    return verdict


def _is_displaced(verdict: TerminationVerdict, report: TerminationReport) -> bool:
    if verdict.cause in (TerminationCause.EVICTED, TerminationCause.NODE_LOST):
        return True
    reasons = {report.pod_reason, report.container_reason, *report.conditions, *report.events}
    return verdict.cause is TerminationCause.PREEMPTED and bool(reasons & _TAKEN)


def _has_progressed(record: MemberRecord, pod: MemberPod | None, now_s: float, progress: int | None) -> bool:
    if pod is not None and pod.started_s is not None:
        # Its node's clock may be wrong: it cannot have run longer than it has had its node by the API server's clock.
        ran_s = min((pod.finished_s or now_s) - pod.started_s, now_s - pod.placed_s)
        if ran_s >= STEADY_S:
            return True
    before = record.last_end.progress if record.last_end is not None else None
    return before is not None and progress is not None and progress > before


def _raise_memory(factor: float, action: RelaunchAction) -> float:
    """Return the memory factor, which only grows: an amount that was too small once is too small later."""
    return min(MAX_MEMORY_FACTOR, factor * MEMORY_STEP) if action is RelaunchAction.MORE_MEMORY else factor


def _exclude(
    record: MemberRecord, end: MemberEnd, decision: RelaunchDecision, now_s: float
) -> tuple[ExcludedNode, ...]:
    left = tuple(item for item in record.excluded_nodes if item.until_s > now_s and item.node != end.node)
    # A node that does not answer has a taint that keeps pods away, and is as good as any once it is back.
    lost = end.cause == TerminationCause.NODE_LOST.value
    if decision.action is not RelaunchAction.ELSEWHERE or not end.node or lost:
        return left
    lasts_s = FAULTY_EXCLUSION_S if end.cause == TerminationCause.HARDWARE.value else EXCLUSION_S
    return (*left, ExcludedNode(end.node, float(int(now_s + lasts_s)), end.cause))[-_MOST_EXCLUDED:]


NO_ROOM = "no_room"
"""Key in a member's failures: how many of its pods in a row were removed because no node took them."""


@dataclass(frozen=True)
class MemberReview:
    """An owner's members, by keys such as `worker-0`: records that count all ends, live pods, and new ends."""

    records: Mapping[str, MemberRecord]
    current: Mapping[str, MemberPod]
    outcomes: Mapping[str, MemberOutcome]


def review_members(
    records: Mapping[str, MemberRecord], pods: Iterable[MemberPod], now_s: float, progress: int | None = None
) -> MemberReview:
    """Count the ends of members, and find the newest pod of each."""
    by_member: dict[str, dict[int, MemberPod]] = defaultdict(dict)
    for pod in pods:
        by_member[pod.key][pod.try_number] = pod
    after: dict[str, MemberRecord] = {}
    current: dict[str, MemberPod] = {}
    outcomes: dict[str, MemberOutcome] = {}
    for key in sorted({*records, *by_member}):
        tries = by_member.get(key, {})
        record = records.get(key, MemberRecord())
        if tries and not record.ended:
            record = record.adopt(tries[max(tries)])
        pod_or_none = tries.get(record.try_number)
        record = relax_exclusions(record, pod_or_none, now_s)
        pod_or_none = tries.get(record.try_number)
        report = find_end(record, pod_or_none, now_s)
        if report is not None:
            outcome = record_end(record, report, pod_or_none, now_s, progress=progress)
            outcomes[key] = outcome
            record = outcome.record
        elif pod_or_none is not None and not record.ended:
            current[key] = pod_or_none
            if pod_or_none.scheduled and NO_ROOM in record.failures:
                left = {cause: count for cause, count in record.failures.items() if cause != NO_ROOM}
                record = replace(record, failures=left)
        after[key] = record
    return MemberReview(after, current, outcomes)


def list_superseded(records: Mapping[str, MemberRecord], pods: Iterable[MemberPod]) -> tuple[MemberPod, ...]:
    """Return the existing pods to delete: pods whose ends were counted, and pods that were released."""
    return tuple(pod for pod in pods if not pod.deleting and pod.key in records and records[pod.key].is_superseded(pod))
