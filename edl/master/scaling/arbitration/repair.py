"""What has to go before anything is decided: workers on nodes that are too small, and more than a job may have."""

from __future__ import annotations

from edl.master.scaling.arbitration.plan import AllocationPlan

__all__ = ["release_impossible_workers"]


def release_impossible_workers(plan: AllocationPlan) -> list[dict[int, int]]:
    """Take workers from nodes that have fewer GPUs than are used, and from jobs that have too many or too few.

    A node gives up surplus of the lowest priority first, then minima of the lowest priority, the youngest first. A job
    that is left with fewer workers than its minimum loses all: it waits with the others, and has its old places back
    if it is served.

    Args:
        plan: is changed.

    Returns:
        By job, the places of a job below its minimum: node -> workers.
    """
    pool = plan.pool
    for node, free in enumerate(pool.free):
        while free < 0:
            job = min(pool.on_node[node], key=lambda job: (plan.get_surplus(job) <= 0, *_rank(plan, job)))
            pool.remove_worker(job, node)
            plan.record_move(job, "its node lost GPUs")
            free = pool.free[node]
    left: list[dict[int, int]] = [{} for _ in plan.requests]
    for job, request in enumerate(plan.requests):
        while pool.workers[job] > request.max_workers:
            node = max(pool.of_job[job], key=lambda node: (pool.free[node], -node))
            pool.remove_worker(job, node)
            plan.record_move(job, "it may not have more")
        if plan.is_waiting(job):
            left[job] = dict(sorted(pool.of_job[job].items()))
            for node, count in left[job].items():
                for _ in range(count):
                    pool.remove_worker(job, node)
    return left


def _rank(plan: AllocationPlan, job: int) -> tuple[float, float, int]:
    """Return the order in which jobs give: the lowest priority first, of these the youngest."""
    request = plan.requests[job]
    return request.priority, -request.submitted_s, -job
