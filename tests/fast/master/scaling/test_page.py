"""docs/scaling.md says what the code does: its tables, its defaults, and the figures of its examples."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from edl.load_reporting.rates import ServiceLoad, service_load
from edl.load_reporting.records import StudentCounters, StudentRecord, TeacherCounters, TeacherRecord
from edl.master.scaling.arbitration import ArbitrationSettings, JobRequest, arbitrate
from edl.master.scaling.arbitration.requests import JobValue
from edl.master.scaling.relaunch import RELAUNCH_TABLE, RelaunchAction
from edl.master.scaling.teacher_demand import TeacherScalingSettings, describe_load
from edl.master.scaling.terminations import TerminationCause
from edl.master.scaling.throughput import ThroughputHistory, ThroughputModel, fit_throughput
from edl.master.scaling.workers import (
    WorkerObservation,
    WorkerScalingSettings,
    compute_realloc_factor,
    decide_workers,
    find_useful_limit,
)

PAGE = Path(__file__).resolve().parents[4] / "docs/scaling.md"

EXAMPLE = PAGE.read_text().partition("### An example")[2].partition("\n### ")[0]
SECONDS, ROWS, WAIT_S, COMPUTED, COMPUTE_S = 15.0, 2070, 4.65, 1380, 13.8


def section(title: str) -> str:
    """A section's text with single blanks."""
    text = PAGE.read_text().split(f"{title}\n", 1)[1]
    return " ".join(re.split(r"^#+ ", text, maxsplit=1, flags=re.MULTILINE)[0].split())


def describe_rules(cause: TerminationCause) -> str:
    parts = [
        f"{rule.action.value}" + ("" if rule.times is None else f" ({rule.times} times)")
        for rule in RELAUNCH_TABLE[cause]
    ]
    endless = RELAUNCH_TABLE[cause] and RELAUNCH_TABLE[cause][-1].times is None
    return ", ".join(parts if endless else [*parts, RelaunchAction.STOP.value])


def test_page_has_the_relaunch_table() -> None:
    page = PAGE.read_text()
    for cause in TerminationCause:
        assert f"| `{cause.value}` | {describe_rules(cause)} |\n" in page


def test_example_of_workers() -> None:
    text = section("### An example of workers")
    history = ThroughputHistory()
    for size, rate in ((4, 400.0), (8, 640.0)):
        for _ in range(3):
            history = history.record_rate(size, rate, 0.0)
    model = fit_throughput(history, 0.0)
    assert model is not None
    assert math.isclose(model.a, 0.0075)
    assert math.isclose(model.b, 0.000625)
    assert f"b = {model.b:.6f} s and a = {model.a:.4f} s" in text
    assert f"T(16) = {model.predict_rate(16):.0f} samples/s" in text
    factor = compute_realloc_factor(3600.0, 1, 30.0)
    assert f"= {factor:.3f}" in text

    def decide(left: float) -> tuple[int, str, str]:
        seen = WorkerObservation(8, 1, 64, history, 0.0, left, 30.0, 3600.0, 1)
        seconds = left / model.predict_rate(16)
        saved_s = (factor * model.predict_rate(16) / model.predict_rate(8) - 1) * seconds
        return decide_workers(seen).count, f"{seconds:.0f} s", f"{saved_s:.0f} s"

    assert decide(2e6) == (16, "2188 s", "886 s")
    assert decide(4e4) == (8, "44 s", "18 s")
    for figure in ("R = 2188 s", "= 886 s", "R = 44 s", "18 s"):
        assert figure in text
    longer = history
    for size in (16, 25):
        for _ in range(3):
            longer = longer.record_rate(size, model.predict_rate(size), 0.0)
    assert find_useful_limit(WorkerObservation(25, 1, 64, longer)) == 25
    assert "Beyond 25 workers" in text


def test_settings_on_the_page() -> None:
    text, settings = section("## How many workers"), WorkerScalingSettings()
    assert f"less than {settings.min_efficiency * (1 - settings.efficiency_band):.0%}" in text
    assert f"where it does {settings.min_efficiency:.0%}" in text
    assert (settings.min_samples, settings.explore_factor, settings.horizon_s) == (3, 2.0, 3600.0)
    assert ArbitrationSettings() == ArbitrationSettings(horizon_s=1800.0, patience_s=3600.0)


def test_example_of_shares() -> None:
    text = section("### An example of shares")
    nodes = {"n1": 8, "n2": 8}
    vision = JobRequest("vision", 2, 16)
    speech = JobRequest("speech", 2, 16, model=ThroughputModel(1.0, 0.25), submitted_s=1.0)
    urgent = JobRequest("urgent", 4, 4, priority=1, submitted_s=2.0)
    first = arbitrate(nodes, [vision, speech], {})
    assert [first.count_workers(job) for job in ("vision", "speech")] == [11, 5]
    values = {job.name: JobValue(job, ArbitrationSettings()) for job in (vision, speech)}

    def worth(job: str, worker: int) -> str:
        return f"{values[job].compute_utility(worker) - values[job].compute_utility(worker - 1):.3f}"

    assert f"= {worth('vision', 11)}, speech's 6th only {worth('speech', 6)}" in text
    second = arbitrate(nodes, [vision, speech, urgent], first.placements)
    assert [second.count_workers(job) for job in ("vision", "speech", "urgent")] == [8, 4, 4]
    assert f"worth {worth('speech', 5)} to speech, and costs vision {worth('vision', 8)}" in text
    third = arbitrate(nodes, [vision, speech], second.placements)
    assert [third.count_workers(job) for job in ("vision", "speech")] == [11, 5]
    assert f"costs {values['vision'].compute_move_cost(11):.3f}" in text


def student(name: str, rows: int = ROWS, wait_s: float = WAIT_S) -> StudentRecord:
    start = StudentCounters(0.0, 0, 0.0, 0.0)
    return StudentRecord(name, "", "", (), StudentCounters(SECONDS, rows, wait_s, 0.0), start)


def teacher(name: str, rows: float) -> TeacherRecord:
    now, start = TeacherCounters(SECONDS, rows, rows * COMPUTE_S / COMPUTED), TeacherCounters(0.0, 0, 0.0)
    return TeacherRecord(name, name, "", "", "", "ready", 1, 0, "", now, start)


def load(*students: StudentRecord, teachers: int) -> ServiceLoad:
    rows = sum(part.now.rows_asked for part in students) / teachers
    return service_load("s", [*students, *(teacher(f"t{number}", rows) for number in range(teachers))])


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
