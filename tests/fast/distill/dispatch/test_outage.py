"""How long work waits for a teacher, in simulated time."""

from __future__ import annotations

from edl.distill.dispatch.outage import Outage, OutageStatus

TIMEOUT_S, REQUEST_S = 60.0, 20.0


def test_outage_is_said_recalled_and_ended() -> None:
    """A time without teachers is said, recalled and ended."""
    outage = Outage(TIMEOUT_S, REQUEST_S)
    outage.start_work(100.0)
    assert outage.check(100.0, 0) == OutageStatus(False, 110.0, ": waiting up to 60 s")
    assert outage.check(105.0, 0) == OutageStatus(False, 110.0)
    assert outage.check(110.5, 0) == OutageStatus(False, 120.5, " since 10 s")
    assert outage.check(155.0, 0) == OutageStatus(False, 160.0, " since 55 s")
    assert outage.check(160.0, 0).expired


def test_a_teacher_that_comes_ends_it() -> None:
    outage = Outage(TIMEOUT_S, REQUEST_S)
    outage.start_work(0.0)
    outage.check(0.0, 0)
    outage.record_answer(50.0)
    assert outage.check(50.0, 1) == OutageStatus(False, 55.0)
    assert outage.check(70.0, 0) == OutageStatus(False, 80.0, ": waiting up to 60 s")


def test_mute_teachers_are_awaited_briefly() -> None:
    """Teachers that are there and never answer are waited for no longer than a request more."""
    outage = Outage(TIMEOUT_S, REQUEST_S)
    outage.start_work(0.0)
    assert [outage.check(now, 2).expired for now in (0.0, 79.9, 80.0)] == [False, False, True]
    outage.start_work(0.0)
    assert [outage.check(now, live).expired for now, live in ((79.0, 1), (79.5, 0), (80.0, 0))] == [False, False, True]


def test_unusual_silence_is_said_once() -> None:
    """A silence is said once, and only when it is longer than usual."""
    outage = Outage(TIMEOUT_S, REQUEST_S)
    outage.start_work(0.0)
    assert outage.check(0.0, 1) == OutageStatus(False, 5.0)
    assert outage.check(5.0, 1) == OutageStatus(False, 80.0, silent_s=5.0)
    assert outage.check(6.0, 1) == OutageStatus(False, 80.0)
    outage.record_answer(10.0)
    assert outage.check(16.0, 1) == OutageStatus(False, 30.0), "an answer takes ten seconds here"
    assert outage.check(30.0, 1) == OutageStatus(False, 90.0, silent_s=20.0)
    outage.record_answer(31.0)
    outage.finish_work()
    outage.start_work(500.0)
    assert outage.check(500.0, 1) == OutageStatus(False, 542.0), "a time without work is no silence"


def test_later_work_waits_in_full() -> None:
    """Work that comes after a time without waits in full."""
    outage = Outage(TIMEOUT_S, REQUEST_S)
    outage.start_work(0.0)
    outage.check(0.0, 0)
    outage.finish_work()
    outage.start_work(1000.0)
    assert outage.check(1000.0, 0) == OutageStatus(False, 1010.0, ": waiting up to 60 s")
