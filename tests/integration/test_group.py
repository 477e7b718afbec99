"""Students that share teachers out among themselves, over a real registry and store."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edl.discovery import Instance, Registry, Snapshot, Store, open_registry, open_store
from edl.discovery.group import BalanceGroup
from edl.errors import SettingsError

SERVICE = "resnet"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/discovery.sqlite"


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    with open_registry(url) as registry:
        yield registry


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as store:
        yield store


def teacher(number: int) -> Instance:
    return Instance(SERVICE, f"t{number}", "127.0.0.1", 8000 + number)


class Student:
    """Follows a group; `has` is what it was last told."""

    def __init__(self, group: BalanceGroup) -> None:
        self.group = group
        self.last: Snapshot | None = None

    @property
    def has(self) -> set[str]:
        while (snapshot := self.group.get(0.01)) is not None:
            self.last = snapshot
        return {instance.id for instance in self.last.instances} if self.last else set()


def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def test_students_get_teachers_of_their_own_and_share_again_when_one_leaves(registry: Registry, store: Store) -> None:
    with ExitStack() as stack:
        for number in range(6):
            stack.enter_context(registry.register(teacher(number)))
        students = [
            Student(stack.enter_context(BalanceGroup(registry, store, SERVICE, f"s{number}", want=2)))
            for number in range(3)
        ]
        until(lambda: sorted(name for student in students for name in student.has) == [f"t{n}" for n in range(6)])
        assert all(len(student.has) == 2 for student in students)
        before = [student.has for student in students]
        students[0].group.close()
        stack.enter_context(registry.register(teacher(6)))
        time.sleep(1)  # long enough to see that nothing moves
        assert [student.has for student in students[1:]] == before[1:], "who has enough keeps what it has"


def test_a_student_that_comes_later_is_not_starved(registry: Registry, store: Store) -> None:
    with ExitStack() as stack:
        for number in range(2):
            stack.enter_context(registry.register(teacher(number)))
        first = Student(stack.enter_context(BalanceGroup(registry, store, SERVICE, "first", want=1)))
        until(lambda: len(first.has) == 1)
        kept = first.has
        second = Student(stack.enter_context(BalanceGroup(registry, store, SERVICE, "second", want=1)))
        until(lambda: len(second.has) == 1 and second.has != first.has)
        assert first.has == kept


def test_everybody_has_all_teachers_while_they_are_few(registry: Registry, store: Store) -> None:
    with ExitStack() as stack:
        for number in range(3):
            stack.enter_context(registry.register(teacher(number)))
        students = [
            Student(stack.enter_context(BalanceGroup(registry, store, SERVICE, f"s{number}"))) for number in range(2)
        ]
        until(lambda: all(student.has == {"t0", "t1", "t2"} for student in students))


def test_a_lost_teacher_is_replaced(registry: Registry, store: Store) -> None:
    with ExitStack() as stack:
        registrations = {n: stack.enter_context(registry.register(teacher(n))) for n in range(3)}
        student = Student(stack.enter_context(BalanceGroup(registry, store, SERVICE, "s", want=1)))
        until(lambda: len(student.has) == 1)
        (mine,) = student.has
        registrations[int(mine[1:])].close()
        until(lambda: len(student.has) == 1 and mine not in student.has)


MEMBER = """
import sys, time
from edl.discovery import open_registry, open_store
from edl.discovery.group import BalanceGroup
with open_registry(sys.argv[1]) as registry, open_store(sys.argv[1]) as store:
    with BalanceGroup(registry, store, "resnet", "leader", want=1, ttl_s=1.0) as group:
        while group.get(10) is not None:
            print("told", flush=True)
        time.sleep(60)
"""


def test_a_leader_that_is_killed_is_replaced_and_its_teacher_is_free_again(
    registry: Registry, store: Store, url: str
) -> None:
    with ExitStack() as stack:
        for number in range(2):
            stack.enter_context(registry.register(teacher(number)))
        leader = subprocess.Popen([sys.executable, "-c", MEMBER, url], stdout=subprocess.PIPE)
        stack.callback(leader.wait, 10)
        stack.callback(leader.kill)
        assert leader.stdout is not None
        stack.enter_context(leader.stdout)
        assert leader.stdout.readline() == b"told\n"
        until(lambda: store.get(f"balance/{SERVICE}/links/leader") is not None)
        students = [
            Student(stack.enter_context(BalanceGroup(registry, store, SERVICE, name, want=1, ttl_s=1.0)))
            for name in ("a", "b")
        ]
        leader.send_signal(signal.SIGKILL)
        until(lambda: store.get(f"balance/{SERVICE}/links/leader") is None)
        until(lambda: {frozenset(student.has) for student in students} == {frozenset(["t0"]), frozenset(["t1"])})


def test_nothing_is_left_of_a_group_that_is_closed(registry: Registry, store: Store) -> None:
    with registry.register(teacher(0)):
        group = BalanceGroup(registry, store, SERVICE, "s", want=1)
        until(lambda: store.get(f"balance/{SERVICE}/students/s") is not None)
        group.close()
        group.close()
        assert group.get(1) is None
        assert store.get(f"balance/{SERVICE}/students/s") is None


def test_mistakes_are_named(registry: Registry, store: Store) -> None:
    with pytest.raises(SettingsError, match="student_id=''"):
        BalanceGroup(registry, store, SERVICE, "")
    with pytest.raises(SettingsError, match="want=0"):
        BalanceGroup(registry, store, SERVICE, "a", want=0)
