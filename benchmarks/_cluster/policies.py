"""Policies that distribute the GPUs: EDL's own functions, gang scheduling, and the ancestor's autoscaler."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks._cluster.simulation import TEACHERS, ClusterView, Placements, RunningJob
from benchmarks._cluster.trace import Submission
from edl.master.scaling.allocation_plan import JobRequest
from edl.master.scaling.arbitration import arbitrate
from edl.master.scaling.workers import (
    EXPLORE_FACTOR,
    GIVE_BACK_BELOW,
    MIN_EFFICIENCY,
    MIN_SAMPLES,
    ThroughputHistory,
    ThroughputModel,
    WorkerObservation,
    fit_throughput,
)

__all__ = ["AncestorAutoscaler", "EdlArbiter", "GangScheduler", "scale_all_jobs"]


def find_useful_limit(observation: WorkerObservation) -> int:
    """Return the most workers that a job may get now: those known to help, and one step of exploration."""
    low, now, high = observation.min_workers, observation.workers, observation.max_workers
    known = observation.history.list_known_sizes(observation.now_s)
    model = fit_throughput(observation.history, observation.now_s)
    if model is None:
        return min(high, max(now, low))
    record = observation.history.sizes.get(now)
    measured = record is not None and now in known and record.samples >= MIN_SAMPLES
    limit = float(max(known) * (EXPLORE_FACTOR if measured else 1))
    if len(known) > 1:
        if model.b:  # up to the size at which a worker does `MIN_EFFICIENCY` of its work alone
            useful = ((model.a + model.b) / MIN_EFFICIENCY - model.a) / model.b + 1e-9
            limit = min(limit, max(1.0, useful))
        if model.compute_efficiency(max(now, 1)) >= GIVE_BACK_BELOW:
            limit = max(limit, now)
    return min(high, max(low, 1, int(limit), 0 if measured else now))


class FreeGpus:
    """Free GPUs of each node, for a scheduler that chooses the fullest node with room for a worker."""

    def __init__(self, capacities: Mapping[str, int]) -> None:
        self.free = dict(capacities)
        self._buckets: list[list[str]] = [[] for _ in range(max(capacities.values(), default=0) + 1)]
        for node in sorted(capacities):
            heapq.heappush(self._buckets[capacities[node]], node)

    def take(self, node: str, gpus: int) -> None:
        """Take GPUs of a node; a negative number frees them."""
        self.free[node] -= gpus
        heapq.heappush(self._buckets[self.free[node]], node)

    def find_node(self, gpus: int) -> str | None:
        """Return the node with the fewest free GPUs among those with enough."""
        for count in range(gpus, len(self._buckets)):
            bucket = self._buckets[count]
            while bucket:
                if self.free[bucket[0]] == count:
                    return bucket[0]
                heapq.heappop(bucket)
        return None

    def place(self, workers: int, gpus: int) -> dict[str, int] | None:
        """Place all of the workers or none, and return their number by node."""
        places: dict[str, int] = {}
        for _ in range(workers):
            node = self.find_node(gpus)
            if node is None:
                for taken, count in places.items():
                    self.take(taken, -count * gpus)
                return None
            self.take(node, gpus)
            places[node] = places.get(node, 0) + 1
        return places

    def fill(self, most: int) -> dict[str, int]:
        """Place as many borrowers as fit, with a GPU each: low-priority pods that the scheduler can preempt at once."""
        places: dict[str, int] = {}
        while most and (node := self.find_node(1)) is not None:
            self.take(node, 1)
            places[node] = places.get(node, 0) + 1
            most -= 1
        return places


@dataclass
class EdlArbiter:
    """EDL's policy, from `edl.master.scaling`: what each job can use according to its history, and the arbiter."""

    name: str = "EDL"
    decision_s: float = 30.0
    histories: dict[str, ThroughputHistory] = field(default_factory=dict)
    recorded_s: dict[str, float] = field(default_factory=dict)

    def needs(self, submission: Submission) -> int:
        return submission.min_workers

    def decide(self, view: ClusterView) -> Placements:
        requests = [self._request(job, view.now_s) for job in view.jobs.values()]
        requests.append(JobRequest(TEACHERS, 0, view.most_teachers, priority=-1, weight=0.2, pause_s=0.0))
        places: dict[str, Mapping[str, int]] = {name: job.places for name, job in view.jobs.items()}
        places[TEACHERS] = view.teachers
        found = arbitrate(view.capacities, requests, places)
        return {name: dict(nodes) for name, nodes in found.placements.items()}

    def _request(self, job: RunningJob, now_s: float) -> JobRequest:
        submission, name = job.submission, job.submission.name
        history = self.histories.get(name) or ThroughputHistory()
        if job.rate is not None:
            history = self.histories[name] = history.record_rate(job.workers, job.rate, now_s)
        age_s = now_s - job.started_s if job.started_s is not None else 0.0
        observation = WorkerObservation(
            workers=job.workers,
            min_workers=submission.min_workers,
            max_workers=submission.max_workers,
            history=history,
            now_s=now_s,
            remaining=job.left,
            pause_s=submission.pause_s,
            age_s=age_s,
            moves=job.moves,
        )
        model = fit_throughput(history, now_s)
        return JobRequest(
            name=name,
            min_workers=submission.min_workers,
            max_workers=find_useful_limit(observation),
            gpus=submission.gpus,
            priority=submission.priority,
            submitted_s=submission.at_s,
            model=model or ThroughputModel(1.0, 0.0),
            remaining=None if model is None else job.left,
            pause_s=submission.pause_s,
            age_s=age_s,
            moves=job.moves,
            waited_s=job.waited_s,
        )


