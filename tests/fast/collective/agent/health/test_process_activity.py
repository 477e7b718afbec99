"""Whether a process works, by what the kernel counts: of real processes, and of made-up numbers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edl.collective.agent.health.process_activity import (
    ActivityMonitor,
    ProcessUsage,
    ThreadUsage,
    is_active,
    read_queued_s,
    read_usage,
)
from tests.waiting import wait_until

COMPUTE = "print('there', flush=True)\nwhile True: sum(range(1000))"
CHILD = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {COMPUTE!r}])"
READ = (
    "import time\nf = open('/dev/zero', 'rb')\nprint('there', flush=True)\nwhile True: f.read(2**22); time.sleep(0.05)"
)


@contextlib.contextmanager
def running(source: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        yield process.pid
    finally:
        for pid in sorted({key[0] for key in read_usage(process.pid).nbytes} - {process.pid}):
            subprocess.run(["kill", "-9", str(pid)], check=False)
        process.kill()
        process.communicate()


@pytest.mark.parametrize("source", [CHILD, READ], ids=["has a child that computes", "reads"])
def test_a_process_that_works_is_seen(source: str) -> None:
    with running(source) as pid:
        before = read_usage(pid)
        wait_until(lambda: is_active(before, read_usage(pid)), "it works")
        after = read_usage(pid)
        assert not is_active(after, replace(after, at_s=after.at_s + 1.0)), "and does nothing any more"
    gone = read_usage(pid)
    assert (gone.threads, gone.nbytes, is_active(gone, gone)) == ({}, {}, False)


def usage(at_s: float, cpu_s: float, calls: int, queued_s: float = 0.0, may_spin: bool = True) -> ProcessUsage:
    return ProcessUsage(at_s, {(1, 1): ThreadUsage(cpu_s, calls, queued_s)}, may_spin=may_spin)


@pytest.mark.parametrize(
    ("after", "works"),
    [
        (usage(10.0, 9.9, 2), False),  # a wait for a kernel of NCCL
        (usage(10.0, 9.9, 2, may_spin=False), True),  # without a device, CPU time counts
        (usage(10.0, 9.9, 1000), True),
        (usage(10.0, 0.2, 1000), False),  # a watchdog
        (usage(10.0, 0.2, 1000, queued_s=9.0), True),  # on a busy machine
        (usage(10.0, 0.05, 100, queued_s=9.9), False),
        (usage(10.0, 0.05, 5, may_spin=False), False),  # polls
    ],
)
def test_cpu_time_counts_beside_calls(after: ProcessUsage, works: bool) -> None:
    assert is_active(usage(0.0, 0.0, 0), after) is works


def test_reused_thread_id_is_another_thread() -> None:
    before = ProcessUsage(0.0, {(7, 1): ThreadUsage(90.0, 1000)})
    assert not is_active(before, ProcessUsage(10.0, {(7, 2): ThreadUsage(0.1, 5)}))
    assert is_active(before, ProcessUsage(10.0, {(7, 2): ThreadUsage(5.0, 5)}))


def test_a_process_is_measured_only_so_often() -> None:
    measured: list[float] = []

    def read(pid: int) -> ProcessUsage:
        measured.append(float(pid))
        return ProcessUsage(now, {(pid, 1): ThreadUsage(now, 0)})

    monitor = ActivityMonitor(read)
    for now in (0.0, 1.0, 4.9, 5.0, 5.1, 10.0):
        seen = monitor.last_active(7, 100.0, now)
    assert (len(measured), seen) == (3, 10.0)
    monitor.forget(7)
    assert monitor.last_active(7, 100.0, 11.0) is None


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waits for a core")
def test_who_waits_for_a_core_is_queued() -> None:
    """Two processes that compute share one core."""
    core = {min(os.sched_getaffinity(0))}
    source = f"import os; os.sched_setaffinity(0, {core}); print(flush=True)\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in both:
            assert process.stdout is not None
            process.stdout.readline()
        wait_until(lambda: all(read_queued_s(process.pid) > 0.05 for process in both), "both waited for the core")
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert read_queued_s(both[0].pid) == 0.0, "it is gone"
