"""A reader over numbered samples, and how its answers are told to be right."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.errors import EDLError

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


def words_of_failure(expected: str, make: Callable[[float], DistillReader]) -> str:
    """Words of a reader that gets no label, made with the seconds in which it may find a teacher.

    On a starved machine they may be over before it knows more; then a reader with more time is asked.
    """
    for timeout_s in (1.0, 4.0, 16.0):
        with make(timeout_s) as reader, pytest.raises(EDLError) as caught:
            list(reader())
        if re.search(expected, str(caught.value)):
            break
    return str(caught.value)
