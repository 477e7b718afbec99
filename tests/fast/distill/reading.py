"""A reader over numbered samples, and how its answers are told to be right."""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edl.distill import DistillReader, Options
from edl.testing import models
from tests.waiting import DEADLINE_S, wait_until

WIDTH = 4


def sample(number: int) -> tuple[np.ndarray, int]:
    return np.full(WIDTH, number, np.float32), number


def samples(count: int) -> Callable[[], Iterator[Any]]:
    return lambda: map(sample, range(count))


def check(delivered: list[tuple[Any, ...]], count: int) -> None:
    """In order, each once, each with its own label."""
    assert [number for _, number, *_ in delivered] == list(range(count))
    for x, number, label in delivered:
        assert x[0] == number
        assert label[0] == number


def reader_of(*teachers: Any, **kwargs: Any) -> DistillReader:
    kwargs.setdefault("options", Options(teacher_timeout_s=60))
    kwargs.setdefault("teacher_batch_size", 4)
    endpoints = [teacher.endpoint for teacher in teachers]
    return DistillReader(["x", None], ["y"], teachers=endpoints, **kwargs)


def why_unused(reader: DistillReader, expected: str) -> str:
    """Start an epoch, and return why teachers are not used as soon as that matches `expected`.

    The reader waits for teachers for as long as its options say, so that a busy machine changes nothing.
    """
    with reader:
        epoch = reader()

        def why() -> str:
            found = "; ".join(teacher.why for teacher in reader.stats().teachers.values())
            return found if re.search(expected, found) else ""

        words = wait_until(why, f"{expected!r} among the reasons why teachers are not used")
        del epoch
        return words


def remains() -> set[str]:
    """What readers have in this process: threads and shared memory. A teacher's threads have other names."""
    gc.collect()
    threads = {f"{thread.name} {thread.ident}" for thread in threading.enumerate() if thread.name.startswith(_THREADS)}
    return threads | {path.name for path in Path("/dev/shm").glob(f"edl-arena-{os.getpid()}-*")}


_THREADS = ("edl-distill", "edl-feed", "edl-close", "edl-score", "edl-cache")


class Held(models.Model):
    """`echo`, which holds each answer until `go` is set; `entered` says that a request has come."""

    def __init__(self, **options: Any) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        echo = models.echo(**options)

        def answer(inputs: Any) -> Any:
            self.entered.set()
            assert self.go.wait(DEADLINE_S)
            return echo(inputs)

        super().__init__(answer, echo.inputs, echo.outputs)
