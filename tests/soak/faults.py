"""What the soak does to teachers, students, registries and the cache's disk: each fault is done, and undone."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.plugins_consul import ConsulAgent
from tests.soak.fleet import RunningStudent, RunningTeacher


@dataclass(frozen=True)
class Fault:
    """Something that fails for a while, shorter than a reader's patience; of one group only one at a time."""

    name: str
    lasts_s: tuple[float, float]
    during: Callable[[random.Random], contextlib.AbstractContextManager[None]]
    group: str = ""


def all_faults(
    teachers: Sequence[RunningTeacher],
    students: Sequence[RunningStudent],
    registry: Path,
    disks: dict[str, Path],
    agent: ConsulAgent | None,
) -> list[Fault]:
    """Return each that can be done here. `disks` are folders that are file systems of their own."""
    mortal = [teacher for teacher in teachers if not teacher.anchor]
    killable = [student for student in students if not student.witness]
    short, long = (0.5, 5.0), (2.0, 12.0)
    ends = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
    faults = [Fault(f"teacher: {how.name}", short, partial(_hit_teacher, mortal, how)) for how in ends]
    faults.append(Fault("student: its shared memory deleted", (0.0, 0.1), partial(_swept_memory, students)))
    faults.append(Fault("registry: locked", long, partial(_locked, registry)))
    faults.append(Fault("student: SIGSTOP", short, partial(_paused_student, students)))
    if killable:
        faults.append(Fault("student: SIGKILL", short, partial(_killed_student, killable)))
    for what, folder in disks.items():
        faults.append(Fault(f"{what}: disk full", long, partial(_full_disk, folder)))
        faults.append(Fault(f"{what}: disk read-only", long, partial(_read_only_disk, folder)))
    if agent is not None:
        for how in (signal.SIGSTOP, signal.SIGKILL):
            # An agent that is gone cannot be stopped.
            faults.append(Fault(f"Consul: {how.name}", (1.0, 8.0), partial(_consul_away, agent, how), "Consul"))
    return faults


@contextlib.contextmanager
def _hit_teacher(teachers: Sequence[RunningTeacher], how: signal.Signals, rng: random.Random) -> Iterator[None]:
    hit = rng.choice(teachers)
    process = hit.process
    if process is not None and process.is_alive():
        with contextlib.suppress(TimeoutError):
            {signal.SIGKILL: process.kill, signal.SIGSTOP: process.pause, signal.SIGTERM: process.terminate}[how]()
    yield
    if hit.process is not None:
        if how is signal.SIGSTOP and hit.process.is_alive():
            hit.process.resume()
        hit.ensure()


@contextlib.contextmanager
def _paused_student(students: Sequence[RunningStudent], rng: random.Random) -> Iterator[None]:
    hit = rng.choice(students)
    hit.pause()
    yield
    hit.resume()


@contextlib.contextmanager
def _killed_student(students: Sequence[RunningStudent], rng: random.Random) -> Iterator[None]:
    rng.choice(students).kill()
    yield


@contextlib.contextmanager
def _swept_memory(students: Sequence[RunningStudent], rng: random.Random) -> Iterator[None]:
    """Somebody deletes what a student has in /dev/shm, as a cleaner of temporary files does."""
    process = rng.choice(students).process
    if process is not None:
        for path in Path("/dev/shm").glob(f"edl-arena-{process.pid}-*"):
            path.unlink(missing_ok=True)
    yield


@contextlib.contextmanager
def _locked(path: Path, rng: random.Random) -> Iterator[None]:
    """Somebody holds the SQLite file: it can be read (WAL), and not written."""
    with contextlib.closing(sqlite3.connect(path, timeout=5.0, isolation_level=None)) as connection:
        with contextlib.suppress(sqlite3.OperationalError):
            connection.execute("BEGIN IMMEDIATE")
        yield


@contextlib.contextmanager
def _full_disk(folder: Path, rng: random.Random) -> Iterator[None]:
    """A file takes all that is left of a small file system."""
    ballast = folder / ".ballast"
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size):
                    pass
    yield
    with contextlib.suppress(OSError):
        ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def _read_only_disk(folder: Path, rng: random.Random) -> Iterator[None]:
    """The file system turns read-only, as one does after an error of its disk."""
    for mode in ("ro", "rw"):
        with contextlib.suppress(subprocess.SubprocessError):  # the kernel refuses while a file is open for writing
            subprocess.run(["mount", "-o", f"remount,{mode}", folder], capture_output=True, timeout=10)
        if mode == "ro":
            yield


@contextlib.contextmanager
def _consul_away(agent: ConsulAgent, how: signal.Signals, rng: random.Random) -> Iterator[None]:
    """The agent is stopped, or killed and started again with its data."""
    if how is signal.SIGSTOP:
        os.kill(agent.pid, how)
        yield
        os.kill(agent.pid, signal.SIGCONT)
    else:
        agent.kill()
        yield
        agent.start()


def schedule(faults: Sequence[Fault], rng: random.Random, every_s: float) -> Iterator[tuple[Fault, float, float]]:
    """An endless order of (fault, seconds until it begins, seconds that it lasts); each as often as the others."""
    while True:
        turn = list(faults)
        rng.shuffle(turn)
        for fault in turn:
            yield fault, rng.expovariate(1 / every_s), rng.uniform(*fault.lasts_s)
