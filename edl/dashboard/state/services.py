"""Reads services (the registry's teachers, joined with the load that teachers and students report); merges events.

A registry keeps no history, so two reads are compared to find which teachers and students joined, changed and left.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from edl.dashboard.state.records import read_fields, text
from edl.dashboard.state.schema import EventRow, JobStatus, ServiceStatus, TeacherStatus, UnreadableRecord, WantedCount
from edl.discovery import Instance, Registry, Snapshot
from edl.discovery.store import Store
from edl.load_reporting import ServiceLoad, StudentRate, TeacherRate, read_all_wanted, read_services
from edl.settings import DiscoverySettings

_LINGER_S: Final = 15.0
"""How long a student without a reader is still listed: a student with one reader per epoch publishes again by then."""
_LOAD: Final = ("rows_per_s", "queue_rows", "compute_share", "rows", "compute_s", "workers")
"""Fields that a teacher's status takes from its load record."""
_READER: Final = re.compile(r"(.+)-[0-9a-f]{8}")
"""Id of a reader: its process and random digits."""

_Wanted = Mapping[tuple[str, str], Mapping[str, Any]]


class ServiceReader:
    """Reads services, their load and wanted counts. Not thread-safe."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self._store = store
        self._registry = registry
        self._students: dict[str, dict[str, _Student]] = defaultdict(dict)

    def read(self, now_s: float) -> tuple[list[ServiceStatus], _Wanted, list[UnreadableRecord]]:
        """Return the services by name; wanted counts by ("teachers" or "workers", name); unreadable records."""
        wanted = read_all_wanted(self._store)
        loads = read_services(self._store)
        snapshots = {name: self._registry.snapshot(name) for name in self._registry.services()}
        unreadable = [
            UnreadableRecord(f"{service}/{bad.id}", bad.reason)
            for service, snapshot in snapshots.items()
            for bad in snapshot.rejected
        ]
        students = {name: self._merge_readers(name, loads.get(name), now_s) for name in {*loads, *self._students}}
        names = snapshots.keys() | loads.keys() | {name for kind, name in wanted if kind == "teachers"}
        names |= {name for name, found in students.items() if found}
        services = []
        for name in sorted(names):
            count = wanted.get(("teachers", name))
            asked = students.get(name, ())
            services.append(
                ServiceStatus(
                    service=name,
                    teachers=tuple(_teachers(snapshots.get(name), loads.get(name), asked)),
                    students=tuple(asked),
                    wanted=read_fields(WantedCount, count) if count is not None else None,
                )
            )
        return services, wanted, unreadable

    def _merge_readers(self, service: str, load: ServiceLoad | None, now_s: float) -> list[StudentRate]:
        """Return a service's students. All readers of a process, concurrent or successive, count as one student."""
        known = self._students[service]
        rates = {rate.id: rate for rate in (load.students if load is not None else ())}
        for rate in rates.values():
            match = _READER.fullmatch(rate.id)
            student = known.setdefault(match[1] if match is not None else rate.id, _Student())
            student.readers[rate.id] = student.last = rate
            student.seen_s = now_s
        for name, student in list(known.items()):
            for reader in student.readers.keys() - rates.keys():
                gone = student.readers.pop(reader)
                student.rows_before += gone.rows_asked
                student.wait_before_s += gone.wait_s
            if not student.readers and now_s - student.seen_s > _LINGER_S:
                del known[name]
        return [student.rate(name) for name, student in sorted(known.items())]


class _Student:
    """A process's readers, with totals over closed readers: counters must not decrease when a reader is closed."""

    last: StudentRate

    def __init__(self) -> None:
        self.readers: dict[str, StudentRate] = {}
        self.rows_before = 0.0
        self.wait_before_s = 0.0
        self.seen_s = 0.0

    def rate(self, name: str) -> StudentRate:
        readers = list(self.readers.values()) or [
            replace(self.last, rows_per_s=0.0, demand=0.0, rows_asked=0.0, wait_s=0.0, teachers=(), idle=True)
        ]
        demands = [reader.demand for reader in readers if reader.demand is not None]
        return StudentRate(
            id=text(name),
            job=text(self.last.job),
            host=self.last.host,
            rows_per_s=sum(reader.rows_per_s for reader in readers),
            demand=sum(demands) if demands else None,
            wait_share=max(reader.wait_share for reader in readers),
            source_wait_share=max(reader.source_wait_share for reader in readers),
            teachers=tuple(dict.fromkeys(teacher for reader in readers for teacher in reader.teachers)),
            idle=all(reader.idle for reader in readers),
            seconds=max(reader.seconds for reader in readers),
            rows_asked=self.rows_before + sum(reader.rows_asked for reader in readers),
            wait_s=self.wait_before_s + sum(reader.wait_s for reader in readers),
        )


