"""Since when an agent has seen the records as they are, and when its workers may see that it lives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from edl.collective.agent.health.heartbeat import Heartbeat
from edl.collective.agent.membership.membership_timer import MembershipTimer, is_join_deferred
from edl.collective.job_records import Member, Node, State, World

WORLD = World(3, State.RUNNING)


def test_quiet_since_a_node_came_or_went() -> None:
    """Quiet is the time since a node came or went."""
    seen = MembershipTimer(0.0)
    seen.note(WORLD, ["a"], 1.0)
    seen.note(WORLD, ["a"], 3.0)
    assert seen.quiet_s(4.0) == 3.0
    seen.note(WORLD, ["a", "b"], 5.0)
    assert seen.quiet_s(5.5) == 0.5


def test_pausing_since_this_pause() -> None:
    """Pausing is the time since this pause was wanted."""
    seen = MembershipTimer(0.0)
    seen.note(WORLD, [], 1.0)
    assert (seen.pausing, seen.pausing_s(9.0)) == (False, 0.0)
    seen.note(World(3, State.RUNNING, pause_at=7), [], 2.0)
    seen.note(World(3, State.RUNNING, pause_at=7), [], 3.0)
    assert (seen.pausing, seen.pausing_s(4.0)) == (True, 2.0)
    seen.note(World(4, State.RUNNING, pause_at=7), [], 5.0)
    assert seen.pausing_s(5.0) == 0.0, "another generation's"


def test_a_pause_waits_for_who_is_busy() -> None:
    seen, pausing = MembershipTimer(0.0), World(3, State.RUNNING, pause_at=7)
    seen.note(pausing, [], 2.0)
    seen.note(pausing, [], 90.0, held=True)
    seen.note(pausing, [], 91.0)
    assert seen.pausing_s(92.0) == 2.0


def test_who_joins_waits_for_who_is_busy() -> None:
    busy, idle = Node("a", "host", 1, 1, busy=3), Node("b", "host", 2, 1, busy=2)
    world = World(3, State.RUNNING, tuple(Member(name, "host", 1, 1, 0) for name in "ab"))
    assert is_join_deferred(world, {"a": busy, "b": idle})
    assert not is_join_deferred(world, {"b": idle}), "busy in another generation, or gone"
    assert not is_join_deferred(world, {"a": replace(busy, leaving=True), "b": idle}), "who leaves cannot wait"
    assert not is_join_deferred(world, {"c": busy, "b": idle}), "no member"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sign_of_life_while_records_allow() -> None:
    """A sign of life is given as long as the records allow it."""
    beats: list[float] = []
    turns: list[float] = []
    heart = Heartbeat(5.0, lambda: beats.append(time.monotonic()), lambda: turns.append(time.monotonic()), lambda: None)
    try:
        wait_for(lambda: len(turns) >= 2)
        assert not beats, "nobody has looked yet"
        heart.allow(time.monotonic(), math.inf)
        wait_for(lambda: bool(beats))
        until = time.monotonic() + 0.3
        heart.allow(time.monotonic(), until)
        wait_for(lambda: turns[-1] > until + 0.5)
        told, later = len(beats), len(turns) + 2
        wait_for(lambda: len(turns) >= later)
        assert len(beats) == told
    finally:
        heart.close()
