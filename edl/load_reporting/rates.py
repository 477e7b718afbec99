"""From records to rates: what students would ask if they never waited, and what teachers could compute.

Both are DS2's true rates (Kalavri et al., OSDI 2018): rows by the time that a student or teacher was at work, rather
than by the time that passed. Pure functions of records; every rate comes from a single record, between its two times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edl.load_reporting.records import StudentRecord, TeacherRecord

__all__ = ["ServiceLoad", "StudentRate", "TeacherRate", "service_load"]

_IDLE_SHARE = 0.01
"""A student that asks for nothing, and waits for less of its time, is idle by its own choice."""
_LEAST_BUSY_SHARE = 0.001
"""Of a student's time, in its demand: by less, a demand would be as large as a clock is coarse."""
_SHORTEST_S = 0.001
"""Seconds of a record below which it has no rates: nobody publishes so often, and a quotient might be infinite."""
_LEAST_COMPUTE_S = 1e-6
"""Seconds of computing below which there is no rate: records have microseconds."""
_PRESENT = ("starting", "ready")
"""States of teachers that count as there: an unhealthy or draining one takes no work."""


@dataclass(frozen=True)
class StudentRate:
    """A student's load over the time of its record.

    Attributes:
        id: of its publisher.
        job: that it belongs to; empty if none is known.
        host: name of its machine.
        rows_per_s: rows that it asked for, a second.
        demand: rows a second that it would ask for if it never waited for labels; None if that cannot be told: the
            record is new, or it waited and asked for nothing.
        wait_share: the share of its time that it waited for labels, 0 to 1.
        source_wait_share: the share of its time that it waited for its own data source, 0 to 1.
        teachers: ids in the registry of the teachers that it uses.
        idle: whether it neither asked nor waited: it is paused, evaluates, or has all labels in its cache.
        seconds: over which it was counted.
        rows_asked: rows that it asked for since it began.
        wait_s: seconds that it waited for labels since it began.
    """

    id: str
    job: str
    host: str
    rows_per_s: float
    demand: float | None
    wait_share: float
    source_wait_share: float
    teachers: tuple[str, ...]
    idle: bool
    seconds: float
    rows_asked: float = 0.0
    wait_s: float = 0.0


@dataclass(frozen=True)
class TeacherRate:
    """A teacher's load over the time of its record.

    Attributes:
        id: of its publisher.
        teacher: id in the registry; empty until it is registered.
        model: name of the model.
        version: of the model; empty if unknown.
        endpoint: `host:port`; empty for a Unix socket.
        state: "starting", "ready", "unhealthy" or "draining".
        workers: batches that it computes at the same time.
        rows_per_s: rows that it computed, a second; None if unknown.
        rate: rows a second that it computes while all of its workers have work; None if unknown.
        compute_share: the share of its workers' time in which they computed, 0 to 1; None if unknown.
        queue_rows: rows that wait; None if unknown.
        note: why rows are unknown; empty if they are known.
        rows: that it computed since it began; None if unknown.
        compute_s: seconds in which it computed since it began, over all workers; None if unknown.
    """

    id: str
    teacher: str
    model: str
    version: str
    endpoint: str
    state: str
    workers: int
    rows_per_s: float | None
    rate: float | None
    compute_share: float | None
    queue_rows: int | None
    note: str
    rows: float | None = None
    compute_s: float | None = None


