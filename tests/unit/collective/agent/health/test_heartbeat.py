"""When workers may see that their agent lives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from edl.collective.agent.health.heartbeat import Heartbeat


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sign_of_life_while_records_allow() -> None:
    """A sign of life is given as long as the records allow it."""
    beats: list[float] = []
    turns: list[float] = []
    heartbeat = Heartbeat(
        5.0, lambda: beats.append(time.monotonic()), lambda: turns.append(time.monotonic()), lambda: None
    )
    try:
        wait_for(lambda: len(turns) >= 2)
        assert not beats, "nobody has looked yet"
        heartbeat.allow_beats(time.monotonic(), math.inf)
        wait_for(lambda: bool(beats))
        until = time.monotonic() + 0.3
        heartbeat.allow_beats(time.monotonic(), until)
        wait_for(lambda: turns[-1] > until + 0.5)
        given, later = len(beats), len(turns) + 2
        wait_for(lambda: len(turns) >= later)
        assert len(beats) == given
    finally:
        heartbeat.close()
