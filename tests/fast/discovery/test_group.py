"""Students that share teachers out among themselves, over a real registry and store, also while these fail."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edl.background import start_call
from edl.discovery import Instance, Registry, Snapshot, Store, open_registry, open_store
from edl.discovery.group import BalanceGroup, pack_limit, pack_links
from edl.discovery.registry import Registration
from edl.discovery.store import StoreSnapshot, StoreWatch
from edl.errors import SettingsError
from tests.fast.discovery.conformance.backends import spoil_database, teacher
from tests.fast.discovery.conformance.processes import Member
from tests.fast.discovery.conformance.suite import LONG_S
from tests.waiting import DEADLINE_S, wait_until

SERVICE = "resnet"


class Student:
    """Follows a group, and remembers all that it was told."""

    def __init__(self, group: BalanceGroup) -> None:
        self.group = group
        self.told: list[Snapshot] = []

    @property
    def now(self) -> Snapshot:
        while (snapshot := self.group.get(0.01 if self.told else DEADLINE_S)) is not None:
            self.told.append(snapshot)
        return self.told[-1]

    @property
    def has(self) -> set[str]:
        return {instance.id for instance in self.now.instances if instance.state == "ready"}

    @property
    def is_settled(self) -> bool:
        return bool(self.has) and not self.now.stale


Join = Callable[..., Student]


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl.discovery.group.RETRY_S", 0.1)


@pytest.fixture
def join(registry: Registry, store: Store, stack: ExitStack) -> Join:
    """Have a student take part, by way of this file or another registry or store."""

    def start(name: str, *, over: Store | None = None, of: Registry | None = None, **options: Any) -> Student:
        group = BalanceGroup(of or registry, over or store, SERVICE, name, **{"want": 32, "ttl_s": LONG_S, **options})
        return Student(stack.enter_context(group))

    return start


def number(instance_number: int, state: str = "ready") -> Instance:
    return teacher(SERVICE, f"t{instance_number}", 8000 + instance_number, state=state)


def start_teachers(registry: Registry, *numbers: int) -> list[Registration]:
    return [registry.register(number(n), LONG_S) for n in numbers]


def ids(*numbers: int) -> set[str]:
    return {f"t{n}" for n in numbers}


def shared_out(students: Sequence[Student], numbers: Iterable[int], each: int) -> bool:
    """Whether each student has that many of these teachers, nobody is out of step, and all are used alike."""
    loads = Counter(dict.fromkeys(ids(*numbers), 0))
    for student in students:
        if student.now.stale or len(student.has) != each or not student.has <= set(loads):
            return False
        loads.update(student.has)
    return max(loads.values()) - min(loads.values()) <= 1


# Agreement


def test_changes_share_teachers_out_again(registry: Registry, join: Join) -> None:
    """When a teacher or student comes or goes."""
    teachers = start_teachers(registry, *range(6))
    students = [join(name, want=2) for name in ("..", "a/b", "ä%2F\n")]  # any text may name one
    wait_until(lambda: shared_out(students, range(6), 2))
    before = [student.has for student in students]

    students.append(join("s3", want=2))
    wait_until(lambda: shared_out(students, range(6), 2))
    assert [student.has for student in students[:3]] == before, "there was no need to move"

    lost = int(min(before[0])[1:])
    teachers[lost].close()
    wait_until(lambda: shared_out(students, set(range(6)) - {lost}, 2))
    start_teachers(registry, lost)
    wait_until(lambda: shared_out(students, range(6), 2))

    students.pop(0).group.close()
    wait_until(lambda: shared_out(students, range(6), 2))
    assert all(told.instances for student in students for told in student.told)


def test_killed_leader_is_replaced(registry: Registry, store: Store, join: Join, member: Callable[..., Member]) -> None:
    """Nobody is without teachers meanwhile, and what a former leader writes late does not last."""
    start_teachers(registry, *range(6))
    killed = member("balance", SERVICE, "killed")
    assert killed.hear() == "ready"
    wait_until(lambda: killed.ask("?") == "leader")
    students = [join(f"s{n}", want=2, ttl_s=1.0) for n in range(2)]
    wait_until(lambda: all(len(student.has) == 2 and student.is_settled for student in students))
    killed.kill()
    wait_until(lambda: any(student.group.is_leader for student in students))
    students.append(join("s2", want=2, ttl_s=1.0))
    wait_until(lambda: shared_out(students, range(6), 2))
    for n in range(3):
        store.put(f"balance/{SERVICE}/links/s{n}", pack_links(["t0"]))
    wait_until(lambda: shared_out(students, range(6), 2))
    assert all(told.instances for student in students for told in student.told)


def test_draining_teacher_is_replaced(registry: Registry, join: Join) -> None:
    """And seen to drain."""
    teachers = start_teachers(registry, *range(3))
    student = join("s", want=1)
    wait_until(lambda: student.is_settled)
    (mine,) = student.has
    teachers[int(mine[1:])].update(number(int(mine[1:]), "draining"))
    wait_until(lambda: student.is_settled and mine not in student.has)
    assert [t.state for told in student.told for t in told.instances if t.id == mine][-1] == "draining"
    for n in set(range(3)) - {int(mine[1:])}:
        teachers[n].update(number(n, "draining"))
    wait_until(lambda: not student.has)


def test_one_given_to_others_is_revoked(registry: Registry, store: Store, join: Join) -> None:
    start_teachers(registry, 0, 1)
    first = join("s0", want=1)
    wait_until(lambda: first.is_settled)
    (had,) = first.has
    other = join("s1", want=1)
    wait_until(lambda: other.is_settled)
    store.put(f"balance/{SERVICE}/links/s0", pack_links(ids(0, 1) - {had}))
    wait_until(lambda: first.now.revoked == {had})


# Students that come back


class GatedWatch:
    """Says nothing until the gate opens."""

    def __init__(self, watch: StoreWatch, gate: threading.Event) -> None:
        self.watch, self.gate = watch, gate

    def get(self, timeout_s: float | None = None) -> StoreSnapshot | None:
        return self.watch.get(timeout_s) if self.gate.is_set() else None

    def close(self) -> None:
        self.watch.close()


def test_links_wait_for_the_former_lifes_key(
    registry: Registry, store: Store, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student whose key its former life still holds has the teachers of then, and no others before."""
    start_teachers(registry, *range(8))
    store.put(f"balance/{SERVICE}/students/again", pack_limit(2), store.lease(LONG_S))
    store.put(f"balance/{SERVICE}/links/again", pack_links(["t0", "t7"]))
    gate, watch = threading.Event(), store.watch
    monkeypatch.setattr(store, "watch", lambda prefix: GatedWatch(watch(prefix), gate))
    monkeypatch.setattr("edl.discovery.group.PATIENCE_S", DEADLINE_S)
    again = join("again", want=2)
    first = start_call("edl-test", lambda: again.has)
    wait_until(lambda: "held by another lease" in again.group.error)
    gate.set()
    assert first.result(DEADLINE_S) == ids(0, 7)
    assert [len(told.instances) for told in again.told] == [2], "nothing else was given before"


