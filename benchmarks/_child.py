"""A side of a benchmark in its own process, controlled by JSON lines. It needs only the standard library.

Each side has its own interpreter, allocator and environment, and sides can take turns in one run.
"""

from __future__ import annotations

import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._counters import Counters

__all__ = ["ROOT", "WARM_UP_S", "Child", "Usage", "Window", "answer", "processes", "usage"]

ROOT = pathlib.Path(__file__).resolve().parents[1]
WARM_UP_S = 0.5
"""How long a load runs before it is measured."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """What processes have used so far: CPU in seconds, and minor page faults."""

    cpu_s: float = 0.0
    faults: int = 0

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.cpu_s - other.cpu_s, self.faults - other.faults)


def processes(pid: int) -> list[int]:
    """Return `pid` and the ids of all its descendants (Linux)."""
    found = [pid]
    for pid in found:
        for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except FileNotFoundError:
                continue  # the thread has just ended
    return found


def usage(pids: Iterable[int]) -> Usage:
    """Return what `pids` together have used since they started; see proc_pid_stat(5)."""
    cpu = faults = 0
    for pid in pids:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        faults += int(fields[7])
        cpu += int(fields[11]) + int(fields[12])
    return Usage(cpu / _TICKS, faults)


class Window:
    """A period in which requests are counted, and the resources that `pids` used in it.

    `requests` is a running count; only requests between `open` and `close` matter.

    Args:
        pids: The student's process id, followed by those of the teacher.
        counted: Also count what the student and the teacher do; see `_counters`.
    """

    def __init__(self, pids: Sequence[int], *, counted: bool = False) -> None:
        self._pids = pids
        self._counted = counted
        self._counters: list[Counters] = []
        self._counts: dict[str, float] = {}
        self.requests = 0
        self.closed = False

    def open(self) -> None:
        """Begin the period, once the warm-up is over."""
        if self._counted:
            self._counters = [Counters(pid) for pid in self._pids]
        self._begin = (self.requests, usage(self._pids), time.perf_counter())

    def close(self) -> None:
        """End the period. The load stops when it sees `closed`."""
        self._end = (self.requests, usage(self._pids), time.perf_counter())
        for index, counters in enumerate(self._counters):
            for name, count in counters.close().items():
                key = f"{'teacher' if index else 'student'}_{name}"
                self._counts[key] = self._counts.get(key, 0.0) + count
        self.closed = True

    def figures(self, rows: int) -> dict[str, float]:
        """Return the figures of the window, with `rows` per request."""
        requests = self._end[0] - self._begin[0]
        used = self._end[1] - self._begin[1]
        if not requests:
            raise RuntimeError("no request was answered within the window")
        return {
            "rows_s": requests * rows / (self._end[2] - self._begin[2]),
            "cpu_us_row": used.cpu_s / requests / rows * 1e6,
            "faults_request": used.faults / requests,
            **{name: count / requests for name, count in self._counts.items()},
        }


def answer(handle: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Answer each line of standard input, as the child, until it is closed.

    Standard output is reserved for the answers. Anything else that the code prints goes to standard error.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(handle(json.loads(line))), file=out, flush=True)


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


class Child:
    """A child process, as its parent uses it.

    Raises:
        RuntimeError: The child ended or a deadline passed. Any method may raise it, with the end of the child's output.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, start_timeout_s: float = 90.0
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the child fails, closed by `close`
        self._process = subprocess.Popen(
            [*command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": _python_path(), **(env or {})},
            start_new_session=True,
        )
        self._buffer = b""
        try:
            self._read(start_timeout_s)
        except BaseException:
            self.close()
            raise

    def ask(self, timeout_s: float = 120.0, **request: Any) -> dict[str, Any]:
        """Send `request` and return the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("the child ended") from None
        return self._read(timeout_s)

    @property
    def pid(self) -> int:
        """Return the child's process id."""
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL to the child and everything that it started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def close(self) -> None:
        """End the child and everything that it started. May be called twice."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            pass  # killed below, with its children
        self.kill()
        self._process.wait(10)
        self._process.stdout.close()
        self._log.close()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        stream = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                raise self._failure(f"no answer within {timeout_s} s")
            data = os.read(stream, 65536)
            if not data:
                raise self._failure("the child ended")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    def _failure(self, what: str) -> RuntimeError:
        self._log.seek(0)
        return RuntimeError(f"{' '.join(map(str, self._process.args))}: {what}\n{self._log.read()[-3000:]}")  # type: ignore[arg-type]

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
