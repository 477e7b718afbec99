"""How many workers a job can use: it moves to n' if the gain exceeds the cost of the move.

**Throughput.** A step of n workers takes a + b n seconds for n samples, one per worker: `a` is the time of a worker
alone, `b` the time that each worker adds to all (synchronization). So T(n) = n / (a + b n), and n / T is linear in n:
weighted least squares on the job's own measurements has a closed-form solution. `a` and `b` are at least 0. If b = 0,
throughput grows in proportion to n; if a = 0, it does not grow at all. In between, T is concave, and
`edl.master.scaling.arbitration` relies on that.

**The decision.** With remaining work W, n' workers need R = W / T(n') seconds, and the present n need R T(n') / T(n).
The move saves the difference, and costs a pause of C seconds, so n' is better if and only if (T(n') / T(n) - 1) R > C.
As W shrinks, no n' is better: no job grows near its end. Workers are given back if their efficiency is clearly
below `MIN_EFFICIENCY` of a single worker's.

From Pollux (Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021) come
exactly two things. The first is the damping factor of its section 4.2 for the speedup of a changed allocation::

    REALLOC_FACTOR = (age - moves C) / (age + C)

This factor assumes that the job will keep moving as often as it has so far. Here it multiplies T(n'). The second is the
exploration of section 4.1: an untried size is predicted by the fitted line, or by perfect scaling if only one size is
known, but only up to twice the largest tried size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeVar

K = TypeVar("K", bound=Hashable)

_FORGOTTEN: Final = 1e-3
"""A size is forgotten once its weight falls below this, which takes ten half-lives after a single sample. If it were
kept longer, a rate from another epoch, data set or machine would still affect the line when only two sizes are
known."""
_HALF_LIFE_S: Final = 3600.0  # after which a sample's weight has halved
MIN_SAMPLES: Final = 3  # rates to measure at the present size before the next move
_HORIZON_S: Final = 3600.0
"""The remaining time assumed if a job reports none, and the upper limit for any reported time: by then the mix of jobs
will have changed."""
MIN_EFFICIENCY: Final = 0.35
"""The value of T(n) / (n T(1)) below which a worker is not worth its place: the lower end of the range in which
AdaptDL's scheduler keeps a cluster (`_min_util` of `adaptdl_sched/policy/pollux.py`)."""
GIVE_BACK_BELOW: Final = 0.75 * MIN_EFFICIENCY  # noise moves no worker
EXPLORE_FACTOR: Final = 2  # next size to try, relative to the largest tried one
_WINDOW_S: Final = 600.0  # over which the rate of done work is taken: enough for shards that take minutes


@dataclass(frozen=True)
class ThroughputModel:
    """T(n) = n / (a + b n), with `a` and `b` in seconds per sample, at least 0 and not both 0."""

    a: float
    b: float

    def predict_rate(self, workers: float) -> float:
        """Return T(n), in samples per second, of n > 0 workers."""
        return workers / (self.a + self.b * workers)

    def compute_efficiency(self, workers: float) -> float:
        """Return T(n) / (n T(1)), which is 1 if a worker does as much beside n - 1 other workers as alone."""
        return (self.a + self.b) / (self.a + self.b * workers)


@dataclass(frozen=True)
class SizeRecord:
    """A job's runs with one number of workers."""

    mean: float  # weighted mean of n / T, in seconds per sample and worker
    weight: float  # sum of its samples' weights, as of `at_s`
    samples: int  # consecutive, since the job has this size
    at_s: float  # time of the last one


@dataclass(frozen=True)
class ThroughputHistory:
    """A job's rates by its number of workers."""

    sizes: Mapping[int, SizeRecord] = field(default_factory=lambda: MappingProxyType({}))

    def record_rate(self, workers: int, rate: float, now_s: float) -> ThroughputHistory:
        """Return the history with one more sample: `rate` is what the whole job does per second, without its pauses.

        Rates that say nothing about T (0 or not finite) are ignored.
        """
        if workers < 1 or not (0 < rate < math.inf) or not math.isfinite(now_s):
            return self
        mean = workers / rate
        if not 0 < mean < math.inf:
            return self
        latest_s = max([now_s, *(record.at_s for record in self.sizes.values())])
        sizes = {
            size: record if size == workers else SizeRecord(record.mean, record.weight, 0, record.at_s)
            for size, record in self.sizes.items()
            if self.weigh(record, latest_s) >= _FORGOTTEN or size == workers
        }
        before = sizes.get(workers)
        old = self.weigh(before, latest_s) if before else 0.0
        # In this form the mean of two numbers lies between them despite rounding; a quotient of sums may not.
        merged = mean if before is None else before.mean + (mean - before.mean) / (old + 1.0)
        sizes[workers] = SizeRecord(merged, old + 1.0, (before.samples if before else 0) + 1, latest_s)
        return ThroughputHistory(MappingProxyType(sizes))

    def weigh(self, record: SizeRecord, now_s: float) -> float:
        """Return the current weight of a size's samples."""
        return float(record.weight * 0.5 ** (max(0.0, now_s - record.at_s) / _HALF_LIFE_S))

    def list_known_sizes(self, now_s: float) -> list[int]:
        """Return the numbers of workers that are not forgotten, ascending."""
        return sorted(size for size, record in self.sizes.items() if self.weigh(record, now_s) >= _FORGOTTEN)


