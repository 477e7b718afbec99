"""A service whose teachers follow what is wanted, as an operator would have it, and whose students ask all they can."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from edl.master.scaling.teacher_demand import TeacherObservation, TeacherScalingSettings
from edl.master.scaling.teachers import TeacherDecision, TeacherScalingState, decide_teachers


@dataclass
class SimulatedService:
    """Teachers and students, in simulated time.

    Attributes:
        demand: rows a second that students would ask.
        rate: rows a second that a teacher computes.
        live: teachers that are ready.
        state: of the decision.
        settings: of the decision.
        start_s: seconds that a teacher takes to start.
        noise: share by which every measure may be off.
        most_rows_per_s: what else bounds the rows, such as a network.
        tick_s: seconds between two decisions.
        moves: decisions that moved the number.
    """

    demand: float
    rate: float
    live: int
    state: TeacherScalingState = field(default_factory=TeacherScalingState)
    settings: TeacherScalingSettings = field(default_factory=TeacherScalingSettings)
    start_s: float = 20.0
    noise: float = 0.0
    most_rows_per_s: float = math.inf
    seed: int = 0
    tick_s: float = 5.0
    now_s: float = 0.0
    moves: list[tuple[float, TeacherDecision]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._starting: list[float] = []  # when they will be ready

    def run(self, seconds: float, each: Callable[[TeacherObservation], object] = lambda _: None) -> None:
        """Let time pass."""
        for _ in range(round(seconds / self.tick_s)):
            self.now_s += self.tick_s
            self.live += sum(ready_s <= self.now_s for ready_s in self._starting)
            self._starting = [ready_s for ready_s in self._starting if ready_s > self.now_s]
            observation = self.observe()
            each(observation)
            self.state, decision = decide_teachers(self.state, observation, self.settings)
            if decision.moved:
                self.moves.append((self.now_s, decision))
            self._follow(decision.count)

    def observe(self) -> TeacherObservation:
        served = min(self.demand, self.live * self.rate, self.most_rows_per_s)
        busy = served / self.demand if self.demand else 1.0
        return TeacherObservation(
            self.now_s,
            self.live,
            len(self._starting),
            self._noisy(self.demand),
            self._noisy(self.rate) if self.live else None,
            self._noisy(served),
            busy,
        )

    def _noisy(self, value: float) -> float:
        return value * (1 + self._random.uniform(-self.noise, self.noise))

    def _follow(self, wanted: int) -> None:
        while self.live + len(self._starting) < wanted:
            self._starting.append(self.now_s + self.start_s)
        del self._starting[max(0, wanted - self.live) :]
        self.live = min(self.live, wanted)
