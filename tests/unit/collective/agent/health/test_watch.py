"""Hangs and stragglers in simulated time, and the stacks of processes that really hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.collective.agent.health.worker_watch import (
    HangLimits,
    StragglerChange,
    StragglerDetector,
    StragglerSettings,
    hang,
    own_step_s,
    progress,
)
from edl.collective.agent.processes.stack_dump import dump_stacks
from edl.collective.worker_status import Board, Phase, Reading

LIMITS = HangLimits(floor_s=10.0, factor=5.0, first_step_s=60.0, start_s=30.0, load_s=40.0, save_s=20.0)


def reading(phase: Phase = Phase.TRAIN, **fields: object) -> Reading:
    told = {"phase_since": 100.0, "step": 7, "step_at": 100.0, "durations_s": (1.0, 1.0, 1.0), **fields}
    return replace(Board.from_env().read(), phase=phase, **told)  # type: ignore[arg-type]


# --- Hangs. ---


def why_hung(one: Reading, now_s: float, limits: HangLimits, forked_s: float = 0.0) -> str | None:
    found = progress(one, limits, forked_s=forked_s)
    return None if found is None else hang(found, now_s, limits)


def test_missing_step_is_a_hang() -> None:
    """A step that does not come is a hang after the floor."""
    assert why_hung(reading(), 110.0, LIMITS) is None
    why = why_hung(reading(), 110.1, LIMITS)
    assert why == "no step after step 7 for 10.1 s; the limit is 10 s where a step takes 1 s"


def test_slow_steps_have_longer() -> None:
    slow = reading(durations_s=(4.0, 4.0, 90.0))
    assert why_hung(slow, 120.0, LIMITS) is None
    assert why_hung(slow, 120.1, LIMITS) is not None


@pytest.mark.parametrize("fields", [{"step": -1, "step_at": 0.0}, {"durations_s": (0.1, 0.1)}])
def test_first_steps_have_their_own_limit(fields: dict[str, object]) -> None:
    """The first steps have a limit of their own."""
    assert why_hung(reading(**fields), 160.0, LIMITS) is None
    assert "for the first steps" in (why_hung(reading(**fields), 160.1, LIMITS) or "")


def test_new_workers_first_step_has_as_well() -> None:
    """So has the first step of a new worker on the same page."""
    assert why_hung(reading(step_at=50.0), 160.0, LIMITS, forked_s=90.0) is None
    assert why_hung(reading(step_at=50.0), 160.1, LIMITS, forked_s=90.0) is not None


def test_save_or_new_worker_restarts_time() -> None:
    """A save or a new worker begins the time anew."""
    assert why_hung(reading(step_at=50.0, phase_since=105.0), 115.0, LIMITS) is None
    assert why_hung(reading(step_at=50.0, phase_since=105.0), 115.1, LIMITS) is not None


@pytest.mark.parametrize(
    ("phase", "limit_s"), [(Phase.START, 30.0), (Phase.LOAD, 40.0), (Phase.SAVE, 20.0), (Phase.AGREE, 120.0)]
)
def test_other_phases_have_their_limits(phase: Phase, limit_s: float) -> None:
    assert why_hung(reading(phase), 100.0 + limit_s, LIMITS) is None
    assert f"in phase {phase.name}" in (why_hung(reading(phase), 100.1 + limit_s, LIMITS) or "")


@pytest.mark.parametrize("limits", [HangLimits(floor_s=3600.0), HangLimits(), HangLimits(save_s=4000.0)])
@pytest.mark.parametrize("durations_s", [(), (1.0, 1.0, 1.0), (200.0, 200.0, 200.0)])
@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.ROLLBACK, Phase.SAVE])
def test_hanging_rank_is_found_first(limits: HangLimits, durations_s: tuple[float, ...], phase: Phase) -> None:
    """The rank that hangs is found before those that wait for it."""
    waiting, hanging = (reading(each, durations_s=durations_s) for each in (Phase.AGREE, phase))
    found = next(now_s for now_s in range(100, 20000, 30) if why_hung(hanging, now_s, limits))
    assert why_hung(waiting, found, limits) is None
    assert why_hung(waiting, 20000.0, limits) is not None, "but not for ever"


def test_silent_and_waiting_scripts_are_left() -> None:
    """A script that reports nothing and one that waits for others are left alone."""
    assert why_hung(reading(Phase.START, step=-1), 1e9, LIMITS) is None
    assert why_hung(reading(Phase.PAUSE), 1e9, LIMITS) is None
    assert why_hung(reading(Phase.EXIT), 1e9, LIMITS) is None


# --- Stragglers. ---

RULES = StragglerSettings(windows=3)


def test_persistent_slowness_is_named_once() -> None:
    """A rank that is slow persistently is named once and cleared once."""
    watch = StragglerDetector(RULES)
    slow = {0: 1.0, 1: 1.0, 2: 1.6}
    assert [watch.observe(slow) for _ in range(2)] == [[], []]
    assert watch.observe(slow) == [StragglerChange(2, "named", 1.6, 1.0)]
    assert [watch.observe(slow) for _ in range(9)] == [[]] * 9
    between = {0: 1.0, 1: 1.0, 2: 1.3}
    assert [watch.observe(between) for _ in range(9)] == [[]] * 9
    well = {0: 1.0, 1: 1.0, 2: 1.1}
    assert [watch.observe(well) for _ in range(3)][-1] == [StragglerChange(2, "cleared", 1.1, 1.0)]
    assert watch.named == set()


def test_slower_of_two_is_named() -> None:
    """Of two ranks the slower is named and alone nobody is."""
    watch = StragglerDetector(RULES)
    assert [str(*watch.observe({0: 0.2, 1: 0.1})) for _ in range(3)][-1] == (
        "rank 0 is slow: 0.2 s of its own a step, the others 0.1 s"
    )
    assert [StragglerDetector(RULES).observe({0: 9.0}) for _ in range(9)] == [[]] * 9


@given(st.lists(st.lists(st.floats(0.9, 1.3), min_size=4, max_size=4), max_size=30))
def test_noise_names_nobody(windows: list[list[float]]) -> None:
    watch = StragglerDetector(RULES)
    assert not any(watch.observe(dict(enumerate(own_s))) for own_s in windows)


def test_microseconds_do_not_count() -> None:
    """Differences of microseconds do not count."""
    watch = StragglerDetector(RULES)
    assert not any(watch.observe({0: 0.001, 1: 0.004}) for _ in range(9))


def test_own_time_excludes_the_wait() -> None:
    """Own time is the step without the wait."""
    before = reading()
    totals = {**before.totals_s, Phase.TRAIN: before.totals_s[Phase.TRAIN] + 4.0}
    after = replace(before, step=before.step + 4, totals_s=totals)
    assert own_step_s(before, after, waited_s=3.0) == pytest.approx(0.25)
    assert own_step_s(before, before, waited_s=0.0) is None
    assert own_step_s(before, replace(after, generation=9), waited_s=0.0) is None


# --- Stacks. ---

HANGS = {
    "sleep": "import time\ndef stuck(): time.sleep(600)",
    "the interpreter's lock, held in native code": (
        "import ctypes\nlibc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)\n"
        "def stuck():\n    libc.pthread_mutex_lock(mutex)\n    libc.pthread_mutex_lock(mutex)"
    ),
    "a gloo all-reduce": (
        "import datetime, threading, torch, torch.distributed as dist\n"
        "store, minute = dist.HashStore(), datetime.timedelta(minutes=1)\n"
        "def join(rank): groups[rank] = dist.ProcessGroupGloo(store, rank, 2, minute)\n"
        "groups = {}\n"
        "other = threading.Thread(target=join, args=(1,))\n"
        "other.start(); join(0); other.join()\n"
        "def stuck(): groups[0].allreduce([torch.zeros(8)]).wait()"
    ),
}
WORKER = """
import sys, pathlib
from edl.collective.agent.processes.stack_dump import arm_stack_dump
{body}
arm_stack_dump(pathlib.Path(sys.argv[1]))
print("armed", flush=True)
stuck()
"""


@contextlib.contextmanager
def worker(source: str, *arguments: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", source, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "armed\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def stack_with(words: str, pid: int, path: Path) -> str:
    """Ask until `words` are there: the process may not have got to where it hangs."""
    deadline = time.monotonic() + 60
    while words not in (text := dump_stacks([(pid, path)])[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return text


@pytest.mark.parametrize("how", list(HANGS))
def test_a_worker_that_hangs_shows_where(how: str, tmp_path: Path) -> None:
    with worker(WORKER.format(body=HANGS[how]), str(tmp_path / "stacks")) as pid:
        text = stack_with("in stuck", pid, tmp_path / "stacks")
        assert "in stuck" in text
        assert text.count("Current thread") == 1  # of this request only
        os.kill(pid, 0)  # and it lives


def test_stopped_and_gone_workers_answer(tmp_path: Path) -> None:
    """A stopped worker and one that has gone say so at once."""
    path = tmp_path / "stacks"
    with worker(WORKER.format(body=HANGS["sleep"]), str(path)) as pid:
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while "is stopped (SIGSTOP" not in (text := dump_stacks([(pid, path)], timeout_s=0.5)[0]):
            assert time.monotonic() < deadline, text
        os.kill(pid, signal.SIGCONT)
        assert "in stuck" in stack_with("in stuck", pid, path)
    assert dump_stacks([(pid, path)]) == [f"process {pid} has ended: it has no stack"]


def test_unarmed_worker_is_not_killed(tmp_path: Path) -> None:
    """A worker that armed nothing is not killed by the question."""
    with worker("import time\nprint('armed', flush=True)\ntime.sleep(600)") as pid:
        (text,) = dump_stacks([(pid, tmp_path / "stacks")])
        assert "has not armed" in text
        os.kill(pid, 0)


def test_one_deadline_for_all(tmp_path: Path) -> None:
    deaf = "import signal, time\nsignal.signal(signal.SIGUSR2, lambda *_: None)\nprint('armed', flush=True)\n"
    source = deaf + "while True: time.sleep(600)"
    with worker(source) as one, worker(source) as two:
        texts = dump_stacks([(one, tmp_path / "1"), (two, tmp_path / "2")], timeout_s=0.3)
        assert all("took SIGUSR2 for itself" in text for text in texts)
