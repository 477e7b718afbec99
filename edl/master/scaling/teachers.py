"""How many teachers a service should have: the number that its load requires, and when the wanted number changes.

With d the demand of a student and mu the rate of a teacher (`edl.load_reporting`), the number that keeps teachers at a
utilization u is

    N* = ceil(sum d / (u mu))

This is the rule of DS2 (Kalavri et al., "Three steps is all you need: fast, accurate, automatic scaling decisions for
distributed streaming dataflows", OSDI 2018). True rates, which are measured over busy time, give the number in one
step, without a search. Unlike in DS2, a step goes to at most twice the number of ready teachers: a student that starts,
ends or reads ahead may seem to ask for many times the rows that it needs, until it is measured again.

Between the loads at which the number moves up or down is a band in which it does not move. A move down goes only to the
largest N* in a long window. The band and the window correspond to the tolerance and the stabilization window of
Kubernetes' HorizontalPodAutoscaler. A wanted teacher counts before it exists, so no teacher is requested twice. A step
up is judged once its teachers are ready, and undone if it gained too little.

From any state, constant d and mu lead to three moves at most: a step (with all the doublings that it needs), its
reversal, and a step up or down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edl.errors import SettingsError
from edl.load_reporting import ServiceLoad

_ROUNDING = 1e-9  # share by which a quotient or a change may exceed a limit through rounding alone
_RECENT_SHARE = 1 / 3
"""Demand must be high for some time before the number grows. The largest N* in this last share of that time becomes the
new number. A single reading may be too low because of noise, and would then make another step necessary. The first
readings may be too high because students prefetch."""
_NO_TIMES: Mapping[str, Any] = {
    "high_since_s": None,
    "high_recent": (),
    "low_began_s": None,
    "low_since_s": None,
    "low_most": 0,
}


@dataclass(frozen=True)
class TeacherScalingSettings:
    """Settings of the decision about teachers, with durations in seconds; SettingsError if the bounds are invalid."""

    utilization: float = 0.8  # u, the share of time that N* teachers spend computing
    up_above: float = 0.9  # scale up if demand is above this share of their capacity
    up_s: float = 15.0  # for at least this long
    down_below: float = 0.7  # scale down if it is below this share of the capacity of one teacher less
    down_s: float = 300.0  # for at least this long
    most_growth: float = 2.0  # a step up goes to at most this many times the number of ready teachers
    least_busy_share: float = 0.05  # the demand of a student that is busy for a smaller share of its time is noise
    least_gain: float = 0.2  # a step up that gains less than this share of the expected rows is undone
    rates_s: float = 15.0
    """Window over which rates are measured: for this long after a change, the rates still include the time before the
    change. While the rates fall in that time, the window for a move down restarts."""
    judge_s: float = 30.0  # from the readiness of a step's teachers until it is judged; longer than `rates_s`
    least_expected: float = 0.15  # a step is judged if its expected gain is this share of the demand: less is noise
    retry_s: float = 60.0  # an undone step is retried after this time, then after twice that, ...,
    most_retry_s: float = 3600.0  # and at least this often;
    changed_share: float = 0.2  # sooner, if demand or rate have changed by this share
    gap_s: float = 30.0  # after this long without an observation all timers restart
    least: int = 0  # minimum number of teachers
    most: int | None = None  # maximum number of teachers; None for no limit

    def __post_init__(self) -> None:
        if self.least < 0 or (self.most is not None and self.most < max(self.least, 1)):
            raise SettingsError(f"least={self.least!r}, most={self.most!r}: expected 0 <= least <= most, and 1 <= most")

    def clamp(self, count: int) -> int:
        """Return the number of teachers nearest to `count` that the bounds allow."""
        count = max(count, self.least)
        return count if self.most is None else min(count, self.most)

    def limit_growth(self, count: int, live: int) -> int:
        """Return `count`, or the largest number of teachers that a step from `live` ready teachers may lead to."""
        return min(count, max(live + 1, math.floor(self.most_growth * live)))


@dataclass(frozen=True)
class TeacherObservation:
    """A service's state for the decision about its teachers. Rates are in rows per second."""

    now_s: float  # on a monotonic clock
    live: int  # teachers that are ready
    starting: int  # teachers that are starting
    demand: float  # sum of d
    rate: float | None  # mu
    rows_per_s: float  # rows that teachers compute
    least_busy_share: float = 1.0  # the smallest share of its time in which a student does not wait
    complete: bool = True  # every student's demand is known: one that waits and cannot request anything has none


