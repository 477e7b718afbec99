"""The book of shards, case by case; `test_book_random` has what nobody thought of."""

from __future__ import annotations

from typing import Any

import pytest

from edl.errors import ConflictError
from edl.master.shards import ShardBook
from edl.protocol import master
from tests.fast.master.shards.jobs import Job, bounds, lease_id


def test_repeated_turn_is_answered_again() -> None:
    """A reply that was lost: of this master, and of one that was restored from a snapshot."""
    job = Job()
    job.open("a")
    turn = master.Turn(session="a", request=1, want=3)
    reply = job.book.turn(turn)
    version = job.book.version
    assert job.book.turn(turn) == reply
    assert job.book.version == version
    book = ShardBook.restore(job.book.snapshot())
    assert book.turn(turn) == reply
    assert job.open("a").last_request == 1
    assert list(job.open("a").leases) == list(reply.leases)
    for request in (0, 3):
        with pytest.raises(ConflictError, match=f"turn {request} of session a: the last was 1"):
            job.book.turn(master.Turn(session="a", request=request, want=3))
    assert job.shards()["doing"] == 3


def test_failures_poison_with_reasons() -> None:
    job = Job(units=20, max_failures=3)
    for number, holder in enumerate("abc"):
        job.open(holder)
        leases = job.turn(holder, 2).leases
        job.turn(holder, 0, returned=[master.Partial(lease=lease_id(leases[0]))])
        failure = master.Failure(lease=lease_id(leases[1]), reason=f"reason {number}\n" + "x" * 999)
        turn = master.Turn(session=holder, request=3, failed=[failure])
        job.book.apply(master.Command(turn=turn, time_ms=1000 * number))
        job.requests[holder] = 3
    assert job.shards() == {"todo": 1, "doing": 0, "done": 0, "poisoned": 1}
    (poisoned,) = job.book.status("d")["poisoned"]
    assert (poisoned["shard"], poisoned["start"], poisoned["stop"]) == (1, 10, 20)
    assert [(failure["holder"], failure["time"]) for failure in poisoned["failures"]] == [
        ("a", 0.0), ("b", 1.0), ("c", 2.0)
    ]  # fmt: skip
    for number, failure in enumerate(poisoned["failures"]):
        assert failure["reason"].startswith(f"reason {number}\\n")
        assert len(failure["reason"]) < 400
    reply = job.turn("a", 5, done=job.turn("a", 5).leases)
    assert (reply.finished, reply.poisoned) == (True, 1)
    (event,) = [event for event in job.book.pop_events() if event.kind == "poisoned"]
    assert "is given up after" in event.text
    assert event.cause.startswith("the last of "), event.cause
    assert job.book.pop_events() == []
    with pytest.raises(ConflictError, match="shard 0 is not poisoned"):
        job.apply(retry_poisoned=master.RetryPoisoned(dataset="d", shards=[0, 1]))
    assert job.apply(retry_poisoned=master.RetryPoisoned(dataset="d", shards=[1])).shards == 1
    reply = job.turn("a", 5)
    assert bounds(reply.leases) == [(10, 20)]
    assert job.turn("a", 1, done=reply.leases).finished


def test_failed_shard_goes_to_another() -> None:
    """A broken machine alone does not have a shard given up, as long as others are there and ask for shards."""
    job = Job(units=30)
    job.open("broken")
    (lease,) = job.turn("broken", 1).leases
    alone = job.fail("broken", lease, "once", want=10)
    assert bounds(alone.leases) == [(10, 20), (20, 30), (0, 10)]
    job.turn("broken", 0, returned=[master.Partial(lease=lease_id(lease)) for lease in alone.leases[:2]])
    job.open("whole")
    reply = job.fail("broken", alone.leases[2], "no GPU", want=10)
    assert bounds(reply.leases) == [(10, 20), (20, 30)], "the failed shard is not the broken machine's again"
    turns = 0
    while not (reply := job.turn("broken", 1)).leases:  # the other one lives, and asks for nothing
        assert reply.wait_s > 0
        turns += 1
        job.book = ShardBook.restore(job.book.snapshot())
    assert 10 < turns < 100


def test_endless_and_empty_datasets() -> None:
    job = Job(units=10, epochs=0)
    job.open("a")
    leases: Any = ()
    for epoch in range(5):
        reply = job.turn("a", 1, done=leases)
        leases = reply.leases
        assert leases[0].epoch == epoch
        assert not reply.finished
    job = Job(units=0, epochs=0)
    job.open("a")
    assert job.turn("a", 5).finished
    assert job.book.is_finished("d")


def test_only_the_deadly_shard_is_given_up() -> None:
    """A shard that kills each worker that works on it; what these had beside it is not to blame."""
    job = Job(units=300, max_failures=3)
    lives = 0
    sessions = dict.fromkeys(("w0", "w1", "w2"), "")
    had: dict[str, list[master.Lease]] = {}
    while not job.book.is_finished("d"):
        for name in sessions:
            session = sessions[name]
            if not session:
                lives += 1
                session = sessions[name] = f"{name}-{lives}"
                job.open(session, name)
                had[name] = []
            done, had[name] = had[name][:1], had[name][1:]
            if done and done[0].shard == 4:
                job.expire(session)
                sessions[name] = ""
                continue
            had[name] += job.turn(session, 3 - len(had[name]), done=done).leases
        assert lives < 100
    assert job.shards() == {"todo": 0, "doing": 0, "done": 29, "poisoned": 1}
    assert [shard["shard"] for shard in job.book.status("d")["poisoned"]] == [4]
    assert lives == len(sessions) + 3


# Sources without an end.


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
