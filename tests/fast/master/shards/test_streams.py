"""Shards of sources without an end."""

from __future__ import annotations

from typing import Any

import pytest

from edl.errors import ConflictError
from edl.master.shards import ShardBook
from edl.protocol import master
from tests.fast.master.shards.jobs import Job, bounds


def stream(**spec: Any) -> Job:
    job = Job(units=None, kind="follow", **spec)
    assert not job.spec.HasField("units")
    return job


def extend(job: Job, units: int, index: bytes = b"") -> master.DatasetReply:
    reply: master.DatasetReply = job.apply(extend_dataset=master.ExtendDataset(dataset="d", units=units, index=index))
    return reply


def test_stream_gives_whole_shards() -> None:
    job = stream(index=b"0")
    job.open("a")
    assert job.turn("a", 5).wait_s > 0
    extend(job, 25, b"1")
    assert bounds(job.turn("a", 5).leases) == [(0, 10), (10, 20)]
    assert not job.turn("a", 5).finished
    extend(job, 31, b"2")
    assert bounds(job.turn("a", 5).leases) == [(20, 30)]
    assert extend(job, 31, b"not again").units == 31
    assert extend(job, 7, b"not again").units == 31, "a repetition that comes late"
    assert extend(job, 31).spec.index == b"", "it is not copied for each line that the source grows by"
    job.apply(end_dataset=master.EndDataset(dataset="d"))
    assert bounds(job.turn("a", 5).leases) == [(30, 31)]
    with pytest.raises(ConflictError, match="ended with 31 units"):
        extend(job, 40)
    book = ShardBook.restore(job.book.snapshot())
    assert book.describe("d") == job.book.describe("d")
    assert book.describe("d").spec.index == b"012"


def test_flush_gives_the_rest() -> None:
    job = stream()
    job.open("a")
    extend(job, 13)
    first = job.turn("a", 5)
    job.apply(flush_dataset=master.FlushDataset(dataset="d"))
    second = job.turn("a", 5)
    assert bounds(second.leases) == [(10, 13)]
    extend(job, 19)
    assert bounds(job.turn("a", 5).leases) == [], "it does not fill the shard"
    extend(job, 22)
    third = job.turn("a", 5)
    assert [(lease.shard, lease.start, lease.stop) for lease in third.leases] == [(1, 13, 20)]
    job.apply(end_dataset=master.EndDataset(dataset="d"))
    fourth = job.turn("a", 5)
    assert bounds(fourth.leases) == [(20, 22)]
    done = [*first.leases, *second.leases, *third.leases, *fourth.leases]
    assert job.turn("a", 5, done=done).finished
    assert job.shards() == {"todo": 0, "doing": 0, "done": 3, "poisoned": 0}


def test_failed_shard_of_a_stream_is_next() -> None:
    """A source that grows without a pause would never come to those that are kept for the end."""
    job = stream()
    job.open("a")
    extend(job, 100)
    (lease,) = job.turn("a", 1).leases
    assert bounds(job.fail("a", lease, "once", want=2).leases) == [(0, 10), (10, 20)]


def test_progress_needs_the_index() -> None:
    """Another job's master has not seen the source grow so far yet."""
    job = stream()
    job.open("a")
    extend(job, 45)
    first, second = job.turn("a", 2).leases
    job.turn("a", 0, done=[first])
    command = master.RestoreProgress(dataset="d", progress=job.book.progress("d"))
    other = stream()
    extend(other, 19)
    with pytest.raises(ConflictError, match="19 units until now, and the progress is at 20"):
        other.apply(restore_progress=command)
    extend(other, 31)
    other.apply(restore_progress=command)
    other.open("b")
    assert bounds(other.turn("b", 9).leases) == [(10, 20), (20, 30)]
    assert other.book.describe("d").units == 31
    assert second.start == 10
