"""The book of shards, case by case; `test_book_random` has what nobody thought of."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.errors import ConflictError, LeaseLostError, ProtocolError, SettingsError
from edl.master.shards import ShardBook
from edl.master.shards.units import UnitCursor
from edl.protocol import master


class Job:
    def __init__(self, **spec: Any) -> None:
        self.book = ShardBook()
        self.requests: dict[str, int] = {}
        self.apply(begin_term=master.BeginTerm(term=1))
        self.spec = master.DatasetSpec(**{"kind": "range", "units": 100, "shard_size": 10, "epochs": 1, **spec})
        self.apply(create_dataset=master.CreateDataset(dataset="d", spec=self.spec))

    def apply(self, **kind: Any) -> Any:
        return self.book.apply(master.Command(**kind))

    def open(self, session: str, holder: str = "") -> master.NextReply:
        return self.apply(open_session=master.OpenSession(dataset="d", session=session, holder=holder or session))

    def turn(self, session: str, want: int = 0, done: Any = (), **rest: Any) -> master.NextReply:
        self.requests[session] = self.requests.get(session, 0) + 1
        return self.book.turn(
            master.Turn(
                session=session,
                request=self.requests[session],
                want=want,
                done=[lease.id for lease in done],
                done_terms=[lease.term for lease in done],
                **rest,
            )
        )

    def fail(self, session: str, lease: master.Lease, reason: str, want: int = 0) -> master.NextReply:
        return self.turn(session, want, failed=[master.Failure(lease=lease_id(lease), reason=reason)])

    def mark(self, session: str, number: int, *parts: tuple[master.Lease, int]) -> None:
        partial = [master.Partial(lease=lease_id(lease), units=units) for lease, units in parts]
        self.apply(mark=master.Mark(session=session, mark=number, partial=partial))

    def resume(self, session: str, of_session: str, mark: int, holder: str = "") -> master.ResumeReply:
        command = master.Resume(dataset="d", session=session, of_session=of_session, of_holder=holder, mark=mark)
        return self.apply(resume=command)

    def expire(self, *sessions: str, leases: Any = ()) -> None:
        self.apply(expire=master.Expire(sessions=sessions, leases=[lease.id for lease in leases]))

    def shards(self) -> dict[str, int]:
        return self.book.datasets["d"].status()["shards"]


def lease_id(lease: master.Lease) -> master.LeaseId:
    return master.LeaseId(id=lease.id, term=lease.term)


def bounds(leases: Any) -> list[tuple[int, int]]:
    return [(lease.start, lease.stop) for lease in leases]


def checkpointed(**spec: Any) -> Job:
    return Job(commit=master.COMMIT_CHECKPOINT, **spec)


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
    (poisoned,) = job.book.datasets["d"].status()["poisoned"]
    assert (poisoned["shard"], poisoned["start"], poisoned["stop"]) == (1, 10, 20)
    assert [(failure["holder"], failure["time"]) for failure in poisoned["failures"]] == [
        ("a", 0.0), ("b", 1.0), ("c", 2.0)
    ]  # fmt: skip
    for number, failure in enumerate(poisoned["failures"]):
        assert failure["reason"].startswith(f"reason {number}\\n")
        assert len(failure["reason"]) < 400
    reply = job.turn("a", 5, done=job.turn("a", 5).leases)
    assert (reply.finished, reply.poisoned) == (True, 1)
    ((_, _, text, cause),) = [event for event in job.book.events if event[0] == "poisoned"]
    assert "is given up after" in text
    assert cause.startswith("the last failure was at "), cause
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
    assert job.book.datasets["d"].is_done


def stream(**spec: Any) -> Job:
    job = Job(units=None, kind="follow", **spec)
    assert not job.spec.HasField("units")
    return job


def extend(job: Job, units: int, index: bytes = b"") -> master.DatasetReply:
    return job.apply(extend_dataset=master.ExtendDataset(dataset="d", units=units, index=index))


def test_stream_gives_what_it_has() -> None:
    """A part of a shard, too, which its follower tells of when nothing more comes for a while."""
    job = stream(index=b"0")
    job.open("a")
    assert job.turn("a", 5).wait_s > 0
    extend(job, 25, b"1")
    assert bounds(job.turn("a", 5).leases) == [(0, 10), (10, 20), (20, 25)]
    assert not job.turn("a", 5).finished
    extend(job, 31, b"2")
    assert job.shards() == {"todo": 1, "doing": 3, "done": 0, "poisoned": 0}
    rest = job.turn("a", 5).leases
    assert [(lease.shard, lease.start, lease.stop) for lease in rest] == [(2, 25, 30), (3, 30, 31)]
    assert extend(job, 31, b"not again").units == 31
    assert extend(job, 7, b"not again").units == 31, "a repetition that comes late"
    assert extend(job, 31).spec.index == b"", "it is not copied for each line that the source grows by"
    job.apply(end_dataset=master.EndDataset(dataset="d"))
    with pytest.raises(ConflictError, match="ended with 31 units"):
        extend(job, 40)
    assert job.turn("a", 5, done=job.open("a").leases).finished
    assert job.shards() == {"todo": 0, "doing": 0, "done": 4, "poisoned": 0}
    book = ShardBook.restore(job.book.snapshot())
    assert book.datasets["d"].describe() == job.book.datasets["d"].describe()
    assert book.datasets["d"].describe().spec.index == b"012"


def test_progress_needs_the_index() -> None:
    """Another job's master has not seen the source grow so far yet."""
    job = stream()
    job.open("a")
    extend(job, 45)
    job.turn("a", 0, done=job.turn("a", 2).leases[:1])
    command = master.RestoreProgress(dataset="d", progress=job.book.datasets["d"].progress())
    other = stream()
    extend(other, 19)
    with pytest.raises(ConflictError, match="19 units so far, but the progress is at 20"):
        other.apply(restore_progress=command)
    extend(other, 31)
    other.apply(restore_progress=command)
    other.open("b")
    assert bounds(other.turn("b", 9).leases) == [(10, 20), (20, 30), (30, 31)]
    assert other.book.datasets["d"].describe().units == 31


