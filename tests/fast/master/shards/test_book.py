"""The book of shards, case by case; `test_book_random` has what nobody thought of."""

from __future__ import annotations

from typing import Any

import pytest

from edl.errors import ConflictError, LeaseLostError
from edl.master.shards import ShardBook
from edl.protocol import master
from tests.fast.master.shards.jobs import Job, bounds, lease_id


def test_shards_are_given_and_done() -> None:
    job = Job(units=25)
    job.open("a")
    first = job.turn("a", 2)
    assert bounds(first.leases) == [(0, 10), (10, 20)]
    assert not first.finished
    second = job.turn("a", 2, done=first.leases)
    assert bounds(second.leases) == [(20, 25)]
    assert job.shards() == {"todo": 0, "doing": 1, "done": 2, "poisoned": 0}
    last = job.turn("a", 2, done=second.leases)
    assert last.finished
    assert last.wait_s == 0
    assert job.book.is_finished("d")
    assert job.book.status("d")["units_done"] == 25


def test_late_report_is_refused() -> None:
    """DLRover's task manager took it, and with it the new holder's task: the shard counted as done by no one."""
    job = Job(units=10)
    job.open("a", "slow")
    job.open("b", "quick")
    (lease,) = job.turn("a", 1).leases
    job.expire(leases=[lease])
    assert "waits for another holder" in job.turn("a", 0, done=[lease]).refused[0].reason
    (again,) = job.turn("b", 1).leases
    assert again.id != lease.id
    late = job.turn("a", 0, done=[lease])
    assert late.refused[0].reason == "lease of slow expired; the shard was given to quick"
    late = job.turn("a", 0, failed=[master.Failure(lease=lease_id(lease), reason="too late")])
    assert len(late.refused) == 1
    assert job.shards()["doing"] == 1
    assert not job.turn("b", 0, done=[again]).refused
    assert job.book.is_finished("d")
    assert "reported before" in job.turn("b", 0, done=[again]).refused[0].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"term": 2}, "it was given in term 1, not in 2"),
        ({"id": 7}, "it was never given"),
        ({"id": 2}, "it is another session's, of b"),
    ],
)
def test_reports_must_match(change: dict[str, int], reason: str) -> None:
    job = Job()
    job.open("a")
    job.open("b")
    (lease,) = job.turn("a", 1).leases
    job.turn("b", 1)
    wrong = master.Lease(**{"id": lease.id, "term": lease.term, **change})
    (refusal,) = job.turn("a", 0, done=[wrong]).refused
    assert refusal.reason == reason
    assert job.shards()["doing"] == 2
    assert not job.turn("a", 0, done=[lease]).refused


def test_leases_outlive_their_term() -> None:
    job = Job()
    job.open("a")
    (lease,) = job.turn("a", 1).leases
    job.apply(begin_term=master.BeginTerm(term=5))
    reply = job.turn("a", 1, done=[lease])
    assert not reply.refused
    assert reply.leases[0].term == 5
    with pytest.raises(ConflictError, match="term 5: 5 has begun"):
        job.apply(begin_term=master.BeginTerm(term=5))


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


def test_ended_session_is_told_why() -> None:
    job = Job()
    job.open("a")
    (lease,) = job.turn("a", 1).leases
    job.expire("a", "unknown")
    with pytest.raises(LeaseLostError, match="session a has ended: lease of a expired"):
        job.turn("a", 1)
    with pytest.raises(LeaseLostError, match="session a has ended"):
        job.open("a")
    job.open("a2", "a")
    assert "expired" in job.turn("a2", 0, done=[lease]).refused[0].reason


def test_failures_poison_with_reasons() -> None:
    job = Job(units=20, max_failures=3)
    for holder in "abc":
        job.open(holder)
    for number, holder in enumerate("abc"):
        leases = job.turn(holder, 2).leases
        job.turn(holder, 0, returned=[master.Partial(lease=lease_id(leases[0]))])
        job.book.apply(
            master.Command(
                turn=master.Turn(
                    session=holder,
                    request=3,
                    failed=[master.Failure(lease=lease_id(leases[1]), reason=f"reason {number}\n" + "x" * 999)],
                ),
                time_ms=1000 * number,
            )
        )
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
    reply = job.turn("a", 5)
    reply = job.turn("a", 5, done=reply.leases)
    assert reply.finished
    assert reply.poisoned == 1
    (poisoned,) = [event for event in job.book.pop_events() if event.kind == "poisoned"]
    assert "is given up after" in poisoned.text
    assert poisoned.cause.startswith("the last of "), poisoned.cause
    assert job.book.pop_events() == []
    with pytest.raises(ConflictError, match="shard 0 is not poisoned"):
        job.apply(retry_poisoned=master.RetryPoisoned(dataset="d", shards=[0, 1]))
    assert job.apply(retry_poisoned=master.RetryPoisoned(dataset="d", shards=[1])).shards == 1
    reply = job.turn("a", 5)
    assert bounds(reply.leases) == [(10, 20)]
    assert job.turn("a", 1, done=reply.leases).finished


