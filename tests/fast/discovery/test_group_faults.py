"""Students that share teachers out while a store, a registry or another student fails, and how it ends for them."""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from edl.discovery import Registry, Snapshot, Store, open_registry, open_store
from edl.discovery.balance.group import BalanceGroup
from edl.errors import ClosedError, SettingsError
from tests.fast.discovery.conformance.backends import spoil_database
from tests.fast.discovery.conftest import SERVICE, Student, ids, join, shared_out, teacher, until

# When things fail


def test_without_store_teachers_are_kept(registry: Registry, tmp_path: Path, stack: ExitStack) -> None:
    """Without the store students keep their teachers say so and replace lost ones."""
    registrations = [stack.enter_context(registry.register(teacher(n))) for n in range(6)]
    path = tmp_path / "store.sqlite"
    store = stack.enter_context(open_store(f"sqlite:///{path}", timeout_s=1.0))
    students = [join(stack, registry, store, f"s{n}", want=2, ttl_s=4.0) for n in range(3)]
    until(lambda: shared_out(students, range(6), 2))
    before = [student.has for student in students]
    spoil_database(path)
    until(lambda: all("cannot agree" in student.now.stale for student in students))
    until(lambda: all(student.group.error for student in students))
    assert [student.has for student in students] == before
    for lost in before[0]:
        registrations[int(lost[1:])].close()
    until(lambda: len(students[0].has) == 2 and not students[0].has & before[0])
    assert [student.has for student in students[1:]] == before[1:]
    path.unlink()
    until(lambda: not any(student.group.error or student.now.stale for student in students))
    assert all(told.instances for student in students for told in student.told)


def test_unreachable_store_student_chooses(registry: Registry, tmp_path: Path, stack: ExitStack) -> None:
    """A student that never reached the store chooses for itself."""
    path = tmp_path / "store.sqlite"
    store = stack.enter_context(open_store(f"sqlite:///{path}", timeout_s=1.0))
    spoil_database(path)
    stack.enter_context(registry.register(teacher(0)))
    few = join(stack, registry, store, "few")
    assert few.has == ids(0)
    assert not few.now.stale, "all teachers fit, so that there is nothing to agree on"
    for number in range(1, 5):
        stack.enter_context(registry.register(teacher(number)))
    many = join(stack, registry, store, "many", want=2)
    until(lambda: len(many.has) == 2)
    assert "2 of its own choice" in many.now.stale
    until(lambda: few.has == ids(*range(5)))


def test_stale_teachers_without_registry(registry: Registry, store: Store, tmp_path: Path, stack: ExitStack) -> None:
    """Without the registry the last known teachers are marked stale."""
    path = tmp_path / "teachers.sqlite"
    teachers = stack.enter_context(open_registry(f"sqlite:///{path}", timeout_s=1.0))
    with teachers.register(teacher(0)), teachers.register(teacher(1)):
        student = Student(stack.enter_context(BalanceGroup(teachers, store, SERVICE, "s", want=1)))
        until(lambda: len(student.has) == 1 and not student.now.stale)
        had = student.has
        spoil_database(path)
        until(lambda: student.now.stale)
        assert student.has == had


