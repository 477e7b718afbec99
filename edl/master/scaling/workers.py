"""How many workers a job can make use of: moved to n' where what is gained exceeds what the move costs.

With W left to do, n' workers need R = W / T(n') seconds, and the present n need R T(n) / T(n'). The move saves the
difference, and costs a pause of C seconds, so n' is better exactly where (T(n') / T(n) - 1) R > C. As W shrinks no
n' is better any more: nothing grows near its end.

From Pollux (Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021) come
two things, and only these. The first is the damping of its section 4.2, by which the speedup of a changed allocation is
multiplied::

    REALLOC_FACTOR = (age - moves C) / (age + C)

It takes the rate at which the job was moved so far to go on: a job that has moved often does not move again so soon.
Here it multiplies T(n'). The second is the exploration of section 4.1: a size that was not tried is taken for what the
fitted line says of it, and for perfect scaling where only one size is known, but only up to twice the most that was
tried. So unknown sizes are explored a step at a time, and the present size is measured before the next step.

Workers are given back where they do too little: below `min_efficiency` of what they would do alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from edl.master.scaling.throughput import ThroughputHistory, ThroughputModel, fit_throughput

__all__ = [
    "WorkerDecision",
    "WorkerObservation",
    "WorkerScalingSettings",
    "compute_realloc_factor",
    "decide_workers",
    "find_useful_limit",
]


@dataclass(frozen=True)
class WorkerScalingSettings:
    """What the decision about workers goes by.

    Attributes:
        min_samples: rates that must have been measured at the present size before the next move.
        horizon_s: for how long a job is taken to go on that does not say how much is left, in seconds; no gain is
            counted further ahead either, since by then other jobs will have come and gone.
        min_efficiency: T(n) / (n T(1)) below which a worker is of too little use: the lower end of the band in which
            AdaptDL's scheduler keeps a cluster (`_min_util` of `adaptdl_sched/policy/pollux.py`).
        efficiency_band: given back only below `min_efficiency` less this share of it, so that noise moves nothing.
        explore_factor: the next size that may be tried by the largest that was; at least one worker more.
    """

    min_samples: int = 3
    horizon_s: float = 3600.0
    min_efficiency: float = 0.35
    efficiency_band: float = 0.25
    explore_factor: float = 2.0


@dataclass(frozen=True)
class WorkerObservation:
    """What is known of a job when its number of workers is decided.

    Attributes:
        workers: n, how many it has now.
        min_workers: how few it may have.
        max_workers: how many it may have.
        history: its own rates.
        now_s: in seconds of the clock of `history`.
        remaining: W, what is left to do, in the unit of the rates; None if unknown.
        pause_s: C, the measured seconds without a step that a change of its size costs.
        age_s: for how long it has run, in seconds.
        moves: how often its size was changed.
    """

    workers: int
    min_workers: int
    max_workers: int
    history: ThroughputHistory = field(default_factory=ThroughputHistory)
    now_s: float = 0.0
    remaining: float | None = None
    pause_s: float = 30.0
    age_s: float = 0.0
    moves: int = 0


@dataclass(frozen=True)
class WorkerDecision:
    """How many workers a job should have, and why.

    Attributes:
        count: wanted workers.
        reason: in a line for a person.
        model: T(n) as fitted; None where nothing was measured.
    """

    count: int
    reason: str
    model: ThroughputModel | None = None


def compute_realloc_factor(age_s: float, moves: int, pause_s: float) -> float:
    """Return Pollux's REALLOC_FACTOR, from 0 to 1: what share of its time a job makes steps if it goes on moving so.

    Args:
        age_s: for how long the job has run, in seconds.
        moves: how often its size was changed.
        pause_s: what a move costs, in seconds.
    """
    if pause_s <= 0:
        return 1.0
    return max(0.0, age_s - moves * pause_s) / (age_s + pause_s)


def decide_workers(observation: WorkerObservation, settings: WorkerScalingSettings | None = None) -> WorkerDecision:
    """Return how many workers a job should have.

    Args:
        observation: what is known of the job.
        settings: what the decision goes by; None for the defaults.

    Raises:
        ValueError: `min_workers` is below 1 or above `max_workers`.
    """
    settings = settings or WorkerScalingSettings()
    now, low, high = observation.workers, observation.min_workers, observation.max_workers
    if not 1 <= low <= high:
        raise ValueError(f"a job has from 1 to any number of workers, not from {low} to {high}")
    model = fit_throughput(observation.history, observation.now_s)
    if not low <= now <= high:
        count = min(max(now, low), high)
        return WorkerDecision(count, f"{now} -> {count}: the job takes {low} to {high} workers", model)
    record = observation.history.sizes.get(now)
    known = observation.history.list_known_sizes(observation.now_s)
    if model is None or record is None or now not in known or record.samples < settings.min_samples:
        samples = record.samples if record is not None and now in known else 0
        return WorkerDecision(now, f"{now}: measured {samples} of {settings.min_samples} times at this size", model)
    efficient = _find_efficient_size(model, settings.min_efficiency) if len(known) > 1 else math.inf
    threshold = settings.min_efficiency * (1 - settings.efficiency_band)
    if len(known) > 1 and now > low and model.compute_efficiency(now) < threshold:
        least = max(low, min(known) - 1)  # below what was tried, the line says little
        return _give_back(observation, settings, model, max(least, min(now - 1, int(efficient))))
    return _grow(observation, settings, model, int(min(high, efficient, _find_reach(known, settings))))


def find_useful_limit(observation: WorkerObservation, settings: WorkerScalingSettings | None = None) -> int:
    """Return the most workers that a job may be given now: what is known to be of use, and a step of what is unknown.

    This is what `edl.master.scaling.arbitration` takes for the most that a job can use; what a move there costs, it
    weighs itself.

    Args:
        observation: what is known of the job; `workers` may be 0.
        settings: what the decision goes by; None for the defaults.
    """
    settings = settings or WorkerScalingSettings()
    low, now, high = observation.min_workers, observation.workers, observation.max_workers
    known = observation.history.list_known_sizes(observation.now_s)
    model = fit_throughput(observation.history, observation.now_s)
    if model is None:
        return min(high, max(now, low))
    record = observation.history.sizes.get(now)
    measured = record is not None and now in known and record.samples >= settings.min_samples
    limit = float(_find_reach(known, settings) if measured else max(known))
    if len(known) > 1:
        limit = min(limit, _find_efficient_size(model, settings.min_efficiency))
        if model.compute_efficiency(max(now, 1)) >= settings.min_efficiency * (1 - settings.efficiency_band):
            limit = max(limit, now)
    return min(high, max(low, 1, int(limit), 0 if measured else now))


def _find_reach(known: list[int], settings: WorkerScalingSettings) -> int:
    """Return the largest size that may be tried next."""
    return max(max(known) + 1, int(max(known) * settings.explore_factor))


def _grow(
    observation: WorkerObservation, settings: WorkerScalingSettings, model: ThroughputModel, reach: int
) -> WorkerDecision:
    """Return `reach`, the most workers that are of use, if the move there is worth its pause.

    T only grows with n, so that the farthest size that is of use is also the one that saves most.
    """
    now, pause_s = observation.workers, observation.pause_s
    if reach <= now:
        limit = f"{now} is the most it takes" if now >= observation.max_workers else "more would be of too little use"
        return WorkerDecision(now, f"{now}: {limit}", model)
    factor = compute_realloc_factor(observation.age_s, observation.moves, pause_s)
    ratio = factor * model.predict_rate(reach) / model.predict_rate(now)
    left_s = _remaining_s(observation, settings, model, reach)
    saved_s = (ratio - 1) * left_s
    text = f"T({reach})/T({now}) = {ratio:.3g}, damped by {factor:.3g}; {_describe_left(observation, left_s)}: "
    text += f"saves {max(0.0, saved_s):.0f} s"
    if saved_s > pause_s:
        return WorkerDecision(reach, f"{now} -> {reach}: {text} for a pause of {pause_s:.3g} s", model)
    return WorkerDecision(now, f"{now}: {text}, less than a pause of {pause_s:.3g} s", model)


def _give_back(
    observation: WorkerObservation, settings: WorkerScalingSettings, model: ThroughputModel, count: int
) -> WorkerDecision:
    """Return `count`, with which workers are of use again, unless the job is about to end."""
    now = observation.workers
    efficiency = f"a worker of {now} does {model.compute_efficiency(now):.0%} of what it would alone"
    if _remaining_s(observation, settings, model, now) <= observation.pause_s:
        return WorkerDecision(now, f"{now}: {efficiency}, but the job is about to end", model)
    return WorkerDecision(count, f"{now} -> {count}: {efficiency}, less than {settings.min_efficiency:.0%}", model)


def _remaining_s(
    observation: WorkerObservation, settings: WorkerScalingSettings, model: ThroughputModel, workers: int
) -> float:
    """Return R, the seconds that are left with so many workers, as far ahead as is looked."""
    if observation.remaining is None:
        return settings.horizon_s
    return min(settings.horizon_s, max(0.0, observation.remaining) / model.predict_rate(workers))


def _describe_left(observation: WorkerObservation, left_s: float) -> str:
    if observation.remaining is None:
        return f"what is left is not known, and taken for {left_s:.0f} s"
    return f"{left_s:.0f} s left"


def _find_efficient_size(model: ThroughputModel, least: float) -> float:
    """Return the largest n with T(n) / (n T(1)) of at least `least`: where a + b n reaches (a + b) / least."""
    if model.b == 0:
        return math.inf
    return max(
        1.0, ((model.a + model.b) / least - model.a) / model.b + 1e-9
    )  # 1e-9: rounding, where it is a whole number
