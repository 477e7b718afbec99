"""Which teachers each student talks to, and the decisions of a balance group, without a store."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edl.discovery import Instance
from edl.discovery.balance import balance
from edl.discovery.group import (
    GroupKeys,
    choose_teachers,
    pack_limit,
    pack_links,
    plan_links,
    unpack_limit,
    unpack_links,
)
from edl.discovery.store import MAX_VALUE_BYTES, Entry, check_value

Links = Mapping[str, tuple[str, ...]]

# Prices of these are exact in binary, so that a tie in the tests is a tie in the program.
CAPACITIES = (0.5, 1.0, 2.0, 4.0, 64.0)


@dataclass(frozen=True)
class Case:
    """What `balance` is asked."""

    teachers: dict[str, float]
    students: dict[str, int]
    previous: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def answer(self) -> dict[str, tuple[str, ...]]:
        return balance(self.teachers, self.students, self.previous)

    def degree(self, student: str) -> int:
        return min(self.students[student], len(self.teachers))

    def loads(self, links: Links) -> Counter[str]:
        loads = Counter(dict.fromkeys(self.teachers, 0))
        loads.update(itertools.chain.from_iterable(links.values()))
        return loads

    def unevenness(self, links: Links) -> Fraction:
        return sum((Fraction(n * n) / Fraction(self.teachers[t]) for t, n in self.loads(links).items()), Fraction())

    def kept(self, links: Links) -> int:
        return sum(len(set(teachers) & set(self.previous.get(student, ()))) for student, teachers in links.items())


@st.composite
def cases(draw: st.DrawFn, most_teachers: int, most_students: int, capacities: tuple[float, ...] = CAPACITIES) -> Case:
    """Small cases, their previous links made up or the answer to an earlier case from which some members changed."""
    names = [f"t{number}" for number in range(most_teachers)]
    pool = st.sampled_from(draw(st.sampled_from([capacities[:1], capacities[-2:], capacities])))
    members = st.dictionaries(st.sampled_from(names), pool, max_size=most_teachers)
    wants = st.integers(1, most_teachers + 1)
    pupils = st.dictionaries(
        st.sampled_from([f"s{number}" for number in range(most_students)]), wants, max_size=most_students
    )
    case = Case(draw(members), draw(pupils))
    if draw(st.booleans()):
        subsets = st.lists(st.sampled_from([*names, "gone"]), unique=True).map(tuple)
        return replace(case, previous=draw(st.fixed_dictionaries(dict.fromkeys([*case.students, "gone"], subsets))))
    before = Case({**case.teachers, **draw(members)}, {**case.students, **draw(pupils)})
    for kind in (before.teachers, before.students):
        for name in draw(st.lists(st.sampled_from(sorted(kind)), max_size=2)) if kind else ():
            kind.pop(name, None)
    return replace(case, previous=before.answer())


def test_capacities_of_any_size_are_balanced() -> None:
    students = {f"s{number}": 1 for number in range(9)}
    case = Case({"tiny": 5e-324, "small": 1e-300, "huge": 1.7e308}, students)
    assert case.loads(case.answer()) == {"tiny": 0, "small": 0, "huge": 9}
    case = Case({"big": 2.0, "small": 1.0}, students)
    assert case.loads(case.answer()) == {"big": 6, "small": 3}
    case = Case({"a": 0.35, "b": 0.35}, dict.fromkeys("xyz", 1))  # 3 / 0.35 * 0.35 is less than 3 in floating point
    assert sorted(case.loads(case.answer()).values()) == [1, 2]


def by_brute_force(case: Case) -> tuple[Fraction, int]:
    """The least unevenness of all possible links, and the most previous links that one so even can keep."""
    students, teachers = sorted(case.students), sorted(case.teachers)
    best = None
    for choice in itertools.product(*(itertools.combinations(teachers, case.degree(name)) for name in students)):
        links = dict(zip(students, choice, strict=True))
        found = (case.unevenness(links), -case.kept(links))
        best = found if best is None else min(best, found)
    assert best is not None
    return best[0], -best[1]


@given(cases(4, 4))
@settings(max_examples=50)
# Two students take all, the third has a choice: a fair load must not count on more than it can give.
@example(Case({"t0": 9.0, "t1": 7.0, "t2": 5.0}, {"a": 3, "b": 3, "c": 3, "d": 1}, {"d": ("t1", "t2")}))
# Large and small teachers tie for the last link: nothing is lost yet that would justify to treat them apart.
@example(
    Case(
        {"t0": 1.0, "t1": 1.0, "t2": 3.0, "t3": 1.0, "t4": 3.0},
        {"a": 3, "b": 1},
        {"a": ("t0", "t2", "t3"), "b": ("t0", "t4")},
    )
)
# Somebody's new link has to make room, rather than a link that was there before.
@example(Case({"t0": 1.0, "t1": 3.0, "t2": 1.0}, {"a": 1, "b": 2, "c": 2}, {"b": ("t2",), "c": ("t1",)}))
# The load above the fair minimum has to pass from one teacher to another.
@example(
    Case(
        {"t0": 3.0, "t1": 3.0, "t2": 5.0, "t3": 3.0},
        {"a": 1, "b": 1},
        {"a": ("t1", "t3"), "b": ("t0", "t2")},
    )
)
# The student that lost a teacher already has the one with room: somebody else must move for it, once.
@example(Case({"t0": 1.0, "t1": 1.0}, {"a": 1, "b": 2, "c": 1}, {"a": ("t0",), "b": ("t0", "t2"), "c": ("t0",)}))
# Rare cases, in which a step of the search that costs too much would be the first to be found.
@example(
    Case(
        {"t0": 0.5, "t1": 0.5, "t2": 0.5, "t3": 64.0},
        {"a": 2, "b": 1, "c": 2, "d": 3},
        {"a": ("t1", "t2"), "b": ("t1",), "c": ("t1", "t2"), "d": ("t3",)},
    )
)
@example(
    Case(
        {"t0": 1.0, "t1": 64.0, "t2": 1.0, "t3": 64.0},
        {"a": 3, "b": 2, "c": 2, "d": 3, "e": 3},
        {"a": ("t1", "t2"), "b": ("t1",), "c": ("t1", "t2"), "d": ("t1", "t2"), "e": ("t1",)},
    )
)
def test_change_moves_the_fewest_links(case: Case) -> None:
    answer = case.answer()
    assert (case.unevenness(answer), case.kept(answer)) == by_brute_force(case)


@settings(max_examples=40)
@given(cases(8, 8), st.randoms(use_true_random=False))
def test_nothing_moves_when_nothing_changes(case: Case, chance: random.Random) -> None:
    """And the order of what is given does not matter."""
    answer = case.answer()
    assert replace(case, previous=answer).answer() == answer

    def shuffled(items: Mapping[str, object]) -> dict[str, object]:
        return dict(chance.sample(sorted(items.items()), len(items)))

    previous = {student: chance.sample(teachers, len(teachers)) for student, teachers in case.previous.items()}
    again = balance(shuffled(case.teachers), shuffled(case.students), shuffled(previous))  # type: ignore[arg-type]
    assert again == answer


KEYS = GroupKeys("resnet")

names = st.frozensets(st.sampled_from([f"t{number}" for number in range(12)]))


def teachers(ids: frozenset[str] | list[str]) -> list[Instance]:
    return [Instance("resnet", name, "127.0.0.1", 8000) for name in sorted(ids)]


def listed(**limits: int) -> list[Entry]:
    return [Entry(KEYS.student(name), pack_limit(limit), 1) for name, limit in limits.items()]


@settings(max_examples=40)
@given(names, st.integers(1, 14), st.none() | names, names)
def test_student_gets_up_to_its_limit(
    ready: frozenset[str], limit: int, links: frozenset[str] | None, last: frozenset[str]
) -> None:
    choice = choose_teachers("s", limit, teachers(ready), links, last)
    assert choice.ids <= ready
    assert bool(choice.ids) == bool(ready)
    if len(ready) <= limit:
        assert choice.ids == ready
    elif not choice.coordinated:
        assert len(choice.ids) == limit
        assert len(choice.ids & last) == min(limit, len(ready & last)), "it stays with those it has"
    else:
        assert links is not None
        assert choice.ids == links & ready


def test_unlinked_students_spread_steadily() -> None:
    ready = teachers([f"t{number}" for number in range(10)])
    chosen = Counter(name for n in range(200) for name in choose_teachers(f"s{n}", 2, ready, None, ()).ids)
    assert len(chosen) == 10
    assert max(chosen.values()) < 3 * min(chosen.values())
    assert choose_teachers("s", 2, ready, None, ()) == choose_teachers("s", 2, ready[::-1], None, ())


def test_only_what_changes_is_written() -> None:
    ready = teachers(["a", "b", "c", "d"])
    first = plan_links(KEYS, ready, listed(x=2, y=2), [], {})
    assert set(first.writes) == {KEYS.links_of("x"), KEYS.links_of("y")}
    stored = [Entry(key, value, 7) for key, value in first.writes.items()]
    again = plan_links(KEYS, ready, listed(x=2, y=2), stored, {})
    assert again.links == first.links
    assert (dict(again.writes), again.deletes, dict(again.refused)) == ({}, (), {})


def test_unlimited_student_needs_no_entry() -> None:
    few, more = teachers(["a", "b"]), teachers(["a", "b", "c", "d"])
    stored = [Entry(KEYS.links_of("x"), pack_links(["a"]), 3)]
    fits = plan_links(KEYS, few, listed(x=2, y=2), stored, {})
    assert fits.deletes == (KEYS.links_of("x"),)
    assert not fits.writes
    assert fits.links == {"x": ("a", "b"), "y": ("a", "b")}
    grown = plan_links(KEYS, more, listed(x=2, y=2), [], fits.links)
    kept = sum(len({"a", "b"} & set(linked)) for linked in grown.links.values())
    assert kept == 2, "each of the two new teachers takes one link, the others stay"


def test_too_large_links_are_left_out() -> None:
    ready = teachers([f"{number:0200}" for number in range(2000)])
    todo = plan_links(KEYS, ready, listed(large=1500, small=3), [], {})
    assert list(todo.writes) == [KEYS.links_of("small")]
    assert "1500 teachers do not fit" in todo.refused[KEYS.links_of("large")]
    for value in todo.writes.values():
        assert len(check_value(value)) <= MAX_VALUE_BYTES


NONSENSE = [b"[" * 100_000, b'{"limit": true, "teachers": [1]}', b'{"limit": 1e9}', b'{"limit": 0, "teachers": {}}']


@settings(max_examples=40)
@given(st.binary(max_size=40) | st.sampled_from(NONSENSE))
def test_senseless_bytes_are_a_value_error(value: bytes) -> None:
    for unpack in (unpack_limit, unpack_links):
        with pytest.raises(ValueError):
            unpack(value)
