"""The plan that one arbitration works on: the pool, what jobs are worth, and which of them it has moved already."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from edl.master.scaling.arbitration.gpu_pool import GpuPool
from edl.master.scaling.arbitration.requests import ArbitrationSettings, JobRequest, JobValue

__all__ = ["AllocationPlan"]


class AllocationPlan:
    """An allocation in the making. Who has moved in a pass pays for no further pause in it: a job stops once for all.

    Args:
        requests: the jobs, in the order that decides between equals.
        settings: of the arbitration.
        pool: of the nodes.
    """

    def __init__(self, requests: Sequence[JobRequest], settings: ArbitrationSettings, pool: GpuPool) -> None:
        self.requests = requests
        self.settings = settings
        self.pool = pool
        self.values = [JobValue(request, settings) for request in requests]
        self.steps = 0
        self.most_steps = sum(pool.free)
        self.exhausted = False
        self.reasons: list[str] = [""] * len(requests)
        self._moved = [False] * len(requests)

    def begin_pass(self) -> None:
        """Count every job as not yet moved."""
        self._moved = [False] * len(self.requests)

    def is_waiting(self, job: int) -> bool:
        """Whether a job has fewer workers than it needs to run.

        Args:
            job: its number.
        """
        return self.pool.workers[job] < self.requests[job].min_workers

    def get_surplus(self, job: int) -> int:
        """Return how many workers a job has above its minimum.

        Args:
            job: its number.
        """
        return self.pool.workers[job] - self.requests[job].min_workers

    def compute_gain(self, job: int, more: int = 1) -> float:
        """Return what more workers are worth to a job that pauses anyway.

        Args:
            job: its number.
            more: how many more.
        """
        now = self.pool.workers[job]
        return self.values[job].compute_gain(now, now + more)

    def compute_pause(self, job: int) -> float:
        """Return what the pause costs that the move of a job brings; 0 for a job that moves anyway.

        Args:
            job: its number.
        """
        return 0.0 if self._moved[job] else self.values[job].compute_move_cost(self.pool.workers[job])

    def has_moved(self, job: int) -> bool:
        """Whether a job moves in this pass anyway.

        Args:
            job: its number.
        """
        return self._moved[job]

    def record_move(self, job: int, reason: str) -> None:
        """Record that a job moves in this pass.

        Args:
            job: its number.
            reason: in a few words for a person.
        """
        self._moved[job] = True
        self.reasons[job] = reason

    def can_place(self, workers: int) -> bool:
        """Whether so many steps are left: a decision places at most as many workers as there are GPUs. Notes a refusal.

        Args:
            workers: to be placed.
        """
        fits = self.steps + workers <= self.most_steps
        self.exhausted = self.exhausted or not fits
        return fits

    def price_worker(self, job: int, count: int = 1) -> float:
        """Return what the `count`-th worker costs that a job with surplus gives; its pause comes with the first.

        Args:
            job: its number.
            count: 1 for the first.
        """
        left = self.pool.workers[job] - count
        loss = self.values[job].compute_gain(left, left + 1)
        return loss + self.compute_pause(job) if count == 1 else loss

    def choose_victims(
        self, node: int, needed: int, allowed: Sequence[bool], limit: float | None = None
    ) -> list[int] | None:
        """Choose workers of a node until so many GPUs are free: of least cost, or of the lowest priority first.

        Between equals, the youngest job gives.

        Args:
            node: where GPUs are needed.
            needed: how many more than are free.
            allowed: by job, whether its surplus may be taken.
            limit: what the workers must cost less than. None where surplus goes whatever it costs: then by priority,
                within one by cost, which is infinite for a job whose pause can never pay, such as at its end.

        Returns:
            The jobs, in the order in which they give a worker, named once for each; None if surplus of less than the
            limit does not suffice.
        """
        pool, gpus, requests = self.pool, self.pool.gpus, self.requests
        offers: list[tuple[int, float, int, int]] = []
        offered = 0
        for job, count in pool.on_node[node].items():
            surplus = pool.workers[job] - requests[job].min_workers
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
            if count < min(pool.on_node[node][job], pool.workers[job] - requests[job].min_workers):
                price = self.price_worker(job, count + 1) / gpus[job]
                heapq.heappush(offers, (level, price, number, count + 1))
        if needed < 0 and len(victims) > 1:  # what was chosen before may be in vain, now that a larger worker goes
            for job in sorted(victims, key=lambda victim: (limit is None and -requests[victim].priority, gpus[victim])):
                if needed + gpus[job] <= 0:
                    victims.remove(job)
                    needed += gpus[job]
        return victims if limit is None or self.price_victims(victims) < limit else None

    def price_victims(self, victims: Sequence[int]) -> float:
        """Return what jobs lose that give these workers, pauses included.

        Args:
            victims: of `choose_victims`.
        """
        total, counts = 0.0, dict[int, int]()
        for job in victims:
            counts[job] = counts.get(job, 0) + 1
            total += self.price_worker(job, counts[job])
        return total