@dataclass
class GangScheduler:
    """Gives a job its fixed number of workers or none, by priority, then age. Jobs that fit may go first (backfill).

    This is what Kueue's BestEffortFIFO and Volcano's gang plugin do. A job that loses a worker loses all of them, and
    waits again.

    Attributes:
        at_minimum: Jobs ask for the minimum that they would have if they were elastic, instead of what users request.
    """

    name: str = "gang"
    decision_s: float = 30.0
    at_minimum: bool = False

    def needs(self, submission: Submission) -> int:
        return submission.min_workers if self.at_minimum else submission.requested

    def decide(self, view: ClusterView) -> Placements:
        free = FreeGpus(view.capacities)
        found: Placements = {}
        waiting: list[RunningJob] = []
        for name, job in view.jobs.items():
            if job.workers == self.needs(job.submission):
                found[name] = dict(job.places)
                for node, count in job.places.items():
                    free.take(node, count * job.submission.gpus)
            else:
                waiting.append(job)
        waiting.sort(key=lambda job: (-job.submission.priority, job.submission.at_s))
        refused: set[tuple[int, int]] = set()
        for job in waiting:
            size = job.submission.gpus, self.needs(job.submission)
            if any(gpus <= size[0] and workers <= size[1] for gpus, workers in refused):
                continue
            places = free.place(size[1], size[0])
            if places is None:
                refused.add(size)
            else:
                found[job.submission.name] = places
        found[TEACHERS] = free.fill(view.most_teachers)
        return found


