"""Readers that are closed, let go or interrupted anywhere: nobody hangs, nothing is lost, nothing is left behind.

The garbage collector may close a reader in the middle of its own functions, in the thread that is there, with the locks
that it holds, and a signal handler may raise there: here, before a sample of all lines of the reader.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edl.errors import ClosedError
from tests.descriptors import count_descriptors
from tests.fast.distill.conftest import Served
from tests.fast.distill.reading import check, reader_of, remains, samples
from tests.interrupting import InterruptAt, deadline
from tests.waiting import DEADLINE_S, wait_until


@pytest.fixture(scope="module")
def teacher() -> Iterator[Served]:
    with contextlib.closing(Served("echo")) as served:
        yield served


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = remains()
    yield
    wait_until(lambda: remains() <= before, "the end of all that readers have")


def sampled(run: Callable[[int], InterruptAt], count: int, least: int = 100) -> None:
    """Interrupt before the first line, and before so many others, spread evenly over those of a run without."""
    lines = run(10**9).lines
    assert lines > least, "there is little to interrupt"
    for number in range(1, lines, lines // count):
        run(number)


def abandon(iterator: Iterator[Any]) -> None:
    """Leave an iterator to the collector, as an error that is kept in a variable does."""
    cycle = [iterator]
    cycle.append(cycle)  # type: ignore[arg-type]


@pytest.mark.parametrize("thread", ["edl-distill", "edl-feed", "MainThread"])
@pytest.mark.parametrize("whole", [True, False], ids=["reader", "epoch"])
def test_garbage_is_collected_at_any_line(teacher: Served, thread: str, whole: bool) -> None:
    """An epoch, or its whole reader, ends in whatever thread collects it."""

    def run(number: int) -> InterruptAt:
        with (
            deadline(DEADLINE_S, f"collected before line {number} of {thread}"),
            InterruptAt(number, gc.collect, "edl/distill/", thread) as interrupt,
            reader_of(teacher, teacher_batch_size=2) as kept,
            reader_of(teacher, teacher_batch_size=2) as other,
        ):
            reader = (reader_of(teacher) if whole else kept).set_sample_generator(samples(100))
            iterator = reader()
            next(iterator)
            abandon(iterator)
            del reader, iterator
            check(list(other.set_sample_generator(samples(12))()), 12)
        gc.collect()
        return interrupt

    gc.collect()
    gc.freeze()  # each collection would look at what other tests' imports have made
    gc.disable()
    try:
        sampled(run, 12)
    finally:
        gc.enable()
        gc.unfreeze()


class Tick(Exception):
    """What a signal handler raises."""


def tick() -> None:
    raise Tick


def test_raising_handler_ends_no_epoch_early(teacher: Served) -> None:
    """The loop that catches its handler's error and goes on must not take what is left for delivered."""

    def run(number: int) -> InterruptAt:
        with reader_of(teacher, teacher_batch_size=2) as reader, deadline(DEADLINE_S, f"raised before line {number}"):
            iterator = iter(reader.set_sample_generator(samples(20))())
            taken, said = [next(iterator)], ""
            with InterruptAt(number, tick, "edl/distill/", "MainThread") as interrupt:
                try:
                    taken += iterator
                except Tick:
                    try:
                        taken += iterator
                    except ClosedError as error:
                        said = str(error)
            assert "Tick" in said if said else len(taken) == 20
        return interrupt

    sampled(run, 15)


def test_failed_epoch_stays_failed(teacher: Served) -> None:
    def source() -> Iterator[Any]:
        yield from samples(3)()
        raise OSError("the disk is gone")

    with reader_of(teacher) as reader:
        iterator = reader.set_sample_generator(source)()
        with pytest.raises(OSError, match="the disk is gone"):
            list(iterator)
        for _ in range(2):
            with pytest.raises(ClosedError, match="the disk is gone"):
                next(iterator)


def test_close_and_letting_go_leave_nothing(teacher: Served) -> None:
    sockets = count_descriptors("socket:")
    reader = reader_of(teacher).set_sample_generator(samples(200))
    rows = reader()
    next(rows)
    reader.close()
    with pytest.raises(ClosedError):
        next(rows)
    with pytest.raises(ClosedError):
        reader()
    reader.close()
    del rows, reader
    reader = reader_of(teacher).set_sample_generator(samples(200))
    next(reader())
    del reader
    wait_until(lambda: gc.collect() >= 0 and count_descriptors("socket:") <= sockets)
