"""A node's workers, seen from its agent: forked by a zygote, watched, and killed.

CUDA gives a context's memory back when the last process that has the device's file open has ended, its children that
inherited the file among them. NVML (the package `nvidia-ml-py`, where it is installed) lists who holds memory.
"""

from __future__ import annotations

import collections
import contextlib
import fnmatch
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from edl.background import BackgroundLoop
from edl.collective.agent.processes.preload import PreloadResult
from edl.collective.agent.processes.zygote import MESSAGE_NBYTES, ForkRequest, ProgramSpec, zygote_command
from edl.errors import EDLError

__all__ = ["GPU_DEVICES", "WorkerExit", "WorkerProcesses", "ZygoteLost", "find_holders", "wait_for_release"]

logger = logging.getLogger(__name__)


GPU_DEVICES: Final = ("/dev/nvidia[0-9]*", "/dev/kfd")
"""Patterns of the files that a process opens to use a GPU of NVIDIA or AMD."""
_RELEASE_POLL_S: Final = 0.005
"""Between two looks at processes that are to end: recovery waits for it, and a look takes a tenth of that."""
_INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC  # PROC_PID_INIT_INO of Linux; NVML names processes as they are known there


def find_holders(groups: Collection[int], devices: Sequence[str] = GPU_DEVICES) -> dict[int, str]:
    """Find the processes of some process groups that have a GPU open. On a host without a GPU this returns at once.

    Returns:
        When they started, in the kernel's ticks, by process id: together no later process has the same.
    """
    if not groups or not any(_exists(pattern) for pattern in devices):
        return {}
    found = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        fields = _stat(int(path.name))
        if fields and int(fields[2]) in groups and _has_open(path, devices):
            found[int(path.name)] = fields[19]
    return found


def wait_for_release(holders: dict[int, str], deadline: float) -> bool:
    """Wait until these processes have ended, and NVML does not list them any longer.

    Returns:
        Whether they have, before the deadline.
    """
    while left := [pid for pid, began in holders.items() if _lives(pid, began)] or sorted(_listed() & set(holders)):
        if time.monotonic() > deadline:
            logger.warning("processes %s still hold memory of a GPU: the new workers start all the same", left)
            return False
        time.sleep(_RELEASE_POLL_S)
    return True


def _exists(pattern: str) -> bool:
    folder, _, name = pattern.rpartition("/")
    with contextlib.suppress(OSError):
        return any(fnmatch.fnmatchcase(path.name, name) for path in Path(folder).iterdir())
    return False


def _has_open(process: Path, devices: Sequence[str]) -> bool:
    with contextlib.suppress(OSError):
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(link.readlink())
                if any(fnmatch.fnmatchcase(target, pattern) for pattern in devices):
                    return True
    return False


