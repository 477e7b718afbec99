"""Has a zygote fork a node's workers, watches the workers, and kills them.

CUDA frees a context's memory when the last process that has the device's file open has ended; this includes children
that inherited the open file.
"""

from __future__ import annotations

import collections
import contextlib
import fnmatch
import glob
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from edl.background import BackgroundLoop
from edl.collective.agent.processes.preload import PreloadResult
from edl.collective.agent.processes.zygote import MESSAGE_NBYTES, ForkRequest, ProgramSpec, zygote_command
from edl.errors import EDLError

logger = logging.getLogger(__name__)


GPU_DEVICES: Final = ("/dev/nvidia[0-9]*", "/dev/kfd")  # files that a process opens to use a GPU of NVIDIA or AMD
_RELEASE_POLL_S: Final = 0.005  # between two checks of processes about to end, for which recovery waits


def find_holders(groups: Collection[int]) -> dict[int, str]:
    """Return the start time in ticks, by pid, of each process in `groups` that has a GPU open. No such pair recurs."""
    if not groups or not any(map(glob.glob, GPU_DEVICES)):
        return {}
    found = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        fields = read_stat(int(path.name))
        if fields and int(fields[2]) in groups and _has_open(path):
            found[int(path.name)] = fields[19]
    return found


def wait_for_release(holders: dict[int, str], deadline: float) -> bool:
    """Wait until these processes have ended. Returns whether they had ended by the deadline."""
    while left := [pid for pid, began in holders.items() if _lives(pid, began)]:
        if time.monotonic() > deadline:
            logger.warning("processes %s still hold GPU memory: the new workers start anyway", left)
            return False
        time.sleep(_RELEASE_POLL_S)
    return True


def _has_open(process: Path) -> bool:
    with contextlib.suppress(OSError):
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(link.readlink())
                if any(fnmatch.fnmatchcase(target, pattern) for pattern in GPU_DEVICES):
                    return True
    return False


def _lives(pid: int, began: str) -> bool:
    fields = read_stat(pid)
    return bool(fields) and fields[0] not in "ZX" and fields[19] == began


def read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, starting with the process state; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


_FORK_TIMEOUT_S: Final = 10.0  # a fork takes milliseconds, or seconds on a busy machine; another zygote imports again
_POLL_S: Final = 0.05  # between checks that no event triggers
_DEATH_TIMEOUT_S: Final = 30.0  # for processes to disappear after SIGKILL; ten seconds were too few on a busy machine
_ZYGOTE_END_TIMEOUT_S: Final = 1.0  # for a zygote to end after its socket closed; only a message depends on it
_ATTEMPTS: Final = 4  # to import ahead of time, each without the modules found unfit; the last imports nothing


@dataclass(frozen=True)
class WorkerExit:
    """Reports that a worker ended. Its status is an exit code, or minus the number of the signal that killed it."""

    generation: int
    local_rank: int
    pid: int
    status: int

    def __str__(self) -> str:
        if self.status >= 0:
            return f"worker {self.local_rank} ended with exit code {self.status}"
        with contextlib.suppress(ValueError):
            return f"worker {self.local_rank} was killed by {signal.Signals(-self.status).name}"
        return f"worker {self.local_rank} was killed by signal {-self.status}"


@dataclass(frozen=True)
class ZygoteLost:
    """Reports that the process that forks workers has ended. All workers end with that process."""


