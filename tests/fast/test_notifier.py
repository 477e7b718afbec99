"""A notifier wakes every wait, and can be called where a lock could not be taken."""

from __future__ import annotations

import asyncio
import threading

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
