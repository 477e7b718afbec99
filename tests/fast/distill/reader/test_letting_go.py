"""Readers whose epoch did not end well are let go like any other: nothing that EDL keeps leads back to them."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.errors import EDLError, NoTeacherError, SourceError
from tests.fast.distill.conftest import Start, until

WIDTH = 4


class Program:
    """Holds its reader, and is the reader's source: whatever keeps one keeps both."""

    def __init__(self, teachers: list[str], rows: Callable[[], Iterator[Any]], **options: Any) -> None:
        options = {"teacher_timeout_s": 20} | options
        self.rows = rows
        self.reader = DistillReader(["x"], ["y"], teachers=teachers, teacher_batch_size=2, options=Options(**options))
        self.reader.set_sample_generator(self.source)

    def source(self) -> Iterator[Any]:
        yield from self.rows()

    def run(self, use: Callable[[Iterator[Any]], object] = list) -> None:
        use(self.reader())


def rows(count: int, width: int = WIDTH) -> Callable[[], Iterator[Any]]:
    return lambda: ((np.full(width, number, np.float32),) for number in range(count))


def left() -> tuple[set[str], list[str]]:
    """What belongs to readers in this process: threads and shared memory."""
    gc.collect()
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("edl-")}
    arenas = [path.name for path in Path("/dev/shm").glob(f"edl-arena-{os.getpid()}-*")]
    return threads, arenas


NOTHING: tuple[set[str], list[str]] = (set(), [])


def fails(program: Program, error: type[Exception], **run: Any) -> weakref.ref[DistillReader]:
    with pytest.raises(error):
        program.run(**run)
    assert left() != NOTHING, "it was at work"
    return weakref.ref(program.reader)


def test_after_a_time_without_teachers() -> None:
    reader = fails(Program(["127.0.0.1:9"], rows(9), teacher_timeout_s=0.3), NoTeacherError)
    until(lambda: left() == NOTHING and reader() is None, 60)


def test_after_the_last_teacher_was_lost(start: Start) -> None:
    teacher = start("echo", delay_s=0.01)

    def use(labelled: Iterator[Any]) -> None:
        next(labelled)
        teacher.kill()
        list(labelled)

    reader = fails(Program([teacher.endpoint], rows(500), teacher_timeout_s=0.3), NoTeacherError, use=use)
    until(lambda: left() == NOTHING and reader() is None, 60)


def test_after_an_error_of_the_source(start: Start) -> None:
    def source() -> Iterator[Any]:
        yield from rows(5)()
        raise OSError("the disk is gone")

    reader = fails(Program([start("echo").endpoint], source), OSError)
    until(lambda: left() == NOTHING and reader() is None, 60)


def test_after_unfit_samples(start: Start) -> None:
    """After samples that the model does not take."""
    reader = fails(Program([start("echo").endpoint], rows(5, WIDTH + 1)), SourceError)
    until(lambda: left() == NOTHING and reader() is None, 60)


def test_after_requests_that_teachers_refuse(start: Start) -> None:
    """Two teachers whose model always fails, so that all open chunks fail with errors of their own."""
    failing = [start("raises").endpoint for _ in range(2)]

    def source() -> Iterator[Any]:
        for _ in range(20):
            yield np.zeros((512, WIDTH), np.float32)

    program = Program(failing, rows(0), shared_memory=False)
    program.reader = DistillReader(["x"], ["y"], teachers=failing, options=Options(shared_memory=False))
    program.reader.set_batch_generator(lambda: ((batch,) for batch in source()))
    reader = fails(program, EDLError)
    del program
    until(lambda: left() == NOTHING and reader() is None, 60)


def test_after_break_and_error(start: Start) -> None:
    """After breaking out and after an error of the training loop."""
    teacher = start("echo")

    def stop(labelled: Iterator[Any]) -> None:
        for _ in labelled:
            raise ZeroDivisionError

    program = Program([teacher.endpoint], rows(500))
    program.run(next)
    reader = fails(program, ZeroDivisionError, use=stop)
    del program
    until(lambda: left() == NOTHING and reader() is None, 60)


def test_kept_error_keeps_its_reader(start: Start) -> None:
    """An error that is kept keeps its reader only as long."""
    kept: list[EDLError] = []

    def run() -> weakref.ref[DistillReader]:
        program = Program([start("echo").endpoint], rows(5, WIDTH + 1))
        try:
            program.run()
        except EDLError as exc:
            kept.append(exc)
        return weakref.ref(program.reader)

    reader = run()
    gc.collect()
    assert reader() is not None, "its traceback leads there"
    kept.clear()
    until(lambda: left() == NOTHING and reader() is None, 60)
