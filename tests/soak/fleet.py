"""Teachers and students of the soak as processes, started again when a fault has ended them."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from edl.distill.transport.shm import Arena
from edl.testing import LocalTeacher
from tests.soak.data import SERVICES
from tests.soak.student import StudentSpec
from tests.soak.verdict import EpochRecord, memory_of, regions_of

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
        """End it at once."""
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
        """Start it if it does not run."""
        if self.process is not None:
            code = self.process.poll()
            if code is None:
                return
            self._note_end(code)
        self._start()

    def kill(self) -> None:
        """SIGKILL, and start again."""
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
        """SIGSTOP."""
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
