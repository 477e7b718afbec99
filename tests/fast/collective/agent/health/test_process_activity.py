"""Whether a process works, by what the kernel counts: real processes that sleep, wait, spin, compute and read."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
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

GLOO = """
import datetime, threading, torch, torch.distributed as dist
store, minutes = dist.HashStore(), datetime.timedelta(minutes=9)
groups = {}
def join(rank): groups[rank] = dist.ProcessGroupGloo(store, rank, 2, minutes)
other = threading.Thread(target=join, args=(1,))
other.start(); join(0); other.join()
print("there", flush=True)
groups[0].allreduce([torch.zeros(8)]).wait()
"""
COMPUTE = "print('there', flush=True)\nwhile True: sum(range(1000))"
CHILD = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {COMPUTE!r}])"
READ = (
    "import time\nf = open('/dev/zero', 'rb')\nprint('there', flush=True)\nwhile True: f.read(2**22); time.sleep(0.05)"
)
POLL = "import time\nprint('there', flush=True)\nwhile True: time.sleep(0.05)"


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


def pairs(pid: int) -> Iterator[tuple[ProcessUsage, ProcessUsage]]:
    """Measurements half a second apart."""
    before = read_usage(pid)
    while True:
        time.sleep(0.5)
        yield before, (before := read_usage(pid))


@pytest.mark.parametrize("source", [COMPUTE, CHILD, READ], ids=["computes", "has a child that does", "reads"])
def test_a_process_that_works_is_seen(source: str) -> None:
    with running(source) as pid:
        assert any(is_active(*pair) for pair in itertools.islice(pairs(pid), 60))


@pytest.mark.parametrize("source", [GLOO, POLL], ids=["waits in gloo", "polls"])
def test_a_process_that_waits_is_not(source: str) -> None:
    with running(source) as pid:
        # What it did before it waited may still be counted at first.
        quiet = 0
        for pair in itertools.islice(pairs(pid), 60):
            quiet = 0 if is_active(*pair) else quiet + 1
            if quiet == 3:
                return
        pytest.fail("it was never quiet")


def test_spinning_for_a_device_is_no_work() -> None:
    with running(COMPUTE) as pid:
        for before, after in itertools.islice(pairs(pid), 60):
            if is_active(before, after):
                break
        assert is_active(before, after), "without a device, CPU time counts"
        assert not is_active(before, replace(after, may_spin=True)), "a loop that asks the kernel for nothing"


def usage(at_s: float, cpu_s: float, calls: int, queued_s: float = 0.0) -> ProcessUsage:
    return ProcessUsage(at_s, {(1, 1): ThreadUsage(cpu_s, calls, queued_s)}, may_spin=True)


@pytest.mark.parametrize(
    ("after", "works"),
    [
        (usage(10.0, 9.9, 2), False),  # a wait for a kernel of NCCL
        (usage(10.0, 9.9, 1000), True),
        (usage(10.0, 0.2, 1000), False),  # a watchdog
        (usage(10.0, 0.2, 1000, queued_s=9.0), True),  # on a busy machine
        (usage(10.0, 0.05, 100, queued_s=9.9), False),
    ],
)
def test_cpu_time_counts_beside_calls(after: ProcessUsage, works: bool) -> None:
    assert is_active(usage(0.0, 0.0, 0), after) is works


def test_reused_thread_id_is_another_thread() -> None:
    """A thread id used again is another thread."""
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


def test_a_process_that_is_gone_uses_nothing() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    gone = read_usage(done.pid)
    assert (gone.threads, gone.nbytes) == ({}, {})
    assert not is_active(gone, gone)


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
        deadline = time.monotonic() + 60
        while not all(read_queued_s(process.pid) > 0.05 for process in both):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert read_queued_s(both[0].pid) == 0.0, "it is gone"
