"""docs/scaling.md says what the code does: its tables, its defaults, and the figures of its examples."""

from __future__ import annotations

import re
from pathlib import Path

from edl.master.scaling.arbitration import ArbitrationSettings, JobRequest, arbitrate
from edl.master.scaling.arbitration.requests import JobValue
from edl.master.scaling.relaunch import RELAUNCH_TABLE, RelaunchAction
from edl.master.scaling.teacher_demand import TeacherScalingSettings
from edl.master.scaling.terminations import TerminationCause
from edl.master.scaling.throughput import ThroughputModel
from edl.master.scaling.workers import (
    WorkerScalingSettings,
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
