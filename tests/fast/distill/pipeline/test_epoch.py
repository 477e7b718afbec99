"""An epoch's promises to the training loop, with a labeller that answers when told: no hang, no loss, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any

import numpy as np
import pytest

from edl.distill.pipeline.epoch import Epoch
from edl.distill.source.chunk import Chunk
from edl.distill.source.cutters import BatchCutter, Cutter, SampleCutter
from edl.errors import SourceError


class Labels:
    """Answers each chunk from a thread of its own, with `x` itself."""

    memory_bytes = 1 << 30
    linger_s = 0.005
    depth = 8

    def __init__(self, submit_error: Exception | None = None) -> None:
        self.submit_error = submit_error

    def check(self) -> None: ...
    def prepare_epoch(self) -> None: ...
    def backlog(self, route: int | None) -> float:
        return 0.0

    @property
    def limits(self) -> Any:
        return self

    def max_rows(self, stopped: Callable[[], bool], route: int | None) -> int:
        return 0

    def max_sequence(self, route: int | None) -> int:
        return 0

    def estimate_answers(self, chunk: Chunk) -> None: ...
    def set_awaited(self, chunk: Chunk) -> None: ...
    def cancel(self, chunks: Iterable[Chunk]) -> None: ...
    def record_delivery(self, rows: int) -> None: ...
    def record_wait(self, seconds: float, source_s: float) -> None: ...

    def submit(self, chunk: Chunk, changed: Callable[..., None], stopped: Callable[[], bool]) -> None:
        if self.submit_error is not None:
            raise self.submit_error

        def answer() -> None:
            chunk.outputs[0] = {"y": chunk.fields["x"]}
            changed()

        threading.Thread(target=answer, name="answer").start()


def run(epoch: Epoch, seconds: float = 10.0) -> list[Any]:
    """All labels, one list an item; fails rather than hangs."""
    found: list[Any] = []
    failure: list[BaseException] = []

    def consume() -> None:
        try:
            for item in epoch:
                found.append([row for c, a, b in item.parts for row in c.outputs[0]["y"][a:b].tolist()])  # type: ignore[index,union-attr]
                epoch.taken(item)
        except BaseException as exc:  # noqa: BLE001 - raised again by the test
            failure.append(exc)

    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    thread.join(seconds)
    hangs = thread.is_alive()
    epoch.close()
    assert not hangs, "the training loop hangs"
    if failure:
        raise failure[0]
    return found


def batches(cutter: type[Cutter] = BatchCutter, rows: int | None = None, **getters: Any) -> Cutter:
    return cutter(getters or {"x": itemgetter(0)}, rows, 1)


def test_batch_above_the_limit_arrives_whole() -> None:
    """A batch of more requests than may be open is delivered whole."""
    source = iter([(np.arange(100) + 1000 * number,) for number in range(3)])
    found = run(Epoch(Labels(), source, batches(rows=1)))
    assert found == [list(range(1000 * number, 1000 * number + 100)) for number in range(3)]


@pytest.mark.parametrize(("cutter", "asked"), [(SampleCutter, 4), (BatchCutter, 100)])
def test_request_size_is_asked_once_each(cutter: type[Cutter], asked: int) -> None:
    """How large a request may be is asked once for each."""

    class Counting(Labels):
        linger_s = 30.0  # a source that gets no time for a moment is not silent
        asked = 0

        def max_rows(self, stopped: Callable[[], bool], route: int | None = None) -> int:
            self.asked += 1
            return 0

    labels = Counting()
    run(Epoch(labels, iter([(np.array([number]),) for number in range(100)]), batches(cutter)))
    assert labels.asked == asked


def test_source_fails_before_a_chunk_is_full() -> None:
    """The loop is told, and does not hang."""
    waiting = threading.Event()

    def source() -> Iterator[Any]:
        for number in range(5):
            yield (np.array([number]),)
        waiting.wait(0.3)  # the training loop waits for the first sample by now
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        run(Epoch(Labels(), source(), batches(SampleCutter, 32)))


def test_error_of_sending_reaches_the_loop() -> None:
    with pytest.raises(OSError, match="no space"):
        run(Epoch(Labels(OSError("no space")), iter([(np.arange(3),)]), batches()))


def test_views_are_no_refilled_buffer() -> None:
    data = np.arange(40, dtype=np.float32).reshape(10, 4)
    getters = {"x": itemgetter(0), "w": itemgetter(1)}
    source = iter([(data, data[:, :3]), (data[:7], data[:7, :2])])
    assert [len(item) for item in run(Epoch(Labels(), source, batches(**getters)))] == [10, 7]


def test_a_buffer_filled_again_is_noticed() -> None:
    buffer = np.zeros(8)

    def source() -> Iterator[Any]:
        for number in range(3):
            buffer[:] = number
            yield (buffer,)

    epoch = Epoch(Labels(), source(), batches())
    epoch._feeder.join(5)
    with pytest.raises(SourceError, match="yield a new array each time"):
        run(epoch)
