"""Decides how long a worker may go without progress, and finds the worker that hangs on a node.

A hang is an absence of steps, so a worker that has never reported a step is not watched. No steps finish during an
evaluation either. Three things can distinguish an evaluation from a hang. The script may declare the evaluation, with a
limit (phase BUSY). The kernel's counters may show that the worker's process works, which gives the worker a longer
limit. Or another rank of the job works, and this rank waits for that rank.

When a worker waits in a collective, either it sleeps (gloo), or one of its threads polls memory and uses a whole core
(MPI, and any wait for an NCCL kernel). But a polling thread makes no system calls, while a thread that computes asks
the kernel for memory and batches. So if a process uses a GPU or MPI, only the CPU time of threads that also make system
calls counts as work. Bytes read or written and the resources used by child processes count as well.
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

_CPU_SHARE: Final = 0.1  # of a core counts as work: watchdogs, heartbeats and loops that sleep use about 1% to 5%
_LEAST_SHARE: Final = 0.01  # of a core; a thread with less spends most of its time waiting, even on a busy machine
_CALLS_PER_S: Final = 5.0  # requests to the kernel for a thread's time to count: a spinning one makes about one
_BYTES_PER_S: Final = 256 * 1024  # read and written, that count as work; logs and monitors stay well below
_SPINNING: Final = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "libmpi", "libuct", "libhccl")  # in a process's memory map
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_SAMPLES: Final = 10  # measurements in the second half of a limit; fewer would miss short bursts of work
_SHORTEST_S: Final = 0.5  # between two measurements: the kernel counts CPU time in hundredths of a second
_LONGEST_S: Final = 15.0  # between two measurements; more would notice late that a worker works again


@dataclass(frozen=True)
class ThreadUsage:
    """The resources that a thread has used since it began."""

    cpu_s: float  # CPU time in seconds, user and system
    calls: int  # number of voluntary context switches, page faults, and calls of read and write
    queued_s: float = 0.0  # seconds in which it could have run but another thread had the core


@dataclass(frozen=True)
class ProcessUsage:
    """The resources that a process and its descendants have used."""

    at_s: float  # when this was measured (`time.monotonic()`)
    threads: dict[tuple[int, int], ThreadUsage] = field(default_factory=dict)  # by (thread id, start in ticks)
    nbytes: dict[tuple[int, int], int] = field(default_factory=dict)  # read and written, by (pid, start in ticks)
    may_spin: bool = False  # whether the process has a GPU or a library that waits by spinning in user space


def read_usage(pid: int) -> ProcessUsage:
    """Measure a process and its descendants. Ignores processes that have ended or that this process may not inspect."""
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
    """Remembers when processes were last seen working. Measures only processes that callers ask about."""

    def __init__(self, read: Callable[[int], ProcessUsage] = read_usage) -> None:
        self._read = read
        self._usages: dict[int, ProcessUsage] = {}
        self._active_at: dict[int, float] = {}

    def last_active(self, pid: int, limit_s: float, now_s: float) -> float | None:
        """Return when a process was last seen working (`time.monotonic()`), or None. `limit_s` is its hang limit."""
        every_s = min(max(limit_s / 2 / _SAMPLES, _SHORTEST_S), _LONGEST_S)
        before = self._usages.get(pid)
        if before is None or now_s - before.at_s >= every_s:
            usage = self._usages[pid] = self._read(pid)
            if before is not None and is_active(before, usage):
                self._active_at[pid] = usage.at_s
        return self._active_at.get(pid)

    def forget(self, pid: int) -> None:
        self._usages.pop(pid, None)
        self._active_at.pop(pid, None)

    def clear(self) -> None:
        self._usages.clear()
        self._active_at.clear()


def _with_descendants(pid: int) -> Iterator[int]:
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
    """Read a thread's key, its usage, and the usage of child processes that its process has waited for."""
    stat = _read_text(task / "stat").rpartition(")")[2].split()
    if len(stat) < 20:
        return None
    # proc_pid_stat(5), counted from the state, which is the first field after the name.
    minor, minor_children, major, major_children, user, system, user_children, system_children = map(int, stat[7:15])
    waits = sum(_counters(task / "status", ("voluntary_ctxt_switches",)))
    calls = sum(_counters(task / "io", ("syscr", "syscw")))
    # Nanoseconds on a core and waiting for one; some kernels are built without this file.
    times = _read_text(task / "schedstat").split() or ["0", "0"]
    cpu_s = max((user + system) / _TICKS_PER_S, int(times[0]) / 1e9)
    own = ThreadUsage(cpu_s, minor + major + waits + calls, int(times[1]) / 1e9)
    children = ThreadUsage((user_children + system_children) / _TICKS_PER_S, minor_children + major_children)
    return (int(task.name), int(stat[19])), own, children


def _counters(path: Path, names: tuple[str, ...]) -> list[int]:
    """Read the numbers for `names` from a file of lines `name: number`; missing names are left out."""
    lines = (line.partition(":") for line in _read_text(path).splitlines())
    return [int(value) for name, _, value in lines if name in names]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


