"""When workers may see that their agent lives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from edl.collective.agent.health.heartbeat import Heartbeat


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sign_of_life_while_records_allow() -> None:
    """A sign of life is given as long as the records allow it."""
    beats: list[float] = []
    turns: list[float] = []
    heartbeat = Heartbeat(600.0, beats.append, lambda: turns.append(time.monotonic()), lambda: None)
    try:
        wait_for(lambda: len(turns) >= 2)
        assert not beats, "nobody has looked yet"
        heartbeat.allow_beats(time.monotonic(), math.inf)
        wait_for(lambda: bool(beats))
        until = time.monotonic() + 0.3
        heartbeat.allow_beats(time.monotonic(), until)
        wait_for(lambda: turns[-1] > until + 0.5)
        ended = len(turns)
        wait_for(lambda: len(turns) > ended)  # the turn before may have begun before `until`, and beat late
        given, later = len(beats), len(turns) + 2
        wait_for(lambda: len(turns) >= later)
        assert len(beats) == given
    finally:
        heartbeat.close()


def test_stopped_turn_gives_an_old_sign() -> None:
    """Stopped in the middle of a turn, for longer than it may, it gives no sign as if it had lived meanwhile."""
    beats: list[tuple[float, float]] = []
    slow: list[float] = []

    def touch() -> None:
        if beats and not slow:
            slow.append(time.monotonic())
            time.sleep(1.0)

    heartbeat = Heartbeat(0.5, lambda at: beats.append((at, time.monotonic())), touch, lambda: None)
    try:
        heartbeat.allow_beats(math.inf, math.inf)
        wait_for(lambda: any(given > slow[0] for _, given in beats) if slow else False)
    finally:
        heartbeat.close()
    first = next(at for at, given in beats if given > slow[0])
    assert first <= slow[0], "it is of the moment before the stop"
