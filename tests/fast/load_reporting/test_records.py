"""Which records of load are believed, and what follows from them."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from edl.discovery import Store
from edl.load_reporting import LoadSource, ServiceLoad, StudentRate, TeacherRate, read_service, read_services
from edl.load_reporting.publisher import _Record
from edl.load_reporting.records import parse_record

STUDENT, TEACHER = "load/s/students/a", "load/s/teachers/b"


def student(**fields: Any) -> dict[str, Any]:
    since = {"t": 10.0, "rows_asked": 100, "wait_s": 1.0, "source_wait_s": 0.0, **fields.pop("since", {})}
    now = {"t": 20.0, "rows_asked": 400, "wait_s": 5.0, "source_wait_s": 2.0}
    return {"v": 1, "id": "a", "job": "j", "host": "h", "teachers": ["t1"], **now, "since": since, **fields}


def teacher(**fields: Any) -> dict[str, Any]:
    since = {"t": 10.0, "rows": 100, "compute_s": 1.0, **fields.pop("since", {})}
    now = {"t": 20.0, "rows": 400, "compute_s": 7.0, "workers": 2, "queue_rows": 3}
    return {"v": 1, "id": "b", "teacher": "t1", "state": "ready", "model": "m", **now, "since": since, **fields}


def record(key: str, fields: dict[str, Any]) -> StudentRate | TeacherRate:
    return parse_record(key, json.dumps(fields).encode())


def load(*records: dict[str, Any]) -> ServiceLoad:
    kinds = {"a": "students", "b": "teachers"}
    rates = [record(f"load/s/{kinds[fields['id'][0]]}/{fields['id']}", fields) for fields in records]
    return ServiceLoad(
        "s",
        tuple(rate for rate in rates if isinstance(rate, StudentRate)),
        tuple(rate for rate in rates if isinstance(rate, TeacherRate)),
    )


def test_rates_are_by_the_time_at_work() -> None:
    found = load(student(), teacher())
    (asking,), (computing,) = found.students, found.teachers
    assert asking.demand == pytest.approx(300 / (10 - 4)), "rows by the time that it did not wait"
    assert (asking.rows_per_s, asking.wait_share, asking.source_wait_share) == (30.0, 0.4, 0.2)
    assert computing.rate == pytest.approx(2 * 300 / 6), "workers times rows by the seconds of computing"
    assert (computing.rows_per_s, computing.compute_share, computing.queue_rows) == (30.0, 0.3, 3)
    assert (found.demand, found.rate, found.live) == (asking.demand, computing.rate, 1)


@pytest.mark.parametrize(
    ("since", "demand"),
    [
        ({"t": 20.0, "rows_asked": 400, "wait_s": 5.0, "source_wait_s": 2.0}, None),  # the first record
        ({"rows_asked": 400, "wait_s": 0.0}, None),  # it waits, and asks for nothing
        ({"wait_s": 0.0, "t": 15.0}, 300 / 0.005),  # it waited all the time: as a bound
    ],
)
def test_demand_never_divides_by_zero(since: dict[str, float], demand: float | None) -> None:
    assert load(student(since=since)).students[0].demand == (None if demand is None else pytest.approx(demand))
    paused = load(student(since={"rows_asked": 400, "wait_s": 5.0, "source_wait_s": 2.0}))
    assert (paused.students[0].demand, paused.students[0].idle, paused.demand) == (0.0, True, 0.0)
    assert paused.wait_share is None


def test_what_is_not_published_counts() -> None:
    """Rows of students with fixed endpoints, and teachers of a version before: an advisor must not miss them."""
    assert load(teacher(since={"rows": 0})).demand == 40.0
    assert load(teacher(since={"rows": 0}, state="draining")).demand == 0.0
    found = load(student(teachers=["t1", "t8", "t9"]), student(id="a2", teachers=["t8"]), teacher())
    assert found.live == 3
    assert load(student(teachers=["t1"]), teacher(state="draining")).live == 0


def test_only_what_is_known_is_a_rate() -> None:
    assert load(teacher(since={"rows": 400, "compute_s": 7.0})).rate == pytest.approx(2 * 400 / 7), "idle, it keeps it"
    assert load(teacher(rows=0, compute_s=0.0, since={"rows": 0, "compute_s": 0.0})).rate is None
    found = load(teacher(), teacher(id="b2", state="starting", rows=9000), teacher(id="b3", state="unhealthy"))
    assert (found.live, found.starting) == (1, 1)
    assert found.rate == pytest.approx(100.0)
    since = {"t": 10.0, "rows": None, "compute_s": None}
    (rate,) = load(teacher(rows=None, compute_s=None, since=since, note="no statistics")).teachers
    assert (rate.rate, rate.rows_per_s, rate.compute_share, rate.note) == (None, None, None, "no statistics")


@pytest.mark.parametrize(
    "fields",
    [
        student(v=2),
        student(id="b"),
        student(since={"rows_asked": 500}),
        student(wait_s="4"),
        student(rows_asked=-1),
        student(rows_asked=float("nan")),
        student(job="\x1b[2J"),
        student(teachers=["x"] * 65),
        student(teachers=[1]),
        {**student(), "since": None},
        {"v": 1, "id": "a"},
    ],
)
def test_unusable_record_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"its|format"):
        record(STUDENT, fields)


@pytest.mark.parametrize("workers", [0, 2.5, True, "2"])
def test_teacher_without_workers_is_refused(workers: Any) -> None:
    with pytest.raises(ValueError, match="workers"):
        record(TEACHER, teacher(workers=workers))


def test_foreign_records_are_left_out(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.put("load/s/students/a", json.dumps(student()).encode())
    store.put("load/s/students/c", b"\x80garbage")
    store.put("load/s/students/d", json.dumps(student(id="d", v=99)).encode())
    store.put("load/s/others/a", b"{}")
    store.put("load/s", b"{}")
    store.put("load/other/teachers/b", json.dumps(teacher()).encode())
    with caplog.at_level(logging.WARNING, "edl.load_reporting"):
        for _ in range(2):
            assert [found.id for found in read_service(store, "s").students] == ["a"]
        assert set(read_services(store)) == {"s", "other"}
    words = [entry.getMessage() for entry in caplog.records]
    assert len(words) == len(set(words)) == 4, "each is logged once"
    assert any("format 99" in text for text in words)


def test_window_and_what_began_again() -> None:
    """A record compares with the window's beginning; a counter that falls has begun again."""
    counters: dict[str, float | None] = {"rows": 0.0}
    window = _Record(LoadSource("s", "teachers", lambda: counters, dict), "id", 10.0)

    def compare_at(t: float, **others: float | None) -> Any:
        counters.update(others)
        return window.sample(t)["since"]["t"]

    assert [compare_at(float(t), rows=float(t)) for t in range(0, 30, 2)] == [0.0] * 6 + [2.0 * t for t in range(1, 10)]
    assert compare_at(30.0, rows=1.0) == 30.0
    assert compare_at(32.0, rows=2.0) == 30.0
    assert compare_at(34.0, rows=None) == 34.0, "not known any more"
