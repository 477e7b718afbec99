"""Commands that cannot be right: they say what is wrong, and change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from edl.errors import ConflictError, SettingsError
from edl.protocol import master
from tests.fast.master.shards.jobs import Job, checkpointed, lease_id


def extend(job: Job, units: int, index: bytes = b"") -> master.DatasetReply:
    reply: master.DatasetReply = job.apply(extend_dataset=master.ExtendDataset(dataset="d", units=units, index=index))
    return reply


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": ""}, "kind"),
        ({"units": -1}, "units=-1"),
        ({"shard_size": 0}, "shard_size=0"),
        ({"shard_size": -5}, "shard_size=-5"),
        ({"epochs": -1}, "epochs=-1"),
        ({"max_failures": -1}, "max_failures=-1"),
        ({"lease_s": float("nan")}, "lease_s=nan"),
        ({"lease_s": -1.0}, "lease_s=-1"),
        ({"session_s": 1e9}, "session_s=1000000000"),
        ({"commit": 7}, "commit=7"),
        ({"units": None, "shuffle": True}, "neither shuffled"),
        ({"units": None, "epochs": 2}, "neither shuffled"),
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
        extend(job, 200)


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