def test_start_without_a_checkpoint() -> None:
    """What a lost life marked and never saved is of no state that survives: its holder begins anew."""
    job = checkpointed()
    job.open("a", "rank-0")
    assert len(job.resume("a", "", 0, "rank-0").leases) == 0
    job.turn("a", 0, done=job.turn("a", 2).leases)
    job.mark("a", 1)
    job.open("b", "rank-0")
    with pytest.raises(ConflictError, match="rank-0 continues rank-0 in session a, which is live"):
        job.resume("b", "", 0, "rank-0")
    job.expire("a")
    job.resume("b", "", 0, "rank-0")
    assert job.book.datasets["d"].status()["units_done"] == 0


def test_resume_is_for_new_sessions() -> None:
    job = checkpointed()
    job.open("a")
    job.open("b")
    job.turn("b", 1)
    with pytest.raises(ConflictError, match="session b has begun to read"):
        job.resume("b", "a", 0)
    reporting = Job()
    reporting.open("a")
    with pytest.raises(SettingsError, match="has commit="):
        reporting.resume("a", "b", 0)
    with pytest.raises(SettingsError, match="commits by reports"):
        reporting.mark("a", 1)


def shuffled(count: int, seed: int, epoch: int, position: int = 0) -> UnitCursor:
    spec = master.DatasetSpec(units=count, shard_size=1, seed=seed, shuffle=True)
    return UnitCursor(spec, count, epoch=epoch, position=position)


def numbers(taken: Any) -> list[int]:
    return [part.shard for part in taken]


