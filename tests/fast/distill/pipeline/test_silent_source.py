"""Sources that yield nothing for a while: what they have yielded is delivered, once, in order, with its own label."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.distill.pipeline.epoch import Epoch
from edl.distill.source.cutters import Cutter, SampleCutter, SampleListCutter
from edl.errors import ClosedError, SourceError
from tests.fast.distill.pipeline.test_epoch import Labels

END_S = 10.0
"""For whatever waits here; nothing takes nearly as long."""


class Training:
    """The training loop's side: what it got, and a wait for that."""

    def __init__(self) -> None:
        self.got: list[tuple[Any, Any]] = []  # input and label
        self._changed = threading.Condition()

    def take(self, epoch: Epoch) -> None:
        for item in epoch:
            labels = [row for c, a, b in item.parts for row in c.outputs[0]["y"][a:b].tolist()]  # type: ignore[index,union-attr]
            epoch.taken(item)
            inputs = [sample[0] for sample in item.value] if isinstance(item.value, list) else [item.value[0]]
            with self._changed:
                self.got += zip(inputs, labels, strict=True)
                self._changed.notify_all()

    def await_rows(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.got) >= count, END_S), f"{len(self.got)} of {count} came"

    def check(self, count: int) -> None:
        assert self.got == [(number, number) for number in range(count)]


def cutter_of(kind: type[Cutter], rows: int | None) -> Cutter:
    return kind({"x": itemgetter(0)}, rows, 1)


def run(source: Iterator[Any], cutter: Cutter, training: Training, **labels: Any) -> Epoch:
    """The whole epoch, in a thread that is given up after a while."""
    answers = Labels()
    vars(answers).update(labels)
    epoch = Epoch(answers, source, cutter)
    failure: list[BaseException] = []

    def take() -> None:
        try:
            training.take(epoch)
        except BaseException as exc:  # noqa: BLE001 - raised again by the test
            failure.append(exc)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(2 * END_S)
    hangs = thread.is_alive()
    epoch.close()
    assert not hangs, f"the training loop hangs after {len(training.got)} rows"
    if failure:
        raise failure[0]
    return epoch


@pytest.mark.parametrize("linger_s", [0, 0.005, 0.05])
def test_source_waits_for_the_training_loop(linger_s: float) -> None:
    training = Training()

    def source() -> Iterator[Any]:
        for number in range(50):
            if number and number % 20 == 0:
                training.await_rows(number)
            yield (np.int64(number),)

    run(source(), cutter_of(SampleCutter, None), training, linger_s=linger_s)
    training.check(50)


def test_a_list_waits_for_the_training_loop() -> None:
    training = Training()

    def source() -> Iterator[Any]:
        for first in range(0, 60, 20):
            training.await_rows(first)
            yield [(np.int64(number),) for number in range(first, first + 20)]

    run(source(), cutter_of(SampleListCutter, 32), training)
    training.check(60)


def test_requests_of_a_busy_source_are_full() -> None:
    """Where the source goes on yielding, nothing is sent before its time."""
    sizes: list[int] = []

    class Counting(Labels):
        linger_s = 30.0

        def submit(self, chunk: Any, changed: Any, stopped: Any) -> None:
            sizes.append(chunk.rows)
            super().submit(chunk, changed, stopped)

    def source() -> Iterator[Any]:
        for number in range(64):
            time.sleep(0.001)
            yield (np.int64(number),)

    training = Training()
    training.take(Epoch(Counting(), source(), cutter_of(SampleCutter, 32)))
    training.check(64)
    assert sizes == [32, 32]


def test_samples_that_misfit_are_an_error() -> None:
    """Found out when what is not full is sealed, by the thread that sends it."""
    training = Training()

    def source() -> Iterator[Any]:
        yield (np.zeros(2),)
        yield (np.zeros(3),)
        training.await_rows(2)

    with pytest.raises(SourceError, match="pad them"):
        run(source(), cutter_of(SampleCutter, 32), training)


def test_closed_while_the_source_is_silent() -> None:
    training, gone = Training(), threading.Event()

    def source() -> Iterator[Any]:
        yield (np.int64(0),)
        training.await_rows(1)
        gone.wait(END_S)
        yield (np.int64(1),)

    epoch = Epoch(Labels(), source(), cutter_of(SampleCutter, 32))

    def take() -> None:
        with pytest.raises(ClosedError):
            training.take(epoch)

    taking = threading.Thread(target=take, daemon=True)
    taking.start()
    training.await_rows(1)
    epoch.close()
    taking.join(END_S)
    assert not taking.is_alive()
    assert not epoch.join(0.01), "the source is in the middle of a value"
    gone.set()
    assert epoch.join(END_S)


Script = st.lists(st.sampled_from(["yield", "yield", "yield", "await", "pause", "burst"]), max_size=25)


@settings(max_examples=60, deadline=None)
@given(
    script=Script,
    rows=st.sampled_from([None, 1, 3]),
    lists=st.booleans(),
    fails=st.booleans(),
    linger_s=st.sampled_from([0, 0.001, 0.02]),
)
def test_any_source(script: list[str], rows: int | None, lists: bool, fails: bool, linger_s: float) -> None:
    """Streams that pause, wait for what they yielded, or fail: all of it, once, in order, before the error."""
    training, count = Training(), 0

    def numbered(size: int) -> Iterator[Any]:
        nonlocal count
        samples = [(np.int64(number),) for number in range(count, count + size)]
        count += size
        if lists:
            yield samples
        else:
            yield from samples

    def source() -> Iterator[Any]:
        for step in script:
            if step == "await":
                training.await_rows(count)
            elif step == "pause":
                time.sleep(0.004)
            else:
                yield from numbered(9 if step == "burst" else 1)
        if fails:
            training.await_rows(count)
            raise OSError("the disk is gone")

    cutter = cutter_of(SampleListCutter if lists else SampleCutter, rows)
    if fails:
        with pytest.raises(OSError, match="the disk is gone"):
            run(source(), cutter, training, linger_s=linger_s)
    else:
        run(source(), cutter, training, linger_s=linger_s)
    training.check(count)