def scale_all_jobs(
    jobs: Sequence[tuple[Submission, int]], gpu_limit: int, gpu_total: int, max_load: float, most_rounds: int
) -> tuple[dict[str, int], bool]:
    """Run the ancestor's `scaleAllJobsDryRun` for GPUs (paddle-operator's `pkg/autoscaler/autoscaler.go`).

    Jobs are sorted by their fulfilment before the dry run, (now - min) / (max - min). In each round, every job in this
    order gets one more instance while GPUs are left. Then, in reverse order, every job gives one back if it has more
    than its maximum, or if more than `max_load` of the GPUs are requested and it has more than its minimum. The dry run
    ends when a round changes nothing.

    Args:
        jobs: The submissions, and their current parallelism.
        gpu_limit: GPUs that all pods request, including pods that wait for a node.
        gpu_total: GPUs in the cluster.
        max_load: The ancestor's flag `max_load_desired`, 0.97 by default.
        most_rounds: Largest number of rounds; the original has no such limit.

    Returns:
        The change in the number of instances by job, and whether the dry run ended.
    """

    def fulfilment(submission: Submission, now: int) -> float:
        spread = submission.max_workers - submission.min_workers
        return (now - submission.min_workers) / spread if spread else 1.0

    order = sorted(
        ((submission, now) for submission, now in jobs if submission.max_workers > submission.min_workers),
        key=lambda job: (fulfilment(*job), job[0].gpus, job[0].name),
    )
    change = {submission.name: 0 for submission, _ in order}
    for _ in range(most_rounds):
        changed = False
        for submission, now in order:
            planned, by = now + change[submission.name], 0
            if planned >= submission.max_workers:
                by = submission.max_workers - planned
            elif gpu_total - gpu_limit >= submission.gpus:
                by = 1
            change[submission.name] += by
            gpu_limit += by * submission.gpus
            changed = changed or by != 0
        for submission, now in reversed(order):
            planned, by = now + change[submission.name], 0
            overloaded = gpu_limit > int(gpu_total * max_load)
            if planned > submission.max_workers or (overloaded and planned > submission.min_workers):
                by = -1
            change[submission.name] += by
            gpu_limit += by * submission.gpus
            changed = changed or by != 0
        if not changed:
            return change, True
    return change, False


@dataclass
class AncestorAutoscaler:
    """The ancestor's autoscaler, which runs every 30 s, on top of Kubernetes' own scheduler.

    A job starts with its minimum of pods, which wait for nodes one by one. It trains with the pods that run, if they
    are at least its minimum. The desired load is 1.0 here, the default in the ancestor's code. With the flag's default
    of 0.97, the dry run goes up and down for ever if a job could use more GPUs than there are; `endless` counts this.
    """

    name: str = "ancestor"
    decision_s: float = 30.0
    parallelism: dict[str, int] = field(default_factory=dict)
    decisions: int = 0
    endless: int = 0

    def needs(self, submission: Submission) -> int:
        return submission.min_workers

    def decide(self, view: ClusterView) -> Placements:
        self.parallelism = {
            name: self.parallelism.get(name, job.submission.min_workers) for name, job in view.jobs.items()
        }
        total = sum(view.capacities.values())
        asked = sum(self.parallelism[name] * job.submission.gpus for name, job in view.jobs.items())
        # If every job has a running pod, only running jobs are scaled.
        pending = any(not job.workers for job in view.jobs.values())
        scaled = [(job.submission, self.parallelism[name]) for name, job in view.jobs.items() if pending or job.workers]
        change, _ = scale_all_jobs(scaled, asked, total, 1.0, most_rounds=10 * max(1, total))
        self.decisions += 1
        self.endless += not scale_all_jobs(scaled, asked, total, 0.97, most_rounds=300)[1]
        for name, by in change.items():
            self.parallelism[name] += by
        return self._schedule(view)

    def _schedule(self, view: ClusterView) -> Placements:
        """Schedule like Kubernetes: end surplus pods, place waiting pods by priority and age, then place borrowers."""
        free = FreeGpus(view.capacities)
        found: Placements = {}
        for name, job in view.jobs.items():
            places = dict(job.places)
            for _ in range(job.workers - self.parallelism[name]):
                node = max(places, key=lambda node: (places[node], node))
                places[node] -= 1
                if not places[node]:
                    del places[node]
            for node, count in places.items():
                free.take(node, count * job.submission.gpus)
            found[name] = places
        by_age = sorted(view.jobs.values(), key=lambda job: (-job.submission.priority, job.submission.at_s))
        for job in by_age:
            places = found[job.submission.name]
            for _ in range(self.parallelism[job.submission.name] - sum(places.values())):
                place = free.find_node(job.submission.gpus)
                if place is None:
                    break
                free.take(place, job.submission.gpus)
                places[place] = places.get(place, 0) + 1
        found[TEACHERS] = free.fill(view.most_teachers)
        return found
