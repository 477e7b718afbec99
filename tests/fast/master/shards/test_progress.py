"""Progress and snapshots as bytes."""

from __future__ import annotations

from typing import Any

import pytest

from edl.errors import ConflictError, LeaseLostError, ProtocolError, SettingsError
from edl.master.shards import ShardBook
from edl.protocol import master
from tests.fast.master.shards.jobs import Job, checkpointed


def test_progress_goes_out_and_in() -> None:
    job = checkpointed(shuffle=True, seed=3, max_failures=1)
    job.open("a")
    first, second, third, fourth = job.turn("a", 4).leases
    job.turn("a", 0, done=[first, second])
    job.mark("a", 1, (third, 4))
    job.fail("a", fourth, "bad")
    job.turn("a", 0, done=job.turn("a", 1).leases)
    progress = job.book.progress("d")
    job.turn("a", 0, done=job.turn("a", 3).leases)
    job.apply(restore_progress=master.RestoreProgress(dataset="d", progress=progress))
    status = job.book.status("d")
    assert (status["units_done"], status["provisional_units"], status["shards"]["poisoned"]) == (24, 0, 1)
    assert status["poisoned"][0]["failures"][0]["reason"] == "bad"
    with pytest.raises(LeaseLostError, match="progress was replaced"):
        job.turn("a", 1)
    other = checkpointed(shuffle=True, seed=3, max_failures=1)
    other.apply(restore_progress=master.RestoreProgress(dataset="d", progress=progress))
    other.open("b")
    left = [unit for lease in other.turn("b", 99).leases for unit in range(lease.start, lease.stop)]
    assert len(set(left)) == len(left) == 100 - 24 - 10
    assert set(left).isdisjoint({*range(first.start, first.stop), *range(second.start, second.stop)})


def test_foreign_progress_is_refused() -> None:
    job = Job()
    progress = job.book.progress("d")
    before = job.book.snapshot()
    for data in (b"", b"nonsense", progress[:-1], progress + b"x", job.book.snapshot()):
        with pytest.raises(ProtocolError, match="progress of a data set"):
            job.apply(restore_progress=master.RestoreProgress(dataset="d", progress=data))
    for position in range(len(progress)):
        flipped = bytearray(progress)
        flipped[position] ^= 1
        with pytest.raises(ProtocolError):
            job.apply(restore_progress=master.RestoreProgress(dataset="d", progress=bytes(flipped)))
    other = Job(seed=9)
    with pytest.raises(ConflictError, match="another specification"):
        job.apply(restore_progress=master.RestoreProgress(dataset="d", progress=other.book.progress("d")))
    assert job.book.snapshot() == before


def test_impossible_progress_is_refused() -> None:
    """Its checksum is right: made by another program, or for what was here another time."""
    from edl.master.shards.envelope import open_envelope, seal

    job = Job()
    magic = b"EDL progress\0"
    state = open_envelope(magic, "x", job.book.progress("d"), master.ProgressState)
    for change in (
        {"position": 11},
        {"position": -1},
        {"units": 200},
        {"epoch": 1},
        {"units_done": -1},
        {"shards": [master.ShardState(shard=3, returned=[30, 41])]},
        {"shards": [master.ShardState(shard=3, returned=[30])]},
        {"shards": [master.ShardState(shard=10, returned=[100, 110])]},
        {"shards": [master.ShardState(epoch=1, shard=1, poisoned=[10, 20])]},
    ):
        wrong = master.ProgressState()
        wrong.CopyFrom(state)
        wrong.MergeFrom(master.ProgressState(**change))
        with pytest.raises(ProtocolError, match="cannot have"):
            job.apply(restore_progress=master.RestoreProgress(dataset="d", progress=seal(magic, wrong)))


def test_foreign_snapshots_are_refused() -> None:
    job = Job()
    data = job.book.snapshot()
    for wrong in (b"", b"EDL book\0", data[:-1], data + b"x", job.book.progress("d")):
        with pytest.raises(ProtocolError, match="snapshot of a book"):
            ShardBook.restore(wrong)
    newer = bytearray(data)
    newer[len(b"EDL book\0")] = 2
    from zlib import crc32

    newer[-4:] = crc32(newer[:-4]).to_bytes(4, "big")
    with pytest.raises(ProtocolError, match="of format 2; this version of EDL reads 1"):
        ShardBook.restore(bytes(newer))


def test_a_million_shards_are_no_records() -> None:
    """What is done leaves nothing behind: neither in memory, nor in a snapshot."""
    job = Job(units=10**6, shard_size=1, shuffle=True)
    job.open("a")
    seen: set[int] = set()
    leases: Any = ()
    for _ in range(100):
        leases = job.turn("a", 1000, done=leases).leases
        seen.update(lease.shard for lease in leases)
    assert len(seen) == 100_000
    job.turn("a", 0, done=leases)
    assert len(job.book.snapshot()) < 1000
    assert job.shards() == {"todo": 900_000, "doing": 0, "done": 100_000, "poisoned": 0}


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
