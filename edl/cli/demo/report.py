"""How the demo ended, as tables and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from edl.cli.demo.check import Findings
from edl.cli.demo.data import Digits
from edl.cli.demo.epoch import EpochOutcome
from edl.cli.demo.models import accuracy, size
from edl.cli.demo.plan import DemoPlan
from edl.cli.demo.timeline import TeacherEvent
from edl.distill import ReaderStats

__all__ = ["DemoResult", "show"]


@dataclass(frozen=True)
class DemoResult:
    """The demo's figures. Accuracies are shares of the held-out images; of students, by seed.

    Attributes:
        exit_codes: of the teachers that were killed or drained; None: still running after its time.
        took_s: the epoch, `whole_s` the demo.
    """

    plan: DemoPlan
    teacher_parameters: int
    student_parameters: int
    teacher_images: int
    test_images: int
    teacher: float
    alone: tuple[float, ...]
    distilled: tuple[float, ...]
    stats: ReaderStats
    events: tuple[TeacherEvent, ...]
    exit_codes: dict[str, int | None]
    findings: Findings
    took_s: float
    whole_s: float

    @classmethod
    def of(
        cls,
        plan: DemoPlan,
        digits: Digits,
        teacher: nn.Module,
        teacher_accuracy: float,
        outcome: EpochOutcome,
        findings: Findings,
        exit_codes: dict[str, int | None],
        whole_s: float,
    ) -> DemoResult:
        """From what the parts of the demo returned."""

        def measured(models: Sequence[nn.Module]) -> tuple[float, ...]:
            return tuple(accuracy(model, digits.test_images, digits.test_labels) for model in models)

        return cls(
            plan=plan,
            teacher_parameters=size(teacher),
            student_parameters=size(outcome.pairs[0].alone),
            teacher_images=len(digits.images),
            test_images=len(digits.test_images),
            teacher=teacher_accuracy,
            alone=measured([pair.alone for pair in outcome.pairs]),
            distilled=measured([pair.distilled for pair in outcome.pairs]),
            stats=outcome.stats,
            events=tuple(outcome.timeline.events),
            exit_codes=exit_codes,
            findings=findings,
            took_s=outcome.took_s,
            whole_s=whole_s,
        )

    def write(self, path: Path) -> None:
        """As JSON."""
        fields = {**asdict(self), "all_well": self.findings.all_well}
        path.write_text(json.dumps(fields, indent=1, default=str) + "\n")


def show(result: DemoResult, console: Console) -> None:
    """Print the tables."""
    console.print()
    console.print(_accuracies(result))
    console.print(_comparison(result))
    console.print()
    console.print(_samples(result))
    console.print(_teachers(result))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _accuracies(result: DemoResult) -> Table:
    title = f"Right on {result.test_images} images that none of them has seen"
    table = _table(title, "", "parameters", "learned from", "mean", "lowest to highest")

    def row(name: str, parameters: int, learned: str, values: Sequence[float], style: str = "") -> None:
        many = len(values) > 1
        mean = f"{statistics.fmean(values):.1%}" + (f" ±{100 * statistics.stdev(values):.1f}" if many else "")
        table.add_row(
            name,
            f"{parameters:,}",
            learned,
            mean,
            f"{min(values):.1%} to {max(values):.1%}" if many else "",
            style=style,
        )

    row("teacher", result.teacher_parameters, f"{result.teacher_images:,} images, labels", [result.teacher])
    small = result.student_parameters
    row("student alone", small, f"{result.plan.labelled} images, labels", result.alone)
    row("student distilled", small, "the same, soft labels", result.distilled, "bold green")
    return table


def _comparison(result: DemoResult) -> Text:
    plan = result.plan
    gains = [soft - hard for soft, hard in zip(result.distilled, result.alone, strict=True)]
    return Text(
        f"{plan.seeds} seeds. Of each, both students start with the same weights and take {plan.steps} steps\n"
        "on the same distorted images; only the labels differ. Distilled beats alone by\n"
        f"{100 * statistics.fmean(gains):.1f} points ({100 * min(gains):+.1f} to {100 * max(gains):+.1f})."
    )


def _samples(result: DemoResult) -> Table:
    stats, findings = result.stats, result.findings
    table = _table(f"Samples, in {result.took_s:.0f} s", "", "", "")
    table.show_header = False
    table.columns[2].justify = "left"

    def row(name: str, value: int, note: str = "") -> None:
        table.add_row(name, f"{value:,}", note)

    def verdict(name: str, wrong: int, note: str = "") -> None:
        sign, style = ("✗", "bold red") if wrong else ("✓", "green")
        table.add_row(name, f"{wrong:,}", Text(f"{sign} {note}", style))

    row("asked of teachers", stats.rows_asked)
    row("received", stats.rows_received)
    row("resent", stats.rows_resent, "were with a teacher that went away")
    row("hedged", stats.rows_hedged, "were late, so a second teacher was asked")
    row("delivered to the students", findings.checked)
    verdict("lost", findings.lost)
    verdict("repeated", findings.repeated)
    verdict("out of order", findings.out_of_order)
    wrong = findings.mislabelled + findings.changed
    difference = findings.largest_difference
    equal = f"equal within {difference:.0e}" if difference else "exactly equal"
    verdict("with another's label", wrong, f"all computed again here: {equal}")
    return table


def _teachers(result: DemoResult) -> Table:
    table = _table("Who served how many", "teacher", "rows", "share", "requests", "failed", "what became of it")
    table.columns[-1].justify = "left"
    events: dict[str, TeacherEvent] = {event.teacher: event for event in result.events}
    whole = max(1, sum(teacher.rows for teacher in result.stats.teachers.values()))
    for name, teacher in sorted(result.stats.teachers.items()):
        fate = _fate(events.get(name), result.exit_codes.get(name))
        cells = (f"{teacher.rows:,}", f"{teacher.rows / whole:.0%}", f"{teacher.requests:,}", f"{teacher.failures:,}")
        table.add_row(name, *cells, Text(*fate))
    return table


def _fate(event: TeacherEvent | None, exit_code: int | None) -> tuple[str, str]:
    if event is None:
        return "served to the end", ""
    when = f"at {event.at_s:.1f} s"
    if event.kind == "join":
        return f"joined {when}", "green"
    ended = "still ran 10 s later" if exit_code is None else f"exit code {exit_code}"
    if event.kind == "kill":
        return f"SIGKILL {when}", "red"
    return f"SIGTERM {when}, then {ended}", "yellow"
