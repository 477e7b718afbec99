"""What follows a member's end: the relaunch table of `edl.master.scaling`, carried out for pods.

A pod that has ended cannot be started again in place, which `edl run` has tried within it before: another pod follows.
An end is counted once for each try; a member that went on for long, or whose owner made progress, begins to count anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from edl.master.kube.members.member_pod import MemberPod
from edl.master.kube.members.records import MAX_MEMORY_FACTOR, MAX_MESSAGE_CHARS, ExcludedNode, MemberEnd, MemberRecord
from edl.master.scaling.relaunch import (
    RELAUNCH_TABLE,
    RelaunchAction,
    RelaunchDecision,
    RelaunchRule,
    decide_relaunch,
)
from edl.master.scaling.terminations import (
    TerminationCause,
    TerminationReport,
    TerminationVerdict,
    find_termination_cause,
)

__all__ = [
    "LAUNCH_PATIENCE_S",
    "POD_RELAUNCH_TABLE",
    "ROOM_PATIENCE_S",
    "MemberOutcome",
    "find_end",
    "record_end",
    "relax_exclusions",
]

LAUNCH_PATIENCE_S: Final = 120.0
"""A container that cannot be started, for want of its image or a volume, counts as ended after so long: the kubelet has
then tried four times, and a registry or a secret that comes late has come."""
STEADY_S: Final = 600.0
"""A member that ran for so long starts to count its failures anew: twice the longest delay between two tries."""
EXCLUSION_S: Final = 900.0
"""For so long a member keeps away from a node where it failed: pressure on its memory or disk has passed by then."""
FAULTY_EXCLUSION_S: Final = 86_400.0
"""From a node whose GPU is broken, a day: it is repaired by people."""
_MOST_EXCLUDED: Final = 8
"""Nodes that a member keeps away from, the last ones; with more, a small cluster has no node left."""
_TAKEN: Final = frozenset({"PreemptionByScheduler", "Preempted", "Preempting"})
"""Reasons by which the scheduler and the kubelet say that another pod has a pod's place."""
ROOM_PATIENCE_S: Final = 60.0
"""A pod that no node takes for so long is made again with fewer nodes left out."""


def _merge_rules(rules: tuple[RelaunchRule, ...]) -> tuple[RelaunchRule, ...]:
    """Return rules with a new pod in place of a restart in place, neighbours with the same action joined."""
    merged: list[RelaunchRule] = []
    for rule in rules:
        action = RelaunchAction.NEW_POD if rule.action is RelaunchAction.RESTART_IN_PLACE else rule.action
        if merged and merged[-1].action is action and merged[-1].times is not None:
            times = None if rule.times is None else merged[-1].times + rule.times
            merged[-1] = RelaunchRule(action, times)
        else:
            merged.append(RelaunchRule(action, rule.times))
    return tuple(merged)


POD_RELAUNCH_TABLE: Final[Mapping[TerminationCause, tuple[RelaunchRule, ...]]] = {
    **{cause: _merge_rules(rules) for cause, rules in RELAUNCH_TABLE.items()},
    TerminationCause.NOT_STORED: (),
}
"""`RELAUNCH_TABLE` for pods that have ended. A last state that is not stored goes with its pod's memory: another pod
would find the job done, and nothing to store."""


@dataclass(frozen=True)
class MemberOutcome:
    """A member's end, counted.

    Attributes:
        record: of the member from now on.
        verdict: why it ended.
        decision: what is done about it.
        end: as it is recorded.
        message: of the end, whole.
    """

    record: MemberRecord
    verdict: TerminationVerdict
    decision: RelaunchDecision
    end: MemberEnd
    message: str = ""


def find_end(record: MemberRecord, pod: MemberPod | None, now_s: float) -> TerminationReport | None:
    """Return what is known of the end of a member's newest pod; None while it goes on, or its end is counted.

    `pod` is that of the record's try; None if there is none.
    """
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
    table: Mapping[TerminationCause, tuple[RelaunchRule, ...]] = POD_RELAUNCH_TABLE,
) -> MemberOutcome:
    """Count the end of a member's newest pod, and decide what follows."""
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
            memory_factor=_raise_memory(record.memory_factor, decision),
            excluded_nodes=_exclude(record, end, decision, now_s),
        )
    return MemberOutcome(after, verdict, decision, end, report.message)


def relax_exclusions(record: MemberRecord, pod: MemberPod | None, now_s: float) -> MemberRecord:
    """Return a record without nodes that may be used again.

    A node is left out for a time. Where no other node takes the member's pod for a minute, nodes with a broken GPU
    alone are left out: the returned record is then of the next try, and the pod of this try is let go.
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
        return TerminationVerdict(TerminationCause.PREEMPTED, "it was asked to leave: its pod is being deleted")
    return verdict


def _is_displaced(verdict: TerminationVerdict, report: TerminationReport) -> bool:
    if verdict.cause in (TerminationCause.EVICTED, TerminationCause.NODE_LOST):
        return True
    reasons = {report.pod_reason, report.container_reason, *report.conditions, *report.events}
    return verdict.cause is TerminationCause.PREEMPTED and bool(reasons & _TAKEN)


def _has_progressed(record: MemberRecord, pod: MemberPod | None, now_s: float, progress: int | None) -> bool:
    if pod is not None and pod.started_s is not None:
        # Its node's clock may be absurd: it cannot have run for longer than it has had its node by the API server's.
        ran_s = min((pod.finished_s or now_s) - pod.started_s, now_s - pod.placed_s)
        if ran_s >= STEADY_S:
            return True
    before = record.last_end.progress if record.last_end is not None else None
    return before is not None and progress is not None and progress > before


def _raise_memory(factor: float, decision: RelaunchDecision) -> float:
    """Return by how much memory is multiplied; once raised, it stays so, and is raised further from there."""
    if decision.action is not RelaunchAction.MORE_MEMORY:
        return factor
    step = decide_relaunch(TerminationCause.OUT_OF_MEMORY, 1).memory_factor
    return min(MAX_MEMORY_FACTOR, max(decision.memory_factor, factor * step))


def _exclude(
    record: MemberRecord, end: MemberEnd, decision: RelaunchDecision, now_s: float
) -> tuple[ExcludedNode, ...]:
    left = tuple(item for item in record.excluded_nodes if item.until_s > now_s and item.node != end.node)
    # A node that does not answer has a taint that keeps pods away, and is as good as any when it has come back.
    lost = end.cause == TerminationCause.NODE_LOST.value
    if decision.action is not RelaunchAction.ELSEWHERE or not end.node or lost:
        return left
    lasts_s = FAULTY_EXCLUSION_S if end.cause == TerminationCause.HARDWARE.value else EXCLUSION_S
    return (*left, ExcludedNode(end.node, float(int(now_s + lasts_s)), end.cause))[-_MOST_EXCLUDED:]
