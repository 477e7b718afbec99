"""Jobs' requests to a cluster, the value of workers to these jobs, and the plan that an arbitration changes.

Jobs and nodes are represented by numbers here; ties are broken in the order of these numbers. A worker goes to the
first node with the fewest free GPUs that suffice (best fit). Nodes with the same number of free GPUs share a bucket,
which is a heap with lazy removal, so no search is needed to find this node.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edl.master.scaling.workers import ThroughputModel, compute_realloc_factor

_NO_WORKERS: Final = 0.5
"""A job without workers counts as if it had this many, since log 0 is not finite. With a smaller number, jobs whose
minimum is 0 would take their first worker before any other job may grow."""
_HORIZON_S: Final = 1800.0
"""Gains further ahead than this are not counted: by then the mix of jobs will have changed. This is also the remaining
time assumed for a job that reports none."""
_LINEAR: Final = ThroughputModel(1.0, 0.0)


@dataclass(frozen=True)
class JobRequest:
    """A job, and the resources that it can use. Durations are in seconds."""

    name: str  # unique
    min_workers: int  # with fewer it does not run; 0 for borrowers such as teachers
    max_workers: int  # it cannot use more now (see `edl.master.scaling.workers`)
    gpus: int = 1  # of a worker, all on one node
    priority: int = 0  # pending minima are served from the highest, surplus is reclaimed from the lowest
    submitted_s: float = 0.0  # time of submission: older jobs first within a priority
    weight: float = 1.0  # weight of its speedup, relative to others'
    model: ThroughputModel = _LINEAR
    remaining: float | None = None  # remaining work, in the unit of `model`'s rates; None if unknown
    pause_s: float = 30.0  # cost of a change of its size
    age_s: float = math.inf  # how long it has run
    moves: int = 0  # how often its size was changed
    waited_s: float = 0.0  # for its minimum, without interruption


class _JobValue:
    """Value of worker counts to a job: weight x log T(n), minus the cost of a move.

    With remaining work W, n workers need W / T(n) seconds. After a move to n' workers, with a pause of C seconds, the
    job needs W / T(n') + C seconds. The logarithm of the quotient of these times is the job's log-speedup from the
    move::

        log T(n') - log T(n) - log(1 + C / R),  R = W / T(n')

    so that a gain above 0 is equivalent to the rule of `edl.master.scaling.workers`, (T(n') / T(n) - 1) R > C. Pollux's
    damping adds one more term, - log REALLOC_FACTOR.
    """

    def __init__(self, request: JobRequest) -> None:
        self._weight = request.weight
        self._a = request.model.a
        self._b = request.model.b
        self._pause_s = request.pause_s
        self._remaining = math.inf if request.remaining is None else max(0.0, request.remaining)
        self._gains: dict[tuple[int, int], float] = {}  # an arbitration needs each of them many times
        factor = 1.0
        if math.isfinite(request.age_s):
            factor = compute_realloc_factor(request.age_s, request.moves, request.pause_s)
        self._damping = -math.log(factor) if factor > 0 else math.inf

    def compute_utility(self, workers: int) -> float:
        """Return weight x log T(n)."""
        size = workers or _NO_WORKERS
        return self._weight * math.log(size / (self._a + self._b * size))

    def compute_move_cost(self, workers: int) -> float:
        """Return the cost of a move to n', weight x (log(1 + C / R) - log REALLOC_FACTOR); infinite at a job's end."""
        if self._pause_s == 0:
            return 0.0
        size = workers or _NO_WORKERS
        left_s = min(_HORIZON_S, self._remaining * (self._a + self._b * size) / size)
        cost = math.log1p(self._pause_s / left_s) if left_s > 0 else math.inf
        return self._weight * (cost + self._damping)

    def compute_gain(self, workers: int, more: int) -> float:
        """Return the gain from n' = `more` workers over n for a job that pauses anyway.

        The cost of the pause with n' minus that with n is deducted, unless the pause can never pay off.
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
        """Return the smallest n' above n, up to `most`, whose gain exceeds the cost of the move; None if none does."""
        if most <= workers or not self._is_worthwhile(workers, most):
            return None
        low, high = workers + 1, most
        while low < high:  # bisection: gain minus cost only grows with n'
            middle = (low + high) // 2
            if self._is_worthwhile(workers, middle):
                high = middle
            else:
                low = middle + 1
        return low

    def _is_worthwhile(self, workers: int, size: int) -> bool:
        return self.compute_utility(size) - self.compute_utility(workers) > self.compute_move_cost(size)


class AllocationPlan:
    """An allocation being built. A job that moves several times in a pass pays for one pause, as it stops only once."""

    def __init__(self, requests: Sequence[JobRequest], capacities: Sequence[int]) -> None:
        self.requests = requests  # in the order that breaks ties
        self.gpus = [request.gpus for request in requests]
        self.workers = [0] * len(requests)
        self.of_job: list[dict[int, int]] = [{} for _ in requests]  # node -> workers
        self.on_node: list[dict[int, int]] = [{} for _ in capacities]  # job -> workers
        self.free = list(capacities)  # below 0 if workers use more than exists, which is fixed first
        self.free_gpus = sum(capacities)
        self.steps = 0
        self.exhausted = False  # whether a step was refused
        self._most_steps = sum(capacities)
        self._moved = [False] * len(requests)
        self._values = [_JobValue(request) for request in requests]
        self._buckets: list[list[int]] = [[] for _ in range(max(capacities, default=0) + 1)]
        for node, free in enumerate(capacities):
            self._buckets[free].append(node)  # ascending, so already a heap
        self._log: list[tuple[int, int, int]] = []
        self._surplus = -1, 0

    def begin_pass(self) -> None:
        """Mark every job as not yet moved."""
        self._moved = [False] * len(self.requests)

    def add_workers(self, job: int, node: int, count: int = 1) -> None:
        """Put workers of a job on a node, or take them away if `count` is negative."""
        for counts, key in ((self.of_job[job], node), (self.on_node[node], job)):
            left = counts.get(key, 0) + count
            if left:
                counts[key] = left
            else:
                del counts[key]
        self.workers[job] += count
        free = self.free[node] - count * self.gpus[job]
        self.free[node] = free
        self.free_gpus -= count * self.gpus[job]
        if free >= 0:
            heapq.heappush(self._buckets[free], node)
        self._log.append((job, node, count))

    def mark(self) -> int:
        """Return the position in the log of changes, for `undo_to`."""
        return len(self._log)

    def undo_to(self, mark: int) -> None:
        """Undo all changes since a mark."""
        while len(self._log) > mark:
            job, node, count = self._log.pop()
            self.add_workers(job, node, -count)
            self._log.pop()

    def find_node(self, gpus: int) -> int | None:
        """Return the node with the fewest free GPUs that suffice; None if there is none."""
        for count in range(gpus, len(self._buckets)):
            bucket = self._buckets[count]
            while bucket:
                if self.free[bucket[0]] == count:
                    return bucket[0]
                heapq.heappop(bucket)
        return None

    def can_place(self, workers: int) -> bool:
        """Whether steps are left to place this many workers: a decision places at most one worker per GPU."""
        fits = self.steps + workers <= self._most_steps
        self.exhausted = self.exhausted or not fits
        return fits

    def is_waiting(self, job: int) -> bool:
        """Whether a job has fewer workers than it needs to run."""
        return self.workers[job] < self.requests[job].min_workers

    def has_moved(self, job: int) -> bool:
        """Whether a job moves in this pass anyway."""
        return self._moved[job]

    def record_move(self, job: int) -> None:
        """Record that a job moves in this pass."""
        self._moved[job] = True

    def get_surplus(self, job: int) -> int:
        """Return how many workers a job has above its minimum."""
        return self.workers[job] - self.requests[job].min_workers

    def count_surplus_gpus(self) -> int:
        """Return the number of GPUs of all surplus workers."""
        if self._surplus[0] != self.mark():
            surplus = sum(max(0, self.get_surplus(job)) * gpus for job, gpus in enumerate(self.gpus))
            self._surplus = self.mark(), surplus
        return self._surplus[1]

    def compute_gain(self, job: int, more: int = 1) -> float:
        """Return the gain from `more` additional workers for a job that pauses anyway."""
        now = self.workers[job]
        return self._values[job].compute_gain(now, now + more)

    def compute_pause(self, job: int) -> float:
        """Return the cost of the pause for moving a job; 0 for a job that moves anyway."""
        return 0.0 if self._moved[job] else self._values[job].compute_move_cost(self.workers[job])

    def find_worthwhile_growth(self, job: int) -> int | None:
        """Return how many more workers make a job's gain exceed its pause; None if it cannot get that many."""
        now, request = self.workers[job], self.requests[job]
        most = min(request.max_workers, now + self.free_gpus // request.gpus)
        size = self._values[job].find_worthwhile_size(now, most)
        return None if size is None else size - now

    def price_worker(self, job: int, count: int = 1) -> float:
        """Return the cost of the `count`-th worker that a job with surplus gives up; the first also costs the pause."""
        left = self.workers[job] - count
        loss = self._values[job].compute_gain(left, left + 1)
        return loss + self.compute_pause(job) if count == 1 else loss

    def choose_victims(
        self, node: int, needed: int, allowed: Sequence[bool], limit: float | None = None
    ) -> list[int] | None:
        """Choose workers on a node to free `needed` more GPUs; return their jobs, once per worker; None if too few.

        Only `allowed` jobs give up surplus. With a `limit` (exclusive) on the total cost, the cheapest workers are
        chosen; without a limit, workers with the lowest priority are chosen first, and among these the cheapest. The
        cost is infinite for a job whose pause can never pay off, such as at its end. In a tie, the youngest job gives
        up a worker.
        """
        gpus, requests, on_node = self.gpus, self.requests, self.on_node[node]
        offers: list[tuple[int, float, int, int]] = []
        offered = 0
        for job, count in on_node.items():
            surplus = self.get_surplus(job)
            if surplus > 0 and allowed[job]:
                offered += min(count, surplus) * gpus[job]
                level = requests[job].priority if limit is None else 0
                offers.append((level, self.price_worker(job) / gpus[job], -job, 1))
        if offered < needed:
            return None
        heapq.heapify(offers)
        victims: list[int] = []
        while needed > 0:
            level, price, number, count = heapq.heappop(offers)
            job = -number
            if limit is not None and price * gpus[job] >= limit:
                return None
            victims.append(job)
            needed -= gpus[job]
            if count < min(on_node[job], self.get_surplus(job)):
                price = self.price_worker(job, count + 1) / gpus[job]
                heapq.heappush(offers, (level, price, number, count + 1))
        if needed < 0 and len(victims) > 1:  # an earlier choice may be unnecessary after a larger worker
            for job in sorted(victims, key=lambda victim: (limit is None and -requests[victim].priority, gpus[victim])):
                if needed + gpus[job] <= 0:
                    victims.remove(job)
                    needed += gpus[job]
        return victims if limit is None or self._price_victims(victims) < limit else None

    def _price_victims(self, victims: Sequence[int]) -> float:
        total, counts = 0.0, dict[int, int]()
        for job in victims:
            counts[job] = counts.get(job, 0) + 1
            total += self.price_worker(job, counts[job])
        return total
