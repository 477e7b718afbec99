"""When another number of teachers is wanted: a band in which nothing moves, and steps that are judged.

Between the loads at which the number moves up or down lies a band in which nothing moves, and a move down waits for the
largest N* (`edl.master.scaling.teacher_demand`) of a long window: the tolerance and the stabilization window of
Kubernetes' HorizontalPodAutoscaler.

The number wanted is moved rather than the number there: a teacher that is wanted and has not come yet counts, as one
that starts does, so that no teacher is asked for twice.

From any state, constant d and mu lead to three moves at most: a step that is taken back, a step up or down, and none
after it. Where students wait nearly all the time, d is little more than noise over next to nothing, and the number is
doubled at most until they do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edl.master.scaling.teacher_demand import TeacherObservation, TeacherScalingSettings, required_teachers

__all__ = ["ScalingStep", "StepPenalty", "TeacherDecision", "TeacherScalingState", "decide_teachers"]

_ROUNDING = 1e-9
"""By which a change may exceed a share through rounding, without being above it."""
_RECENT_SHARE = 1 / 3
"""Of the time that a demand has to be high: the largest N* of this last part is what is moved to. A single look may be
low by noise, which another step would follow; and the first looks may be high by what a student asks ahead."""
_NO_TIMES: Mapping[str, Any] = {
    "high_since_s": None,
    "high_recent": (),
    "low_began_s": None,
    "low_since_s": None,
    "low_most": 0,
}
"""Fields of a state in which no time is counted."""


@dataclass(frozen=True)
class ScalingStep:
    """A step up that is not judged yet.

    Attributes:
        before: teachers that were wanted before.
        count: teachers that are wanted since.
        rows_per_s: rows that were computed before, a second.
        ready_since_s: when all of its teachers were ready; None while they are not.
    """

    before: int
    count: int
    rows_per_s: float
    ready_since_s: float | None = None


@dataclass(frozen=True)
class StepPenalty:
    """A step up that gained too little and was taken back.

    Attributes:
        until_s: no step up is made before.
        failures: how many steps in a row were taken back.
        demand: sum of d then.
        rate: mu then.
    """

    until_s: float
    failures: int
    demand: float
    rate: float


@dataclass(frozen=True)
class TeacherScalingState:
    """What a decision remembers for the next.

    Attributes:
        wanted: teachers that are wanted; None before the first decision.
        at_s: when the decision was made.
        high_since_s: since when the demand is above the band; None if it is not.
        high_recent: when and what N* was lately, while it is.
        low_began_s: since when the demand is below the band; None if it is not.
        low_since_s: since when, and after the rates had stopped to fall.
        low_most: the largest N* since then.
        step: the step up that is not judged yet.
        penalty: of the steps that were taken back.
    """

    wanted: int | None = None
    at_s: float | None = None
    high_since_s: float | None = None
    high_recent: tuple[tuple[float, int], ...] = ()
    low_began_s: float | None = None
    low_since_s: float | None = None
    low_most: int = 0
    step: ScalingStep | None = None
    penalty: StepPenalty | None = None


@dataclass(frozen=True)
class TeacherDecision:
    """How many teachers a service should have, and why.

    Attributes:
        count: wanted teachers.
        before: teachers that were wanted before; the same where nothing is moved.
        reason: in a line for a person.
    """

    count: int
    before: int
    reason: str

    @property
    def moved(self) -> bool:
        """Whether another number is wanted than before."""
        return self.count != self.before


def decide_teachers(
    state: TeacherScalingState, observation: TeacherObservation, settings: TeacherScalingSettings | None = None
) -> tuple[TeacherScalingState, TeacherDecision]:
    """Decide how many teachers a service should have. To be called every few seconds.

    Args:
        state: as the decision before returned it; `TeacherScalingState()` at first.
        observation: what is known of the service.
        settings: what the decision goes by; None for the defaults.

    Returns:
        The state for the next decision, and this decision.
    """
    settings = settings or TeacherScalingSettings()
    state = _follow_clock(state, observation, settings)
    before = state.wanted
    if before is None:
        before = _clamped(observation.live + observation.starting, settings)
        state = replace(state, wanted=before)
    required = required_teachers(observation, settings)
    if required is None:
        return _decide_blindly(state, observation, before)
    rate = observation.rate or 0.0  # without a demand the rate plays no part
    state = _lift_penalty(state, observation, rate, settings)
    state, failed = _judge(state, observation, rate, settings)
    if failed:
        assert state.wanted is not None
        return state, TeacherDecision(state.wanted, before, failed)
    required = _clamped(required, settings)
    state = _watch_band(state, observation, rate, before, required, settings)
    if _is_over(state.high_since_s, observation, settings.up_s) and _recent_most(state) > before:
        return _step_up(state, observation, rate, before, settings)
    if _is_over(state.low_since_s, observation, settings.down_s) and state.low_most < before:
        return _step_down(state, observation, before, settings)
    return state, TeacherDecision(before, before, _describe_rest(state, observation, rate, before, settings))


def _follow_clock(
    state: TeacherScalingState, observation: TeacherObservation, settings: TeacherScalingSettings
) -> TeacherScalingState:
    """Count times anew where nothing was observed for long: what the load was meanwhile is not known."""
    now_s = observation.now_s
    if state.at_s is not None and 0 <= now_s - state.at_s <= settings.gap_s:
        return replace(state, at_s=now_s)
    step = state.step and replace(state.step, ready_since_s=None)
    return replace(state, at_s=now_s, **_NO_TIMES, step=step)


def _decide_blindly(
    state: TeacherScalingState, observation: TeacherObservation, before: int
) -> tuple[TeacherScalingState, TeacherDecision]:
    """Decide without a demand or a rate: a first teacher is the only way to learn more."""
    state = replace(state, **_NO_TIMES)
    if not before:
        return replace(state, wanted=1), TeacherDecision(1, 0, "students wait, and there is no teacher")
    unknown = "students wait, and can ask for nothing" if not observation.demand else "no teacher's rate is known yet"
    return state, TeacherDecision(before, before, unknown)


def _lift_penalty(
    state: TeacherScalingState, observation: TeacherObservation, rate: float, settings: TeacherScalingSettings
) -> TeacherScalingState:
    """Forget steps that were taken back under another demand or rate."""
    penalty = state.penalty
    if penalty is None:
        return state
    share = settings.changed_share * (1 + _ROUNDING)
    changed = abs(observation.demand - penalty.demand) > share * penalty.demand
    if changed or abs(rate - penalty.rate) > share * penalty.rate:
        return replace(state, penalty=None)
    return state


def _judge(
    state: TeacherScalingState, observation: TeacherObservation, rate: float, settings: TeacherScalingSettings
) -> tuple[TeacherScalingState, str]:
    """Take back a step up whose teachers are ready for a while and gained too little; return why, in words."""
    step = state.step
    if step is None:
        return state, ""
    if observation.live < step.count:
        return replace(state, step=replace(step, ready_since_s=None)), ""
    if step.ready_since_s is None:
        return replace(state, step=replace(step, ready_since_s=observation.now_s)), ""
    if observation.now_s - step.ready_since_s < settings.judge_s:
        return state, ""
    expected = min(observation.demand, step.count * rate) - step.rows_per_s
    gained = observation.rows_per_s - step.rows_per_s
    state = replace(state, step=None)
    if expected < settings.least_expected * observation.demand or not expected:
        return state, ""
    if gained >= settings.least_gain * expected:
        return replace(state, penalty=None), ""
    failures = state.penalty.failures + 1 if state.penalty is not None else 1
    wait_s = min(settings.retry_s * 2.0 ** min(failures - 1, 60), settings.most_retry_s)
    penalty = StepPenalty(observation.now_s + wait_s, failures, observation.demand, rate)
    state = replace(state, wanted=step.before, penalty=penalty, **_NO_TIMES)
    return state, (
        f"{step.count} teachers instead of {step.before} gained {_rows(max(gained, 0.0))} of {_rows(expected)} rows/s"
        f" that they should: taken back, and tried again in {wait_s:,.0f} s"
    )


def _watch_band(
    state: TeacherScalingState,
    observation: TeacherObservation,
    rate: float,
    wanted: int,
    required: int,
    settings: TeacherScalingSettings,
) -> TeacherScalingState:
    """Note since when the demand lies above or below the band."""
    now_s, demand = observation.now_s, observation.demand
    high = demand > settings.up_above * wanted * rate
    if high:
        since_s = state.high_since_s if state.high_since_s is not None else now_s
        recent = [(at_s, count) for at_s, count in state.high_recent if now_s - at_s <= settings.up_s * _RECENT_SHARE]
        state = replace(state, high_since_s=since_s, high_recent=(*recent, (now_s, required)))
    else:
        state = replace(state, high_since_s=None, high_recent=())
    idle = not demand and wanted > 0
    if not observation.complete or not (idle or demand < settings.down_below * (wanted - 1) * rate):
        return replace(state, low_began_s=None, low_since_s=None, low_most=0)
    began_s, low_s = state.low_began_s, state.low_since_s
    if began_s is None or low_s is None or (now_s - low_s >= settings.down_s and state.low_most >= wanted):
        return replace(state, low_began_s=now_s, low_since_s=now_s, low_most=required)
    if required < state.low_most and now_s - began_s <= settings.rates_s:
        return replace(state, low_since_s=now_s, low_most=required)
    return replace(state, low_most=max(state.low_most, required))


def _recent_most(state: TeacherScalingState) -> int:
    return max((count for _, count in state.high_recent), default=0)


def _is_over(since_s: float | None, observation: TeacherObservation, seconds: float) -> bool:
    return since_s is not None and observation.now_s - since_s >= seconds


def _step_up(
    state: TeacherScalingState,
    observation: TeacherObservation,
    rate: float,
    before: int,
    settings: TeacherScalingSettings,
) -> tuple[TeacherScalingState, TeacherDecision]:
    count, penalty = _recent_most(state), state.penalty
    if penalty is not None and observation.now_s < penalty.until_s:
        left_s = penalty.until_s - observation.now_s
        reason = f"{count} would do, but more teachers gained too little: tried again in {left_s:,.0f} s"
        return state, TeacherDecision(before, before, reason)
    if state.step is not None and state.step.count == before:  # not judged yet: both steps are judged together
        step = replace(state.step, count=count, ready_since_s=None)
    else:
        step = ScalingStep(before, count, observation.rows_per_s)
    state = replace(state, wanted=count, step=step, **_NO_TIMES)
    if observation.least_busy_share < settings.least_busy_share:
        reason = (
            f"students wait {1 - observation.least_busy_share:.0%} of their time, so that their demand cannot be told:"
            f" at most {settings.most_growth:g} times the teachers that are ready"
        )
    else:
        reason = (
            f"students would ask for {_rows(observation.demand)} rows/s, and a teacher computes {_rows(rate)}:"
            f" {count} would be at work for {observation.demand / (count * rate):.0%} of the time"
        )
    return state, TeacherDecision(count, before, reason)


def _step_down(
    state: TeacherScalingState, observation: TeacherObservation, before: int, settings: TeacherScalingSettings
) -> tuple[TeacherScalingState, TeacherDecision]:
    count = state.low_most
    state = replace(state, wanted=count, step=None, penalty=None, **_NO_TIMES)
    asked = f"would ask for {_rows(observation.demand)} rows/s" if observation.demand else "ask for nothing"
    reason = f"students {asked}; for {settings.down_s:,.0f} s no more than {count} would have done"
    return state, TeacherDecision(count, before, reason)


def _describe_rest(
    state: TeacherScalingState,
    observation: TeacherObservation,
    rate: float,
    wanted: int,
    settings: TeacherScalingSettings,
) -> str:
    """Return why nothing is moved."""
    if not observation.demand and not rate:
        return "students ask for nothing"
    share = observation.demand / (wanted * rate) if wanted and rate else math.inf
    load = f"the demand is {share:.0%} of what {wanted} compute" if share < math.inf else "no teacher is wanted"
    if state.high_since_s is not None:
        most = f", and {settings.most} are the most" if settings.most is not None and wanted >= settings.most else ""
        return f"{load}, for {observation.now_s - state.high_since_s:,.0f} of {settings.up_s:,.0f} s{most}"
    if state.low_since_s is not None and state.low_most < wanted:
        left = f"{observation.now_s - state.low_since_s:,.0f} of {settings.down_s:,.0f} s"
        return f"{load}: {state.low_most} would have done, for {left}"
    return load


def _rows(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 or not number else f"{number:.2g}"


def _clamped(count: int, settings: TeacherScalingSettings) -> int:
    count = max(count, settings.least)
    return count if settings.most is None else min(count, settings.most)
