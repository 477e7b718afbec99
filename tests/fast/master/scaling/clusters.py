"""Clusters and jobs for the arbiter, drawn by hypothesis, and what must hold of every allocation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from edl.master.scaling.arbitration import Allocation, JobRequest
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
