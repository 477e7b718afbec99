"""Batches larger than what a teacher takes in one request, by its own word or by default."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.errors import NoTeacherError
from tests.fast.distill.conftest import Serve

WIDTH = 4


def reader_of(*endpoints: str, **kwargs: Any) -> DistillReader:
    return DistillReader(["x", None], ["y"], teachers=list(endpoints), **kwargs)


def batch_of(rows: int) -> tuple[Any, Any]:
    numbers = np.arange(rows)
    return np.repeat(numbers[:, None], WIDTH, 1).astype("f4"), numbers


@pytest.mark.parametrize("server", [{}, {"max_queue_rows": 100}])
def test_too_large_batch_is_cut(serve: Serve, server: Any) -> None:
    """A batch beyond the server's limit is sent in pieces."""
    with reader_of(serve("echo", server=server).endpoint) as reader:
        delivered = list(reader.set_batch_generator(lambda: [batch_of(1025), batch_of(3), batch_of(2500)])())
        assert sum(teacher.failures for teacher in reader.stats().teachers.values()) == 0
    for rows, (x, numbers, labels) in zip((1025, 3, 2500), delivered, strict=True):
        assert labels.shape == (rows, WIDTH)
        assert (labels[:, 0] == numbers).all()
        assert (labels == x).all()


WIDE = 1000  # of a row, in FP32: 256 rows are a megabyte
SMALL_MESSAGES = {"max_message_bytes": 256 << 10}


@pytest.mark.parametrize(("shared_memory", "gathered"), [(True, True), (False, False)])
def test_requests_are_cut_by_bytes_too(serve: Serve, shared_memory: bool, gathered: bool) -> None:
    """On the teacher's host as elsewhere, else what works here fails there."""
    teacher = serve("echo", server=SMALL_MESSAGES, width=WIDE)
    numbers = np.arange(600)
    x = np.repeat(numbers[:, None], WIDE * 3, 1).astype("u1")[:, :WIDE]  # a quarter of the bytes that are sent
    with reader_of(teacher.endpoint, options=Options(shared_memory=shared_memory)) as reader:
        if gathered:
            reader.set_sample_generator(lambda: ((row.repeat(1), number) for number, row in enumerate(x)))
            found = [(number, label) for _, number, label in reader()]
            assert [number for number, _ in found] == numbers.tolist()
            labels = np.stack([label for _, label in found])
        else:
            [(_, _, labels)] = list(reader.set_batch_generator(lambda: [(x, numbers)])())
        assert sum(found.failures for found in reader.stats().teachers.values()) == 0
    assert (labels == x).all()


@pytest.mark.parametrize(
    ("server", "rows", "words"),
    [
        (
            {"max_queue_rows": 100},
            300,
            r"of 300 rows within 0\.5 s, and 100 rows are what all of them take: "
            r"set batch_rows \(set_teacher_batch_size\) to that or less",
        ),
        (
            SMALL_MESSAGES,
            100,
            r"of 100 rows with 400,000 bytes within 0\.5 s, and 196,608 bytes are what all of them take: "
            "set batch_rows .*--max-message.*max_request_bytes",
        ),
    ],
)
def test_fixed_size_waits_with_a_remedy(serve: Serve, server: Any, rows: int, words: str) -> None:
    """A size that the user fixed waits for a teacher that takes it."""
    source = [(np.zeros((1, WIDE), np.float32), np.arange(1)), (np.zeros((rows, WIDE), np.float32), np.arange(rows))]
    teacher = serve("echo", server=server, width=WIDE)
    with reader_of(teacher.endpoint, teacher_batch_size=rows, options=Options(teacher_timeout_s=0.5)) as reader:
        reader.set_batch_generator(lambda: source[1:])
        with pytest.raises(NoTeacherError, match=words):
            list(reader())
