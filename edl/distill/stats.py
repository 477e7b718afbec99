"""What a reader has done so far, for people and for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["ReaderStats", "TeacherStats"]


@dataclass(frozen=True)
class TeacherStats:
    """One teacher's part.

    Attributes:
        state: "ready", "connecting", "draining", "set aside" or "gone".
        why: why it is not ready; empty if it is.
        rows: delivered from this teacher.
        requests, failures: answered well, and not.
        in_flight, window: requests at the teacher now, and how many it may have.
        median_s: median latency of the last answers in seconds, 0 before the first.
    """

    endpoint: str
    state: str
    why: str = ""
    rows: int = 0
    requests: int = 0
    failures: int = 0
    in_flight: int = 0
    window: int = 0
    median_s: float = 0.0


@dataclass(frozen=True)
class ReaderStats:
    """Counters since the reader was made, and gauges of this moment.

    Attributes:
        rows_asked: rows that needed a teacher's answer (once for each service of an ensemble).
        rows_received: of those, how many have one.
        rows_resent: rows sent again because a request failed.
        rows_hedged: rows sent a second time because a request was late.
        rows_cached: rows that the soft-label cache answered.
        rows_delivered: rows given to the training loop.
        rows_buffered: rows that the source gave and the training loop has not taken.
        wait_s: seconds that the training loop waited for labels.
        teachers_live: teachers that may be given work.
        teachers: by id, the departed included.
        discovery: why the registry does not answer; empty while it does.
    """

    rows_asked: int = 0
    rows_received: int = 0
    rows_resent: int = 0
    rows_hedged: int = 0
    rows_cached: int = 0
    rows_delivered: int = 0
    rows_buffered: int = 0
    wait_s: float = 0.0
    teachers_live: int = 0
    teachers: Mapping[str, TeacherStats] = field(default_factory=dict)
    discovery: str = ""

    def line(self) -> str:
        """The state in one line for a person."""
        parts = [f"{self.rows_delivered:,} rows", f"{self.teachers_live} teacher{'s' * (self.teachers_live != 1)}"]
        if self.rows_cached:
            parts.append(f"{self.rows_cached:,} from cache")
        if self.rows_resent:
            parts.append(f"{self.rows_resent:,} resent")
        if self.rows_hedged:
            parts.append(f"{self.rows_hedged:,} hedged")
        parts.append(f"waited {self.wait_s:.1f} s")
        if self.discovery:
            parts.append(f"discovery: {self.discovery}")
        return ", ".join(parts)


def merged(parts: Iterable[ReaderStats]) -> ReaderStats:
    """The sum over several services; ids are told apart by service where they clash."""
    parts = list(parts)
    teachers: dict[str, TeacherStats] = {}
    for index, part in enumerate(parts):
        for name, teacher in part.teachers.items():
            teachers[name if name not in teachers else f"{name} ({index})"] = teacher
    return ReaderStats(
        rows_asked=sum(part.rows_asked for part in parts),
        rows_received=sum(part.rows_received for part in parts),
        rows_resent=sum(part.rows_resent for part in parts),
        rows_hedged=sum(part.rows_hedged for part in parts),
        teachers_live=sum(part.teachers_live for part in parts),
        teachers=teachers,
        discovery="; ".join(part.discovery for part in parts if part.discovery),
    )