@settings(max_examples=40)
@given(st.integers(1, 600), st.integers(0, 2**64 - 1), st.integers(0, 10**9), st.integers(1, 2000))
def test_order_is_a_permutation(count: int, seed: int, epoch: int, most: int) -> None:
    shards = numbers(shuffled(count, seed, epoch).take(count + 1))
    assert sorted(shards) == list(range(count))
    again = shuffled(count, seed, epoch)
    parts = [numbers(again.take(most)) for _ in range(-(-count // most) + 1)]
    assert [shard for part in parts for shard in part] == shards
    assert parts[-1] == []


def test_order_is_pinned() -> None:
    """A change would have a job that goes on after an update of EDL read samples twice, and others never."""
    assert numbers(shuffled(10, 7, 3).take(10)) == PINNED_10
    assert numbers(shuffled(10**6, 2**64 - 1, 10**12, 999_000).take(5)) == PINNED_MILLION
    assert numbers(shuffled(2**40, 1, 0, 2**39).take(3)) == PINNED_LARGE


PINNED_10 = [0, 2, 3, 4, 5, 6, 8, 7, 1, 9]
PINNED_MILLION = [496094, 109637, 391251, 848905, 152969]
PINNED_LARGE = [250907736042, 1034174068119, 841590924608]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"units": -1}, "units=-1"),
        ({"shard_size": 0}, "shard_size=0"),
        ({"max_failures": -1}, "max_failures=-1"),
        ({"lease_s": float("nan")}, "lease_s=nan"),
        ({"session_s": 1e9}, "session_s=1000000000"),
        ({"commit": 7}, "commit=7"),
        ({"units": None, "shuffle": True}, "neither shuffled"),
        ({"flush_s": 1.0}, "flush_s=1.0"),
        ({"units": 2**50, "shard_size": 1}, "shards"),
    ],
)
def test_bad_specifications_are_refused(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Job(**spec)


def test_datasets_are_created_once() -> None:
    job = Job()
    version = job.book.version
    created = job.apply(create_dataset=master.CreateDataset(dataset="d", spec=job.spec))
    assert job.book.version == version
    assert (created.units, created.ended, created.spec.max_failures) == (100, True, 3)
    job.spec.seed = 3
    with pytest.raises(ConflictError, match=r"a different specification: seed is 0 and not 3$"):
        job.apply(create_dataset=master.CreateDataset(dataset="d", spec=job.spec))
    for name in ("", "x" * 201, "line\nbreak"):
        with pytest.raises(SettingsError, match="printable"):
            job.apply(create_dataset=master.CreateDataset(dataset=name, spec=job.spec))
    with pytest.raises(SettingsError, match="'nothing' is not known"):
        job.apply(end_dataset=master.EndDataset(dataset="nothing"))
    with pytest.raises(SettingsError, match="cannot grow: only an endless source can"):
        job.apply(extend_dataset=master.ExtendDataset(dataset="d", units=200, index=b""))


@pytest.mark.parametrize("units", [-1, 11])
def test_impossible_parts_are_refused(units: int) -> None:
    job = checkpointed()
    job.open("a")
    (lease,) = job.turn("a", 1).leases
    before = job.book.snapshot()
    part = master.Partial(lease=lease_id(lease), units=units)
    for kind in (
        {"turn": master.Turn(session="a", request=2, returned=[part])},
        {"turn": master.Turn(session="a", request=2, failed=[master.Failure(lease=lease_id(lease), units=units)])},
        {"mark": master.Mark(session="a", mark=1, partial=[part])},
    ):
        with pytest.raises(SettingsError, match="units of lease 1"):
            job.apply(**kind)
    part.units = 5
    with pytest.raises(SettingsError, match="twice"):
        job.apply(mark=master.Mark(session="a", mark=1, partial=[part, part]))
    part.lease.term = 7
    with pytest.raises(SettingsError, match="names lease 1, which the session does not have"):
        job.apply(mark=master.Mark(session="a", mark=1, partial=[part]))
    assert job.book.snapshot() == before


def test_no_progress_is_the_beginning() -> None:
    job = Job()
    beginning = job.book.datasets["d"].progress()
    job.open("a")
    job.turn("a", 2, done=job.turn("a", 3).leases[:2])
    assert job.book.datasets["d"].progress() != beginning
    job.apply(restore_progress=master.RestoreProgress(dataset="d"))
    assert job.book.datasets["d"].progress() == beginning


def test_foreign_progress_is_refused() -> None:
    job = Job()
    progress = job.book.datasets["d"].progress()
    before = job.book.snapshot()
    for data in (b"", b"nonsense", progress[:-1], progress + b"x", job.book.snapshot()):
        with pytest.raises(ProtocolError, match="progress of a data set"):
            job.apply(restore_progress=master.RestoreProgress(dataset="d", progress=data))
    for position in range(0, len(progress), 7):
        flipped = bytearray(progress)
        flipped[position] ^= 1
        with pytest.raises(ProtocolError):
            job.apply(restore_progress=master.RestoreProgress(dataset="d", progress=bytes(flipped)))
    other = Job(seed=9)
    with pytest.raises(ConflictError, match="a different specification"):
        job.apply(restore_progress=master.RestoreProgress(dataset="d", progress=other.book.datasets["d"].progress()))
    assert job.book.snapshot() == before


def test_foreign_snapshots_are_refused() -> None:
    job = Job()
    data = job.book.snapshot()
    for wrong in (b"", b"EDL book\0", data[:-1], data + b"x", job.book.datasets["d"].progress()):
        with pytest.raises(ProtocolError, match="snapshot of a book"):
            ShardBook.restore(wrong)
    newer = bytearray(data)
    newer[len(b"EDL book\0")] = 2
    newer[-4:] = crc32(newer[:-4]).to_bytes(4, "big")
    with pytest.raises(ProtocolError, match="of format 2; this version of EDL reads 1"):
        ShardBook.restore(bytes(newer))


def test_a_million_shards_are_no_records() -> None:
    """What is done leaves nothing behind: neither in memory, nor in a snapshot."""
    job = Job(units=10**6, shard_size=1, shuffle=True)
    job.open("a")
    seen: set[int] = set()
    leases: Any = ()
    for _ in range(20):
        leases = job.turn("a", 1000, done=leases).leases
        seen.update(lease.shard for lease in leases)
    assert len(seen) == 20_000
    job.turn("a", 0, done=leases)
    assert len(job.book.snapshot()) < 1000
    assert job.shards() == {"todo": 980_000, "doing": 0, "done": 20_000, "poisoned": 0}


def test_ended_records_are_bounded() -> None:
    """Late reports are explained for a while; what explains them does not grow."""
    job = Job(units=10**6, shard_size=1, ignore_expiries=True)
    for number in range(1500):
        job.open(f"s{number}")
        job.turn(f"s{number}", 2)
        job.expire(f"s{number}")
    assert len(job.book.snapshot()) < 300_000
    with pytest.raises(SettingsError, match="'s0' is not known"):
        job.turn("s0", 1)
    with pytest.raises(LeaseLostError, match="s1499 has ended"):
        job.turn("s1499", 1)
