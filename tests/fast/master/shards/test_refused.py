"""Commands and bytes that cannot be right say what is wrong and change nothing; progress and snapshots come back."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest

from edl.errors import ConflictError, LeaseLostError, ProtocolError, SettingsError
from edl.master.shards import ShardBook
from edl.master.shards.envelope import open_envelope, seal
from edl.protocol import master
from tests.fast.master.shards.jobs import Job, checkpointed, lease_id


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
    with pytest.raises(ConflictError, match=r"another specification: seed is 0 and not 3$"):
        job.apply(create_dataset=master.CreateDataset(dataset="d", spec=job.spec))
    for name in ("", "x" * 201, "line\nbreak"):
        with pytest.raises(SettingsError, match="printable"):
            job.apply(create_dataset=master.CreateDataset(dataset=name, spec=job.spec))
    with pytest.raises(SettingsError, match="'nothing' is not known"):
        job.book.describe("nothing")
    with pytest.raises(SettingsError, match="only a source without an end grows"):
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
    with pytest.raises(SettingsError, match="names lease 1, which it does not have"):
        job.apply(mark=master.Mark(session="a", mark=1, partial=[part]))
    assert job.book.snapshot() == before


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


def test_foreign_progress_is_refused() -> None:
    job = Job()
    progress = job.book.progress("d")
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
    with pytest.raises(ConflictError, match="another specification"):
        job.apply(restore_progress=master.RestoreProgress(dataset="d", progress=other.book.progress("d")))
    assert job.book.snapshot() == before


def test_impossible_progress_is_refused() -> None:
    """Its checksum is right: made by another program, or for what was here another time."""
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
