"""Readers that are closed in the middle of their own functions: by the garbage collector and by signal handlers."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.distill import DistillReader
from edl.errors import ClosedError
from tests.fast.distill.conftest import Start, until
from tests.fast.distill.reading import check, reader_of, samples
from tests.interrupting import InterruptAt, deadline, signals_at_random


@pytest.fixture
def collecting() -> Iterator[None]:
    """Collects garbage after each allocation or two, but not what was there before."""
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(1, 5, 1000)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def abandon(iterator: Iterator[Any]) -> None:
    """Leave an iterator to the collector, as an error that is kept in a variable does."""
    cycle = [iterator]
    cycle.append(cycle)  # type: ignore[arg-type]


def test_abandoned_iterators_hang_nobody(start: Start, collecting: None) -> None:
    """Each epoch ends as garbage, collected at whatever its threads or those of the next one allocate."""
    teacher = start("echo")
    with reader_of(teacher, teacher_batch_size=2) as reader, reader_of(teacher, teacher_batch_size=2) as other:
        reader.set_sample_generator(samples(300))
        other.set_sample_generator(samples(12))
        for number in range(40):
            with deadline(30, f"epoch {number}, after the one before was abandoned"):
                iterator = reader()
                for _ in range(number % 4):
                    next(iterator)
                abandon(iterator)
                del iterator
                check(list(other()), 12)


def test_abandoned_readers_hang_nobody(start: Start, collecting: None) -> None:
    """Whole readers are garbage, and end in threads of other readers."""
    teacher = start("echo")
    with reader_of(teacher) as other:
        other.set_sample_generator(samples(12))
        for number in range(15):
            with deadline(30, f"epoch {number}, after a reader was abandoned"):
                iterator = reader_of(teacher).set_sample_generator(samples(100))()
                next(iterator)
                abandon(iterator)
                del iterator
                check(list(other()), 12)


def test_kept_error_hangs_nobody(start: Start) -> None:
    """The ordinary loop that keeps its exception, whose traceback keeps the iterator."""
    teacher = start("echo")
    with reader_of(teacher) as reader:
        reader.set_sample_generator(samples(200))
        for number in range(20):
            with deadline(30, f"epoch {number}"):
                try:
                    for _ in reader():
                        raise ValueError(number)
                except ValueError as exc:
                    error = exc
        assert error.args == (19,)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("thread", ["edl-distill", "edl-feed", "MainThread"])
def test_garbage_is_collected_at_any_line(start: Start, thread: str) -> None:
    """A reader in the middle of an epoch ends in whatever thread collects it, with the locks that this one holds."""
    teacher = start("echo")
    with reader_of(teacher, teacher_batch_size=2) as other:
        other.set_sample_generator(samples(12))
        gc.disable()
        gc.collect()
        gc.freeze()  # each collection would look at what other tests' imports have made
        try:
            for number in range(1, 1500, 37):
                with deadline(30, f"an abandoned reader is collected before line {number} of {thread}"):
                    iterator = reader_of(teacher).set_sample_generator(samples(100))()
                    next(iterator)
                    abandon(iterator)
                    del iterator
                    with InterruptAt(number, gc.collect, "edl/distill/", thread) as interrupt:
                        check(list(other()), 12)
                    gc.collect()
                if not interrupt.reached:
                    break
        finally:
            gc.unfreeze()
            gc.enable()
    until(lambda: left() == NOTHING, 60)


def left() -> tuple[set[str], list[str]]:
    """What belongs to readers in this process: threads and shared memory."""
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("edl-")}
    arenas = [path.name for path in Path("/dev/shm").glob(f"edl-arena-{os.getpid()}-*")]
    return threads, arenas


NOTHING: tuple[set[str], list[str]] = (set(), [])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["fixed", "dynamic"])
def test_handler_closes_before_any_line(start: Start, registry_url: str, kind: str) -> None:
    """Connecting, waiting, taking, starting an epoch, closing: the training loop's thread may be anywhere."""
    teacher = start("echo", service="numbers", discovery=registry_url)
    step = 29 if kind == "fixed" else 113  # each takes longer
    for number in itertools.count(random.Random(kind).randrange(1, step), step):
        with deadline(30, f"closed by a handler before line {number}"):
            reader = DistillReader(["x", None], ["y"], teacher_batch_size=2)
            if kind == "fixed":
                reader.set_fixed_teacher(teacher.endpoint)
            else:
                reader.set_dynamic_teacher(registry_url, "numbers")
            reader.set_sample_generator(samples(6))
            with InterruptAt(number, reader.close, "edl/") as interrupt:
                run_until_closed(reader, 2)
                reader.close()
            until(lambda: left() == NOTHING, 60)
        if not interrupt.reached:
            assert number > 300, "nothing was interrupted"
            return


