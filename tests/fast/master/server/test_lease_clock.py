"""When sessions end: silence, signs of life, and a process that stood still."""

from __future__ import annotations

from edl.master.server.lease_clock import PAUSE_S, TICK_S, LeaseClock, SessionLimits


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def advance(clock: Clock, leases: LeaseClock, seconds: float) -> tuple[list[str], list[str]]:
    """Look as often as the server does; return all that came due."""
    silent: list[str] = []
    over: list[str] = []
    for _ in range(round(seconds / TICK_S)):
        clock.now += TICK_S
        found = leases.due()
        silent += found[0]
        over += found[1]
        for session in found[1]:
            leases.forget(session)
    return silent, over


def test_a_silent_session_ends() -> None:
    clock = Clock()
    leases = LeaseClock(clock)
    leases.watch("a", SessionLimits(lease_s=2.0, session_s=5.0))
    assert advance(clock, leases, 2.0) == ([], [])
    assert advance(clock, leases, 1.0) == (["a"], [])
    assert advance(clock, leases, 1.5) == ([], [])
    assert advance(clock, leases, 1.0) == ([], ["a"])
    assert advance(clock, leases, 10.0) == ([], [])


def test_signs_of_life_keep_it() -> None:
    clock = Clock()
    leases = LeaseClock(clock)
    leases.watch("a", SessionLimits(lease_s=2.0, session_s=2.0))
    for _ in range(10):
        assert advance(clock, leases, 1.5) == ([], [])
        leases.hear("a")


def test_leases_end_again_later() -> None:
    clock = Clock()
    leases = LeaseClock(clock)
    leases.watch("a", SessionLimits(lease_s=2.0, session_s=100.0))
    assert advance(clock, leases, 10.0) == (["a"], [])
    leases.hear("a")
    assert advance(clock, leases, 10.0) == (["a"], [])


def test_a_stopped_process_expires_nothing() -> None:
    """What workers sent while the process stood still was not read."""
    clock = Clock()
    leases = LeaseClock(clock)
    leases.watch("a", SessionLimits(lease_s=PAUSE_S + 1, session_s=PAUSE_S + 1))
    clock.now += 3600
    assert leases.due() == ([], [])
    assert leases.silence_s("a") == PAUSE_S
