"""An epoch that is started while the source is still busy with the one before: never two threads in one iterator."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from edl.distill import DistillReader, Options
from edl.distill.torch import distill
from edl.errors import ClosedError, TemporaryError
from tests.fast.distill.conftest import Start, until


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
                assert self.go.wait(20)
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


def test_error_names_the_setting(start: Start) -> None:
    source = OneIterator()
    reader = DistillReader(
        ["x"], ["y"], teachers=start("echo").endpoint, options=Options(source_timeout_s=0.2)
    ).set_batch_generator(lambda: source)
    with reader:
        first = reader()
        next(first)
        assert source.busy.wait(20)
        with pytest.raises(TemporaryError, match="source_timeout_s"):
            reader()
        assert source.begun == 1
        source.go.set()
        until(lambda: "edl-feed" not in {thread.name for thread in threading.enumerate()}, 20)
        assert numbers(reader()) == list(range(6))
        assert source.begun == 2


def test_next_epoch_waits(start: Start) -> None:
    source = OneIterator()
    with DistillReader(["x"], ["y"], teachers=start("echo").endpoint).set_batch_generator(lambda: source) as reader:
        first = reader()
        next(first)
        assert source.busy.wait(20)
        later = threading.Timer(0.3, source.go.set)
        later.start()
        assert numbers(reader()) == list(range(6)), "the second epoch lost batches to the first"
        later.join()


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4:
            time.sleep(2.5)  # in a process of its own
        return torch.full((4,), float(index))


def test_persistent_workers(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl.distill.pipeline.session._SAY_AFTER_S", 0.1)
    loader = DataLoader(Slow(), batch_size=1, num_workers=1, persistent_workers=True, prefetch_factor=2)
    with distill(loader, start("echo").endpoint, inputs="x", outputs="y") as labelled:
        for x, y in labelled:
            assert x[0, 0] == y[0, 0] == 0
            break
        found = [(float(x[0, 0]), float(y[0, 0])) for x, y in labelled]
    assert found == [(number, number) for number in range(8)]


def test_source_starts_no_own_epoch(start: Start) -> None:
    """Source starts no epoch of its reader."""
    reader = DistillReader(["x"], ["y"], teachers=start("echo").endpoint)

    def source() -> Iterator[Any]:
        yield (np.zeros((2, 4), np.float32),)
        yield from reader()

    with reader.set_batch_generator(source), pytest.raises(ClosedError, match="epoch of that reader"):
        list(reader())
