"""The outcome of a soak, as text for a person, as JSON, and as a part of docs/reliability.md."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.soak.verdict import Counts, Growth

__all__ = ["BEGIN", "END", "Outcome", "text_of", "write_report"]

BEGIN = "<!-- soak: written by `make soak` -->"
END = "<!-- soak: end -->"


@dataclass(frozen=True)
class Outcome:
    """What came of a soak.

    Attributes:
        faults: how often each was injected.
        hangs, ends: students that made no progress, and that ended by themselves, with the ends of their logs.
        regions_held: of shared memory, by the teachers that lived through it, after all students had ended.
        left_behind: objects in shared memory after everybody had ended.
        left_out: faults that could not be injected, with the reason.
    """

    minutes: float
    counts: Counts
    faults: dict[str, int]
    hangs: list[str]
    ends: list[str]
    growths: list[Growth]
    regions_held: int
    left_behind: list[str]
    left_out: list[str]
    students: int
    teachers: int

    @property
    def good(self) -> bool:
        """Whether there is nothing to mend."""
        counts = self.counts
        wrong = counts.lost + counts.repeated + counts.mislabelled + counts.changed
        return counts.rows > 0 and not wrong and not self.problems

    @property
    def problems(self) -> list[str]:
        """In words, with the evidence."""
        grown = [f"{growth.name} grew: {growth}" for growth in self.growths if growth.grown]
        left = [f"left in shared memory: {name}" for name in self.left_behind]
        held = [f"{self.regions_held} regions of students that have ended are held by teachers"] * (
            self.regions_held > 0
        )
        return [*self.counts.errors, *self.hangs, *self.ends, *grown, *held, *left]

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "good": self.good, "machine": f"{platform.system()} {platform.machine()}"}


def text_of(outcome: Outcome) -> str:
    """Tables in Markdown."""
    counts = outcome.counts
    lines = [
        f"{outcome.minutes:g} minutes, {outcome.teachers} teachers, {outcome.students} students, "
        f"{sum(outcome.faults.values())} faults.",
        "",
        "| | count |",
        "| --- | --- |",
        f"| rows delivered | {counts.rows:,} |",
        f"| epochs | {counts.epochs:,}, of which {counts.ended_early:,} were left early by the training loop |",
        f"| rows lost | {counts.lost} |",
        f"| rows repeated | {counts.repeated} |",
        f"| rows with another's label | {counts.mislabelled} |",
        f"| rows whose input had changed | {counts.changed} |",
        f"| epochs that failed | {len(counts.errors)} |",
        f"| students that hung | {len(outcome.hangs)} |",
        f"| students that ended by themselves | {len(outcome.ends)} |",
        f"| left behind in shared memory | {len(outcome.left_behind)} |",
        f"| regions of ended students that teachers still hold | {outcome.regions_held} |",
        "",
        "| fault | times |",
        "| --- | --- |",
        *(f"| {name} | {times} |" for name, times in outcome.faults.items()),
        *(f"| not injected: {reason} | 0 |" for reason in outcome.left_out),
        "",
        "| process that lived through it | memory at the end | growth | descriptors | threads |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {growth.name} | {growth.rss_bytes / 2**20:.0f} MiB | {growth.rss_growth_bytes / 2**20:+.1f} MiB | "
            f"{growth.descriptor_growth:+d} | {growth.thread_growth:+d} |"
            for growth in outcome.growths
        ),
    ]
    return "\n".join(lines)


def write_report(page: Path, outcome: Outcome) -> None:
    """Replace what stands between the markers of `page`.

    Raises:
        ValueError: the page has no markers.
    """
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: the lines {BEGIN!r} and {END!r} say where the figures go, and are not there")
    page.write_text(f"{before}{BEGIN}\n\n{text_of(outcome)}\n\n{END}{after}")
