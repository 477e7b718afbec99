"""Workers from jobs that lose little to jobs that gain much, wherever the difference exceeds both pauses."""

from __future__ import annotations

import heapq
from typing import Final

from edl.master.scaling.arbitration.plan import AllocationPlan

__all__ = ["exchange_workers"]

_MAX_NODES_EXAMINED: Final = 30_000
"""Nodes that are looked at in a pass, some 10 us each. Where workers are of one size the first node does, and no pass
looks at more nodes than it moves workers; jobs whose workers need whole nodes would look at all of them."""
_LEAST_DIFFERENCE: Final = 1e-9
"""A gain that exceeds a loss by less is rounding: it could be found again in the other direction, and again."""


def exchange_workers(plan: AllocationPlan) -> bool:
    """Move workers between jobs, one at a time, the largest gain first, until no move gains more than it costs.

    The sum of the jobs' values grows with every move, so that none is ever taken back.

    Args:
        plan: is changed.

    Returns:
        Whether a worker was moved.
    """
    surplus = _SurplusJobs(plan)
    receivers: list[tuple[float, int]] = []
    for job in range(len(plan.requests)):
        _bid(plan, job, receivers)
    heapq.heapify(receivers)
    refused: set[int] = set()  # sizes of workers for which a larger bid than those that are left was refused
    exchanged = False
    while receivers:
        _, job = heapq.heappop(receivers)
        bid = _compute_bid(plan, job)
        if plan.pool.gpus[job] in refused or bid <= 0:
            continue
        found = surplus.find_node(job, bid)
        if found is None:
            refused.add(plan.pool.gpus[job])
            continue
        if not plan.can_place(1):
            break
        node, victims = found
        name = plan.requests[job].name
        for victim in victims:
            plan.pool.remove_worker(victim, node)
        plan.pool.add_workers(job, node)
        plan.steps += 1
        for victim in sorted(set(victims)):
            plan.record_move(victim, f"gave workers to {name}, which gains more by them")
            surplus.update(victim)
        plan.record_move(job, "took workers of jobs that lose less by them")
        surplus.update(job)
        exchanged = True
        before = len(receivers)
        _bid(plan, job, receivers)
        if len(receivers) > before:
            heapq.heappush(receivers, receivers.pop())
    return exchanged


def _compute_bid(plan: AllocationPlan, job: int) -> float:
    """Return what one more worker is worth to a job, its own pause paid."""
    return plan.compute_gain(job) - plan.compute_pause(job)


def _bid(plan: AllocationPlan, job: int, receivers: list[tuple[float, int]]) -> None:
    """Append a job's bid for one more worker, if it may have it: (minus bid for a GPU, job)."""
    if plan.pool.workers[job] >= plan.requests[job].max_workers or plan.is_waiting(job):
        return
    bid = _compute_bid(plan, job) / plan.pool.gpus[job]
    if bid > 0:
        receivers.append((-bid, job))


class _SurplusJobs:
    """Jobs with surplus, by what a worker less costs them for each GPU; a queue for each size of wanted workers.

    A node that was looked at for workers of one size, in vain, is not looked at for that size again in this pass: bids
    for it only fall.
    """

    def __init__(self, plan: AllocationPlan) -> None:
        self._plan = plan
        self._allowed = [True] * len(plan.requests)
        self._prices: dict[int, float] = {}
        self._queues: dict[int, list[tuple[float, int]]] = {}
        self._nodes: dict[tuple[int, int], list[int]] = {}
        self._examined = 0
        for job in range(len(plan.requests)):
            self.update(job)

    def update(self, job: int) -> None:
        """Take a job's new number of workers into account."""
        plan = self._plan
        if plan.get_surplus(job) <= 0:
            self._prices.pop(job, None)
            return
        price = self._prices[job] = plan.price_worker(job) / plan.pool.gpus[job]
        for queue in self._queues.values():
            heapq.heappush(queue, (price, job))

    def find_node(self, receiver: int, bid: float) -> tuple[int, list[int]] | None:
        """Return a node where a worker of the receiver fits for less than its bid, and the jobs that give workers."""
        size = self._plan.pool.gpus[receiver]
        if size not in self._queues:
            self._queues[size] = sorted((price, job) for job, price in self._prices.items())
        queue = self._queues[size]
        own: tuple[float, int] | None = None
        found = None
        self._allowed[receiver] = False
        while queue and found is None:
            price, job = queue[0]
            # A whole worker is given even where less is needed, and none that comes later is cheaper for a GPU.
            if price >= bid:
                break
            if self._prices.get(job) != price:
                heapq.heappop(queue)  # it has another price by now, and stands there again
                continue
            if job == receiver:
                own = heapq.heappop(queue)
                continue
            found = self._search_nodes(job, size, bid)
            if found is None:
                heapq.heappop(queue)
        if own is not None:
            heapq.heappush(queue, own)
        self._allowed[receiver] = True
        return found

    def _search_nodes(self, job: int, size: int, bid: float) -> tuple[int, list[int]] | None:
        """Look at the nodes where a job has workers."""
        pool = self._plan.pool
        if self._prices[job] * pool.gpus[job] >= bid:
            return None
        nodes = self._nodes.get((job, size))
        if nodes is None:
            nodes = self._nodes[job, size] = sorted(pool.of_job[job], key=lambda node: (pool.free[node], -node))
        while nodes and self._examined < _MAX_NODES_EXAMINED:
            node = nodes[-1]
            # A job that does not grow into free GPUs has its reasons.
            if job in pool.on_node[node] and pool.free[node] < size:
                self._examined += 1
                limit = bid - _LEAST_DIFFERENCE
                victims = self._plan.choose_victims(node, size - pool.free[node], self._allowed, limit)
                if victims is not None:
                    return node, victims
            nodes.pop()
        return None
