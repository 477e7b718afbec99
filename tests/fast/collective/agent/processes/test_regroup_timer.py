"""Workers that go on in the same process, and for how long they are waited for."""

from __future__ import annotations

from edl.collective.agent.processes.regroup_timer import RegroupTimer


def looked(timer: RegroupTimer, start: float, end: float) -> list[int]:
    """What is found at `end`, having looked every 0.1 s since `start`."""
    for tenth in range(1, round(10 * (end - start))):
        assert timer.find_late(start + tenth / 10) == []
    return timer.find_late(end)


def test_who_has_not_come_in_time_is_late() -> None:
    timer = RegroupTimer(2.0)
    timer.expect_ranks({0, 1}, 10.0)
    timer.record_arrival(0)
    assert timer.awaited_ranks == [1]
    assert looked(timer, 10.0, 12.1) == [1]
    timer.record_arrival(1)
    assert timer.find_late(12.2) == []


def test_waiting_for_a_core_does_not_count() -> None:
    """On a machine that is so busy that a worker gets a fifth of a core."""
    timer = RegroupTimer(2.0)
    timer.expect_ranks({0, 1}, 10.0)

    def queued(now: float) -> list[int]:
        return timer.find_late(now, lambda rank: 50.0 + 0.8 * (now - 10.0) if rank == 0 else 7.0)

    found = {tenth: queued(10.0 + tenth / 10) for tenth in range(1, 110)}
    assert next(tenth for tenth, late in found.items() if late == [1]) in (20, 21), "it had a core all the time"
    assert next(tenth for tenth, late in found.items() if 0 in late) in range(95, 106), "it ran for 2 s"