def fit_throughput(history: ThroughputHistory, now_s: float) -> ThroughputModel | None:
    """Fit a and b by weighted least squares on n / T = a + b n, with a and b at least 0; None without any sample.

    If a job ran with one size only, b is 0: the most optimistic line through that size, like Pollux's prior for untried
    sizes (OSDI 2021, section 4.1, "Prior-driven exploration").
    """
    sizes = history.list_known_sizes(now_s)
    if not sizes:
        return None
    records = {size: history.sizes[size] for size in sizes}
    weights = {size: history.weigh(record, now_s) for size, record in records.items()}
    total = math.fsum(weights.values())
    center = math.fsum(weights[size] * size for size in sizes) / total
    level = math.fsum(weights[size] * records[size].mean for size in sizes) / total
    spread = math.fsum(weights[size] * (size - center) ** 2 for size in sizes)
    slope = math.fsum(weights[size] * (size - center) * (records[size].mean - level) for size in sizes)
    b = slope / spread if len(sizes) > 1 else 0.0
    a = level - b * center
    if b <= 0:  # on the boundary, the best fit is the best line without b
        return ThroughputModel(level, 0.0)
    if a <= 0:
        squares = math.fsum(weights[size] * size**2 for size in sizes)
        return ThroughputModel(0.0, math.fsum(weights[size] * size * records[size].mean for size in sizes) / squares)
    return ThroughputModel(a, b)


class UnitRates:
    """Growth of totals per second, by key, over the last `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._looks: dict[Hashable, deque[tuple[float, float]]] = {}

    def look(self, totals: Mapping[K, float], now_s: float) -> dict[K, float]:
        """Note totals; return by how much each grows per second. Totals that are not passed again are forgotten."""
        self._looks = {key: self._looks.get(key, deque()) for key in totals}
        rates: dict[K, float] = {}
        for key, total in totals.items():
            looks = self._looks[key]
            if looks and total < looks[-1][1]:
                looks.clear()  # it was reset
            looks.append((now_s, total))
            while len(looks) > 2 and looks[1][0] <= now_s - self._window_s:
                looks.popleft()
            (begun_s, before), (at_s, after) = looks[0], looks[-1]
            rates[key] = (after - before) / (at_s - begun_s) if at_s > begun_s else 0.0
        return rates


class WorkLeft:
    """Tracks how much of a job's data is done; estimates when all will be done if the job keeps its present size."""

    def __init__(self) -> None:
        self._growth = UnitRates(_WINDOW_S)
        self._rates: dict[str, float] = {}

    def resize(self) -> None:
        """Restart rates after a change of the job's size; the last rate is used until a new rate is known."""
        self._growth = UnitRates(_WINDOW_S)

    def look(self, datasets: Sequence[Mapping[str, Any]], now_s: float) -> float | None:
        """Record the progress; return the seconds until all data is done; None if a set is endless or has no rate."""
        unfinished = {str(dataset.get("name")): dataset for dataset in datasets if dataset.get("finished") is not True}
        done = {name: read_number(dataset.get("units_done")) for name, dataset in unfinished.items()}
        rates = self._growth.look(done, now_s)
        times = [self._estimate(name, dataset, done[name], rates[name]) for name, dataset in unfinished.items()]
        known = [time_s for time_s in times if time_s is not None]
        return max(known, default=0.0) if datasets and len(known) == len(times) else None

    def _estimate(self, name: str, dataset: Mapping[str, Any], done: float, rate: float) -> float | None:
        rate = rate or read_number(dataset.get("units_per_s")) or self._rates.get(name, 0.0)
        units, epochs = dataset.get("units"), read_number(dataset.get("epochs"))
        if units is None or not epochs:
            return None  # it grows, or is read without end
        left = max(0.0, read_number(units) * epochs - done)
        if not left:
            return 0.0
        if not rate:
            return None
        self._rates[name] = rate
        return left / rate


