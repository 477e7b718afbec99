"""Students that share teachers out among themselves, over a real registry and store."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edl.discovery import Instance, Registry, Snapshot, Store, open_registry, open_store
from edl.discovery.group import BalanceGroup
from edl.discovery.group_rules import pack_limit, pack_links
from edl.discovery.store import StoreSnapshot, StoreWatch
from edl.errors import ClosedError, SettingsError
from tests.integration.group_student import StudentProcess

SERVICE = "resnet"


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    threads = set(threading.enumerate())
    files = open_files()
    yield
    until(lambda: set(threading.enumerate()) <= threads)
    until(lambda: open_files() <= files)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["sqlite", pytest.param("consul", marks=pytest.mark.consul)])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/discovery.sqlite"
    return str(request.getfixturevalue("consul_agent").url)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/discovery.sqlite"


@pytest.fixture
def registry(url: str, stack: ExitStack) -> Registry:
    return stack.enter_context(open_registry(url))


@pytest.fixture
def store(url: str, stack: ExitStack) -> Store:
    return stack.enter_context(open_store(url))


def open_files() -> Counter[str]:
    """Sockets and databases that this process has open."""
    names: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            name = str(descriptor.readlink())
        except OSError:
            continue
        # Connections to a database that was deleted under them are left open on purpose, see `edl.discovery.sqlite`.
        if name.startswith("socket:") or (".sqlite" in name and not name.endswith(" (deleted)")):
            names[name] += 1
    return names


def teacher(number: int, state: str = "ready", service: str = SERVICE, capacity: float = 1.0) -> Instance:
    return Instance(service, f"t{number}", "127.0.0.1", 8000 + number, capacity, state)  # type: ignore[arg-type]


def ids(*numbers: int) -> set[str]:
    return {f"t{number}" for number in numbers}


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


class Student:
    """Follows a group, and remembers all that it was told."""

    def __init__(self, group: BalanceGroup) -> None:
        self.group = group
        self.told: list[Snapshot] = []

    @property
    def now(self) -> Snapshot:
        while (snapshot := self.group.get(0.01 if self.told else 10)) is not None:
            self.told.append(snapshot)
        return self.told[-1]

    @property
    def has(self) -> set[str]:
        return {instance.id for instance in self.now.instances if instance.state == "ready"}


def join(stack: ExitStack, registry: Registry, store: Store, name: str, **options: Any) -> Student:
    return Student(stack.enter_context(BalanceGroup(registry, store, SERVICE, name, **options)))


def shared_out(students: Sequence[Student | StudentProcess], numbers: Iterable[int], each: int) -> bool:
    """Whether each student has that many of these teachers, nobody is out of step, and all are used alike."""
    if any(student.now.stale for student in students if isinstance(student, Student)):
        return False
    loads = Counter(dict.fromkeys(ids(*numbers), 0))
    for student in students:
        if len(student.has) != each or not student.has <= ids(*numbers):
            return False
        loads.update(student.has)
    return max(loads.values()) - min(loads.values()) <= 1


# Agreement


def test_students_share_teachers_out_again_when_somebody_comes_or_goes(any_url: str, stack: ExitStack) -> None:
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


def test_everybody_has_all_teachers_while_they_fit_and_a_new_one_at_once(
    registry: Registry, store: Store, stack: ExitStack
) -> None:
    stack.enter_context(registry.register(teacher(0)))
    students = [join(stack, registry, store, f"s{n}") for n in range(2)]
    assert [student.has for student in students] == [ids(0)] * 2
    stack.enter_context(registry.register(teacher(1)))
    begin = time.monotonic()
    until(lambda: all(student.has == ids(0, 1) for student in students))
    assert time.monotonic() - begin < 5  # the goal is 1 s, on a machine that does nothing else
    assert not any(told.stale for student in students for told in student.told)
    assert store.list(f"balance/{SERVICE}/links/") == [], "nothing to agree on, nothing written"


def test_the_second_of_two_students_is_not_starved_and_the_first_keeps_its_teacher(
    registry: Registry, store: Store, stack: ExitStack
) -> None:
    for number in range(2):
        stack.enter_context(registry.register(teacher(number)))
    first = join(stack, registry, store, "first", want=1)
    until(lambda: len(first.has) == 1 and not first.now.stale)
    kept = first.has
    second = join(stack, registry, store, "second", want=1)
    until(lambda: second.has == ids(0, 1) - kept)
    assert first.has == kept


def test_a_teacher_of_more_capacity_has_more_students(registry: Registry, store: Store, stack: ExitStack) -> None:
    stack.enter_context(registry.register(teacher(0, capacity=3.0)))
    stack.enter_context(registry.register(teacher(1)))
    students = [join(stack, registry, store, f"s{n}", want=1) for n in range(4)]
    until(lambda: Counter(name for student in students for name in student.has) == {"t0": 3, "t1": 1})


def test_the_fan_out_limits_those_who_want_more(registry: Registry, store: Store, stack: ExitStack) -> None:
    for number in range(4):
        stack.enter_context(registry.register(teacher(number)))
    student = join(stack, registry, store, "s", want=9, fan_out=3)
    until(lambda: len(student.has) == 3 and not student.now.stale)


def test_a_draining_teacher_is_replaced_and_seen_to_drain(registry: Registry, store: Store, stack: ExitStack) -> None:
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


@pytest.mark.parametrize("backend", ["sqlite", pytest.param("consul", marks=pytest.mark.consul)])
def test_a_leader_that_is_killed_is_replaced_and_its_teachers_are_shared_out(
    request: pytest.FixtureRequest, tmp_path: Path, stack: ExitStack, backend: str
) -> None:
    url = f"sqlite:///{tmp_path}/d.sqlite" if backend == "sqlite" else request.getfixturevalue("consul_agent").url
    service = f"killed-{os.urandom(4).hex()}"
    registry = stack.enter_context(open_registry(url))
    for number in range(6):
        stack.enter_context(registry.register(teacher(number, service=service)))
    students = [StudentProcess(url, service, f"s{n}", 2) for n in range(3)]
    for student in students:
        stack.callback(student.kill)
    until(lambda: shared_out(students, range(6), 2) and any(student.leads for student in students), 60)
    (leader,) = [student for student in students if student.leads]
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


def test_a_student_that_is_killed_and_starts_again_has_the_same_teachers(
    registry: Registry, store: Store, url: str, stack: ExitStack
) -> None:
    for number in range(8):
        stack.enter_context(registry.register(teacher(number)))
    other = join(stack, registry, store, "leader", want=2, ttl_s=1.0)
    until(lambda: other.group.is_leader and not other.now.stale)
    first = StudentProcess(url, SERVICE, "again", 2, ttl_s=5.0)
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


def test_links_are_waited_for_by_a_student_whose_key_its_former_life_still_holds(
    registry: Registry, store: Store, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        stack.enter_context(registry.register(teacher(number)))
    store.put(f"balance/{SERVICE}/students/again", pack_limit(2), stack.enter_context(store.lease(60.0)))
    store.put(f"balance/{SERVICE}/links/again", pack_links(["t0", "t7"]))
    watch = store.watch
    monkeypatch.setattr(store, "watch", lambda prefix: SlowWatch(watch(prefix)))
    again = join(stack, registry, store, "again", want=2)
    assert [again.now.instances[n].id for n in range(2)] == ["t0", "t7"]
    assert [len(told.instances) for told in again.told] == [2], "nothing else was given before"
    assert "held by another lease" in again.group.error


def test_a_student_that_was_gone_for_longer_than_its_lease_has_the_same_teachers(
    registry: Registry, store: Store, stack: ExitStack
) -> None:
    for number in range(8):
        stack.enter_context(registry.register(teacher(number)))
    other = join(stack, registry, store, "leader", want=2)
    until(lambda: other.group.is_leader and not other.now.stale)
    # Not what chance would give it again.
    store.put(f"balance/{SERVICE}/links/again", pack_links(mine := sorted(ids(*range(8)) - other.has)[-2:]))
    with BalanceGroup(registry, store, SERVICE, "again", want=2) as group:
        student = Student(group)
        until(lambda: student.has == set(mine) and not student.now.stale)
        time.sleep(0.5)  # the leader plans with it
    until(lambda: store.get(f"balance/{SERVICE}/links/again") is None)
    until(lambda: not other.now.stale)
    time.sleep(0.5)  # and without it
    again = join(stack, registry, store, "again", want=2)
    until(lambda: again.has and not again.now.stale)
    assert again.has == set(mine)


def test_what_a_former_leader_writes_late_is_put_right(registry: Registry, store: Store, stack: ExitStack) -> None:
    for number in range(4):
        stack.enter_context(registry.register(teacher(number)))
    students = [join(stack, registry, store, f"s{n}", want=2, ttl_s=0.5) for n in range(2)]
    until(lambda: shared_out(students, range(4), 2))
    for number in range(2):
        store.put(f"balance/{SERVICE}/links/s{number}", pack_links(["t0"]))
    until(lambda: shared_out(students, range(4), 2))


# When things fail


def broken_file(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    path.write_text("this is not a database, whatever its name says\n" * 100)


def test_without_the_store_students_keep_their_teachers_say_so_and_replace_lost_ones(
    registry: Registry, tmp_path: Path, stack: ExitStack
) -> None:
    registrations = [stack.enter_context(registry.register(teacher(n))) for n in range(6)]
    path = tmp_path / "store.sqlite"
    store = stack.enter_context(open_store(f"sqlite:///{path}", timeout_s=1.0))
    students = [join(stack, registry, store, f"s{n}", want=2, ttl_s=1.0) for n in range(3)]
    until(lambda: shared_out(students, range(6), 2))
    before = [student.has for student in students]
    broken_file(path)
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


def test_a_student_that_never_reached_the_store_chooses_for_itself(
    registry: Registry, tmp_path: Path, stack: ExitStack
) -> None:
    path = tmp_path / "store.sqlite"
    store = stack.enter_context(open_store(f"sqlite:///{path}", timeout_s=1.0))
    broken_file(path)
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


def test_without_the_registry_the_last_known_teachers_are_marked_stale(
    registry: Registry, store: Store, tmp_path: Path, stack: ExitStack
) -> None:
    path = tmp_path / "teachers.sqlite"
    teachers = stack.enter_context(open_registry(f"sqlite:///{path}", timeout_s=1.0))
    with teachers.register(teacher(0)), teachers.register(teacher(1)):
        student = Student(stack.enter_context(BalanceGroup(teachers, store, SERVICE, "s", want=1)))
        until(lambda: len(student.has) == 1 and not student.now.stale)
        had = student.has
        broken_file(path)
        until(lambda: student.now.stale)
        assert student.has == had


def test_nonsense_in_the_store_costs_nobody_else_anything(
    registry: Registry, store: Store, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_student_whose_name_is_taken_says_so_and_joins_when_it_is_free(
    registry: Registry, store: Store, stack: ExitStack
) -> None:
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


def test_nothing_is_left_of_a_group_that_is_closed(registry: Registry, store: Store, stack: ExitStack) -> None:
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
def test_closing_ends_a_wait_without_a_deadline(url: str, store: Store, ended_by: str) -> None:
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


def test_a_wait_ends_at_its_deadline_even_while_another_thread_waits(registry: Registry, store: Store) -> None:
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


def test_a_store_that_is_closed_too_early_is_survived(registry: Registry, url: str, stack: ExitStack) -> None:
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
        group._pid += 1  # as in a child; `tests/conformance/discovery` forks
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
