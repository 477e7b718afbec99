"""Readers that commit by checkpoints: marks, and going back to them."""

from __future__ import annotations

import pytest

from edl.errors import ConflictError, LeaseLostError, SettingsError
from tests.fast.master.shards.jobs import Job, bounds, checkpointed


def test_loss_after_a_mark_goes_back() -> None:
    job = checkpointed(units=40)
    job.open("a")
    first, second, third = job.turn("a", 3).leases
    job.turn("a", 0, done=[first])
    job.mark("a", 1, (second, 4))
    job.turn("a", 0, done=[second])
    assert job.book.status("d")["provisional_units"] == 6
    job.expire("a")
    assert job.book.status("d")["units_done"] == 14
    with pytest.raises(LeaseLostError, match="after its last mark, 1, went back: resume"):
        job.turn("a", 1)
    job.open("b")
    assert bounds(job.turn("b", 9).leases) == [(14, 20), (20, 30), (30, 40)]
    assert third.start == 20


def test_marks_of_the_given_up_branch() -> None:
    job = checkpointed()
    job.open("a")
    for number in (1, 2, 3):
        job.turn("a", 0, done=job.turn("a", 1).leases)
        job.mark("a", number)
    job.expire("a")
    job.open("b")
    job.resume("b", "a", 1)
    job.turn("b", 0, done=job.turn("b", 1).leases)
    with pytest.raises(ConflictError, match="mark 1 of session b: 1 was made"):
        job.mark("b", 1)
    job.mark("b", 2)
    job.expire("b")
    job.open("c")
    with pytest.raises(SettingsError, match=r"mark 3 of a is not kept: .* are 0, 1, 2, and marks after"):
        job.resume("c", "a", 3)
    with pytest.raises(SettingsError, match="mark 2 of a is not kept"):
        job.resume("c", "a", 2)
    job.resume("c", "b", 2)
    assert job.book.status("d")["units_done"] == 20


def test_start_without_a_checkpoint() -> None:
    """What a lost life marked and never saved is of no state that survives: its holder begins anew."""
    job = checkpointed()
    job.open("a", "rank-0")
    assert len(job.resume("a", "", 0, "rank-0").leases) == 0
    job.turn("a", 0, done=job.turn("a", 2).leases)
    job.mark("a", 1)
    job.open("b", "rank-0")
    with pytest.raises(ConflictError, match="rank-0 is read on by rank-0 in session a, which lives"):
        job.resume("b", "", 0, "rank-0")
    job.expire("a")
    job.resume("b", "", 0, "rank-0")
    assert job.book.status("d")["units_done"] == 0


def test_resume_is_for_new_sessions() -> None:
    job = checkpointed()
    job.open("a")
    job.open("b")
    job.turn("b", 1)
    with pytest.raises(ConflictError, match="session b has begun to read"):
        job.resume("b", "a", 0)
    reporting = Job()
    reporting.open("a")
    with pytest.raises(SettingsError, match="done at once"):
        reporting.resume("a", "b", 0)
    with pytest.raises(SettingsError, match="commits by reports"):
        reporting.mark("a", 1)


def test_expired_lease_ends_its_reader() -> None:
    """Its state may hold units of the lease, which are another's from now on."""
    job = checkpointed()
    job.open("a")
    leases = job.turn("a", 3).leases
    job.expire(leases=leases[:1])
    with pytest.raises(LeaseLostError, match="lease of a expired"):
        job.turn("a", 1)
    assert job.shards()["doing"] == 0
