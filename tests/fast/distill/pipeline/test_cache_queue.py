"""Answers on their way into the cache: bounded in bytes, counted where they are left out, and never waited for long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.distill.pipeline import cache_queue as module
from edl.distill.pipeline.cache_queue import CacheQueue
from edl.errors import SettingsError
from tests.waiting import DEADLINE_S

MIB = 1 << 20


class View:
    """A view whose `put` waits for the test, or fails as told."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.go_on, self.entered = threading.Event(), threading.Event()
        self.failure = failure
        self.ids: list[Any] = []

    def put(self, ids: Any, outputs: Any) -> None:
        self.entered.set()
        assert self.go_on.wait(DEADLINE_S)
        if self.failure is not None:
            raise self.failure
        self.ids += ids

    def contains(self, ids: Any) -> Any:
        return np.isin(ids, self.ids)


@pytest.fixture
def cache_queue() -> Iterator[CacheQueue]:
    found = CacheQueue(4 * MIB)
    yield found
    found.close()


def answer(nbytes: int) -> dict[str, Any]:
    return {"y": np.zeros((1, nbytes // 4), np.float32)}


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_queue_is_bounded_in_bytes(cache_queue: CacheQueue, caplog: pytest.LogCaptureFixture) -> None:
    view: Any = View()
    for number in range(100):
        cache_queue.put(view, [number], answer(MIB))
    assert cache_queue.queued_bytes <= 4 * MIB, "100 answers of 1 MiB wait behind a slow disk, and 4 MiB are allowed"
    assert cache_queue.dropped_rows == 97, "with what is around an array, three fit"
    view.go_on.set()
    assert cache_queue.drain()
    assert view.ids == [0, 1, 2]
    assert cache_queue.queued_bytes == 0
    (words,) = messages(caplog)
    assert "cannot follow" in words
    assert "cache_queue_bytes=4194304" in words, "the remedy is named"


def test_answer_above_the_bound_goes_alone(cache_queue: CacheQueue) -> None:
    view: Any = View()
    view.go_on.set()
    cache_queue.put(view, [1], answer(16 * MIB))
    assert cache_queue.drain()
    assert view.ids == [1], "nothing else waits, so that it is bounded all the same"


def test_end_of_the_thread_is_noticed(
    cache_queue: CacheQueue, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no `Exception` ends the thread itself."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    view: Any = View(failure=SystemExit(1))
    cache_queue.put(view, [1], answer(64))
    view.go_on.set()
    assert not cache_queue.drain()
    assert cache_queue.failed
    assert len(messages(caplog)) == 1


def test_foreseen_errors_cost_own_rows_only(cache_queue: CacheQueue, caplog: pytest.LogCaptureFixture) -> None:
    bad: Any = View(failure=SettingsError("rows are of another shape"))
    good: Any = View()
    bad.go_on.set()
    good.go_on.set()
    for number in range(50):
        cache_queue.put(bad, [number], answer(64))
    cache_queue.put(good, [50], answer(64))
    assert cache_queue.drain()
    assert good.ids == [50]
    assert cache_queue.dropped_rows == 50
    assert not cache_queue.failed
    assert len(messages(caplog)) == 1, "the same words are said once, and not 50 times"


def test_settle_gives_up_in_the_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_SETTLE_S", 0.05)
    cache_queue, view = CacheQueue(4 * MIB), View()
    cache_queue.put(view, [1], answer(64))  # type: ignore[arg-type]
    assert not cache_queue.drain()
    assert "are still on their way into the soft-label cache" in " ".join(messages(caplog))
    view.go_on.set()
    cache_queue.close()


def test_close_keeps_what_waits() -> None:
    cache_queue, view = CacheQueue(4 * MIB), View()
    for number in range(3):
        cache_queue.put(view, [number], answer(64))  # type: ignore[arg-type]
    view.go_on.set()
    cache_queue.close()
    cache_queue.close()
    assert view.ids == [0, 1, 2]
    cache_queue.put(view, [3], answer(64))  # type: ignore[arg-type]
    assert cache_queue.dropped_rows == 1
