"""Since when an agent has seen the records as they are."""

from __future__ import annotations

from dataclasses import replace

from edl.collective.agent.membership.membership_timer import MembershipTimer, is_join_deferred
from edl.collective.job_records import JobState, Member, Node, World

WORLD = World(3, JobState.RUNNING)


def test_quiet_since_a_node_came_or_went() -> None:
    """Quiet is the time since a node came or went."""
    timer = MembershipTimer(0.0)
    timer.record_membership(WORLD, ["a"], 1.0)
    timer.record_membership(WORLD, ["a"], 3.0)
    assert timer.quiet_s(4.0) == 3.0
    timer.record_membership(WORLD, ["a", "b"], 5.0)
    assert timer.quiet_s(5.5) == 0.5


def test_pausing_since_this_pause() -> None:
    """Pausing is the time since this pause was wanted."""
    timer = MembershipTimer(0.0)
    timer.record_membership(WORLD, [], 1.0)
    assert (timer.pausing, timer.pausing_s(9.0)) == (False, 0.0)
    timer.record_membership(World(3, JobState.RUNNING, pause_at=7), [], 2.0)
    timer.record_membership(World(3, JobState.RUNNING, pause_at=7), [], 3.0)
    assert (timer.pausing, timer.pausing_s(4.0)) == (True, 2.0)
    timer.record_membership(World(4, JobState.RUNNING, pause_at=7), [], 5.0)
    assert timer.pausing_s(5.0) == 0.0, "another generation's"


def test_a_pause_waits_for_who_is_busy() -> None:
    timer, pausing = MembershipTimer(0.0), World(3, JobState.RUNNING, pause_at=7)
    timer.record_membership(pausing, [], 2.0)
    timer.record_membership(pausing, [], 90.0, deferred=True)
    timer.record_membership(pausing, [], 91.0)
    assert timer.pausing_s(92.0) == 2.0


def test_who_joins_waits_for_who_is_busy() -> None:
    busy, idle = Node("a", "host", 1, 1, busy=3), Node("b", "host", 2, 1, busy=2)
    world = World(3, JobState.RUNNING, tuple(Member(name, "host", 1, 1, 0) for name in "ab"))
    assert is_join_deferred(world, {"a": busy, "b": idle})
    assert not is_join_deferred(world, {"b": idle}), "busy in another generation, or gone"
    assert not is_join_deferred(world, {"a": replace(busy, leaving=True), "b": idle}), "who leaves cannot wait"
    assert not is_join_deferred(world, {"c": busy, "b": idle}), "no member"
