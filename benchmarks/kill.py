"""What a student notices when one of four teachers gets SIGKILL in the middle of an epoch.

`after_kill` is the throughput in the five seconds after the kill, divided by three quarters of the throughput before
it. Each batch must arrive once, in order, with its own labels. The teachers sleep 20 ms per batch.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._harness import Goal, Options, Spread, main, note
from benchmarks._load import ROWS
from benchmarks._models import label_of
from edl.distill import DistillReader
from edl.testing import LocalTeacher

GOALS = [Goal("after_kill", 0.95)]
_TEACHERS = 4
_SLEEP_S = 0.020
_LIVE_TIMEOUT_S = 30.0
_RESENT_WITHIN_S = 1.0


class Student:
    """An endless epoch in which every batch is checked."""

    def __init__(self, reader: DistillReader) -> None:
        self._batches = enumerate(reader())
        self.delivered: dict[int, tuple[float, int]] = {}
        """First id of a batch -> when it arrived, and the number of the teacher that labelled it."""

    def take(self, until: float) -> int:
        """Take batches until `until`, and return their number.

        Raises:
            AssertionError: A batch is missing, repeated, out of order, or has another batch's labels.
        """
        for taken, (number, (ids, labels)) in enumerate(self._batches, 1):
            now = time.perf_counter()
            wanted = np.arange(number * ROWS, (number + 1) * ROWS)
            assert (ids[:, 0] == wanted).all(), f"batch {number} has ids from {ids[0, 0]} to {ids[-1, 0]}"
            assert (labels[:, 0] == label_of(wanted)).all(), f"batch {number} has labels of other rows"
            self.delivered[int(ids[0, 0])] = (now, int(labels[0, 1]))
            if now >= until:
                return taken
        raise AssertionError("the endless epoch ended")


def source() -> Iterator[tuple[Any]]:
    """Yield batches of consecutive ids."""
    for number in itertools.count():
        yield (np.arange(number * ROWS, (number + 1) * ROWS, dtype=np.int64).reshape(-1, 1),)


def measure(options: Options) -> dict[str, list[float]]:
    """Return the ratio of every round. In each round, a teacher is killed and then replaced."""
    seconds = 1.0 if options.quick else 5.0
    ratios, resent_s = [], []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        discovery = f"sqlite:///{folder}/discovery.sqlite"
        numbers = itertools.count()

        def start() -> tuple[int, LocalTeacher]:
            number = next(numbers)
            log = str(folder / f"teacher-{number}")
            teacher = LocalTeacher(
                "benchmarks._models:Sleeper",
                service="teachers",
                discovery=discovery,
                serve={"max-batch": ROWS},
                number=number,
                seconds=_SLEEP_S,
                log=log,
            )
            return number, stack.enter_context(teacher)

        teachers = [start() for _ in range(_TEACHERS)]
        reader = DistillReader(ins=["id"], predicts=["label"])
        reader.set_dynamic_teacher(discovery, "teachers").set_batch_generator(source)
        stack.callback(reader.close)
        student = Student(reader)
        for _ in range(options.repeats):
            _take_until_live(student, reader)
            begin = time.perf_counter()
            before = student.take(begin + seconds)
            number, victim = teachers.pop(0)
            killed_at = time.perf_counter()
            victim.kill()
            after = student.take(killed_at + seconds)
            ratios.append(after / seconds / (0.75 * before / (killed_at - begin)))
            found = _resent(student, number, folder / f"teacher-{number}", killed_at)
            resent_s.append(min(found) if found else float("nan"))
            teachers.append(start())
    slowest = max(resent_s)
    answered_s = Spread.of(resent_s)
    note(f"Another teacher answered the first of the dead teacher's batches after {answered_s} s (goal: below 1 s).")
    note(f"None of the {len(student.delivered):,} batches was lost, repeated, out of order or wrongly labelled.\n")
    if not slowest < _RESENT_WITHIN_S:
        note("**The first resent answer came too late.**\n")
    return {"after_kill": ratios}


def _take_until_live(student: Student, reader: DistillReader) -> None:
    deadline = time.perf_counter() + _LIVE_TIMEOUT_S
    while reader.stats().teachers_live < _TEACHERS:
        if time.perf_counter() > deadline:
            raise RuntimeError(f"not {_TEACHERS} live teachers within {_LIVE_TIMEOUT_S} s: {reader.stats()}")
        student.take(time.perf_counter() + 0.2)
    student.take(time.perf_counter() + 1.0)


def _resent(student: Student, number: int, log: Path, killed_at: float) -> list[float]:
    """Return when, after the kill, batches arrived that teacher `number` had begun and another teacher labelled."""
    begun = [int(line) for line in log.read_text().splitlines() if line]
    came = [student.delivered[first] for first in begun if first in student.delivered]
    return [at - killed_at for at, labeller in came if labeller != number and at >= killed_at]


if __name__ == "__main__":
    main("kill", measure, GOALS, __doc__)
