"""Who hangs on a node, in simulated time; whether a process works, as the kernel counts; an agent's signs of life."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edl.collective.agent.health.hang_detector import HangDetector
from edl.collective.agent.health.hang_limits import HangLimits, describe_hang, find_progress_limit
from edl.collective.agent.health.heartbeat import Heartbeat
from edl.collective.agent.health.process_activity import (
    ActivityMonitor,
    ProcessUsage,
    ThreadUsage,
    is_active,
    read_queued_s,
    read_usage,
)
from edl.collective.worker_status import Phase, WorkerStatus, WorkerStatusPage
from tests.waiting import wait_until

LIMITS = HangLimits(floor_s=10.0, factor=5.0, first_step_s=60.0, start_s=30.0, load_s=40.0, save_s=20.0)


def status(phase: Phase = Phase.TRAIN, **fields: object) -> WorkerStatus:
    values = {"phase_since": 100.0, "step": 7, "step_at": 100.0, "durations_s": (1.0, 1.0, 1.0), **fields}
    return replace(WorkerStatusPage.from_env().read_status(), phase=phase, **values)


def why_hung(status: WorkerStatus, now_s: float, limits: HangLimits, forked_s: float = 0.0) -> str | None:
    found = find_progress_limit(status, limits, forked_s=forked_s)
    return None if found is None else describe_hang(found, now_s, limits)


@pytest.mark.parametrize("fields", [{"step": -1, "step_at": 0.0}, {"durations_s": (0.1, 0.1)}])
def test_first_steps_have_their_own_limit(fields: dict[str, object]) -> None:
    assert why_hung(status(**fields), 160.0, LIMITS) is None
    assert "for the first steps" in (why_hung(status(**fields), 160.1, LIMITS) or "")


def test_save_or_new_worker_restarts_time() -> None:
    assert why_hung(status(step_at=50.0, phase_since=105.0), 115.0, LIMITS) is None
    assert why_hung(status(step_at=50.0, phase_since=105.0), 115.1, LIMITS) is not None


@pytest.mark.parametrize(
    ("phase", "limit_s"), [(Phase.START, 30.0), (Phase.LOAD, 40.0), (Phase.SAVE, 20.0), (Phase.AGREE, 120.0)]
)
def test_other_phases_have_their_limits(phase: Phase, limit_s: float) -> None:
    assert why_hung(status(phase), 100.0 + limit_s, LIMITS) is None
    assert f"in phase {phase.name}" in (why_hung(status(phase), 100.1 + limit_s, LIMITS) or "")


@pytest.mark.parametrize("limits", [HangLimits(floor_s=3600.0), HangLimits(), HangLimits(save_s=4000.0)])
@pytest.mark.parametrize("durations_s", [(), (200.0, 200.0, 200.0)])
@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.SAVE])
def test_hanging_rank_is_found_first(limits: HangLimits, durations_s: tuple[float, ...], phase: Phase) -> None:
    waiting, hanging = (status(each, durations_s=durations_s) for each in (Phase.AGREE, phase))
    found = next(now_s for now_s in range(100, 20000, 30) if why_hung(hanging, now_s, limits))
    assert why_hung(waiting, found, limits) is None
    assert why_hung(waiting, 20000.0, limits) is not None, "but not for ever"


def test_silent_and_waiting_scripts_are_left() -> None:
    for one in (status(Phase.START, step=-1), status(Phase.PAUSE), status(Phase.EXIT)):
        assert why_hung(one, 1e9, LIMITS) is None


WORKING = HangLimits(floor_s=10.0, factor=5.0, working_factor=4.0)


class Simulation:
    """Workers by local rank, which is their process id as well; those in `working` use a core."""

    def __init__(self, *working: int) -> None:
        self.working = set(working)
        self.now_s = 100.0
        self.statuses = {rank: status() for rank in (0, 1)}
        self.detector = HangDetector(WORKING, ActivityMonitor(self._usage))
        self.detector.begin_generation(0.0)

    def _usage(self, pid: int) -> ProcessUsage:
        used_s = self.now_s if pid in self.working else 0.0
        return ProcessUsage(self.now_s, {(pid, 1): ThreadUsage(used_s, 0)})

    def until_hung(self, end_s: float) -> tuple[float, int, str] | None:
        """When, who and why; None if nobody is found until `end_s`."""
        while self.now_s < end_s:
            self.now_s += 0.125  # exact in binary
            workers = {rank: (rank, one) for rank, one in self.statuses.items()}
            if (found := self.detector.find_hung(workers, self.now_s)) is not None:
                return round(self.now_s - 100.0, 1), *found
        return None


def test_a_worker_that_works_has_longer() -> None:
    simulation = Simulation(1)
    assert simulation.until_hung(139.0) is None, "rank 0 waits for rank 1"
    assert simulation.detector.busy
    found = simulation.until_hung(200.0)
    assert found[:2] == (40.1, 1)
    assert found[2].endswith("the limit is 40 s where a step takes 1 s for a process that works")


def test_a_worker_that_stops_working_hangs() -> None:
    simulation = Simulation(1)
    assert simulation.until_hung(130.0) is None
    simulation.working.clear()
    found = simulation.until_hung(200.0)
    assert 44.0 < found[0] < 45.5, "half a limit after it was seen to work last, and a limit for who waited for it"


def test_what_is_declared_has_its_own_limit() -> None:
    simulation = Simulation()
    simulation.statuses[0] = status(Phase.BUSY, busy_with="evaluation", busy_limit_s=500.0)
    assert simulation.until_hung(599.0) is None
    found = simulation.until_hung(700.0)
    assert found == (
        500.1, 0, "busy with evaluation for 500.1 s; the limit is 500 s that the script has set",
    )  # fmt: skip


def test_another_nodes_worker_is_waited_for() -> None:
    simulation = Simulation()
    simulation.detector.others_busy = True
    assert simulation.until_hung(300.0) is None
    assert not simulation.detector.busy, "or two nodes would excuse each other for ever"
    simulation.detector.others_busy = False
    assert simulation.until_hung(400.0) is not None


COMPUTE = "print('there', flush=True)\nwhile True: sum(range(1000))"
CHILD = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {COMPUTE!r}])"
READ = """
import threading
file, event = open("/dev/zero", "rb"), threading.Event()
print("there", flush=True)
while True: file.read(2**22); event.wait(0.05)
"""


@contextlib.contextmanager
def running(source: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    try:
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


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waits for a core")
def test_who_waits_for_a_core_is_queued() -> None:
    core = {min(os.sched_getaffinity(0))}
    source = f"import os; os.sched_setaffinity(0, {core}); print(flush=True)\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in both:
            process.stdout.readline()
        wait_until(lambda: all(read_queued_s(process.pid) > 0.05 for process in both), "both waited for the core")
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert read_queued_s(both[0].pid) == 0.0, "it is gone"


class Beats:
    """An agent's beats; its thread has ended, and turns are this class's to make."""

    def __init__(self) -> None:
        self.now_s, self.touch_s = 100.0, 0.0
        self.beats: list[float] = []
        self.touched = self.woken = 0
        self._heartbeat = Heartbeat(1.0, self.beats.append, self._touch, self._wake, clock=lambda: self.now_s)
        self._heartbeat.close()
        self.allow = self._heartbeat.allow_beats
        self.touched = 0

    def _touch(self) -> None:
        self.touched += 1
        self.now_s += self.touch_s

    def _wake(self) -> None:
        self.woken += 1

    def turn(self, after_s: float = 0.2) -> int:
        """Make a turn and return how many beats there were."""
        self.now_s += after_s
        self._heartbeat._turn()
        return len(self.beats)


def test_sign_of_life_while_records_allow() -> None:
    simulation = Beats()
    assert simulation.turn() == 0, "nobody has looked yet"
    simulation.allow(100.1, 101.0)
    assert [simulation.turn() for _ in range(5)] == [1, 2, 3, 3, 3]
    assert (simulation.touched, simulation.woken) == (6, 0)
    simulation.allow(101.1, math.inf)
    assert simulation.turn() == 4


def test_stopped_agent_looks_before_it_beats() -> None:
    simulation = Beats()
    simulation.allow(100.0, math.inf)
    assert simulation.turn(1.0) == 1, "late, and not stopped"
    assert simulation.turn(1.1) == 1
    assert (simulation.turn(), simulation.woken) == (1, 1)
    simulation.allow(102.0, math.inf)
    assert simulation.turn() == 1, "the records were asked for before the stop was over"
    simulation.allow(102.2, math.inf)
    assert simulation.turn() == 2


def test_stopped_turn_gives_an_old_sign() -> None:
    simulation = Beats()
    simulation.allow(100.0, math.inf)
    simulation.touch_s = 5.0
    simulation.turn()
    assert simulation.beats == [pytest.approx(100.2)]