def read_number(value: object) -> float:
    """Return a number from a report, which anyone may have written to the Store; 0 if the value is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    return float(value) if 0 <= value <= 1e18 else 0.0


@dataclass(frozen=True)
class WorkerObservation:
    """A job's state for the decision about its workers. Durations are in seconds."""

    workers: int  # n, its present number
    min_workers: int
    max_workers: int
    history: ThroughputHistory = field(default_factory=ThroughputHistory)
    now_s: float = 0.0  # on the clock of `history`
    remaining: float | None = None  # W, the remaining work, in the unit of the rates; None if unknown
    pause_s: float = 30.0  # C, the measured time without a step for a change of its size
    age_s: float = 0.0
    moves: int = 0  # how often its size was changed


@dataclass(frozen=True)
class WorkerDecision:
    """How many workers a job should have, the reason in one line, and the fitted T(n) if anything was measured."""

    count: int
    reason: str
    model: ThroughputModel | None = None


def compute_realloc_factor(age_s: float, moves: int, pause_s: float) -> float:
    """Return Pollux's REALLOC_FACTOR, 0 to 1: the share of time spent on steps if the job keeps moving at this rate."""
    if pause_s <= 0:
        return 1.0
    return max(0.0, age_s - moves * pause_s) / (age_s + pause_s)


def decide_workers(observation: WorkerObservation) -> WorkerDecision:
    """Return how many workers a job should have."""
    now, low, high = observation.workers, observation.min_workers, observation.max_workers
    model = fit_throughput(observation.history, observation.now_s)
    if not low <= now <= high:
        count = min(max(now, low), high)
        return WorkerDecision(count, f"{now} -> {count}: the job takes {low} to {high} workers", model)
    record = observation.history.sizes.get(now)
    known = observation.history.list_known_sizes(observation.now_s)
    if model is None or record is None or now not in known or record.samples < MIN_SAMPLES:
        samples = record.samples if record is not None and now in known else 0
        return WorkerDecision(now, f"{now}: measured {samples} of {MIN_SAMPLES} times at this size", model)
    efficient = _find_efficient_size(model) if len(known) > 1 else math.inf
    if len(known) > 1 and now > low and model.compute_efficiency(now) < GIVE_BACK_BELOW:
        least = max(low, min(known) - 1)  # below tried sizes, the line says little
        return _give_back(observation, model, max(least, min(now - 1, int(efficient))))
    return _grow(observation, model, int(min(high, efficient, EXPLORE_FACTOR * max(known))))


def _grow(observation: WorkerObservation, model: ThroughputModel, reach: int) -> WorkerDecision:
    """Choose `reach`, the largest useful and so the best size, if it is worth the pause; else the present size."""
    now, pause_s = observation.workers, observation.pause_s
    if reach <= now:
        limit = f"{now} is the maximum" if now >= observation.max_workers else "more workers would help too little"
        return WorkerDecision(now, f"{now}: {limit}", model)
    factor = compute_realloc_factor(observation.age_s, observation.moves, pause_s)
    ratio = factor * model.predict_rate(reach) / model.predict_rate(now)
    left_s = _remaining_s(observation, model, reach)
    saved_s = (ratio - 1) * left_s
    left = f"{left_s:.0f} s left"
    if observation.remaining is None:
        left = f"the remaining time is unknown, assumed to be {left_s:.0f} s"
    text = f"T({reach})/T({now}) = {ratio:.3g}, damped by {factor:.3g}; {left}: saves {max(0.0, saved_s):.0f} s"
    if saved_s > pause_s:
        return WorkerDecision(reach, f"{now} -> {reach}: {text} for a pause of {pause_s:.3g} s", model)
    return WorkerDecision(now, f"{now}: {text}, less than a pause of {pause_s:.3g} s", model)


def _give_back(observation: WorkerObservation, model: ThroughputModel, count: int) -> WorkerDecision:
    """Return `count`, the size at which workers are efficient enough again, unless the job is about to end."""
    now = observation.workers
    efficiency = f"each of {now} workers does {model.compute_efficiency(now):.0%} of what a single worker would do"
    if _remaining_s(observation, model, now) <= observation.pause_s:
        return WorkerDecision(now, f"{now}: {efficiency}, but the job is about to end", model)
    return WorkerDecision(count, f"{now} -> {count}: {efficiency}, less than {MIN_EFFICIENCY:.0%}", model)


def _remaining_s(observation: WorkerObservation, model: ThroughputModel, workers: int) -> float:
    """Return R, the seconds left with this many workers, at most the horizon."""
    if observation.remaining is None:
        return _HORIZON_S
    return min(_HORIZON_S, max(0.0, observation.remaining) / model.predict_rate(workers))


def _find_efficient_size(model: ThroughputModel) -> float:
    """Return the largest n that is efficient enough: where a + b n reaches (a + b) / MIN_EFFICIENCY."""
    if model.b == 0:
        return math.inf
    rounding = 1e-9  # in case it is a whole number
    return max(1.0, ((model.a + model.b) / MIN_EFFICIENCY - model.a) / model.b + rounding)
