"""A job of several nodes on this machine, with any launcher, whose processes can be watched and killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from benchmarks._child import ROOT, processes
from benchmarks._step_logs import StepLogs

__all__ = ["Hang", "Job", "Launch"]

_POLL_S = 0.02


class Hang(Exception):
    """Raised when something did not happen before its deadline."""


@dataclass(frozen=True)
class Launch:
    """How a node is started: its command, and additional environment variables."""

    command: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)


class Job:
    """Nodes, numbered from 0, and the step logs of their ranks.

    Args:
        folder: Folder for the step logs, and for each process's output with times (`time.monotonic()`).
        launch: Returns how to start node `number`.
        workers: Ranks on a node.
        leftover: A folder that nodes leave behind when they are killed.
    """

    def __init__(
        self, folder: Path, launch: Callable[[int], Launch], workers: int = 1, leftover: Path | None = None
    ) -> None:
        self.folder = folder
        self.step_logs = StepLogs(folder)
        self._launch = launch
        self._workers = workers
        self._leftover = leftover
        self.next_number = 0
        """The smallest number that no node has had yet."""
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: list[subprocess.Popen[bytes]] = []

    @property
    def nodes(self) -> set[int]:
        """Return the numbers of nodes that were started, and not killed, lost or asked to leave."""
        return set(self._nodes)

    def start(self, number: int) -> float:
        """Start a node, and return the time (`time.monotonic()`)."""
        self.next_number = max(self.next_number, number + 1)
        launch = self._launch(number)
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **launch.environ}
        begin = time.monotonic()
        process = subprocess.Popen(
            launch.command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        self._nodes[number] = process
        assert process.stdout is not None
        log = self.folder / f"node-{number}.log"
        threading.Thread(target=_copy, args=(process.stdout, log), daemon=True).start()
        return begin

    def places(self, numbers: Collection[int] | None = None) -> list[str]:
        """Return the places of all ranks, or of the ranks on some nodes."""
        chosen = self._nodes if numbers is None else numbers
        return [f"{number}-{rank}" for number in sorted(chosen) for rank in range(self._workers)]

    def together(self, places: Collection[str] | None = None, *, count: int = 3, timeout_s: float = 90.0) -> None:
        """Wait until each of `places` (default: all) has finished `count` more steps in a world of just these places.

        Raises:
            Hang: they have not within `timeout_s`.
        """
        since = time.monotonic()
        wanted = self.places() if places is None else places
        what = f"{len(wanted)} ranks do not train together"
        self._until(lambda: self.step_logs.together(wanted, since, count), what, timeout_s)

    def saved(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait until every rank has made `count` snapshots.

        Raises:
            Hang: they have not within `timeout_s`.
        """
        places = self.places()
        self._until(
            lambda: all(len(self.step_logs.saved[place]) >= count for place in places), "no snapshots", timeout_s
        )

    def _until(self, done: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self.step_logs.read()
            if done():
                return
            if ended := [number for number, process in self._nodes.items() if process.poll() is not None]:
                raise Hang(f"node {ended[0]} ended with exit code {self._nodes[ended[0]].returncode}{self._logs()}")
            if time.monotonic() > deadline:
                raise Hang(f"{what} within {timeout_s:g} s{self._logs()}")
            time.sleep(_POLL_S)

    def pid(self, place: str) -> int:
        """Return the process id of the rank at `place`."""
        self.step_logs.read()
        last = self.step_logs.last(place)
        assert last is not None
        return last.pid

    def signal_rank(self, place: str, number: int = signal.SIGKILL) -> float:
        """Send a signal to a rank, and return the time."""
        pid = self.pid(place)
        now = time.monotonic()
        os.kill(pid, number)
        for node, process in list(self._nodes.items()):
            if process.pid == pid and number == signal.SIGKILL:
                self._forget(node).wait(10)  # a rank that is its own node
        return now

    def kill_node(self, number: int) -> float:
        """Send SIGKILL to all processes on a node at once, and return the time."""
        process = self._forget(number)
        pids = processes(process.pid)
        now = time.monotonic()
        _kill(pids)
        process.wait(10)
        return now

    def ask_to_leave(self, number: int) -> float:
        """Send SIGTERM to a node's own process without waiting for its end, and return the time."""
        process = self._forget(number)
        now = time.monotonic()
        process.terminate()
        return now

    def lose(self, number: int) -> float:
        """Treat a node as gone, though its processes run until `close`, and return the time."""
        self._forget(number)
        return time.monotonic()

    def close(self) -> None:
        """Kill all remaining processes of all nodes."""
        for process in [*self._nodes.values(), *self._ended]:
            if process.poll() is None:
                _kill(processes(process.pid))
                process.wait(10)
        self._nodes.clear()
        self._ended.clear()
        if self._leftover is not None:
            shutil.rmtree(self._leftover, ignore_errors=True)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _forget(self, number: int) -> subprocess.Popen[bytes]:
        process = self._nodes.pop(number)
        self._ended.append(process)
        return process

    def _logs(self) -> str:
        logs = sorted(self.folder.glob("node-*.log"))
        return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _copy(stream: IO[bytes], log: Path) -> None:
    """Copy lines to a log, with the time before each."""
    with stream, log.open("ab") as file:
        for line in stream:
            file.write(f"{time.monotonic():.3f} ".encode() + line)
            file.flush()
