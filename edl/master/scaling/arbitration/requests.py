"""What jobs ask of a cluster, and what a worker more or less is worth to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from edl.master.scaling.throughput import ThroughputModel
from edl.master.scaling.workers import compute_realloc_factor

__all__ = ["ArbitrationSettings", "JobRequest", "JobValue"]

_NO_WORKERS: Final = 0.5
"""A job without workers counts as if it had so many, since the logarithm of nothing is not finite: its first worker is
worth what a second is worth in a job that scales perfectly. With less, jobs whose minimum is 0 would take their first
worker before any other job may grow."""


_LINEAR: Final = ThroughputModel(1.0, 0.0)


@dataclass(frozen=True)
class ArbitrationSettings:
    """What arbitration among jobs goes by.

    Attributes:
        horizon_s: no gain is counted further ahead, in seconds, since by then other jobs have come and gone; also for
            how long a job is taken to go on that does not say how much is left.
        patience_s: after so many seconds of waiting, no job that comes after it is started before it. Its share is
            not idle meanwhile: it is lent to jobs that can give it back. None for never.
    """

    horizon_s: float = 1800.0
    patience_s: float | None = 3600.0


@dataclass(frozen=True)
class JobRequest:
    """A job, and what it can use.

    Attributes:
        name: of the job, unlike all others.
        min_workers: with fewer it does not run; 0 for teachers and the like that only borrow.
        max_workers: it cannot use more (now: `edl.master.scaling.workers` says how many).
        gpus: of a worker, all on one node.
        priority: pending minima are served from the highest, surplus is reclaimed from the lowest.
        submitted_s: when it came, in seconds: older jobs first, among those of one priority.
        weight: what its speedup counts, by others'.
        model: its throughput by the number of workers.
        remaining: what is left to do, in the unit of `model`'s rates; None if unknown.
        pause_s: the seconds that a change of its size costs.
        age_s: for how long it has run, in seconds.
        moves: how often its size was changed.
        waited_s: for how long it has waited for its minimum, in seconds.
    """

    name: str
    min_workers: int
    max_workers: int
    gpus: int = 1
    priority: int = 0
    submitted_s: float = 0.0
    weight: float = 1.0
    model: ThroughputModel = _LINEAR
    remaining: float | None = None
    pause_s: float = 30.0
    age_s: float = math.inf
    moves: int = 0
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_workers <= self.max_workers or self.gpus < 1:
            raise ValueError(f"{self.name}: {self.min_workers} to {self.max_workers} workers of {self.gpus} GPUs")
        if not (self.weight > 0 and self.pause_s >= 0 and math.isfinite(self.weight + self.submitted_s)):
            raise ValueError(f"{self.name}: weight {self.weight}, pause {self.pause_s} s, came at {self.submitted_s} s")


class JobValue:
    """What numbers of workers are worth to a job: weight x log T(n), less what a move costs.

    With W left to do, n workers need W / T(n) seconds, and after a move W / T(n') + C. The logarithm of the quotient of
    the two is the job's speedup by the move, pause and all::

        log T(n') - log T(n) - log(1 + C / R),  R = W / T(n')

    so that a gain above 0 is the rule of `edl.master.scaling.workers`, (T(n') / T(n) - 1) R > C. Pollux's damping is
    one more term, - log REALLOC_FACTOR.

    Args:
        request: the job's.
        settings: of the arbitration.
    """

    def __init__(self, request: JobRequest, settings: ArbitrationSettings) -> None:
        self.weight = request.weight
        self._a = request.model.a
        self._b = request.model.b
        self._pause_s = request.pause_s
        self._remaining = math.inf if request.remaining is None else max(0.0, request.remaining)
        self._horizon_s = settings.horizon_s
        self._utilities: dict[int, float] = {}
        self._costs: dict[int, float] = {}
        self._gains: dict[tuple[int, int], float] = {}
        factor = 1.0
        if math.isfinite(request.age_s):
            factor = compute_realloc_factor(request.age_s, request.moves, request.pause_s)
        self._damping = -math.log(factor) if factor > 0 else math.inf

    def compute_utility(self, workers: int) -> float:
        """Return weight x log T(n).

        Args:
            workers: n, 0 or more.
        """
        found = self._utilities.get(workers)
        if found is None:
            size = workers or _NO_WORKERS
            found = self._utilities[workers] = self.weight * math.log(size / (self._a + self._b * size))
        return found

    def compute_move_cost(self, workers: int) -> float:
        """Return what a move to n' costs, weight x (log(1 + C / R) - log REALLOC_FACTOR), infinite at a job's end.

        Args:
            workers: n', 0 or more.
        """
        if self._pause_s == 0:
            return 0.0
        found = self._costs.get(workers)
        if found is None:
            size = workers or _NO_WORKERS
            left_s = min(self._horizon_s, self._remaining * (self._a + self._b * size) / size)
            cost = math.log1p(self._pause_s / left_s) if left_s > 0 else math.inf
            found = self._costs[workers] = self.weight * (cost + self._damping)
        return found

    def compute_gain(self, workers: int, more: int) -> float:
        """Return what n' workers are worth above n to a job that pauses anyway.

        The pause is a larger part of what is left where that takes less time: what it costs more with n' than with n is
        deducted, unless it can never pay.

        Args:
            workers: n.
            more: n', above n.
        """
        found = self._gains.get((workers, more))
        if found is None:
            found = self.compute_utility(more) - self.compute_utility(workers)
            cost = self.compute_move_cost(more)
            if math.isfinite(cost):
                found -= cost - self.compute_move_cost(workers)
            self._gains[workers, more] = found
        return found

    def find_worthwhile_size(self, workers: int, most: int) -> int | None:
        """Return the smallest n' above n whose gain exceeds the cost of the move; None if up to `most` there is none.

        What is gained less what it costs only grows with n', so that a bisection finds it.

        Args:
            workers: n.
            most: the largest n' that is looked at.
        """
        if most <= workers or not self._is_worthwhile(workers, most):
            return None
        low, high = workers + 1, most
        while low < high:
            middle = (low + high) // 2
            if self._is_worthwhile(workers, middle):
                high = middle
            else:
                low = middle + 1
        return low

    def _is_worthwhile(self, workers: int, size: int) -> bool:
        return self.compute_utility(size) - self.compute_utility(workers) > self.compute_move_cost(size)
