"""How many teachers are wanted: few moves, then none; and no teacher more than the formula says."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.errors import SettingsError
from edl.master.scaling.advisor import INTERVAL_S
from edl.master.scaling.teachers import (
    ScalingStep,
    StepPenalty,
    TeacherDecision,
    TeacherObservation,
    TeacherScalingSettings,
    TeacherScalingState,
    decide_teachers,
    required_teachers,
)


@dataclass
class SimulatedService:
    """Teachers and students, in simulated time; rates are in rows a second, and every measure may be off by `noise`."""

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
        for _ in range(round(seconds / self.tick_s)):
            self.now_s += self.tick_s
            self.live += sum(ready_s <= self.now_s for ready_s in self._starting)
            self._starting = [ready_s for ready_s in self._starting if ready_s > self.now_s]
            observation = self.observe()
            each(observation)
            self.state, decision = decide_teachers(self.state, observation, self.settings)
            if decision.count != decision.before:
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


SETTLED_S = 2400.0
"""The longest of all waits twice: 900 s of a penalty, 300 s of a window, and what starts and is judged."""


def states(most: int) -> st.SearchStrategy[TeacherScalingState]:
    """Any state that some history may have left, at time 0."""
    past = st.none() | st.floats(-600, 0)
    step = st.builds(
        ScalingStep, st.integers(1, most), st.integers(1, most), st.floats(0, 1e4), st.none() | st.floats(-60, 0)
    )
    looks = st.builds(
        TeacherObservation,
        st.floats(-600, 0),
        st.integers(1, most),
        st.just(0),
        st.floats(0.1, 1e4),
        st.floats(0.5, 500.0),
        st.just(0.0),
    )
    penalty = st.builds(StepPenalty, st.floats(-600, 900), st.integers(1, 8), st.floats(0.1, 1e4), st.floats(0.1, 1e3))
    return st.builds(
        TeacherScalingState,
        wanted=st.none() | st.integers(1, most),
        at_s=past,
        high_since_s=past,
        high_recent=st.lists(looks, max_size=3).map(tuple),
        low_began_s=past,
        low_since_s=past,
        low_most=st.integers(1, most),
        step=st.none() | step,
        penalty=st.none() | penalty,
    )


@st.composite
def services(draw: st.DrawFn) -> SimulatedService:
    live = draw(st.integers(1, 40))
    state = draw(states(40))
    if state.step is not None:  # a step leads to what is wanted now
        count = state.wanted if state.wanted is not None else live
        state = replace(state, step=replace(state.step, before=draw(st.integers(1, count)), count=count))
    # Where students do not wait nearly all the time, whatever the state makes of the number at first.
    demand = draw(st.floats(0.01, 15.0)) * min(live, state.wanted or live, state.step.before if state.step else live)
    rate = draw(st.floats(0.5, 500.0))
    return SimulatedService(demand * rate, rate, live, state, start_s=draw(st.floats(0, 60)))


@settings(max_examples=10)
@given(services(), st.integers(0, 2**32))
def test_three_moves_with_noise(service: SimulatedService, seed: int) -> None:
    """Of 5% in the demand, in the rate and in the rows, looked at as often as the advisor does."""
    noisy = replace(service, noise=0.05, seed=seed, tick_s=INTERVAL_S)
    noisy.run(2 * SETTLED_S)
    # Three in all, whenever they are: of a demand at the very edge of the band, noise makes the first move late.
    # The doublings of one step count as one move.
    decisions = [decision for _, decision in noisy.moves]
    doublings = sum("a step goes to" in one.reason and two.count > one.count for one, two in pairwise(decisions))
    assert len(decisions) - doublings <= 3, decisions


@settings(max_examples=30)
@given(st.integers(1, 3), st.floats(1.0, 3000.0))
def test_steps_double_it_at_most(live: int, ratio: float) -> None:
    """The number doubles until the formula's is within reach, and is never above it."""
    service = SimulatedService(ratio * live * 10.0, 10.0, live)
    service.run(1000.0)
    *doublings, (_, last) = service.moves
    for _, decision in doublings:
        assert decision.count == 2 * decision.before
    assert last.before < last.count <= 2 * last.before
    assert service.demand / 9.0 <= service.live <= math.ceil(service.demand / 8.0)


@pytest.mark.parametrize(
    ("busy", "load"),
    [
        (0.05, "students would ask for 8,080 rows/s, and a teacher computes 404: 25 would do"),
        (0.04, "students wait up to 96% of their time, so the demand cannot be measured"),
    ],
)
def test_reason_has_the_figures_of_the_step(busy: float, load: str) -> None:
    """A student that waited until it had its last rows: the figures of its end do not explain the step."""
    state = TeacherScalingState(wanted=1)
    look = TeacherObservation(0.0, 1, 0, 404 / busy, 404.0, 404.0, busy)
    for now_s in range(0, 15, 3):
        state, decision = decide_teachers(state, replace(look, now_s=float(now_s)))
        assert decision.count == 1
    _, decision = decide_teachers(state, replace(look, now_s=15.0, demand=383.0, least_busy_share=0.55))
    assert decision.count == 2
    assert decision.reason == f"{load}; with 1 ready, a step goes to 2 at most"