class WorkerProcesses:
    """A node's zygote and the workers that it forked. A thread reports every `WorkerExit` and `ZygoteLost`."""

    def __init__(
        self,
        program: ProgramSpec,
        report: Callable[[WorkerExit | ZygoteLost], None],
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._program = program
        self._report = report
        self._environ = dict(os.environ if environ is None else environ)
        self._lock = threading.Condition()
        self._requested: collections.deque[tuple[int, int]] = collections.deque()  # generation and local rank, to fork
        self._running: dict[int, tuple[int, int]] = {}  # generation and local rank, by process id
        self._ended: set[int] = set()  # ended since the last `replace_workers`; their children may hold a GPU
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: PreloadResult | None = None
        self._lost = True
        self._closing = False
        self.import_failures = ""  # what could not be imported ahead of time, as text; set by `warm_up`

    @property
    def prewarmed(self) -> bool:
        return self._program.prewarm

    @property
    def running(self) -> dict[int, int]:
        """Process ids of the workers that have not ended, by local rank."""
        with self._lock:
            return {rank: pid for pid, (_, rank) in self._running.items()}

    def warm_up(self, timeout_s: float = 120.0, raise_if_stopping: Callable[[], object] = lambda: None) -> None:
        """Start the zygote and wait until it can fork. Call this from a thread that lives as long as the workers.

        If the imports take longer than `timeout_s`, or kill the zygote, another zygote is started that imports nothing.
        """
        unfit: dict[str, str] = {}
        lost = ""
        for attempt in range(1, _ATTEMPTS + 1):
            self._start()
            try:
                ready = self._wait_until_ready(timeout_s, raise_if_stopping)
            except EDLError as exc:
                if not self._program.prewarm:
                    raise
                lost = str(exc)
            else:
                unfit |= ready.unfit
                if not ready.unfit:
                    break
            # An import cannot be undone, so another process starts without these modules.
            self.close()
            self._closing = False
            prewarm = attempt < _ATTEMPTS - 1 and not lost
            self._program = replace(self._program, without=tuple(unfit), prewarm=prewarm)
        failures = [f"importing {name} {why}" for name, why in unfit.items()]
        self.import_failures = "; ".join(filter(None, [*failures, *ready.failed, lost]))

    def _describe_zygote_end(self) -> str:
        try:
            code = self._process.wait(_ZYGOTE_END_TIMEOUT_S) if self._process is not None else None
        except subprocess.TimeoutExpired:
            code = None
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return signal.Signals(-code).name
        return "its output above says why" if code is None else f"exit code {code}; its output above says why"

    def _wait_until_ready(self, timeout_s: float, raise_if_stopping: Callable[[], object]) -> PreloadResult:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while self._ready is None and not self._lost:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise EDLError(f"importing ahead of time took more than {timeout_s:g} s (--no-prewarm skips it)")
                raise_if_stopping()
                self._lock.wait(min(left, _POLL_S))
            if self._ready is None:
                raise EDLError(f"the process that forks workers died while it imported ({self._describe_zygote_end()})")
            return self._ready

    def fork_workers(self, generation: int, forks: Mapping[int, ForkRequest]) -> None:
        deadline = time.monotonic() + _FORK_TIMEOUT_S
        with self._lock:
            for local_rank, fork in forks.items():
                self._requested.append((generation, local_rank))
                with contextlib.suppress(OSError):  # the thread that reads its answers notices this too
                    self._socket.send(fork.encode())
            while self._requested and not self._lost:
                self._lock.wait(_POLL_S)
                if time.monotonic() > deadline:
                    self._kill_zygote()
            if self._lost:
                self._requested.clear()
                raise EDLError("the process that forks workers has died, or does not answer")

    def replace_workers(self, generation: int, forks: Mapping[int, ForkRequest], timeout_s: float = 10.0) -> None:
        """Kill the workers and fork new workers, at once unless GPU memory must be released first."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            holders = find_holders(self._ended.union(self._running))
            self._ended.clear()
            for pid in self._running:
                _kill(pid)
        if holders:
            self.kill_workers(timeout_s)
            wait_for_release(holders, deadline)
        self.fork_workers(generation, forks)
        self._reap(timeout_s, spared_generation=generation)

    def send_signal(self, number: int) -> None:
        """Send a signal to the workers but, unlike torchrun, not to their children: a last save may need loaders."""
        with self._lock:
            for pid in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill_workers(self, timeout_s: float = _DEATH_TIMEOUT_S) -> None:
        """Kill all workers and their children, and wait up to `timeout_s` until they are gone."""
        self._reap(timeout_s)

    def _reap(self, timeout_s: float, spared_generation: int = -1) -> None:
        deadline = time.monotonic() + timeout_s
        zygote_deadline = time.monotonic() + timeout_s / 2
        with self._lock:
            while left := [pid for pid, (found, _) in self._running.items() if found != spared_generation]:
                for pid in left:
                    _kill(pid)
                if time.monotonic() > deadline:
                    raise EDLError(f"workers {sorted(left)} did not die within {timeout_s:g} s of SIGKILL")
                if time.monotonic() > zygote_deadline:
                    self._kill_zygote()  # perhaps they are dead and the zygote does not say so
                self._lock.wait(_POLL_S)

    def close(self, timeout_s: float = 10.0) -> None:
        with self._lock:
            self._closing = True
        if self._process is None:
            return
        with contextlib.suppress(EDLError):
            self.kill_workers(timeout_s)
        _kill(self._process.pid)  # and what an import started; the pid is still its own, since it is not reaped yet
        self._process.wait()
        self._reader.close()  # it ends with the socket
        self._socket.close()
        self._process = None

    def _kill_zygote(self) -> None:
        """Kill a zygote that does not answer. To fork again, a pool needs another zygote."""
        self._closing = True
        if self._process is not None:
            _kill(self._process.pid)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = zygote_command(theirs.fileno(), self._program)
            # The workers may read a pipe or file, as under torchrun. A terminal would stop them, because they are not
            # in its foreground process group.
            stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty() else None
            self._process = subprocess.Popen(command, env=self._environ, pass_fds=[theirs.fileno()], stdin=stdin)
        self._socket = ours
        self._ready = None
        self._lost = False
        self._reader = BackgroundLoop("edl-workers", self._read_messages)
        ours.send(self._program.encode())

    def _read_messages(self) -> None:
        while True:
            try:
                message = self._socket.recv(MESSAGE_NBYTES)
            except OSError:
                message = b""
            with self._lock:
                event = self._handle_message(json.loads(message)) if message else self._handle_loss()
                self._lock.notify_all()
            if event is not None:
                self._report(event)
            if not message:
                return

    def _handle_message(self, message: dict[str, Any]) -> WorkerExit | None:
        if "ready" in message:
            self._ready = PreloadResult(dict(message["unfit"]), list(message["failed"]))
        elif "pid" in message:
            self._running[message["pid"]] = self._requested.popleft()
        elif "exited" in message:
            pid = message["exited"]
            generation, local_rank = self._running.pop(pid)
            self._ended.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # the children it left behind
            return WorkerExit(generation, local_rank, pid, os.waitstatus_to_exitcode(message["status"]))
        return None

    def _handle_loss(self) -> ZygoteLost | None:
        self._lost = True
        for pid in self._running:
            _kill(pid)  # workers die by themselves, but their children do not
        self._running.clear()
        self._requested.clear()
        return None if self._closing else ZygoteLost()


def _kill(pid: int) -> None:
    """Kill a worker or the zygote, together with its process group if it already has a group of its own."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
