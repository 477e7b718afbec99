"""Counts rows, requests and failures, of all teachers and of every teacher."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.stats import ReaderStats, TeacherStats

__all__ = ["EngineCounters"]

_MOST_GONE = 100
"""Teachers that left and are remembered by name: enough to read what became of them, where pods come and go."""


@dataclass
class _Counts:
    endpoint: str
    rows: int = 0
    requests: int = 0
    failures: int = 0


@dataclass(frozen=True)
class _Teachers:
    """Counts by id, of teachers that are there and that left last, and sums over all that left."""

    present: Mapping[str, _Counts] = field(default_factory=dict)
    gone: Mapping[str, _Counts] = field(default_factory=dict)
    departed: _Counts = field(default_factory=lambda: _Counts(""))


@dataclass
class EngineCounters:
    """Rows, by what became of them. Written on the event loop only, read from any thread.

    Without a lock, which a signal handler that asks for `stats` could find taken by the very thread that it interrupts:
    a teacher that comes or goes makes another `_Teachers`, so that its counts are neither doubled nor missing.
    """

    asked: int = 0
    received: int = 0
    resent: int = 0
    hedged: int = 0
    _teachers: _Teachers = field(default_factory=_Teachers)

    def add_teacher(self, teacher: str, endpoint: str) -> None:
        """Count for a teacher that comes, from 0 on."""
        before = self._teachers
        gone = {name: counts for name, counts in before.gone.items() if name != teacher}
        self._teachers = replace(before, present={**before.present, teacher: _Counts(endpoint)}, gone=gone)

    def remove_teacher(self, teacher: str) -> None:
        """Add the counts of a teacher that left to the sums of departed teachers."""
        before = self._teachers
        if teacher not in before.present:
            return
        counts = before.present[teacher]
        departed = _Counts(
            "",
            before.departed.rows + counts.rows,
            before.departed.requests + counts.requests,
            before.departed.failures + counts.failures,
        )
        present = {name: counts for name, counts in before.present.items() if name != teacher}
        gone = dict([*before.gone.items(), (teacher, counts)][-_MOST_GONE:])
        self._teachers = _Teachers(present, gone, departed)

    def teacher(self, teacher: str) -> _Counts:
        """Return the counts of a teacher, for writing.

        If it left before its last request ended, these are the sums of departed teachers.
        """
        teachers = self._teachers
        return teachers.present.get(teacher, teachers.departed)

    def stats(self, dispatcher: Dispatcher, state_of: Callable[[str], tuple[str, str]], stale: str) -> ReaderStats:
        """Return all counters, with the dispatcher's gauges.

        Args:
            dispatcher: of the same service.
            state_of: returns a teacher's state, and why.
            stale: what is wrong with discovery; empty if it works.
        """
        counted = self._teachers
        teachers = {name: _seen(counts) for name, counts in counted.gone.items()}
        for name, counts in counted.present.items():
            state = dispatcher.teachers.get(name)
            status, why = state_of(name)
            teachers[name] = TeacherStats(
                endpoint=counts.endpoint,
                state=status if status != "gone" else "draining",  # it is about to be
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
            requests_hedged=dispatcher.hedged,
            set_aside={kind.value: count for kind, count in dispatcher.pauses.copy().items()},
            teachers_live=dispatcher.count_serving(time.monotonic()),
            teachers=teachers,
            departed=_seen(counted.departed),
            discovery=stale,
        )


def _seen(counts: _Counts) -> TeacherStats:
    return TeacherStats(counts.endpoint, "gone", "", counts.rows, counts.requests, counts.failures)