def run_until_closed(reader: DistillReader, epochs: int) -> None:
    for _ in range(epochs):
        with contextlib.suppress(ClosedError):
            for delivered, item in enumerate(reader()):
                assert item[1] == delivered, "an item was lost or overtaken"
                assert item[2][0] == delivered, "a label belongs to another input"


@pytest.mark.parametrize("seed", range(2))
def test_handler_closes_its_reader(start: Start, seed: int) -> None:
    """At random moments of the training loop: connecting, waiting, taking, starting an epoch."""
    teacher, rng = start("echo"), random.Random(seed)
    with reader_of(teacher) as other:  # keeps the event loop, which all readers share
        other.set_sample_generator(samples(8))
        for number in range(75):
            reader = reader_of(teacher, teacher_batch_size=1).set_sample_generator(samples(30))
            with deadline(30, f"reader {number}, closed by a signal handler"):
                with signals_at_random(reader.close, rng, 0.06):
                    run_until_closed(reader, 2)
                reader.close()
                check(list(other()), 8)


def test_handler_closes_another_reader(start: Start) -> None:
    teacher, rng = start("echo"), random.Random(7)
    for number in range(25):
        other = reader_of(teacher).set_sample_generator(samples(30))
        with reader_of(teacher, teacher_batch_size=1) as reader:
            reader.set_sample_generator(samples(20))
            with deadline(30, f"round {number}"), signals_at_random(other.close, rng, 0.05):
                with contextlib.suppress(ClosedError):
                    next(other())
                check(list(reader()), 20)
            other.close()


def test_handler_starts_the_next_epoch(start: Start) -> None:
    """Which ends the one that is in the middle of its own functions."""
    teacher, rng = start("echo"), random.Random(3)
    with reader_of(teacher, teacher_batch_size=1) as reader:
        reader.set_sample_generator(samples(20))
        for number in range(25):
            again: list[Any] = []

            def start_again(again: list[Any] = again) -> None:
                again += reader()

            with (
                deadline(30, f"round {number}"),
                contextlib.suppress(ClosedError),
                signals_at_random(start_again, rng, 0.03),
            ):
                check(list(reader()), 20)
            if again:
                check(again, 20)


class Tick(Exception):
    """What a signal handler raises."""


def tick() -> None:
    raise Tick


def test_raising_handler_ends_no_epoch_early(start: Start) -> None:
    """The loop that catches its handler's error and goes on must not take what is left for delivered."""
    teacher = start("echo")
    for number in range(1, 400, 13):
        with reader_of(teacher, teacher_batch_size=2) as reader, deadline(30, f"raised before line {number}"):
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
            if said:
                assert "Tick" in said
            else:
                check(taken, 20)
        if not interrupt.reached:
            break


def test_failed_epoch_stays_failed(start: Start) -> None:
    def source() -> Iterator[Any]:
        yield from samples(3)()
        raise OSError("the disk is gone")

    with reader_of(start("echo")) as reader:
        iterator = reader.set_sample_generator(source)()
        with pytest.raises(OSError, match="the disk is gone"):
            list(iterator)
        for _ in range(2):
            with pytest.raises(ClosedError, match="the disk is gone"):
                next(iterator)
