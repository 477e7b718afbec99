"""A teacher's limits as students meet them: they wait or go elsewhere, and lose nothing; and nobody is kept out."""

from __future__ import annotations

import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.testing import LocalTeacher
from tests.fast.distill.conftest import Start, until
from tests.fast.distill.reading import check, reader_of, samples


def metrics(teacher: LocalTeacher) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{teacher.metrics_port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def metric(teacher: LocalTeacher, series: str) -> float:
    found = [line for line in metrics(teacher).splitlines() if line.startswith(series)]
    return float(found[0].split()[-1]) if found else 0.0


@pytest.mark.parametrize(
    ("limit", "words"), [("streams", "streams are open"), ("connections", "clients are connected")]
)
def test_a_student_waits_for_room(start: Start, limit: str, words: str) -> None:
    teacher = start("echo", delay_s=0.001, serve={f"max-{limit}": 1, "metrics-port": 0})
    with reader_of(teacher) as first, reader_of(teacher) as second:
        first.set_sample_generator(samples(400))
        second.set_sample_generator(samples(40))
        epoch = first()
        begun = [next(epoch) for _ in range(8)]
        delivered: list[Any] = []
        other = threading.Thread(target=lambda: delivered.extend(second()))
        other.start()
        until(lambda: any(words in one.why for one in second.stats().teachers.values()), 30)
        check(begun + list(epoch), 400)
        first.close()
        other.join(30)
        check(delivered, 40)
        assert metric(teacher, f'edl_teacher_refusals_total{{model="m",reason="{limit}"}}') > 0


def test_a_full_teacher_is_passed_over(start: Start) -> None:
    full = start("echo", delay_s=0.001, serve={"max-streams": 1})
    other = start("echo", delay_s=0.001)
    with reader_of(full) as holder, reader_of(full, other) as reader:
        holder.set_sample_generator(samples(4000))
        next(holder())
        reader.set_sample_generator(samples(200))
        check(list(reader()), 200)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max-client-bytes": "1MiB"}, "client_bytes"), ({"max-queue-bytes": "1MiB"}, "queue")],
)
def test_bytes_are_bounded_and_none_is_lost(start: Start, limits: dict[str, str], reason: str) -> None:
    serve = {"max-message": "1MiB", "shared-memory": False, "metrics-port": 0, **limits}
    width = 150_000  # 600 kB a request: the second one is too many
    teacher = start("echo", width=width, delay_s=0.005, serve=serve, max_batch=1)

    def source() -> Iterator[Any]:
        for number in range(40):
            yield np.full((1, width), number, np.float32), number

    readers = [DistillReader(["x", None], ["y"], teachers=[teacher.endpoint], options=Options(teacher_timeout_s=60))]
    readers.append(
        DistillReader(["x", None], ["y"], teachers=[teacher.endpoint], options=Options(teacher_timeout_s=60))
    )
    delivered: list[list[Any]] = [[], []]

    def run(index: int) -> None:
        readers[index].set_batch_generator(source)
        for x, number, y in readers[index]():
            assert x[0, 0] == number == y[0, 0] == y[0, -1]
            delivered[index].append(number)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for reader in readers:
        reader.close()
    assert delivered == [list(range(40))] * 2
    refused = f'edl_teacher_refusals_total{{model="m",reason="{reason}"}}'
    assert metric(teacher, refused) > 0, "the limit was never met, so that nothing was shown"
    until(lambda: metric(teacher, "edl_teacher_client_bytes") == metric(teacher, "edl_teacher_queue_bytes") == 0, 30)


class Student:
    """A reader whose source yields when it is told to: so the time of each request is known."""

    def __init__(self, teacher: LocalTeacher, stack: ExitStack) -> None:
        self._asked, self._ended = threading.Semaphore(0), False
        self._reader = DistillReader(["x"], ["y"], teachers=[teacher.endpoint])
        self._reader.set_batch_generator(self._source)
        stack.callback(self._end)
        self._epoch = self._reader()

    def _source(self) -> Iterator[Any]:
        while True:
            self._asked.acquire()
            if self._ended:
                return
            yield (np.zeros((1, 4), np.float32),)

    def _end(self) -> None:
        self._ended = True
        self._asked.release()
        self._reader.close()

    def ask(self) -> float:
        """How long one request takes."""
        started = time.perf_counter()
        self._asked.release()
        next(self._epoch)
        return time.perf_counter() - started


def greed(teacher: LocalTeacher, rows: int, stack: ExitStack) -> None:
    """A student that has as much in flight as it can, until the stack is closed."""
    ended = threading.Event()
    reader = DistillReader(["x"], ["y"], teachers=[teacher.endpoint])

    def source() -> Iterator[Any]:
        while not ended.is_set():
            yield (np.zeros((rows, 4), np.float32),)

    def run() -> None:
        for _ in reader():
            pass

    reader.set_batch_generator(source)
    thread = threading.Thread(target=run)
    thread.start()
    stack.callback(reader.close)
    stack.callback(thread.join, 30)
    stack.callback(ended.set)


def test_a_greedy_student_beside_a_modest(start: Start) -> None:
    # A batch of 8 rows takes 5 ms; greedy requests have 256 rows, so that each takes 32 batches.
    teacher = start("echo", delay_s=0.005, max_batch=8)
    times: dict[int, list[float]] = {1: [], 256: []}
    with ExitStack() as students:
        modest = Student(teacher, students)
        for _ in range(10):
            modest.ask()
        for rows in (1, 256, 1, 256):
            with ExitStack() as others:
                greed(teacher, rows, others)
                for _ in range(10):
                    modest.ask()
                times[rows] += [modest.ask() for _ in range(30)]
    middle = {rows: statistics.median(found) for rows, found in times.items()}
    assert middle[256] < 3 * middle[1], f"medians beside a peer and beside a greedy one: {middle}"
