"""Decides which teachers a student talks to. The decision is pure: the same inputs, in any order, give the same answer.

Every answer from `balance` has these properties:

1. **Wants.** A student has exactly min(its want, the number of teachers) different teachers, so no student starves
   while a teacher is available, no student is favoured, and a teacher has no students only when every student has as
   many teachers as it wants. Students share teachers if necessary.
2. **Loads.** A teacher's load is the number of students linked to the teacher. Its relative load is its load divided by
   its capacity. Among all sets of links that have property 1, the answer has the least sum of load²/capacity. Moving a
   link from one teacher to another, directly or through a chain of other links, never brings the relative loads of the
   two teachers closer together. So (2·load - 1)/capacity of the teacher that would lose the link is at most (2·load +
   1)/capacity of the teacher that would gain the link. With equal capacities, loads differ by 1 at most.
3. **Moves.** Among all sets of links that have properties 1 and 2, the answer keeps as many previous links as possible.
   This is exact for any change, including when several members join and leave at once, or when capacities or wants
   change.

`fair_levels` finds the loads, and `link` finds the set of links that keeps as many previous links as possible. The
running time grows with the number of links, not with the number of possible links.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

# Marks of a node that no search reached, and of a node that a path has used up; other marks are distances.
_UNSEEN, _SPENT = -1, -2
# The smallest capacity relative to the largest one: with smaller capacities, prices would overflow.
_SMALLEST_CAPACITY = 1e-290


def balance(
    teachers: Mapping[str, float],
    students: Mapping[str, int],
    previous: Mapping[str, Iterable[str]],
) -> dict[str, tuple[str, ...]]:
    """Give every student its teachers.

    Args:
        teachers: The capacity of each live teacher, by id: a relative weight, positive and finite.
        students: The most teachers that each student wants, by student id; at least 1.
        previous: The ids of each student's previous teachers, by student id. May include departed students and
            teachers.

    Returns:
        The sorted ids of each student's teachers, by student id; an entry is empty only if there are no teachers.
    """
    student_ids = sorted(students)
    if not teachers or not students:
        return dict.fromkeys(student_ids, ())
    wants = [min(students[student], len(teachers)) for student in student_ids]
    teacher_ids = sorted(teachers, key=lambda teacher: (-teachers[teacher], teacher))
    places = {teacher: place for place, teacher in enumerate(teacher_ids)}
    before = [
        sorted({places[teacher] for teacher in previous.get(student, ()) if teacher in places})
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
    """Add links to a level's teachers for students that want more than earlier levels gave them."""
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
# all teachers stop at the same price. If students want more teachers than there are large teachers, the bound
# separates levels: every student takes all it can of an earlier level before it takes anything of a later level.


@dataclass(frozen=True)
class LoadLevel:
    """Teachers `start` to `stop` (by descending capacity), with loads from `low` to `high`.

    `high - low` is 0 or 1. Loads within these bounds are fair if they add up to the number of links that students take
    in this level, and if links that join each pair at most once can produce these loads.
    """

    start: int
    stop: int
    low: Ints
    high: Ints


def fair_levels(capacities: Floats, takers: Ints) -> list[LoadLevel]:
    """Return the levels, in order of descending capacity; every teacher is in exactly one level.

    `capacities` [n >= 1] are positive, in descending order. `takers[k]`, for k from 0 to n - 1, is the number of
    students that want more than k teachers, so it never rises with k.
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
    """Return, by teacher, how many links cost less than `price`, and how many at most `price`; up to `most` each."""
    high = np.minimum((price * capacities + 1) / 2, most + 1.0).astype(np.int64)
    # The division rounds: make the count agree with the prices as they are computed everywhere else.
    high -= (2 * high - 1) / capacities > price
    high += (2 * high + 1) / capacities <= price
    low = high - ((2 * high - 1) / capacities == price)
    return np.minimum(low, most), np.minimum(high, most)


def _price(capacities: Floats, takers: Ints) -> float:
    """Return the highest price of a link if each link goes to the teacher whose next link is cheapest."""
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
    """Return k if the first k teachers have the largest excess over what students can give them; 0 without excess.

    The function checks the most even loads within the bounds. If the first k teachers have too many links with these
    loads, they have too many links with any loads within the bounds. Only the borders between different capacities need
    checking: the loads in a group of teachers with equal capacities are compared in descending order, so the excess
    inside the group is never larger than at both of its ends.
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


# --- Which students a teacher has, given their number: keep as many previous links as possible ---
#
# A minimum-cost flow from students to teachers, one unit per link: a previous link is free, a new one costs 1, so the
# cheapest flow keeps the most. The method is the primal-dual (Ford and Fulkerson, "Flows in Networks", 1962): each
# node has a level, the price of reaching it, and flow moves along steps whose cost is exactly the difference of two
# levels. When no such path is left, everything out of reach rises by 1.
#
# Any student can be linked to any teacher, but all new links cost the same, so a search lists only the exceptions: it
# takes time in proportion to the number of links, not of pairs.


