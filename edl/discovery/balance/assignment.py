"""Which teachers a student talks to. Pure: the same inputs, in any order, give the same answer.

What holds for every answer of `balance`:

1. **Wants.** A student has exactly min(its want, the fan-out limit, the number of teachers) different teachers, so
   no student starves while there is a teacher, no student is favoured over another, and a teacher has no students
   only when every student has as many teachers as it wants. Students share teachers as far as that takes. As long as
   the teachers are no more than any limit, all students talk to all.
2. **Loads.** A teacher's load is the number of students linked to it, its relative load that number divided by its
   capacity. Among all links that satisfy 1, these have the least sum of load²/capacity. In other words: no link can be
   moved, directly or by a chain of other links, so that the relative loads of the teacher that loses a link and of the
   teacher that gains it come closer together: (2·load - 1)/capacity of the loser is at most (2·load + 1)/capacity of
   the gainer. With equal capacities loads differ by 1 at most.
3. **Moves.** Among all links that satisfy 1 and 2, the answer keeps as many previous links as possible. This is
   exact, for any change: several members coming and going at once, other capacities, other wants.

Time grows with the number of links, not with the number of possible links.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from edl.discovery.balance.fair_loads import LoadLevel, fair_levels
from edl.discovery.balance.fewest_moves import link
from edl.errors import SettingsError

__all__ = ["DEFAULT_FAN_OUT", "balance"]

DEFAULT_FAN_OUT = 32
"""Teachers that a student talks to at most, unless it says otherwise."""


def balance(
    teachers: Mapping[str, float],
    students: Mapping[str, int | None],
    previous: Mapping[str, Iterable[str]] | None = None,
    fan_out: int = DEFAULT_FAN_OUT,
) -> dict[str, tuple[str, ...]]:
    """Give every student its teachers.

    Args:
        teachers: the capacities of live teachers by id; relative weights, positive and finite.
        students: how many teachers a student wants at most, by id; None for as many as it may have.
        previous: the teachers that students had, by id. Members that are gone may still be in it.
        fan_out: no student has more teachers than this.

    Returns:
        The ids of teachers, sorted, by student; a student's entry is empty only if there is no teacher.

    Raises:
        SettingsError: a capacity, want or limit is not a positive number.
    """
    if fan_out < 1:
        raise SettingsError(f"fan_out={fan_out!r}: must be at least 1")
    for teacher, capacity in teachers.items():
        if not (math.isfinite(capacity) and capacity > 0):
            raise SettingsError(f"teacher {teacher!r}: capacity={capacity!r} must be positive and finite")
    for student, want in students.items():
        if want is not None and want < 1:
            raise SettingsError(f"student {student!r}: want={want!r} must be at least 1, or None")
    student_ids = sorted(students)
    if not teachers or not students:
        return dict.fromkeys(student_ids, ())
    limit = min(fan_out, len(teachers))
    wants = [limit if (want := students[student]) is None else min(want, limit) for student in student_ids]
    teacher_ids = sorted(teachers, key=lambda teacher: (-teachers[teacher], teacher))
    places = {teacher: place for place, teacher in enumerate(teacher_ids)}
    before = [
        sorted({places[teacher] for teacher in (previous or {}).get(student, ()) if teacher in places})
        for student in student_ids
    ]
    capacities = np.array([teachers[teacher] for teacher in teacher_ids], dtype=np.float64)
    takers = len(wants) - np.cumsum(np.bincount(wants, minlength=len(teacher_ids)))[: len(teacher_ids)]
    links: list[list[int]] = [[] for _ in wants]
    for level in fair_levels(capacities, takers):
        _link_level(level, wants, before, links)
    return {
        student: tuple(sorted(teacher_ids[place] for place in linked))
        for student, linked in zip(student_ids, links, strict=True)
    }


def _link_level(level: LoadLevel, wants: list[int], before: list[list[int]], links: list[list[int]]) -> None:
    """Add the links to a level's teachers: what students want beyond the teachers of earlier levels."""
    size = level.stop - level.start
    choosing: list[int] = []
    full = 0
    for student, want in enumerate(wants):
        if want >= level.stop:
            links[student].extend(range(level.start, level.stop))
            full += 1
        elif want > level.start:
            choosing.append(student)
    chosen = link(
        wants=[wants[student] - level.start for student in choosing],
        low=[max(int(load) - full, 0) for load in level.low],
        high=[max(int(load) - full, 0) for load in level.high],
        previous=[
            [place - level.start for place in before[student] if 0 <= place - level.start < size]
            for student in choosing
        ],
    )
    for student, places in zip(choosing, chosen, strict=True):
        links[student].extend(level.start + place for place in places)
