"""What is remembered of a member in its owner's `status.members`: its try, its failures, and how it ended last.

A record is written before the pod that it speaks of is deleted or made. So whoever comes next, after any crash, knows
for each pod whether its end was counted, and which try follows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from edl.kube.objects import format_time, parse_time
from edl.master.kube.members.evidence import get_list, get_mapping, get_text
from edl.master.kube.members.member_pod import MemberPod

__all__ = ["ExcludedNode", "MemberEnd", "MemberRecord", "format_member_records", "read_member_records"]

MAX_MESSAGE_CHARS: Final = 400
"""Of a member's last end. A thousand members' ends then take 0.4 MB of the 1.5 MB that etcd takes of an object; the
traceback that ends a job stands in its condition."""
MAX_MEMORY_FACTOR: Final = 1.5**3
"""What the relaunch table's three steps come to: a status that says more was written by hand."""
_PACE_S: Final = 10.0
_BURST_S: Final = 40.0
"""A member gets a pod each `_PACE_S` in the long run, and `_BURST_S / _PACE_S` more at once: at most 12 within any
minute, whatever its pods say of their ends. A flood of pods costs the API server, the scheduler and all nodes."""
_MEMBER: Final = re.compile(r"[a-z]+-(?:0|[1-9][0-9]{0,8})")
"""A member's role and index: others, which somebody wrote by hand, are not there."""


@dataclass(frozen=True)
class ExcludedNode:
    """A node that a member's next pods keep away from.

    Attributes:
        node: its name.
        until_s: when it may be used again, Unix time.
        cause: why the member ended there.
    """

    node: str
    until_s: float
    cause: str


@dataclass(frozen=True)
class MemberEnd:
    """How a member's pod ended.

    Attributes:
        try_number: of the pod.
        cause: a value of `TerminationCause`.
        evidence: what tells so.
        exit_code: of the main container; None if it has none.
        message: of the end, its last `MAX_MESSAGE_CHARS` characters.
        pod: its name.
        node: on which it was.
        time_s: when it ended by its node's clock, or was found gone, Unix time.
        seen_s: when the operator saw that, Unix time: what is waited for from then on goes by its clock alone.
        progress: the owner's progress then, in percent; None if unknown.
        displaced: its place is taken or lost: a successor needs another.
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
    """A member, over all its pods.

    Attributes:
        try_number: of its newest pod, or of the pod that is to be made next.
        uid: of the pod of that try, once it was seen: seen and gone is an end.
        failures: cause -> how many times in a row without progress between.
        memory_factor: by which the template's memory is multiplied.
        excluded_nodes: where its next pods do not go.
        not_before_s: when the pod of this try may be made, Unix time; None for at once.
        last_end: how its last pod ended; None if none has.
        paced_until_s: until when the pods made so far use up the member's pace, Unix time.
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
        """Whether the newest pod has ended for good: no other follows."""
        return self.last_end is not None and self.last_end.try_number >= self.try_number

    def is_current(self, pod: MemberPod) -> bool:
        """Whether a pod is the newest of this member, and takes part or will."""
        return pod.live and pod.try_number == self.try_number and not self.ended

    def is_superseded(self, pod: MemberPod) -> bool:
        """Whether a pod's end is counted, or it was let go, and another try has its place."""
        return pod.try_number < self.try_number

    @property
    def replaces(self) -> bool:
        """Whether the pod of this try takes the place of a pod that has just ended, and was not yet seen."""
        end = self.last_end
        return end is not None and end.try_number == self.try_number - 1 and not self.uid and not end.displaced

    def can_start(self, now_s: float) -> bool:
        """Whether the pod of this try may be made."""
        return not self.ended and (self.not_before_s is None or now_s >= self.not_before_s)

    def displace(self) -> MemberRecord:
        """Return the record of a member that nothing replaces: a pod of it that comes some day is growth."""
        return replace(self, last_end=replace(self.last_end, displaced=True)) if self.last_end is not None else self

    def begin_try(self, now_s: float, delay_s: float = 0.0) -> MemberRecord:
        """Return the record of the member's next pod, made after `delay_s`, or later where too many were made of late.

        With no delay this is a pod that goes by its owner's will: nothing is counted.
        """
        # A time that is further ahead than the pace can come to is of a clock that was set back since.
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
        """Return the record of a member whose last end counts for nothing: only the pace of its pods is kept."""
        allowed_s = self.paced_until_s - _PACE_S - _BURST_S
        return replace(self, failures={}, not_before_s=allowed_s if allowed_s > now_s else None)

    def adopt(self, pod: MemberPod) -> MemberRecord:
        """Return the record with a pod as the newest of the member."""
        if pod.try_number < self.try_number or (pod.try_number == self.try_number and pod.uid == self.uid):
            return self
        return replace(self, try_number=pod.try_number, uid=pod.uid, not_before_s=None)


def read_member_records(status: Mapping[str, Any]) -> dict[str, MemberRecord]:
    """Read `status.members`; what is not as EDL writes it counts as not written.

    Returns:
        The records, by keys such as `worker-0`.
    """
    members = status.get("members")
    if not isinstance(members, Mapping):
        return {}
    return {
        key: _read_record(value)
        for key, value in members.items()
        if isinstance(value, Mapping) and _MEMBER.fullmatch(key)
    }


def format_member_records(records: Mapping[str, MemberRecord]) -> dict[str, Any]:
    """Return `status.members`, without fields that say nothing."""
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
            if get_text(item, "node")
            and (until_s := read_time(item.get("until"))) is not None
            and get_text(item, "cause") != "node_lost"  # former versions kept away from nodes that had come back
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
    written: dict[str, Any] = {"try": record.try_number}
    if record.uid:
        written["uid"] = record.uid
    if record.failures:
        written["failures"] = dict(sorted(record.failures.items()))
    if record.memory_factor != 1.0:
        written["memoryFactor"] = record.memory_factor
    if record.excluded_nodes:
        written["excludedNodes"] = [
            {"node": item.node, "until": format_time(item.until_s), "cause": item.cause}
            for item in record.excluded_nodes
        ]
    if record.not_before_s is not None:
        written["notBefore"] = format_time(math.ceil(record.not_before_s))  # rounded down, it would be too early
    if record.paced_until_s:
        written["pacedUntil"] = format_time(math.ceil(record.paced_until_s))
    if record.last_end is not None:
        written["lastEnd"] = _format_end(record.last_end)
    return written


def _format_end(end: MemberEnd) -> dict[str, Any]:
    times = {"time": format_time(end.time_s), "seen": format_time(end.seen_s)}
    written: dict[str, Any] = {"try": end.try_number, "cause": end.cause, **times}
    for key, value in (("evidence", end.evidence), ("message", end.message), ("pod", end.pod), ("node", end.node)):
        if value:
            written[key] = value
    if end.exit_code is not None:
        written["exitCode"] = end.exit_code
    if end.progress is not None:
        written["progress"] = end.progress
    if end.displaced:
        written["displaced"] = True
    return written


def read_time(value: object) -> float | None:
    """Return the Unix time that a status says; None for what is no time."""
    try:
        return parse_time(value) if isinstance(value, str) else None
    except (ValueError, OverflowError):
        return None


def _read_factor(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < math.inf:
        return 1.0
    return min(float(value), MAX_MEMORY_FACTOR)


def _read_count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**9 else None
