"""The simulated cluster: its day, the policies that share it out, and the ancestor's algorithm as its source has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks._cluster.policies import AncestorAutoscaler, EdlArbiter, GangScheduler, scale_all_jobs
from benchmarks._cluster.simulation import TEACHERS, ClusterView, Placements, Policy, simulate
from benchmarks._cluster.trace import ClusterSize, Submission, make_trace
from edl.master.scaling.arbitration import JobRequest, arbitrate
from edl.master.scaling.throughput import ThroughputModel

SMALL = ClusterSize(nodes=12, seconds=5400.0, load=1.2)


def submission(name: str, least: int, most: int, gpus: int = 1) -> Submission:
    return Submission(name, 0.0, least, least, most, gpus, 0, ThroughputModel(1.0, 0.0), 1e3, 10.0)


POLICIES: dict[str, Callable[[], Policy]] = {
    "EDL": EdlArbiter,
    "gang": GangScheduler,
    "gang at the minimum": lambda: GangScheduler("gang at the minimum", at_minimum=True),
    "ancestor": AncestorAutoscaler,
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_job_is_accounted_for(name: str) -> None:
    """`simulate` itself refuses a policy that gives what is not there."""
    trace = make_trace(SMALL, 1)
    result = simulate(trace, POLICIES[name]())
    assert result.policy == name
    names = {job.name for job in trace.submissions}
    assert result.waits_s.keys() == names
    assert len(result.spans_s) + result.unfinished == len(names)
    for job in trace.submissions:
        if job.name in result.spans_s:
            fastest_s = job.work / job.model.predict_rate(job.max_workers)
            assert result.spans_s[job.name] >= fastest_s, "no job is faster than with all it can take"
    for sample in result.samples:
        assert 0 <= sample.pausing <= sample.jobs
        assert sample.jobs + sample.teachers <= sample.capacity
    assert len(result.samples) == 180


def test_greedy_policies_are_refused() -> None:
    class Greedy(GangScheduler):
        def decide(self, view: ClusterView) -> Placements:
            return {TEACHERS: {node: gpus + 1 for node, gpus in view.capacities.items()}}

    with pytest.raises(AssertionError, match="are given"):
        simulate(make_trace(SMALL, 1), Greedy())


def test_ancestor_never_ends_and_edl_does() -> None:
    """Regression of the ancestor: up to 100% of the GPUs, down above 97%, in turns and for ever."""
    jobs = [(submission("a", 1, 100), 50), (submission("b", 1, 100), 47)]
    assert not scale_all_jobs(jobs, gpu_limit=97, gpu_total=100, max_load=0.97, most_rounds=10_000)[1]
    requests = [JobRequest("a", 1, 100), JobRequest("b", 1, 100)]
    nodes = {"n": 100}
    found = arbitrate(nodes, requests, {"a": {"n": 50}, "b": {"n": 47}})
    assert found.settled
    assert found.steps <= 100
    assert arbitrate(nodes, requests, found.placements).placements == found.placements


def test_elastic_jobs_wait_less() -> None:
    """The reason for all of it, on a small and busy cluster, whatever the seed."""
    size = replace(SMALL, seconds=3 * 3600.0, load=1.5)
    ours = gang = 0.0
    for seed in range(2):
        trace = make_trace(size, seed)
        ours += sum(simulate(trace, EdlArbiter()).waits_s.values())
        gang += sum(simulate(trace, GangScheduler()).waits_s.values())
    assert ours < 0.5 * gang
