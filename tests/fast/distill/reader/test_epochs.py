"""`DistillReader` against real teacher processes: order, each sample once with its own labels, nothing left behind."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options, Teachers
from edl.distill.compress import TopK
from edl.errors import ClosedError
from tests.fast.distill.conftest import Start, until
from tests.fast.distill.reading import WIDTH, check, reader_of, sample, samples


def test_samples_keep_order_and_labels(start: Start) -> None:
    """Samples come back in order with their own labels."""
    epochs = itertools.count(1)
    with reader_of(start("echo"), start("echo")).set_sample_generator(samples(203)) as reader:

        def both_serve(epoch: int) -> bool:
            check(list(reader()), 203)
            return epoch > 1 and all(teacher.rows > 0 for teacher in reader.stats().teachers.values())

        until(lambda: both_serve(next(epochs)), 30)
        stats = reader.stats()
    rows = 203 * (next(epochs) - 1)
    assert stats.rows_asked == stats.rows_received == stats.rows_delivered == rows
    assert stats.rows_resent == 0
    assert len(stats.teachers) == 2
    assert sum(teacher.rows for teacher in stats.teachers.values()) == rows


def test_sample_lists_keep_their_lengths(start: Start) -> None:
    def source() -> Iterator[Any]:
        numbers = itertools.count()
        for length in (0, 3, 1, 0, 7, 2, 10, 0):
            yield [sample(next(numbers)) for _ in range(length)]

    with reader_of(start("echo")).set_sample_list_generator(source) as reader:
        lists = list(reader())
    assert [len(samples) for samples in lists] == [0, 3, 1, 0, 7, 2, 10, 0]
    check([row for samples in lists for row in samples], 23)


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_each_sample_has_a_top_k_of_its_own(start: Start, rows: int) -> None:
    def source() -> Iterator[Any]:
        yield from ((np.roll(np.arange(WIDTH, dtype=np.float32), number), number) for number in range(10))

    def lists() -> Iterator[Any]:
        both = list(source())
        yield from (both[:3], both[3:])

    for kwargs in ({"top_k": 2}, {"top_k": 2, "dtype": "float16", "temperature": 4.0}):
        with reader_of(start("echo"), teacher_batch_size=rows, **kwargs) as reader:
            found = list(reader.set_sample_generator(source)())
        with reader_of(start("echo"), teacher_batch_size=rows, **kwargs) as reader:
            found += [row for some in reader.set_sample_list_generator(lists)() for row in some]
        assert [number for _, number, _ in found] == [*range(10)] * 2
        for x, _, label in found:
            assert label.ids.tolist() == np.argsort(-x)[:2].tolist()
            assert label.values.tolist() == [3, 2]
            assert label.tail_lse.shape == ()
        assert TopK.stack([label for *_, label in found]).ids.shape == (20, 2)


def test_batches_are_arrays(start: Start) -> None:
    """Batches are arrays and other fields pass through."""

    def source() -> Iterator[Any]:
        for first in range(0, 40, 10):
            numbers = np.arange(first, first + 10)
            yield np.repeat(numbers[:, None], WIDTH, 1).astype(np.float32), numbers, {"meta": first}

    with reader_of(start("echo")).set_batch_generator(source) as reader:
        batches = list(reader())
    assert [meta["meta"] for _, _, meta, _ in batches] == [0, 10, 20, 30]
    for x, numbers, _, labels in batches:
        assert labels.shape[0] == 10
        assert labels.flags.writeable
        assert (labels[:, 0] == numbers).all()
        assert (x[:, 0] == numbers).all()


def test_unknown_names_are_not_sent(start: Start) -> None:
    """Names that the model does not have are not sent."""
    reader = DistillReader(["x", "label"], ["y"], teachers=[start("echo").endpoint])
    with reader.set_sample_generator(samples(5)):
        check(list(reader()), 5)


def test_break_leaves_the_next_epoch_whole(start: Start) -> None:
    """Breaking out of an epoch leaves the next one whole."""
    with reader_of(start("echo")).set_sample_generator(samples(500)) as reader:
        for _ in range(5):
            for row in reader():
                if row[1] == 17:
                    break
        unfinished = reader()
        next(unfinished)
        check(list(reader()), 500)
        with pytest.raises(ClosedError, match="another one was started"):
            next(unfinished)


def test_two_readers_use_their_own_teachers(start: Start) -> None:
    plain, doubled = start("echo"), start("echo", scale=2.0)
    with (
        reader_of(plain).set_sample_generator(samples(50)) as first,
        reader_of(doubled).set_sample_generator(samples(50)) as second,
    ):
        for one, two in zip(first(), second(), strict=True):
            assert two[2][0] == 2 * one[2][0] == 2 * one[1]


def test_ensembles_are_averaged_and_weighted(start: Start) -> None:
    """Ensembles side by side averaged and weighted."""
    one, three = start("echo"), start("echo", scale=3.0)
    groups = [Teachers(endpoints=(one.endpoint,), weight=3.0), Teachers(endpoints=(three.endpoint,), weight=1.0)]

    def rows(combine: Any) -> list[Any]:
        with DistillReader(["x", None], ["y"], teachers=groups, combine=combine, teacher_batch_size=4) as reader:
            return list(reader.set_sample_generator(samples(20))())

    for _, number, first, second in rows("each"):
        assert (first[0], second[0]) == (number, 3 * number)
    for _, number, label in rows("mean"):
        assert label[0] == pytest.approx(0.75 * number + 0.25 * 3 * number)
    for _, number, label in rows(lambda outputs: np.maximum(*outputs)):
        assert label[0] == 3 * number


def test_top_k_and_float16_as_asked(start: Start) -> None:
    """Top k and float16 are delivered as asked."""
    teacher = start("linear")
    reader = DistillReader(["x", None], ["y"], teachers=[teacher.endpoint], top_k=3, temperature=2.0, dtype="float16")
    with reader.set_batch_generator(lambda: iter([(np.random.rand(6, WIDTH).astype(np.float32), None)])):
        ((_, _, top),) = list(reader())
    assert top.ids.shape == (6, 3)
    assert top.values.dtype == np.float16
    whole = DistillReader(["x", None], ["y"], teachers=[teacher.endpoint])
    x = np.random.rand(6, WIDTH).astype(np.float32)
    with whole.set_batch_generator(lambda: iter([(x, None)])):
        ((_, _, logits),) = list(whole())
    reader = DistillReader(["x", None], ["y"], teachers=[teacher.endpoint], top_k=3)
    with reader.set_batch_generator(lambda: iter([(x, None)])):
        ((_, _, top),) = list(reader())
    np.testing.assert_array_equal(top.ids, np.argsort(-logits, axis=1)[:, :3])


@pytest.mark.parametrize("shared_memory", [True, False])
def test_shared_memory_and_grpc_agree(start: Start, shared_memory: bool) -> None:
    """Shared memory and plain grpc give the same."""
    options = Options(shared_memory=shared_memory, teacher_timeout_s=60)
    with reader_of(start("echo"), options=options).set_sample_generator(samples(300)) as reader:
        check(list(reader()), 300)
        arena = reader._session.labeller._arena  # type: ignore[union-attr]
        assert (arena is not None and bool(arena._regions)) == shared_memory


def test_nothing_is_left_behind(start: Start) -> None:
    """Nothing is left behind by close or by letting go."""
    teacher = start("echo")

    def left() -> tuple[int, int, int]:
        gc.collect()
        arenas = len(list(Path("/dev/shm").glob(f"edl-arena-{os.getpid()}-*")))
        sockets = sum("socket:" in target(path) for path in Path("/proc/self/fd").iterdir())
        return len([t for t in threading.enumerate() if t.name != "MainThread"]), arenas, sockets

    def nothing_more() -> bool:  # what an earlier test left behind may have ended meanwhile
        return all(now <= then for now, then in zip(left(), before, strict=True))

    before = left()
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
    until(nothing_more, 60)

    reader = reader_of(teacher).set_sample_generator(samples(200))
    next(reader())
    del reader
    until(nothing_more, 60)


def target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""