# Faults


def test_without_store_teachers_are_kept(registry: Registry, tmp_path: Path, stack: ExitStack, join: Join) -> None:
    """Students say so, and replace those that are lost."""
    teachers = start_teachers(registry, *range(6))
    path = tmp_path / "store.sqlite"
    over = stack.enter_context(open_store(f"sqlite:///{path}"))
    students = [join(f"s{n}", over=over, want=2) for n in range(3)]
    wait_until(lambda: shared_out(students, range(6), 2))
    before = [student.has for student in students]
    spoil_database(path)
    for student in students:
        student.group._lease.forfeit()  # type: ignore[union-attr]
    wait_until(lambda: all("cannot agree" in student.now.stale and student.group.error for student in students))
    assert [student.has for student in students] == before
    for lost in before[0]:
        teachers[int(lost[1:])].close()
    wait_until(lambda: len(students[0].has) == 2 and not students[0].has & before[0])
    assert [student.has for student in students[1:]] == before[1:]
    path.unlink()
    wait_until(lambda: not any(student.group.error or student.now.stale for student in students))
    assert all(told.instances for student in students for told in student.told)


def test_unreachable_store_student_chooses(registry: Registry, tmp_path: Path, stack: ExitStack, join: Join) -> None:
    path = tmp_path / "store.sqlite"
    over = stack.enter_context(open_store(f"sqlite:///{path}"))
    spoil_database(path)
    start_teachers(registry, 0)
    few = join("few", over=over)
    assert few.has == ids(0)
    assert not few.now.stale, "all teachers fit, so that there is nothing to agree on"
    start_teachers(registry, *range(1, 5))
    many = join("many", over=over, want=2)
    wait_until(lambda: len(many.has) == 2)
    assert "2 teachers of its own choice" in many.now.stale
    wait_until(lambda: few.has == ids(*range(5)))


def test_nonsense_in_the_store_is_harmless(
    registry: Registry, store: Store, join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "edl.discovery")
    folder = f"balance/{SERVICE}"
    store.put(f"{folder}/students/evil", b"\xff\x00")
    store.put(f"{folder}/students/greedy", b'{"limit": -1}')
    store.put(f"{folder}/students/no/student", b'{"limit": 1}')
    store.put(f"{folder}/links/s0", b'{"teachers": "all"}')
    store.put(f"{folder}/links/deep", b"[" * 100_000)
    start_teachers(registry, *range(4))
    students = [join(f"s{n}", want=2) for n in range(2)]
    wait_until(lambda: shared_out(students, range(4), 2))
    links = [f"{folder}/links/s{n}" for n in range(2)]
    wait_until(lambda: [entry.key for entry in store.list(f"{folder}/links/")] == links)
    warnings = [record.getMessage() for record in caplog.records]
    assert any("students/greedy is left out of the balance: limit -1" in text for text in warnings)
    assert len(warnings) == len(set(warnings)), "said once"


# Ends


def test_closed_group_leaves_nothing(registry: Registry, store: Store, join: Join) -> None:
    start_teachers(registry, 0, 1)
    group = join("s", want=1).group
    wait_until(lambda: store.get(f"balance/{SERVICE}/links/s"))
    group.close()
    group.close()
    assert group.get(1) is None
    assert list(group) == []
    assert not group.is_leader
    assert store.list(f"balance/{SERVICE}/") == []


@pytest.mark.parametrize("ended_by", ["group", "registry"])
def test_close_ends_an_endless_wait(url: str, store: Store, ended_by: str) -> None:
    """And a wait that has a deadline ends there, even while another thread waits."""
    registry = open_registry(url)
    group = BalanceGroup(registry, store, SERVICE, "s", want=1)
    assert group.get(DEADLINE_S) == Snapshot(SERVICE, ())
    waiting = start_call("edl-test", group.get)
    wait_until(group._taking.locked)
    assert group.get(0.01) is None
    (group if ended_by == "group" else registry).close()
    assert waiting.result(DEADLINE_S) is None
    group.close()
    registry.close()


def test_mistakes_are_named(registry: Registry, store: Store) -> None:
    for student, want, words in (("", 1, "student_id"), ("x" * 101, 1, "student_id"), ("a", 0, "want=0")):
        with pytest.raises(SettingsError, match=words):
            BalanceGroup(registry, store, SERVICE, student, want=want)
