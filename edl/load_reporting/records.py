"""Records of load in the Store: their keys and JSON, which of them are valid, and the rates they contain.

A key is `load/SERVICE/students/ID` or `load/SERVICE/teachers/ID`. A record contains a process's counters twice: now,
and some seconds earlier. Every rate is computed from a single record, between its two times. `demand` and `rate` are
the true rates defined in DS2 (Kalavri et al., OSDI 2018): rows per second of a student's or teacher's working time,
not of elapsed time. So they show how much students would request without waiting, and how much teachers could compute.

Any process with write access to the Store may write records, in any version of the format. A record with a missing or
invalid field is skipped, and this is logged once.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from edl.discovery import Store
from edl.discovery.records import check_service, is_service
from edl.quoting import shown

logger = logging.getLogger(__name__)

VERSION = 1
"""Version of the format: records of other versions are skipped, since their fields may mean something else."""
MAX_TEACHERS = 64
"""Maximum number of teachers listed in a student's record: the list is for people, and a record has to stay small."""
_MAX_TEXT = 1024  # characters: registry ids have up to 512, and unprintable ones are escaped
_MAX_BYTES = 256 * 1024  # the largest value of a Store
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_IDLE_SHARE = 0.01
"""A student that requests nothing, and waits for less than this share of its time, is idle by choice."""
_LEAST_BUSY_SHARE = 0.001
"""The smallest busy share with which a student's demand is computed: with a smaller share, clock resolution would
dominate the result."""
_SHORTEST_S = 0.001  # of a record that has rates: over less time, a quotient might be infinite
_LEAST_COMPUTE_S = 1e-6  # of computing for a rate: records have microsecond resolution
_PRESENT = ("starting", "ready")  # states: an unhealthy or draining teacher takes no work
_MOST_LOGGED = 1000  # beyond this number, unusable records are logged again
_logged: set[tuple[str, str]] = set()

RecordKind = Literal["students", "teachers"]


@dataclass(frozen=True)
class StudentRate:
    """A student's load over the period of its record.

    Attributes:
        id: Publisher id of the student.
        job: Job that it belongs to; empty if none is known.
        host: Name of its machine.
        rows_per_s: Rows per second that it requested.
        demand: Rows per second that it would request if it never waited for labels; None if unknown, because the record
            is new, or the student waited and requested nothing.
        wait_share: Share of its time that it spent waiting for labels, 0 to 1.
        source_wait_share: Share of its time that it spent waiting for its own data source, 0 to 1.
        teachers: Registry ids of the teachers that it uses.
        idle: Whether it neither requested nor waited: it is paused, evaluates, or has all labels in its cache.
        seconds: Length of the record's period.
        rows_asked: Rows requested since it started.
        wait_s: Seconds spent waiting for labels since it started.
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
    """A teacher's load over the period of its record.

    Attributes:
        id: Publisher id of the teacher.
        teacher: Registry id; empty until it is registered.
        model: Name of the model.
        version: Version of the model; empty if unknown.
        endpoint: `host:port`; empty for a Unix socket.
        state: "starting", "ready", "unhealthy" or "draining".
        workers: Number of batches that it computes concurrently.
        rows_per_s: Rows per second that it computed; None if unknown.
        rate: Rows per second that it computes while all of its workers are busy; None if unknown.
        compute_share: Share of its workers' time spent computing, 0 to 1; None if unknown.
        queue_rows: Queued rows; None if unknown.
        note: Why the number of rows is unknown; empty if it is known.
        rows: Rows computed since it started; None if unknown.
        compute_s: Seconds spent computing since it started, summed over its workers; None if unknown.
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
        service: Name of the service.
        students: Students that publish load, by id.
        teachers: Teachers that publish load, by id.
    """

    service: str
    students: tuple[StudentRate, ...] = ()
    teachers: tuple[TeacherRate, ...] = ()

    @property
    def live(self) -> int:
        """Number of ready teachers; a teacher that publishes nothing counts if a student uses it."""
        published = {teacher.teacher for teacher in self.teachers}
        used = {teacher for student in self.students for teacher in student.teachers}
        return sum(teacher.state == "ready" for teacher in self.teachers) + len(used - published)

    @property
    def starting(self) -> int:
        """Number of teachers that are starting."""
        return sum(teacher.state == "starting" for teacher in self.teachers)

    @property
    def rows_per_s(self) -> float:
        """Rows per second that students requested."""
        return sum(student.rows_per_s for student in self.students)

    @property
    def demand(self) -> float:
        """Rows per second that teachers should be able to compute.

        The sum of the students' demands, but at least the rate at which teachers compute now, since some clients
        publish nothing: students with fixed endpoints, and programs that do not use EDL.
        """
        asked = sum(student.demand or 0.0 for student in self.students)
        computed = sum(teacher.rows_per_s or 0.0 for teacher in self.teachers if teacher.state in _PRESENT)
        return max(asked, computed)

    @property
    def rate(self) -> float | None:
        """Rows per second that a ready teacher computes, averaged over the known rates; None if none is known."""
        rates = [teacher.rate for teacher in self.teachers if teacher.state == "ready" and teacher.rate is not None]
        return sum(rates) / len(rates) if rates else None

    @property
    def waiting(self) -> tuple[StudentRate, ...]:
        """Students that are not idle."""
        return tuple(student for student in self.students if not student.idle)

    @property
    def wait_share(self) -> float | None:
        """Share of time that students spent waiting, over all students that are not idle; None if all are idle."""
        seconds = sum(student.seconds for student in self.waiting)
        return sum(student.wait_share * student.seconds for student in self.waiting) / seconds if seconds else None

    @property
    def least_busy_share(self) -> float:
        """The smallest share of time for which a student that is not idle did not wait; 1 if all are idle."""
        return min((1.0 - student.wait_share for student in self.waiting), default=1.0)

    def as_dict(self) -> dict[str, Any]:
        """Return the load as plain values for JSON."""
        names = ("service", "live", "starting", "demand", "rate", "rows_per_s", "wait_share")
        students = [{**asdict(student), "teachers": list(student.teachers)} for student in self.students]
        teachers = [asdict(teacher) for teacher in self.teachers]
        return {**{name: getattr(self, name) for name in names}, "students": students, "teachers": teachers}


def record_key(service: str, kind: RecordKind, publisher: str) -> str:
    """Return the key of a publisher's record; SettingsError if the service name is invalid."""
    return f"load/{check_service(service)}/{kind}/{publisher}"


