"""Students that share teachers out among themselves, over a real registry and store."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from edl.discovery import Registry, Store, open_registry, open_store
from edl.discovery.balance.group import BalanceGroup
from edl.discovery.balance.rules import pack_limit, pack_links
from edl.discovery.store import StoreSnapshot, StoreWatch
from tests.fast.discovery.conftest import SERVICE, Student, ids, join, shared_out, teacher, until
from tests.fast.discovery.group_student import StudentProcess

# Agreement


def test_changes_share_teachers_out_again(any_url: str, stack: ExitStack) -> None:
    """Students share teachers out again when somebody comes or goes."""
    service = f"shared-{os.urandom(4).hex()}"
    registry, store = stack.enter_context(open_registry(any_url)), stack.enter_context(open_store(any_url))
    registrations = [stack.enter_context(registry.register(teacher(n, service=service))) for n in range(6)]

    def joined(name: str) -> Student:
        return Student(stack.enter_context(BalanceGroup(registry, store, service, name, want=2)))

    students = [joined(f"s{n}") for n in range(3)]
    until(lambda: shared_out(students, range(6), 2))
    before = [student.has for student in students]

    students.append(joined("s3"))
    until(lambda: shared_out(students, range(6), 2))
    assert [student.has for student in students[:3]] == before, "there was no need to move"

    lost = int(min(before[0])[1:])
    registrations[lost].close()
    until(lambda: shared_out(students, set(range(6)) - {lost}, 2))
    stack.enter_context(registry.register(teacher(lost, service=service)))
    until(lambda: shared_out(students, range(6), 2))

    students.pop(0).group.close()
    until(lambda: shared_out(students, range(6), 2))
    for student in students:
        assert all(told.instances for told in student.told)


def test_everybody_has_all_that_fit(registry: Registry, store: Store, stack: ExitStack) -> None:
    """Everybody has all teachers while they fit and a new one at once."""
    stack.enter_context(registry.register(teacher(0)))
    students = [join(stack, registry, store, f"s{n}") for n in range(2)]
    assert [student.has for student in students] == [ids(0)] * 2
    stack.enter_context(registry.register(teacher(1)))
    begin = time.monotonic()
    until(lambda: all(student.has == ids(0, 1) for student in students))
    assert time.monotonic() - begin < 30  # the goal is 1 s, on a machine that does nothing else
    assert not any(told.stale for student in students for told in student.told)
    assert store.list(f"balance/{SERVICE}/links/") == [], "nothing to agree on, nothing written"


def test_second_student_is_not_starved(registry: Registry, store: Store, stack: ExitStack) -> None:
    """The second of two students is not starved and the first keeps its teacher."""
    for number in range(2):
        stack.enter_context(registry.register(teacher(number)))
    first = join(stack, registry, store, "first", want=1)
    until(lambda: len(first.has) == 1 and not first.now.stale)
    kept = first.has
    second = join(stack, registry, store, "second", want=1)
    until(lambda: second.has == ids(0, 1) - kept)
    assert first.has == kept


def test_larger_teacher_has_more_students(registry: Registry, store: Store, stack: ExitStack) -> None:
    """A teacher of more capacity has more students."""
    stack.enter_context(registry.register(teacher(0, capacity=3.0)))
    stack.enter_context(registry.register(teacher(1)))
    students = [join(stack, registry, store, f"s{n}", want=1) for n in range(4)]
    until(lambda: Counter(name for student in students for name in student.has) == {"t0": 3, "t1": 1})


def test_fan_out_limits_links(registry: Registry, store: Store, stack: ExitStack) -> None:
    """The fan out limits those who want more."""
    for number in range(4):
        stack.enter_context(registry.register(teacher(number)))
    student = join(stack, registry, store, "s", want=9, fan_out=3)
    until(lambda: len(student.has) == 3 and not student.now.stale)


def test_draining_teacher_is_replaced(registry: Registry, store: Store, stack: ExitStack) -> None:
    """A draining teacher is replaced and seen to drain."""
    registrations = [stack.enter_context(registry.register(teacher(n))) for n in range(3)]
    student = join(stack, registry, store, "s", want=1)
    until(lambda: len(student.has) == 1 and not student.now.stale)
    (mine,) = student.has
    registrations[int(mine[1:])].update(teacher(int(mine[1:]), "draining"))
    until(lambda: student.has and mine not in student.has and not student.now.stale)
    assert [t.state for told in student.told for t in told.instances if t.id == mine][-1] == "draining"
    for number in set(range(3)) - {int(mine[1:])}:
        registrations[number].update(teacher(number, "draining"))
    until(lambda: not student.has)


# Leaders


@pytest.mark.parametrize(
    "server",
    [
        None,
        pytest.param("consul_agent", marks=pytest.mark.consul),
        pytest.param("etcd_server", marks=pytest.mark.etcd),
    ],
)
def test_killed_leader_is_replaced(
    request: pytest.FixtureRequest, tmp_path: Path, stack: ExitStack, server: str | None
) -> None:
    """A leader that is killed is replaced and its teachers are shared out."""
    url = f"sqlite:///{tmp_path}/d.sqlite" if server is None else request.getfixturevalue(server).url
    service = f"killed-{os.urandom(4).hex()}"
    registry = stack.enter_context(open_registry(url))
    for number in range(6):
        stack.enter_context(registry.register(teacher(number, service=service)))
    students = [StudentProcess(url, service, f"s{n}", 2) for n in range(3)]
    for student in students:
        stack.callback(student.kill)
    leaders: list[StudentProcess] = []

    def has_a_leader() -> bool:
        leaders[:] = [student for student in students if student.leads]
        return len(leaders) == 1

    until(lambda: shared_out(students, range(6), 2) and has_a_leader(), 60)
    (leader,) = leaders
    kept = [student.has for student in students if student is not leader]
    leader.kill()
    students.remove(leader)
    until(lambda: any(student.leads for student in students), 60)
    assert [student.has for student in students] == kept, "who has enough keeps what it has"
    # The new leader decides: a fourth and fifth student would otherwise go without links for ever.
    students += [StudentProcess(url, service, f"s{n}", 2) for n in (3, 4)]
    for student in students[2:]:
        stack.callback(student.kill)
    until(lambda: shared_out(students, range(6), 2), 60)
    for student in students:
        assert all(told["teachers"] for told in student.told)


def test_restarted_student_same_teachers(registry: Registry, store: Store, url: str, stack: ExitStack) -> None:
    """A student that is killed and starts again has the same teachers."""
    for number in range(8):
        stack.enter_context(registry.register(teacher(number)))
    other = join(stack, registry, store, "leader", want=2)
    until(lambda: other.group.is_leader and not other.now.stale)
    first = StudentProcess(url, SERVICE, "again", 2, ttl_s=60.0)  # however long the next one takes to start
    stack.callback(first.kill)
    until(lambda: store.get(f"balance/{SERVICE}/links/again") is not None and len(first.has) == 2)
    until(lambda: pack_links(first.has) == store.get(f"balance/{SERVICE}/links/again").value)  # type: ignore[union-attr]
    had = first.has
    first.kill()
    again = StudentProcess(url, SERVICE, "again", 2)
    stack.callback(again.kill)
    until(lambda: len(again.has) == 2)
    assert again.told[0]["teachers"] == sorted(had)


class SlowWatch:
    """Says nothing for half a second."""

    def __init__(self, watch: StoreWatch) -> None:
        self.watch, self.silent_until = watch, time.monotonic() + 0.5

    def get(self, timeout_s: float | None = None) -> StoreSnapshot | None:
        return None if time.monotonic() < self.silent_until else self.watch.get(timeout_s)

    def close(self) -> None:
        self.watch.close()


def test_links_wait_for_the_former_lifes_key(
    registry: Registry, store: Store, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links are waited for by a student whose key its former life still holds."""
    for number in range(8):
        stack.enter_context(registry.register(teacher(number)))
    store.put(f"balance/{SERVICE}/students/again", pack_limit(2), stack.enter_context(store.lease(60.0)))
    store.put(f"balance/{SERVICE}/links/again", pack_links(["t0", "t7"]))
    watch = store.watch
    monkeypatch.setattr(store, "watch", lambda prefix: SlowWatch(watch(prefix)))
    monkeypatch.setattr("edl.discovery.balance.group.PATIENCE_S", 20.0)  # a slow machine needs a second for less
    again = join(stack, registry, store, "again", want=2)
    assert [again.now.instances[n].id for n in range(2)] == ["t0", "t7"]
    assert [len(told.instances) for told in again.told] == [2], "nothing else was given before"
    assert "held by another lease" in again.group.error


