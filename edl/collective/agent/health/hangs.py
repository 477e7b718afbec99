"""How long a worker may go without a sign of progress, and which worker of a node hangs.

A hang is the absence of steps, so only workers that report steps can be watched: a worker that never reported any is
left alone. Evaluation between two steps is also an absence of steps. Three things tell it from a hang: the script
declares it, with a limit (phase BUSY); the kernel sees the worker's process work, which gives it a longer limit; and
another rank of the job works, for which this rank waits.

A worker that waits in a collective looks in either of two ways: its threads sleep (gloo, NCCL with blocking waits), or
a thread spins in user space on memory that a GPU or another process writes (`cudaStreamSynchronize`, and with it any
wait for an NCCL kernel; MPI). A spinning thread uses a whole core, so where a process has a GPU or MPI, CPU time alone
proves nothing. What a spinning thread does not do is ask the kernel for anything. A thread that computes does: memory
for its results (page faults), batches from a loader (reads, waits that end). So there only the CPU time of threads that
also talk to the kernel counts as work; elsewhere all of it does. Beside it, bytes count that were read or written, and
what the processes use that a worker started, such as those of its `DataLoader`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from edl.collective.worker_status import Phase, WorkerStatus

__all__ = [
    "ActivityMonitor",
    "HangDetector",
    "HangLimits",
    "ProcessUsage",
    "ProgressLimit",
    "ThreadUsage",
    "describe_hang",
    "find_progress_limit",
    "is_active",
    "is_working",
    "read_usage",
]


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
    """Remembers when processes were last seen to work. Measures only processes that it is asked about."""

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


# --- How long a worker may go without a sign of progress ---


_ENOUGH_STEPS: Final = 3
"""So many steps have to be measured before their median counts: the first two still compile and open files."""
_LATER_S: Final = 60.0
"""So much longer than any limit of the rank that hangs may others wait for it, so that the cause is named, not they:
more than the time between two looks of an agent whose machine is busy."""


@dataclass(frozen=True)
class HangLimits:
    """How long a worker may go without a sign of progress. Times are in seconds.

    Attributes:
        floor_s: between two steps at least; also what evaluation between two steps may take.
        factor: times the median of recent steps, if that is longer.
        first_step_s: for the first steps of a world, which compile, open files and connect.
        start_s: from the fork to the first step or load, for a script that has reported steps before.
        load_s: for reading a checkpoint.
        begin_s: from the fork to the first line of the script; a fork that takes longer waits for something that its
            parent's other threads had, and another process takes its place.
        save_s: for copying the state. Ranks that wait to agree on that with a rank that perhaps evaluates or makes a
            long step may do so for longer than that rank may take.
        working_factor: by how much all of these limits are longer for a worker whose process was seen to work within
            the last half of the limit. Not for ever: a loop without an end works, too.
    """

    floor_s: float = 300.0
    factor: float = 20.0
    first_step_s: float = 900.0
    start_s: float = 900.0
    load_s: float = 1800.0
    begin_s: float = 30.0
    save_s: float = 900.0
    working_factor: float = 10.0


@dataclass(frozen=True)
class ProgressLimit:
    """How long a worker has gone without a sign of progress, and how long it may.

    Attributes:
        since_s: when the last sign was given (`time.monotonic()`).
        limit_s: after so many seconds a worker that does not work counts as hanging.
        what: the worker does without a sign, in words.
        of: what the limit follows from, in words.
        declared: the script itself has set the limit.
    """

    since_s: float
    limit_s: float
    what: str
    of: str = ""
    declared: bool = False

    def is_suspect(self, now_s: float) -> bool:
        """Return whether half of the limit has passed at `now_s`: from then on the worker's process is measured."""
        return not self.declared and now_s - self.since_s > self.limit_s / 2


def find_progress_limit(status: WorkerStatus, limits: HangLimits, *, forked_s: float = 0.0) -> ProgressLimit | None:
    """Find how long a worker may go on as it does.

    Args:
        status: the worker's.
        limits: how long workers may go without a sign of progress.
        forked_s: when this worker was forked (`time.monotonic()`); a step from before was another worker's, with the
            same page.

    Returns:
        The limit; None if the worker is not watched.
    """
    if status.phase in (Phase.PAUSE, Phase.EXIT):
        return None  # these wait for others, and have limits of their own
    if status.phase is Phase.BUSY:
        what = f"busy with {status.busy_with}"
        return ProgressLimit(status.phase_since, status.busy_limit_s, what, "that the script has set", declared=True)
    if status.phase in (Phase.TRAIN, Phase.ROLLBACK):
        # A copy between two steps ends a phase: what counts is the time since the last sign of either.
        since_s = max(status.step_at, status.phase_since)
        what = f"no step after step {status.step}"
        if status.step < 0 or status.step_at < forked_s or len(status.durations_s) < _ENOUGH_STEPS:
            return ProgressLimit(since_s, max(limits.first_step_s, limits.floor_s), what, "for the first steps")
        usual_s = statistics.median(status.durations_s)
        return ProgressLimit(since_s, _step_limit_s(status, limits), what, f"where a step takes {usual_s:.3g} s")
    if status.phase is Phase.START and status.step < 0:
        return None  # perhaps a script that reports nothing at all
    limit_s = {
        Phase.START: limits.start_s,
        Phase.LOAD: limits.load_s,
        Phase.SAVE: limits.save_s,
        Phase.AGREE: max(limits.save_s, limits.first_step_s, _step_limit_s(status, limits)) + _LATER_S,
    }[status.phase]
    return ProgressLimit(status.phase_since, limit_s, f"in phase {status.phase.name}")


