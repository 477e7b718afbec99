"""What holds of every decision about who gets what, over clusters that hypothesis draws."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from edl.master.scaling.arbitration import Allocation, ArbitrationSettings, JobRequest, arbitrate
from edl.master.scaling.throughput import ThroughputModel

Placements = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Cluster:
    """What an arbiter is given."""

    nodes: Mapping[str, int]
    jobs: Sequence[JobRequest]
    placements: Placements


@st.composite
def requests(draw: st.DrawFn, name: str, sizes: Sequence[int]) -> JobRequest:
    least = draw(st.integers(0, 5))
    return JobRequest(
        name,
        least,
        least + draw(st.integers(0 if least else 1, 12)),
        gpus=draw(st.sampled_from(sizes)),
        priority=draw(st.integers(0, 2)),
        submitted_s=float(draw(st.integers(0, 3))),
        weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
        model=ThroughputModel(1.0, draw(st.sampled_from([0.0, 0.01, 0.3, 5.0]))),
        remaining=draw(st.none() | st.floats(0, 1e5)),
        pause_s=draw(st.sampled_from([0.0, 10.0, 120.0])),
        age_s=draw(st.sampled_from([0.0, 100.0, 1e5])),
        moves=draw(st.integers(0, 5)),
        waited_s=draw(st.sampled_from([0.0, 7200.0])),
    )


@st.composite
def clusters(draw: st.DrawFn, sizes: Sequence[int] = (1, 2, 4, 8), most_jobs: int = 7) -> Cluster:
    nodes = {f"n{number}": draw(st.integers(0, 8)) for number in range(draw(st.integers(1, 6)))}
    jobs = [draw(requests(f"j{number}", sizes)) for number in range(draw(st.integers(1, most_jobs)))]
    names = [*nodes, "gone"]
    placements = {
        job.name: draw(st.dictionaries(st.sampled_from(names), st.integers(1, 4), max_size=3))
        for job in jobs
        if draw(st.booleans())
    }
    return Cluster(nodes, jobs, placements)


def used_gpus(cluster: Cluster, allocation: Allocation) -> dict[str, int]:
    """GPUs in use, by node."""
    gpus = {job.name: job.gpus for job in cluster.jobs}
    used = dict.fromkeys(cluster.nodes, 0)
    for name, places in allocation.placements.items():
        for node, count in places.items():
            used[node] += count * gpus[name]
    return used


def check(cluster: Cluster, allocation: Allocation) -> None:
    """What holds of every allocation."""
    for node, used in used_gpus(cluster, allocation).items():
        assert used <= cluster.nodes[node], f"{node} has {cluster.nodes[node]} GPUs, {used} are used"
    for job in cluster.jobs:
        count = allocation.count_workers(job.name)
        assert count <= job.max_workers
        assert count >= job.min_workers or count == 0, f"{job.name} runs with {count} of {job.min_workers}"
        assert (job.name in allocation.pending) == (count < job.min_workers)
        assert all(workers > 0 for workers in allocation.placements.get(job.name, {}).values())
    assert allocation.steps <= sum(cluster.nodes.values()), "at most one step a GPU"


MANY = settings(max_examples=20)
IMPATIENT = ArbitrationSettings(patience_s=None)


def below_minimum(jobs: Sequence[JobRequest], allocation: Allocation) -> set[str]:
    """The jobs that do not run."""
    return {job.name for job in jobs if allocation.count_workers(job.name) < job.min_workers}


LOST_GPUS = Cluster(
    {"n": 3},
    [
        JobRequest("wide", 0, 2, 2, priority=1, age_s=0.0),
        JobRequest("flat", 0, 1, model=ThroughputModel(1.0, 0.3), priority=1, pause_s=0.0),
        JobRequest("steep", 0, 1, pause_s=0.0),
    ],
    {"wide": {"n": 2}, "flat": {"n": 1}},
)
"""A decision that has to take workers, whose jobs pause anyway, is not the last word on who pauses for nothing."""


@MANY
@example(LOST_GPUS)
@given(clusters())
def test_own_result_moves_nothing(cluster: Cluster) -> None:
    first = arbitrate(cluster.nodes, cluster.jobs, cluster.placements)
    check(cluster, first)
    again = arbitrate(cluster.nodes, cluster.jobs, first.placements)
    check(cluster, again)
    if first.settled:
        assert again.placements == first.placements
        assert not again.changes
        assert again.steps == 0


@MANY
@given(clusters(), st.randoms(use_true_random=False))
def test_order_of_input_does_not_matter(cluster: Cluster, shuffler: random.Random) -> None:
    nodes, jobs, placements = list(cluster.nodes.items()), list(cluster.jobs), list(cluster.placements.items())
    first = arbitrate(cluster.nodes, cluster.jobs, cluster.placements)
    for items in (nodes, jobs, placements):
        shuffler.shuffle(items)
    turned = {job: dict(reversed(places.items())) for job, places in placements}
    assert arbitrate(dict(nodes), jobs, turned) == first


ENDLESS_PAUSE = Cluster(
    {"n0": 1, "n1": 0},
    [JobRequest("j0", 0, 1), JobRequest("j1", 0, 1, age_s=0.0), JobRequest("j2", 1, 1)],
    {"j1": {"n0": 1}},
)
"""Moving j1 is never worth its pause, and yet its GPU is j2's."""


