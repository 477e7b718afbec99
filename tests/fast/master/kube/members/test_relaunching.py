"""Ends of members: counted once for each try, and what follows each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edl.master.kube.members import (
    MemberOutcome,
    MemberPod,
    MemberRecord,
    find_end,
    record_end,
    relax_exclusions,
)
from edl.master.kube.members.records import ExcludedNode
from edl.master.scaling.terminations import TerminationReport

NOW = 1_000_000.0
OOM = TerminationReport(exit_code=137, container_reason="OOMKilled")


def build_member(report: TerminationReport, try_number: int = 0, **fields: Any) -> MemberPod:
    """Return a pod that has ended, on node1."""
    fields = {"finished": True, "started_s": NOW - 60, "finished_s": NOW, "node": "node1", **fields}
    name = f"job-worker-0-{try_number}"
    return MemberPod(name, "worker", 0, try_number, name, termination=report, scheduled=True, **fields)


def end(record: MemberRecord, report: TerminationReport, **fields: Any) -> MemberOutcome:
    pod = build_member(report, record.try_number, **fields)
    found = find_end(record, pod, NOW)
    assert found is not None
    return record_end(record, found, pod, NOW)


def test_progress_of_the_job_resets_counts() -> None:
    killed = build_member(TerminationReport(exit_code=137))
    first = record_end(MemberRecord(), killed.termination, killed, NOW, progress=10)
    again = replace(killed, try_number=1)
    assert record_end(first.record, again.termination, again, NOW, progress=10).record.failures == {"killed": 2}
    assert record_end(first.record, again.termination, again, NOW, progress=11).record.failures == {"killed": 1}
    record = end(end(MemberRecord(), OOM).record, OOM, started_s=NOW - 3600).record
    assert record.failures == {"out_of_memory": 1}, "counted anew after an hour"
    assert record.memory_factor == 1.5**2, "what did not suffice then does not now"


def test_image_that_cannot_be_had() -> None:
    report = TerminationReport(container_reason="ImagePullBackOff", message="pull access denied")
    pod = build_member(report, finished=False, waiting="ImagePullBackOff", created_s=NOW)
    assert find_end(MemberRecord(), pod, NOW + 60) is None, "the kubelet still tries"
    assert find_end(MemberRecord(), pod, NOW + 180) == report
    waited = replace(pod, created_s=NOW - 3600, scheduled_s=NOW)
    assert find_end(MemberRecord(), waited, NOW + 60) is None, "it counts from when it got its node"
    assert find_end(MemberRecord(), waited, NOW + 180) == report
    starting = replace(pod, waiting="ContainerCreating", termination=TerminationReport())
    assert find_end(MemberRecord(), starting, NOW + 10_000) is None, "a large image takes its time"


def test_delays_double() -> None:
    record, delays = MemberRecord(), []
    for _ in range(8):
        outcome = end(record, TerminationReport(exit_code=143))
        record = outcome.record
        delays.append(outcome.decision.delay_s)
    assert delays == [0, 10, 20, 40, 80, 160, 300, 300]
    assert not record.can_start(NOW + 299)
    assert record.can_start(NOW + 300)


@pytest.mark.parametrize(("cause", "left"), [("node_lost", ()), ("hardware", ("node1",))])
def test_last_node_is_used_again(cause: str, left: tuple[str, ...]) -> None:
    """A pod without any node left is let go; a broken GPU is not used for want of another."""
    record = MemberRecord(1, "u", excluded_nodes=(ExcludedNode("node1", NOW + 900, cause),))
    pod = MemberPod("p", "worker", 0, 1, "u", unschedulable="0/1 nodes", created_s=NOW - 30)
    assert relax_exclusions(record, pod, NOW) is record
    relaxed = relax_exclusions(record, replace(pod, created_s=NOW - 90), NOW)
    assert tuple(item.node for item in relaxed.excluded_nodes) == left
    assert relaxed.is_superseded(pod) == (not left)
