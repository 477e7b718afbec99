"""`DistillReader` with real teachers: order, each sample once with its own labels, whatever source and teachers do."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options, Teachers
from edl.distill.cache import SoftLabelCache
from edl.errors import ClosedError, TemporaryError
from tests.fast.distill.conftest import Serve
from tests.fast.distill.reading import check, reader_of, sample, samples
from tests.waiting import DEADLINE_S, wait_until


def test_samples_keep_order_and_labels(serve: Serve) -> None:
    epochs = 0
    with reader_of(serve("echo"), serve("echo")).set_sample_generator(samples(203)) as reader:

        def both_serve() -> bool:
            nonlocal epochs
            epochs += 1
            check(list(reader()), 203)
            return epochs > 1 and all(teacher.rows > 0 for teacher in reader.stats().teachers.values())

        wait_until(both_serve)
        stats = reader.stats()
    assert stats.rows_asked == stats.rows_received == stats.rows_delivered == 203 * epochs
    assert stats.rows_resent == 0
    assert len(stats.teachers) == 2
    assert sum(teacher.rows for teacher in stats.teachers.values()) == 203 * epochs


def test_sample_lists_keep_their_lengths(serve: Serve) -> None:
    def source() -> Iterator[Any]:
        numbers = itertools.count()
        for length in (0, 3, 1, 0, 7, 2, 10, 0):
            yield [sample(next(numbers)) for _ in range(length)]

    with reader_of(serve("echo")).set_sample_list_generator(source) as reader:
        lists = list(reader())
    assert [len(samples) for samples in lists] == [0, 3, 1, 0, 7, 2, 10, 0]
    check([row for samples in lists for row in samples], 23)


def test_unknown_names_are_not_sent(serve: Serve) -> None:
    """Names that the model does not have."""
    reader = DistillReader(["x", "label"], ["y"], teachers=[serve("echo").endpoint])
    with reader.set_sample_generator(samples(5)):
        check(list(reader()), 5)


def test_break_leaves_the_next_epoch_whole(serve: Serve) -> None:
    with reader_of(serve("echo")).set_sample_generator(samples(300)) as reader:
        for _ in range(3):
            for row in reader():
                if row[1] == 17:
                    break
        unfinished = reader()
        next(unfinished)
        check(list(reader()), 300)
        with pytest.raises(ClosedError, match="another one was started"):
            next(unfinished)


def test_ensembles_are_averaged_and_weighted(serve: Serve) -> None:
    one, three = serve("echo"), serve("echo", scale=3.0)
    groups = [Teachers(endpoints=(one.endpoint,), weight=3.0), Teachers(endpoints=(three.endpoint,), weight=1.0)]

    def rows(combine: Any) -> list[Any]:
        with DistillReader(["x", None], ["y"], teachers=groups, combine=combine, teacher_batch_size=4) as reader:
            return list(reader.set_sample_generator(samples(20))())

    for _, number, first, second in rows("each"):
        assert (first[0], second[0]) == (number, 3 * number)
    for _, number, label in rows("mean"):
        assert label[0] == pytest.approx(0.75 * number + 0.25 * 3 * number)
    for _, number, label in rows(lambda outputs: np.maximum(*outputs)):
        assert label[0] == 3 * number


# Sources that wait for the training loop.

COUNT, GROUP = 60, 20


class Turns:
    """A source that yields `GROUP` samples, and the next ones when the training loop has got these."""

    def __init__(self, *, lists: bool) -> None:
        self._lists = lists
        self._got = 0
        self._changed = threading.Condition()

    def source(self) -> Iterator[Any]:
        self._got = 0
        for first in range(0, COUNT, GROUP):
            with self._changed:
                assert self._changed.wait_for(lambda first=first: self._got >= first, DEADLINE_S)  # type: ignore[misc]
            group = [sample(number) for number in range(first, first + GROUP)]
            yield from [group] if self._lists else group

    def run(self, reader: DistillReader) -> list[Any]:
        delivered: list[Any] = []
        for item in reader():
            delivered += item if self._lists else [item]
            with self._changed:
                self._got = len(delivered)
                self._changed.notify_all()
        return delivered


@pytest.mark.parametrize(("kind", "lists"), [("one", True), ("ensemble", False), ("cache", False), ("cache", True)])
def test_source_that_waits(serve: Serve, tmp_path: Path, kind: str, lists: bool) -> None:
    services = [Teachers(endpoints=(serve("echo").endpoint,))] * (2 if kind == "ensemble" else 1)
    turns = Turns(lists=lists)
    with SoftLabelCache(path=tmp_path) as cache:
        kept: dict[str, Any] = {"cache": cache, "id_field": 1, "dataset": "numbers"} if kind == "cache" else {}
        with DistillReader(["x", None], ["y"], teachers=services, **kept) as reader:
            set_source: Callable[..., Any] = reader.set_sample_list_generator if lists else reader.set_sample_generator
            set_source(turns.source)
            for _ in range(2):
                found = turns.run(reader)
                assert [number for _, number, *_ in found] == list(range(COUNT))
                for x, number, *labels in found:
                    assert {float(value[0]) for value in (x, *labels)} == {float(number)}
            assert reader.stats().rows_cached == (COUNT if kind == "cache" else 0)


# An epoch that is started while the source is still busy with the one before: never two threads in one iterator.


class OneIterator:
    """Gives itself at each `iter`, starting afresh, as a `DataLoader` with persistent workers does."""

    def __init__(self) -> None:
        self.busy, self.go = threading.Event(), threading.Event()
        self.begun = 0
        self._inside = threading.Lock()

    def __iter__(self) -> OneIterator:
        assert self._inside.acquire(blocking=False), "the iterator begins afresh while it is used"
        self._inside.release()
        self.begun += 1
        self._next = 0
        return self

    def __next__(self) -> Any:
        assert self._inside.acquire(blocking=False), "two threads use the iterator"
        try:
            number = self._next
            if number == 3 and not self.go.is_set():
                self.busy.set()
                assert self.go.wait(DEADLINE_S)
            if number == 6:
                raise StopIteration
            self._next += 1
            return (np.full((2, 4), number, np.float32),)
        finally:
            self._inside.release()


def numbers(epoch: Iterator[Any]) -> list[float]:
    found = []
    for x, y in epoch:
        assert (x == y).all(), "a label belongs to another input"
        found.append(float(x[0, 0]))
    return found


def test_busy_source_is_an_error_in_time(serve: Serve) -> None:
    """The error names the setting, and the next epoch is whole."""
    source = OneIterator()
    options = Options(source_timeout_s=0.1)
    reader = DistillReader(["x"], ["y"], teachers=serve("echo").endpoint, options=options)
    with reader.set_batch_generator(lambda: source):
        next(reader())
        assert source.busy.wait(DEADLINE_S)
        with pytest.raises(TemporaryError, match="source_timeout_s"):
            reader()
        assert source.begun == 1
        source.go.set()
        wait_until(lambda: "edl-feed" not in {thread.name for thread in threading.enumerate()})
        assert numbers(reader()) == list(range(6))
        assert source.begun == 2


def test_source_starts_no_epoch_of_its_reader(serve: Serve) -> None:
    reader = DistillReader(["x"], ["y"], teachers=serve("echo").endpoint)

    def source() -> Iterator[Any]:
        yield (np.zeros((2, 4), np.float32),)
        yield from reader()

    with reader.set_batch_generator(source), pytest.raises(ClosedError, match="epoch of that reader"):
        list(reader())