_ENOUGH_STEPS: Final = 3  # measured steps from which on their median counts: the first two compile and open files
_LATER_S: Final = 60.0  # extra for ranks that wait, so that the rank that hangs is named: above the time of a check


@dataclass(frozen=True)
class HangLimits:
    """How long a worker may go without progress. Times are in seconds."""

    floor_s: float = 300.0  # least limit between two steps; it also bounds evaluation between two steps
    factor: float = 20.0  # the limit in medians of recent steps, if that is longer
    first_step_s: float = 900.0  # limit for the first steps of a world, which compile, open files and connect
    start_s: float = 900.0  # limit from the fork to the first step or load, for a script that has reported steps before
    load_s: float = 1800.0  # limit for reading a checkpoint
    begin_s: float = 30.0  # from the fork to the script's first line; a fork that takes longer is replaced
    save_s: float = 900.0  # for copying the state; a rank that waits to agree on a save has a longer limit
    working_factor: float = 10.0  # for a process that recently worked; finite, as an endless loop works too


@dataclass(frozen=True)
class ProgressLimit:
    """How long a worker has gone without progress, and how long it may go without progress."""

    since_s: float  # when it last made progress (`time.monotonic()`)
    limit_s: float  # seconds after which a worker that does not work counts as hung
    what: str  # what the worker has been doing, as text
    of: str = ""  # what the limit is derived from, as text
    declared: bool = False  # whether the script itself set the limit

    def is_suspect(self, now_s: float) -> bool:
        """Return whether half of the limit has passed at `now_s`; from then on the worker's process is measured."""
        return not self.declared and now_s - self.since_s > self.limit_s / 2


def find_progress_limit(status: WorkerStatus, limits: HangLimits, *, forked_s: float = 0.0) -> ProgressLimit | None:
    """Return a worker's limit, or None if the worker is not watched. Steps before `forked_s` are another worker's."""
    if status.phase in (Phase.PAUSE, Phase.EXIT):
        return None  # these wait for others, and have their own limits
    if status.phase is Phase.BUSY:
        what = f"busy with {status.busy_with}"
        return ProgressLimit(status.phase_since, status.busy_limit_s, what, "that the script has set", declared=True)
    if status.phase in (Phase.TRAIN, Phase.ROLLBACK):
        # A copy between two steps ends a phase, so the time counts since the last step or change of phase.
        since_s = max(status.step_at, status.phase_since)
        what = f"no step after step {status.step}"
        if status.step < 0 or status.step_at < forked_s or len(status.durations_s) < _ENOUGH_STEPS:
            return ProgressLimit(since_s, max(limits.first_step_s, limits.floor_s), what, "for the first steps")
        usual_s = statistics.median(status.durations_s)
        return ProgressLimit(since_s, _step_limit_s(status, limits), what, f"for steps that take {usual_s:.3g} s")
    if status.phase is Phase.START and status.step < 0:
        return None  # perhaps the script reports nothing at all
    limit_s = {
        Phase.START: limits.start_s,
        Phase.LOAD: limits.load_s,
        Phase.SAVE: limits.save_s,
        Phase.AGREE: max(limits.save_s, limits.first_step_s, _step_limit_s(status, limits)) + _LATER_S,
    }[status.phase]
    return ProgressLimit(status.phase_since, limit_s, f"in phase {status.phase.name}")


def is_working(found: ProgressLimit, now_s: float, active_s: float | None) -> bool:
    return not found.declared and active_s is not None and now_s - active_s <= found.limit_s / 2


def describe_hang(
    found: ProgressLimit, now_s: float, limits: HangLimits, active_s: float | None = None, awaited_s: float = 0.0
) -> str | None:
    """Return why a worker counts as hung, or None if it does not.

    `active_s` is when the worker was last seen working, and `awaited_s` is when another rank was last seen working.
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
    return max(limits.floor_s, limits.factor * statistics.median(status.durations_s or (0.0,)))


_BUSY_S: Final = 1.0  # before other nodes are told, which costs a write; with more, ranks that wait could count as hung


class HangDetector:
    """Watches the workers of one generation on one node."""

    def __init__(self, limits: HangLimits, activity: ActivityMonitor | None = None) -> None:
        self._limits = limits
        self._activity = activity or ActivityMonitor()
        self._forked_s = 0.0
        self._awaited_s = 0.0
        self.busy = False  # whether a worker here does something long, so that ranks that wait for it are not hung
        self.others_busy = False  # whether a worker of another node does something long

    def begin_generation(self, forked_s: float) -> None:
        self._forked_s = forked_s
        self._awaited_s = forked_s
        self.busy = False
        self._activity.clear()

    def find_hung(self, workers: Mapping[int, tuple[int, WorkerStatus]], now_s: float) -> tuple[int, str] | None:
        """Find a worker that hangs. Returns its local rank, and why it counts as hung; None if no worker hangs."""
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
