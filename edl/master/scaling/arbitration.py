"""Shares GPUs among jobs: a pure function from nodes, jobs and current placements to the desired placements.

A decision takes passes over one plan, each with three steps, until a pass changes nothing.

1. Place the minima of pending jobs, by priority and then age, on free GPUs and on GPUs of surplus workers. (A job's
   surplus is its workers above its minimum.) Surplus is reclaimed from the lowest priority upwards.
2. Hand out free GPUs, one worker at a time, to the job with the largest weighted gain in log-speedup per GPU, until no
   worker fits. T is concave, and so is log T, even minus the cost of a pause: a job's gains only fall, so taking the
   largest each time is optimal for workers of one size (Fox, "Discrete optimization via marginal analysis", Management
   Science 13, 1966).
   Proportional fairness maximizes the sum of log-speedups (Kelly, 1997), which is also the limit of Pollux's power mean
   of speedups (OSDI 2021, section 4.2) for p -> 0.
3. Move workers from jobs that lose little to jobs that gain much, if the difference exceeds the cost of both pauses.

Every move gains more than it costs, so the passes end. The last pass changes nothing, and neither would another
decision: run on its own result, the arbiter moves nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from edl.master.scaling.allocation_plan import AllocationPlan, JobRequest

PATIENCE_S: Final = 3600.0
"""Once a job has waited this long, no later job starts before it. Until then, its share is lent to other jobs."""
_MAX_NODES_EXAMINED: Final = 30_000
"""Maximum number of nodes that an exchange checks in a pass; each check takes about 10 us. If all workers have one
size, the first node suffices, and a pass checks no more nodes than it moves workers. If workers take whole nodes, all
nodes would have to be checked."""
_LEAST_DIFFERENCE: Final = 1e-9
"""If a gain exceeds a loss by less than this, the difference is a rounding error. A move could then be followed by its
reversal, over and over."""


@dataclass(frozen=True)
class Allocation:
    """Where every job's workers should be."""

    placements: Mapping[str, Mapping[str, int]]  # job -> node -> workers, without empty entries
    pending: tuple[str, ...]  # jobs that wait for their minimum, in the order of service
    steps: int  # workers placed on the way, at most as many as there are GPUs
    settled: bool  # another decision would move nothing; False if the steps ran out before
    held_back: Mapping[str, str]  # pending job without workers -> the long-waiting job that starts first

    def count_workers(self, job: str) -> int:
        """Return how many workers a job has."""
        return sum(self.placements.get(job, {}).values())


def arbitrate(
    nodes: Mapping[str, int],
    jobs: Sequence[JobRequest],
    placements: Mapping[str, Mapping[str, int]],
) -> Allocation:
    """Decide how many workers each job has on each node.

    `nodes` maps each node's name to the number of GPUs that jobs may use there. `placements` maps job -> node ->
    current number of workers. Nodes missing from `nodes` are lost, and jobs missing from `jobs` have ended.
    """
    requests = sorted(jobs, key=lambda job: (-job.priority, job.submitted_s, job.name))
    names = sorted(nodes)
    numbers = {name: number for number, name in enumerate(names)}
    plan = AllocationPlan(requests, [nodes[name] for name in names])
    for job, request in enumerate(requests):
        for node, count in sorted(placements.get(request.name, {}).items()):
            if node not in numbers:
                plan.record_move(job)
            elif count > 0:
                plan.add_workers(job, numbers[node], count)
    former = _release_impossible_workers(plan)
    impatient = [
        job
        for job, request in enumerate(requests)
        if plan.is_waiting(job) and request.waited_s >= PATIENCE_S and _could_ever_fit(plan, job)
    ]
    settled = False  # every pass but two places a worker, and there are at most as many as GPUs
    while not settled:
        # Only a pass that every job enters unmoved shows that another decision would change nothing.
        fresh = not any(plan.has_moved(job) for job in range(len(requests)))
        served = _admit_pending_jobs(plan, former, impatient)
        grown = _grow_jobs(plan)
        exchanged = _exchange_workers(plan)
        settled = fresh and not (served or grown or exchanged)
        plan.begin_pass()
    after = [{names[node]: count for node, count in sorted(places.items())} for places in plan.of_job]
    pending = [job for job in range(len(requests)) if plan.is_waiting(job)]
    return Allocation(
        placements={request.name: after[job] for job, request in enumerate(requests) if after[job]},
        pending=tuple(requests[job].name for job in pending),
        steps=plan.steps,
        settled=not plan.exhausted,
        held_back={
            requests[job].name: requests[impatient[0]].name
            for job in pending
            if impatient and job > impatient[0] and not former[job]
        },
    )


