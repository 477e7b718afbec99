"""What the soak counts, from rows that are made from their number, epochs and samples of memory; and the outcome."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from edl.testing.models import fingerprint_of
from tests.descriptors import count_descriptors

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NOISE_BYTES = 16 << 20  # an allocator's arenas come and go; a leaked request a minute is more in half an hour
NOISE_DESCRIPTORS = 4  # connections that happen to be under way when they are counted


@dataclass(frozen=True)
class Service:
    """What the teachers of one service serve: `edl.testing.models.fingerprint` with these options."""

    classes: int
    shape: tuple[int, ...]
    dtype: str


SERVICES = {
    "small": Service(10, (16,), "float32"),
    "other": Service(12, (16,), "float32"),
    "image": Service(10, (3, 32, 32), "uint8"),
}


def rows_of(service: Service, numbers: Array) -> Array:
    """Inputs [rows, *shape] of these rows (int64 [rows]); no two rows are alike.

    Most of a row is zero, as the corner of an image or the start of a padded text is: a check that looks at a few
    bytes only must not be enough.
    """
    rows = np.zeros((len(numbers), *service.shape), service.dtype)
    flat = rows.reshape(len(numbers), -1)
    for digit in range(5):  # base 128 is exact in every dtype
        flat[:, -1 - digit] = (numbers >> (7 * digit)) & 127
    return rows


def labels_of(service: Service, numbers: Array) -> Array:
    """The labels [rows, classes] that belong to these rows."""
    return fingerprint_of(rows_of(service, numbers), service.classes)


class RowCheck:
    """Checks the rows of one epoch: numbered from `first` on, they must come in order without a gap."""

    def __init__(self, first: int) -> None:
        self._next = self._first = first
        self.delivered = self.lost = self.repeated = self.mislabelled = self.changed = 0

    def add(self, numbers: Array, inputs_equal: bool, labels: Sequence[Array], expected: Sequence[Array]) -> None:
        """Take in rows that were delivered together; `labels` and `expected` are an array [rows, classes] a service."""
        for number in numbers.tolist():
            if number < self._next:
                self.repeated += 1
            else:
                self.lost += number - self._next
                self._next = number + 1
        self.delivered += len(numbers)
        self.changed += 0 if inputs_equal else len(numbers)
        wrong = np.zeros(len(numbers), bool)
        for have, want in zip(labels, expected, strict=True):
            wrong |= (have != want).any(axis=1) if have.shape == want.shape else True
        self.mislabelled += int(wrong.sum())

    def end(self, rows: int) -> None:
        """The epoch came to its end; it has `rows` rows."""
        self.lost += self._first + rows - self._next
        self._next = self._first + rows


@dataclass(frozen=True)
class EpochRecord:
    """A line of a student's journal. `how`: "whole", "break", "raise" (its own doing), or "failed" with `error`."""

    kind: str
    pid: int
    epoch: int
    how: str
    error: str
    delivered: int
    lost: int
    repeated: int
    mislabelled: int
    changed: int
    seconds: float
    rss_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, kind: str, epoch: int, how: str, error: str, check: RowCheck, seconds: float) -> EpochRecord:
        """Of the calling process, now."""
        rss, descriptors, threads = memory_of(os.getpid())
        return cls(
            kind, os.getpid(), epoch, how, error, check.delivered, check.lost, check.repeated, check.mislabelled,
            check.changed, seconds, rss, descriptors, threads,
        )  # fmt: skip


def memory_of(pid: int) -> tuple[int, int, int]:
    """Resident bytes and open descriptors, both without shared memory, which changes with the students; threads."""
    folder = Path(f"/proc/{pid}")
    pages = (folder / "statm").read_text().split()
    rss = (int(pages[1]) - int(pages[2])) * _PAGE_BYTES
    return rss, count_descriptors("", pid=pid) - regions_of(pid), len(list((folder / "task").iterdir()))


def regions_of(pid: int) -> int:
    """Regions of students' shared memory that a teacher holds."""
    return count_descriptors("/dev/shm/edl-arena-", pid=pid)


