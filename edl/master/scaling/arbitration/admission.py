"""Pending minima, first of all: by priority, then age, with surplus reclaimed from the lowest priority upwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edl.master.scaling.arbitration.plan import AllocationPlan

__all__ = ["admit_pending_jobs"]


def admit_pending_jobs(plan: AllocationPlan, former: Sequence[Mapping[int, int]]) -> bool:
    """Give every waiting job its minimum that gets it, all of it or nothing.

    Nobody is brought below its minimum. A job that does not fit is passed over, unless it has waited so long that
    nothing which comes after it may start before it.

    Args:
        plan: is changed.
        former: by job, the places of a job that has lost some of its workers; it has them back where they are free.

    Returns:
        Whether a job was served.
    """
    waiting = [job for job in range(len(plan.requests)) if plan.is_waiting(job)]
    waiting.sort(key=lambda job: (-plan.requests[job].priority, plan.requests[job].submitted_s, job))
    refused: list[tuple[int, int]] = []  # gpus, workers: what is no smaller in either does not fit either
    served = blocked = False
    search = _SurplusSearch(plan)
    patience_s = plan.settings.patience_s
    for job in waiting:
        request = plan.requests[job]
        if blocked and not former[job]:
            continue
        hopeless = any(gpus <= request.gpus and count <= request.min_workers for gpus, count in refused)
        if (not hopeless or former[job]) and _admit(plan, job, former[job], search):
            served = True
            continue
        refused.append((request.gpus, request.min_workers))
        if patience_s is not None and request.waited_s >= patience_s and _could_ever_fit(plan, job):
            blocked = True
    return served


def _admit(plan: AllocationPlan, job: int, former: Mapping[int, int], search: _SurplusSearch) -> bool:
    """Place a job's minimum, or nothing."""
    pool, request = plan.pool, plan.requests[job]
    lacking = request.min_workers * request.gpus - pool.free_gpus
    if lacking > 0 and search.count_gpus() < lacking:
        return False
    mark = pool.mark()
    moved: dict[int, str] = {}
    for place, count in former.items():
        back = min(count, pool.free[place] // request.gpus, request.min_workers - pool.workers[job])
        if back > 0:
            pool.add_workers(job, place, back)
    while plan.is_waiting(job):
        node = pool.find_node(request.gpus)
        if node is None:
            found = search.find_node(request.gpus)
            if found is None:
                break
            node, victims = found
            for victim in victims:
                pool.remove_worker(victim, node)
                moved[victim] = f"gave workers to {request.name}, which needs its minimum"
        pool.add_workers(job, node)
    if plan.is_waiting(job) or not plan.can_place(request.min_workers):
        pool.undo_to(mark)
        search.start_again()
        return False
    for victim, reason in moved.items():
        plan.record_move(victim, reason)
    plan.record_move(job, "has its minimum")
    plan.steps += request.min_workers
    return True


class _SurplusSearch:
    """Looks for nodes where surplus makes room, from the lowest priority upwards.

    Surplus only shrinks while jobs are served, so that the search for workers of one size goes on where it stopped.
    """

    def __init__(self, plan: AllocationPlan) -> None:
        self._plan = plan
        self._counted = -1, 0
        self._cursors: dict[int, _Cursor] = {}

    def start_again(self) -> None:
        """Look everywhere again, after steps were undone."""
        self._cursors.clear()

    def count_gpus(self) -> int:
        """Return the GPUs of all surplus."""
        plan = self._plan
        if self._counted[0] != plan.pool.mark():
            surplus = (max(0, plan.get_surplus(job)) * request.gpus for job, request in enumerate(plan.requests))
            self._counted = plan.pool.mark(), sum(surplus)
        return self._counted[1]

    def find_node(self, gpus: int) -> tuple[int, list[int]] | None:
        """Return a node, and the jobs that give workers there; None if no surplus makes room for so many GPUs."""
        if gpus not in self._cursors:
            self._cursors[gpus] = _Cursor(self._plan)
        return self._cursors[gpus].find_node(gpus)


class _Cursor:
    """How far the search for workers of one size has come: surplus of higher priority only where lower has none."""

    def __init__(self, plan: AllocationPlan) -> None:
        self._plan = plan
        self._allowed = [False] * len(plan.requests)
        self._victims = sorted(
            (request.priority, plan.price_worker(job) / request.gpus, -job)
            for job, request in enumerate(plan.requests)
            if plan.get_surplus(job) > 0
        )
        self._next = 0
        self._nodes: list[int] = []

    def find_node(self, gpus: int) -> tuple[int, list[int]] | None:
        """Return a node, and the jobs that give workers there; None if there is none further on."""
        plan = self._plan
        while True:
            while self._nodes:
                node = self._nodes[-1]
                victims = plan.choose_victims(node, gpus - plan.pool.free[node], self._allowed)
                if victims is not None:
                    return node, victims
                self._nodes.pop()
            if self._next == len(self._victims):
                return None
            priority, _, number = self._victims[self._next]
            if self._next == 0 or self._victims[self._next - 1][0] != priority:
                for level, _, other in self._victims:
                    self._allowed[-other] = level <= priority
            self._next += 1
            self._nodes = sorted(plan.pool.of_job[-number], key=lambda node: (plan.pool.free[node], -node))


def _could_ever_fit(plan: AllocationPlan, job: int) -> bool:
    """Whether a job would fit into the empty cluster; a job that would not holds nobody up."""
    request = plan.requests[job]
    slots = 0
    for node, free in enumerate(plan.pool.free):
        used = sum(plan.pool.gpus[other] * count for other, count in plan.pool.on_node[node].items())
        slots += (free + used) // request.gpus
        if slots >= request.min_workers:
            return True
    return False
