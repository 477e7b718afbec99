"""A look at words of a large array keeps the GIL: to wait for it again behind other threads would take far longer."""

from __future__ import annotations

import gc
import sys
import threading
import time

import numpy as np
import pytest

from edl.distill.source import checksum
from edl.distill.source.checksum import Checksum, TimeBudget


def test_no_thread_cuts_in_on_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_ARRAYS_PER_DRAW", 10_000)  # to draw others, once in so many looks, lets go of it
    time_budget = TimeBudget(0.0)
    time_budget.spend(1.0)  # so that only words are looked at
    arrays = [np.full(4_816_896, number, np.uint8) for number in range(4)]
    known = [Checksum.of(array, time_budget) for array in arrays]
    turns, ended = [0], threading.Event()

    def take_turns() -> None:
        while not ended.is_set():
            turns[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    gc.disable()  # what other tests have left may let go of the GIL as it is finalized
    sys.setswitchinterval(100.0)  # then the other thread runs only while this one lets go of the GIL
    other = threading.Thread(target=take_turns)
    other.start()
    try:
        for number in range(200):
            time.sleep(0.0001)  # the other thread gets the GIL, and waits for it again
            before = turns[0]
            assert known[number % 4].matches(arrays[number % 4], time_budget)
            Checksum.of(arrays[number % 4], time_budget)
            assert turns[0] == before, "another thread ran in the middle of a look"
    finally:
        sys.setswitchinterval(interval)
        gc.enable()
        ended.set()
        other.join()