@dataclass
class Counts:
    """Sums over the epochs of all students."""

    errors: list[str]
    epochs: int
    ended_early: int
    rows: int
    lost: int
    repeated: int
    mislabelled: int
    changed: int


def count(records: Iterable[EpochRecord]) -> Counts:
    found = list(records)
    early = sum(record.how in ("break", "raise") for record in found)
    names = ("delivered", "lost", "repeated", "mislabelled", "changed")
    sums = [sum(getattr(record, name) for record in found) for name in names]
    failed = [f"{record.kind}, epoch {record.epoch}: {record.error}" for record in found if record.how == "failed"]
    return Counts(failed, len(found), early, *sums)


@dataclass(frozen=True)
class Growth:
    """How a process grew from the second quarter of its life to the last, by medians: in the first, caches fill."""

    name: str
    samples: int
    rss_bytes: int
    rss_growth_bytes: int
    descriptor_growth: int
    thread_growth: int

    @property
    def grown(self) -> bool:
        """Whether that is more than noise."""
        allowed = max(NOISE_BYTES, self.rss_bytes // 10)
        few = NOISE_DESCRIPTORS
        return self.rss_growth_bytes > allowed or self.descriptor_growth > few or self.thread_growth > few


def growth_of(name: str, samples: Sequence[tuple[int, int, int]]) -> Growth | None:
    """From (resident bytes, descriptors, threads) taken at even intervals; None of fewer than eight."""
    if len(samples) < 8:
        return None
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    before = [statistics.median(values) for values in zip(*early, strict=True)]
    after = [statistics.median(values) for values in zip(*late, strict=True)]
    rss, descriptors, threads = (round(b - a) for a, b in zip(before, after, strict=True))
    return Growth(name, len(samples), round(after[0]), rss, descriptors, threads)


BEGIN = "<!-- soak: written by `make soak` -->"
END = "<!-- soak: end -->"


@dataclass(frozen=True)
class Outcome:
    """What came of a soak; `left_out` are faults that could not be injected, with the reason."""

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
        counts = self.counts
        wrong = counts.lost + counts.repeated + counts.mislabelled + counts.changed
        return counts.rows > 0 and not wrong and not self.problems

    @property
    def problems(self) -> list[str]:
        grown = [f"{growth.name} grew: {growth}" for growth in self.growths if growth.grown]
        left = [f"left in shared memory: {name}" for name in self.left_behind]
        if self.regions_held:
            left.append(f"{self.regions_held} regions of students that have ended are held by teachers")
        return [*self.counts.errors, *self.hangs, *self.ends, *grown, *left]


def text_of(outcome: Outcome) -> str:
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
        f"| rows with another row's label | {counts.mislabelled} |",
        f"| rows whose input had changed | {counts.changed} |",
        f"| epochs that failed | {len(counts.errors)} |",
        f"| students that hung | {len(outcome.hangs)} |",
        f"| students that ended unexpectedly | {len(outcome.ends)} |",
        f"| objects left in shared memory | {len(outcome.left_behind)} |",
        f"| regions of ended students that teachers still hold | {outcome.regions_held} |",
        "",
        "| fault | times |",
        "| --- | --- |",
        *(f"| {name} | {times} |" for name, times in outcome.faults.items()),
        *(f"| not injected: {reason} | 0 |" for reason in outcome.left_out),
        "",
        "| process that ran throughout | memory at the end | memory growth | descriptor growth | thread growth |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {growth.name} | {growth.rss_bytes / 2**20:.0f} MiB | {growth.rss_growth_bytes / 2**20:+.1f} MiB | "
            f"{growth.descriptor_growth:+d} | {growth.thread_growth:+d} |"
            for growth in outcome.growths
        ),
    ]
    return "\n".join(lines)


def write_report(page: Path, outcome: Outcome) -> None:
    """Replace what stands between the markers of `page`."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: the lines {BEGIN!r} and {END!r} say where the figures go, and are not there")
    page.write_text(f"{before}{BEGIN}\n\n{text_of(outcome)}\n\n{END}{after}")
