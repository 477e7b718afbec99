"""What the soak does to teachers, students, registries and the cache's disk: each fault is done, and undone."""

from __future__ import annotations

import abc
import contextlib
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.soak.fleet import RunningStudent, RunningTeacher

__all__ = [
    "ConsulAway",
    "Fault",
    "FullDisk",
    "LockedRegistry",
    "ReadOnlyDisk",
    "StudentFault",
    "SweptMemory",
    "TeacherFault",
]


class Fault(abc.ABC):
    """Something that fails for a while.

    Attributes:
        name: as in the report.
        lasts_s: from, to; shorter than a reader's patience.
    """

    name: str
    lasts_s: tuple[float, float] = (0.5, 5.0)

    @property
    def group(self) -> str:
        """Of the faults of one group only one is there at a time."""
        return self.name

    @abc.abstractmethod
    def begin(self, rng: random.Random) -> None:
        """Let it fail."""

    @abc.abstractmethod
    def end(self) -> None:
        """Have it work again. Does nothing after an end."""


class TeacherFault(Fault):
    """SIGKILL, SIGSTOP or SIGTERM of one of the teachers that are no anchors."""

    def __init__(self, how: str, teachers: Sequence[RunningTeacher]) -> None:
        self.name = f"teacher: {how}"
        self._how, self._teachers = how, [teacher for teacher in teachers if not teacher.anchor]
        self._hit: RunningTeacher | None = None

    def begin(self, rng: random.Random) -> None:
        self._hit = rng.choice(self._teachers)
        process = self._hit.process
        if process is None or not process.is_alive():
            return
        if self._how == "SIGKILL":
            process.kill()
        elif self._how == "SIGSTOP":
            with contextlib.suppress(TimeoutError):
                process.pause()
        else:
            process.terminate()

    def end(self) -> None:
        hit, self._hit = self._hit, None
        if hit is None or hit.process is None:
            return
        if self._how == "SIGSTOP" and hit.process.is_alive():
            hit.process.resume()
        hit.ensure()


class StudentFault(Fault):
    """SIGKILL or SIGSTOP of a student; a witness is only stopped."""

    def __init__(self, how: str, students: Sequence[RunningStudent]) -> None:
        self.name = f"student: {how}"
        self._how = how
        self._students = [student for student in students if how == "SIGSTOP" or not student.witness]
        self._hit: RunningStudent | None = None

    def begin(self, rng: random.Random) -> None:
        self._hit = rng.choice(self._students)
        if self._how == "SIGSTOP":
            self._hit.pause()
        else:
            self._hit.kill()

    def end(self) -> None:
        hit, self._hit = self._hit, None
        if hit is not None and self._how == "SIGSTOP":
            hit.resume()


class LockedRegistry(Fault):
    """Somebody holds the SQLite file: it can be read (WAL), and not written."""

    name = "registry: locked"
    lasts_s = (2.0, 12.0)

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def begin(self, rng: random.Random) -> None:
        self._connection = sqlite3.connect(self._path, timeout=5.0, isolation_level=None)
        with contextlib.suppress(sqlite3.OperationalError):
            self._connection.execute("BEGIN IMMEDIATE")

    def end(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class FullDisk(Fault):
    """A file takes all that is left of a small file system."""

    lasts_s = (2.0, 12.0)

    def __init__(self, what: str, folder: Path) -> None:
        self.name = f"{what}: disk full"
        self._ballast = folder / ".ballast"

    def begin(self, rng: random.Random) -> None:
        with contextlib.suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"\0" * size):
                        pass

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._ballast.unlink(missing_ok=True)


class ReadOnlyDisk(Fault):
    """The file system turns read-only, as one does after an error of its disk."""

    lasts_s = (2.0, 12.0)

    def __init__(self, what: str, folder: Path, remount: Callable[[Path, bool], None]) -> None:
        self.name = f"{what}: disk read-only"
        self._folder, self._remount = folder, remount

    def begin(self, rng: random.Random) -> None:
        self._remount(self._folder, True)

    def end(self) -> None:
        self._remount(self._folder, False)


class ConsulAway(Fault):
    """The Consul agent is stopped (SIGSTOP), or killed and started again with its data."""

    lasts_s = (1.0, 8.0)

    def __init__(self, how: str, pid: Callable[[], int], kill: Callable[[], None], start: Callable[[], None]) -> None:
        self.name = f"Consul: {how}"
        self._how, self._pid, self._kill, self._start = how, pid, kill, start
        self._begun = False

    @property
    def group(self) -> str:
        return "Consul"  # an agent that is gone cannot be stopped

    def begin(self, rng: random.Random) -> None:
        self._begun = True
        if self._how == "SIGSTOP":
            os.kill(self._pid(), 19)
        else:
            self._kill()

    def end(self) -> None:
        if not self._begun:
            return
        self._begun = False
        if self._how == "SIGSTOP":
            os.kill(self._pid(), 18)
        else:
            self._start()


class SweptMemory(Fault):
    """Somebody deletes what a student has in /dev/shm, as a cleaner of temporary files does."""

    name = "student: its shared memory deleted"
    lasts_s = (0.0, 0.1)

    def __init__(self, students: Sequence[RunningStudent]) -> None:
        self._students = students

    def begin(self, rng: random.Random) -> None:
        process = rng.choice(list(self._students)).process
        if process is not None:
            for path in Path("/dev/shm").glob(f"edl-arena-{process.pid}-*"):
                path.unlink(missing_ok=True)

    def end(self) -> None:
        pass


def schedule(faults: Sequence[Fault], rng: random.Random, every_s: float) -> Iterator[tuple[Fault, float, float]]:
    """An endless order of (fault, seconds until it begins, seconds that it lasts); each as often as the others."""
    while True:
        turn = list(faults)
        rng.shuffle(turn)
        for fault in turn:
            yield fault, rng.expovariate(1 / every_s), rng.uniform(*fault.lasts_s)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll; whether it came true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
