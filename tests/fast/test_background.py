"""Loops in threads of their own, the waits between their attempts, and notifiers, which wake every wait."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from edl import background
from edl import notifier as module
from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.notifier import Notifier, wait_within
from tests.waiting import DEADLINE_S, wait_until

Begin = Callable[..., BackgroundLoop]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Starts loops, which are closed at the end and leave no thread."""
    loops: list[BackgroundLoop] = []

    def start(step: Callable[[], float | None], *rest: Callable[[], object]) -> BackgroundLoop:
        loops.append(BackgroundLoop("edl-test", step, *rest))
        return loops[-1]

    yield start
    assert all(loop.close() for loop in loops)
    assert not any(thread.name == "edl-test" for thread in threading.enumerate())


def test_a_wake_during_a_step_is_kept(begin: Begin) -> None:
    calls: list[int] = []
    first, go_on = threading.Event(), threading.Event()

    def step() -> float:
        calls.append(1)
        first.set()
        assert go_on.wait(DEADLINE_S)
        return 3600.0

    loop = begin(step)
    assert first.wait(DEADLINE_S)
    loop.wake()
    go_on.set()
    wait_until(lambda: len(calls) == 2, "the wake")


def test_loop_goes_on_after_an_error(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "_ERROR_PAUSE_S", 0.0)
    calls: list[int] = []

    def step() -> float:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("not foreseen")
        return 3600.0

    with caplog.at_level(logging.ERROR, logger="edl.background"):
        begin(step)
        wait_until(lambda: len(calls) == 2)
    (record,) = caplog.records
    assert "edl-test" in record.getMessage()
    assert record.exc_info is not None, "without a traceback nobody finds the fault"


def test_close_interrupts_or_gives_up(begin: Begin) -> None:
    blocked, interrupted = threading.Event(), threading.Event()

    def step() -> None:
        blocked.set()
        assert interrupted.wait(DEADLINE_S)

    hanging = begin(step)
    assert blocked.wait(DEADLINE_S)
    assert not hanging.close(0.01)
    assert begin(step, interrupted.set).close()


def test_a_step_closes_its_own_loop(begin: Begin) -> None:
    loop: Future[BackgroundLoop] = Future()
    ended: list[bool] = []
    loop.set_result(begin(lambda: ended.append(loop.result(DEADLINE_S).close()) or 3600.0))
    wait_until(lambda: ended == [False], "the step, which does not wait for itself")


def test_waits_double_up_to_the_last() -> None:
    backoff = Backoff(0.25, 1.5)
    assert [backoff.next_wait_s() for _ in range(5)] == [0.25, 0.5, 1.0, 1.5, 1.5]
    assert backoff.failures == 5
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.next_wait_s() == 0.25
    backoff.failures = 5000
    assert backoff.next_wait_s() == 1.5, "endless failures do not overflow"


def test_jitter_shortens_waits_by_its_share() -> None:
    waits = [Backoff(2.0, 2.0, jitter=0.5).next_wait_s() for _ in range(200)]
    assert all(1.0 <= wait_s <= 2.0 for wait_s in waits)
    assert len(set(waits)) > 100, "processes that failed together come back together"


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
