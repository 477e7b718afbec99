"""Who is linked to whom, once the numbers are given: as many of the previous links as possible. Pure.

A minimum-cost flow from students to teachers, a unit for a link: a previous link is free, a new one costs 1, so the
cheapest flow keeps the most. The method is the primal-dual (Ford and Fulkerson, "Flows in Networks", 1962): each
node has a level, the price of reaching it, and flow moves along steps whose cost is exactly the difference of two
levels. When no such path is left, everything out of reach rises by 1.

Any student can be linked to any teacher, but all new links cost the same, so a search lists only the exceptions: it
takes time in proportion to the number of links, not of pairs.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

__all__ = ["link"]

# Marks of a node that no search reached, and of one that a path has used up; others are distances.
_UNSEEN, _SPENT = -1, -2


def link(
    wants: Sequence[int], low: Sequence[int], high: Sequence[int], previous: Sequence[Sequence[int]]
) -> list[set[int]]:
    """Give student s exactly `wants[s]` different teachers, and teacher t between `low[t]` and `high[t]` students.

    Args:
        wants: a number from 0 to the number of teachers by student.
        low: the least load of every teacher, not negative.
        high: the largest load of every teacher; `high[t] - low[t]` is 0 or 1.
        previous: the teachers that students had, by their place in `low`.

    Returns:
        The teachers, by student. No other answer holds more of `previous`.

    Raises:
        ValueError: there are no such links.
    """
    return _Flow(wants, low, high, previous).solve()


class _Flow:
    """Nodes are students, then teachers, then a source that hands out `spare`, links above teachers' lower bounds."""

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
        # Spreads what is otherwise equal; always the same, so that the answer is.
        self.chance = random.Random(0)
        if self.spare < 0:
            raise ValueError(f"{sum(wants)} links cannot give the teachers {sum(low)}")

    def solve(self) -> list[set[int]]:
        self._keep()
        while self._search():
            pass
        self._rise()
        self._fill()
        while any(self.need):
            # A level counts the new links on a path, which passes each student once.
            if not self._search() and self._rise() > self.students + 1:
                raise ValueError("no links give every student and teacher its number")
        return self.links

    # Greedy passes: they find nearly all links, along paths that the search would have found too.

    def _has_room(self, teacher: int) -> bool:
        load = len(self.holders[teacher])
        return load < self.low[teacher] or (load < self.high[teacher] and self.spare > 0)

    def _add(self, student: int, teacher: int) -> None:
        """Add a link of a student that needs it to a teacher that has room."""
        self.spare -= len(self.holders[teacher]) >= self.low[teacher]
        self.need[student] -= 1
        self.links[student].add(teacher)
        self.holders[teacher].add(student)

    def _keep(self) -> None:
        """Keep previous links while there is room; a large change takes a little from all, in no order of ids."""
        loads = Counter(teacher for before in self.previous for teacher in before)
        pairs = []
        for student, before in enumerate(self.previous):
            kept = list(before)
            if len(kept) > self.need[student]:
                # A student that has too many lets go of the teachers that have too many.
                kept.sort(key=lambda teacher: (loads[teacher] - self.high[teacher], self.chance.random()))
                loads.subtract(kept[self.need[student] :])
                del kept[self.need[student] :]
            pairs += [(student, teacher) for teacher in kept]
        for student, teacher in sorted(pairs, key=lambda _: self.chance.random()):
            if self.need[student] and self._has_room(teacher):
                self._add(student, teacher)

    def _fill(self) -> None:
        """Add new links where most is missing, on both sides: from nothing, this never gets stuck (Ryser).

        Among equals chance decides. Students with the same teachers would block each other at the next change.
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
        """Add links along shortest paths, many at once (Hopcroft and Karp); returns how many, 0 if there is no path.

        First nodes are marked with their distance from the students that need a link, as far as the nearest teacher
        with room. Then paths follow the rising marks, no two of them through the same student or teacher.
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
        """Sort teachers by what a step asks for: level and mark. `after_spare` is the mark behind the spare node."""
        self.pools: dict[tuple[int, int], deque[int]] = {}
        for node in range(self.students, self.spare_node):
            self.pools.setdefault((self.level[node], self.marks[node]), deque()).append(node)
        self.spare_steps = self._steps_of_spare(after_spare)

    def _is_goal(self, node: int) -> bool:
        return self.students <= node < self.spare_node and self._has_room(node - self.students)

    def _rise(self) -> int:
        """Raise what the last search, having found no path, did not reach; returns the highest level."""
        self.level = [level + (mark == _UNSEEN) for level, mark in zip(self.level, self.marks, strict=True)]
        return max(self.level)

    def _augment(self, student: int) -> bool:
        """Follow the marks, depth first, from a student that needs a link to a teacher that has room, and turn over."""
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
                # Other paths may pass here as well, and go on to other teachers.
                self.marks[node] = distance

    def _steps(self, node: int, mark: int) -> Iterator[int]:
        """Yield the nodes with this mark that a step leads to whose cost is the difference of the levels."""
        if node < self.students:
            return self._steps_of_student(node, mark)
        return self._steps_of_teacher(node, mark) if node < self.spare_node else self.spare_steps

    def _steps_of_student(self, student: int, mark: int) -> Iterator[int]:
        """Take a link: a previous link for nothing, or a new link for 1."""
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
        """Give up a link (a new link gives its 1 back), or ask for a spare link above the lower bound."""
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