def read_service(store: Store, service: str) -> ServiceLoad:
    """Read the load of a service.

    Args:
        store: Store where students and teachers publish.
        service: Name of the service.

    Returns:
        The service's load; empty if no records are published. Unusable records are skipped, and logged once.

    Raises:
        DiscoveryError: the store cannot be reached.
        SettingsError: the service name is invalid.
    """
    return _read_loads(store, f"load/{check_service(service)}/").get(service, ServiceLoad(service))


def read_services(store: Store) -> dict[str, ServiceLoad]:
    """Read the load of all services.

    Args:
        store: Store where students and teachers publish.

    Returns:
        Loads by service, for each service with at least one usable record.

    Raises:
        DiscoveryError: the store cannot be reached.
    """
    return _read_loads(store, "load/")


def _read_loads(store: Store, prefix: str) -> dict[str, ServiceLoad]:
    students: dict[str, list[StudentRate]] = defaultdict(list)
    teachers: dict[str, list[TeacherRate]] = defaultdict(list)
    for entry in store.list(prefix):
        try:
            rate = parse_record(entry.key, entry.value)
        except ValueError as exc:
            _log_once(entry.key, str(exc))
            continue
        service = entry.key.split("/")[1]
        if isinstance(rate, StudentRate):
            students[service].append(rate)
        else:
            teachers[service].append(rate)
    return {
        service: ServiceLoad(
            service,
            tuple(sorted(students[service], key=lambda student: student.id)),
            tuple(sorted(teachers[service], key=lambda teacher: teacher.id)),
        )
        for service in sorted(students.keys() | teachers.keys())
    }


def _log_once(key: str, reason: str) -> None:
    if (key, reason) in _logged:
        return
    if len(_logged) >= _MOST_LOGGED:
        _logged.clear()
    _logged.add((key, reason))
    logger.warning("load record %s is skipped: %s", shown(key), reason)


def parse_record(key: str, value: bytes) -> StudentRate | TeacherRate:
    """Return the load that a record contains; raise ValueError with the reason if the record is unusable."""
    parts = key.split("/")
    if len(parts) != 4 or parts[0] != "load" or not is_service(parts[1]) or not _ID.fullmatch(parts[3]):
        raise ValueError("its key is not that of a load record")
    kind, publisher = parts[2:]
    if kind not in ("students", "teachers"):
        raise ValueError("its key is not that of a load record")
    if len(value) > _MAX_BYTES:
        raise ValueError(f"it has {len(value):,} bytes, more than {_MAX_BYTES:,}")
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"it is not JSON: {type(exc).__name__}") from exc
    if not isinstance(fields, dict) or fields.get("v") != VERSION:
        version = fields.get("v") if isinstance(fields, dict) else None
        raise ValueError(f"it has format {version!r:.20}; this version of EDL reads {VERSION}")
    if fields.get("id") != publisher:
        raise ValueError("its id differs from the id in its key")
    since = fields.get("since")
    if not isinstance(since, dict):
        raise ValueError("its field 'since' is not an object")
    return _student_rate(publisher, fields, since) if kind == "students" else _teacher_rate(publisher, fields, since)


