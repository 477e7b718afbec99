"""Loops and calls in threads of their own."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable

import pytest

from edl import background
from edl.background import BackgroundLoop, start_call
from tests.interrupting import InterruptAt, deadline

WAIT_S = 60.0  # how long a busy machine may take; nothing waits so long that passes


def is_soon(condition: Callable[[], object]) -> bool:
    until = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    return bool(condition())


def test_loop_waits_wakes_and_is_joined() -> None:
    calls: list[int] = []
    loop = BackgroundLoop("edl-test", lambda: calls.append(1) or 3600.0)
    assert is_soon(lambda: len(calls) == 1)
    loop.wake()
    assert is_soon(lambda: len(calls) == 2)
    assert not loop.wait_ended(0.01), "a loop that goes on has not ended"
    assert loop.close()
    assert not any(thread.name == "edl-test" for thread in threading.enumerate())


def test_loop_ends_with_its_last_step() -> None:
    calls: list[int] = []
    loop = BackgroundLoop("edl-test-ends", lambda: calls.append(1))
    assert loop.wait_ended(WAIT_S)
    assert not any(thread.name == "edl-test-ends" for thread in threading.enumerate())
    loop.wake()
    assert loop.close()
    assert calls == [1]


def test_a_wake_during_a_step_is_kept() -> None:
    calls: list[int] = []
    first, go_on = threading.Event(), threading.Event()

    def step() -> float:
        calls.append(1)
        first.set()
        assert go_on.wait(WAIT_S)
        return 3600.0

    loop = BackgroundLoop("edl-test", step)
    assert first.wait(WAIT_S)
    loop.wake()
    go_on.set()
    assert is_soon(lambda: len(calls) == 2), "the wake was lost"
    assert loop.close()


def test_loop_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(background, "_ERROR_PAUSE_S", 0.0)
    calls: list[int] = []

    def step() -> float:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("not foreseen")
        return 3600.0

    with caplog.at_level(logging.ERROR, logger="edl.background"):
        loop = BackgroundLoop("edl-test", step)
        assert is_soon(lambda: len(calls) == 2)
        assert loop.close()
    (record,) = caplog.records
    assert "edl-test" in record.getMessage()
    assert record.exc_info is not None, "without a traceback nobody finds the fault"


def test_close_interrupts_a_blocked_step() -> None:
    blocked, interrupted = threading.Event(), threading.Event()

    def step() -> None:
        blocked.set()
        assert interrupted.wait(WAIT_S)

    loop = BackgroundLoop("edl-test", step, interrupted.set)
    assert blocked.wait(WAIT_S)
    assert loop.close(WAIT_S)


def test_close_gives_up_on_a_step_that_hangs() -> None:
    blocked, go_on = threading.Event(), threading.Event()

    def step() -> None:
        blocked.set()
        go_on.wait(WAIT_S)

    loop = BackgroundLoop("edl-test", step)
    assert blocked.wait(WAIT_S)
    assert not loop.close(0.01)
    assert loop.closing
    go_on.set()
    assert loop.close()


def test_a_step_closes_its_own_loop() -> None:
    made = threading.Event()
    loops: list[BackgroundLoop] = []
    ended: list[bool] = []

    def step() -> float:
        assert made.wait(WAIT_S)
        ended.append(loops[0].close())
        return 3600.0

    loops.append(BackgroundLoop("edl-test", step))
    made.set()
    assert is_soon(lambda: ended == [False]), "it waited for itself"
    assert loops[0].close()


def test_loop_is_woken_before_any_line() -> None:
    for number in itertools.count(1):
        stepped = threading.Event()
        loop = BackgroundLoop("edl-test", lambda stepped=stepped: stepped.set() or 3600.0)
        with deadline(10, f"woken before line {number}"), InterruptAt(number, loop.wake, "/") as interrupt:
            loop.wake()
            loop.close()
        if not interrupt.reached:
            assert number > 5, "nothing was interrupted"
            break


def test_call_returns_its_result() -> None:
    threads: list[threading.Thread] = []
    future = start_call("edl-test-call", lambda: threads.append(threading.current_thread()) or 42)
    assert future.result(WAIT_S) == 42
    assert threads[0].name == "edl-test-call"
    assert threads[0].daemon, "it would keep a process from ending"


def test_cancelled_await_leaves_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    go_on = threading.Event()
    future = start_call("edl-test-cancelled", lambda: go_on.wait(WAIT_S))

    async def run() -> None:
        asyncio.wrap_future(future).cancel()
        await asyncio.sleep(0)  # the cancellation is handed on by a callback

    asyncio.run(run())
    go_on.set()
    assert is_soon(lambda: not any(thread.name == "edl-test-cancelled" for thread in threading.enumerate()))
    assert not errors, "the thread found no place for its result"
    assert future.result(0) is True


def test_call_raises_what_it_met() -> None:
    with pytest.raises(RuntimeError, match="refused"):
        start_call("edl-test", lambda: (_ for _ in ()).throw(RuntimeError("refused"))).result(WAIT_S)
