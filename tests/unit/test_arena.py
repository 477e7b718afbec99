"""Slots of shared memory: never handed out twice, never more than allowed, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.distill.arena import SHM_FOLDER, Arena, Slot


def left_by(pid: int) -> list[str]:
    return [path.name for path in SHM_FOLDER.iterdir() if path.name.startswith(f"edl-arena-{pid}-")]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40_000)), max_size=60))
def test_slots_in_use_never_overlap(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(4 << 20)
    held: list[tuple[Slot, int]] = []
    try:
        for number, (take, nbytes) in enumerate(steps):
            if take or not held:
                slot = arena.take(nbytes)
                if slot is not None:
                    assert slot.memory.nbytes == nbytes
                    slot.memory[:] = number % 251
                    held.append((slot, number % 251))
            else:
                slot, mark = held.pop(nbytes % len(held))
                assert (slot.memory == mark).all()
                arena.give(slot)
        assert all((slot.memory == mark).all() for slot, mark in held)
    finally:
        held.clear()
        arena.close()
    assert left_by(os.getpid()) == []


def test_the_limit_holds_and_what_is_given_back_is_used_again() -> None:
    arena = Arena(64 * 1024)
    slots = [slot for _ in range(40) if (slot := arena.take(4096)) is not None]
    assert len(slots) == 16
    assert arena.take(1) is None
    arena.give(slots.pop())
    again = arena.take(100)
    assert again is not None
    assert again.memory.nbytes == 100
    del slots, again
    arena.close()
    assert arena.take(1) is None


def test_what_a_killed_process_left_is_swept() -> None:
    code = (
        "import time; from edl.distill.arena import Arena; a = Arena(1 << 20); s = a.take(5000)\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        try:
            assert process.stdout.readline() == b"ready\n"
            Arena(1 << 20).close()
            assert len(left_by(process.pid)) == 1, "a living process's memory is left alone"
        finally:
            process.kill()
            process.wait(10)
    assert len(left_by(process.pid)) == 1
    Arena(1 << 20).close()
    assert left_by(process.pid) == []


def test_views_may_outlive_the_arena() -> None:
    arena = Arena(1 << 20)
    slot = arena.take(8)
    assert slot is not None
    memory = slot.memory
    memory[:] = 5
    arena.close()
    assert np.array_equal(memory, [5] * 8)
