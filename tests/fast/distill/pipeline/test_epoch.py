"""An epoch's promises to the training loop, with a labeller that answers when told: no hang, no loss, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any

import numpy as np
import pytest

from edl.distill.pipeline.epoch import Epoch
from edl.distill.source.chunk import Chunk
from edl.distill.source.cutters import BatchCutter, Cutter, SampleCutter
from edl.errors import ClosedError, SourceError
from tests.waiting import DEADLINE_S


class Labels:
    """Answers each chunk from a thread of its own, with `x` as it was when it was sent."""

    memory_bytes = 1 << 30
    depth = 8
    wait_s = source_wait_s = 0.0
    linger_s = 0.005

    def __init__(self, submit_error: Exception | None = None) -> None:
        self.submit_error = submit_error

    def check(self) -> None: ...
    def prepare_epoch(self) -> None: ...
    def backlog(self, route: int | None) -> float:
        return 0.0

    def max_rows(self, stopped: Callable[[], bool], route: int | None) -> int:
        return 0

    def max_sequence(self, route: int | None) -> int:
        return 0

    def estimate_answers(self, chunk: Chunk) -> None: ...
    def set_awaited(self, chunk: Chunk) -> None: ...
    def cancel(self, chunks: Iterable[Chunk]) -> None: ...
    def record_delivery(self, rows: int) -> None: ...

    def submit(self, chunk: Chunk, changed: Callable[..., None], stopped: Callable[[], bool]) -> int:
        if self.submit_error is not None:
            raise self.submit_error
        rows = {"y": chunk.fields["x"].copy()}

        def answer() -> None:
            chunk.outputs[0] = rows  # type: ignore[assignment]
            changed()

        threading.Thread(target=answer, name="answer").start()
        return 0


class Training:
    """The training loop's side: what it got, and a wait for that."""

    def __init__(self) -> None:
        self.got: list[tuple[Any, Any]] = []  # input and label
        self._changed = threading.Condition()

    def take(self, epoch: Epoch) -> None:
        for item in epoch:
            labels = labels_of(item)
            epoch.taken(item)
            inputs = [sample[0] for sample in item.value] if isinstance(item.value, list) else [item.value[0]]
            with self._changed:
                self.got += zip(inputs, labels, strict=True)
                self._changed.notify_all()

    def await_rows(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.got) >= count, DEADLINE_S), (
                f"{len(self.got)} of {count} came"
            )


def labels_of(item: Any) -> list[Any]:
    return [row for c, a, b in item.parts for row in c.outputs[0]["y"][a:b].tolist()]


def epoch_of(labels: Any, source: Iterator[Any], cutter: Cutter) -> Epoch:
    epoch = Epoch(labels, source, cutter)
    epoch.start()
    return epoch


def with_deadline(epoch: Epoch, take: Callable[[Epoch], Any]) -> Any:
    """Let a thread take an epoch's items; one that hangs is an error."""
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(take, epoch)
        try:
            return taking.result(DEADLINE_S)
        finally:
            epoch.close()


def cutter_of(kind: type[Cutter] = BatchCutter, rows: int | None = None, **getters: Any) -> Cutter:
    return kind(getters or {"x": itemgetter(0)}, rows, 1)


def test_error_of_sending_reaches_the_loop() -> None:
    with pytest.raises(OSError, match="no space"):
        with_deadline(epoch_of(Labels(OSError("no space")), iter([(np.arange(3),)]), cutter_of()), Training().take)


def test_a_loop_may_work_in_place() -> None:
    images = np.ones((12, 3))
    epoch = epoch_of(Labels(), ((images[at : at + 2], 0) for at in range(0, 12, 2)), cutter_of())
    for item in epoch:
        assert labels_of(item) == [[1.0] * 3] * 2
        epoch.taken(item)
        item.value[0][:] += 7
    epoch.close()


def test_buffer_filled_in_use_is_noticed() -> None:
    """The training loop waits for the source, so each item is delivered before the next one is filled in."""
    loop_has_it, filled = threading.Semaphore(0), threading.Semaphore(0)

    def source() -> Iterator[Any]:
        buffer = np.zeros((4, 3))
        for number in range(5):
            if number:
                loop_has_it.acquire(timeout=DEADLINE_S)
            buffer[:] = number
            yield buffer, 0
            filled.release()

    used = []

    def take(epoch: Epoch) -> None:
        for item in epoch:
            epoch.taken(item)
            loop_has_it.release()
            assert filled.acquire(timeout=DEADLINE_S)
            used.append(item)

    with pytest.raises(SourceError, match="or while it was in use"):
        with_deadline(epoch_of(Labels(), source(), cutter_of()), take)
    assert len(used) <= 2


def test_closed_while_the_source_is_silent() -> None:
    training, gone = Training(), threading.Event()

    def source() -> Iterator[Any]:
        yield (np.int64(0),)
        training.await_rows(1)
        gone.wait(DEADLINE_S)
        yield (np.int64(1),)

    epoch = epoch_of(Labels(), source(), cutter_of(SampleCutter, 32))
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(training.take, epoch)
        training.await_rows(1)
        epoch.close()
        assert isinstance(taking.exception(DEADLINE_S), ClosedError)
    assert not epoch.join(0.01), "the source is in the middle of a value"
    gone.set()
    assert epoch.join(DEADLINE_S)
