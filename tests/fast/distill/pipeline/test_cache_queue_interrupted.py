"""A queue before the cache that a signal handler closes in the middle of its own functions, and an event it sets."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest

from edl import notifier
from edl.distill.pipeline.cache_queue import CacheQueue
from edl.notifier import ReentrantEvent
from tests.interrupting import InterruptAt, deadline


class View:
    """Keeps ids once `go_on` is set."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.ids: list[Any] = []

    def put(self, ids: Any, outputs: Any) -> None:
        assert self.go_on.wait(30)
        self.ids += ids


def test_keeper_is_closed_before_any_line() -> None:
    for number in itertools.count(1):
        view: Any = View()
        cache_queue = CacheQueue(1 << 20)
        timer = threading.Timer(0.02, view.go_on.set)
        with deadline(10, f"closed before line {number} of keep and settle"):
            timer.start()
            with InterruptAt(number, cache_queue.close, "edl/") as interrupt:
                for row in range(2):
                    cache_queue.put(view, [row], {"y": np.zeros(4)})
                cache_queue.drain()
            view.go_on.set()
            cache_queue.close()
        timer.cancel()
        assert len(view.ids) + cache_queue.dropped_rows == 2, "a row was neither kept nor counted"
        if not interrupt.reached:
            assert number > 20, "nothing was interrupted"
            break


def test_event_is_set_before_any_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SIGTERM's handler does in the middle of `edl register`'s wait."""
    monkeypatch.setattr(notifier, "_SIGNAL_POLL_S", 1000.0)  # a lost wake-up would be made up for
    for number in itertools.count(1):
        # A short time ends the wait where the line comes after it. It may be over before a busy machine reaches a line
        # that comes before: that is tried again.
        if not (interrupts_wait(number, 0.05) or interrupts_wait(number, 1.0)):
            assert number > 5, "nothing was interrupted"
            break


def interrupts_wait(number: int, after_s: float) -> bool:
    """Wait for an event that is set before a line of the wait, or after a time; whether the line was reached."""
    event = ReentrantEvent()
    timer = threading.Timer(after_s, lambda: interrupt.reached or event.set())
    with deadline(10, f"set before line {number} of a wait"):
        timer.start()
        with InterruptAt(number, event.set, "/") as interrupt:
            assert event.wait()
    timer.cancel()
    return interrupt.reached
