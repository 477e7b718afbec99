"""How many teachers would do for the present load of a service, and the same in words.

With d the demand of all students and mu the rate of a teacher (`edl.load_reporting.rates`), the number that keeps
teachers at a utilization u is

    N* = ceil(sum d / (u mu))

which is DS2's rule (Kalavri et al., "Three steps is all you need: fast, accurate, automatic scaling decisions for
distributed streaming dataflows", OSDI 2018): true rates, measured by the time at work, give the number in a step,
without trying.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edl.errors import SettingsError
from edl.load_reporting import ServiceLoad

__all__ = [
    "TeacherObservation",
    "TeacherScalingSettings",
    "describe_load",
    "observe_teachers",
    "required_teachers",
]

_ROUNDING = 1e-9
"""Share by which a quotient may exceed a whole number through rounding, without asking for a teacher more."""


@dataclass(frozen=True)
class TeacherScalingSettings:
    """What the decision about teachers goes by. Durations in seconds.

    Attributes:
        utilization: u, the share of teachers' time in which they compute once there are N* of them.
        up_above: more teachers are wanted where the demand is above this share of what they can compute,
        up_s: for so long.
        down_below: fewer are wanted where it is below this share of what a teacher less can compute,
        down_s: for so long.
        least_busy_share: a student that does not wait for less than this share of its time has a demand that is noise:
        most_growth: the number of teachers grows by this factor at most then.
        least_gain: a step up is taken back that gains less than this share of the rows that it should gain.
        rates_s: over which rates are taken: so long they hold what was before a change. While they fall, the window
            of a move down begins anew.
        judge_s: a step is judged so long after its teachers are ready; longer than `rates_s`.
        least_expected: a step is judged only if it should gain this share of the demand: less is within noise.
        retry_s: a step that was taken back is tried again after so long, then after twice that, and so on,
        most_retry_s: and at least so often;
        changed_share: sooner, where demand or rate have changed by this share.
        gap_s: after so long without an observation all times are counted anew.
        least: teachers that are wanted in any case.
        most: teachers that are wanted at most; None for no limit.

    Raises:
        SettingsError: the shares leave no band between a move up and a move down, or a value cannot be.
    """

    utilization: float = 0.8
    up_above: float = 0.9
    up_s: float = 15.0
    down_below: float = 0.7
    down_s: float = 300.0
    least_busy_share: float = 0.05
    most_growth: float = 2.0
    least_gain: float = 0.2
    rates_s: float = 15.0
    judge_s: float = 30.0
    least_expected: float = 0.15
    retry_s: float = 60.0
    most_retry_s: float = 3600.0
    changed_share: float = 0.2
    gap_s: float = 30.0
    least: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.down_below < self.utilization < self.up_above <= 1:
            raise SettingsError(
                f"down_below={self.down_below!r}, utilization={self.utilization!r}, up_above={self.up_above!r}:"
                " expected to grow in this order, between 0 and 1; else a move up would be followed by a move down"
            )
        if self.least < 0 or (self.most is not None and self.most < max(self.least, 1)):
            raise SettingsError(f"least={self.least!r}, most={self.most!r}: expected 0 <= least <= most, and 1 <= most")
        if self.most_growth <= 1 or self.retry_s <= 0 or self.most_retry_s < self.retry_s:
            raise SettingsError(
                f"most_growth={self.most_growth!r}, retry_s={self.retry_s!r}, most_retry_s={self.most_retry_s!r}:"
                " expected a growth above 1, and retries after more than no time, the longest last"
            )


@dataclass(frozen=True)
class TeacherObservation:
    """What is known of a service when its number of teachers is decided.

    Attributes:
        now_s: in seconds of a monotonic clock.
        live: teachers that are ready.
        starting: teachers that will be.
        demand: sum of d, in rows a second.
        rate: mu, in rows a second; None if unknown.
        rows_per_s: rows that are computed, a second.
        least_busy_share: the smallest share of its time that a student does not wait; 1 without students.
        complete: whether the demand of all students is known; a student that waits and can ask for nothing has none.
    """

    now_s: float
    live: int
    starting: int
    demand: float
    rate: float | None
    rows_per_s: float
    least_busy_share: float = 1.0
    complete: bool = True


def observe_teachers(load: ServiceLoad, now_s: float) -> TeacherObservation:
    """Return a service's load as the decision takes it.

    Args:
        load: of the service.
        now_s: in seconds of a monotonic clock.
    """
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
    """Return N*, the number of teachers that would do now.

    Args:
        observation: what is known of the service.
        settings: what the decision goes by; None for the defaults. Its `least` and `most` play no part.

    Returns:
        N*, at most `most_growth` times the teachers that are ready where students wait nearly all the time; None if
        there is a demand, and no teacher's rate is known.
    """
    settings = settings or TeacherScalingSettings()
    if not observation.demand:
        return 0 if observation.complete else None
    if not observation.rate:
        return None
    needed = observation.demand / (settings.utilization * observation.rate)
    count = math.ceil(min(needed, 1e9) * (1 - _ROUNDING))
    if observation.least_busy_share < settings.least_busy_share:
        return min(count, max(observation.live + 1, math.floor(settings.most_growth * observation.live)))
    return count


def describe_load(load: ServiceLoad, settings: TeacherScalingSettings | None = None, *, live: int | None = None) -> str:
    """Return a service's load as a person would want it: "3 live; 2 students wait 31% of their time; 5 would do".

    Args:
        load: of the service.
        settings: what N* goes by; None for the defaults.
        live: teachers that are ready, where more is known of them than they publish; None for those that publish.
    """
    settings = settings or TeacherScalingSettings()
    parts = [f"{load.live if live is None else live} live" + (f", {load.starting} starting" if load.starting else "")]
    active, share = load.waiting, load.wait_share
    if active and share is not None:
        students = "1 student waits" if len(active) == 1 else f"{len(active)} students wait"
        parts.append(f"{students} {share:.0%} of {'its' if len(active) == 1 else 'their'} time")
    elif load.students:
        parts.append("1 student asks for nothing" if len(load.students) == 1 else "no student asks for anything")
    else:
        parts.append("no student publishes what it asks")
    observation = observe_teachers(load, 0.0)
    required = required_teachers(observation, settings)
    if required is None:
        why = "no teacher's rate is known yet" if observation.demand else "no student could ask for anything yet"
        parts.append(f"how many would do cannot be told: {why}")
    elif observation.demand and observation.least_busy_share < settings.least_busy_share:
        parts.append(f"{required} or more would do")
    elif observation.demand:
        parts.append(f"{required} would do")
    return "; ".join(parts)
