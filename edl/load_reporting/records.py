"""The records of load in the Store: their keys, their JSON, and which of them can be believed.

A key is `load/SERVICE/students/ID` or `load/SERVICE/teachers/ID`. Records come from any process that may write to the
Store, of any version: a field that is missing or makes no sense is a `ValueError`, and the record is left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edl.discovery.records import check_service, is_service

__all__ = [
    "MAX_TEACHERS",
    "VERSION",
    "RecordKind",
    "StudentCounters",
    "StudentRecord",
    "TeacherCounters",
    "TeacherRecord",
    "parse_record",
    "record_key",
    "service_prefix",
    "split_key",
]

VERSION = 1
"""Of the format: a record of another version is left out, since its fields may mean something else."""
MAX_TEACHERS = 64
"""Teachers that a student's record names: who serves whom is shown to people, and a record has to stay small."""
_MAX_TEXT = 1024
"""Characters of a text: a registry takes ids of 512, and what does not print is written with escapes."""
_MAX_BYTES = 256 * 1024
"""Of a record: what a store takes."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")

RecordKind = Literal["students", "teachers"]


@dataclass(frozen=True)
class StudentCounters:
    """What a student has done since it began.

    Attributes:
        t: seconds since its publisher began, by its own monotonic clock.
        rows_asked: rows that it asked teachers for.
        wait_s: seconds that its training loop waited for labels.
        source_wait_s: seconds that its training loop waited for its own data source.
    """

    t: float
    rows_asked: float
    wait_s: float
    source_wait_s: float


@dataclass(frozen=True)
class StudentRecord:
    """A reader's record, of one service.

    Attributes:
        id: of the publisher.
        job: the job that the student belongs to; empty if none is known.
        host: name of its machine.
        teachers: ids in the registry of the teachers that it uses.
        now: its counters.
        since: its counters some seconds before.
    """

    id: str
    job: str
    host: str
    teachers: tuple[str, ...]
    now: StudentCounters
    since: StudentCounters


@dataclass(frozen=True)
class TeacherCounters:
    """What a teacher has done since it began.

    Attributes:
        t: seconds since its publisher began, by its own monotonic clock.
        rows: rows that it computed; None if it cannot tell.
        compute_s: seconds that its workers computed, summed over them; None if it cannot tell.
    """

    t: float
    rows: float | None
    compute_s: float | None


@dataclass(frozen=True)
class TeacherRecord:
    """A teacher's record.

    Attributes:
        id: of the publisher.
        teacher: id in the registry; empty until the teacher is registered.
        model: name of the model.
        version: of the model; empty if unknown.
        endpoint: `host:port`; empty for a Unix socket.
        state: "starting", "ready", "unhealthy" or "draining".
        workers: batches that it computes at the same time.
        queue_rows: rows that wait; None if it cannot tell.
        note: why rows are unknown; empty if they are known.
        now: its counters.
        since: its counters some seconds before.
    """

    id: str
    teacher: str
    model: str
    version: str
    endpoint: str
    state: str
    workers: int
    queue_rows: int | None
    note: str
    now: TeacherCounters
    since: TeacherCounters


def service_prefix(service: str = "") -> str:
    """Return the prefix of a service's records; of all services' without a name.

    Raises:
        SettingsError: no service can have that name.
    """
    return f"load/{check_service(service)}/" if service else "load/"


def record_key(service: str, kind: RecordKind, publisher: str) -> str:
    """Return the key of a record.

    Args:
        service: the service's name.
        kind: of the record.
        publisher: id of the publisher.

    Raises:
        SettingsError: no service can have that name.
    """
    return f"{service_prefix(service)}{kind}/{publisher}"


def split_key(key: str) -> tuple[str, RecordKind, str]:
    """Return service, kind and publisher of a key.

    Raises:
        ValueError: it is no key of a record.
    """
    parts = key.split("/")
    if len(parts) != 4 or parts[0] != "load" or not is_service(parts[1]) or not _ID.fullmatch(parts[3]):
        raise ValueError("its key is none of a load record")
    if parts[2] == "students":
        return parts[1], "students", parts[3]
    if parts[2] == "teachers":
        return parts[1], "teachers", parts[3]
    raise ValueError("its key is none of a load record")


def parse_record(key: str, value: bytes) -> StudentRecord | TeacherRecord:
    """Read a record.

    Args:
        key: under which it lies in the Store.
        value: its JSON.

    Returns:
        The record.

    Raises:
        ValueError: it cannot be used; the message says why.
    """
    _, kind, publisher = split_key(key)
    if len(value) > _MAX_BYTES:
        raise ValueError(f"it has {len(value):,} bytes, more than {_MAX_BYTES:,}")
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"it is not JSON: {type(exc).__name__}") from exc
    if not isinstance(fields, dict) or fields.get("v") != VERSION:
        version = fields.get("v") if isinstance(fields, dict) else None
        raise ValueError(f"it is of format {version!r:.20}, and {VERSION} is what this version reads")
    if fields.get("id") != publisher:
        raise ValueError("its id is not that of its key")
    since = fields.get("since")
    if not isinstance(since, dict):
        raise ValueError("its field 'since' is no object")
    return _student(publisher, fields, since) if kind == "students" else _teacher(publisher, fields, since)


def _student(publisher: str, fields: Mapping[str, Any], since: Mapping[str, Any]) -> StudentRecord:
    teachers = fields.get("teachers", [])
    if not isinstance(teachers, list) or len(teachers) > MAX_TEACHERS:
        raise ValueError(f"its field 'teachers' is no list of at most {MAX_TEACHERS}")
    now, before = (
        StudentCounters(
            _number(part, "t"), _number(part, "rows_asked"), _number(part, "wait_s"), _number(part, "source_wait_s")
        )
        for part in (fields, since)
    )
    _check_order(now.t - before.t, now.rows_asked - before.rows_asked, now.wait_s - before.wait_s)
    _check_order(now.source_wait_s - before.source_wait_s)
    return StudentRecord(
        id=publisher,
        job=_text(fields, "job"),
        host=_text(fields, "host"),
        teachers=tuple(_text({"teachers": teacher}, "teachers") for teacher in teachers),
        now=now,
        since=before,
    )


def _teacher(publisher: str, fields: Mapping[str, Any], since: Mapping[str, Any]) -> TeacherRecord:
    workers = fields.get("workers")
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 1_000_000:
        raise ValueError("its field 'workers' is no count")
    now, before = (
        TeacherCounters(_number(part, "t"), _number_or_none(part, "rows"), _number_or_none(part, "compute_s"))
        for part in (fields, since)
    )
    known = [
        (after, earlier)
        for after, earlier in ((now.rows, before.rows), (now.compute_s, before.compute_s))
        if after is not None and earlier is not None
    ]
    _check_order(now.t - before.t, *(after - earlier for after, earlier in known))
    queue_rows = _number_or_none(fields, "queue_rows")
    return TeacherRecord(
        id=publisher,
        teacher=_text(fields, "teacher"),
        model=_text(fields, "model"),
        version=_text(fields, "version"),
        endpoint=_text(fields, "endpoint"),
        state=_text(fields, "state"),
        workers=workers,
        queue_rows=None if queue_rows is None else int(queue_rows),
        note=_text(fields, "note"),
        now=now,
        since=before,
    )


def _check_order(*differences: float) -> None:
    if min(differences) < 0:
        raise ValueError("its counters fall from 'since' to now")


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    # Finite, and small enough that a sum over thousands of records is finite as well.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e18 or math.isnan(value):
        raise ValueError(f"its field {name!r} is no number of at least 0")
    return float(value)


def _number_or_none(fields: Mapping[str, Any], name: str) -> float | None:
    return None if fields.get(name) is None else _number(fields, name)


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str) or not value.isprintable() or len(value) > _MAX_TEXT:
        raise ValueError(f"its field {name!r} is no printable text of at most {_MAX_TEXT} characters")
    return value
