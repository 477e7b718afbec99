"""The decisions of a balance group, without a store."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.discovery.balance.rules import (
    GroupKeys,
    choose_teachers,
    pack_limit,
    pack_links,
    plan_links,
    unpack_limit,
    unpack_links,
)
from edl.discovery.keys import MAX_VALUE_BYTES, check_key, check_value
from edl.discovery.registry import Instance
from edl.discovery.store import Entry
from edl.errors import SettingsError

KEYS = GroupKeys("resnet")
names = st.frozensets(st.sampled_from([f"t{number}" for number in range(12)]))


def teachers(ids: frozenset[str] | list[str]) -> list[Instance]:
    return [Instance("resnet", name, "127.0.0.1", 8000) for name in sorted(ids)]


def listed(**limits: int) -> list[Entry]:
    return [Entry(KEYS.student(name), pack_limit(limit), 1) for name, limit in limits.items()]


# A member


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


# The leader


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


def test_larger_teacher_has_more_students() -> None:
    ready = [Instance("resnet", "big", "h", 1, capacity=3.0), Instance("resnet", "small", "h", 2)]
    links = plan_links(KEYS, ready, listed(a=1, b=1, c=1, d=1), [], {}).links
    assert Counter(name for (name,) in links.values()) == {"big": 3, "small": 1}


def test_too_large_links_are_left_out() -> None:
    ready = teachers([f"{number:0200}" for number in range(2000)])
    todo = plan_links(KEYS, ready, listed(large=1500, small=3), [], {})
    assert list(todo.writes) == [KEYS.links_of("small")]
    assert "1500 teachers do not fit" in todo.refused[KEYS.links_of("large")]
    for value in todo.writes.values():
        assert len(check_value(value)) <= MAX_VALUE_BYTES


# What is written


@settings(max_examples=40)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=25))
def test_every_name_is_one_part_of_a_key(student: str) -> None:
    for key in (KEYS.student(student), KEYS.links_of(student)):
        check_key(key)
        assert KEYS.student_in(key) == student
        assert key.count("/") == 3


@pytest.mark.parametrize("student", ["", "x" * 101, "\ud800", 7])
def test_impossible_name_is_refused(student: str) -> None:
    with pytest.raises(SettingsError, match="student_id"):
        KEYS.student(student)


NONSENSE = [b"[" * 100_000, b'{"limit": true, "teachers": [1]}', b'{"limit": 1e9}', b'{"limit": 0, "teachers": {}}']


@settings(max_examples=40)
@given(st.binary(max_size=40) | st.sampled_from(NONSENSE))
def test_senseless_bytes_are_a_value_error(value: bytes) -> None:
    for unpack in (unpack_limit, unpack_links):
        with pytest.raises(ValueError):
            unpack(value)
