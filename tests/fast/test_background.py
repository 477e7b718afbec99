"""Loops and calls in threads of their own, and the waits between their attempts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from edl import background
from edl.background import BackgroundLoop
from edl.backoff import Backoff
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


def test_loop_ends_with_its_last_step(begin: Begin) -> None:
    calls: list[int] = []
    loop = begin(lambda: calls.append(1))
    assert loop.wait_ended(DEADLINE_S)
    loop.wake()
    assert loop.close()
    assert calls == [1]


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
    assert hanging.closing
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
