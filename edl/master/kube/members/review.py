"""Records of members against the pods that are there: which pod is whose newest, and which have ended since."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from edl.master.kube.members.member_pod import MemberPod
from edl.master.kube.members.records import MemberRecord
from edl.master.kube.members.relaunching import MemberOutcome, find_end, record_end, relax_exclusions

__all__ = ["NO_ROOM", "MemberReview", "list_superseded", "review_members"]

NO_ROOM = "no_room"
"""Among a member's failures: how many of its pods in a row were let go since no node took them."""


@dataclass(frozen=True)
class MemberReview:
    """An owner's members.

    Attributes:
        records: by keys such as `worker-0`, with all ends counted.
        current: the newest pod of each member that has a live one.
        outcomes: ends that were not counted before, by member.
    """

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
        elif pod_or_none is not None and record.is_current(pod_or_none):
            current[key] = pod_or_none
            if pod_or_none.scheduled and NO_ROOM in record.failures:
                left = {cause: count for cause, count in record.failures.items() if cause != NO_ROOM}
                record = replace(record, failures=left)
        after[key] = record
    return MemberReview(after, current, outcomes)


def list_superseded(records: Mapping[str, MemberRecord], pods: Iterable[MemberPod]) -> tuple[MemberPod, ...]:
    """Return the pods that are to be deleted: their ends are counted, or they were let go, and they still stand."""
    return tuple(pod for pod in pods if not pod.deleting and pod.key in records and records[pod.key].is_superseded(pod))