def is_working(found: ProgressLimit, now_s: float, active_s: float | None) -> bool:
    """Return whether a worker was seen to work within the last half of its limit.

    Args:
        found: the worker's `find_progress_limit`.
        now_s: the time now (`time.monotonic()`).
        active_s: when its process was last seen to work (`time.monotonic()`), None for never.
    """
    return not found.declared and active_s is not None and now_s - active_s <= found.limit_s / 2


def describe_hang(
    found: ProgressLimit, now_s: float, limits: HangLimits, active_s: float | None = None, awaited_s: float = 0.0
) -> str | None:
    """Return why a worker is taken to hang, None if it is not.

    Args:
        found: the worker's `find_progress_limit`.
        now_s: the time now (`time.monotonic()`).
        limits: how long workers may go without a sign of progress.
        active_s: when its process was last seen to work, None for never.
        awaited_s: until when another rank was known to work, for which this rank may have waited.
    """
    limit_s = found.limit_s
    since_s = found.since_s
    seen = ""
    if is_working(found, now_s, active_s):
        limit_s *= limits.working_factor
        seen = " for a process that works"
    elif not found.declared:
        since_s = max(since_s, awaited_s)
    if now_s - since_s <= limit_s:
        return None
    of = f" {found.of}" if found.of else ""
    return f"{found.what} for {now_s - since_s:.1f} s; the limit is {limit_s:.3g} s{of}{seen}"


def _step_limit_s(status: WorkerStatus, limits: HangLimits) -> float:
    """Return how many seconds a step may take, after the first steps."""
    return max(limits.floor_s, limits.factor * statistics.median(status.durations_s or (0.0,)))


# --- The worker of a node that hangs ---


_BUSY_S: Final = 1.0
"""So long does a worker have to be busy before other nodes are told: a change costs a write to the store. With less,
every short evaluation would; with more, ranks that wait with a short limit could be taken to hang."""


class HangDetector:
    """Watches the workers of one generation on one node.

    Args:
        limits: how long workers may go without a sign of progress.
        activity: measures their processes.
    """

    def __init__(self, limits: HangLimits, activity: ActivityMonitor | None = None) -> None:
        self._limits = limits
        self._activity = activity or ActivityMonitor()
        self._forked_s = 0.0
        self._awaited_s = 0.0
        self.busy = False
        """Whether a worker here does something long, so that ranks that wait for it do not hang."""
        self.others_busy = False
        """Whether a worker of another node does."""

    def begin_generation(self, forked_s: float) -> None:
        """Watch the workers of a new generation."""
        self._forked_s = forked_s
        self._awaited_s = forked_s
        self.busy = False
        self._activity.clear()

    def find_hung(self, workers: Mapping[int, tuple[int, WorkerStatus]], now_s: float) -> tuple[int, str] | None:
        """Find a worker that hangs.

        Returns:
            The local rank, and why it is taken to hang; None if no worker does.
        """
        waiting: list[tuple[int, str]] = []
        hung: list[tuple[int, str]] = []
        busy = False
        for local_rank, (pid, status) in workers.items():
            found = find_progress_limit(status, self._limits, forked_s=self._forked_s)
            if found is None or not found.is_suspect(now_s):
                self._activity.forget(pid)
            if found is None:
                continue
            active_s = self._activity.last_active(pid, found.limit_s, now_s) if found.is_suspect(now_s) else None
            works = is_working(found, now_s, active_s)
            why = describe_hang(found, now_s, self._limits, active_s, self._awaited_s)
            if why is not None:
                (hung if works or found.declared else waiting).append((local_rank, why))
            elif works or (status.phase is Phase.BUSY and now_s - found.since_s > _BUSY_S):
                busy = True
        self.busy = busy
        if busy or self.others_busy:
            self._awaited_s = now_s  # a rank that waits for a rank that works does not hang
            waiting.clear()
        return next(iter(hung + waiting), None)
