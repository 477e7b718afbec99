"""What an engine counts, of each teacher and of all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edl.distill.dispatch import Dispatcher
from edl.distill.stats import ReaderStats, TeacherStats

__all__ = ["Tally"]


@dataclass
class _Counts:
    rows: int = 0
    requests: int = 0
    failures: int = 0


@dataclass
class Tally:
    """Rows, by what became of them. Written on the loop only, read from any thread.

    Attributes:
        counts, endpoints: by teacher, those that left included.
    """

    asked: int = 0
    received: int = 0
    resent: int = 0
    hedged: int = 0
    counts: dict[str, _Counts] = field(default_factory=dict)
    endpoints: dict[str, str] = field(default_factory=dict)

    def begin(self, teacher: str, endpoint: str) -> None:
        """Count for a teacher, from now on or again."""
        self.counts.setdefault(teacher, _Counts())
        self.endpoints[teacher] = endpoint

    def stats(self, dispatcher: Dispatcher, state_of: Callable[[str], tuple[str, str]], stale: str) -> ReaderStats:
        """All of it, with the dispatcher's gauges.

        Args:
            state_of: a teacher's state, and why.
            stale: what is wrong with discovery, empty if nothing is.
        """
        teachers = {}
        for name, counts in list(self.counts.items()):
            state = dispatcher.teachers.get(name)
            status, why = state_of(name)
            teachers[name] = TeacherStats(
                endpoint=self.endpoints.get(name, ""),
                state=status,
                why=why,
                rows=counts.rows,
                requests=counts.requests,
                failures=counts.failures,
                in_flight=len(state.in_flight) if state else 0,
                window=state.window.size if state else 0,
                median_s=(state.window.median_s or 0.0) if state else 0.0,
            )
        return ReaderStats(
            rows_asked=self.asked,
            rows_received=self.received,
            rows_resent=self.resent,
            rows_hedged=self.hedged,
            teachers_live=dispatcher.live(time.monotonic()),
            teachers=teachers,
            discovery=stale,
        )