def observe_teachers(load: ServiceLoad, now_s: float) -> TeacherObservation:
    """Return a service's load as input for the decision."""
    computed = sum(teacher.rows_per_s or 0.0 for teacher in load.teachers)
    return TeacherObservation(
        now_s=now_s,
        live=load.live,
        starting=load.starting,
        demand=load.demand,
        rate=load.rate,
        rows_per_s=max(load.rows_per_s, computed),
        least_busy_share=load.least_busy_share,
        complete=all(student.demand is not None for student in load.students),
    )


def required_teachers(observation: TeacherObservation, settings: TeacherScalingSettings | None = None) -> int | None:
    """Return N*, the number of teachers that would suffice now, ignoring the bounds; None if no rate is known.

    If a student waits nearly all the time, N* is at most `most_growth` times the number of ready teachers, or one more.
    """
    settings = settings or TeacherScalingSettings()
    if not observation.demand:
        return 0 if observation.complete else None
    if not observation.rate:
        return None
    needed = observation.demand / (settings.utilization * observation.rate)
    count = math.ceil(min(needed, 1e9) * (1 - _ROUNDING))
    if observation.least_busy_share < settings.least_busy_share:
        return settings.limit_growth(count, observation.live)
    return count


@dataclass(frozen=True)
class ScalingStep:
    """A step up that has not been judged yet."""

    before: int
    count: int
    rows_per_s: float  # computed before the step
    ready_since_s: float | None = None  # None while not all of its teachers are ready


@dataclass(frozen=True)
class StepPenalty:
    """A step up that gained too little and was undone, with the demand and the rate at that time."""

    until_s: float  # no step up before this time
    failures: int  # consecutive undone steps
    demand: float
    rate: float


@dataclass(frozen=True)
class TeacherScalingState:
    """The state from one decision to the next."""

    wanted: int | None = None
    at_s: float | None = None  # time of the last decision
    high_since_s: float | None = None  # since when demand is above the band
    high_recent: tuple[TeacherObservation, ...] = ()  # the last few seconds, while demand is high
    low_began_s: float | None = None  # since when demand is below the band
    low_since_s: float | None = None  # the same, counted from when the rates stopped falling
    low_most: int = 0  # the largest N* since then
    step: ScalingStep | None = None
    penalty: StepPenalty | None = None


@dataclass(frozen=True)
class TeacherDecision:
    """How many teachers are wanted, how many were wanted before, and the reason in one line."""

    count: int
    before: int
    reason: str


def decide_teachers(
    state: TeacherScalingState, observation: TeacherObservation, settings: TeacherScalingSettings | None = None
) -> tuple[TeacherScalingState, TeacherDecision]:
    """Decide how many teachers a service should have. Call this every few seconds, with the last returned state."""
    decider = _Decider(state, observation, settings or TeacherScalingSettings())
    count, reason = decider.decide()
    return replace(decider.state, wanted=count), TeacherDecision(count, decider.before, reason)


