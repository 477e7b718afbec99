"""Students in processes of their own, whose leader is killed, over real stores."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from edl.discovery import Registry
from tests.fast.discovery.conformance.backends import Backend, teacher
from tests.fast.discovery.conformance.suite import LONG_S
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
STUDENT = """
import json, sys
from edl.discovery import open_registry, open_store
from edl.discovery.balance import group as module

url, service, student = sys.argv[1:]
module.PATIENCE_S = 60.0  # a slow machine needs a second for less than the first links
told = teachers = None
with (
    open_registry(url, timeout_s=30.0) as registry,
    open_store(url, timeout_s=30.0) as store,
    module.BalanceGroup(registry, store, service, student, want=2, ttl_s=4.0) as group,
):
    while True:
        if (snapshot := group.get(0.1)) is not None:
            teachers = [teacher.id for teacher in snapshot.instances]
        tell = {"teachers": teachers, "leads": group.is_leader}
        if teachers is not None and tell != told:
            told = tell
            print(json.dumps(tell), flush=True)
"""


class Student:
    def __init__(self, url: str, service: str, student: str) -> None:
        command = [sys.executable, "-c", STUDENT, url, service, student]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.told: list[dict[str, Any]] = [{"teachers": [], "leads": False}]
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self.told.extend(map(json.loads, lines))

    @property
    def has(self) -> list[str]:
        return self.told[-1]["teachers"]  # type: ignore[no-any-return]

    @property
    def leads(self) -> bool:
        return self.told[-1]["leads"]  # type: ignore[no-any-return]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


def shared_out(students: list[Student], teachers: int) -> bool:
    """Whether each has two, and all are used alike."""
    used = [name for student in students for name in student.has]
    counts = [used.count(f"t{n}") for n in range(teachers)]
    return all(len(student.has) == 2 for student in students) and max(counts) - min(counts) <= 1


def test_killed_leader_is_replaced(backend: Backend, registry: Registry, service: str) -> None:
    """And nobody is without teachers meanwhile."""
    with ExitStack() as stack:

        def start(*numbers: int) -> list[Student]:
            started = [Student(backend.url, service, f"s{n}") for n in numbers]
            for student in started:
                stack.callback(student.kill)
            return started

        for n in range(6):
            stack.enter_context(registry.register(teacher(service, f"t{n}", 8000 + n), LONG_S))
        students = start(0, 1, 2)
        wait_until(lambda: shared_out(students, 6) and sum(student.leads for student in students) == 1)
        leader = next(student for student in students if student.leads)
        leader.kill()
        students.remove(leader)
        wait_until(lambda: any(student.leads for student in students))
        # The new leader decides: further students would otherwise go without links for ever.
        students += start(3, 4)
        wait_until(lambda: shared_out(students, 6))
        assert all(told["teachers"] for student in students for told in student.told[1:])