def _release_impossible_workers(plan: AllocationPlan) -> list[dict[int, int]]:
    """Take workers from nodes with fewer GPUs than are used, and from jobs with too many or too few workers.

    Surplus workers are taken first, then workers of minima; both by ascending priority, then from the youngest job. A
    job that is left below its minimum loses all its workers, and gets its old places back if it is served later. Return
    these places, for each job: node -> number of workers.
    """

    def rank(job: int) -> tuple[bool, float, float, int]:
        request = plan.requests[job]
        return plan.get_surplus(job) <= 0, request.priority, -request.submitted_s, -job

    for node in range(len(plan.free)):
        while plan.free[node] < 0:
            job = min(plan.on_node[node], key=rank)
            plan.add_workers(job, node, -1)
            plan.record_move(job)
    former: list[dict[int, int]] = [{} for _ in plan.requests]
    for job, request in enumerate(plan.requests):
        while plan.workers[job] > request.max_workers:
            plan.add_workers(job, max(plan.of_job[job], key=lambda node: (plan.free[node], -node)), -1)
            plan.record_move(job)
        if plan.is_waiting(job):
            former[job] = dict(sorted(plan.of_job[job].items()))
            for node, count in former[job].items():
                plan.add_workers(job, node, -count)
    return former


def _admit_pending_jobs(plan: AllocationPlan, former: Sequence[Mapping[int, int]], impatient: Collection[int]) -> bool:
    """Give each waiting job its whole minimum, or nothing; return whether a job was served.

    No job falls below its minimum. A job that does not fit is passed over, unless it has waited so long that no later
    job may start before it. A job that has lost some of its workers gets its `former` places back if they are free.
    """
    waiting = [job for job in range(len(plan.requests)) if plan.is_waiting(job)]
    waiting.sort(key=lambda job: (-plan.requests[job].priority, plan.requests[job].submitted_s, job))
    refused: list[tuple[int, int]] = []  # gpus, workers: a job at least as large in both does not fit either
    served = blocked = False
    # Surplus only shrinks while jobs are served, so the search for workers of one size continues where it stopped.
    searches: dict[int, Iterator[tuple[int, list[int]]]] = {}
    for job in waiting:
        request = plan.requests[job]
        if blocked and not former[job]:
            continue
        hopeless = any(gpus <= request.gpus and count <= request.min_workers for gpus, count in refused)
        if (not hopeless or former[job]) and _admit(plan, job, former[job], searches):
            served = True
            continue
        refused.append((request.gpus, request.min_workers))
        blocked = blocked or job in impatient
    return served