class _Decider:
    """Computes one decision: `state` becomes the input of the next decision."""

    def __init__(
        self, state: TeacherScalingState, observation: TeacherObservation, settings: TeacherScalingSettings
    ) -> None:
        self.state = state
        self.before = settings.clamp(observation.live + observation.starting) if state.wanted is None else state.wanted
        self._seen = observation
        self._settings = settings
        self._rate = observation.rate or 0.0  # without demand the rate does not matter

    def decide(self) -> tuple[int, str]:
        self._follow_clock()
        required = required_teachers(self._seen, self._settings)
        if required is None:
            return self._decide_blindly()
        self._lift_penalty()
        if reason := self._take_step_back():
            return self.state.wanted or 0, reason
        self._watch_band(self._settings.clamp(required))
        if self._lasts(self.state.high_since_s, self._settings.up_s):
            most = max(self.state.high_recent, key=self._require)
            count = self._settings.clamp(self._settings.limit_growth(self._require(most), self._seen.live))
            if count > self.before:
                return self._step_up(count, most)
        if self._lasts(self.state.low_since_s, self._settings.down_s) and self.state.low_most < self.before:
            return self._step_down()
        return self.before, self._describe_rest()

    def _change(self, **fields: Any) -> None:
        self.state = replace(self.state, **fields)

    def _follow_clock(self) -> None:
        """Restart all timers after a gap without observations, in which the load is unknown."""
        at_s, now_s, step = self.state.at_s, self._seen.now_s, self.state.step
        if at_s is not None and 0 <= now_s - at_s <= self._settings.gap_s:
            self._change(at_s=now_s)
        else:
            self._change(at_s=now_s, **_NO_TIMES, step=step and replace(step, ready_since_s=None))

    def _decide_blindly(self) -> tuple[int, str]:
        """Decide without known demand or rate: only a first teacher can provide them."""
        self._change(**_NO_TIMES)
        if not self.before:
            return 1, "students wait without a teacher"
        if not self._seen.demand:
            return self.before, "students wait, and cannot request anything"
        return self.before, "no teacher's rate is known yet"

    def _lift_penalty(self) -> None:
        """Forget steps that were undone at a different demand or rate."""
        penalty, share = self.state.penalty, self._settings.changed_share * (1 + _ROUNDING)
        if penalty is not None and (
            abs(self._seen.demand - penalty.demand) > share * penalty.demand
            or abs(self._rate - penalty.rate) > share * penalty.rate
        ):
            self._change(penalty=None)

    def _take_step_back(self) -> str:
        """Undo a step up whose teachers have been ready for a while and gained too little; return why."""
        step, seen, settings = self.state.step, self._seen, self._settings
        if step is None:
            return ""
        if seen.live < step.count:
            self._change(step=replace(step, ready_since_s=None))
            return ""
        if step.ready_since_s is None:
            self._change(step=replace(step, ready_since_s=seen.now_s))
            return ""
        if seen.now_s - step.ready_since_s < settings.judge_s:
            return ""
        expected = min(seen.demand, step.count * self._rate) - step.rows_per_s
        gained = seen.rows_per_s - step.rows_per_s
        self._change(step=None)
        if expected < settings.least_expected * seen.demand or not expected:
            return ""
        if gained >= settings.least_gain * expected:
            self._change(penalty=None)
            return ""
        failures = self.state.penalty.failures + 1 if self.state.penalty is not None else 1
        wait_s = min(settings.retry_s * 2.0 ** min(failures - 1, 60), settings.most_retry_s)
        penalty = StepPenalty(seen.now_s + wait_s, failures, seen.demand, self._rate)
        self._change(wanted=step.before, penalty=penalty, **_NO_TIMES)
        return (
            f"{step.count} teachers instead of {step.before} gained {_rows(max(gained, 0.0))} of the {_rows(expected)} "
            f"rows/s expected: undone, and tried again in {wait_s:,.0f} s"
        )

    def _watch_band(self, required: int) -> None:
        now_s, demand, settings = self._seen.now_s, self._seen.demand, self._settings
        since_s: float | None = None
        recent: tuple[TeacherObservation, ...] = ()
        if demand > settings.up_above * self.before * self._rate:
            since_s = self.state.high_since_s if self.state.high_since_s is not None else now_s
            young_s = settings.up_s * _RECENT_SHARE
            recent = (*(look for look in self.state.high_recent if now_s - look.now_s <= young_s), self._seen)
        self._change(high_since_s=since_s, high_recent=recent)
        idle = not demand and self.before > 0
        if not self._seen.complete or not (idle or demand < settings.down_below * (self.before - 1) * self._rate):
            self._change(low_began_s=None, low_since_s=None, low_most=0)
            return
        began_s, low_s, most = self.state.low_began_s, self.state.low_since_s, self.state.low_most
        if began_s is None or low_s is None or (now_s - low_s >= settings.down_s and most >= self.before):
            self._change(low_began_s=now_s, low_since_s=now_s, low_most=required)
        elif required < most and now_s - began_s <= settings.rates_s:
            self._change(low_since_s=now_s, low_most=required)
        else:
            self._change(low_most=max(most, required))

    def _require(self, observation: TeacherObservation) -> int:
        return required_teachers(observation, self._settings) or 0

    def _lasts(self, since_s: float | None, seconds: float) -> bool:
        return since_s is not None and self._seen.now_s - since_s >= seconds

    def _step_up(self, count: int, most: TeacherObservation) -> tuple[int, str]:
        """Take a step to `count`, which the observation `most` led to."""
        step, seen, settings = self.state.step, self._seen, self._settings
        if self.state.penalty is not None and seen.now_s < self.state.penalty.until_s:
            left_s = self.state.penalty.until_s - seen.now_s
            return self.before, f"more teachers gained too little: {count} will be tried again in {left_s:,.0f} s"
        if step is not None and step.count == self.before:  # not judged yet: judge both steps together
            step = replace(step, count=count, ready_since_s=None)
        else:
            step = ScalingStep(self.before, count, seen.rows_per_s)
        self._change(step=step, **_NO_TIMES)
        required, rate = self._require(most), most.rate or 0.0
        if most.least_busy_share < settings.least_busy_share:
            load = (
                f"students wait up to {1 - most.least_busy_share:.0%} of their time, so the demand cannot be measured"
            )
        else:
            load = f"students would ask for {_rows(most.demand)} rows/s, and a teacher computes {_rows(rate)}"
            if count >= required:
                return count, f"{load}: {count} would be busy for {most.demand / (count * rate):.0%} of the time"
            load += f": {required} would do"
        if count == settings.most:
            return count, f"{load}; {count} is the maximum"
        return count, f"{load}; with {seen.live} ready, a step goes to {count} at most"

    def _step_down(self) -> tuple[int, str]:
        count, demand = self.state.low_most, self._seen.demand
        self._change(step=None, penalty=None, **_NO_TIMES)
        asked = f"would ask for {_rows(demand)} rows/s" if demand else "ask for nothing"
        return count, f"students {asked}; for {self._settings.down_s:,.0f} s, {count} would have been enough"

    def _describe_rest(self) -> str:
        now_s, demand, state, settings = self._seen.now_s, self._seen.demand, self.state, self._settings
        wanted = self.before
        if not demand and not self._rate:
            return "students ask for nothing"
        share = demand / (wanted * self._rate) if wanted and self._rate else math.inf
        if self._seen.least_busy_share < settings.least_busy_share:
            load = f"students wait up to {1 - self._seen.least_busy_share:.0%} of their time"
        elif share < math.inf:
            load = f"the demand is {share:.0%} of what the wanted teachers ({wanted}) can compute"
        else:
            load = "no teacher is wanted"
        if state.high_since_s is not None:
            load += f", for {now_s - state.high_since_s:,.0f} s"
            if settings.most is not None and wanted >= settings.most:
                return f"{load}; {settings.most} is the maximum"
            if not self._lasts(state.high_since_s, settings.up_s):
                return f"{load}; after {settings.up_s:,.0f} s, more will be wanted"
            return f"{load}; more will be wanted when these are ready"
        if state.low_since_s is not None and state.low_most < wanted:
            left = f"{now_s - state.low_since_s:,.0f} of {settings.down_s:,.0f} s"
            return f"{load}: {state.low_most} would have been enough, for {left}"
        return load


def _rows(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 or not number else f"{number:.2g}"
