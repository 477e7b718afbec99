"""When workers may see that their agent lives, in simulated time."""

from __future__ import annotations

import math

import pytest

from edl.collective.agent.health.heartbeat import Heartbeat


class Simulation:
    """An agent's beats; its thread has ended, and turns are this class's to make."""

    def __init__(self) -> None:
        self.now_s, self.touch_s = 100.0, 0.0
        self.beats: list[float] = []
        self.touched = self.woken = 0
        self._heartbeat = Heartbeat(1.0, self.beats.append, self._touch, self._wake, clock=lambda: self.now_s)
        self._heartbeat.close()
        self.allow = self._heartbeat.allow_beats
        self.touched = 0

    def _touch(self) -> None:
        self.touched += 1
        self.now_s += self.touch_s

    def _wake(self) -> None:
        self.woken += 1

    def turn(self, after_s: float = 0.2) -> int:
        """Make a turn and return how many beats there were."""
        self.now_s += after_s
        self._heartbeat._turn()
        return len(self.beats)


def test_sign_of_life_while_records_allow() -> None:
    simulation = Simulation()
    assert simulation.turn() == 0, "nobody has looked yet"
    simulation.allow(100.1, 101.0)
    assert [simulation.turn() for _ in range(5)] == [1, 2, 3, 3, 3]
    assert (simulation.touched, simulation.woken) == (6, 0)
    simulation.allow(101.1, math.inf)
    assert simulation.turn() == 4


def test_stopped_agent_looks_before_it_beats() -> None:
    simulation = Simulation()
    simulation.allow(100.0, math.inf)
    assert simulation.turn(1.0) == 1, "late, and not stopped"
    assert simulation.turn(1.1) == 1
    assert (simulation.turn(), simulation.woken) == (1, 1)
    simulation.allow(102.0, math.inf)
    assert simulation.turn() == 1, "the records were asked for before the stop was over"
    simulation.allow(102.2, math.inf)
    assert simulation.turn() == 2


def test_stopped_turn_gives_an_old_sign() -> None:
    """Stopped in the middle of a turn, it gives no sign as if it had lived meanwhile."""
    simulation = Simulation()
    simulation.allow(100.0, math.inf)
    simulation.touch_s = 5.0
    simulation.turn()
    assert simulation.beats == [pytest.approx(100.2)]
