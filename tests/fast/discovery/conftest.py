"""Students that share teachers out among themselves, and what they need: a registry, a store, nothing left open."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edl.discovery import Instance, Registry, Snapshot, Store, open_registry, open_store
from edl.discovery.balance.group import BalanceGroup
from tests.fast.discovery.group_student import StudentProcess

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