def test_rest_says_what_the_next_step_awaits() -> None:
    service = SimulatedService(demand=1000.0, rate=100.0, live=1, start_s=100.0)
    reasons: list[str] = []
    for seconds in (10, 50):
        service.run(seconds)
        reasons.append(decide_teachers(service.state, service.observe())[1].reason)
    assert reasons == [
        "the demand is 1000% of what the wanted teachers (1) can compute, for 5 s; after 15 s, more will be wanted",
        "the demand is 500% of what the wanted teachers (2) can compute, for 35 s; more will be wanted when these are "
        "ready",
    ]


def test_windows_of_15_s_and_300_s() -> None:
    service = SimulatedService(demand=200.0, rate=100.0, live=2, start_s=0.0)
    service.run(60)
    ((up_s, up),) = service.moves
    assert (up_s, up.before, up.count) == (20.0, 2, 3), "15 s after the first look, at 5 s"
    assert up.reason == (
        "students would ask for 200 rows/s, and a teacher computes 100: 3 would be busy for 67% of the time"
    )
    service.demand = 20.0
    service.run(400)
    _, (down_s, down) = service.moves
    assert (down_s, down.before, down.count) == (365.0, 3, 1)
    assert "for 300 s, 1 would have been enough" in down.reason


def test_useless_step_is_taken_back() -> None:
    """A network bounds the rows: more teachers gain nothing, and are tried again at doubling intervals."""
    service = SimulatedService(1000.0, 100.0, 3, most_rows_per_s=280.0, start_s=10.0)
    service.run(3000)
    counts = [decision.count for _, decision in service.moves]
    assert counts == ([6, 12, 3] * len(counts))[: len(counts)]
    backs = [at for at, decision in service.moves if decision.count == 3]
    gaps = [later - earlier for earlier, later in pairwise(backs)]
    assert all(later > 1.4 * earlier for earlier, later in pairwise(gaps)), gaps
    assert len(backs) >= 4
    (_, back) = next(move for move in service.moves if move[1].count == 3)
    assert back.reason == (
        "12 teachers instead of 3 gained 0 of the 720 rows/s expected: undone, and tried again in 60 s"
    )


def test_gap_counts_times_anew() -> None:
    """What the load was while the Store was away is not known."""
    service = SimulatedService(demand=20.0, rate=100.0, live=5)
    service.run(200)
    service.now_s += 400.0
    service.run(200)
    assert service.moves == []
    service.run(150)
    assert [decision.count for _, decision in service.moves] == [1]


@pytest.mark.parametrize(("demand", "complete", "count"), [(0.0, False, 1), (50.0, True, 1), (0.0, True, 0)])
def test_first_teacher_is_asked_for(demand: float, complete: bool, count: int) -> None:
    none = TeacherScalingSettings(least=0)
    observation = TeacherObservation(0.0, 0, 0, demand, None, 0.0, 0.0 if demand or not complete else 1.0, complete)
    assert decide_teachers(TeacherScalingState(), observation, none)[1].count == count


@pytest.mark.parametrize("rate", [None, 100.0])
def test_what_is_not_known_moves_nothing(rate: float | None) -> None:
    """The rate of a Triton without statistics; what students ask for whose teachers hang, which is not nothing."""
    state, rows = TeacherScalingState(), 500.0 if rate is None else 0.0
    seen = TeacherObservation(0.0, 3, 0, rows, rate, rows, rows / 500, complete=rate is None)
    for tick in range(100):
        state, decision = decide_teachers(state, replace(seen, now_s=5.0 * tick))
        assert decision.count == 3
        assert rate is not None or decision.reason == "no teacher's rate is known yet"


def test_most_and_least_are_kept() -> None:
    service = SimulatedService(1000.0, 100.0, 3, settings=TeacherScalingSettings(least=2, most=6))
    service.run(100)
    assert service.live == 6
    service.demand = 1.0
    service.run(400)
    assert service.live == 2


@pytest.mark.parametrize("wrong", [{"least": -1}, {"least": 4, "most": 3}])
def test_bounds_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        TeacherScalingSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("demand", "rate", "live", "busy", "required"),
    [
        (400.0, 100.0, 3, 0.69, 5),
        (240.0, 100.0, 3, 1.0, 3),
        (240.1, 100.0, 3, 1.0, 4),
        (9000.0, 100.0, 3, 0.04, 6),
        (9000.0, 100.0, 0, 0.04, 1),
        (0.0, None, 3, 1.0, 0),
        (1.0, None, 3, 1.0, None),
    ],
)
def test_required_is_the_formula(
    demand: float, rate: float | None, live: int, busy: float, required: int | None
) -> None:
    assert required_teachers(TeacherObservation(0.0, live, 0, demand, rate, 0.0, busy)) == required


def test_changed_demand_lifts_the_penalty() -> None:
    service = SimulatedService(1000.0, 100.0, 3, most_rows_per_s=280.0, start_s=0.0)
    service.run(1000)
    assert service.state.penalty.until_s > service.now_s + 30 or service.state.step is None
    service.most_rows_per_s = math.inf
    service.state = replace(service.state, penalty=StepPenalty(service.now_s + 3600, 6, 1000.0, 100.0))
    service.live, service.state = 3, replace(service.state, wanted=3, step=None)
    before = len(service.moves)
    service.demand = 1190.0
    service.run(100)
    assert len(service.moves) == before, "by less than a fifth"
    service.demand = 1210.0
    service.run(100)
    assert service.live == 16
