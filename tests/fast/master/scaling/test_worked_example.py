"""The example of docs/scaling.md, "How many teachers": its counts lead to its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.load_reporting.rates import ServiceLoad, service_load
from edl.load_reporting.records import StudentCounters, StudentRecord, TeacherCounters, TeacherRecord
from edl.master.scaling.teacher_demand import TeacherScalingSettings, describe_load, observe_teachers, required_teachers
from edl.master.scaling.teachers import TeacherScalingState, decide_teachers

PAGE = Path(__file__).resolve().parents[4] / "docs/scaling.md"
EXAMPLE = PAGE.read_text().partition("### An example")[2].partition("\n### ")[0]
SECONDS, ROWS, WAIT_S, COMPUTED, COMPUTE_S = 15.0, 2070, 4.65, 1380, 13.8


def student(name: str, rows: int = ROWS, wait_s: float = WAIT_S) -> StudentRecord:
    start = StudentCounters(0.0, 0, 0.0, 0.0)
    return StudentRecord(name, "", "", (), StudentCounters(SECONDS, rows, wait_s, 0.0), start)


def teacher(name: str, rows: float) -> TeacherRecord:
    now, start = TeacherCounters(SECONDS, rows, rows * COMPUTE_S / COMPUTED), TeacherCounters(0.0, 0, 0.0)
    return TeacherRecord(name, name, "", "", "", "ready", 1, 0, "", now, start)


def load(*students: StudentRecord, teachers: int) -> ServiceLoad:
    rows = sum(part.now.rows_asked for part in students) / teachers
    return service_load("s", [*students, *(teacher(f"t{number}", rows) for number in range(teachers))])


def count_after(state: TeacherScalingState, found: ServiceLoad, seconds: float) -> tuple[TeacherScalingState, int]:
    """Look every 5 s at a load that stays."""
    begun = state.at_s or 0.0
    for tick in range(int(seconds / 5) + 1):
        state, decision = decide_teachers(state, observe_teachers(found, begun + 5.0 * tick))
    return state, decision.count


def test_the_pages_counts_give_its_numbers() -> None:
    found = load(student("a"), student("b"), teachers=3)
    assert COMPUTED == 2 * ROWS / 3
    assert [part.demand for part in found.students] == [pytest.approx(200)] * 2
    assert found.rate == pytest.approx(100)
    assert found.demand == pytest.approx(400)
    assert describe_load(found) == "3 live; 2 students wait 31% of their time; 5 would do"
    assert describe_load(found) in PAGE.read_text()
    for text in (
        f"{ROWS:,} rows asked, {WAIT_S} s waited",
        f"d = {ROWS} / ({SECONDS:g} - {WAIT_S}) = 200 rows/s",
        f"{COMPUTED:,} rows in {COMPUTE_S} s, 1 worker",
        f"μ = 1 · {COMPUTED} / {COMPUTE_S} = 100 rows/s",
        "400 > 0.9 · 3 · 100 = 270",
        "0.7 · 4 · 100 = 280",
        "0.9 · 5 · 100 = 450",
    ):
        assert text in EXAMPLE, text


def test_moves_are_those_of_the_page() -> None:
    state, count = count_after(TeacherScalingState(), load(student("a"), student("b"), teachers=3), 15)
    assert count == 5
    # All of the demand is served from here on, and nobody waits: the same demand.
    five = load(student("a", 3000, 0.0), student("b", 3000, 0.0), teachers=5)
    state, count = count_after(state, five, 600)
    assert (count, required_teachers(observe_teachers(five, 0.0))) == (5, 5)
    paused = load(student("a", 3000, 0.0), student("b", 0, 0.0), teachers=5)
    state, count = count_after(state, paused, 240)
    assert count == 5
    back, count = count_after(state, five, 30)
    assert (count, back.low_since_s) == (5, None)
    state, count = count_after(state, paused, 90)
    assert count == 3


def test_the_pages_figures_are_defaults() -> None:
    found = TeacherScalingSettings()
    text = PAGE.read_text()
    for words in (
        f"⌈Σd / ({found.utilization} μ)⌉",
        f"Σd > {found.up_above} · N · μ for {found.up_s:g} s",
        f"Σd < {found.down_below} · (N - 1) · μ for {found.down_s:g} s",
        f"less than {found.least_busy_share:.0%} of its time",
        f"{found.judge_s:g} s after its teachers were ready",
        f"after {found.retry_s:g} s, {2 * found.retry_s:g} s",
        f"{found.least_expected:.0%} of the demand",
        f"could be read for {found.gap_s:g} s",
    ):
        assert words in text, words