def _lives(pid: int, began: str) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX" and fields[19] == began


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def _listed() -> set[int]:
    """Return the processes that hold memory of a GPU, where NVML is installed and names them as this process does."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return set()
    if Path("/proc/self/ns/pid").stat().st_ino != _INITIAL_PID_NAMESPACE:
        return set()
    return _ask_nvml(nvml)


def _ask_nvml(nvml: Any) -> set[int]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return set()
    try:
        devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return {process.pid for device in devices for process in nvml.nvmlDeviceGetComputeRunningProcesses(device)}
    except nvml.NVMLError:
        return set()
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


# --- A node's workers, seen from its agent ---


_FORK_TIMEOUT_S: Final = 10.0
"""For a zygote to answer: a fork takes milliseconds, on a machine without a free core a second or two. A zygote that
takes longer hangs; with less, a busy machine would cost a zygote, whose successor imports everything again."""
_POLL_S: Final = 0.05
"""Between two looks at what is not notified: a signal while imports are waited for, processes that are to die."""
_DEATH_TIMEOUT_S: Final = 30.0
"""For processes to be gone after SIGKILL. Each needs a turn of a processor for that, and on a machine that others keep
busy ten seconds were too few. With more, a node whose worker hangs in the kernel ends that much later."""
_ZYGOTE_END_TIMEOUT_S: Final = 1.0
"""For a zygote to end that has closed its socket, which it does by ending. Only a message depends on it."""
_ATTEMPTS: Final = 4
"""To import ahead of time; the last imports nothing. Each attempt leaves out what was unfit in those before."""


@dataclass(frozen=True)
class WorkerExit:
    """The end of a worker.

    Attributes:
        generation: that it belonged to.
        local_rank: its rank on this node.
        pid: its process id.
        status: the exit code; of a worker that a signal killed, the signal's number with a minus.
    """

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
    """The end of the process that forks workers, and of all workers with it."""


class WorkerProcesses:
    """The zygote of a node and the workers that it forked.

    Args:
        program: what the workers run.
        report: called from a thread of this object with every `WorkerExit` and `ZygoteLost`.
        environ: of the zygote; without it, this process's.
        gpu_devices: patterns of the files that a process opens to use a GPU.
    """

    def __init__(
        self,
        program: ProgramSpec,
        report: Callable[[WorkerExit | ZygoteLost], None],
        environ: Mapping[str, str] | None = None,
        gpu_devices: Sequence[str] = GPU_DEVICES,
    ) -> None:
        self._program = program
        self._report = report
        self._environ = dict(os.environ if environ is None else environ)
        self._lock = threading.Condition()
        self._requested: collections.deque[tuple[int, int]] = (
            collections.deque()
        )  # generation and local rank, not forked
        self._running: dict[int, tuple[int, int]] = {}  # generation and local rank, by process id
        self._ended: set[int] = set()  # workers since the last `replace_workers`, whose children may hold a GPU
        self._gpu_devices = gpu_devices
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: PreloadResult | None = None
        self._lost = True
        self._closing = False
        self.import_failures = ""
        """What could not be imported ahead of time, in words; known after `warm_up`."""

    @property
    def prewarmed(self) -> bool:
        """Whether workers are forked from a process that has imported something."""
        return self._program.prewarm

    @property
    def running(self) -> dict[int, int]:
        """The process ids of the workers that have not ended, by local rank."""
        with self._lock:
            return {rank: pid for pid, (_, rank) in self._running.items()}

    def warm_up(self, timeout_s: float = 120.0, raise_if_stopping: Callable[[], object] = lambda: None) -> None:
        """Start the zygote and wait until it is ready to fork. Call it from a thread that lives as long as the workers.

        Args:
            timeout_s: how long the imports may take, in seconds.
            raise_if_stopping: called again and again meanwhile; if it raises, only `close` is left to call.

        Raises:
            EDLError: the zygote died, or was not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        unfit: dict[str, str] = {}
        for attempt in range(1, _ATTEMPTS + 1):
            self._start()
            ready = self._wait_until_ready(deadline, timeout_s, raise_if_stopping)
            unfit |= ready.unfit
            if not ready.unfit:
                break
            # What was imported cannot be taken back, so another process does without.
            self.close()
            self._closing = False
            self._program = replace(self._program, without=tuple(unfit), prewarm=attempt < _ATTEMPTS - 1)
        failures = [f"importing {name} {why}" for name, why in unfit.items()]
        self.import_failures = "; ".join([*failures, *ready.failed])

    def _describe_zygote_end(self) -> str:
        """Return by which signal the zygote ended, or with which exit code."""
        try:
            code = self._process.wait(_ZYGOTE_END_TIMEOUT_S) if self._process is not None else None
        except subprocess.TimeoutExpired:
            code = None
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return signal.Signals(-code).name
        return "its output above says why" if code is None else f"exit code {code}; its output above says why"

    def _wait_until_ready(
        self, deadline: float, timeout_s: float, raise_if_stopping: Callable[[], object]
    ) -> PreloadResult:
        with self._lock:
            while self._ready is None and not self._lost:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise EDLError(f"importing torch and what --preload names took more than {timeout_s:g} s")
                raise_if_stopping()
                self._lock.wait(min(left, _POLL_S))
            if self._ready is None:
                raise EDLError(f"the process that forks workers died while it imported ({self._describe_zygote_end()})")
            return self._ready

    def fork_workers(self, generation: int, forks: Mapping[int, ForkRequest]) -> None:
        """Fork workers.

        Raises:
            EDLError: the zygote has died.
        """
        deadline = time.monotonic() + _FORK_TIMEOUT_S
        with self._lock:
            for local_rank, fork in forks.items():
                self._requested.append((generation, local_rank))
                with contextlib.suppress(OSError):  # the reader of its answers finds out the same
                    self._socket.send(fork.encode())
            while self._requested and not self._lost:
                self._lock.wait(_POLL_S)
                if time.monotonic() > deadline:
                    self._kill_zygote()
            if self._lost:
                self._requested.clear()
                raise EDLError("the process that forks workers has died, or does not answer")

    def replace_workers(self, generation: int, forks: Mapping[int, ForkRequest], timeout_s: float = 10.0) -> None:
        """Begin a generation: kill the workers and fork others in their place.

        The new workers are forked while the kernel still takes the old ones apart, which for a process of some
        gigabytes takes longer. A process to which SIGKILL was sent runs no more code of its own. But where it has a GPU
        open, the new worker would find that GPU's memory taken, and is forked when the old one has let go of it, or
        when the time is up.

        Args:
            generation: that all workers belong to from now on.
            forks: what is to be forked, by local rank.
            timeout_s: how long the old workers may take to die, in seconds.

        Raises:
            EDLError: the zygote has died, or a worker does not die.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            holders = find_holders(self._ended.union(self._running), self._gpu_devices)
            self._ended.clear()
            for pid in self._running:
                _kill(pid)
        if holders:
            self.kill_workers(timeout_s)
            wait_for_release(holders, deadline)
        self.fork_workers(generation, forks)
        self._reap(timeout_s, spared_generation=generation)

    def send_signal(self, number: int) -> None:
        """Send a signal to all workers, and not to their children.

        torchrun sends it to the children as well. A script that saves its state when it is asked to end may need them
        until then, as those of a `DataLoader`, whose death it would be told of by an exception.
        """
        with self._lock:
            for pid in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill_workers(self, timeout_s: float = _DEATH_TIMEOUT_S) -> None:
        """Kill all workers, with their children, and wait until they are gone. Stopped processes die as well.

        Args:
            timeout_s: how long they may take, in seconds.

        Raises:
            EDLError: a worker does not die, as a process that hangs in the kernel does not.
        """
        self._reap(timeout_s)

    def _reap(self, timeout_s: float, spared_generation: int = -1) -> None:
        """Kill all workers but those of one generation, and wait until they are gone."""
        deadline = time.monotonic() + timeout_s
        zygote_deadline = time.monotonic() + timeout_s / 2
        with self._lock:
            while left := [pid for pid, (found, _) in self._running.items() if found != spared_generation]:
                for pid in left:
                    _kill(pid)
                if time.monotonic() > deadline:
                    raise EDLError(f"workers {sorted(left)} do not die within {timeout_s:g} s of SIGKILL")
                if time.monotonic() > zygote_deadline:
                    self._kill_zygote()  # perhaps they are dead, and it does not say so
                self._lock.wait(_POLL_S)

    def close(self, timeout_s: float = 10.0) -> None:
        """Kill the workers and the zygote, and wait for them.

        Args:
            timeout_s: how long the workers may take to die, in seconds; after that they are left to the kernel.
        """
        with self._lock:
            self._closing = True
        if self._process is None:
            return
        with contextlib.suppress(EDLError):
            self.kill_workers(timeout_s)
        _kill(self._process.pid)  # with what an import started; not reaped yet, so the number is still its own
        self._process.wait()
        self._reader.close()  # at the socket's end
        self._socket.close()
        self._process = None

    def _kill_zygote(self) -> None:
        """Kill a zygote that does not answer. A pool that is to fork again needs another."""
        self._closing = True
        if self._process is not None:
            _kill(self._process.pid)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = zygote_command(theirs.fileno(), self._program)
            # A pipe or file is the workers' to read, as under torchrun. A terminal would stop them: they are no part
            # of its foreground.
            stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty() else None
            self._process = subprocess.Popen(command, env=self._environ, pass_fds=[theirs.fileno()], stdin=stdin)
        self._socket = ours
        self._ready = None
        self._lost = False
        self._reader = BackgroundLoop("edl-workers", self._read_messages)
        ours.send(self._program.encode())

    def _read_messages(self) -> None:
        """Handle what the zygote says, until it has ended."""
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
                os.killpg(pid, signal.SIGKILL)  # the children that it left behind
            return WorkerExit(generation, local_rank, pid, os.waitstatus_to_exitcode(message["status"]))
        return None

    def _handle_loss(self) -> ZygoteLost | None:
        self._lost = True
        for pid in self._running:
            _kill(pid)  # they die by themselves, but not their children
        self._running.clear()
        self._requested.clear()
        return None if self._closing else ZygoteLost()


def _kill(pid: int) -> None:
    """Kill a worker or the zygote and its children; it alone where it has no process group of its own yet."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
