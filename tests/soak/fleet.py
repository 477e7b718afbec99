"""Teachers and students of the soak as processes, and what fails: each fault is done, and undone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from edl.distill.transport.shm import Arena
from edl.testing import LocalTeacher
from tests.plugins_consul import ConsulAgent
from tests.soak.student import StudentSpec
from tests.soak.verdict import SERVICES, EpochRecord, memory_of, regions_of

ROOT = Path(__file__).resolve().parents[2]
_STACK_DUMP_S = 1.0  # for faulthandler to write some threads' stacks


@dataclass
class RunningTeacher:
    """A teacher that is started again when it has ended. No fault touches an anchor: somebody can always answer."""

    service: str
    discovery: str
    anchor: bool = False
    process: LocalTeacher | None = None
    samples: list[tuple[int, int, int]] = field(default_factory=list)

    def ensure(self) -> None:
        """Start it if it does not run. A registry that is away lets it not start; then the next call tries again."""
        if self.process is not None:
            if self.process.is_alive():
                return
            self.process.close()
        served = SERVICES[self.service]
        self.process = LocalTeacher(
            "fingerprint", name=self.service, service=self.service, discovery=self.discovery, wait=False,
            max_batch=256, serve={"drain-timeout": "5s"}, classes=served.classes,
            shape=list(served.shape), dtype=served.dtype, delay_s=0.003, straggle=0.02,
        )  # fmt: skip

    def sample(self) -> None:
        """Note its memory. Only a process that no fault touches is followed."""
        if self.anchor and self.process is not None and self.process.is_alive():
            with contextlib.suppress(OSError):
                self.samples.append(memory_of(self.process.pid))

    @property
    def regions(self) -> int:
        """Regions of shared memory that it holds."""
        with contextlib.suppress(OSError):
            return regions_of(self.process.pid) if self.process is not None else 0
        return 0

    def close(self) -> None:
        if self.process is not None:
            self.process.close()


@dataclass
class RunningStudent:
    """A student that is started again when it has ended. No fault ends a witness, so that what it leaks adds up.

    `hangs` has what its threads did each time that it made no progress, `ends` its log of each end that is its own.
    """

    spec: StudentSpec
    folder: Path
    hang_after_s: float
    witness: bool = False
    process: subprocess.Popen[bytes] | None = None
    pids: set[int] = field(default_factory=set)
    hangs: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    _seen: int = 0
    _moved_at: float = 0.0

    def ensure(self) -> None:
        if self.process is not None:
            code = self.process.poll()
            if code is None:
                return
            self._note_end(code)
        self._start()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self._start()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "tests.soak.student", json.dumps(asdict(self.spec))]
            self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.pids.add(self.process.pid)
        self._moved_at = time.monotonic()

    def pause(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT; the time that it was stopped is not held against it."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self._moved_at = time.monotonic()

    def check_progress(self) -> None:
        """Find out whether it hangs; if so, keep its stacks and start it again."""
        with contextlib.suppress(FileNotFoundError):
            seen = int.from_bytes(Path(self.spec.progress).read_bytes()[:8], "little")
            if seen != self._seen:
                self._seen, self._moved_at = seen, time.monotonic()
        if self.process is not None and time.monotonic() - self._moved_at >= self.hang_after_s:
            self._note_hang("delivered no row")
            self.kill()

    def stop(self) -> None:
        """SIGTERM, so that it ends after its epoch; SIGKILL after `hang_after_s`, which counts as a hang."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            code = self.process.wait(self.hang_after_s)
        except subprocess.TimeoutExpired:
            self._note_hang("did not end")
            self.process.kill()
            self.process.wait()
        else:
            if code:
                self._note_end(code)

    def _note_hang(self, what: str) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(_STACK_DUMP_S)
        self.hangs.append(f"{self.spec.kind} {what} within {self.hang_after_s:g} s:\n{self._log_tail()}")

    def _note_end(self, code: int) -> None:
        self.ends.append(f"{self.spec.kind} ended with code {code}: {self._log_tail()}")

    @property
    def _log(self) -> Path:
        return self.folder / f"{Path(self.spec.journal).stem}.log"

    def _log_tail(self) -> str:
        data = self._log.read_bytes() if self._log.exists() else b""
        return data[-6000:].decode(errors="replace")


def read_journal(path: Path) -> list[EpochRecord]:
    """The epochs of a student; a line that a kill cut off is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            records.append(EpochRecord(**json.loads(line)))
    return records


def leftovers(pids: set[int]) -> list[str]:
    """Objects in shared memory that these processes made.

    What a killed student has left the next one removes, so one more begins before they are counted.
    """
    Arena(1 << 20).close()
    names = (path.name for path in Path("/dev/shm").iterdir())
    return sorted(name for name in names if any(name.startswith(f"edl-arena-{pid}-") for pid in pids))


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
