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
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edl.discovery.balance.fewest_moves import link
from edl.errors import SettingsError

__all__ = ["DEFAULT_FAN_OUT", "LoadLevel", "balance", "fair_levels"]

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

DEFAULT_FAN_OUT = 32
"""Teachers that a student talks to at most, unless it says otherwise."""
# The largest ratio of two capacities that prices can still tell apart without overflow.
_SMALLEST_CAPACITY = 1e-290


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


# --- How many students a teacher should have ---
#
# Which loads are possible at all is Gale's and Ryser's theorem: students that want d_s different teachers can give the
# teachers exactly the loads whose k largest sum to at most `takers[0] + … + takers[k-1]`, where `takers[k]` counts the
# students that want more than k teachers. These loads form a base polytope, on which the most even loads (least sum of
# load²/capacity) are found by splitting at the most violated bound: H. Groenevelt, "Two algorithms for maximizing a
# separable concave function over a polymatroid feasible region", European J. of Operational Research 54 (1991).
#
# Read as prices: a teacher's next link costs (2·load + 1)/capacity, the step in load²/capacity. Within a `LoadLevel`
# all teachers stop at the same price. Where students want more teachers than there are large teachers, the bound
# separates levels: every student takes all it can of an earlier level before it takes anything of a later level.


@dataclass(frozen=True)
class LoadLevel:
    """Teachers `start` to `stop` (in order of falling capacity), with loads from `low` to `high`.

    `high - low` is 0 or 1. Fair are all loads within these bounds whose sum is what the students take here, as far as
    links between different pairs can realize them.
    """

    start: int
    stop: int
    low: Ints
    high: Ints


def fair_levels(capacities: Floats, takers: Ints) -> list[LoadLevel]:
    """Return the levels, in order; every teacher is in a level.

    Args:
        capacities: of n >= 1 teachers, positive, falling.
        takers: takers[k] students want more than k teachers; n entries, never rising.
    """
    _, exponent = np.frexp(capacities[0])
    capacities = np.maximum(np.ldexp(capacities, -int(exponent)), _SMALLEST_CAPACITY)
    pending, levels = [(0, len(capacities))], []
    while pending:
        start, stop = pending.pop()
        part, takes = capacities[start:stop], takers[start:stop]
        low, high = _bounds(part, _price(part, takes), int(takes[0]))
        split = _violated(part, takes, low, high)
        if split:
            pending += [(start + split, stop), (start, start + split)]
        else:
            levels.append(LoadLevel(start, stop, low, high))
    return levels


def _bounds(capacities: Floats, price: float, most: int) -> tuple[Ints, Ints]:
    """Count links that cost less than `price`, and at most `price`, by teacher; never above `most`."""
    high = np.minimum((price * capacities + 1) / 2, most + 1.0).astype(np.int64)
    # The division rounds: make the count agree with the prices as they are computed everywhere else.
    high -= (2 * high - 1) / capacities > price
    high += (2 * high + 1) / capacities <= price
    low = high - ((2 * high - 1) / capacities == price)
    return np.minimum(low, most), np.minimum(high, most)


def _price(capacities: Floats, takers: Ints) -> float:
    """Return the price of the dearest link when links are handed out one by one, always to the cheapest teacher."""
    most, total = int(takers[0]), int(takers.sum())
    if total == 0:
        return 0.0
    below, enough = 0.0, (2 * most - 1) / float(capacities[-1])
    while below < (middle := (below + enough) / 2) < enough:
        if int(_bounds(capacities, middle, most)[1].sum()) >= total:
            enough = middle
        else:
            below = middle
    return enough


def _violated(capacities: Floats, takers: Ints, low: Ints, high: Ints) -> int:
    """Return the number of teachers from the front that got most beyond what students can give them; 0 if none did.

    Judged are the flattest of all loads within the bounds, so that the front, when it got too much, got it in all of
    them. Only borders between capacities need a look: within a run of equal capacities the excess, with its loads
    in falling order, is nowhere larger than at both ends.
    """
    (borders,) = np.nonzero(capacities[1:] != capacities[:-1])
    if not len(borders):
        return 0
    loads = low.copy()
    (optional,) = np.nonzero(high > low)
    loads[optional[len(optional) - (int(takers.sum()) - int(low.sum())) :]] += 1
    excess = np.cumsum(loads - takers)[borders]
    worst = int(np.argmax(excess))
    return int(borders[worst]) + 1 if excess[worst] > 0 else 0