def link(
    wants: Sequence[int], low: Sequence[int], high: Sequence[int], previous: Sequence[Sequence[int]]
) -> list[set[int]]:
    """Give student s exactly `wants[s]` different teachers, and give teacher t from `low[t]` to `high[t]` students.

    Args:
        wants: How many teachers each student wants, from 0 to the number of teachers.
        low: The least load of every teacher, not negative.
        high: The largest load of every teacher; `high[t] - low[t]` is 0 or 1.
        previous: Each student's previous teachers, by their index in `low`.

    Returns:
        The teachers, by student. No other valid answer keeps more links from `previous`.

    Raises:
        ValueError: Such links do not exist.
    """
    return _Flow(wants, low, high, previous).solve()


class _Flow:
    """A flow; its nodes are students, then teachers, then a source of `spare` links above teachers' lower bounds."""

    def __init__(
        self, wants: Sequence[int], low: Sequence[int], high: Sequence[int], previous: Sequence[Sequence[int]]
    ) -> None:
        self.students = len(wants)
        self.teachers = len(low)
        self.spare_node = self.students + self.teachers
        self.low = list(low)
        self.high = list(high)
        self.previous = [dict.fromkeys(sorted(before)) for before in previous]
        self.links: list[set[int]] = [set() for _ in wants]
        self.holders: list[set[int]] = [set() for _ in low]
        self.need = list(wants)
        self.spare = sum(wants) - sum(low)
        self.level = [0] * (self.spare_node + 1)
        # Breaks ties; seeded, so that the answer is always the same.
        self.chance = random.Random(0)
        if self.spare < 0:
            raise ValueError(f"{sum(wants)} links are fewer than the teachers' minimum of {sum(low)}")

    def solve(self) -> list[set[int]]:
        self._keep()
        while self._search():
            pass
        self._rise()
        self._fill()
        while any(self.need):
            # A level counts the new links on a path, and a path passes each student once.
            if not self._search() and self._rise() > self.students + 1:
                raise ValueError("no links satisfy every student's and teacher's number")
        return self.links

    # Greedy passes: they find nearly all links, along paths that the search would have found too.

    def _has_room(self, teacher: int) -> bool:
        load = len(self.holders[teacher])
        return load < self.low[teacher] or (load < self.high[teacher] and self.spare > 0)

    def _add(self, student: int, teacher: int) -> None:
        self.spare -= len(self.holders[teacher]) >= self.low[teacher]
        self.need[student] -= 1
        self.links[student].add(teacher)
        self.holders[teacher].add(student)

    def _keep(self) -> None:
        """Keep previous links while there is room; in a large change, every student loses a few, whatever its id."""
        loads = Counter(teacher for before in self.previous for teacher in before)
        pairs = []
        for student, before in enumerate(self.previous):
            kept = list(before)
            if len(kept) > self.need[student]:
                # A student that has too many drops the teachers that have too many.
                kept.sort(key=lambda teacher: (loads[teacher] - self.high[teacher], self.chance.random()))
                loads.subtract(kept[self.need[student] :])
                del kept[self.need[student] :]
            pairs += [(student, teacher) for teacher in kept]
        for student, teacher in sorted(pairs, key=lambda _: self.chance.random()):
            if self.need[student] and self._has_room(teacher):
                self._add(student, teacher)

    def _fill(self) -> None:
        """Add links where students and teachers lack the most; always succeeds if there are no links yet (Ryser).

        Ties are broken at random. Otherwise, many students would have the same teachers, and would block each other at
        the next change.
        """
        aims, spare = self.low.copy(), self.spare
        for teacher in sorted(range(self.teachers), key=lambda teacher: (self.low[teacher], teacher)):
            if spare and len(self.holders[teacher]) <= self.low[teacher] < self.high[teacher]:
                aims[teacher] += 1
                spare -= 1
        gaps = [
            (len(holders) - aim, teacher) for teacher, (holders, aim) in enumerate(zip(self.holders, aims, strict=True))
        ]
        room = [(gap, self.chance.random(), teacher) for gap, teacher in gaps if gap < 0]
        heapq.heapify(room)
        for student in sorted(range(self.students), key=lambda student: (-self.need[student], student)):
            passed = []
            while room and self.need[student]:
                gap, _, teacher = heapq.heappop(room)
                if teacher not in self.links[student]:
                    self._add(student, teacher)
                    gap += 1
                if gap:
                    passed.append((gap, self.chance.random(), teacher))
            for item in passed:
                heapq.heappush(room, item)

    # The exact part: augmenting paths.

    def _search(self) -> int:
        """Add many links at once, along shortest paths (Hopcroft and Karp); return their number, 0 if no path is left.

        First, nodes are marked with their distance from the students that need a link, as far as the nearest teacher
        with room. Then paths follow the rising marks; no two paths pass through the same student or teacher.
        """
        self.marks = [_UNSEEN] * (self.spare_node + 1)
        wave = [student for student in range(self.students) if self.need[student]]
        for student in wave:
            self.marks[student] = 0
        self._prepare(_UNSEEN)
        distance = 0
        while wave and not any(map(self._is_goal, wave)):
            distance += 1
            following = []
            for node in wave:
                for after in self._steps(node, _UNSEEN):
                    self.marks[after] = distance
                    following.append(after)
            wave = following
        if not wave:
            return 0
        self._prepare(self.marks[self.spare_node] + 1)
        found = 0
        for student in range(self.students):
            while self.need[student] and self._augment(student):
                found += 1
        return found

    def _prepare(self, after_spare: int) -> None:
        """Group teachers by level and mark for the steps. `after_spare` is the mark of nodes after the spare node."""
        self.pools: dict[tuple[int, int], deque[int]] = {}
        for node in range(self.students, self.spare_node):
            self.pools.setdefault((self.level[node], self.marks[node]), deque()).append(node)
        self.spare_steps = self._steps_of_spare(after_spare)

    def _is_goal(self, node: int) -> bool:
        return self.students <= node < self.spare_node and self._has_room(node - self.students)

    def _rise(self) -> int:
        """Raise the nodes that the last search, which found no path, did not reach; return the highest level."""
        self.level = [level + (mark == _UNSEEN) for level, mark in zip(self.level, self.marks, strict=True)]
        return max(self.level)

    def _augment(self, student: int) -> bool:
        """Follow the marks, depth first, from a student that needs a link to a teacher with room; flip the links."""
        path, steps = [student], [self._steps(student, 1)]
        while steps:
            node = next(steps[-1], None)
            if node is None:
                steps.pop()
                path.pop()
                continue
            self.marks[node] = _SPENT
            path.append(node)
            if self._is_goal(node):
                self._turn_over(path)
                return True
            steps.append(self._steps(node, len(path)))
        return False

    def _turn_over(self, path: list[int]) -> None:
        last = path[-1] - self.students
        self.need[path[0]] -= 1
        self.spare -= len(self.holders[last]) >= self.low[last]
        for distance, (node, after) in enumerate(pairwise(path)):
            if node < self.students:
                self.links[node].add(after - self.students)
                self.holders[after - self.students].add(node)
            elif after < self.students:
                self.links[after].remove(node - self.students)
                self.holders[node - self.students].remove(after)
            elif node == self.spare_node:
                # Other paths may also pass here, to other teachers.
                self.marks[node] = distance

    def _steps(self, node: int, mark: int) -> Iterator[int]:
        """Yield the nodes with this mark that a step reaches at a cost equal to the difference of the two levels."""
        if node < self.students:
            return self._steps_of_student(node, mark)
        return self._steps_of_teacher(node, mark) if node < self.spare_node else self.spare_steps

    def _steps_of_student(self, student: int, mark: int) -> Iterator[int]:
        """Take a link: a previous link costs nothing, a new link costs 1."""
        links, before, level = self.links[student], self.previous[student], self.level[student]
        for teacher in before:
            node = self.students + teacher
            if teacher not in links and self.level[node] == level and self.marks[node] == mark:
                yield node
        pool = self.pools.get((level + 1, mark), deque())
        refused = 0
        while refused < len(pool):
            node = pool.pop()
            if self.marks[node] != mark:
                continue
            if (teacher := node - self.students) in links or teacher in before:
                pool.appendleft(node)
                refused += 1
            else:
                yield node
                refused = 0

    def _steps_of_teacher(self, node: int, mark: int) -> Iterator[int]:
        """Give up a link (for a new link, its cost of 1 is refunded), or ask for a spare link above the lower bound."""
        teacher, level, spare = node - self.students, self.level[node], self.spare_node
        one_more = len(self.holders[teacher]) == self.low[teacher] < self.high[teacher]
        if one_more and self.level[spare] == level and self.marks[spare] == mark:
            yield spare
        for student in sorted(self.holders[teacher]):
            refund = teacher not in self.previous[student]
            if self.level[student] == level - refund and self.marks[student] == mark:
                yield student

    def _steps_of_spare(self, mark: int) -> Iterator[int]:
        """Take a spare link back from a teacher that has spare links."""
        level = self.level[self.spare_node]
        for teacher in range(self.teachers):
            node = self.students + teacher
            if (
                len(self.holders[teacher]) > self.low[teacher]
                and self.level[node] == level
                and self.marks[node] == mark
            ):
                yield node
