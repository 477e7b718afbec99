"""Counters of a reader, for people and for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TeacherStats:
    """Counters of a teacher.

    Attributes:
        endpoint: Address of the teacher.
        state: State of the teacher: "ready", "connecting", "draining", "set aside" or "gone".
        why: Reason why the teacher is not ready; empty if it is ready.
        rows: Rows delivered from this teacher.
        requests: Requests that succeeded.
        failures: Requests that failed.
        in_flight: Requests now pending at the teacher.
        window: Number of requests that may be pending at the teacher.
        median_s: Median latency of the last answers in seconds; 0 before the first answer.
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
    """Counters since the reader was created, and current gauges.

    Attributes:
        rows_asked: Rows that needed a teacher's answer (once for each service of an ensemble).
        rows_received: Rows among `rows_asked` that were answered.
        rows_resent: Rows sent again because a request failed.
        rows_hedged: Rows sent a second time because a request was late.
        requests_hedged: Requests sent a second time because they were late.
        rows_cached: Rows that the soft-label cache answered.
        rows_not_cached: Rows whose answers were not cached because the disk was too slow or failed.
        rows_delivered: Rows given to the training loop.
        rows_buffered: Rows that were read from the source, but not yet taken by the training loop.
        bytes_held: Size in bytes of the buffered rows' items and answers; the size of pending answers is estimated. See
            `Options.memory_bytes`.
        wait_s: Seconds that the training loop has waited for labels.
        source_wait_s: Seconds of `wait_s` in which the data source was still producing the samples.
        cache_queue_bytes: Bytes of labels queued for the cache.
        teachers_live: Number of teachers that accept work.
        teachers: Counters of each teacher by id. They start at 0 each time the teacher joins. A teacher that left is
            listed as "gone" until it returns, or until a hundred other teachers have left after it.
        departed: Sums of the counters of all teachers that have ever left.
        set_aside: How often a teacher was paused, by reason: "overloaded" (it had no room), "timeout", "error", "lost",
            "rejected" (it rejected a request that other teachers accept), "bad output".
        routes: Counters of each route's teachers, by value of the routing field (`route=`). Values with the same
            teachers have the same counters. Empty without routes.
        discovery: Why the registry does not answer, or which teachers cannot renew their registration; empty if there
            is no problem.
    """

    rows_asked: int = 0
    rows_received: int = 0
    rows_resent: int = 0
    rows_hedged: int = 0
    requests_hedged: int = 0
    rows_cached: int = 0
    rows_not_cached: int = 0
    rows_delivered: int = 0
    rows_buffered: int = 0
    bytes_held: int = 0
    wait_s: float = 0.0
    source_wait_s: float = 0.0
    cache_queue_bytes: int = 0
    teachers_live: int = 0
    teachers: Mapping[str, TeacherStats] = field(default_factory=dict)
    departed: TeacherStats = TeacherStats("", "gone")
    set_aside: Mapping[str, int] = field(default_factory=dict)
    discovery: str = ""
    routes: Mapping[Any, ReaderStats] = field(default_factory=dict)

    def line(self) -> str:
        """Return the state as one readable line."""
        parts = [f"{self.rows_delivered:,} rows", f"{self.teachers_live} teacher{'s' * (self.teachers_live != 1)}"]
        if self.rows_cached:
            parts.append(f"{self.rows_cached:,} from cache")
        if self.rows_not_cached:
            parts.append(f"{self.rows_not_cached:,} not cached")
        if self.rows_resent:
            parts.append(f"{self.rows_resent:,} resent")
        if self.rows_hedged:
            parts.append(f"{self.rows_hedged:,} hedged")
        parts.append(f"waited {self.wait_s:.1f} s")
        if self.discovery:
            parts.append(f"discovery: {self.discovery}")
        return ", ".join(parts)


def merged(parts: Iterable[ReaderStats]) -> ReaderStats:
    """Return the sums over several services; if teachers' ids clash, the later id gets the service's number."""
    parts = list(parts)
    teachers: dict[str, TeacherStats] = {}
    for index, part in enumerate(parts):
        for name, teacher in part.teachers.items():
            teachers[name if name not in teachers else f"{name} ({index})"] = teacher
    summed = ("rows_asked", "rows_received", "rows_resent", "rows_hedged", "requests_hedged", "teachers_live")
    departed = {name: sum(getattr(part.departed, name) for part in parts) for name in ("rows", "requests", "failures")}
    return ReaderStats(
        **{name: sum(getattr(part, name) for part in parts) for name in summed},
        set_aside=dict(sum((Counter(part.set_aside) for part in parts), Counter[str]())),
        teachers=teachers,
        departed=TeacherStats("", "gone", **departed),
        discovery="; ".join(part.discovery for part in parts if part.discovery),
    )
