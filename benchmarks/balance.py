"""How long it takes to divide 10,000 teachers among 1,000 students, or to adapt when a teacher joins or is lost.

Each student requests 10 to 20 teachers. Figures are seconds on one core.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks._harness import Goal, Options, Spread, main, note
from edl.discovery.balance import balance

GOALS = [Goal("assign_s", 1.0, "at most"), Goal("join_s", 1.0, "at most"), Goal("loss_s", 1.0, "at most")]
_TEACHERS, _STUDENTS = 10_000, 1_000
_NEW = "joined"

Links = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Cluster:
    """Teachers and students, whose capacities and wants cycle through the given values."""

    name: str
    capacities: tuple[float, ...]
    wants: tuple[int, ...]
    teachers: int = _TEACHERS
    students: int = _STUDENTS

    def capacity_of(self) -> dict[str, float]:
        return {f"teacher-{n}": self.capacities[n % len(self.capacities)] for n in range(self.teachers)}

    def want_of(self) -> dict[str, int]:
        return {f"student-{n}": self.wants[n % len(self.wants)] for n in range(self.students)}


MAIN = Cluster("wants of 10 to 20", (1.0,), tuple(range(10, 21)))
OTHERS = [
    Cluster("capacities of 1, 2, 4 and 8, wants of 20", (1.0, 2.0, 4.0, 8.0), (20,)),
    Cluster("wants of 200: 20 students share a teacher", (1.0,), (200,)),
    Cluster("100 teachers, wants of 20: 200 students share one", (1.0,), (20,), teachers=100),
]


@dataclass(frozen=True)
class Figures:
    """The figures of one round: seconds, links that moved, and links that had to move."""

    assign_s: float
    join_s: float
    loss_s: float
    join_moved: tuple[int, int]
    loss_moved: tuple[int, int]


def measure(options: Options) -> dict[str, list[float]]:
    """Return the seconds of each round."""
    rounds = [play(MAIN, seed) for seed in range(options.repeats)]
    _tell(MAIN, rounds)
    for cluster in [] if options.quick else OTHERS:
        _tell(cluster, [play(cluster, seed) for seed in range(options.repeats)])
    note("")
    return {key: [getattr(result, key) for result in rounds] for key in ("assign_s", "join_s", "loss_s")}


def play(cluster: Cluster, seed: int) -> Figures:
    """Play one round. `seed` chooses the teacher that is lost."""
    teachers, students = cluster.capacity_of(), cluster.want_of()
    first, assign_s = _timed(lambda: balance(teachers, students, {}))
    grown = {**teachers, _NEW: max(cluster.capacities)}
    joined, join_s = _timed(lambda: balance(grown, students, first))
    lost = random.Random(seed).choice([teacher for linked in first.values() for teacher in linked])
    rest = {teacher: capacity for teacher, capacity in teachers.items() if teacher != lost}
    after, loss_s = _timed(lambda: balance(rest, students, first))
    join_moved = _moved(first, joined), _load(joined, _NEW)
    loss_moved = _moved(first, after), _load(first, lost)
    return Figures(assign_s, join_s, loss_s, join_moved, loss_moved)


def _timed(work: Callable[[], dict[str, tuple[str, ...]]]) -> tuple[Links, float]:
    begin = time.perf_counter()
    links = work()
    return links, time.perf_counter() - begin


def _moved(before: Links, after: Links) -> int:
    return sum(len(set(linked) - set(before[student])) for student, linked in after.items())


def _load(links: Links, teacher: str) -> int:
    return sum(teacher in linked for linked in links.values())


def _tell(cluster: Cluster, rounds: list[Figures]) -> None:
    seconds = ", ".join(
        f"{key} {Spread.of([getattr(result, f'{key}_s') for result in rounds])} s" for key in ("assign", "join", "loss")
    )
    join = " and ".join(f"{moved} of {needed}" for moved, needed in sorted({result.join_moved for result in rounds}))
    loss = " and ".join(f"{moved} of {needed}" for moved, needed in sorted({result.loss_moved for result in rounds}))
    note(f"- {cluster.name}: {seconds}; links moved, of those that had to: {join} by the join, {loss} by the loss.")


if __name__ == "__main__":
    main("balance", measure, GOALS, __doc__)
