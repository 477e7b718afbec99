"""Calls of a scorer end, each with its own labels or its own error, whatever becomes of the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from operator import itemgetter
from typing import Any

import numpy as np
import pytest

from edl.distill.compress import TopK
from edl.distill.scoring import ScoreCall, ScoreCalls
from edl.distill.source.chunk import Chunk
from edl.errors import ClosedError, NoTeacherError, SourceError, TemporaryError
from tests.waiting import DEADLINE_S, wait_until


class Labels:
    """A labeller that answers, with the ids and a row of them as `TopK`, when the test says so."""

    services = 1
    refuses_versions = False
    followed = awaited_rows = 0

    def __init__(self) -> None:
        self.closed = self.lacking = self.gives_up = False
        self.failure: Exception | None = None
        self.waiting: list[tuple[Chunk, Callable[..., None]]] = []
        self.cancelled: list[Chunk] = []
        self.most = self.open = 0

    def asked(self, route: int | None) -> range:
        return range(1) if route is None else range(route, route + 1)

    def lacks_teacher(self, since: float, route: int | None) -> bool:
        if self.lacking and self.gives_up:
            raise NoTeacherError("none")
        return self.lacking

    def max_rows(self, stopped: Callable[[], bool], route: int | None = None) -> int:
        return 0

    def awaits_sequence(self, rows: int, since: float, route: int | None) -> bool:
        return rows == self.awaited_rows

    def follow_version(self, service: int) -> None:
        self.followed += 1

    def max_sequence(self, route: int | None) -> int:
        return 50

    def rows_that_fit(self, fields: Any, route: int | None) -> int:
        return 0

    def estimate_answers(self, chunk: Chunk) -> None: ...
    def record_delivery(self, rows: int) -> None: ...
    def cancel(self, chunks: Iterable[Chunk]) -> None:
        self.cancelled += chunks

    def submit(self, chunk: Chunk, changed: Callable[..., None], stopped: Callable[[], bool]) -> None:
        if self.failure is not None:
            raise self.failure
        rows = chunk.rows
        self.open += rows  # without a call in between, in which another thread may come: `answer` counts as well
        self.most = max(self.most, self.open)
        self.waiting.append((chunk, changed))

    def answer(self, error: Exception | None = None) -> None:
        chunk, changed = self.waiting.pop(0)
        rows = chunk.rows
        self.open -= rows
        ids = chunk.fields["ids"]
        if error is not None:
            chunk.error = error
        else:
            tail = np.zeros(len(ids), np.float32)
            chunk.outputs[0] = {"y": TopK(ids[:, None], ids[:, None].astype(np.float32), tail)}
        changed()


class Scoring:
    """Calls over `Labels`."""

    def __init__(self, labels: Labels, request_tokens: int = 10, max_tokens: int = 20) -> None:
        self.labels = labels
        self.calls = ScoreCalls(labels, {"ids": itemgetter(0)}, request_tokens, max_tokens)  # type: ignore[arg-type]

    def score(self, *lengths: int, deadline: float | None = None) -> Future[list[Any]]:
        future: Future[list[Any]] = Future()
        samples = [(np.arange(length) + 100 * length,) for length in lengths]
        self.calls.add(
            ScoreCall(samples, future, None, deadline, None if deadline is None else 0.05, lambda outputs: outputs["y"])
        )
        return future

    def answer(self, error: Exception | None = None) -> None:
        wait_until(lambda: self.labels.waiting)
        self.labels.answer(error)

    def answered(self, future: Future[list[Any]]) -> list[Any]:
        """Answer whatever waits until this call has ended."""
        while not future.done():
            wait_until(lambda: self.labels.waiting or future.done())
            if self.labels.waiting:
                self.labels.answer()
        return future.result(DEADLINE_S)


@pytest.fixture
def scoring() -> Iterator[Scoring]:
    found = Scoring(Labels())
    yield found
    found.labels.closed = True
    found.calls.close()


def check(found: list[TopK], *lengths: int) -> None:
    assert [labels.ids[:, 0].tolist() for labels in found] == [
        list(range(100 * length, 101 * length)) for length in lengths
    ]


def test_tokens_under_way_are_bounded(scoring: Scoring) -> None:
    futures = [scoring.score(7), scoring.score(9, 9), scoring.score(30), scoring.score(5)]
    for _ in range(5):
        scoring.answer()
    for future in futures:
        future.result(DEADLINE_S)
    assert scoring.labels.most == 30, "beyond 20 goes what is larger alone, and nothing beside it"
    wait_until(lambda: scoring.calls.tokens == 0)


def test_an_error_is_of_its_call_alone(scoring: Scoring) -> None:
    bad, good = scoring.score(8, 8), scoring.score(3)
    scoring.answer(ValueError("odd"))
    with pytest.raises(ValueError, match="odd"):
        bad.result(DEADLINE_S)
    wait_until(lambda: scoring.labels.cancelled)
    check(scoring.answered(good), 3)
    assert [chunk.rows for chunk in scoring.labels.cancelled] == [8], "the rest of the call is not wanted"
    with pytest.raises(SourceError, match="sample 1 is a sequence of 51 tokens"):
        scoring.score(2, 51).result(DEADLINE_S)
    scoring.labels.failure = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        scoring.score(1).result(DEADLINE_S)
    wait_until(lambda: scoring.calls.tokens == 0)


def test_a_deadline_ends_a_call(scoring: Scoring) -> None:
    late, other = scoring.score(4, deadline=0.0), scoring.score(4)
    with pytest.raises(TemporaryError, match=r"not all sequences were scored within 0\.05 s"):
        late.result(DEADLINE_S)
    check(scoring.answered(other), 4)
    assert late.exception() is not None, "an answer that is late changes nothing"


def test_a_cancelled_call_makes_room(scoring: Scoring) -> None:
    first, second = scoring.score(15), scoring.score(15)
    wait_until(lambda: scoring.labels.waiting)
    assert first.cancel()
    wait_until(lambda: len(scoring.labels.waiting) == 2)
    scoring.labels.waiting.pop(0)
    scoring.answer()
    check(second.result(DEADLINE_S), 15)


def test_close_ends_all_calls() -> None:
    scoring = Scoring(Labels())
    futures = [scoring.score(15), scoring.score(15)]
    wait_until(lambda: scoring.labels.waiting)
    scoring.labels.closed = True
    closing = [threading.Thread(target=scoring.calls.close) for _ in range(4)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(DEADLINE_S)
    for future in [*futures, scoring.score(1)]:
        with pytest.raises(ClosedError):
            future.result(DEADLINE_S)


def test_long_call_holds_up_no_other(scoring: Scoring) -> None:
    """A call that waits for a teacher of long texts goes when it is there; those behind it need not wait."""
    scoring.labels.awaited_rows = 40
    long, short = scoring.score(40), scoring.score(3)
    assert len(scoring.answered(short)[0]) == 3
    assert not long.done()
    scoring.labels.awaited_rows = 0
    assert len(scoring.answered(long)[0]) == 40


def test_versions_are_followed_between_calls(scoring: Scoring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the middle of calls, whose labels would be of two versions."""
    monkeypatch.setattr("edl.distill.scoring._FOLLOW_S", 0.0)
    first = scoring.score(3)
    wait_until(lambda: scoring.labels.waiting)
    assert scoring.labels.followed == 1
    second = scoring.score(3)
    wait_until(lambda: len(scoring.labels.waiting) == 2)
    assert scoring.labels.followed == 1
    scoring.answered(first)
    scoring.answered(second)
    scoring.answered(scoring.score(3))
    assert scoring.labels.followed >= 2
