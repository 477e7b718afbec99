"""A reader over numbered samples, and how its answers are told to be right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from edl.distill import DistillReader, Options

WIDTH = 4


def sample(number: int) -> tuple[np.ndarray, int]:
    return np.full(WIDTH, number, np.float32), number


def samples(count: int, pause_s: float = 0.0) -> Callable[[], Iterator[Any]]:
    def source() -> Iterator[Any]:
        for number in range(count):
            if pause_s:
                time.sleep(pause_s)
            yield sample(number)

    return source


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
