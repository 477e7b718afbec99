"""A notifier wakes every wait, and can be called where a lock could not be taken."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from typing import Any

import pytest

from edl import notifier as module
from edl.notifier import Notifier, wait_within
from tests.waiting import DEADLINE_S


def test_every_wait_is_woken() -> None:
    notifier, go, woken = Notifier(), threading.Event(), []
    waits = [threading.Thread(target=lambda: woken.append(notifier.wait_for(go.is_set, DEADLINE_S))) for _ in range(5)]
    for thread in waits:
        thread.start()
    go.set()
    notifier.notify()
    for thread in waits:
        thread.join(DEADLINE_S)
    assert woken == [True] * 5
    assert not notifier.wait_for(lambda: False, 0.01)
    assert not notifier.wait_for(lambda: False, 0.0)
    assert notifier.wait_for(lambda: True)


def test_a_wake_up_from_the_predicate_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may come between the look at the state and the wait."""
    monkeypatch.setattr(module, "_SIGNAL_POLL_S", 1000.0)  # a lost wake-up would be made up for
    notifier = Notifier()
    state: list[bool] = []

    def predicate() -> bool:
        seen = bool(state)
        state.append(True)
        notifier.notify()
        return seen

    assert notifier.wait_for(predicate), "the wake-up that came between the look and the wait ends it"


def test_no_wake_up_is_lost_under_signals() -> None:
    """A handler changes the state and notifies, at any point of its own thread's wait, which ends by that alone."""
    notifier, state = Notifier(), [0]

    def handler(*_: Any) -> None:
        state[0] += 1
        notifier.notify()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for round_ in range(100):
            state[0] = 0
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + (round_ % 50) * 4e-6)
            assert notifier.wait_for(lambda: state[0]), f"round {round_}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_no_wake_up_is_lost_between_threads() -> None:
    """Threads pass a token around, each waiting for its turn, while every allocation collects garbage."""
    threads, notifier, turn, rounds = 3, Notifier(), [0], 300

    def run(me: int) -> None:
        while turn[0] < rounds:
            if not notifier.wait_for(lambda: turn[0] % threads == me or turn[0] >= rounds, DEADLINE_S):
                return
            if turn[0] < rounds:
                turn[0] += 1
            notifier.notify()

    before = gc.get_threshold()
    gc.set_threshold(50)
    try:
        running = [threading.Thread(target=run, args=(me,), daemon=True) for me in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(DEADLINE_S)
    finally:
        gc.set_threshold(*before)
    assert turn[0] == rounds, "a wake-up was lost"


async def after(turns: int, result: int) -> int:
    for _ in range(turns):
        await asyncio.sleep(0)
    return result


async def fail() -> None:
    raise ValueError("its own")


def test_a_result_is_there_fails_or_is_late() -> None:
    assert asyncio.run(wait_within(after(3, 7), DEADLINE_S)) == 7
    with pytest.raises(ValueError, match="its own"):
        asyncio.run(wait_within(fail(), DEADLINE_S))

    async def run() -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        with pytest.raises(asyncio.TimeoutError):
            await wait_within(task, 0.01)
        assert task.cancelled()

    asyncio.run(run())


@pytest.mark.parametrize("timeout_s", [0.0, DEADLINE_S])
def test_no_cancellation_is_lost(timeout_s: float) -> None:
    """Some turns of the loop after the result is there, or the time is over: `asyncio.wait_for` went on."""

    async def run(turns: int) -> bool:
        there = asyncio.Event()

        async def wait_again() -> None:
            while True:
                try:
                    await wait_within(there.wait(), timeout_s)
                except asyncio.TimeoutError:
                    await asyncio.sleep(0)
                there.clear()

        task = asyncio.create_task(wait_again())
        await after(5, 0)
        there.set()
        await after(turns, 0)
        task.cancel()
        await asyncio.wait([task], timeout=DEADLINE_S)
        return task.cancelled()

    assert all(asyncio.run(run(turns)) for turns in range(8))
