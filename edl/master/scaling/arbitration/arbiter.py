"""Who gets which GPUs, decided in passes over one plan until a pass changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edl.master.scaling.arbitration.admission import admit_pending_jobs
from edl.master.scaling.arbitration.exchange import exchange_workers
from edl.master.scaling.arbitration.gpu_pool import GpuPool
from edl.master.scaling.arbitration.growth import grow_jobs
from edl.master.scaling.arbitration.plan import AllocationPlan
from edl.master.scaling.arbitration.repair import release_impossible_workers
from edl.master.scaling.arbitration.requests import ArbitrationSettings, JobRequest

__all__ = ["Allocation", "arbitrate"]


@dataclass(frozen=True)
class Allocation:
    """Where every job's workers should be.

    Attributes:
        placements: job -> node -> workers; jobs and nodes without workers are left out.
        pending: jobs that wait for their minimum, first those that come first.
        changes: job -> why it has other workers than before, in a few words.
        steps: workers that were placed on the way, at most as many as there are GPUs.
        settled: nothing more would be moved from here; False if the steps were used up before.
    """

    placements: Mapping[str, Mapping[str, int]]
    pending: tuple[str, ...]
    changes: Mapping[str, str]
    steps: int
    settled: bool

    def count_workers(self, job: str) -> int:
        """Return how many workers a job has.

        Args:
            job: its name.
        """
        return sum(self.placements.get(job, {}).values())


def arbitrate(
    nodes: Mapping[str, int],
    jobs: Sequence[JobRequest],
    placements: Mapping[str, Mapping[str, int]],
    settings: ArbitrationSettings | None = None,
) -> Allocation:
    """Decide which job has how many workers on which node.

    A pass gives pending jobs their minimum, then free GPUs to whom they are worth most, then moves workers between
    jobs. Every move gains more than it costs, so that passes end; the last changes nothing, as would another decision:
    the arbiter run on its own result moves nothing.

    Args:
        nodes: name -> GPUs that jobs may use there.
        jobs: all of them, whether they have workers or not.
        placements: job -> node -> workers that it has now; nodes that are not in `nodes` are lost, and jobs that are
            not in `jobs` have ended.
        settings: what the decision goes by; None for the defaults.

    Raises:
        ValueError: two jobs have one name, or a node has a negative number of GPUs.
    """
    requests = sorted(jobs, key=lambda job: (-job.priority, job.submitted_s, job.name))
    if len({request.name for request in requests}) < len(requests):
        raise ValueError("two jobs have one name")
    names = sorted(nodes)
    if any(nodes[name] < 0 for name in names):
        raise ValueError("a node has a negative number of GPUs")
    numbers = {name: number for number, name in enumerate(names)}
    pool = GpuPool([nodes[name] for name in names], [request.gpus for request in requests])
    plan = AllocationPlan(requests, settings or ArbitrationSettings(), pool)
    before: list[dict[str, int]] = []
    for number, request in enumerate(requests):
        places = placements.get(request.name, {})
        for node, count in sorted(places.items()):
            if node not in numbers:
                plan.record_move(number, "its node is gone")
                continue
            if count > 0:
                pool.add_workers(number, numbers[node], count)
        before.append(dict(places))
    former = release_impossible_workers(plan)
    settled = False  # each pass but two places a worker, and there are as many as GPUs to place
    while not settled:
        # Only a pass that every job enters unmoved, as it would another decision, shows that this would change nothing.
        fresh = not any(plan.has_moved(job) for job in range(len(requests)))
        served = admit_pending_jobs(plan, former)
        grown = grow_jobs(plan)
        exchanged = exchange_workers(plan)
        settled = fresh and not (served or grown or exchanged)
        plan.begin_pass()
    return _describe(plan, names, before)


def _describe(plan: AllocationPlan, names: Sequence[str], before: Sequence[Mapping[str, int]]) -> Allocation:
    after = [dict(plan.pool.describe_placement(job, names)) for job in range(len(plan.requests))]
    return Allocation(
        placements={request.name: after[job] for job, request in enumerate(plan.requests) if after[job]},
        pending=tuple(request.name for job, request in enumerate(plan.requests) if plan.is_waiting(job)),
        changes={
            request.name: plan.reasons[job] or "lost workers, and waits for its minimum"
            for job, request in enumerate(plan.requests)
            if after[job] != before[job]
        },
        steps=plan.steps,
        settled=not plan.exhausted,
    )