def test_nonsense_in_the_store_is_harmless(
    registry: Registry, store: Store, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """Nonsense in the store costs nobody else anything."""
    caplog.set_level(logging.WARNING, "edl.discovery")
    store.put(f"balance/{SERVICE}/students/evil", b"\xff\x00")
    store.put(f"balance/{SERVICE}/students/greedy", b'{"limit": -1}')
    store.put(f"balance/{SERVICE}/students/no/student", b'{"limit": 1}')
    store.put(f"balance/{SERVICE}/links/s0", b'{"teachers": "all"}')
    store.put(f"balance/{SERVICE}/links/deep", b"[" * 100_000)
    for number in range(4):
        stack.enter_context(registry.register(teacher(number)))
    students = [join(stack, registry, store, f"s{n}", want=2) for n in range(2)]
    until(lambda: shared_out(students, range(4), 2))
    until(
        lambda: (
            [entry.key for entry in store.list(f"balance/{SERVICE}/links/")]
            == [f"balance/{SERVICE}/links/s{n}" for n in range(2)]
        )
    )
    warnings = [record.getMessage() for record in caplog.records]
    assert any("students/greedy is left out of the balance: limit -1" in text for text in warnings)
    assert len(warnings) == len(set(warnings)), "said once"


def test_taken_name_waits_until_free(registry: Registry, store: Store, stack: ExitStack) -> None:
    """A student whose name is taken says so and joins when it is free."""
    for number in range(3):
        stack.enter_context(registry.register(teacher(number)))
    first = BalanceGroup(registry, store, SERVICE, "twin", want=1)
    stack.enter_context(first)
    until(lambda: store.get(f"balance/{SERVICE}/students/twin") is not None)
    second = join(stack, registry, store, "twin", want=1)
    until(lambda: "held by another lease" in second.group.error)
    assert len(second.has) == 1
    first.close()
    until(lambda: not second.group.error)
    until(lambda: second.group.is_leader and not second.now.stale)


# Ends


def test_closed_group_leaves_nothing(registry: Registry, store: Store, stack: ExitStack) -> None:
    """Nothing is left of a group that is closed."""
    for number in range(2):
        stack.enter_context(registry.register(teacher(number)))
    group = BalanceGroup(registry, store, SERVICE, "s", want=1)
    until(lambda: store.get(f"balance/{SERVICE}/links/s") is not None)
    group.close()
    group.close()
    assert group.get(1) is None
    assert list(group) == []
    assert not group.is_leader
    assert store.list(f"balance/{SERVICE}/") == []


@pytest.mark.parametrize("ended_by", ["group", "registry"])
def test_close_ends_an_endless_wait(url: str, store: Store, ended_by: str) -> None:
    """Closing ends a wait without a deadline."""
    registry = open_registry(url)
    group = BalanceGroup(registry, store, SERVICE, "s", want=1)
    told: list[Snapshot | None] = []
    waiting = threading.Thread(target=lambda: told.extend([group.get(), group.get()]), daemon=True)
    waiting.start()
    until(lambda: told or waiting.is_alive())
    (group if ended_by == "group" else registry).close()
    waiting.join(20)
    assert not waiting.is_alive()
    assert told[-1] is None
    group.close()
    registry.close()


def test_wait_ends_at_its_deadline(registry: Registry, store: Store) -> None:
    """A wait ends at its deadline even while another thread waits."""
    with BalanceGroup(registry, store, SERVICE, "s") as group:
        assert group.get(10) == Snapshot(SERVICE, ())
        waiting = threading.Thread(target=group.get, daemon=True)
        waiting.start()
        begin = time.monotonic()
        assert group.get(0.2) is None
        assert time.monotonic() - begin < 10
        group.close()
        waiting.join(20)
        assert not waiting.is_alive()


def test_store_closed_too_early_is_survived(registry: Registry, url: str, stack: ExitStack) -> None:
    """A store that is closed too early is survived."""
    for number in range(3):
        stack.enter_context(registry.register(teacher(number)))
    store = open_store(url)
    student = join(stack, registry, store, "s", want=1)
    until(lambda: len(student.has) == 1 and not student.now.stale)
    store.close()
    until(lambda: "is closed" in student.now.stale)
    assert len(student.has) == 1


def test_a_forked_child_is_told(registry: Registry, store: Store) -> None:
    with BalanceGroup(registry, store, SERVICE, "s") as group:
        assert group.get(10) is not None
        group._pid += 1  # as in a child; `tests/fast/discovery/conformance` forks
        with pytest.raises(ClosedError, match="fork"):
            group.get(0)
        group._pid -= 1


def test_mistakes_are_named(registry: Registry, store: Store) -> None:
    with pytest.raises(SettingsError, match="student_id"):
        BalanceGroup(registry, store, SERVICE, "")
    with pytest.raises(SettingsError, match="student_id"):
        BalanceGroup(registry, store, SERVICE, "x" * 101)
    with pytest.raises(SettingsError, match="want=0"):
        BalanceGroup(registry, store, SERVICE, "a", want=0)
    with pytest.raises(SettingsError, match="ttl_s"):
        BalanceGroup(registry, store, SERVICE, "a", ttl_s=0)
    with pytest.raises(SettingsError, match="service"):
        BalanceGroup(registry, store, "a/b", "a")


def test_any_text_may_name_a_student(registry: Registry, store: Store, stack: ExitStack) -> None:
    for number in range(3):
        stack.enter_context(registry.register(teacher(number)))
    names = ["..", "a/b", "ä%2F\n", "s", "s0"]
    students = [join(stack, registry, store, name, want=1) for name in names]
    until(lambda: shared_out(students, range(3), 1))


def test_a_store_that_is_read_only_keeps_all(url: str, stack: ExitStack) -> None:
    registry = stack.enter_context(open_registry(url, timeout_s=1.0))
    for number in range(4):
        stack.enter_context(registry.register(teacher(number), 4.0))
    store = stack.enter_context(open_store(url, timeout_s=1.0))
    students = [join(stack, registry, store, f"s{n}", want=2, ttl_s=4.0) for n in range(3)]
    until(lambda: shared_out(students, range(4), 2))
    before = [student.has for student in students]
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite://"), isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        until(lambda: len(registry.snapshot(SERVICE).lapsed) == 4)
        until(lambda: all(not student.has and len(student.now.lapsed) == 2 for student in students))
        for student, had in zip(students, before, strict=True):
            lapsed = {instance.id for instance in student.now.lapsed}
            assert lapsed == had, "whose registration lapsed stays where it was used"
            assert all(len(told.instances) + len(told.lapsed) <= 2 for told in student.told), "the limit holds"
        connection.execute("ROLLBACK")
    until(lambda: shared_out(students, range(4), 2))
    assert all(told.instances or told.lapsed for student in students for told in student.told[1:])


def test_one_given_to_others_is_revoked(registry: Registry, store: Store, stack: ExitStack) -> None:
    for number in range(2):
        stack.enter_context(registry.register(teacher(number)))
    first = join(stack, registry, store, "s0", want=1)
    until(lambda: len(first.has) == 1 and not first.now.stale)
    (had,) = first.has
    other = join(stack, registry, store, "s1", want=1)
    until(lambda: len(other.has) == 1 and not other.now.stale)
    store.put(f"balance/{SERVICE}/links/s0", json.dumps({"teachers": sorted(ids(0, 1) - {had})}).encode())
    until(lambda: any(told.revoked == {had} for told in [first.now]))
