"""Merges the events of all jobs, masters and services into a single list, each with its cause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from edl.collective.goodput import Event
from edl.dashboard.state.schema import EventRow, JobStatus, ServiceStatus, WantedCount

__all__ = ["LAST_MERGED", "merge_events"]

LAST_MERGED: Final = 100
"""More than a person reads; about 20 KB as JSON."""

_RENAMED: Final = {
    "generation": "generation {generation} begins",
    "restart": "the workers start again",
    "faulty": "the host is left out",
}
"""Texts for events whose own text is their cause."""
_DECISIONS: Final = frozenset(_RENAMED)


def merge_events(
    jobs: Iterable[JobStatus], services: Iterable[ServiceStatus], changes: Iterable[EventRow] = ()
) -> tuple[EventRow, ...]:
    """Return the last events of all, newest last; `changes` are those of services, found between looks."""
    found: list[EventRow] = list(changes)
    for job in jobs:
        found += _job_events(job)
        found += job.master.events if job.master is not None else ()
        found += _decisions(job.wanted_workers, "workers", job=job.job)
    for service in services:
        found += _decisions(service.wanted, "teachers", service=service.service)
    found.sort(key=lambda event: event.time)
    return tuple(found[-LAST_MERGED:])


def _job_events(job: JobStatus) -> Iterator[EventRow]:
    began: set[int] = set()
    for event in job.events:
        if event.kind == "generation":  # every node records it
            if event.generation in began:
                continue
            began.add(event.generation)
        yield _row(job.job, event)


def _row(job: str, event: Event) -> EventRow:
    words = _RENAMED.get(event.kind)
    return EventRow(
        time=event.at,
        kind=event.kind,
        text=words.format(generation=event.generation) if words is not None else event.text,
        cause=event.cause,
        job=job,
        node=None if event.kind == "generation" else event.node,
        decision=event.kind in _DECISIONS,
    )


def _decisions(
    wanted: WantedCount | None, what: str, *, job: str | None = None, service: str | None = None
) -> Iterator[EventRow]:
    for decision in wanted.decisions if wanted is not None else ():
        if decision.time is not None and decision.count is not None:
            yield EventRow(
                time=decision.time,
                kind="wanted",
                text=f"{decision.count} {what} wanted",
                cause=decision.reason,
                job=job,
                service=service,
                decision=True,
            )
