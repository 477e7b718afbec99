"""Batches larger than what a teacher takes in one request, by its own word or by default."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options, Teachers
from edl.errors import NoTeacherError
from tests.fast.distill.conftest import Start, until
from tests.plugins_consul import free_ports
from tests.plugins_triton import TritonFactory

WIDTH = 4
OPTIONS = Options(teacher_timeout_s=3)


def reader_of(*endpoints: str, output: str = "y", model: str = "", **kwargs: Any) -> DistillReader:
    kwargs.setdefault("options", Options(teacher_timeout_s=60))
    return DistillReader(["x", None], [output], teachers=[Teachers(endpoints=endpoints, model=model)], **kwargs)


def batch_of(rows: int) -> tuple[Any, Any]:
    numbers = np.arange(rows)
    return np.repeat(numbers[:, None], WIDTH, 1).astype("f4"), numbers


@pytest.mark.parametrize("options", [{}, {"max_queue": 100, "max_batch": 64}])
def test_too_large_batch_is_cut(start: Start, options: Any) -> None:
    """A batch beyond the servers limit is sent in pieces."""
    with reader_of(start("echo", **options).endpoint) as reader:
        reader.set_batch_generator(lambda: [batch_of(1025), batch_of(3), batch_of(2500)])
        delivered = list(reader())
        assert sum(teacher.failures for teacher in reader.stats().teachers.values()) == 0
    for rows, (x, numbers, labels) in zip((1025, 3, 2500), delivered, strict=True):
        assert labels.shape == (rows, WIDTH)
        assert (labels[:, 0] == numbers).all()
        assert (labels == x).all()


def test_smallest_limit_counts(start: Start) -> None:
    """The smallest limit of several teachers counts."""
    sizes = [1]
    with reader_of(start("echo").endpoint, start("echo", max_queue=20, max_batch=8).endpoint) as reader:
        reader.set_batch_generator(lambda: [batch_of(size) for size in sizes])
        until(lambda: bool(list(reader())) and reader.stats().teachers_live == 2, 20)
        sizes = [200] * 40

        def both_serve() -> bool:  # what one was late for, the other may have answered
            for _, numbers, labels in reader():
                assert (labels[:, 0] == numbers).all()
            return all(teacher.rows > 0 for teacher in reader.stats().teachers.values())

        until(both_serve, 30)
        assert all(teacher.failures == 0 for teacher in reader.stats().teachers.values())


def test_fixed_size_waits_with_a_remedy(start: Start) -> None:
    """A size that the user fixed waits for a teacher that takes it with the remedy."""
    teacher = start("echo", max_queue=100, max_batch=64)
    with reader_of(teacher.endpoint, teacher_batch_size=300, options=OPTIONS) as reader:
        reader.set_batch_generator(lambda: [batch_of(400)])
        remedy = r"100 rows are what all of them take: set batch_rows \(set_teacher_batch_size\) to that or less"
        with pytest.raises(NoTeacherError, match=rf"took a request of 300 rows within 3 s, and {remedy}"):
            list(reader())


def test_larger_requests_go_to_others(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Two of those would refuse them, which was the end of the epoch."""
    large, ports = start("echo", delay_s=0.3), free_ports(2)
    with reader_of(large.endpoint, *(f"127.0.0.1:{port}" for port in ports)) as reader:
        reader.set_batch_generator(lambda: (batch_of(200) for _ in range(20)))
        epoch = iter(reader())
        next(epoch)
        for port in ports:
            start("echo", max_queue=20, max_batch=8, port=port)
        until(lambda: reader.stats().teachers_live == 3, 20)
        for _, numbers, labels in epoch:
            assert (labels[:, 0] == numbers).all()
        assert sum(teacher.rows for teacher in reader.stats().teachers.values()) == 20 * 200
    assert "rejected" not in caplog.text


WIDE = 1000  # of a row, in FP32: 256 rows are a megabyte
SMALL_MESSAGES = {"max-message": "256KiB"}


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("gathered", [True, False])
def test_requests_are_cut_by_bytes_too(start: Start, shared_memory: bool, gathered: bool) -> None:
    """On the teacher's host as elsewhere, else what works here fails there."""
    teacher = start("echo", serve=SMALL_MESSAGES, width=WIDE)
    options = Options(teacher_timeout_s=60, shared_memory=shared_memory)
    numbers = np.arange(600)
    x = np.repeat(numbers[:, None], WIDE * 3, 1).astype("u1")[:, :WIDE]  # a quarter of the bytes that are sent
    with reader_of(teacher.endpoint, options=options) as reader:
        if gathered:
            reader.set_sample_generator(lambda: ((row.repeat(1), number) for number, row in enumerate(x)))
            found = [(number, label) for _, number, label in reader()]
            assert [number for number, _ in found] == numbers.tolist()
            labels = np.stack([label for _, label in found])
        else:
            [(_, _, labels)] = list(reader.set_batch_generator(lambda: [(x, numbers)])())
        assert sum(found.failures for found in reader.stats().teachers.values()) == 0
    assert (labels == x).all()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_fixed_size_beyond_the_bytes(start: Start, shared_memory: bool) -> None:
    teacher = start("echo", serve=SMALL_MESSAGES, width=WIDE)
    options = Options(teacher_timeout_s=3, shared_memory=shared_memory)
    with reader_of(teacher.endpoint, teacher_batch_size=100, options=options) as reader:
        reader.set_batch_generator(lambda: [(np.zeros((100, WIDE), np.float32), np.arange(100))])
        remedy = r"196,608 bytes are what all of them take: set batch_rows .*--max-message.*max_request_bytes"
        with pytest.raises(NoTeacherError, match=rf"request of 100 rows with 400,000 bytes within 3 s, and {remedy}"):
            list(reader())


@pytest.mark.triton
def test_a_setting_for_who_does_not_say(triton: TritonFactory) -> None:
    server = triton.start(max_batch=65536, inputs=(f"x:float32:{WIDE}",))
    options = Options(teacher_timeout_s=60, max_request_bytes=1 << 20)
    x = np.repeat(np.arange(1000)[:, None], WIDE, 1).astype("f4")
    with reader_of(server.endpoint, output="logits", model="teacher", options=options) as reader:
        [(_, _, labels)] = list(reader.set_batch_generator(lambda: [(x, np.arange(1000))])())
        assert (labels[:, 0] == x.sum(1)).all()
        assert reader.stats().teachers[server.endpoint].requests >= 4, "256 rows of 4,000 bytes, at most"
    server.stop()


@pytest.mark.triton
def test_real_tritons_limit_is_kept(triton: TritonFactory) -> None:
    """A real tritons max batch size is kept to."""
    server = triton.start(max_batch=20)
    with reader_of(server.endpoint, output="logits", model="teacher") as reader:
        (_, numbers, labels), (_, _, few) = reader.set_batch_generator(lambda: [batch_of(50), batch_of(7)])()
    assert (labels[:, 0] == WIDTH * numbers).all()
    assert few.shape == (7, 10)
    with reader_of(server.endpoint, output="logits", model="teacher") as reader:
        x, _ = batch_of(45)
        reader.set_sample_generator(lambda: ((row, number) for number, row in enumerate(x)))
        assert [label[0] for *_, label in reader()] == [WIDTH * number for number in range(45)]
    with reader_of(server.endpoint, output="logits", model="teacher", teacher_batch_size=32, options=OPTIONS) as reader:
        reader.set_batch_generator(lambda: [batch_of(50)])
        with pytest.raises(NoTeacherError, match=r"of 32 rows within 3 s, and 20 rows are what .*: set batch_rows"):
            list(reader())