@dataclass(frozen=True)
class ServiceLoad:
    """The load of a service.

    Attributes:
        service: the service's name.
        students: that publish, by id.
        teachers: that publish, by id.
    """

    service: str
    students: tuple[StudentRate, ...] = ()
    teachers: tuple[TeacherRate, ...] = ()

    @property
    def live(self) -> int:
        """Teachers that are ready; those that publish nothing count where a student uses them."""
        published = {teacher.teacher for teacher in self.teachers}
        used = {teacher for student in self.students for teacher in student.teachers}
        return sum(teacher.state == "ready" for teacher in self.teachers) + len(used - published)

    @property
    def starting(self) -> int:
        """Teachers that will be ready."""
        return sum(teacher.state == "starting" for teacher in self.teachers)

    @property
    def rows_per_s(self) -> float:
        """Rows that students asked for, a second."""
        return sum(student.rows_per_s for student in self.students)

    @property
    def demand(self) -> float:
        """Rows a second that teachers should be able to compute.

        The sum over students; at least what teachers compute now, since some students publish nothing: those with
        fixed endpoints, and programs that are none of EDL's.
        """
        asked = sum(student.demand or 0.0 for student in self.students)
        computed = sum(teacher.rows_per_s or 0.0 for teacher in self.teachers if teacher.state in _PRESENT)
        return max(asked, computed)

    @property
    def rate(self) -> float | None:
        """Rows a second that a ready teacher computes, on average over those whose rate is known; None if none is."""
        rates = [teacher.rate for teacher in self.teachers if teacher.state == "ready" and teacher.rate is not None]
        return sum(rates) / len(rates) if rates else None

    @property
    def waiting(self) -> tuple[StudentRate, ...]:
        """Students that are not idle."""
        return tuple(student for student in self.students if not student.idle)

    @property
    def wait_share(self) -> float | None:
        """The share of their time that students waited, of those that are not idle; None if all are."""
        seconds = sum(student.seconds for student in self.waiting)
        return sum(student.wait_share * student.seconds for student in self.waiting) / seconds if seconds else None

    @property
    def least_busy_share(self) -> float:
        """The smallest share of its time that a student did not wait; 1 without students."""
        return min((1.0 - student.wait_share for student in self.waiting), default=1.0)

    def as_dict(self) -> dict[str, Any]:
        """Return the load as JSON shows it."""
        figures = {
            "service": self.service,
            "live": self.live,
            "starting": self.starting,
            "demand": self.demand,
            "rate": self.rate,
            "rows_per_s": self.rows_per_s,
            "wait_share": self.wait_share,
        }
        students = [{**asdict(student), "teachers": list(student.teachers)} for student in self.students]
        return {**figures, "students": students, "teachers": [asdict(teacher) for teacher in self.teachers]}


def service_load(service: str, records: Sequence[StudentRecord | TeacherRecord]) -> ServiceLoad:
    """Return the load of a service.

    Args:
        service: the service's name.
        records: its records.
    """
    students = [_student_rate(record) for record in records if isinstance(record, StudentRecord)]
    teachers = [_teacher_rate(record) for record in records if isinstance(record, TeacherRecord)]
    return ServiceLoad(
        service,
        tuple(sorted(students, key=lambda student: student.id)),
        tuple(sorted(teachers, key=lambda teacher: teacher.id)),
    )


def _student_rate(record: StudentRecord) -> StudentRate:
    now, since = record.now, record.since
    seconds = _seconds(now.t - since.t)
    rows = now.rows_asked - since.rows_asked
    wait_s = min(now.wait_s - since.wait_s, seconds)
    source_wait_s = min(now.source_wait_s - since.source_wait_s, seconds - wait_s)
    wait_share = wait_s / seconds if seconds else 0.0
    idle = not rows and wait_share < _IDLE_SHARE
    demand: float | None = None
    if idle and seconds:
        demand = 0.0
    elif rows and seconds:
        demand = rows / max(seconds - wait_s, _LEAST_BUSY_SHARE * seconds)
    return StudentRate(
        id=record.id,
        job=record.job,
        host=record.host,
        rows_per_s=rows / seconds if seconds else 0.0,
        demand=demand,
        wait_share=wait_share,
        source_wait_share=source_wait_s / seconds if seconds else 0.0,
        teachers=record.teachers,
        idle=idle,
        seconds=seconds,
        rows_asked=now.rows_asked,
        wait_s=now.wait_s,
    )


def _teacher_rate(record: TeacherRecord) -> TeacherRate:
    now, since = record.now, record.since
    seconds = _seconds(now.t - since.t)
    rows = _difference(now.rows, since.rows)
    compute_s = _difference(now.compute_s, since.compute_s)
    rate = _rate(record.workers, rows, compute_s)
    if rate is None:  # it had nothing to do: the rate of its life
        rate = _rate(record.workers, now.rows, now.compute_s)
    return TeacherRate(
        id=record.id,
        teacher=record.teacher,
        model=record.model,
        version=record.version,
        endpoint=record.endpoint,
        state=record.state,
        workers=record.workers,
        rows_per_s=rows / seconds if rows is not None and seconds else None,
        rate=rate,
        compute_share=min(compute_s / seconds / record.workers, 1.0) if compute_s is not None and seconds else None,
        queue_rows=record.queue_rows,
        note=record.note,
        rows=now.rows,
        compute_s=now.compute_s,
    )


def _rate(workers: int, rows: float | None, compute_s: float | None) -> float | None:
    return workers * rows / compute_s if rows and compute_s and compute_s >= _LEAST_COMPUTE_S else None


def _seconds(difference: float) -> float:
    return difference if difference >= _SHORTEST_S else 0.0


def _difference(now: float | None, since: float | None) -> float | None:
    return None if now is None or since is None else now - since
