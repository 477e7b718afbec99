"""Waits of a rendezvous: for a quorum, until the records are quiet, and for a pause; pure, without a clock."""

from __future__ import annotations

from dataclasses import replace

from edl.collective.agent.membership.membership_timer import MembershipTimer, is_join_deferred
from edl.collective.agent.membership.pause import pause_needs_s, pause_step
from edl.collective.agent.membership.quorum_wait import QuorumWait
from edl.collective.job_records import JobState, Member, Node, World
from edl.collective.worker_status import WorkerStatus, WorkerStatusPage


def status(step: int, *durations_s: float, generation: int = 3) -> WorkerStatus:
    return replace(WorkerStatusPage.from_env().read_status(), generation=generation, step=step, durations_s=durations_s)


def test_pause_is_after_a_step_all_can_hear() -> None:
    assert pause_step([status(7, 1.0), status(8, 1.0)], 3) == 10, "two steps ahead at least"
    assert pause_step([status(7, 0.01), status(8, 0.01)], 3) == 108, "1 s ahead where steps are short"
    assert pause_step([status(0)], 3) == 2, "no step was measured yet"
    assert pause_step([status(7, 1.0), status(-1)], 3) is None, "one reports no steps"
    assert pause_step([status(7, 1.0), status(7, 1.0, generation=2)], 3) is None, "one is not there yet"


def test_long_steps_have_long_to_pause() -> None:
    assert pause_needs_s([status(7, 2.0, 2.0, 40.0), status(7, 2.0)]) == 12.0
    assert pause_needs_s([status(-1)]) == 0.0


def test_time_left_is_reported_each_minute() -> None:
    """Every minute it is said how long is left."""
    wait = QuorumWait(2, 600.0)
    said = [words for second in range(190) if (words := wait.record_nodes(1, float(second)))]
    assert said[1:] == [f"still 1 of at least 2 nodes: waiting {left} s more" for left in (540, 480, 420)]


def test_beginning_nodes_are_no_wait() -> None:
    wait = QuorumWait(2, 600.0)
    assert wait.record_nodes(2, 0.0) == ""
    assert wait.record_nodes(1, 1.0), "one has gone again"
    assert wait.record_nodes(2, 2.0) == ""
    assert "up to 600 s" in wait.record_nodes(1, 3.0)
    assert wait.waited_s(4.0) == 1.0, "another wait"


WORLD = World(3, JobState.RUNNING)


def test_quiet_since_a_node_came_or_went() -> None:
    timer = MembershipTimer(0.0)
    timer.record_membership(WORLD, ["a"], 1.0)
    timer.record_membership(WORLD, ["a"], 3.0)
    assert timer.quiet_s(4.0) == 3.0
    timer.record_membership(WORLD, ["a", "b"], 5.0)
    assert timer.quiet_s(5.5) == 0.5


def test_pausing_since_this_pause() -> None:
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