def _student_rate(publisher: str, fields: Mapping[str, Any], since: Mapping[str, Any]) -> StudentRate:
    teachers = fields.get("teachers", [])
    if not isinstance(teachers, list) or len(teachers) > MAX_TEACHERS:
        raise ValueError(f"its field 'teachers' is not a list of at most {MAX_TEACHERS} ids")
    seconds = _read_seconds(fields, since)
    rows_asked, rows = _read_counter(fields, since, "rows_asked")
    waited_s, wait_s = _read_counter(fields, since, "wait_s")
    _, source_wait_s = _read_counter(fields, since, "source_wait_s")
    wait_s = min(wait_s, seconds)
    source_wait_s = min(source_wait_s, seconds - wait_s)
    wait_share = wait_s / seconds if seconds else 0.0
    idle = not rows and wait_share < _IDLE_SHARE
    demand: float | None = None
    if idle and seconds:
        demand = 0.0
    elif rows and seconds:
        demand = rows / max(seconds - wait_s, _LEAST_BUSY_SHARE * seconds)
    return StudentRate(
        id=publisher,
        job=_read_text(fields, "job"),
        host=_read_text(fields, "host"),
        rows_per_s=rows / seconds if seconds else 0.0,
        demand=demand,
        wait_share=wait_share,
        source_wait_share=source_wait_s / seconds if seconds else 0.0,
        teachers=tuple(_read_text({"teachers": teacher}, "teachers") for teacher in teachers),
        idle=idle,
        seconds=seconds,
        rows_asked=rows_asked,
        wait_s=waited_s,
    )


def _teacher_rate(publisher: str, fields: Mapping[str, Any], since: Mapping[str, Any]) -> TeacherRate:
    workers = fields.get("workers")
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 1_000_000:
        raise ValueError("its field 'workers' is not a whole number from 1 to 1,000,000")
    seconds = _read_seconds(fields, since)
    all_rows, rows = _read_optional_counter(fields, since, "rows")
    all_compute_s, compute_s = _read_optional_counter(fields, since, "compute_s")
    rate = _compute_rate(workers, rows, compute_s)
    if rate is None:  # it was not busy: use the rate since it started
        rate = _compute_rate(workers, all_rows, all_compute_s)
    queue_rows = None if fields.get("queue_rows") is None else _read_number(fields, "queue_rows")
    return TeacherRate(
        id=publisher,
        teacher=_read_text(fields, "teacher"),
        model=_read_text(fields, "model"),
        version=_read_text(fields, "version"),
        endpoint=_read_text(fields, "endpoint"),
        state=_read_text(fields, "state"),
        workers=workers,
        rows_per_s=rows / seconds if rows is not None and seconds else None,
        rate=rate,
        compute_share=min(compute_s / seconds / workers, 1.0) if compute_s is not None and seconds else None,
        queue_rows=None if queue_rows is None else int(queue_rows),
        note=_read_text(fields, "note"),
        rows=all_rows,
        compute_s=all_compute_s,
    )


def _compute_rate(workers: int, rows: float | None, compute_s: float | None) -> float | None:
    return workers * rows / compute_s if rows and compute_s and compute_s >= _LEAST_COMPUTE_S else None


def _read_seconds(fields: Mapping[str, Any], since: Mapping[str, Any]) -> float:
    """Return the seconds between the record's two samples, 0 if the samples are too close for a rate."""
    _, seconds = _read_counter(fields, since, "t")
    return seconds if seconds >= _SHORTEST_S else 0.0


def _read_counter(fields: Mapping[str, Any], since: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Return a counter's current value, and its growth since the earlier sample."""
    now = _read_number(fields, name)
    grown = now - _read_number(since, name)
    if grown < 0:
        raise ValueError("one of its counters is lower now than in 'since'")
    return now, grown


def _read_optional_counter(
    fields: Mapping[str, Any], since: Mapping[str, Any], name: str
) -> tuple[float | None, float | None]:
    if fields.get(name) is None:
        return None, None
    return (_read_number(fields, name), None) if since.get(name) is None else _read_counter(fields, since, name)


def _read_number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    # Finite, and small enough that sums over thousands of records stay finite.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e18 or math.isnan(value):
        raise ValueError(f"its field {name!r} is not a number of at least 0")
    return float(value)


def _read_text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str) or not value.isprintable() or len(value) > _MAX_TEXT:
        raise ValueError(f"its field {name!r} is not a printable string of at most {_MAX_TEXT} characters")
    return value