def test_lapsed_student_keeps_its_teachers(registry: Registry, store: Store, stack: ExitStack) -> None:
    """A student that was gone for longer than its lease has the same teachers."""
    for number in range(8):
        stack.enter_context(registry.register(teacher(number)))
    other = join(stack, registry, store, "leader", want=2)
    until(lambda: other.group.is_leader and not other.now.stale)

    def planned_with() -> bool:
        balanced = other.group._member._leader._balanced
        return balanced is not None and f"balance/{SERVICE}/students/again" in balanced[1].entries

    # Not what chance would give it again.
    store.put(f"balance/{SERVICE}/links/again", pack_links(mine := sorted(ids(*range(8)) - other.has)[-2:]))
    with BalanceGroup(registry, store, SERVICE, "again", want=2) as group:
        student = Student(group)
        until(lambda: student.has == set(mine) and not student.now.stale)
        until(planned_with)
    until(lambda: store.get(f"balance/{SERVICE}/links/again") is None)
    until(lambda: not other.now.stale)
    until(lambda: not planned_with())
    again = join(stack, registry, store, "again", want=2)
    until(lambda: again.has and not again.now.stale)
    assert again.has == set(mine)


def test_late_writes_of_a_former_leader(registry: Registry, store: Store, stack: ExitStack) -> None:
    """What a former leader writes late is put right."""
    for number in range(4):
        stack.enter_context(registry.register(teacher(number)))
    students = [join(stack, registry, store, f"s{n}", want=2, ttl_s=0.5) for n in range(2)]
    until(lambda: shared_out(students, range(4), 2))
    for number in range(2):
        store.put(f"balance/{SERVICE}/links/s{number}", pack_links(["t0"]))
    until(lambda: shared_out(students, range(4), 2))