def _admit(
    plan: AllocationPlan, job: int, former: Mapping[int, int], searches: dict[int, Iterator[tuple[int, list[int]]]]
) -> bool:
    """Place a job's whole minimum, or nothing."""
    request = plan.requests[job]
    lacking = request.min_workers * request.gpus - plan.free_gpus
    if lacking > 0 and plan.count_surplus_gpus() < lacking:
        return False
    mark = plan.mark()
    moved = {job}
    for place, count in former.items():
        back = min(count, plan.free[place] // request.gpus, request.min_workers - plan.workers[job])
        if back > 0:
            plan.add_workers(job, place, back)
    while plan.is_waiting(job):
        node = plan.find_node(request.gpus)
        if node is None:
            if request.gpus not in searches:
                searches[request.gpus] = _search_surplus(plan, request.gpus)
            found = next(searches[request.gpus], None)
            if found is None:
                break
            node, victims = found
            for victim in victims:
                plan.add_workers(victim, node, -1)
                moved.add(victim)
        plan.add_workers(job, node)
    if plan.is_waiting(job) or not plan.can_place(request.min_workers):
        plan.undo_to(mark)
        searches.clear()
        return False
    for mover in moved:
        plan.record_move(mover)
    plan.steps += request.min_workers
    return True


def _search_surplus(plan: AllocationPlan, gpus: int) -> Iterator[tuple[int, list[int]]]:
    """Yield nodes where surplus makes room for a worker, and the jobs that give up workers there.

    Surplus with a higher priority is taken only if lower priorities have none. A node is yielded again while it has
    surplus.
    """
    allowed = [False] * len(plan.requests)
    givers = sorted(
        (request.priority, plan.price_worker(job) / request.gpus, -job)
        for job, request in enumerate(plan.requests)
        if plan.get_surplus(job) > 0
    )
    lowest: float | None = None
    for priority, _, number in givers:
        if priority != lowest:
            lowest = priority
            for level, _, other in givers:
                allowed[-other] = level <= priority
        nodes = sorted(plan.of_job[-number], key=lambda node: (plan.free[node], -node))
        while nodes:
            victims = plan.choose_victims(nodes[-1], gpus - plan.free[nodes[-1]], allowed)
            if victims is None:
                nodes.pop()
            else:
                yield nodes[-1], victims


def _could_ever_fit(plan: AllocationPlan, job: int) -> bool:
    """Whether a job would fit into the empty cluster; a job that would not fit does not delay other jobs."""
    request = plan.requests[job]
    slots = 0
    for node, free in enumerate(plan.free):
        used = sum(plan.gpus[other] * count for other, count in plan.on_node[node].items())
        slots += (free + used) // request.gpus
        if slots >= request.min_workers:
            return True
    return False


def _grow_jobs(plan: AllocationPlan) -> bool:
    """Hand out free GPUs; return whether a worker was placed.

    A job that has not moved yet gets its first workers together, enough for their gain to exceed the pause, or none.
    """
    if plan.free_gpus == 0:
        return False
    offers = [offer for job in range(len(plan.requests)) if (offer := _offer(plan, job)) is not None]
    heapq.heapify(offers)
    grown = False
    widest = max(plan.free)
    while offers and plan.free_gpus:
        _, job, count = heapq.heappop(offers)
        # No node for `widest` GPUs was found before, so none will be now: nothing is freed here.
        if plan.gpus[job] > widest:
            continue
        mark, left = plan.mark(), count
        while left and (node := plan.find_node(plan.gpus[job])) is not None:
            plan.add_workers(job, node)
            left -= 1
        if left or not plan.can_place(count):
            if left == count:
                widest = plan.gpus[job] - 1
            plan.undo_to(mark)
            continue
        plan.steps += count
        plan.record_move(job)
        grown = True
        if (offer := _offer(plan, job)) is not None:
            heapq.heappush(offers, offer)
    return grown


def _offer(plan: AllocationPlan, job: int) -> tuple[float, int, int] | None:
    """Return the gain per GPU from a job's next workers as (minus gain, job, workers); None if the job gets no more."""
    if plan.workers[job] >= plan.requests[job].max_workers or plan.is_waiting(job):
        return None
    count = 1 if plan.has_moved(job) else plan.find_worthwhile_growth(job)
    if count is None:
        return None
    gain = plan.compute_gain(job, count) / (count * plan.gpus[job])
    return (-gain, job, count) if gain > 0 else None


def _exchange_workers(plan: AllocationPlan) -> bool:
    """Move workers between jobs, one at a time, the largest gain first; return whether a worker was moved.

    The sum of the jobs' values grows with every move, so no move is ever undone.
    """
    surplus = _SurplusJobs(plan)
    receivers = [(-bid / plan.gpus[job], job) for job in range(len(plan.requests)) if (bid := _bid(plan, job)) > 0]
    heapq.heapify(receivers)
    refused: set[int] = set()  # worker sizes for which a bid larger than the remaining ones was refused
    exchanged = False
    while receivers:
        _, job = heapq.heappop(receivers)
        bid = _bid(plan, job)
        if plan.gpus[job] in refused or bid <= 0:
            continue
        found = surplus.find_node(job, bid)
        if found is None:
            refused.add(plan.gpus[job])
            continue
        if not plan.can_place(1):
            break
        node, victims = found
        for victim in victims:
            plan.add_workers(victim, node, -1)
        plan.add_workers(job, node)
        plan.steps += 1
        for victim in sorted(set(victims)):
            plan.record_move(victim)
            surplus.update(victim)
        plan.record_move(job)
        surplus.update(job)
        exchanged = True
        if (bid := _bid(plan, job)) > 0:
            heapq.heappush(receivers, (-bid / plan.gpus[job], job))
    return exchanged


def _bid(plan: AllocationPlan, job: int) -> float:
    """Return a job's gain from one more worker, minus the cost of its pause; 0 if it may not have one more."""
    if plan.workers[job] >= plan.requests[job].max_workers or plan.is_waiting(job):
        return 0.0
    return plan.compute_gain(job) - plan.compute_pause(job)


class _SurplusJobs:
    """Jobs with surplus, by the cost per GPU of losing a worker; one queue per size of requested workers.

    If a node has no room for workers of some size, it is not checked again for this size in this pass, since bids only
    fall.
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
        plan = self._plan
        if plan.get_surplus(job) <= 0:
            self._prices.pop(job, None)
            return
        price = self._prices[job] = plan.price_worker(job) / plan.gpus[job]
        for queue in self._queues.values():
            heapq.heappush(queue, (price, job))

    def find_node(self, receiver: int, bid: float) -> tuple[int, list[int]] | None:
        """Return a node where a worker of the receiver fits for less than its bid, and the jobs that give workers."""
        size = self._plan.gpus[receiver]
        if size not in self._queues:
            self._queues[size] = sorted((price, job) for job, price in self._prices.items())
        queue = self._queues[size]
        own: tuple[float, int] | None = None
        found = None
        self._allowed[receiver] = False
        while queue and found is None:
            price, job = queue[0]
            # A whole worker is given even if less is needed, and later ones are no cheaper per GPU.
            if price >= bid:
                break
            if self._prices.get(job) != price:
                heapq.heappop(queue)  # its price has changed, and it was queued again
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
        plan = self._plan
        if self._prices[job] * plan.gpus[job] >= bid:
            return None
        nodes = self._nodes.get((job, size))
        if nodes is None:
            nodes = self._nodes[job, size] = sorted(plan.of_job[job], key=lambda node: (plan.free[node], -node))
        while nodes and self._examined < _MAX_NODES_EXAMINED:
            node = nodes[-1]
            # A job that does not grow into free GPUs has its reasons.
            if job in plan.on_node[node] and plan.free[node] < size:
                self._examined += 1
                limit = bid - _LEAST_DIFFERENCE
                victims = plan.choose_victims(node, size - plan.free[node], self._allowed, limit)
                if victims is not None:
                    return node, victims
            nodes.pop()
        return None
