"""Tell a worker that computes or reads from a worker that waits, by what the kernel counts for its threads.

A worker that waits in a collective looks in either of two ways: its threads sleep (gloo, NCCL with blocking waits), or
a thread spins in user space on memory that a GPU or another process writes (`cudaStreamSynchronize`, and with it any
wait for an NCCL kernel; MPI). A spinning thread uses a whole core, so where a process has a GPU or MPI, CPU time alone
proves nothing. What a spinning thread does not do is ask the kernel for anything. A thread that computes does: memory
for its results (page faults), batches from a loader (reads, waits that end). So there only the CPU time of threads that
also talk to the kernel counts as work; elsewhere all of it does. Beside it, bytes count that were read or written, and
what the processes use that a worker started, such as those of its `DataLoader`.

What does not belong here: how long a worker may go without a step (`edl.collective.agent.health.hang_limits`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["ActivityMonitor", "ProcessUsage", "ThreadUsage", "is_active", "read_usage"]

_CPU_SHARE: Final = 0.1
"""Of one core, over all threads that talk to the kernel. Watchdogs, heartbeats and loops that sleep use some 1% to 5%;
evaluations that use less wait for a disk or network most of the time, which bytes tell of."""
_LEAST_SHARE: Final = 0.01
"""Of one core, for a thread to count at all, also where the machine is so busy that it hardly gets one: a thread that
wakes up now and then spends most of its time in the queue for a core there."""
_CALLS_PER_S: Final = 5.0
"""Requests to the kernel by a thread whose CPU time counts. A spinning thread makes none by itself; the kernel's
balancing of memory between NUMA nodes adds about one page fault a second to it."""
_BYTES_PER_S: Final = 256 * 1024
"""Read and written. A log, a metrics exporter and a monitor that reads `/proc` stay well below it."""
_SPINNING: Final = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "libmpi", "libuct", "libhccl")
"""What is in the memory map of a process that may wait by spinning: devices, MPI, UCX."""
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_SAMPLES: Final = 10
"""Measurements in the second half of a limit: fewer would miss a short pause, more would cost without telling more."""
_SHORTEST_S: Final = 0.5
"""Between two measurements: the kernel counts CPU time in hundredths of a second."""
_LONGEST_S: Final = 15.0
"""Between two measurements: a worker that works again is to be seen soon, and a measurement costs milliseconds."""


@dataclass(frozen=True)
class ThreadUsage:
    """What a thread has used since it began.

    Attributes:
        cpu_s: CPU time in seconds, user and system.
        calls: voluntary context switches, page faults, and calls of read and write.
        queued_s: how long it could have run and another thread had the core: of a busy machine this says nothing.
    """

    cpu_s: float
    calls: int
    queued_s: float = 0.0


@dataclass(frozen=True)
class ProcessUsage:
    """What a process and its descendants have used.

    Attributes:
        at_s: when, `time.monotonic()`.
        threads: by (thread id, start time in ticks), which no later thread repeats.
        nbytes: read and written by each process, by (process id, start time in ticks).
        may_spin: the process has a GPU or a library that waits by spinning in user space.
    """

    at_s: float
    threads: dict[tuple[int, int], ThreadUsage] = field(default_factory=dict)
    nbytes: dict[tuple[int, int], int] = field(default_factory=dict)
    may_spin: bool = False


def read_usage(pid: int) -> ProcessUsage:
    """Measure a process and its descendants. What has ended, or may not be looked at, is left out."""
    mapped = _read_text(Path(f"/proc/{pid}/maps"))
    usage = ProcessUsage(time.monotonic(), may_spin=any(name in mapped for name in _SPINNING))
    for process in _with_descendants(pid):
        for task in _tasks(process):
            found = _thread_usage(task)
            if found is not None:
                key, thread, children = found
                usage.threads[key] = thread
                if task.name == str(process):
                    usage.threads[-key[0], key[1]] = children  # of short-lived processes that it has waited for
                    usage.nbytes[key] = sum(_counters(task.parent.parent / "io", ("rchar", "wchar")))
    return usage


def is_active(before: ProcessUsage, after: ProcessUsage) -> bool:
    """Return whether a process worked between two measurements: it computed, or it read or wrote."""
    passed_s = after.at_s - before.at_s
    if passed_s <= 0:
        return False
    unused = ThreadUsage(0.0, 0)
    share = 0.0
    for key, thread in after.threads.items():
        first = before.threads.get(key, unused)
        cpu_s = thread.cpu_s - first.cpu_s
        if cpu_s < _LEAST_SHARE * passed_s:
            continue
        awake_s = max(passed_s - (thread.queued_s - first.queued_s), cpu_s)
        if not after.may_spin or thread.calls - first.calls >= _CALLS_PER_S * awake_s:
            share += cpu_s / awake_s
    nbytes = sum(count - before.nbytes.get(key, 0) for key, count in after.nbytes.items())
    return share >= _CPU_SHARE or nbytes >= _BYTES_PER_S * passed_s


class ActivityMonitor:
    """Remembers when processes were last seen to work. Measures only processes that it is asked about.

    Args:
        read: measures a process.
    """

    def __init__(self, read: Callable[[int], ProcessUsage] = read_usage) -> None:
        self._read = read
        self._usages: dict[int, ProcessUsage] = {}
        self._active_at: dict[int, float] = {}

    def last_active(self, pid: int, limit_s: float, now_s: float) -> float | None:
        """Return when a process was last seen to work (`time.monotonic()`), None if it never was.

        Args:
            pid: the process.
            limit_s: the limit that the process is about to reach; it is measured some ten times in half of that.
            now_s: `time.monotonic()`.
        """
        every_s = min(max(limit_s / 2 / _SAMPLES, _SHORTEST_S), _LONGEST_S)
        before = self._usages.get(pid)
        if before is None or now_s - before.at_s >= every_s:
            usage = self._usages[pid] = self._read(pid)
            if before is not None and is_active(before, usage):
                self._active_at[pid] = usage.at_s
        return self._active_at.get(pid)

    def forget(self, pid: int) -> None:
        """Forget a process that made a step, or ended."""
        self._usages.pop(pid, None)
        self._active_at.pop(pid, None)

    def clear(self) -> None:
        """Forget all processes."""
        self._usages.clear()
        self._active_at.clear()


def _with_descendants(pid: int) -> Iterator[int]:
    """Yield `pid` and the processes that it started, and they, and so on."""
    waiting = [pid]
    seen = {pid}
    while waiting:
        process = waiting.pop()
        yield process
        for task in _tasks(process):
            children = {int(child) for child in _read_text(task / "children").split()} - seen
            seen |= children
            waiting.extend(children)


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _thread_usage(task: Path) -> tuple[tuple[int, int], ThreadUsage, ThreadUsage] | None:
    """Read a thread's key, its usage, and that of the processes that its own process has waited for."""
    stat = _read_text(task / "stat").rpartition(")")[2].split()
    if len(stat) < 20:
        return None
    # proc_pid_stat(5), counted from the state, which is the first field after the name.
    minor, minor_children, major, major_children, user, system, user_children, system_children = map(int, stat[7:15])
    waits = sum(_counters(task / "status", ("voluntary_ctxt_switches",)))
    calls = sum(_counters(task / "io", ("syscr", "syscw")))
    # Nanoseconds on a core and in the queue for one; the kernel may have been built without.
    times = _read_text(task / "schedstat").split() or ["0", "0"]
    cpu_s = max((user + system) / _TICKS_PER_S, int(times[0]) / 1e9)
    own = ThreadUsage(cpu_s, minor + major + waits + calls, int(times[1]) / 1e9)
    children = ThreadUsage((user_children + system_children) / _TICKS_PER_S, minor_children + major_children)
    return (int(task.name), int(stat[19])), own, children


def _counters(path: Path, names: tuple[str, ...]) -> list[int]:
    """Read numbers from a file of lines `name: number`; missing ones are left out."""
    lines = (line.partition(":") for line in _read_text(path).splitlines())
    return [int(value) for name, _, value in lines if name in names]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
