"""Answers on their way into the cache: bounded, counted where left out, not waited for long; and which are found."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edl.distill.cache import CacheKey, Found, SoftLabelCache
from edl.distill.pipeline import label_cache as module
from edl.distill.pipeline.label_cache import CacheMiss, CacheQueue, OfflineLabels, ServiceLabels
from edl.distill.teachers import Teachers, service_identities
from edl.distill.transport.schema import ModelSpec, OutputSpec
from edl.errors import SettingsError
from tests.waiting import DEADLINE_S

MIB = 1 << 20


class View:
    """A view whose `put` waits for the test, or fails as told."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.go_on, self.failure = threading.Event(), failure
        self.ids: list[Any] = []

    def put(self, ids: Any, outputs: Any) -> None:
        assert self.go_on.wait(DEADLINE_S)
        if self.failure is not None:
            raise self.failure
        self.ids += ids


@pytest.fixture
def cache_queue(stack: ExitStack) -> CacheQueue:
    return stack.enter_context(closing(CacheQueue(4 * MIB)))


def put(cache_queue: CacheQueue, view: Any, number: int, nbytes: int = 64) -> None:
    """Queue a label of so many bytes for a sample that the view lacks."""
    unused: Any = None
    missing = CacheMiss(Found(np.zeros(1, bool), {}), view, [number], unused, ModelSpec("m", "1", {}, {}))
    cache_queue.put(missing, {"y": np.zeros((1, nbytes // 4), np.float32)}, "1")


def test_queue_is_bounded_in_bytes(cache_queue: CacheQueue, caplog: pytest.LogCaptureFixture) -> None:
    view: Any = View()
    for number in range(100):
        put(cache_queue, view, number, MIB)
    assert cache_queue.queued_bytes <= 4 * MIB, "100 answers of 1 MiB wait behind a slow disk, and 4 MiB are allowed"
    assert cache_queue.dropped_rows == 97, "with what is around an array, three fit"
    view.go_on.set()
    assert cache_queue.drain()
    assert view.ids == [0, 1, 2]
    assert cache_queue.queued_bytes == 0
    (words,) = caplog.messages
    assert "cannot keep up" in words
    assert "cache_queue_bytes=4194304" in words, "the remedy is named"


def test_answer_above_the_bound_goes_alone(cache_queue: CacheQueue) -> None:
    view: Any = View()
    put(cache_queue, view, 1, 16 * MIB)
    put(cache_queue, view, 2)
    view.go_on.set()
    assert cache_queue.drain()
    assert view.ids == [1]


@pytest.mark.parametrize("failure", [SettingsError("rows are of another shape"), ZeroDivisionError("unforeseen")])
def test_errors_cost_their_own_rows_only(
    cache_queue: CacheQueue, caplog: pytest.LogCaptureFixture, failure: Exception
) -> None:
    bad: Any = View(failure)
    good: Any = View()
    bad.go_on.set()
    good.go_on.set()
    for number in range(50):
        put(cache_queue, bad, number)
    put(cache_queue, good, 50)
    assert cache_queue.drain()
    assert good.ids == [50]
    assert cache_queue.dropped_rows == 50
    assert len(caplog.messages) == 1, "the same words are said once, and not 50 times"
    assert str(failure) in caplog.messages[0]
    assert bool(caplog.records[0].exc_info) == isinstance(failure, ZeroDivisionError)


def test_settle_gives_up_in_the_end(
    cache_queue: CacheQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_SETTLE_S", 0.05)
    view: Any = View()
    put(cache_queue, view, 1)
    assert not cache_queue.drain()
    assert "are still being written to the soft-label cache" in " ".join(caplog.messages)
    view.go_on.set()


def test_close_keeps_what_waits(cache_queue: CacheQueue) -> None:
    view: Any = View()
    for number in range(3):
        put(cache_queue, view, number)
    view.go_on.set()
    cache_queue.close()
    cache_queue.close()
    assert view.ids == [0, 1, 2]
    put(cache_queue, view, 3)
    assert cache_queue.dropped_rows == 1


KEY = CacheKey("m", "1", ("y",))
HALF = replace(KEY, dtype="float16")
FULL = replace(KEY, dtype="float32")


@pytest.mark.parametrize(
    ("there", "ask", "chosen"),
    [
        ([KEY], OutputSpec(("y",)), KEY),
        ([KEY, HALF], OutputSpec(("y",)), KEY),
        ([KEY, HALF], OutputSpec(("y",), dtype="float16"), HALF),
        ([HALF, FULL], OutputSpec(("y",)), None),
        ([KEY, replace(KEY, version="2")], OutputSpec(("y",)), None),
        ([KEY, replace(KEY, version="2")], OutputSpec(("y",), version="2"), replace(KEY, version="2")),
        ([KEY, replace(KEY, service="a")], OutputSpec(("y",)), None),
        ([KEY, HALF], OutputSpec(("y",), dtype="float32"), None),
        (
            [replace(KEY, outputs=("a", "y")), replace(KEY, outputs=("y", "a"))],
            OutputSpec(("y", "a")),
            replace(KEY, outputs=("y", "a")),
        ),
    ],
)
def test_exact_question_goes_first(there: list[CacheKey], ask: OutputSpec, chosen: CacheKey | None) -> None:
    with SoftLabelCache() as cache:
        for key in there:
            cache.view(key).put([1], {name: np.zeros((1, 3), key.dtype or "float32") for name in key.outputs})
        if chosen is not None:
            assert OfflineLabels(cache, "", ask).view.key == chosen
            return
        with pytest.raises(SettingsError, match="label sets for"):
            OfflineLabels(cache, "", ask)


def test_who_a_groups_labels_are_of() -> None:
    one, other = (Teachers("s", discovery=f"sqlite:///{name}") for name in "ab")
    fixed = Teachers(endpoints=("10.0.0.2:1", "10.0.0.1:1"))
    assert service_identities([one, fixed]) == ["s", "10.0.0.1:1,10.0.0.2:1"]
    assert service_identities([fixed]) == service_identities([replace(fixed, endpoints=fixed.endpoints[::-1])])
    assert len(set(service_identities([one, other]))) == 2, "two services of one name, in two registries"
    assert len(set(service_identities([replace(one, model="a"), replace(one, model="b")]))) == 1


def test_looks_of_a_version_say_nothing() -> None:
    """A count of microseconds looks like a hash; only what teachers call a hash is shared between services."""
    version, other = "1700000000123456", "0123456789abcdef"
    named, hashed = (ModelSpec("m", version, {}, {}, weights_version=said) for said in ("", version))
    with SoftLabelCache() as cache:
        labels = ServiceLabels(cache, "", OutputSpec(("y",)), "a", {other})
    assert labels.key(named, version).service == "a"
    assert labels.key(hashed, version).service == labels.key(hashed, other).service == ""
    assert labels.key(hashed, "0000000000000000").service == "a"