@pytest.mark.parametrize("ignore", [False, True])
def test_expiries_poison_unless_ignored(ignore: bool) -> None:
    job = Job(units=10, max_failures=2, ignore_expiries=ignore)
    job.open("a")
    for _ in range(3):
        job.expire(leases=job.turn("a", 1).leases)
    assert job.book.poisoned("d") == (0 if ignore else 1)


def test_failed_shard_goes_to_another() -> None:
    """A broken machine alone does not have a shard given up, as long as others are there."""
    job = Job(units=30)
    job.open("broken")
    job.open("whole")
    (lease,) = job.turn("broken", 1).leases
    reply = job.fail("broken", lease, "no GPU", want=10)
    assert bounds(reply.leases) == [(10, 20), (20, 30)], "the failed shard is not the broken machine's again"
    assert bounds(job.turn("whole", 10).leases) == [(0, 10)]


def test_failed_shard_returns_when_alone() -> None:
    job = Job(units=30)
    job.open("a")
    (lease,) = job.turn("a", 1).leases
    assert bounds(job.fail("a", lease, "once", want=10).leases) == [(10, 20), (20, 30), (0, 10)]


def test_failed_shard_is_not_kept_for_ever() -> None:
    """Another holder lives and asks for nothing."""
    job = Job(units=10)
    job.open("a")
    job.open("idle")
    (lease,) = job.turn("a", 1).leases
    job.fail("a", lease, "once")
    turns = 0
    while not (reply := job.turn("a", 1)).leases:
        assert reply.wait_s > 0
        turns += 1
        job.book = ShardBook.restore(job.book.snapshot())
    assert 10 < turns < 100


def test_epochs_follow_without_a_barrier() -> None:
    job = Job(units=30, epochs=2, max_failures=1)
    job.open("slow")
    job.open("quick")
    (held,) = job.turn("slow", 1).leases
    reply = job.turn("quick", 4)
    assert [(lease.epoch, lease.shard) for lease in reply.leases] == [(0, 1), (0, 2), (1, 0), (1, 1)]
    job.apply(close_session=master.CloseSession(session="slow"))
    more = job.turn("quick", 2)
    assert [(lease.epoch, lease.shard) for lease in more.leases] == [(0, 0), (1, 2)], "the older epoch comes first"
    assert held.shard == 0
    end = job.turn("quick", 2, done=[*reply.leases, *more.leases])
    assert end.finished
    assert end.epoch == 1


def test_endless_epochs() -> None:
    job = Job(units=10, epochs=0)
    job.open("a")
    leases: Any = ()
    for epoch in range(50):
        reply = job.turn("a", 1, done=leases)
        leases = reply.leases
        assert leases[0].epoch == epoch
        assert not reply.finished


@pytest.mark.parametrize("epochs", [0, 1, 5])
def test_empty_dataset_is_finished(epochs: int) -> None:
    job = Job(units=0, epochs=epochs)
    job.open("a")
    assert job.turn("a", 5).finished
    assert job.book.is_finished("d")


def test_returned_parts_are_done() -> None:
    """A reader that stops early, in the middle of a shard."""
    job = Job(units=20)
    job.open("a")
    first, second = job.turn("a", 2).leases
    job.turn(
        "a",
        0,
        returned=[master.Partial(lease=lease_id(first), units=4), master.Partial(lease=lease_id(second), units=10)],
    )
    assert job.book.status("d")["units_done"] == 14
    assert bounds(job.turn("a", 5).leases) == [(4, 10)]


@pytest.mark.parametrize("holders", [1, 3])
def test_only_the_deadly_shard_is_given_up(holders: int) -> None:
    """A shard that kills each worker that works on it; what these had beside it is not to blame."""
    job = Job(units=300, max_failures=3)
    lives = 0
    names = [f"w{number}" for number in range(holders)]
    sessions = dict.fromkeys(names, "")
    had: dict[str, list[master.Lease]] = {}
    for _ in range(2000):
        for name in names:
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
            reply = job.turn(session, 3 - len(had[name]), done=done)
            had[name] += reply.leases
        if job.book.is_finished("d"):
            break
    assert job.shards() == {"todo": 0, "doing": 0, "done": 29, "poisoned": 1}
    assert [shard["shard"] for shard in job.book.status("d")["poisoned"]] == [4]
    assert lives == holders + 3
