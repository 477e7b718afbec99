"""What a caller did with its shards last."""

from __future__ import annotations

from edl.master.client.lease_activity import IdleLeases, LeaseActivity


def test_each_lease_has_its_own_time() -> None:
    activity = LeaseActivity(10.0)
    for lease in (1, 2, 3, 4):
        activity.give(lease, 0.0)
    activity.touch(1, 1.0)
    activity.touch(2, 1.0)
    activity.touch(2, 9.0)
    activity.touch(3, 2.0)
    activity.remove(3)
    assert activity.idle(10.0) == IdleLeases([], [])
    assert activity.idle(11.5) == IdleLeases([1], [4])
    assert activity.idle(20.0) == IdleLeases([1, 2], [4])
    activity.clear()
    assert activity.idle(100.0) == IdleLeases([], [])


def test_what_was_not_given_is_not_kept() -> None:
    activity = LeaseActivity(10.0)
    activity.touch(1, 0.0)
    activity.remove(1)
    assert activity.idle(100.0) == IdleLeases([], [])


def test_quiet_leases_are_shown_once() -> None:
    activity = LeaseActivity(100.0)
    for lease in (1, 2, 3):
        activity.give(lease, 0.0)
    activity.touch(1, 0.0)
    activity.touch(2, 5.0)
    assert activity.newly_quiet(6.0, 5.0, {1, 2, 3}) == [1]
    assert activity.newly_quiet(11.0, 5.0, {1, 2, 3}) == [2]
    assert activity.newly_quiet(50.0, 5.0, {1, 2, 3}) == []