def _teachers(
    snapshot: Snapshot | None, load: ServiceLoad | None, students: Iterable[StudentRate]
) -> Iterator[TeacherStatus]:
    """Yield registered teachers with their load, then lapsed ones, then those that only publish their load."""
    asked_by: dict[str, list[str]] = defaultdict(list)
    for student in students:
        for teacher in student.teachers:
            asked_by[teacher].append(student.id)
    rates = {rate.teacher or rate.id: rate for rate in (load.teachers if load is not None else ())}
    for instance in snapshot.instances if snapshot is not None else ():
        yield _teacher(instance.id, instance, instance.state, rates.pop(instance.id, None), asked_by)
    for instance in snapshot.lapsed if snapshot is not None else ():
        lapsed = _teacher(instance.id, instance, "lapsed", rates.pop(instance.id, None), asked_by)
        yield replace(lapsed, rows_per_s=None, queue_rows=None, compute_share=None)
    for key, rate in sorted(rates.items()):  # they are starting, or registered elsewhere
        yield _teacher(key, None, rate.state, rate, asked_by)


def _teacher(
    name: str, instance: Instance | None, state: str, rate: TeacherRate | None, asked_by: Mapping[str, list[str]]
) -> TeacherStatus:
    model, version, endpoint = (rate.model, rate.version, rate.endpoint) if rate is not None else ("", "", "")
    if instance is not None:
        model, version = instance.model or model, instance.meta.get("version", "") or version
        endpoint = instance.endpoint
    students = tuple(asked_by.get(name, ()))
    load: dict[str, Any] = {} if rate is None else {field: getattr(rate, field) for field in _LOAD}
    return TeacherStatus(text(name), endpoint, model, version, state, students=students, **load)


# --- Events ---

_LAPSED: Final = "its lease expired: the process is dead or paused, or cannot reach the registry"
_DRAINED: Final = "it had drained"
_LEFT: Final = "its registration was removed: the process ended"
_GONE: Final = (
    "its record expired: the process ended, was killed, or was paused for longer than its lease "
    f"({DiscoverySettings.ttl_s:g} s by default)"
)
_STATES: Final = {
    "ready": ("join", "the teacher is ready"),
    "starting": ("starting", "a teacher is starting"),
    "draining": ("draining", "the teacher is finishing its requests"),
    "lapsed": ("lapsed", "the teacher is gone"),
}
"""Kind and text of the event, by the state that a teacher has now."""


def find_changes(before: Sequence[ServiceStatus], after: Sequence[ServiceStatus], now_s: float) -> Iterator[EventRow]:
    """Yield the events between two reads. A registry keeps no history, so an event has the time of the second read."""
    old = {service.service: service for service in before}
    new = {service.service: service for service in after}
    for name in sorted(old.keys() | new.keys()):
        first, second = (found.get(name, ServiceStatus(name, (), ())) for found in (old, new))
        states, states_now = ({teacher.id: teacher.state for teacher in one.teachers} for one in (first, second))
        yield from _teacher_changes(name, states, states_now, now_s)
        jobs, jobs_now = ({student.id: student.job for student in one.students} for one in (first, second))
        yield from _student_changes(name, jobs, jobs_now, now_s)


def _teacher_changes(name: str, old: Mapping[str, str], new: Mapping[str, str], now_s: float) -> Iterator[EventRow]:
    for teacher in sorted(old.keys() | new.keys()):
        state = new.get(teacher)
        if state == old.get(teacher):
            continue
        if state is None:
            if old[teacher] != "lapsed":  # the registry deletes a lapsed registration after a while
                cause = {"draining": _DRAINED, "ready": _LEFT}.get(old[teacher], _GONE)
                yield EventRow(now_s, "leave", "the teacher left", cause, service=name, node=teacher)
            continue
        kind, words = _STATES.get(state, (state, f"the teacher is {state}"))
        yield EventRow(now_s, kind, words, _LAPSED if state == "lapsed" else "", service=name, node=teacher)


def _student_changes(name: str, old: Mapping[str, str], new: Mapping[str, str], now_s: float) -> Iterator[EventRow]:
    for student in sorted(old.keys() ^ new.keys()):
        came = student in new
        words, cause = ("a student joined", "") if came else ("a student left", _GONE)
        job = (new if came else old)[student] or None
        yield EventRow(now_s, "join" if came else "leave", words, cause, job=job, service=name, node=student)


LAST_MERGED: Final = 100
"""Maximum number of merged events: more than a person reads, about 20 KB as JSON."""

_RENAMED: Final = {
    "generation": "generation {generation} begins",
    "restart": "the workers restart",
    "faulty": "the host is excluded",
}
"""Texts for events that are EDL's decisions: such an event's own text only gives the cause."""


def merge_events(
    jobs: Iterable[JobStatus], services: Iterable[ServiceStatus], changes: Iterable[EventRow] = ()
) -> tuple[EventRow, ...]:
    """Return the last events of all jobs and services, newest last; `changes` are the events found between reads."""
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
        if event.kind == "generation":  # each node records it
            if event.generation in began:
                continue
            began.add(event.generation)
        words = _RENAMED.get(event.kind)
        yield EventRow(
            time=event.at,
            kind=event.kind,
            text=words.format(generation=event.generation) if words is not None else event.text,
            cause=event.cause,
            job=job.job,
            node=None if event.kind == "generation" else event.node,
            decision=words is not None,
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
