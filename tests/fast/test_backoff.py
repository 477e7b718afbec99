"""Waits between attempts."""

from __future__ import annotations

from edl.backoff import Backoff


def test_waits_double_up_to_the_last() -> None:
    backoff = Backoff(0.25, 1.5)
    assert [backoff.next_wait_s() for _ in range(5)] == [0.25, 0.5, 1.0, 1.5, 1.5]
    assert backoff.failures == 5


def test_reset_begins_anew() -> None:
    backoff = Backoff(1.0, 60.0)
    backoff.next_wait_s()
    backoff.next_wait_s()
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.next_wait_s() == 1.0


def test_jitter_shortens_waits_by_its_share() -> None:
    waits = [Backoff(2.0, 2.0, jitter=0.5).next_wait_s() for _ in range(200)]
    assert all(1.0 <= wait_s <= 2.0 for wait_s in waits)
    assert len(set(waits)) > 100, "processes that failed together come back together"


def test_endless_failures_do_not_overflow() -> None:
    backoff = Backoff(0.1, 2.0)
    backoff.failures = 5000
    assert backoff.next_wait_s() == 2.0
