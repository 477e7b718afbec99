"""Free GPUs, one worker at a time, to the largest weighted gain in log-speedup for each GPU, until none fits.

T is concave, and so is log T, also less what a pause costs (`JobValue.compute_gain`): the gains of a job only fall, so
that taking the largest each time is the best there is for workers of one size (Fox, "Discrete optimization via marginal
analysis", Management Science 13, 1966). The sum of log-speedups is what proportional fairness makes largest (Kelly,
1997), and what Pollux's power mean of speedups (OSDI 2021, section 4.2) becomes for p -> 0.
"""

from __future__ import annotations

import heapq

from edl.master.scaling.arbitration.plan import AllocationPlan

__all__ = ["grow_jobs"]


def grow_jobs(plan: AllocationPlan) -> bool:
    """Hand out free GPUs.

    The first workers of a job that has not moved yet come together: as many as it takes for their gain to exceed the
    pause. If they do not fit, it stays as it is.

    Args:
        plan: is changed.

    Returns:
        Whether a worker was placed.
    """
    pool = plan.pool
    if pool.free_gpus == 0:
        return False
    offers: list[tuple[float, int, int]] = []
    for job in range(len(plan.requests)):
        _offer(plan, job, offers)
    heapq.heapify(offers)
    grown = False
    widest = max(pool.free)
    while offers and pool.free_gpus:
        _, job, count = heapq.heappop(offers)
        # A node for `widest` GPUs was not found before, so it is not now: nothing is freed here.
        if pool.gpus[job] > widest:
            continue
        mark, left = pool.mark(), count
        while left and (node := pool.find_node(pool.gpus[job])) is not None:
            pool.add_workers(job, node)
            left -= 1
        if left or not plan.can_place(count):
            if left == count:
                widest = pool.gpus[job] - 1
            pool.undo_to(mark)
            continue
        plan.steps += count
        plan.record_move(job, "grew into free GPUs")
        grown = True
        before = len(offers)
        _offer(plan, job, offers)
        if len(offers) > before:
            heapq.heappush(offers, offers.pop())
    return grown


def _offer(plan: AllocationPlan, job: int, offers: list[tuple[float, int, int]]) -> None:
    """Append what the next workers of a job are worth a GPU, if it may have any: (minus gain, job, workers)."""
    now, request = plan.pool.workers[job], plan.requests[job]
    if now >= request.max_workers or plan.is_waiting(job):
        return
    count = 1
    if not plan.has_moved(job):
        size = plan.values[job].find_worthwhile_size(
            now, min(request.max_workers, now + plan.pool.free_gpus // request.gpus)
        )
        if size is None:
            return
        count = size - now
    gain = plan.compute_gain(job, count) / (count * request.gpus)
    if gain > 0:
        offers.append((-gain, job, count))