@MANY
@example(ENDLESS_PAUSE)
@given(clusters(sizes=(1,)))
def test_pending_minima_come_first(cluster: Cluster) -> None:
    """With workers of one GPU it is exact: no surplus is held while a pending minimum fits by reclaiming it."""
    found = arbitrate(cluster.nodes, cluster.jobs, cluster.placements, IMPATIENT)
    if not found.settled:
        return
    free = sum(cluster.nodes.values()) - sum(used_gpus(cluster, found).values())
    surplus = sum(max(0, found.count_workers(job.name) - job.min_workers) for job in cluster.jobs)
    for job in cluster.jobs:
        if job.name in found.pending:
            assert job.min_workers > free + surplus, f"{job.name} would fit"


@MANY
@given(clusters())
def test_who_runs_goes_on(cluster: Cluster) -> None:
    """Nobody is brought below its minimum for another; only lost nodes do that."""
    before = arbitrate(cluster.nodes, cluster.jobs, cluster.placements)
    newcomers = [JobRequest(f"new{number}", 3, 9, 1 + number, priority=9) for number in range(3)]
    after = arbitrate(cluster.nodes, [*cluster.jobs, *newcomers], before.placements)
    for job in cluster.jobs:
        if before.count_workers(job.name) >= job.min_workers:
            assert after.count_workers(job.name) >= job.min_workers


@MANY
@given(clusters(sizes=(1,)), st.integers(1, 6))
def test_minima_start_in_order(cluster: Cluster, running: int) -> None:
    """A job waits only for what runs already, and for those that come before it: by priority, then age."""
    old = cluster.jobs[:running]
    before = arbitrate(cluster.nodes, old, cluster.placements, IMPATIENT)
    after = arbitrate(cluster.nodes, cluster.jobs, before.placements, IMPATIENT)
    assume(before.settled and after.settled)
    runs = {job.name for job in old} - below_minimum(old, before)

    def rank(job: JobRequest) -> tuple[float, float, str]:
        return -job.priority, job.submitted_s, job.name

    for job in cluster.jobs:
        if job.name in after.pending:
            first = [other for other in cluster.jobs if other.name in runs or rank(other) < rank(job)]
            held = sum(other.min_workers for other in first if other.name not in after.pending)
            assert held + job.min_workers > sum(cluster.nodes.values()), f"{job.name} waits for a later job"


@st.composite
def single_gpu_jobs(draw: st.DrawFn) -> tuple[int, list[JobRequest], dict[str, dict[str, int]]]:
    jobs, placements = [], {}
    for number in range(draw(st.integers(1, 3))):
        model = ThroughputModel(1.0, draw(st.sampled_from([0.0, 0.05, 0.4, 3.0])))
        weight = draw(st.sampled_from([0.5, 1.0, 2.0]))
        job = JobRequest(f"j{number}", 1, draw(st.integers(1, 9)), weight=weight, model=model, pause_s=0.0)
        jobs.append(job)
        placements[job.name] = {"n": draw(st.integers(1, job.max_workers))}
    return draw(st.integers(len(jobs), 12)), jobs, placements


@MANY
@given(single_gpu_jobs())
def test_shares_are_the_best_there_are(case: tuple[int, list[JobRequest], dict[str, dict[str, int]]]) -> None:
    """Where moves cost nothing, no other shares have a larger sum of weighted log-speedups."""
    gpus, jobs, placements = case

    def total(counts: tuple[int, ...]) -> float:
        return sum(job.weight * math.log(job.model.predict_rate(n)) for job, n in zip(jobs, counts, strict=True))

    best = max(
        total(counts)
        for counts in itertools.product(*(range(1, job.max_workers + 1) for job in jobs))
        if sum(counts) <= gpus
    )
    found = arbitrate({"n": gpus}, jobs, placements)
    if found.settled:
        assert math.isclose(total(tuple(found.count_workers(job.name) for job in jobs)), best, abs_tol=1e-6)
